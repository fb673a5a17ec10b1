"""Rewritten programs that the calls of one function share.

A function that is called several times on values of the same form is rewritten once, and every call
runs the rewritten program. Its arguments are the arrays of its operands: of a lookup the rows at
the smaller batch, of a concatenation the arrays of its parts. Its events are recorded in the report
at each call, or at the end for all calls that record the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.report.recorder import Broadcast, Log
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.equations import identity
from ikbo_jax.rewrite.values.forms import (
    Nodes,
    can_pass,
    form,
    inside_of,
    skeleton,
    with_all_inside,
    with_inside,
)
from ikbo_jax.rewrite.values.jaxprs import call_params, trace, with_constants_last
from ikbo_jax.rewrite.values.lineage import Deferred, base_of, has_lineage, is_plain, origins_of
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Describes a result of a rewritten program, or a value inside a result.

    If several of these are the same value, one object describes all of them: they become one value
    of the caller, which is materialised once.

    Attributes:
      value: a skeleton of the value inside the program, whose trace has ended.
      operand: position of the operand's node that is returned as it is; None for other values.
      inside: the values inside this one.
      number: position among the arrays that the program computes; -1 if it is none of them.
    """

    value: Any
    operand: int | None
    inside: tuple[Any, ...]
    number: int

    def returned(
        self, nodes: Sequence[Any], arrays: Sequence[Any], origins_of: Any, known: dict[int, Any]
    ) -> Any:
        """Returns the value of a call; `known` holds values of this call, by description."""
        if self.operand is not None:
            return nodes[self.operand]
        if id(self) not in known:
            x = self.value
            if self.inside:
                inside = [y.returned(nodes, arrays, origins_of, known) for y in self.inside]
                x = with_inside(x, inside)
            elif is_plain(x):
                x = arrays[self.number]
            else:
                x = dataclasses.replace(x, base=arrays[self.number], origins=origins_of(x.origins))
            known[id(self)] = x
        return known[id(self)]


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """Holds a rewritten program. It takes operands' arrays, materialised operands, and constants.

    Positions count the operands' nodes as `Nodes` does.

    Attributes:
      params: parameters of the equation that calls it.
      consts: the arrays that it closes over.
      inputs: positions of the arrays and lookups whose arrays or bases it takes.
      materialised: positions of the values that it also takes materialised.
      stand_ins: by position of a lookup, the stand-in for the lookup's origins.
      results: its results.
      log: the events to record at each call.
    """

    params: dict[str, Any]
    consts: list[Any]
    inputs: list[int]
    materialised: list[int]
    stand_ins: dict[int, Any]
    results: list[Result]
    log: Log


@dataclasses.dataclass
class _Calls:
    """Holds the history of calls of one program on values of one form.

    Attributes:
      alive: the objects whose identities the key holds, so that these stay unique.
      materialised: positions of nodes that were materialised before or during the first call.
      failed: whether the program cannot be rewritten by itself.
      asked: positions of the operands whose equations the rewriting would have to know.
        `Scope.seen` holds the arrays at these positions in earlier calls. Calls with the same
        arrays share a program that closes over them.
    """

    alive: Any
    materialised: list[int]
    failed: bool = False
    asked: list[int] = dataclasses.field(default_factory=list)


def call(
    ctx: Context,
    eqn: Any,
    operands: Sequence[Any],
    inline: Callable[[], list[Any]],
    asked: Sequence[int] = (),
) -> list[Any]:
    """Runs a call by a rewritten program that calls share wherever that is possible.

    `inline` computes the results in place. The program closes over the operands at the positions
    `asked`, too: only calls with the same objects there share it.
    """
    fixed = [
        n in asked or _is_fixed(x, v.aval)
        for n, (x, v) in enumerate(zip(operands, eqn.invars, strict=True))
    ]
    forms = [identity(x) if f else form(x) for x, f in zip(operands, fixed, strict=True)]
    jaxpr = eqn.params["jaxpr"]
    key = (id(jaxpr), *forms)
    rewritten = ctx.scope.find("programs", key)
    if rewritten is not None:
        return _called(ctx, eqn, operands, rewritten)
    if not all(map(can_pass, operands)):
        return inline()
    calls = ctx.scope.find("calls", key)
    # The key names the fixed operands, and lookups by their lineages.
    named = [x for x, f in zip(operands, fixed, strict=True) if f]
    lookups = filter(has_lineage, with_all_inside(operands))
    first, values = calls is None, [*named, *(x.lineage.index for x in lookups)]
    if calls is None:
        calls = _Calls((jaxpr, named), _built(ctx, operands))
        ctx.scope.owner(values).calls[key] = calls
    elif ctx.scope.find("seen", (key, *(id(operands[n]) for n in calls.asked))):
        return call(ctx, eqn, operands, inline, (*asked, *calls.asked))
    # A program that is called once is interpreted inline.
    if id(jaxpr) in ctx.programs.repeated if first else not calls.failed:
        rewritten, found = _rewritten(ctx, eqn, operands, fixed, calls.materialised)
        # Inside a program, a lookup that it closes over would be copied at each call.
        calls.asked = sorted(found) if all(is_plain(operands[n]) for n in found) else []
    if rewritten is None:
        if arrays := [operands[n] for n in calls.asked]:
            ctx.scope.owner([*values, *arrays]).seen[(key, *map(id, arrays))] = arrays
        results = inline()
        calls.materialised = _built(ctx, operands)
        # The first inline call may create the missing lineage, so the second call tries again.
        calls.failed = not first
        return results
    # The results hold lineages, maybe of this scope.
    held = with_all_inside([x.value for x in rewritten.results])
    ctx.scope.owner([*values, *rewritten.consts, *held]).programs[key] = rewritten
    return _called(ctx, eqn, operands, rewritten)


