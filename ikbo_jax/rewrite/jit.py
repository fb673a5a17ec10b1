"""The rule of jit: a call is interpreted inline, or becomes a call of a rewritten program.

Models call one jitted function in every layer, and JAX traces it once. Likewise, a function that is
called several times on values of the same form is rewritten once, and every call runs the rewritten
program. Its events are recorded in the report at each call, or at the end for all calls that record
the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ikbo_jax.rewrite.equations import identity, on_integers
from ikbo_jax.rewrite.forms import form
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.jaxprs import call_params, trace, without_dead_code
from ikbo_jax.rewrite.lineage import Deferred, Lazy, base_of, is_plain
from ikbo_jax.rewrite.log import Log
from ikbo_jax.rewrite.registry import NotCovered, register_rule

#: A jitted function with at most this many equations is interpreted inline even on arrays:
#: `jnp.where` and similar functions are jitted, and facts about indices and masks depend on their
#: equations.
_SMALL = 4


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a rewritten program.

    Attributes:
      value: the value inside the program.
      form: the form of the value.
      operand: position of the operand that is returned as it is; None if the program computes the
        result.
      like: position of the first result that is the same value. All of these become one value of
        the caller, which is materialised once.
    """

    value: Any
    form: Any
    operand: int | None
    like: int

    def of(self, array: Any, origins: frozenset) -> Any:
        """The caller's value, if the program returned `array` for this result."""
        x = self.value
        return array if is_plain(x) else Lazy(array, x.shape, x.lineage, x.axis, origins)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten program. Its arguments are bases of operands, materialised operands, constants.

    Attributes:
      params: parameters of the equation that calls it.
      consts: the arrays that it closes over.
      inputs: positions of the operands whose arrays or bases it takes.
      materialised: positions of the operands that it also takes materialised.
      stand_ins: positions of operands, each with the stand-in for the operand's origins.
      results: its results.
      log: the events to record at each call.
    """

    params: dict[str, Any]
    consts: list[Any]
    inputs: list[int]
    materialised: list[int]
    stand_ins: list[tuple[int, Any]]
    results: list[Result]
    log: Log

    def returned(self, operands: Sequence[Any], computed: Callable[[int], Any]) -> list[Any]:
        """The results of a call; `computed(n)` is result n if the program computes it."""
        values: list[Any] = []
        for n, result in enumerate(self.results):
            if result.operand is not None:
                values.append(operands[result.operand])
            else:
                values.append(values[result.like] if result.like < n else computed(n))
        return values


@dataclasses.dataclass
class _Calls:
    """The history of calls of one program on values of one form.

    Attributes:
      alive: the objects whose identities the key holds, so that these stay unique.
      materialised: positions of operands that were materialised before or during the first call.
      failed: whether the program cannot be rewritten by itself.
    """

    alive: Any
    materialised: list[int]
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Properties of a call that do not depend on its operands.

    Attributes:
      alive: the objects whose identities the key holds, so that these stay unique.
      small: whether the call is interpreted inline even on arrays.
      sharded: whether the call specifies shardings.
      indices: whether each operand may be an index or a mask.
    """

    alive: Any
    small: bool
    sharded: bool
    indices: list[bool]


def kind_of(ctx: Context, eqn: Any) -> _Kind:
    """The properties of a call, computed once per program and shardings."""
    jaxpr = eqn.params["jaxpr"]
    shardings = eqn.params.get("in_shardings", ()), eqn.params.get("out_shardings", ())
    key = (id(jaxpr), *map(id, shardings))
    kind = ctx.programs.kinds.get(key)
    if kind is None:
        small = len(jaxpr.eqns) <= _SMALL or on_integers(eqn)
        names = {type(x).__name__ for xs in shardings for x in xs}
        indices = [_is_index(v.aval) for v in eqn.invars]
        kind = _Kind((jaxpr, shardings), small, bool(names - {"UnspecifiedValue"}), indices)
        ctx.programs.kinds[key] = kind
    return kind


def _jit(ctx: Context, eqn: Any, *operands: Any) -> Any:
    jaxpr, kind = eqn.params["jaxpr"], kind_of(ctx, eqn)
    if not kind.small and all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        return ctx.bind(eqn, *operands)
    if kind.sharded:
        return _sharded(ctx, eqn, operands)
    if kind.small or any(isinstance(x, Deferred) and not isinstance(x, Lazy) for x in operands):
        return ctx.run_closed(jaxpr, operands, eqn)
    fixed = list(map(is_fixed, operands, kind.indices))
    forms = [identity(x) if f else form(x) for x, f in zip(operands, fixed, strict=True)]
    key = (id(jaxpr), *forms)
    rewritten = program_of(ctx, key)
    if rewritten is not None:
        return _called(ctx, eqn, operands, rewritten)
    return _called_without_program(ctx, eqn, operands, fixed, key)


