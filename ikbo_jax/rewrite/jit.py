"""The rule of jit: a call goes on in the same scope, or is made again with a rewritten program.

Models call the same jitted function once a layer, which JAX traces once. So does this: a function
that is called again on values of the same form is rewritten by itself, and that program runs at
every call. What its report holds is recorded anew at each of them, or at the end for all that are
alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.calls import form
from ikbo_jax.rewrite.equations import identity, on_integers
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.jaxprs import call_params, trace, without_dead_code
from ikbo_jax.rewrite.lineage import Concat, Lazy, base_of, is_plain
from ikbo_jax.rewrite.log import Log
from ikbo_jax.rewrite.registry import NotCovered, register_rule

#: A jitted function of no more equations is gone into even on arrays: `jnp.where` and its like are
#: jitted, and what indices and masks are made of must be seen.
_SMALL = 4


@dataclasses.dataclass(frozen=True)
class Result:
    """What a result of a rewritten program is.

    Attributes:
      value: the value inside of the program, in the result's form.
      form: that form.
      operand: position of the operand that it is; None where the program computes it.
      like: position of the first result that it is. One value for one result, so that it is
        materialised once.
    """

    value: Any
    form: Any
    operand: int | None
    like: int

    def of(self, array: Any, origins: frozenset) -> Any:
        """The value of a call whose program returned `array` for it."""
        x = self.value
        return array if is_plain(x) else Lazy(array, x.shape, x.lineage, x.axis, origins)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program on arrays: those of operands, those that operands stand for, and its own.

    Attributes:
      params: parameters of its call.
      consts: the arrays that it closes over.
      inputs: positions of the operands whose arrays it gets.
      given: positions of the operands that are materialised for it.
      stand_ins: what stands for the origins of operands, with their positions.
      results: what its results are.
      log: what to record at each call.
    """

    params: dict[str, Any]
    consts: list[Any]
    inputs: list[int]
    given: list[int]
    stand_ins: list[tuple[int, Any]]
    results: list[Result]
    log: Log

    def returned(self, operands: Sequence[Any], computed: Callable[[int], Any]) -> list[Any]:
        """The results of a call; `computed` gives those that its program computes, by position."""
        values: list[Any] = []
        for n, result in enumerate(self.results):
            if result.operand is not None:
                values.append(operands[result.operand])
            else:
                values.append(values[result.like] if result.like < n else computed(n))
        return values


