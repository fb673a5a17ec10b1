"""Merges own tokens into the softmax of a pass's rows, for the attention kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.flash.attention_context import AttentionContext, Item
from ikbo_jax.pallas.hopper import mma, own_tokens
from ikbo_jax.problems.hopper import WGMMA_M


def merged(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    own_step: Any,
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
    if shape.own_columns:
        score, value = _loaded(ctx, item, index, own_step)
    else:
        score, value = _load(ctx, item, acc.shape[1])
    score = score * jnp.float32(shape.log2_scale)
    return softmax.with_token(acc, maximum, row_sum, score, value, 1.0)


def _loaded(
    ctx: AttentionContext, item: Item, index: Any, step: Any
) -> tuple[jax.Array, jax.Array]:
    """Reads scores and values from the stage of values of `step`, and frees it."""
    columns, ring, query = ctx.shape.own_columns, ctx.shared.value, ctx.shared.query
    ring.await_ready(step)
    stage, head_dim = ring.matrix(step), ctx.shape.head_dim
    rows = query.tiles[0].at[query.slot(index), ctx.consumer]
    scores = mma.product(rows, stage, head_dim, columns=columns, interpret=ctx.interpret)
    mma.wait(0, interpret=ctx.interpret)
    scores = mma.after_wait(scores, interpret=ctx.interpret)
    before = ctx.consumer * WGMMA_M
    begin = before + lax.rem(item.first_row - before, jnp.int32(ctx.shape.q_len))
    token = own_tokens.read(ctx, scores, stage, begin, head_dim, first=columns)
    plgpu.commit_smem()  # TMA writes the stage only after these reads
    ring.release(step)
    return token


def _load(ctx: AttentionContext, item: Item, columns: int) -> tuple[jax.Array, jax.Array]:
    """Loads scores and values from device memory."""
    shape = ctx.shape
    kv_head = lax.div(item.head, jnp.int32(shape.q_heads // shape.kv_heads))
    rows = own_tokens.Rows(item.first_row, item.begin, item.end, item.head, kv_head)
    order = own_tokens.Order.of_packed(ctx.operands.targets, shape.batch)
    return own_tokens.load(ctx, rows, order, columns, at_once=False)
