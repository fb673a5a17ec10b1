"""The own tokens with which the softmax of a pass begins, for the attention kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.flash.attention_context import AttentionContext, Item
from ikbo_jax.pallas.hopper import mma, own_tokens
from ikbo_jax.problems.hopper import WGMMA_M


def issue_scores(ctx: AttentionContext, index: Any, first_step: Any) -> jax.Array:
    """Issues the products of the queries of pass `index` and own keys."""
    own, ring, query = ctx.own, ctx.shared.value, ctx.shared.query
    step = ctx.value_step(index, first_step) - own.number
    ring.await_ready(step)
    rows, keys = query.tiles[0].at[query.slot(index), ctx.consumer], ring.matrix(step)
    return mma.product(rows, keys, ctx.shape.head_dim, columns=own.columns)


def scores(ctx: AttentionContext, item: Item, products: jax.Array) -> jax.Array:
    """Returns the rows' scores of own keys [64], not scaled, after the wait for the products."""
    products = mma.after_wait(products)
    return own_tokens.scores(products, _places(ctx, item))


def values(ctx: AttentionContext, item: Item, index: Any, first_step: Any) -> jax.Array:
    """Reads the rows' own values [64, H] f32, whose scores were read, and frees the own tokens."""
    own = ctx.own
    step, places = ctx.value_step(index, first_step) - own.number, _places(ctx, item)
    ring, width = ctx.shared.value, ctx.shape.head_dim
    if own.stages > 1:
        ring.release(step)
        step = step + 1
        ring.await_ready(step)
    found = own_tokens.values(ring.matrix(step), own, places, width)
    ring.release(step)
    return found


def start(ctx: AttentionContext, item: Item, index: Any, first_step: Any) -> softmax.Running:
    """Returns the state before the first block of the exact softmax."""
    products = issue_scores(ctx, index, first_step)
    mma.wait(0)
    score = scores(ctx, item, products)
    sums = mma.zeros(softmax.PARTIAL, jnp.float32) + 1 / softmax.PARTIAL
    return softmax.Running(score, sums, values(ctx, item, index, first_step))


def _places(ctx: AttentionContext, item: Item) -> own_tokens.Places:
    q_len = jnp.int32(ctx.shape.q_len)
    before = ctx.consumer * WGMMA_M
    begin = before + lax.rem(item.first_row - before + q_len, q_len)
    return own_tokens.Places(begin, ctx.shape.q_len)