@dataclasses.dataclass
class _Calls:
    """Calls of one program on values of one form.

    Attributes:
      alive: what the key holds by identity.
      given: positions of operands that were materialised before its first call, or at it.
      failed: whether the program cannot be rewritten by itself.
    """

    alive: Any
    given: list[int]
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What is to be known of a call whatever its operands are, once for all calls of a program.

    Attributes:
      alive: what is known by identity.
      small: whether it is gone into even on arrays.
      sharded: whether it has shardings of its own.
      indices: which operands may be indices or masks.
    """

    alive: Any
    small: bool
    sharded: bool
    indices: list[bool]


def kind_of(ctx: Context, eqn: Any) -> _Kind:
    """What is known of a call."""
    jaxpr = eqn.params["jaxpr"]
    shardings = eqn.params.get("in_shardings", ()), eqn.params.get("out_shardings", ())
    key = (id(jaxpr), *map(id, shardings))
    known = ctx.programs.kinds.get(key)
    if known is None:
        small = len(jaxpr.eqns) <= _SMALL or on_integers(eqn)
        names = {type(x).__name__ for xs in shardings for x in xs}
        indices = [_is_index(v.aval) for v in eqn.invars]
        known = _Kind((jaxpr, shardings), small, bool(names - {"UnspecifiedValue"}), indices)
        ctx.programs.kinds[key] = known
    return known


def _jit(ctx: Context, eqn: Any, *operands: Any) -> Any:
    jaxpr, kind = eqn.params["jaxpr"], kind_of(ctx, eqn)
    if not kind.small and all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        return ctx.bind(eqn, *operands)
    if kind.sharded:
        raise NotCovered("a jit with shardings of its own")
    if kind.small or any(isinstance(x, Concat) for x in operands):
        return ctx.run_closed(jaxpr, operands, eqn)
    fixed = list(map(is_fixed, operands, kind.indices))
    forms = [identity(x) if f else form(x) for x, f in zip(operands, fixed, strict=True)]
    key = (id(jaxpr), *forms)
    made = program_of(ctx, key)
    if made is not None:
        return _called(ctx, eqn, operands, made)
    return _called_anew(ctx, eqn, operands, fixed, key)


def program_of(ctx: Context, key: Any) -> Rewritten | None:
    """The rewritten program of calls with this key; None if there is none yet."""
    for scope in ctx.scope.chain():
        if key in scope.programs:
            return scope.programs[key]
    return None


def _called_anew(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: list[bool], key: Any
) -> list[Any]:
    """The results of a call of a program that is not rewritten by itself yet."""
    jaxpr, calls = eqn.params["jaxpr"], ctx.programs.calls.get(key)
    first = calls is None
    if calls is None:
        calls = ctx.programs.calls[key] = _Calls((jaxpr, operands), _built(ctx, operands))
    made = None
    # A program called once is rewritten in place.
    if ctx.programs.is_repeated(jaxpr) if first else not calls.failed:
        made = _rewritten(ctx, eqn, operands, fixed, calls.given)
    if made is None:
        results = ctx.run_closed(jaxpr, operands, eqn)
        calls.given = _built(ctx, operands)
        # What one call in place makes, such as the rows of an index, may be all that was wanting.
        calls.failed = not first
        return results
    owner = ctx.scope
    if not any(isinstance(x, jax.core.Tracer) for x in made.consts):
        *_, owner = ctx.scope.chain()
    owner.programs[key] = made
    return _called(ctx, eqn, operands, made)


def _built(ctx: Context, operands: Sequence[Any]) -> list[int]:
    """Positions of operands that were materialised."""
    return [n for n, x in enumerate(operands) if not is_plain(x) and ctx.scope.is_built(x)]


def is_fixed(operand: Any, index: bool) -> bool:
    """Whether a program is rewritten for this very operand: what is known of it matters.

    So it is with indices and masks, whose equations tell what they are, and with known numbers.
    """
    if index or isinstance(operand, (jax.core.Tracer, Lazy)):
        return index
    return is_plain(operand) and np.size(operand) == 1


def _is_index(aval: Any) -> bool:
    """Whether a value may be an index or a mask."""
    return aval.ndim > 0 and getattr(aval.dtype, "kind", "") in "ib"


def _called(ctx: Context, eqn: Any, operands: Sequence[Any], made: Rewritten) -> list[Any]:
    """The results of a call by its rewritten program."""
    origins = _recorded(ctx, eqn, operands, made)
    arrays = [base_of(operands[n]) for n in made.inputs]
    arrays += [*(ctx.build(operands[n]) for n in made.given), *made.consts]
    bases = eqn.primitive.bind(*arrays, **made.params)
    return made.returned(operands, lambda n: made.results[n].of(bases[n], origins[n]))


def _recorded(ctx: Context, eqn: Any, operands: Sequence[Any], made: Rewritten) -> list[frozenset]:
    """Records a call of a rewritten program; returns the broadcasts that its results stem from."""
    recorder, log = ctx.recorder, made.log
    there = [operands[n].origins for n, _ in made.stand_ins]
    key = (log, *there)
    known = recorder.again(key)
    if known is not None:
        return list(known)
    origins = {stand_in: here for (_, stand_in), here in zip(made.stand_ins, there, strict=True)}

    def materialise(operand: int, place: Any, reason: str, copied: bool) -> Any:
        return ctx.materialise(place, operands[operand], reason, copied=copied)

    with recorder.inside(eqn):
        call = log.replay(recorder, eqn, origins, materialise)
    known = [
        frozenset() if is_plain(x.value) else call.origins(x.value.origins) for x in made.results
    ]
    if log.is_same_everywhere():
        recorder.remember(key, known, lambda times: log.repeat(call, times))
    return known


def _rewritten(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], given: list[int]
) -> Rewritten | None:
    """The program of a call, rewritten by itself; None if that is not as good as in place."""
    if any(_is_index(v.aval) for v in eqn.outvars):
        return None
    while True:
        given = [n for n in given if not fixed[n]]
        made, built = _with_given(ctx, eqn, operands, fixed, given)
        if made is None or built == given:
            return made
        # What is materialised is so outside, once for all calls.
        given = built


def _with_given(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], given: list[int]
) -> tuple[Rewritten | None, list[int]]:
    """The program with some operands materialised, and those that should be."""
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
            if not isinstance(x, jax.core.Tracer) or ctx.provenance.is_known(x):
                inner.provenance.hide(values[n])
        for n, array in zip(given, arrays[len(inputs) :], strict=True):
            inner.scope.outer_arrays[id(values[n])] = array
        log.operands.update((id(x), n) for n, x in enumerate(values) if not is_plain(x))
        results[:] = inner.run_closed(jaxpr, values)
        if not all(is_plain(x) or isinstance(x, Lazy) for x in results):
            raise NotCovered("a result that is no array at a batch of its own")
        return [base_of(x) for x in results]

    # As the program declares them: a Python number among them is of a weak type.
    avals = [_like(base_of(operands[n]), eqn.invars[n].aval) for n in inputs]
    avals += [_like(operands[n], eqn.invars[n].aval) for n in given]
    try:
        traced = without_dead_code(trace(program, avals, jaxpr))
    except NotCovered:
        return None, given
    params = _params(eqn, traced, len(traced.consts) + len(avals))
    hidden = inner.provenance.asked_hidden_producer
    if params is None or hidden or inner.scope.has_lineages():
        return None, given
    built = [n for n in inputs if id(values[n]) in inner.scope.built()]
    named = [(n, stand_in) for n, stand_in in enumerate(stand_ins) if stand_in is not None]
    kept = _results(values, results)
    return Rewritten(params, traced.consts, inputs, given, named, kept, log), built


def _results(operands: Sequence[Any], results: Sequence[Any]) -> list[Result]:
    at = {id(x): n for n, x in enumerate(operands)}
    first: dict[int, int] = {}
    return [
        Result(x, form(x), at.get(id(x)), first.setdefault(id(x), n)) for n, x in enumerate(results)
    ]


def _like(value: Any, aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(value), aval.dtype, weak_type=aval.weak_type)


def _params(eqn: Any, traced: Any, count: int) -> dict[str, Any] | None:
    """Parameters of a call of a program with `count` inputs; None if it cannot be called so."""
    if traced.effects or not isinstance(traced, (core.Jaxpr, core.ClosedJaxpr)):
        return None
    if type(traced) is not type(eqn.params["jaxpr"]):
        return None
    inner = traced.jaxpr
    closed = inner.replace(constvars=[], invars=[*inner.invars, *inner.constvars])
    if type(closed) is not type(traced):
        closed = core.ClosedJaxpr(closed, ())
    if any(len(set(eqn.params.get(name, ()))) > 1 for name in ("in_shardings", "in_layouts")):
        return None
    return call_params(eqn.params, closed, {"in": count})


for _name in ("jit", "pjit"):
    register_rule(_name, _jit, source=True)
