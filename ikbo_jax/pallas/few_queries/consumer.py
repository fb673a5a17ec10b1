"""A consumer warpgroup: computes its parts of the items of its CTA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import exchange, listing, store, user_table
from ikbo_jax.pallas.few_queries.context import BY_COLUMNS, BY_ROWS, Context, Item, Part
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import mma, mosaic, stores, turns
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M

#: The named barrier at which the consumers wait for each other.
CONSUMER_BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS


class _Work(NamedTuple):
    """An item, this consumer's part of it, and where its blocks are."""

    item: Item
    part: Part
    index: Any  # of the item
    first_step: Any


class _Sums(NamedTuple):
    """The softmax's state; weights are relative to the maximum."""

    maximum: jax.Array  # [64] f32, raw scores
    sums: jax.Array  # [64, 8] f32, whose rows sum to the row sums of the weights
    acc: jax.Array  # [64, columns] f32


def _nothing_yet(ctx: Context) -> float:
    return -float("inf") if ctx.shape.log2_scale > 0 else float("inf")


def _finite(ctx: Context, maximum: jax.Array) -> jax.Array:
    """The maximum, or 0 in a row that has had no score above -inf: all its weights are 0."""
    return jnp.where(maximum == _nothing_yet(ctx), 0.0, maximum)


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
    """(weights f32, maximum, sums, factor of earlier weights) of computed scores of a block."""
    scores = mma.after_wait(scores, interpret=ctx.interpret)
    ctx.shared.key.release(work.first_step + block)
    log2_scale = ctx.shape.log2_scale
    scores = ctx.visible(work.item, block).keep(scores, softmax.masked_score(log2_scale))
    further = jnp.maximum if log2_scale > 0 else jnp.minimum
    larger = further(maximum, softmax.row_extreme(scores, log2_scale))
    finite = _finite(ctx, larger)
    shrink = jnp.exp2((maximum - finite) * jnp.float32(log2_scale))
    p = softmax.exact_exponentials(scores, finite, log2_scale)
    sums = sums * lax.broadcast_in_dim(shrink, sums.shape, (0,)) + softmax.partial_sums(p)
    return p, larger, sums, shrink


