"""The consumer warpgroups: each computes its parts of the items of its CTA."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.cap import capped
from ikbo_jax.pallas.few_queries import listing, own, ranges, store, user_table
from ikbo_jax.pallas.few_queries.context import BY_COLUMNS, BY_ROWS, Context, Item, Part
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, mosaic, turns
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS

#: The named barrier at which the consumers wait for each other.
CONSUMER_BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS


class _Work(NamedTuple):
    """An item, this consumer's part of it, and where its blocks are."""

    item: Item
    part: Part
    index: Any  # of the item
    first_step: Any


def _issue_scores(ctx: Context, work: _Work, step: Any) -> jax.Array:
    ctx.shared.key.await_ready(step)
    query = ctx.shared.query
    tile = work.part.tile if ctx.tiles > 1 else 0
    return mma.product(
        query.tiles[0].at[query.slot(work.index), tile],
        ctx.shared.key.matrix(step),
        ctx.shape.head_dim,
        interpret=ctx.interpret,
    )


def _weigh(
    ctx: Context, work: _Work, scores: jax.Array, block: Any, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Weighs a block's scores; returns (weights f32, maximum, sums, factor of earlier weights)."""
    scores = mma.after_wait(scores, interpret=ctx.interpret)
    ctx.shared.key.release(work.first_step + block)
    log2_scale = ctx.shape.log2_scale
    scores = capped(ctx.shape.cap, scores, interpret=ctx.interpret)
    fill = softmax.masked_score(log2_scale)
    if ctx.has_ranges:
        scores = ranges.keep_visible(ctx, work.item, work.part, block, scores, fill)
    else:
        scores = ctx.visible(work.item, block).keep(scores, fill)
    larger, shrink, p = softmax.running_weights(maximum, scores, log2_scale)
    sums = sums * lax.broadcast_in_dim(shrink, sums.shape, (0,)) + softmax.partial_sums(p)
    return p, larger, sums, shrink


def _zero_values_past_length(ctx: Context, work: _Work, block: Any) -> None:
    """Zeroes values past the item's keys, which have weight 0 but may be NaN."""
    visible = ctx.visible(work.item, block)
    tiles = ctx.shared.value.matrix(work.first_step + block)
    is_shared = (work.item.sharing == BY_ROWS) | (work.item.sharing == BY_COLUMNS)

    @pl.when(visible.is_partial)
    def _() -> None:
        @pl.when(~is_shared | (ctx.consumer == 0))
        def _() -> None:
            visible.zero_rest(tiles, interpret=ctx.interpret)
            plgpu.commit_smem()

        @pl.when(is_shared)
        def _() -> None:
            mosaic.named_barrier("sync", jnp.int32(CONSUMER_BARRIER), turns.CONSUMER_THREADS)


def _issue_values(
    ctx: Context, work: _Work, block: Any, acc: jax.Array, weights: jax.Array, is_defined: Any
) -> jax.Array:
    step = work.first_step + block
    ctx.shared.value.await_ready(step)
    if ctx.ends_in_block:
        _zero_values_past_length(ctx, work, block)
    values = ctx.shared.value.matrix(step)
    if ctx.shares_columns:
        values = values.at[pl.ds(ctx.first_column_block, ctx.columns // BLOCK_K)]
    return mma.add_product(
        acc, weights, values, ctx.staging(), is_defined=is_defined, interpret=ctx.interpret
    )


def _turn(ctx: Context, work: _Work, number: Any, act: Callable[[Context], None]) -> None:
    """Takes or hands over a turn around the products of this consumer's block `number`."""
    if ctx.config.turns:
        pl.when(number < work.part.turns)(functools.partial(act, ctx))


def _compute(ctx: Context, work: _Work) -> tuple[jax.Array, ...]:
    """Attends to this consumer's blocks, at least one; returns (maximum, sums, accumulator)."""
    part, first_step, interpret = work.part, work.first_step, ctx.interpret
    dtype = ctx.operands.query.dtype
    is_alternating = part.stride == 2
    pl.when(part.begin == 1)(functools.partial(ctx.shared.key.skip, first_step))
    _turn(ctx, work, 0, turns.take)
    scores = _issue_scores(ctx, work, first_step + part.begin)
    _turn(ctx, work, 0, turns.hand_over)
    mma.wait(0, interpret=interpret)
    maximum = softmax.no_extreme(ctx.shape.log2_scale)
    sums = mma.zeros(softmax.PARTIAL, jnp.float32)
    p, maximum, sums, _factor = _weigh(ctx, work, scores, part.begin, maximum, sums)
    pl.when(part.begin == 1)(functools.partial(ctx.shared.value.skip, first_step))

    def one_block(i: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights, maximum, sums, acc = state
        block = part.begin + i * part.stride
        step = first_step + block
        pl.when(is_alternating)(functools.partial(ctx.shared.key.skip, step + 1))
        _turn(ctx, work, i + 1, turns.take)
        scores = _issue_scores(ctx, work, step + part.stride)
        acc = _issue_values(ctx, work, block, acc, weights, i > 0)
        _turn(ctx, work, i + 1, turns.hand_over)
        mma.wait(1, interpret=interpret)
        p, maximum, sums, shrink = _weigh(ctx, work, scores, block + part.stride, maximum, sums)
        mma.wait(0, interpret=interpret)
        acc = mma.after_wait(acc, interpret=interpret)
        ctx.shared.value.release(step)
        pl.when(is_alternating)(functools.partial(ctx.shared.value.skip, step + 1))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, (0,))
        return p.astype(dtype), maximum, sums, acc

    state = (p.astype(dtype), maximum, sums, mma.zeros(ctx.columns, jnp.float32))
    weights, maximum, sums, acc = lax.fori_loop(0, part.count - 1, one_block, state)
    last = part.begin + (part.count - 1) * part.stride
    acc = _issue_values(ctx, work, last, acc, weights, part.count > 1)
    mma.wait(0, interpret=interpret)
    acc = mma.after_wait(acc, interpret=interpret)
    ctx.shared.value.release(first_step + last)

    @pl.when(is_alternating & (last + 1 < work.item.blocks))
    def _() -> None:
        ctx.shared.key.skip(first_step + last + 1)
        ctx.shared.value.skip(first_step + last + 1)

    return maximum, sums, acc


def _skip_all(ctx: Context, work: _Work) -> tuple[jax.Array, ...]:
    """Frees all blocks of an item that this consumer does not compute; returns an empty state."""

    @pl.loop(0, work.item.blocks)
    def _(block: Any) -> None:
        ctx.shared.key.skip(work.first_step + block)
        ctx.shared.value.skip(work.first_step + block)

    return tuple(softmax.running_start(ctx.columns, ctx.shape.log2_scale))


def _merged(
    ctx: Context, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, ...]:
    """Adds the other consumer's part to (acc, maximum, sums)."""
    shared = ctx.shared
    plgpu.barrier_wait(shared.exchange_ready.at[0])
    maximum2, sums2 = store.take_statistics(ctx)
    larger = softmax.further(ctx.shape.log2_scale)(maximum, maximum2)
    base, log2_scale = softmax.finite(larger, ctx.shape.log2_scale), ctx.shape.log2_scale
    factor, factor2 = (jnp.exp2((x - base) * jnp.float32(log2_scale)) for x in (maximum, maximum2))
    acc = store.take_sum(ctx, acc, factor, factor2)
    plgpu.barrier_arrive(shared.exchange_free.at[0])
    return acc, larger, sums * factor + sums2 * factor2


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
    work = _Work(item, ctx.part(item, index), index, first_step)
    part = work.part
    shared.query.await_ready(index)
    maximum, partial_sums, acc = lax.cond(
        part.count > 0,
        functools.partial(_compute, ctx, work),
        functools.partial(_skip_all, ctx, work),
    )
    if not ctx.shape.own_columns:
        shared.query.release(index)
    state: tuple[jax.Array, ...] = (acc, maximum, jnp.sum(partial_sums, axis=1))
    if ctx.shape.own_columns:
        query = shared.query.tiles[0].at[shared.query.slot(index)]
        step = first_step + jnp.maximum(item.blocks, 0)
        state = own.merged_at(ctx, item, part, query, step, (state[0], state[1], state[2]))
        shared.query.release(index)
    if shared.exchange is not None:
        state = _exchanged(ctx, part, *state)

    @pl.when(part.stores)
    def _() -> None:
        has_own = ctx.operands.self_key is not None and not ctx.shape.own_columns
        rows = own.merged(ctx, item, part, (state[0], state[1], state[2])) if has_own else state
        store.store(ctx, part, item.head, *rows)

    if ctx.shape.listed:

        @pl.when(item.next_user >= 0)
        def _() -> None:
            listing.find(ctx, item.next_user, item.next_rank)

    next_item, next_index = ctx.receive(index + 1), index + 1
    next_step = first_step + jnp.maximum(item.blocks, 0)
    if ctx.shape.own_columns:
        next_step = next_step + ctx.own_steps(item)
    return next_item, next_index, next_step


def consume(ctx: Context) -> None:
    """Computes this consumer's parts of all items of its CTA."""
    ctx = ctx.as_consumer()
    shared = ctx.shared
    is_exchanged = shared.exchange_free is not None
    if is_exchanged:

        @pl.when(ctx.consumer == 0)
        def _() -> None:
            plgpu.barrier_arrive(shared.exchange_free.at[0])

    if ctx.config.turns:  # an item ends as it begins: the turn is consumer 0's
        pl.when(ctx.consumer == 1)(functools.partial(turns.hand_over, ctx))
    zero = jnp.int32(0)
    if ctx.shape.table:
        user_table.fill(ctx)
    if ctx.shape.listed:
        place = ctx.place(zero)
        head = place.head if ctx.shape.prefetches else None
        listing.find(ctx, *ctx.listed_place(place), head)
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

    if is_exchanged:

        @pl.when(ctx.consumer == 1)
        def _() -> None:
            plgpu.barrier_wait(shared.exchange_free.at[0])
