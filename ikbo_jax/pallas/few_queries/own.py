"""The own tokens with which the softmax of an item's rows begins; see `problems.OwnStages`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.few_queries.context import Context, Work
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, own_tokens
from ikbo_jax.problems.hopper import BLOCK_K


def issue_scores(ctx: Context, work: Work) -> jax.Array:
    """Issues the products of the part's queries and own keys."""
    own, ring, query = ctx.shape.own, ctx.shared.value, ctx.shared.query
    step, tile = _first_step(ctx, work), work.part.tile
    if own.groups > 1:
        pl.when(tile > 0)(lambda: _skip(ctx, step, own.stages))
        step = step + tile * own.stages
    ring.await_ready(step)
    queries = query.tiles[0].at[query.slot(work.index), tile if ctx.tiles > 1 else 0]
    return mma.product(queries, ring.matrix(step), ctx.shape.head_dim, columns=own.columns)


def start(ctx: Context, work: Work, products: jax.Array) -> softmax.Running:
    """Begins a part's softmax by its own tokens, and frees them, after the wait for `products`.

    Of consumers that share the keys, consumer 1 does. Of split keys, the first split does.
    """
    shape, own, ring = ctx.shape, ctx.shape.own, ctx.shared.value
    part, step, before = work.part, _first_step(ctx, work), 0
    if own.groups > 1:
        step, before = step + part.tile * own.stages, part.offset
    begin = lax.rem(work.item.target + before, jnp.int32(shape.q_len)) + part.offset - before
    places = own_tokens.Places(begin, shape.q_len, shape.head_rows)
    products = mma.after_wait(products)
    score = own_tokens.scores(products, places)
    blocks: Any = slice(None)
    if ctx.shares_columns:
        blocks = pl.ds(ctx.first_column_block, ctx.columns // BLOCK_K)
    value = own_tokens.values(ring, step, own, places, ctx.columns, blocks)
    if own.groups > 1:
        pl.when(part.tile == 0)(lambda: _skip(ctx, step + own.stages, own.stages))
    begins = _begins(ctx, work)
    nothing = softmax.running_start(ctx.columns, shape.log2_scale)
    return softmax.Running(
        jnp.where(begins, score, nothing.extreme),
        jnp.where(begins, nothing.sums + 1 / softmax.PARTIAL, nothing.sums),
        jnp.where(begins, value, nothing.acc),
    )


def start_alone(ctx: Context, work: Work) -> softmax.Running:
    """Begins the softmax of a part without keys; or frees own tokens, if the part has no rows."""

    def begun() -> softmax.Running:
        products = issue_scores(ctx, work)
        mma.wait(0)
        return start(ctx, work, products)

    def skipped() -> softmax.Running:
        _skip(ctx, _first_step(ctx, work), ctx.shape.own.number)
        return softmax.running_start(ctx.columns, ctx.shape.log2_scale)

    return lax.cond(_begins(ctx, work), begun, skipped)


def _begins(ctx: Context, work: Work) -> Any:
    part, is_first = work.part, work.item.target < ctx.shape.rows
    return is_first & (part.gives | (part.stores & ~part.takes))


def _first_step(ctx: Context, work: Work) -> Any:
    return work.first_step + work.index * ctx.shape.own.number


def _skip(ctx: Context, step: Any, count: int) -> None:
    for i in range(count):
        ctx.shared.value.skip(step + i)