def _is_fixed(operand: Any, aval: Any) -> bool:
    """Whether the rewriting depends on facts about this operand, so that the key names the operand.

    Such operands are indices and masks, with facts from their equations, and constant numbers.
    """
    is_variable = isinstance(operand, (jax.core.Tracer, Deferred))
    return _is_index(aval) or not is_variable and np.size(operand) == 1


def _built(ctx: Context, operands: Sequence[Any]) -> list[int]:
    """Finds the positions of deferred nodes of the operands that are already materialised."""
    nodes = with_all_inside(operands)
    return [n for n, x in enumerate(nodes) if not is_plain(x) and ctx.scope.is_built(x)]


def _called(ctx: Context, eqn: Any, operands: Sequence[Any], program: Rewritten) -> list[Any]:
    """Calls a rewritten program."""
    nodes = with_all_inside(operands)
    origins_of_result = _recorded(ctx, eqn, nodes, program)
    inputs = [base_of(nodes[n]) for n in program.inputs]
    inputs += [*(ctx.build(nodes[n]) for n in program.materialised), *program.consts]
    arrays, known = eqn.primitive.bind(*inputs, **program.params), dict[int, Any]()
    return [x.returned(nodes, arrays, origins_of_result, known) for x in program.results]


def _recorded(
    ctx: Context, eqn: Any, nodes: Sequence[Any], program: Rewritten
) -> Callable[[frozenset], frozenset]:
    """Records a call of a rewritten program; says which broadcasts stand-ins in it stand for."""
    origins = {stand_in: nodes[n].origins for n, stand_in in program.stand_ins.items()}
    for stand_in, found in origins.items():
        if stand_in in ctx.programs.divisions:
            # The program has a sharding constraint on this operand, or on what it computes from it.
            division = ctx.programs.divisions[stand_in]
            ctx.programs.divisions.update(dict.fromkeys(found, division))

    def materialise(node: int, place: Any, reason: str, copied: bool) -> Any:
        return ctx.materialise(place, nodes[node], reason, copied=copied)

    with ctx.recorder.inside(eqn):
        return program.log.replay(ctx.recorder, eqn, origins, materialise).origins


def _rewritten(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], materialised: list[int]
) -> tuple[Rewritten | None, set[int]]:
    """Rewrites the program of a call by itself; None if the call must be inline.

    Also returns the positions of operands whose hidden equations the rewriting asked for.
    """
    program = eqn.params["jaxpr"]
    if any(_is_index(v.aval) and not _is_of_a_loop(program, v) for v in program.outvars):
        return None, set()
    nodes = Nodes.of(operands)
    materialised = [n for n in materialised if not fixed[nodes.roots[n]]]
    while True:
        found, asked, built = _with_materialised(ctx, eqn, nodes, fixed, materialised)
        if found is None or built == materialised:
            return found, asked
        # The caller materialises these values, once for all calls.
        materialised = built


#: Equations of integers of whose results nothing is known if nothing is known of an operand.
_UNKNOWN_IF_ONE_IS = ("add", "broadcast_in_dim", "convert_element_type", "mul", "reshape", "sub")


def _is_of_a_loop(program: Any, v: Any, around: Any = None) -> bool:
    """Whether a loop computes a program's integers, so that no facts are known of them in place.

    This is so for `jnp.searchsorted`. If another program calls this one, `around` holds that
    program, the operands of the call, and the same triple for that program's own caller.
    """
    if type(v) is core.Literal or v.aval.dtype.kind not in "iu":
        return False
    if v in program.invars:
        operand = around and around[1][program.invars.index(v)]
        return around is not None and _is_of_a_loop(around[0], operand, around[2])
    eqn = next((x for x in program.eqns if v in x.outvars), None)
    name = "" if eqn is None else eqn.primitive.name
    if eqn is None or name in ("scan", "while"):
        return eqn is not None
    if name == "jit":
        inner = eqn.params["jaxpr"]
        result = inner.outvars[eqn.outvars.index(v)]
        return _is_of_a_loop(inner, result, (program, eqn.invars, around))
    of_operands = (_is_of_a_loop(program, x, around) for x in eqn.invars)
    if name == "select_n":
        next(of_operands)
        return all(of_operands)
    return name in _UNKNOWN_IF_ONE_IS and any(of_operands)


