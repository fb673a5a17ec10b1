"""The consumer warpgroups of the attention kernel: each computes 64 rows of every pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.cap import capped
from ikbo_jax.pallas.flash import attention_own, softmax
from ikbo_jax.pallas.flash.attention_context import COMMON_ITEM_WORDS, AttentionContext, Item
from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles, stores, turns
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.attention import FLAG_WORDS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M

#: The named barrier at which the consumers wait for each other; the turns use the two before it.
CONSUMER_BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS


class _State(NamedTuple):
    """State that a consumer carries from step to step."""

    weights: jax.Array  # [64, block_kv], attention weights of the current block
    maximum: jax.Array  # [64] f32, row maxima of the pass's first block
    sums: jax.Array  # [64, 8] f32, whose rows sum to the row sums of the weights
    acc: jax.Array  # [64, H] f32, without the current block; in block 0, the previous pass's sum
    own: Any = None  # [64] f32, weights of own tokens, before block 0


def _receive(ctx: AttentionContext, index: Any) -> Item:
    """Waits for the descriptor of pass `index`."""
    ctx.shared.items.await_ready(index)
    return _item(ctx, index)


def _item(ctx: AttentionContext, index: Any) -> Item:
    """Reads the descriptor of pass `index`, which was received, and whose slot is not yet free."""
    slot, words = ctx.shared.items.slot(index), ctx.shared.items.words
    first = COMMON_ITEM_WORDS + 3 * ctx.consumer
    return Item(
        *(words[slot, i] for i in range(COMMON_ITEM_WORDS)),
        *(words[slot, first + i] for i in range(3)),
    )


def _issue_scores(ctx: AttentionContext, item: Item, index: Any, step: Any) -> jax.Array:
    """Issues the scores of pass `index` and the block of keys at `step`."""
    ctx.unless(item.is_resident, plgpu.barrier_wait, ctx.shared.key.ready_at(step))
    return ctx.product(index, step)


def _issue_values(
    ctx: AttentionContext, item: Item, state: _State, is_defined: Any, step: Any
) -> jax.Array:
    """Issues the sum of the accumulator and the current weights times the values at `step`."""
    ctx.unless(item.is_resident, plgpu.barrier_wait, ctx.shared.value.ready_at(step))
    return mma.add_product(
        state.acc,
        state.weights,
        ctx.shared.value.matrix(step),
        ctx.staging(),
        is_defined=is_defined,
    )


def _free_values(ctx: AttentionContext, item: Item, step: Any) -> None:
    ctx.unless(item.is_kept, plgpu.barrier_arrive, ctx.shared.value.free_at(step))


def _scores(
    ctx: AttentionContext, scores: jax.Array, item: Item, block: Any, step: Any
) -> jax.Array:
    """Caps and masks computed scores, past the user's length; frees the block of keys."""
    scores = mma.after_wait(scores)
    ctx.unless(item.is_kept, plgpu.barrier_arrive, ctx.shared.key.free_at(step))
    scores = capped(ctx.shape.cap, scores)
    visible = Visible.in_block(item.length, block, ctx.config.block_kv)
    return visible.keep(scores, softmax.masked_score(ctx.shape.log2_scale))


def _synchronise_consumers() -> None:
    """Waits until both consumers are here; they then see each other's writes to shared memory."""
    mosaic.named_barrier("sync", jnp.int32(CONSUMER_BARRIER), turns.CONSUMER_THREADS)