def _sharded(ctx: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A call that specifies shardings: constraints on the arrays that exist."""
    jaxpr, params = eqn.params["jaxpr"], eqn.params
    if all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        raise NotCovered("a jit that specifies shardings")
    specified = (*params["in_shardings"], *params["out_shardings"])
    others = {type(x).__name__ for x in specified} - {"UnspecifiedValue", "NamedSharding"}
    if others or any(x is not None for x in (*params["in_layouts"], *params["out_layouts"])):
        raise NotCovered("a jit that specifies layouts, or shardings without a mesh")

    def placed(values: Sequence[Any], shardings: Any) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(x, sharding)
            if is_plain(x) and isinstance(sharding, jax.sharding.NamedSharding)
            else x
            for x, sharding in zip(values, shardings, strict=True)
        ]

    results = ctx.run_closed(jaxpr, placed(operands, params["in_shardings"]), eqn)
    return placed(results, params["out_shardings"])


def program_of(ctx: Context, key: Any) -> Rewritten | None:
    """The rewritten program of calls with this key; None if none exists yet."""
    for scope in ctx.scope.chain():
        if key in scope.programs:
            return scope.programs[key]
    return None


def _called_without_program(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: list[bool], key: Any
) -> list[Any]:
    """The results of a call whose program is not rewritten by itself yet."""
    jaxpr, calls = eqn.params["jaxpr"], ctx.programs.calls.get(key)
    first = calls is None
    if calls is None:
        calls = ctx.programs.calls[key] = _Calls((jaxpr, operands), _built(ctx, operands))
    rewritten = None
    # A program that is called once is interpreted inline.
    if ctx.programs.is_repeated(jaxpr) if first else not calls.failed:
        rewritten = _rewritten(ctx, eqn, operands, fixed, calls.materialised)
    if rewritten is None:
        results = ctx.run_closed(jaxpr, operands, eqn)
        calls.materialised = _built(ctx, operands)
        # The first inline call may create the missing lineage, so the second call tries again.
        calls.failed = not first
        return results
    owner = ctx.scope
    if not any(isinstance(x, jax.core.Tracer) for x in rewritten.consts):
        *_, owner = ctx.scope.chain()
    owner.programs[key] = rewritten
    return _called(ctx, eqn, operands, rewritten)


def _built(ctx: Context, operands: Sequence[Any]) -> list[int]:
    """Positions of deferred operands that are already materialised."""
    return [n for n, x in enumerate(operands) if not is_plain(x) and ctx.scope.is_built(x)]


def is_fixed(operand: Any, index: bool) -> bool:
    """Whether the rewriting depends on facts about this operand, so that the key names the operand.

    Such operands are indices and masks, with facts from their equations, and constant numbers.
    """
    if index or isinstance(operand, (jax.core.Tracer, Lazy)):
        return index
    return is_plain(operand) and np.size(operand) == 1


def _is_index(aval: Any) -> bool:
    """Whether a value may be an index or a mask."""
    return aval.ndim > 0 and getattr(aval.dtype, "kind", "") in "ib"


def _called(ctx: Context, eqn: Any, operands: Sequence[Any], program: Rewritten) -> list[Any]:
    """The results of a call of a rewritten program."""
    origins = _recorded(ctx, eqn, operands, program)
    arrays = [base_of(operands[n]) for n in program.inputs]
    arrays += [*(ctx.build(operands[n]) for n in program.materialised), *program.consts]
    bases = eqn.primitive.bind(*arrays, **program.params)
    return program.returned(operands, lambda n: program.results[n].of(bases[n], origins[n]))


def _recorded(
    ctx: Context, eqn: Any, operands: Sequence[Any], program: Rewritten
) -> list[frozenset]:
    """Records a call of a rewritten program; returns the broadcasts that its results stem from."""
    recorder, log = ctx.recorder, program.log
    of_operands = [operands[n].origins for n, _ in program.stand_ins]
    key = (log, *of_operands)
    of_results = recorder.again(key)
    if of_results is not None:
        return list(of_results)
    origins = {
        stand_in: found for (_, stand_in), found in zip(program.stand_ins, of_operands, strict=True)
    }

    def materialise(operand: int, place: Any, reason: str, copied: bool) -> Any:
        return ctx.materialise(place, operands[operand], reason, copied=copied)

    with recorder.inside(eqn):
        call = log.replay(recorder, eqn, origins, materialise)
    of_results = [
        frozenset() if is_plain(x.value) else call.origins(x.value.origins) for x in program.results
    ]
    if log.is_same_everywhere():
        recorder.remember(key, of_results, lambda times: log.repeat(call, times))
    return of_results


def _rewritten(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], materialised: list[int]
) -> Rewritten | None:
    """The program of a call, rewritten by itself; None if the call must be inline."""
    if any(_is_index(v.aval) for v in eqn.outvars):
        return None
    while True:
        materialised = [n for n in materialised if not fixed[n]]
        program, built = _with_materialised(ctx, eqn, operands, fixed, materialised)
        if program is None or built == materialised:
            return program
        # The caller materialises these operands, once for all calls.
        materialised = built


def _with_materialised(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], materialised: list[int]
) -> tuple[Rewritten | None, list[int]]:
    """The rewritten program if the caller materialises some operands.

    Returns:
      The program, or None, and the positions of the operands that it materialises.
    """
    jaxpr, log = eqn.params["jaxpr"], Log()
    inner = ctx.inner(log)
    inputs = [n for n, f in enumerate(fixed) if not f]
    stand_ins = [
        None if f or is_plain(x) or not x.origins else log.stand_in()
        for x, f in zip(operands, fixed, strict=True)
    ]
    values: list[Any] = list(operands)
    results: list[Any] = []

    def program(*arrays: Any) -> list[Any]:
        for n, array in zip(inputs, arrays, strict=False):
            x = operands[n]
            if is_plain(x):
                values[n] = array
            else:
                origins = frozenset(filter(None, [stand_ins[n]]))
                values[n] = dataclasses.replace(x, base=array, origins=origins)
            if not isinstance(x, jax.core.Tracer) or ctx.provenance.has_producer(x):
                inner.provenance.hide(values[n])
        for n, array in zip(materialised, arrays[len(inputs) :], strict=True):
            inner.scope.outer_arrays[id(values[n])] = array
        log.operands.update((id(x), n) for n, x in enumerate(values) if not is_plain(x))
        results[:] = inner.run_closed(jaxpr, values)
        if not all(is_plain(x) or isinstance(x, Lazy) for x in results):
            raise NotCovered("a result of a jit that is neither an array nor a lazy value")
        return [base_of(x) for x in results]

    # The dtypes are those of the jaxpr; Python numbers among the operands have weak types.
    avals = [_like(base_of(operands[n]), eqn.invars[n].aval) for n in inputs]
    avals += [_like(operands[n], eqn.invars[n].aval) for n in materialised]
    try:
        traced = without_dead_code(trace(program, avals, jaxpr))
    except NotCovered:
        return None, materialised
    params = _params(eqn, traced, len(traced.consts) + len(avals))
    hidden = inner.provenance.asked_hidden_producer
    if params is None or hidden or inner.scope.has_lineages():
        return None, materialised
    built = [n for n in inputs if id(values[n]) in inner.scope.built()]
    named = [(n, stand_in) for n, stand_in in enumerate(stand_ins) if stand_in is not None]
    kept = _results(values, results)
    return Rewritten(params, traced.consts, inputs, materialised, named, kept, log), built


def _results(operands: Sequence[Any], results: Sequence[Any]) -> list[Result]:
    positions = {id(x): n for n, x in enumerate(operands)}
    first: dict[int, int] = {}
    return [
        Result(x, form(x), positions.get(id(x)), first.setdefault(id(x), n))
        for n, x in enumerate(results)
    ]


def _like(value: Any, aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(value), aval.dtype, weak_type=aval.weak_type)


def _params(eqn: Any, traced: Any, count: int) -> dict[str, Any] | None:
    """Parameters of a call of a program with `count` inputs; None if JAX cannot call it by jit."""
    if traced.effects:
        return None
    if any(len(set(eqn.params.get(name, ()))) > 1 for name in ("in_shardings", "in_layouts")):
        return None
    # Without constants: the program takes them as its last arguments.
    closed = traced.replace(constvars=[], invars=[*traced.invars, *traced.constvars])
    return call_params(eqn.params, closed, {"in": count})


register_rule("jit", _jit, source=True)
