"""Rewritten programs that the calls of one function share.

A function that is called several times on values of the same form is rewritten once, and every call
runs the rewritten program. Its arguments are the arrays of its operands: of a lookup the rows at
the smaller batch, of a concatenation the arrays of its parts. Its events are recorded in the report
at each call, or at the end for all calls that record the same.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.report.log import Log
from ikbo_jax.rewrite.values.dead_code import without_dead_code
from ikbo_jax.rewrite.values.equations import identity
from ikbo_jax.rewrite.values.forms import (
    Nodes,
    can_pass,
    form,
    skeleton,
    with_all_inside,
    with_inside,
)
from ikbo_jax.rewrite.values.jaxprs import call_params, trace, with_constants_last
from ikbo_jax.rewrite.values.lineage import (
    Deferred,
    Lazy,
    base_of,
    has_lineage,
    is_plain,
    origins_of,
)
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True)
class Result:
    """Describes a result of a rewritten program, or a value inside a result.

    Attributes:
      value: a skeleton of the value inside the program, whose trace has ended.
      operand: position of the operand's node that is returned as it is; None for other values.
      like: position of the last node of the results that is the same value. All of these become
        one value of the caller, which is materialised once.
      inside: positions of the nodes inside this one.
      number: position among the arrays that the program computes; None for a value with values
        inside, and for one that is returned as it is.
    """

    value: Any
    operand: int | None
    like: int
    inside: range
    number: int | None


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """Holds a rewritten program. It takes operands' arrays, materialised operands, and constants.

    Positions count the operands' nodes as `Nodes` does.

    Attributes:
      params: parameters of the equation that calls it.
      consts: the arrays that it closes over.
      inputs: positions of the arrays and lookups whose arrays or bases it takes.
      materialised: positions of the values that it also takes materialised.
      stand_ins: positions of lookups, each with the stand-in for the lookup's origins.
      results: its results, and the values inside of them.
      count: the number of results.
      log: the events to record at each call.
    """

    params: dict[str, Any]
    consts: list[Any]
    inputs: list[int]
    materialised: list[int]
    stand_ins: list[tuple[int, Any]]
    results: list[Result]
    count: int
    log: Log

    def returned(
        self, nodes: Sequence[Any], arrays: Sequence[Any], origins: Sequence[frozenset]
    ) -> list[Any]:
        """Returns the results of a call.

        `arrays` are what the program computed; `origins` are the broadcasts that each of `results`
        stems from.
        """
        values: list[Any] = [None] * len(self.results)
        for n in range(len(values) - 1, -1, -1):
            result = self.results[n]
            if result.operand is not None:
                values[n] = nodes[result.operand]
            elif result.like > n:
                values[n] = values[result.like]
            elif result.number is not None:
                x, array = result.value, arrays[result.number]
                if not is_plain(x):
                    array = Lazy(array, x.shape, x.lineage, x.axis, origins[n])
                values[n] = array
            else:
                inside = result.inside
                values[n] = with_inside(result.value, values[inside.start : inside.stop])
        return values[: self.count]


@dataclasses.dataclass
class _Calls:
    """Holds the history of calls of one program on values of one form.

    Attributes: alive: the objects whose identities the key holds, so that these stay unique.
    materialised: positions of nodes that were materialised before or during the first call. failed:
    whether the program cannot be rewritten by itself. asked: positions of the operands whose
    equations the rewriting would have to know. `Scope.seen` holds the arrays at these positions in
    earlier calls. Calls with the same arrays share a program that closes over them.
    """

    alive: Any
    materialised: list[int]
    failed: bool = False
    asked: list[int] = dataclasses.field(default_factory=list)


def call(
    ctx: Context,
    eqn: Any,
    operands: Sequence[Any],
    fixed: list[bool],
    inline: Callable[[], list[Any]],
) -> list[Any]:
    """Runs a call by a rewritten program that calls share wherever that is possible.

    `fixed` says for each operand whether the program closes over it: only calls with the same
    object there share the program. `inline` computes the results in place.
    """
    forms = [identity(x) if f else form(x) for x, f in zip(operands, fixed, strict=True)]
    key = (id(eqn.params["jaxpr"]), *forms)
    rewritten = ctx.scope.find("programs", key)
    if rewritten is not None:
        return _called(ctx, eqn, operands, rewritten)
    if not all(map(can_pass, operands)):
        return inline()
    return _called_without_program(ctx, eqn, operands, fixed, key, inline)


def is_fixed(operand: Any, index: bool) -> bool:
    """Whether the rewriting depends on facts about this operand, so that the key names the operand.

    Such operands are indices and masks, with facts from their equations, and constant numbers.
    """
    if index or isinstance(operand, (jax.core.Tracer, Deferred)):
        return index
    return np.size(operand) == 1


def _called_without_program(
    ctx: Context,
    eqn: Any,
    operands: Sequence[Any],
    fixed: list[bool],
    key: Any,
    inline: Callable[[], list[Any]],
) -> list[Any]:
    """Runs a call whose program is not rewritten by itself yet."""
    jaxpr, calls = eqn.params["jaxpr"], ctx.scope.find("calls", key)
    # The key names the fixed operands, and lookups by their lineages.
    named = [x for x, f in zip(operands, fixed, strict=True) if f]
    lookups = filter(has_lineage, with_all_inside(operands))
    first, values = calls is None, [*named, *(x.lineage.index for x in lookups)]
    if calls is None:
        calls = _Calls((jaxpr, named), _built(ctx, operands))
        ctx.scope.owner(values).calls[key] = calls
    elif ctx.scope.find("seen", (key, *(id(operands[n]) for n in calls.asked))):
        closed_over = [f or n in calls.asked for n, f in enumerate(fixed)]
        return call(ctx, eqn, operands, closed_over, inline)
    rewritten = None
    # A program that is called once is interpreted inline.
    if id(jaxpr) in ctx.programs.repeated if first else not calls.failed:
        rewritten, asked = _rewritten(ctx, eqn, operands, fixed, calls.materialised)
        # Inside a program, a lookup that it closes over would be copied at each call.
        calls.asked = sorted(asked) if all(is_plain(operands[n]) for n in asked) else []
    if rewritten is None:
        if arrays := [operands[n] for n in calls.asked]:
            ctx.scope.owner([*values, *arrays]).seen[(key, *map(id, arrays))] = arrays
        results = inline()
        calls.materialised = _built(ctx, operands)
        # The first inline call may create the missing lineage, so the second call tries again.
        calls.failed = not first
        return results
    ctx.scope.owner([*values, *rewritten.consts]).programs[key] = rewritten
    return _called(ctx, eqn, operands, rewritten)


def _built(ctx: Context, operands: Sequence[Any]) -> list[int]:
    """Finds the positions of deferred nodes of the operands that are already materialised."""
    nodes = with_all_inside(operands)
    return [n for n, x in enumerate(nodes) if not is_plain(x) and ctx.scope.is_built(x)]


def _called(ctx: Context, eqn: Any, operands: Sequence[Any], program: Rewritten) -> list[Any]:
    nodes = with_all_inside(operands)
    origins = _recorded(ctx, eqn, nodes, program)
    arrays = [base_of(nodes[n]) for n in program.inputs]
    arrays += [*(ctx.build(nodes[n]) for n in program.materialised), *program.consts]
    return program.returned(nodes, eqn.primitive.bind(*arrays, **program.params), origins)


def _recorded(
    ctx: Context, eqn: Any, nodes: Sequence[Any], program: Rewritten
) -> Sequence[frozenset]:
    """Records a call of a rewritten program; returns the broadcasts that its results stem from."""
    origins = {stand_in: nodes[n].origins for n, stand_in in program.stand_ins}
    for stand_in, found in origins.items():
        if stand_in in ctx.programs.divisions:
            # The program has a sharding constraint on this operand, or on what it computes from it.
            division = ctx.programs.divisions[stand_in]
            ctx.programs.divisions.update(dict.fromkeys(found, division))

    def materialise(node: int, place: Any, reason: str, copied: bool) -> Any:
        return ctx.materialise(place, nodes[node], reason, copied=copied)

    with ctx.recorder.inside(eqn):
        call = program.log.replay(ctx.recorder, eqn, origins, materialise)
    return [
        frozenset() if is_plain(x.value) else call.origins(x.value.origins) for x in program.results
    ]


def _rewritten(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], materialised: list[int]
) -> tuple[Rewritten | None, set[int]]:
    """Rewrites the program of a call by itself.

    Returns:
      The program; None if the call must be inline. And the positions of operands whose hidden
      equations the rewriting asked for.
    """
    program = eqn.params["jaxpr"]
    if any(is_index(v.aval) and not _is_of_a_loop(program, v) for v in program.outvars):
        return None, set()
    nodes = Nodes.of(operands)
    materialised = [n for n in materialised if not fixed[nodes.roots[n]]]
    while True:
        found = _with_materialised(ctx, eqn, nodes, fixed, materialised)
        if not isinstance(found, tuple):
            return None, found
        program, built = found
        if built == materialised:
            return program, set()
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


def is_index(aval: Any) -> bool:
    """Whether a value may be an index or a mask."""
    return aval.ndim > 0 and getattr(aval.dtype, "kind", "") in "ib"


def _with_materialised(
    ctx: Context, eqn: Any, nodes: Nodes, fixed: Sequence[bool], materialised: list[int]
) -> tuple[Rewritten, list[int]] | set[int]:
    """Rewrites the program as if the caller materialised some values.

    Returns:
      The program and the positions of the values that it materialises. If there is no program, the
      positions of the operands whose hidden equations the rewriting asked for.
    """
    jaxpr, log = eqn.params["jaxpr"], Log()
    varying = [n for n, root in enumerate(nodes.roots) if not fixed[root]]
    inputs = [n for n in varying if not nodes.inside[n]]
    stand_ins = {n: log.stand_in() for n in inputs if origins_of(nodes.values[n])}
    # What is found out while the program is traced: its results, which are none if it creates
    # lineages; the positions of the operands whose hidden equations it asked for, and of the values
    # that it materialises; whether it creates lineages. Nothing of it holds arrays of this trace.
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
        results = _results(values, returned)
        asked, built = inner.scope.asked_hidden, inner.scope.built()
        has_lineages = inner.scope.has_lineages()
        # Skeletons of results hold their lineages, and so the indices of these.
        kept = [] if has_lineages else results
        found[:] = [
            [dataclasses.replace(x, value=skeleton(x.value)) for x in kept],
            {nodes.roots[n] for n, x in enumerate(values) if id(x) in asked},
            [n for n in varying if id(values[n]) in built],
            has_lineages,
        ]
        return [base_of(x.value) for x in results if x.number is not None]

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
        return set()
    params = _params(eqn, traced, len(traced.consts) + len(avals))
    results, asked, built, has_lineages = found
    if params is None or has_lineages:
        return set()
    if asked:
        return asked
    origins, count = list(stand_ins.items()), len(eqn.outvars)
    consts = traced.consts
    return Rewritten(params, consts, inputs, materialised, origins, results, count, log), built


def _results(nodes: Sequence[Any], returned: Sequence[Any]) -> list[Result]:
    """Describes the results of a program on `nodes`, and the values inside of them."""
    of_operands = {id(x): n for n, x in enumerate(nodes)}
    found = Nodes.of(returned)
    last = {id(x): n for n, x in enumerate(found.values)}
    numbers = itertools.count()
    results = []
    for n, x in enumerate(found.values):
        operand, like, inside = of_operands.get(id(x)), last[id(x)], found.inside[n]
        computed = operand is None and like == n and not inside
        results.append(Result(x, operand, like, inside, next(numbers) if computed else None))
    return results


def _params(eqn: Any, traced: Any, count: int) -> dict[str, Any] | None:
    """Returns parameters of a call with `count` inputs; None if JAX cannot call the program so."""
    if traced.effects:
        return None
    names = ("in_shardings", "in_layouts", "out_shardings", "out_layouts")
    if any(len(set(eqn.params.get(name, ()))) > 1 for name in names):
        return None
    closed = with_constants_last(traced)
    return call_params(eqn.params, closed, {"in": count, "out": len(closed.outvars)})