def _begin(
    ctx: AttentionContext, item: Item, scores: jax.Array, products: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes (weights in f32, row maxima, sums, own weights) of a pass's first block."""
    log2_scale, own = ctx.shape.log2_scale, None
    maximum = softmax.row_extreme(scores, log2_scale) * jnp.float32(log2_scale)
    if products is not None:
        own = attention_own.scores(ctx, item, products) * jnp.float32(log2_scale)
        maximum = jnp.maximum(maximum, own)
        own = jnp.exp2(own - maximum)
    p = softmax.exponentials(scores, maximum, log2_scale)
    sums = softmax.partial_sums(p)
    if own is not None:
        part = own * jnp.float32(1 / softmax.PARTIAL)
        sums = sums + lax.broadcast_in_dim(part, sums.shape, (0,))
    return p, maximum, sums, own


def _step(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    first_step: Any,
    block: Any,
    state: _State,
    meanwhile: Callable[[], None] | None = None,
) -> _State:
    """Multiplies block `block` by its weights, and computes the weights of the next block.

    `meanwhile` reads the accumulator for the last time, while the scores are in flight.
    """
    step = first_step + block
    turns.take(ctx)
    scores = _issue_scores(ctx, item, index, step + 1)
    if meanwhile is not None:
        turns.hand_over(ctx)
        meanwhile()
    value_step = ctx.value_step(index, step)
    acc = _issue_values(ctx, item, state, None if ctx.own else block > 0, value_step)
    if meanwhile is None:
        turns.await_scores(ctx)
    else:
        mma.wait(1)
    ctx.free_read_queries(index, block + 2 == item.blocks)
    scores = _scores(ctx, scores, item, block + 1, step + 1)
    p = softmax.exponentials(scores, state.maximum, ctx.shape.log2_scale)
    sums = state.sums + softmax.partial_sums(p)
    pl.when(block == 0)(functools.partial(ctx.free_stored_slot, index - 1))
    mma.wait(0)
    _free_values(ctx, item, value_step)
    return _State(p.astype(state.weights.dtype), state.maximum, sums, acc, state.own)


def _last_step(
    ctx: AttentionContext, item: Item, next_item: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """Returns the state at the next pass's first block, with this pass's sum as accumulator."""
    is_defined = None if ctx.own else item.blocks > 1
    step = ctx.value_step(index, first_step + item.blocks - 1)

    def with_next() -> tuple[Any, ...]:
        next_step = ctx.step_after(item, first_step)
        turns.take(ctx)
        ctx.shared.query.await_ready(index + 1)
        scores = _issue_scores(ctx, next_item, index + 1, next_step)
        products = None
        if ctx.own:
            products = attention_own.issue_scores(ctx, index + 1, next_step)
        acc = _issue_values(ctx, item, state, is_defined, step)
        turns.await_scores(ctx)
        ctx.free_read_queries(index + 1, next_item.blocks == 1)
        scores = _scores(ctx, scores, next_item, jnp.int32(0), next_step)
        p, maximum, sums, own = _begin(ctx, next_item, scores, products)
        mma.wait(0)
        return acc, p.astype(state.weights.dtype), maximum, sums, own

    def alone() -> tuple[Any, ...]:
        turns.take(ctx)
        acc = _issue_values(ctx, item, state, is_defined, step)
        # Consumer 1 gave the first turn, so only consumer 0 gives the last one.
        pl.when(ctx.consumer == 0)(functools.partial(turns.hand_over, ctx))
        mma.wait(0)
        return acc, state.weights, state.maximum, state.sums, state.own

    acc, weights, maximum, sums, own = lax.cond(next_item.blocks > 0, with_next, alone)
    acc = mma.after_wait(acc)
    _free_values(ctx, item, step)
    return _State(weights, maximum, sums, acc, own)


def _begin_pass(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    first_step: Any,
    previous: tuple[Any, ...],
    state: _State,
) -> _State:
    """Stores the previous pass, whose sums and maxima are `previous`, beside this pass's scores."""

    def store_previous() -> None:
        @pl.when(index > 0)
        def _() -> None:  # its descriptor is read again: no registers are left to keep it
            _check_and_store(ctx, _item(ctx, index - 1), index - 1, state.acc, *previous)

    def several_blocks() -> _State:
        return _step(ctx, item, index, first_step, jnp.int32(0), state, store_previous)

    def single_block() -> _State:
        store_previous()
        ctx.free_stored_slot(index - 1)
        return state

    return lax.cond(item.blocks > 1, several_blocks, single_block)


def _attend(ctx: AttentionContext) -> tuple[Any, Any]:
    """Computes all passes, of which the last may not be stored; returns the end's item and step."""
    zero, is_early = jnp.int32(0), ctx.is_early
    item = _receive(ctx, zero)
    turns.take(ctx)
    plgpu.barrier_wait(ctx.shared.query.ready.at[0])
    scores = _issue_scores(ctx, item, zero, zero)
    products = attention_own.issue_scores(ctx, zero, zero) if ctx.own else None
    turns.hand_over(ctx)
    mma.wait(0)
    ctx.free_read_queries(zero, item.blocks == 1)
    scores = _scores(ctx, scores, item, zero, zero)
    p, maximum, sums, own = _begin(ctx, item, scores, products)
    acc = mma.zeros(ctx.shape.head_dim, jnp.float32)
    state = _State(p.astype(ctx.outputs.out.dtype), maximum, sums, acc, own)

    def one_pass(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step, previous, state = carry
        step = functools.partial(_step, ctx, item, index, first_step)
        if state.own is not None:
            acc = attention_own.values(ctx, item, index, first_step)
            acc = acc * lax.broadcast_in_dim(state.own, acc.shape, (0,))
            state = state._replace(acc=acc)
        if is_early:
            state = _begin_pass(ctx, item, index, first_step, previous, state)
        state = lax.fori_loop(int(is_early), item.blocks - 1, step, state)
        if not is_early:
            pl.when(item.blocks == 1)(functools.partial(ctx.free_stored_slot, index - 1))
        next_item = _receive(ctx, index + 1)
        statistics: tuple[Any, ...] = (state.sums, state.maximum)
        state = _last_step(ctx, item, next_item, index, first_step, state)
        if not is_early:
            _check_and_store(ctx, item, index, state.acc, *statistics)
            statistics = ()
        return next_item, index + 1, ctx.step_after(item, first_step), statistics, state

    start = (item, zero, zero, (sums, maximum) if is_early else (), state)
    _, items, steps, previous, state = lax.while_loop(
        lambda carry: carry[0].blocks > 0, one_pass, start
    )
    if is_early:
        _check_and_store(ctx, _item(ctx, items - 1), items - 1, state.acc, *previous)
    ctx.shared.query.release(items)  # the slot of the end
    return items, steps


def _zero_hidden_values(ctx: AttentionContext, step: Any, visible: Visible) -> None:
    """Zeroes a stage's values that are not visible; consumer 0 writes, both consumers wait."""
    tiles = ctx.shared.value.matrix(step)

    @pl.when(visible.is_partial)
    def _() -> None:
        @pl.when(ctx.consumer == 0)
        def _() -> None:
            visible.zero_rest(tiles)
            plgpu.commit_smem()

        _synchronise_consumers()


def _recompute(ctx: AttentionContext, index: Any, first_step: Any) -> None:
    """Computes the flagged tiles again, with the running maximum; reuses no block."""
    shape, shared = ctx.shape, ctx.shared

    def block_step(
        item: Item, index: Any, first_step: Any, block: Any, state: softmax.Running
    ) -> softmax.Running:
        step = first_step + block
        scores = _issue_scores(ctx, item, index, step)
        mma.wait(0)
        scores = _scores(ctx, scores, item, block, step)
        state, p = softmax.running_step(state, scores, shape.log2_scale)
        step = ctx.value_step(index, step)
        shared.value.await_ready(step)
        visible = Visible.in_block(item.length, block, ctx.config.block_kv)
        _zero_hidden_values(ctx, step, visible)
        is_defined = None if ctx.own else block > 0
        acc = mma.add_product(
            state.acc,
            p.astype(ctx.outputs.out.dtype),
            shared.value.matrix(step),
            ctx.staging(),
            is_defined=is_defined,
        )
        mma.wait(0)
        acc = mma.after_wait(acc)
        shared.value.release(step)
        return state._replace(acc=acc)

    def one_pass(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step = carry
        shared.query.await_ready(index)
        step = functools.partial(block_step, item, index, first_step)
        if ctx.own:
            start = attention_own.start(ctx, item, index, first_step)
        else:
            start = softmax.running_start(shape.head_dim, shape.log2_scale)
        extreme, sums, acc = lax.fori_loop(0, item.blocks, step, start)
        natural = shape.log2_scale * softmax.LN_2
        sums = jnp.sum(sums, axis=1)
        _normalise_and_store(ctx, item, index, acc, sums, extreme, natural)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.query.release(index)
        return _receive(ctx, index + 1), index + 1, first_step + item.blocks

    first = (_receive(ctx, index), index, first_step)
    _, index, _ = lax.while_loop(lambda carry: carry[0].blocks > 0, one_pass, first)
    shared.query.release(index)


def consume(ctx: AttentionContext) -> None:
    """Computes 64 rows of all passes of the CTA, and of flagged tiles again."""
    ctx = ctx.as_consumer()
    shared = ctx.shared
    nothing = jnp.zeros((FLAG_WORDS,), jnp.int32)
    shared.flags.at[ctx.consumer][...] = plgpu.layout_cast(
        nothing, plgpu.Layout.WG_STRIDED((FLAG_WORDS,), vec_size=1)
    )
    plgpu.commit_smem()
    pl.when(ctx.consumer == 1)(functools.partial(turns.hand_over, ctx))
    end, steps = _attend(ctx)
    # A static barrier address would occupy a register through all of the code above.
    zero = mosaic.opaque(jnp.int32(0))
    plgpu.barrier_arrive(shared.flags_ready.at[zero])
    _synchronise_consumers()

    def end_here() -> None:
        # No load follows: the producer may end before TMA has read the last output.
        if ctx.config.q_slots > 1:
            shared.query.release(end - 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute_again() -> None:
        # The first result of a flagged tile must not overtake the second one.
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        ctx.free_stored_slot(end - 1)
        _recompute(ctx.replace(ends=1), end + 1, steps)

    is_flagged = (shared.flags[0, 0] | shared.flags[1, 0]) != 0
    lax.cond(is_flagged, compute_again, end_here)


def _normalise_and_store(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    acc: jax.Array,
    row_sum: jax.Array,
    maximum: jax.Array,
    unit: float = softmax.LN_2,
) -> None:
    """Divides `acc` by `row_sum`, relative to exp(`maximum` * `unit`), and stores a pass's rows."""
    place = (item.first_row, item.head, item.begin, item.end)
    has_keys = True if ctx.own else item.length > 0
    inverse = softmax.inverse_sums(row_sum, ctx.shape.output_scale)
    out = (acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))).astype(ctx.outputs.out.dtype)
    # Without keys the weights are NaN, and so may be the values that were read.
    out = jnp.where(has_keys, out, jnp.zeros((), out.dtype))
    if ctx.config.q_slots == 1:
        stores.store_rows(ctx.outputs.out, out, *place, order=ctx.row_order)
    else:
        _store_staged(ctx, item, index, out)
    if ctx.outputs.lse is not None:
        lse = jnp.log(row_sum) + maximum * jnp.float32(unit)
        lse = jnp.where(has_keys & (row_sum != 0), lse, -jnp.inf)
        stores.store_rows(ctx.outputs.lse, lse, *place, order=ctx.row_order)


def _store_staged(ctx: AttentionContext, item: Item, index: Any, out: jax.Array) -> None:
    """Stages the output in the pass's query slot; TMA stores whole tiles that stay side by side."""
    staged = tuple(
        view.at[ctx.shared.query.slot(index), ctx.consumer] for view in ctx.shared.query.tiles
    )
    matrix_view = staged[0]
    for i, columns in enumerate(operand_tiles.column_blocks(out, matrix_view.shape[0])):
        matrix_view.at[i][...] = columns
    plgpu.commit_smem()
    is_end = item.first_row + item.end == ctx.shape.rows
    is_full = (item.begin == 0) & (item.end > 0) & ((item.end == WGMMA_M) | is_end)
    stores.store_staged(
        ctx,
        [staged],
        [ctx.outputs.out],
        (item.first_row, item.head),
        (item.begin, item.end),
        is_full=is_full,
        is_partial=~is_full if ctx.shape.has_partial_passes else None,
        order=ctx.row_order,
    )


def _check_and_store(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    acc: jax.Array,
    sums: jax.Array,
    maximum: jax.Array,
) -> None:
    """Stores the rows of pass `index`; flags it if the first maximum was inexact in one of them."""
    # Past a user's length, weights are zero, but values may be infinite or NaN. Where weights
    # exceed 1, large values may overflow.
    row_sum = jnp.sum(softmax.nan_where_not_finite(sums, acc), axis=1)
    softmax.flag_rows(
        ctx.shared.flags.at[ctx.consumer],
        item.flag,
        row_sum,
        item.begin,
        # Without any key, no second result is needed.
        item.end if ctx.own else jnp.where(item.length > 0, item.end, item.begin),
        softmax.SUM_LIMITS[ctx.outputs.out.dtype.name],
    )
    _normalise_and_store(ctx, item, index, acc, row_sum, maximum)
