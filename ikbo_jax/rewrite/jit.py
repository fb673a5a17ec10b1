"""The rule of jit: a call goes on in the same scope, or is made again with a rewritten program.

Models call the same jitted function once a layer, which JAX traces once. So does this: a function
that is called twice on values of the same form is rewritten once, if it needs nothing but them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend import core

from ikbo_jax.rewrite.calls import form, settled, unpack_all
from ikbo_jax.rewrite.interpret import Context, NotCovered, on_integers, register_rule
from ikbo_jax.rewrite.lineage import Concat, Lazy, is_plain, origins_of

#: A jitted function of no more equations is gone into even on arrays: `jnp.where` and its like are
#: jitted, and what indices and masks are made of must be seen.
_SMALL = 4


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """A program on the arrays of its operands.

    Attributes:
      jaxpr: the program.
      results: values in the form of its results.
      saved: what running it saves: arguments of `Recorder.saved` but for the origins.
    """

    jaxpr: Any
    results: list[Any]
    saved: list[tuple[Any, str, int, bool]]


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
    key = (id(jaxpr), *map(form, operands))
    if key not in ctx.rewritten:
        # A program called once is rewritten in place.
        ctx.rewritten[key] = (jaxpr, None)
        return ctx.run_closed(jaxpr, operands, eqn)
    _, known = ctx.rewritten[key]
    if known is None:
        known = _rewritten(ctx, eqn, operands)
        ctx.rewritten[key] = (jaxpr, known or False)
    if not known:
        return ctx.run_closed(jaxpr, operands, eqn)
    arrays, _ = unpack_all(operands)
    bases = eqn.primitive.bind(*arrays, **{**eqn.params, "jaxpr": known.jaxpr})
    origins = origins_of(*operands)
    with ctx.recorder.inside(eqn):
        for inner_eqn, became, flops, product in known.saved:
            ctx.recorder.saved(inner_eqn, origins, became, flops, product)
    return [
        base if is_plain(x) else dataclasses.replace(x, base=base, origins=origins)
        for x, base in zip(known.results, bases, strict=True)
    ]


def _rewritten(ctx: Context, eqn: Any, operands: Any) -> _Rewritten | None:
    """The program of a call, rewritten by itself; None if that needs more than its operands."""
    jaxpr = eqn.params["jaxpr"]
    arrays, pack = unpack_all(operands)
    out: list[Any] = []
    inner = ctx.inner()

    def program(*arrays: Any) -> list[Any]:
        results = inner.run_closed(jaxpr, pack(arrays), eqn)
        out[:] = results
        if any(not is_plain(x) and not isinstance(x, Lazy) for x in results):
            raise NotCovered("a result that is no array at a batch of its own")
        return unpack_all(results)[0]

    # As the program declares them: a Python number among them is of a weak type.
    avals = [
        jax.ShapeDtypeStruct(x.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for x, v in zip(map(jax.typeof, arrays), jaxpr.invars, strict=True)
    ]
    with ctx.muted(), ctx.recorder.logging() as log:
        try:
            traced = jax.make_jaxpr(program)(*avals)
        except NotCovered:
            return None
        alone = not inner.built() and not log.certain and settled(inner, out, ctx) == out
    if not alone or traced.consts or type(traced) is not type(jaxpr):
        return None
    if traced.effects or not isinstance(traced, (core.Jaxpr, core.ClosedJaxpr)):
        return None
    return _Rewritten(traced, out, log.saved)


for _name in ("jit", "pjit"):
    register_rule(_name, _jit, source=True)
