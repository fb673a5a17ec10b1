"""The consumer warpgroups: each computes its parts of the items of its CTA."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.cap import capped
from ikbo_jax.pallas.few_queries import listing, own, ranges, store, user_table
from ikbo_jax.pallas.few_queries.context import BY_COLUMNS, BY_ROWS, Context, Part, Work
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, mosaic, turns
from ikbo_jax.problems.hopper import NUM_CONSUMERS

#: The named barrier at which the consumers wait for each other.
CONSUMER_BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS


def _issue_scores(ctx: Context, work: Work, step: Any) -> jax.Array:
    ctx.shared.key.await_ready(step)
    return mma.product(ctx.queries(work), ctx.shared.key.matrix(step), ctx.shape.head_dim)


def _weigh(
    ctx: Context, work: Work, scores: jax.Array, block: Any, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Weighs a block's scores; returns (weights f32, maximum, sums, factor of earlier weights)."""
    scores = mma.after_wait(scores)
    ctx.shared.key.release(work.first_step + block)
    log2_scale = ctx.shape.log2_scale
    scores = capped(ctx.shape.cap, scores)
    fill = softmax.masked_score(log2_scale)
    if ctx.has_ranges:
        scores = ranges.keep_visible(ctx, work.item, work.part, block, scores, fill)
    else:
        scores = ctx.visible(work.item, block).keep(scores, fill)
    larger, shrink, p = softmax.running_weights(maximum, scores, log2_scale)
    sums = sums * lax.broadcast_in_dim(shrink, sums.shape, (0,)) + softmax.partial_sums(p)
    return p, larger, sums, shrink


def _zero_values_past_length(ctx: Context, work: Work, block: Any) -> None:
    """Zeroes values past the item's keys, which have weight 0 but may be NaN."""
    visible = ctx.visible(work.item, block)
    tiles = ctx.shared.value.matrix(ctx.value_step(work.index, work.first_step + block))
    is_shared = (work.item.sharing == BY_ROWS) | (work.item.sharing == BY_COLUMNS)

    @pl.when(visible.is_partial)
    def _() -> None:
        @pl.when(~is_shared | (ctx.consumer == 0))
        def _() -> None:
            visible.zero_rest(tiles)
            plgpu.commit_smem()

        @pl.when(is_shared)
        def _() -> None:
            mosaic.named_barrier("sync", jnp.int32(CONSUMER_BARRIER), turns.CONSUMER_THREADS)


def _issue_values(
    ctx: Context, work: Work, block: Any, acc: jax.Array, weights: jax.Array, is_defined: Any
) -> jax.Array:
    step = ctx.value_step(work.index, work.first_step + block)
    ctx.shared.value.await_ready(step)
    if ctx.ends_in_block:
        _zero_values_past_length(ctx, work, block)
    values = ctx.columns_of(ctx.shared.value.matrix(step))
    return mma.add_product(acc, weights, values, ctx.staging(), is_defined=is_defined)


def _turn(ctx: Context, work: Work, number: Any, act: Callable[[Context], None]) -> None:
    """Takes or hands over a turn around the products of this consumer's block `number`."""
    if ctx.config.turns:
        pl.when(number < work.part.turns)(functools.partial(act, ctx))


def _compute(ctx: Context, work: Work) -> softmax.Running:
    """Attends to this consumer's blocks, at least one."""
    part, first_step = work.part, work.first_step
    begins_own, value_step = ctx.own_stages > 0, functools.partial(ctx.value_step, work.index)
    dtype = ctx.operands.query.dtype
    is_alternating = part.stride == 2
    pl.when(part.begin == 1)(functools.partial(ctx.shared.key.skip, first_step))
    _turn(ctx, work, 0, turns.take)
    scores = _issue_scores(ctx, work, first_step + part.begin)
    if begins_own:
        products = own.issue_scores(ctx, work)
    _turn(ctx, work, 0, turns.hand_over)
    mma.wait(0)
    if begins_own:
        maximum, sums, acc = own.begun(ctx, work, products)
    else:
        maximum = softmax.no_extreme(ctx.shape.log2_scale)
        sums = mma.zeros(softmax.PARTIAL, jnp.float32)
    p, maximum, sums, factor = _weigh(ctx, work, scores, part.begin, maximum, sums)
    if begins_own:
        acc = acc * lax.broadcast_in_dim(factor, acc.shape, (0,))
    pl.when(part.begin == 1)(functools.partial(ctx.shared.value.skip, value_step(first_step)))

    def one_block(i: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights, maximum, sums, acc = state
        block = part.begin + i * part.stride
        step = first_step + block
        pl.when(is_alternating)(functools.partial(ctx.shared.key.skip, step + 1))
        _turn(ctx, work, i + 1, turns.take)
        scores = _issue_scores(ctx, work, step + part.stride)
        acc = _issue_values(ctx, work, block, acc, weights, None if begins_own else i > 0)
        _turn(ctx, work, i + 1, turns.hand_over)
        mma.wait(1)
        p, maximum, sums, shrink = _weigh(ctx, work, scores, block + part.stride, maximum, sums)
        mma.wait(0)
        acc = mma.after_wait(acc)
        ctx.shared.value.release(value_step(step))
        further = value_step(step + 1)
        pl.when(is_alternating)(functools.partial(ctx.shared.value.skip, further))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, (0,))
        return p.astype(dtype), maximum, sums, acc

    weights = p.astype(dtype)
    if not begins_own:
        acc = mma.zeros(ctx.columns, jnp.float32)
    state = (weights, maximum, sums, acc)
    weights, maximum, sums, acc = lax.fori_loop(0, part.count - 1, one_block, state)
    last = part.begin + (part.count - 1) * part.stride
    acc = _issue_values(ctx, work, last, acc, weights, None if begins_own else part.count > 1)
    mma.wait(0)
    acc = mma.after_wait(acc)
    ctx.shared.value.release(value_step(first_step + last))

    @pl.when(is_alternating & (last + 1 < work.item.blocks))
    def _() -> None:
        ctx.shared.key.skip(first_step + last + 1)
        ctx.shared.value.skip(value_step(first_step + last + 1))

    return softmax.Running(maximum, sums, acc)