def _is_index(aval: Any) -> bool:
    """Whether a value may be an index or a mask."""
    return aval.ndim > 0 and getattr(aval.dtype, "kind", "") in "ib"


def _with_materialised(
    ctx: Context, eqn: Any, nodes: Nodes, fixed: Sequence[bool], materialised: list[int]
) -> tuple[Rewritten | None, set[int], list[int]]:
    """Does what `_rewritten` does, as if the caller materialised some values.

    Also returns the positions of the values that the program materialises.
    """
    jaxpr, log = eqn.params["jaxpr"], Log()
    varying = [n for n, root in enumerate(nodes.roots) if not fixed[root]]
    inputs = [n for n in varying if not nodes.inside[n]]
    stand_ins = {n: Broadcast("", "", False) for n in inputs if origins_of(nodes.values[n])}
    # What is found out while the program is traced: its results, None if it creates lineages; the
    # positions of the operands whose hidden equations it asked for, and of the values that it
    # materialises. Nothing of it holds arrays of this trace.
    found: list[Any] = []

    def program(*arrays: Any) -> list[Any]:
        inner, values = ctx.inner(log), list(nodes.values)
        inner.same = {id(x): id(x) for n, x in enumerate(nodes.values) if n not in varying}
        given = dict(zip(inputs, arrays, strict=False))
        # Values inside others come after them.
        for n in reversed(varying):
            x, inside = nodes.values[n], nodes.inside[n]
            if inside:
                values[n] = with_inside(x, values[inside.start : inside.stop])
            elif is_plain(x):
                values[n] = given[n]
            else:
                origins = frozenset([stand_ins[n]]) if n in stand_ins else frozenset()
                values[n] = dataclasses.replace(x, base=given[n], origins=origins)
            name = ctx.scope.primitive(x)
            if not isinstance(x, jax.core.Tracer) or name is not None:
                # A product with a concatenation multiplies the terms of a part that is a sum. In
                # place, this saves more than a shared program.
                inner.scope.hide(values[n], name or "" if nodes.roots[n] != n else "")
        for n, array in zip(materialised, arrays[len(inputs) :], strict=True):
            inner.scope.outer_arrays[id(values[n])] = array
        log.operands.update((id(x), n) for n, x in enumerate(values) if not is_plain(x))
        returned = inner.run_closed(jaxpr, values[: len(fixed)], None)
        if not all(map(can_pass, returned)):
            raise NotCovered("a result of a call that is neither an array nor a lookup")
        of_operands, computed = {id(x): n for n, x in enumerate(values)}, list[Any]()
        known: dict[int, Result] = {}
        results = [_described(x, of_operands, computed, known) for x in returned]
        asked, built = inner.scope.asked_hidden, inner.scope.built()
        # Skeletons of results hold their lineages, and so the indices of these.
        found[:] = [
            None if inner.scope.has_lineages() else results,
            {nodes.roots[n] for n, x in enumerate(values) if id(x) in asked},
            [n for n in varying if id(values[n]) in built],
        ]
        return computed

    # dtypes come from the jaxpr: Python numbers among the operands have weak types.
    arrays = [(base_of(nodes.values[n]), n) for n in inputs]
    arrays += [(nodes.values[n], n) for n in materialised]
    avals = []
    for x, n in arrays:
        aval = eqn.invars[nodes.roots[n]].aval
        avals.append(jax.ShapeDtypeStruct(shape_of(x), aval.dtype, weak_type=aval.weak_type))
    try:
        traced = without_dead_code(trace(program, avals, jaxpr))
    except NotCovered:
        return None, set(), []
    names = ("in_shardings", "in_layouts", "out_shardings", "out_layouts")
    is_placed = any(len(set(eqn.params.get(name, ()))) > 1 for name in names)
    results, asked, built = found
    if traced.effects or is_placed or results is None:
        return None, set(), []
    if asked:
        return None, asked, []
    closed, consts = with_constants_last(traced), traced.consts
    counts = {"in": len(closed.invars), "out": len(closed.outvars)}
    params = call_params(eqn.params, closed, counts)
    return Rewritten(params, consts, inputs, materialised, stand_ins, results, log), asked, built


def _described(
    x: Any, of_operands: dict[int, int], arrays: list[Any], known: dict[int, Result]
) -> Result:
    """Describes a result of a program; appends what it computes to `arrays`.

    `of_operands` are the positions of operands, and `known` the descriptions of results, by the
    identities of values.
    """
    if id(x) not in known:
        operand, number, inside = of_operands.get(id(x)), -1, tuple[Result, ...]()
        if operand is None:
            inside = tuple([_described(y, of_operands, arrays, known) for y in inside_of(x)])
        if operand is None and not inside:
            number = len(arrays)
            arrays.append(base_of(x))
        known[id(x)] = Result(skeleton(x), operand, inside, number)
    return known[id(x)]
