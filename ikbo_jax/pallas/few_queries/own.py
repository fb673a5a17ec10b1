"""The own tokens of an item's rows; see `problems.hopper.OwnStages`.

They are in a ring of their own, or first among the stages of the item's values if shared memory has
no room for the ring.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.few_queries.context import Context, Work
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, own_tokens
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS


def added(ctx: Context, work: Work, *state: jax.Array) -> softmax.Running:
    """Adds the own tokens of a part to the state of its softmax, or begins it; frees the tokens.

    Of consumers that share the keys, consumer 1 adds them, while consumer 0 adds up and stores the
    item before; but consumer 0, before it takes the other's sums, where consumer 1 cannot go ahead
    since the ring has one block of keys for each. Of split keys, the first split adds them.
    """
    part, is_first = work.part, work.item.target < ctx.shape.rows
    is_behind = ctx.shared.own is not None and ctx.config.k_stages <= NUM_CONSUMERS
    of_shared = part.takes if is_behind else part.gives

    def adding() -> softmax.Running:
        own = _tokens(ctx, work)
        if not state:
            return own
        return softmax.merged(softmax.Running(*state), own, log2_scale=ctx.shape.log2_scale)

    def skipping() -> softmax.Running:
        _skip(ctx, ctx.own_step(work.index, work.first_step), ctx.shape.own.number)
        if not state:
            return softmax.running_start(ctx.columns, ctx.shape.log2_scale)
        return softmax.Running(*state)

    return lax.cond(is_first & (of_shared | (part.stores & ~part.takes)), adding, skipping)


def _tokens(ctx: Context, work: Work) -> softmax.Running:
    """Returns the state of a softmax of own tokens alone, and frees them."""
    shape, own, ring, query = ctx.shape, ctx.shape.own, ctx.own_ring, ctx.shared.query
    part, step, before = work.part, ctx.own_step(work.index, work.first_step), 0
    if own.groups > 1:
        pl.when(part.tile > 0)(lambda: _skip(ctx, step, own.stages))
        step, before = step + part.tile * own.stages, part.offset
    stages = [step + i for i in range(own.stages)]
    for stage in stages:
        ring.await_ready(stage)
    queries = query.tiles[0].at[query.slot(work.index), part.tile if ctx.tiles > 1 else 0]
    products = mma.product(queries, ring.matrix(step), shape.head_dim, columns=own.columns)
    begin = lax.rem(work.item.target + before, jnp.int32(shape.q_len)) + part.offset - before
    places = own_tokens.Places(begin, shape.q_len, shape.head_rows)
    blocks: Any = slice(None)
    if ctx.shares_columns:
        blocks = pl.ds(ctx.first_column_block, ctx.columns // BLOCK_K)
    # Values are read while the tensor cores multiply.
    value = own_tokens.values(ring.matrix(stages[-1]).at[blocks], own, places, ctx.columns)
    mma.wait(0)
    for stage in stages:
        ring.release(stage)
    score = own_tokens.scores(mma.after_wait(products), places)
    if own.groups > 1:
        pl.when(part.tile == 0)(lambda: _skip(ctx, step + own.stages, own.stages))
    sums = mma.zeros(softmax.PARTIAL, jnp.float32) + 1 / softmax.PARTIAL
    return softmax.Running(score, sums, value)


def _skip(ctx: Context, step: Any, count: int) -> None:
    for i in range(count):
        ctx.own_ring.skip(step + i)