def _skip_all(ctx: Context, work: Work) -> softmax.Running:
    """Frees all blocks of an item that this consumer does not compute; returns the first state."""
    state = own.added(ctx, work, None) if ctx.own_stages else None

    @pl.loop(0, work.item.blocks)
    def _(block: Any) -> None:
        ctx.shared.key.skip(work.first_step + block)
        ctx.shared.value.skip(ctx.value_step(work.index, work.first_step + block))

    return state or softmax.running_start(ctx.columns, ctx.shape.log2_scale)


def _merged(
    ctx: Context, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, ...]:
    """Adds the other consumer's part to (acc, maximum, sums)."""
    shared = ctx.shared
    plgpu.barrier_wait(shared.exchange_ready.at[0])
    maximum2, sums2 = store.take_statistics(ctx)
    larger, *factors = softmax.merging_factors(maximum, maximum2, ctx.shape.log2_scale)
    acc = store.take_sum(ctx, acc, *factors)
    plgpu.barrier_arrive(shared.exchange_free.at[0])
    return acc, larger, sums * factors[0] + sums2 * factors[1]


def _exchanged(ctx: Context, part: Part, *state: jax.Array) -> tuple[jax.Array, ...]:
    """Adds consumer 1's (acc, maximum, sums) to consumer 0's if the consumers share the keys."""

    @pl.when(part.gives)
    def _() -> None:
        plgpu.barrier_wait(ctx.shared.exchange_free.at[0])
        store.give(ctx, *state)
        plgpu.barrier_arrive(ctx.shared.exchange_ready.at[0])

    return lax.cond(part.takes, functools.partial(_merged, ctx, *state), lambda: state)


def _one_item(carry: tuple[Any, ...], ctx: Context) -> tuple[Any, ...]:
    item, index, first_step = carry
    shared = ctx.shared
    work = Work(item, ctx.part(item, index), index, first_step)
    part = work.part
    shared.query.await_ready(index)
    compute, skip = (functools.partial(x, ctx, work) for x in (_compute, _skip_all))
    running = lax.cond(part.count > 0, compute, skip)
    if shared.own is not None:
        running = own.added(ctx, work, running)
    shared.query.release(index)
    state: tuple[jax.Array, ...] = (running.acc, running.extreme, jnp.sum(running.sums, axis=1))
    if shared.exchange is not None:
        state = _exchanged(ctx, part, *state)
    pl.when(part.stores)(functools.partial(store.store, ctx, part, item.head, *state))

    if ctx.shape.listed:

        @pl.when(item.next_user >= 0)
        def _() -> None:
            listing.find(ctx, item.next_user, item.next_rank)

    next_item, next_index = ctx.receive(index + 1), index + 1
    return next_item, next_index, first_step + jnp.maximum(item.blocks, 0)


def consume(ctx: Context) -> None:
    """Computes this consumer's parts of all items of its CTA."""
    ctx = ctx.as_consumer()
    shared = ctx.shared
    free = shared.exchange_free
    if free is not None:
        pl.when(ctx.consumer == 0)(lambda: plgpu.barrier_arrive(free.at[0]))
    if ctx.config.turns:  # an item ends as it begins: the turn is consumer 0's
        pl.when(ctx.consumer == 1)(functools.partial(turns.hand_over, ctx))
    zero = jnp.int32(0)
    if ctx.shape.table:
        user_table.fill(ctx)
    if ctx.shape.listed:
        place = ctx.place(zero)
        head = place.head if ctx.shape.prefetches else None
        listing.find(ctx, *ctx.listed_place(place.slot), head)
    first = (ctx.receive(zero), zero, zero)
    end: tuple[Any, ...] = lax.while_loop(
        lambda carry: carry[0].blocks >= 0, functools.partial(_one_item, ctx=ctx), first
    )
    index = end[1]
    # The slot of the end: gathering warps, if there are any, fill it.
    if ctx.shape.listed:
        shared.query.await_ready(index)
    shared.query.release(index)
    if ctx.config.turns:
        pl.when(ctx.consumer == 0)(functools.partial(turns.take, ctx))
    if free is not None:
        pl.when(ctx.consumer == 1)(lambda: plgpu.barrier_wait(free.at[0]))
