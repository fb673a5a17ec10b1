"""Merges own tokens into the softmax of a pass's rows, for the attention kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.flash.attention_context import AttentionContext, Item
from ikbo_jax.pallas.hopper import own_tokens


def merged(
    ctx: AttentionContext,
    item: Item,
    acc: jax.Array,
    row_sum: jax.Array,
    maximum: jax.Array,
    unit: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds own tokens to sums; returns (acc, maxima whose unit is `softmax.LN_2`, row sums)."""
    shape, has_keys = ctx.shape, item.length > 0
    acc = jnp.where(has_keys, acc, 0.0)  # without keys, it may be NaN
    row_sum = jnp.where(has_keys, row_sum, 0.0)
    if unit != softmax.LN_2:
        maximum = maximum * jnp.float32(unit / softmax.LN_2)
    maximum = jnp.where(has_keys, maximum, -jnp.inf)
    kv_head = lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads))
    rows = own_tokens.Rows(item.first_row, item.begin, item.end, item.head, kv_head)
    order = own_tokens.Order.of_packed(ctx.operands.targets, shape.batch)
    score, value = own_tokens.load(ctx, rows, order, acc.shape[1], at_once=False)
    score = score * jnp.float32(shape.log2_scale)
    return softmax.with_token(acc, maximum, row_sum, score, value, 1.0)
