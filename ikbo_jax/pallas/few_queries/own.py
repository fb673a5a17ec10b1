"""The own tokens of an item's rows; see `problems.hopper.OwnStages`.

They are in a ring of their own, and added behind an item's last block; or first among the stages of
the item's values, and the softmax begins with them (`FewQueriesConfig.shared_with_own`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.few_queries.context import Context, Work
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, own_tokens
from ikbo_jax.problems.hopper import NUM_CONSUMERS


def issue_scores(ctx: Context, work: Work) -> jax.Array:
    """Waits for the own tokens of a part, and issues the products of its queries and own keys."""
    own, ring = ctx.shape.own, ctx.own_ring
    if own.groups > 1:
        first = ctx.own_step(work.index, work.first_step)
        pl.when(work.part.tile > 0)(lambda: _skip(ctx, first, own.stages))
    step = _first_step(ctx, work)
    ring.await_ready(step)
    return mma.product(
        ctx.queries(work), ring.matrix(step), ctx.shape.head_dim, columns=own.columns
    )


def begun(ctx: Context, work: Work, products: jax.Array) -> softmax.Running:
    """Begins the softmax of a part by its own tokens, after the wait for `products`; frees them."""
    products = mma.after_wait(products)

    def skipping() -> softmax.Running:
        ctx.own_ring.release(_first_step(ctx, work))
        _skip(ctx, _first_step(ctx, work) + 1, ctx.shape.own.stages - 1)
        _skip_next_group(ctx, work)
        return softmax.running_start(ctx.columns, ctx.shape.log2_scale)

    return lax.cond(_adds(ctx, work), lambda: _tokens(ctx, work, products), skipping)


def added(ctx: Context, work: Work, state: softmax.Running | None) -> softmax.Running:
    """Adds the own tokens of a part to the state of its softmax, and frees them.

    Without a state, begins the softmax of a part without keys.
    """
    log2_scale = ctx.shape.log2_scale

    def adding() -> softmax.Running:
        own = _tokens(ctx, work, issue_scores(ctx, work))
        return own if state is None else softmax.merged(state, own, log2_scale=log2_scale)

    def skipping() -> softmax.Running:
        _skip(ctx, ctx.own_step(work.index, work.first_step), ctx.shape.own.number)
        return state or softmax.running_start(ctx.columns, log2_scale)

    return lax.cond(_adds(ctx, work), adding, skipping)


def _adds(ctx: Context, work: Work) -> jax.Array:
    """Whether this consumer adds the own tokens of an item.

    Of consumers that share the keys, consumer 1 does, while consumer 0 adds up and stores the item
    before; but consumer 0, before it takes the other's sums, where consumer 1 cannot go ahead since
    the ring has one block of keys for each. Of split keys, the first split does.
    """
    part, is_first = work.part, work.item.target < ctx.shape.rows
    is_behind = ctx.shared.own is not None and ctx.config.k_stages <= NUM_CONSUMERS
    of_shared = part.takes if is_behind else part.gives
    return is_first & (of_shared | (part.stores & ~part.takes))


def _tokens(ctx: Context, work: Work, products: jax.Array) -> softmax.Running:
    """Returns the state of a softmax of own tokens alone, and frees them."""
    shape, own, ring, part = ctx.shape, ctx.shape.own, ctx.own_ring, work.part
    before = part.offset if own.groups > 1 else 0
    begin = lax.rem(work.item.target + before, jnp.int32(shape.q_len)) + part.offset - before
    places = own_tokens.Places(begin, shape.q_len, shape.head_rows)
    stages = [_first_step(ctx, work) + i for i in range(own.stages)]
    for stage in stages[1:]:
        ring.await_ready(stage)
    # Values are read while the tensor cores multiply.
    value = own_tokens.values(ctx.columns_of(ring.matrix(stages[-1])), own, places, ctx.columns)
    mma.wait(0)
    for stage in stages:
        ring.release(stage)
    score = own_tokens.scores(mma.after_wait(products), places)
    _skip_next_group(ctx, work)
    sums = mma.zeros(softmax.PARTIAL, jnp.float32) + 1 / softmax.PARTIAL
    return softmax.Running(score, sums, value)


def _first_step(ctx: Context, work: Work) -> Any:
    """Returns the step of the own tokens of this consumer's tile."""
    first, own = ctx.own_step(work.index, work.first_step), ctx.shape.own
    return first + work.part.tile * own.stages if own.groups > 1 else first


def _skip_next_group(ctx: Context, work: Work) -> None:
    """Frees the other tile's own tokens, which follow those of the first tile."""
    step, stages = _first_step(ctx, work), ctx.shape.own.stages
    if ctx.shape.own.groups > 1:
        pl.when(work.part.tile == 0)(lambda: _skip(ctx, step + stages, stages))


def _skip(ctx: Context, step: Any, count: int) -> None:
    for i in range(count):
        ctx.own_ring.skip(step + i)
