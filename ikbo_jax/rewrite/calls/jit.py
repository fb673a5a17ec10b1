"""The rule of jit: a call is interpreted inline, or becomes a call of a rewritten program.

Models call one jitted function in every layer, and JAX traces it once. A function that is called
several times on values of the same form is rewritten once, too (`sharing`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from ikbo_jax.rewrite.calls import sharing
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values import constraints
from ikbo_jax.rewrite.values.equations import on_integers
from ikbo_jax.rewrite.values.lineage import is_plain
from ikbo_jax.rewrite.values.registry import NotCovered

#: A jitted function with at most this many equations is interpreted inline even on arrays:
#: `jnp.where` and similar functions are jitted, and facts about indices and masks depend on their
#: equations.
_SMALL = 4


def jit(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Rewrites a jitted function, at this call or once for all calls."""
    params = eqn.params
    jaxpr, shardings = params["jaxpr"], (params["in_shardings"], params["out_shardings"])

    def kind() -> tuple[bool, bool]:
        small = len(jaxpr.eqns) <= _SMALL or on_integers(eqn)
        names = {type(x).__name__ for xs in shardings for x in xs}
        return small, bool(names - {"UnspecifiedValue"})

    # Neither depends on the operands.
    key = (id(jaxpr), *map(id, shardings))
    is_small, is_sharded = ctx.programs.once(key, kind, (jaxpr, shardings))
    if not is_small and all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        return ctx.bind(eqn, *operands)
    if is_sharded:
        return _sharded(ctx, eqn, operands)
    inline = functools.partial(ctx.run_closed, jaxpr, operands, eqn)
    if is_small:
        return inline()
    return sharing.call(ctx, eqn, operands, inline)


def _sharded(ctx: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Interprets a call that specifies shardings, which are constraints."""
    jaxpr, params = eqn.params["jaxpr"], eqn.params
    if all(map(is_plain, operands)) and ctx.programs.is_plain(jaxpr):
        raise NotCovered("a jit that specifies shardings")
    specified = (*params["in_shardings"], *params["out_shardings"])
    others = {type(x).__name__ for x in specified} - {"UnspecifiedValue", "NamedSharding"}
    if others or any(x is not None for x in (*params["in_layouts"], *params["out_layouts"])):
        raise NotCovered("a jit that specifies layouts, or shardings without a mesh")

    def placed(values: Sequence[Any], shardings: Any) -> list[Any]:
        return list(map(one, values, shardings))

    def one(x: Any, sharding: Any) -> Any:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return x
        place = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
        return place(x) if is_plain(x) else constraints.constrained(ctx, x, sharding, place)

    results = ctx.run_closed(jaxpr, placed(operands, params["in_shardings"]), eqn)
    return placed(results, params["out_shardings"])