def _zero_values_past_length(ctx: Context, work: _Work, block: Any) -> None:
    """Zeroes values past the user's length, which have weight 0 but may be NaN."""
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
    if ctx.operands.lengths is not None:
        _zero_values_past_length(ctx, work, block)
    values = ctx.shared.value.matrix(step)
    if ctx.shares_columns:
        values = values.at[pl.ds(ctx.first_column_block, ctx.columns // BLOCK_K)]
    return mma.add_product(
        acc,
        weights,
        values,
        ctx.staging(),
        is_defined=is_defined,
        interpret=ctx.interpret,
    )


def _take_turn(ctx: Context, work: _Work, number: Any) -> None:
    """Before the products of this consumer's block `number` are issued."""
    if ctx.config.turns:
        pl.when(number < work.part.turns)(functools.partial(turns.take, ctx))


def _hand_over_turn(ctx: Context, work: _Work, number: Any) -> None:
    """After the products of this consumer's block `number` are issued."""
    if ctx.config.turns:
        pl.when(number < work.part.turns)(functools.partial(turns.hand_over, ctx))


def _skip_keys(ctx: Context, step: Any) -> None:
    """Frees a block of keys that this consumer does not use."""
    ctx.shared.key.await_ready(step)
    ctx.shared.key.release(step)


def _skip_values(ctx: Context, step: Any) -> None:
    ctx.shared.value.await_ready(step)
    ctx.shared.value.release(step)


def _compute(ctx: Context, work: _Work) -> tuple[jax.Array, ...]:
    """The sums of this consumer's blocks, of which there is at least one."""
    part, first_step, interpret = work.part, work.first_step, ctx.interpret
    dtype = ctx.operands.query.dtype
    is_alternating = part.stride == 2
    pl.when(part.begin == 1)(functools.partial(_skip_keys, ctx, first_step))
    _take_turn(ctx, work, 0)
    scores = _issue_scores(ctx, work, first_step + part.begin)
    _hand_over_turn(ctx, work, 0)
    mma.wait(0, interpret=interpret)
    row = functools.partial(plgpu.layout_cast, new_layout=stores.ROW_LAYOUT)
    maximum = row(jnp.full((WGMMA_M,), _nothing_yet(ctx), jnp.float32))
    sums = mma.zeros(softmax.PARTIAL, jnp.float32)
    p, maximum, sums, _factor = _weigh(ctx, work, scores, part.begin, maximum, sums)
    pl.when(part.begin == 1)(functools.partial(_skip_values, ctx, first_step))

    def one_block(i: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights, maximum, sums, acc = state
        block = part.begin + i * part.stride
        step = first_step + block
        pl.when(is_alternating)(functools.partial(_skip_keys, ctx, step + 1))
        _take_turn(ctx, work, i + 1)
        scores = _issue_scores(ctx, work, step + part.stride)
        acc = _issue_values(ctx, work, block, acc, weights, i > 0)
        _hand_over_turn(ctx, work, i + 1)
        mma.wait(1, interpret=interpret)
        p, maximum, sums, shrink = _weigh(ctx, work, scores, block + part.stride, maximum, sums)
        mma.wait(0, interpret=interpret)
        acc = mma.after_wait(acc, interpret=interpret)
        ctx.shared.value.release(step)
        pl.when(is_alternating)(functools.partial(_skip_values, ctx, step + 1))
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
        _skip_keys(ctx, first_step + last + 1)
        _skip_values(ctx, first_step + last + 1)

    return maximum, sums, acc


def _skip_all(ctx: Context, work: _Work) -> tuple[jax.Array, ...]:
    @pl.loop(0, work.item.blocks)
    def _(block: Any) -> None:
        _skip_keys(ctx, work.first_step + block)
        _skip_values(ctx, work.first_step + block)

    row = functools.partial(plgpu.layout_cast, new_layout=stores.ROW_LAYOUT)
    return (
        row(jnp.full((WGMMA_M,), _nothing_yet(ctx), jnp.float32)),
        mma.zeros(softmax.PARTIAL, jnp.float32),
        mma.zeros(ctx.columns, jnp.float32),
    )


def _merged(
    ctx: Context, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, ...]:
    """(acc, maximum, sums) with the other consumer's part."""
    shared = ctx.shared
    plgpu.barrier_wait(shared.exchange_ready.at[0])
    maximum2, sums2 = exchange.take_statistics(ctx)
    further = jnp.maximum if ctx.shape.log2_scale > 0 else jnp.minimum
    larger = further(maximum, maximum2)
    finite = _finite(ctx, larger)
    log2_scale = jnp.float32(ctx.shape.log2_scale)
    factor, factor2 = (jnp.exp2((x - finite) * log2_scale) for x in (maximum, maximum2))
    acc = exchange.take_sum(ctx, acc, factor, factor2)
    plgpu.barrier_arrive(shared.exchange_free.at[0])
    return acc, larger, sums * factor + sums2 * factor2


def _exchanged(ctx: Context, part: Part, *state: jax.Array) -> tuple[jax.Array, ...]:
    """(acc, maximum, sums); if the consumers share the keys, consumer 0 adds consumer 1's."""

    @pl.when(part.gives)
    def _() -> None:
        plgpu.barrier_wait(ctx.shared.exchange_free.at[0])
        exchange.give(ctx, *state)
        plgpu.barrier_arrive(ctx.shared.exchange_ready.at[0])

    exchanged: tuple[jax.Array, ...] = lax.cond(
        part.takes, functools.partial(_merged, ctx, *state), lambda: state
    )
    return exchanged


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
    shared.query.release(index)
    state: tuple[jax.Array, ...] = (acc, maximum, jnp.sum(partial_sums, axis=1))
    if shared.exchange is not None:
        state = _exchanged(ctx, part, *state)
    pl.when(part.stores)(functools.partial(store.store, ctx, part, item.head, *state))
    if ctx.shape.listed:

        @pl.when(item.next_user >= 0)
        def _() -> None:
            listing.find(ctx, item.next_user, item.next_rank)

    return ctx.receive(index + 1), index + 1, first_step + jnp.maximum(item.blocks, 0)


def consume(ctx: Context) -> None:
    """A consumer warpgroup."""
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
    # The slot of the end, which the gathering warps have, too, if there are any.
    if ctx.shape.listed:
        shared.query.await_ready(index)
    shared.query.release(index)
    if ctx.config.turns:
        pl.when(ctx.consumer == 0)(functools.partial(turns.take, ctx))

    if is_exchanged:

        @pl.when(ctx.consumer == 1)
        def _() -> None:
            plgpu.barrier_wait(shared.exchange_free.at[0])
