"""The rule of jit: a call goes on in the same scope, or is made again with a rewritten program.

Models call the same jitted function once a layer, which JAX traces once. So does this: a function
that is called again on values of the same form is rewritten by itself, and that program runs at
every further call. What its report holds is recorded anew at each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.calls import form
from ikbo_jax.rewrite.interpret import (
    Context,
    NotCovered,
    identity,
    on_integers,
    register_rule,
    shape_of,
)
from ikbo_jax.rewrite.lineage import Concat, Lazy, base_of, is_plain
from ikbo_jax.rewrite.log import Log

#: A jitted function of no more equations is gone into even on arrays: `jnp.where` and its like are
#: jitted, and what indices and masks are made of must be seen.
_SMALL = 4


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """A program on arrays: those of operands, those that operands stand for, and its own.

    Attributes:
      params: parameters of its call.
      consts: the arrays that it closes over.
      inputs: positions of the operands whose arrays it gets.
      given: positions of the operands that are materialised for it.
      stand_ins: what stands for the origins of each operand.
      results: values in the form of its results.
      returned: positions of the operands that its results are; None where it computes one.
      log: what to record at each call.
    """

    params: dict[str, Any]
    consts: list[Any]
    inputs: list[int]
    given: list[int]
    stand_ins: list[Any]
    results: list[Any]
    returned: list[int | None]
    log: Log


@dataclasses.dataclass
class _Calls:
    """Calls of one program on values of one form.

    Attributes:
      alive: what the key holds by identity.
      given: positions of operands that the first call materialised.
      failed: whether the program cannot be rewritten by itself.
    """

    alive: Any
    given: list[int]
    failed: bool = False


def _jit(ctx: Context, eqn: Any, *operands: Any) -> Any:
    jaxpr = eqn.params["jaxpr"]
    small = len(jaxpr.eqns) <= _SMALL or on_integers(eqn)
    if not small and all(map(is_plain, operands)) and ctx.is_plain_program(jaxpr):
        return ctx.bind(eqn, *operands)
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        raise NotCovered("a jit with shardings of its own")
    if small or any(isinstance(x, Concat) for x in operands):
        return ctx.run_closed(jaxpr, operands, eqn)
    fixed = [_is_fixed(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)]
    forms = (identity(x) if f else form(x) for x, f in zip(operands, fixed, strict=True))
    key = (id(jaxpr), *forms)
    calls = ctx.rewritten.get(key)
    if calls is None:
        # A program called once is rewritten in place.
        results = ctx.run_closed(jaxpr, operands, eqn)
        given = [n for n, x in enumerate(operands) if not is_plain(x) and ctx.is_built(x)]
        ctx.rewritten[key] = _Calls((jaxpr, operands), given)
        return results
    for scope in ctx.scopes():
        if key in scope.programs:
            return _called(ctx, eqn, operands, scope.programs[key])
    made = None if calls.failed else _rewritten(ctx, eqn, operands, fixed, calls.given)
    if made is None:
        calls.failed = True
        return ctx.run_closed(jaxpr, operands, eqn)
    owner = ctx
    if not any(isinstance(x, jax.core.Tracer) for x in made.consts):
        *_, owner = ctx.scopes()
    owner.programs[key] = made
    return _called(ctx, eqn, operands, made)


def _is_fixed(operand: Any, aval: Any) -> bool:
    """Whether a program is rewritten for this very operand: what is known of it matters.

    So it is with indices and masks, whose equations tell what they are, and with known numbers.
    """
    if is_plain(operand) and not isinstance(operand, jax.core.Tracer) and np.size(operand) == 1:
        return True
    return _is_index(aval)


def _is_index(aval: Any) -> bool:
    """Whether a value may be an index or a mask."""
    return aval.ndim > 0 and getattr(aval.dtype, "kind", "") in "ib"


def _called(ctx: Context, eqn: Any, operands: Sequence[Any], made: _Rewritten) -> list[Any]:
    """The results of a call by its rewritten program."""
    origins = {
        stand_in: operands[n].origins for n, stand_in in enumerate(made.stand_ins) if stand_in
    }

    def materialise(operand: int, place: Any, reason: str, copied: bool) -> Any:
        return ctx.materialise(place, operands[operand], reason, copied=copied)

    with ctx.recorder.inside(eqn):
        here = made.log.replay(ctx.recorder, eqn, origins, materialise)
    arrays = [base_of(operands[n]) for n in made.inputs]
    arrays += [*(ctx.build(operands[n]) for n in made.given), *made.consts]
    bases = eqn.primitive.bind(*arrays, **made.params)
    # One value for one result, so that it is materialised once.
    known = {id(made.results[m]): operands[n] for m, n in enumerate(made.returned) if n is not None}
    for x, base in zip(made.results, bases, strict=True):
        if id(x) not in known:
            lazy = not is_plain(x)
            known[id(x)] = (
                dataclasses.replace(x, base=base, origins=here(x.origins)) if lazy else base
            )
    return [known[id(x)] for x in made.results]


def _rewritten(
    ctx: Context, eqn: Any, operands: Sequence[Any], fixed: Sequence[bool], given: list[int]
) -> _Rewritten | None:
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
) -> tuple[_Rewritten | None, list[int]]:
    """The program with some operands materialised, and those that should be."""
    jaxpr, log = eqn.params["jaxpr"], Log()
    inner = Context(log, ctx)
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
            if not isinstance(x, jax.core.Tracer) or ctx.is_known(x):
                inner.opaque[id(values[n])] = values[n]
        for n, array in zip(given, arrays[len(inputs) :], strict=True):
            inner.given[id(values[n])] = array
        log.operands.update((id(x), n) for n, x in enumerate(values) if not is_plain(x))
        results[:] = inner.run_closed(jaxpr, values)
        if not all(is_plain(x) or isinstance(x, Lazy) for x in results):
            raise NotCovered("a result that is no array at a batch of its own")
        return [base_of(x) for x in results]

    # As the program declares them: a Python number among them is of a weak type.
    avals = [_like(base_of(operands[n]), eqn.invars[n].aval) for n in inputs]
    avals += [_like(operands[n], eqn.invars[n].aval) for n in given]
    try:
        traced = jax.make_jaxpr(program)(*avals)
    except NotCovered:
        return None, given
    params = _params(eqn, traced, len(traced.consts) + len(avals))
    if params is None or inner.missed or inner.has_lineages():
        return None, given
    built = [n for n in inputs if id(values[n]) in inner.built()]
    at = {id(x): n for n, x in enumerate(values)}
    returned = [at.get(id(x)) for x in results]
    return _Rewritten(
        params, traced.consts, inputs, given, stand_ins, results, returned, log
    ), built


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
    params = {**eqn.params, "jaxpr": closed}
    for name in ("in_shardings", "in_layouts"):
        if len(set(params.get(name, ()))) > 1:
            return None
        if params.get(name):
            params[name] = params[name][:1] * count
    if "donated_invars" in params:
        params["donated_invars"] = (False,) * count
    return params


for _name in ("jit", "pjit"):
    register_rule(_name, _jit, source=True)
