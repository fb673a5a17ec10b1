"""The consumer warpgroups of the GDPA forward kernel: each computes 64 rows of every item."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import weights as gdpa_weights
from ikbo_jax.pallas.flash import gdpa_masked, gdpa_softmax
from ikbo_jax.pallas.flash.gdpa_context import GdpaContext, Item
from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles, stores, turns
from ikbo_jax.pallas.hopper.rings import Ring
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.problems.hopper import WGMMA_M


class _State(NamedTuple):
    """State that a consumer carries from step to step."""

    weights: jax.Array  # [64, block_kv], attention weights of the current block
    acc: Any  # [64, H] f32, without the current block
    statistics: Any = None  # of a softmax, with the current block: `gdpa_softmax.Statistics`


def _receive(ctx: GdpaContext, index: Any) -> Item:
    items = ctx.shared.items
    items.await_ready(index)
    slot = items.slot(index)
    return Item(*(items.words[slot, i] for i in range(len(Item._fields))))


def _has_rows(ctx: GdpaContext, index: Any) -> Any:
    """Whether this consumer has rows of item `index`; the end of the items has no rows."""
    return ctx.destination(index)[-1] > ctx.consumer * WGMMA_M


def _is_half(ctx: GdpaContext, item: Item) -> Any:
    """Whether keys fill no more than half of an item's last block."""
    block_kv = ctx.config.block_kv
    return item.length <= item.blocks * block_kv - block_kv // 2


def _await_block(ctx: GdpaContext, ring: Ring, item: Item, block: Any, step: Any) -> None:
    """Waits for a stage, and zeroes its rows past the sequence's end: act(0) = 0.

    Consumer 0 zeroes before its turn, and consumer 1 reads the stage in the turn that follows, so
    neither consumer waits for the other.
    """
    ring.await_ready(step)
    visible = Visible.in_block(item.length, block, ctx.config.block_kv)
    is_cut = visible.is_partial
    if ctx.config.run > 1:
        is_cut = is_cut & (item.is_resident == 0)

    @pl.when((ctx.consumer == 0) & is_cut)
    def _() -> None:
        visible.zero_rest(ring.matrix(step))
        plgpu.commit_smem()


def _issue_values(
    ctx: GdpaContext, state: _State, is_defined: Any, step: Any, keys: int
) -> jax.Array:
    """Issues the sum of the accumulator and weights times the first `keys` values at `step`."""
    if not keys:
        return state.acc
    weights = state.weights
    return mma.add_product(
        state.acc,
        weights if keys == weights.shape[1] else lax.slice(weights, (0, 0), (WGMMA_M, keys)),
        ctx.shared.value.matrix(step),
        ctx.staging(),
        is_defined=is_defined,
    )


def _place(ctx: GdpaContext, index: Any, block: Any) -> Any:
    """Returns the numbers of item and block, and where the block is masked; None without a mask."""
    if not ctx.shape.has_mask:
        return None
    return mosaic.opaque(index), block, gdpa_masked.find_cuts(ctx, index, block)


def _weights(
    ctx: GdpaContext,
    scores: jax.Array,
    item: Item,
    step: Any,
    place: Any,
    before: gdpa_softmax.Statistics | None = None,
) -> Callable[[Any], _State]:
    """Computes weights from computed scores, and frees the block of keys.

    `place` is from `_place`; `before` are the statistics of the blocks before. The returned
    function takes the accumulator without the block, and rounds the weights; call it after the
    product with the previous weights, whose operands it may not write.
    """
    scores = mma.after_wait(scores)
    ctx.shared.key.release(step)
    if ctx.shape.has_mask:
        if ctx.shape.log2_scale is not None:
            softened = gdpa_softmax.weigh(ctx, place, scores, before)
            return lambda acc: _State(*softened(acc))
        scores = gdpa_masked.keep_visible(ctx, place, scores)
    spec = ctx.shape.activation
    weights = gdpa_weights.compute_weights(spec, item.head, scores)
    dtype = ctx.outputs.out.dtype
    return lambda acc: _State(gdpa_weights.round_weights(weights, dtype), acc)


def _step(
    ctx: GdpaContext,
    item: Item,
    index: Any,
    first_step: Any,
    block: Any,
    state: _State,
    columns: int | None = None,
) -> _State:
    """Multiplies a block by its weights; computes the next block's, of the first `columns`."""
    step = first_step + block
    _await_block(ctx, ctx.shared.key, item, block + 1, step + 1)
    # Only an item's last block may hold another sequence's values.
    ctx.shared.value.await_ready(step)
    turns.take(ctx)
    # Eight matrix descriptors of the queries, constant for the item, would occupy 16 registers.
    opaque_index = mosaic.opaque(index)
    scores = ctx.product(opaque_index, step + 1, columns)
    acc = _issue_values(ctx, state, block > 0, step, ctx.config.block_kv)
    place = _place(ctx, index, block + 1)
    turns.await_scores(ctx)
    ctx.free_read_queries(index, block + 2 == item.blocks)
    finish = _weights(ctx, scores, item, step + 1, place, state.statistics)
    pl.when(block == 0)(functools.partial(ctx.free_stored_slot, index - 1))
    mma.wait(0)
    ctx.shared.value.release(step)
    state = finish(acc)
    return state._replace(weights=mma.pad(state.weights, ctx.config.block_kv))


def _end_basic_block(ctx: GdpaContext, index: Any) -> None:
    """Branches, but never, so that ptxas moves no exponentials past a wait that follows."""
    if ctx.shape.log2_scale is not None:
        never = mosaic.opaque(index) < 0
        pl.when(never)(functools.partial(plgpu.wait_smem_to_gmem, 0))


def _idle_step(ctx: GdpaContext, item: Item, index: Any, first_step: Any, block: Any) -> None:
    """Synchronises as `_step` does, without computation: for a consumer whose rows see no key."""
    step = first_step + block
    ctx.shared.key.await_ready(step + 1)
    ctx.shared.value.await_ready(step)
    turns.take(ctx)
    turns.hand_over(ctx)
    ctx.free_read_queries(index, block + 2 == item.blocks)
    ctx.shared.key.release(step + 1)
    pl.when(block == 0)(functools.partial(ctx.free_stored_slot, index - 1))
    ctx.shared.value.release(step)


def _middle_steps(
    ctx: GdpaContext, item: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """Computes all steps of an item except the last."""
    config, end = ctx.config, item.blocks - 1
    step = functools.partial(_step, ctx, item, index, first_step)
    busy_end = end
    if config.skip_empty and ctx.shape.has_mask:
        # The last of these steps computes the weights of a block that no row sees: they are 0.
        busy_end = jnp.minimum(gdpa_masked.seen_blocks(ctx, index), end)
    elif config.skip_empty:
        busy_end = jnp.where(_has_rows(ctx, index), end, 0)
    whole_end = busy_end
    if config.half_blocks:
        whole_end = jnp.maximum(busy_end - _is_half(ctx, item).astype(jnp.int32), 0)
    state = lax.fori_loop(0, whole_end, step, state)
    if config.half_blocks:  # a loop of at most one step serves as a branch
        half = functools.partial(step, columns=config.block_kv // 2)
        state = lax.fori_loop(whole_end, busy_end, half, state)
    if config.skip_empty:

        @pl.loop(busy_end, end)
        def _(block: Any) -> None:
            _idle_step(ctx, item, index, first_step, block)

    return state


def _last_step(
    ctx: GdpaContext, item: Item, next_item: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """Computes this item's accumulator, and the weights of the next item's first block.

    All branches have the same synchronisation; they differ in the products that they issue.
    """
    config, skips_items = ctx.config, ctx.config.skip_empty and not ctx.shape.has_mask
    is_defined, step = item.blocks > 1, first_step + item.blocks - 1
    next_step = ctx.step_after(first_step, item.blocks, next_item.is_resident)
    has_next = next_item.blocks > 0
    _await_block(ctx, ctx.shared.value, item, item.blocks - 1, step)

    def await_next() -> None:
        ctx.shared.query.await_ready(index + 1)
        _await_block(ctx, ctx.shared.key, next_item, jnp.int32(0), next_step)

    def free_next_queries() -> None:
        ctx.free_read_queries(index + 1, next_item.blocks == 1)

    def with_scores(keys: int) -> _State:
        await_next()
        turns.take(ctx)
        scores = ctx.product(index + 1, next_step)
        acc = _issue_values(ctx, state, is_defined, step, keys)
        place = _place(ctx, index + 1, jnp.int32(0))
        turns.await_scores(ctx, pending=1 if keys else 0)
        free_next_queries()
        finish = _weights(ctx, scores, next_item, next_step, place)
        _end_basic_block(ctx, index)
        if keys:
            mma.wait(0)
        return finish(acc)

    def without_scores(keys: int) -> _State:
        if skips_items:
            pl.when(has_next)(await_next)
        turns.take(ctx)
        acc = _issue_values(ctx, state, is_defined, step, keys)
        # Consumer 1 gave the first turn, so only consumer 0 gives the last one.
        pl.when(has_next | (ctx.consumer == 0))(functools.partial(turns.hand_over, ctx))
        if skips_items:

            @pl.when(has_next)
            def _() -> None:
                free_next_queries()
                ctx.shared.key.release(next_step)

        if keys:
            mma.wait(0)
        return state._replace(acc=acc)

    full, half, has_scores = config.block_kv, config.block_kv // 2, has_next
    if skips_items:
        has_scores = _has_rows(ctx, index + 1)
    # Whether the scores of the next item's first block are issued, and how many values of the last
    # block are multiplied; 0: this consumer has no rows.
    table = [(False, full), (True, full)]
    number = has_scores.astype(jnp.int32)
    if config.half_blocks:
        table.append((True, half))
        is_half = has_scores & _is_half(ctx, item)
        number = jnp.where(is_half, table.index((True, half)), number)
    if config.skip_empty:
        table += [(False, 0), (True, 0)]
        empty = table.index((False, 0)) + has_scores.astype(jnp.int32)
        if skips_items:
            is_busy = _has_rows(ctx, index)
        else:
            is_busy = gdpa_masked.seen_blocks(ctx, index) >= item.blocks
        number = jnp.where(is_busy, number, empty)
    branches = [
        functools.partial(with_scores if issues_scores else without_scores, keys)
        for issues_scores, keys in table
    ]
    state = lax.switch(number, branches)
    acc = mma.after_wait(state.acc)
    ctx.shared.value.release(step)
    return state._replace(acc=acc)


def _attend(ctx: GdpaContext, item: Item) -> None:
    """Computes all items of this CTA, which has at least one, pipelined."""
    pl.when(ctx.consumer == 1)(functools.partial(turns.hand_over, ctx))
    zero = jnp.int32(0)
    plgpu.barrier_wait(ctx.shared.query.ready.at[0])
    _await_block(ctx, ctx.shared.key, item, zero, zero)
    turns.take(ctx)
    scores = ctx.product(zero, zero)
    turns.hand_over(ctx)
    place = _place(ctx, zero, zero)
    mma.wait(0)
    ctx.free_read_queries(zero, item.blocks == 1)
    undefined_sums = functools.partial(mma.undefined, ctx.shape.head_dim)
    start = _weights(ctx, scores, item, zero, place)(None)

    def one_item(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step, state = carry
        state = _middle_steps(ctx, item, index, first_step, state)
        pl.when(item.blocks == 1)(functools.partial(ctx.free_stored_slot, index - 1))
        next_item, statistics = _receive(ctx, index + 1), state.statistics
        state = _last_step(ctx, item, next_item, index, first_step, state)
        _store_item(ctx, index, state.acc, statistics)
        state = state._replace(acc=undefined_sums())
        first_step = ctx.step_after(first_step, item.blocks, next_item.is_resident)
        return next_item, index + 1, first_step, state

    _, items, _, _ = lax.while_loop(
        lambda carry: carry[0].blocks > 0,
        one_item,
        (item, zero, zero, start._replace(acc=undefined_sums())),
    )
    ctx.free_stored_slot(items - 1)
    ctx.shared.query.release(items)  # the slot of the end


def consume(ctx: GdpaContext) -> None:
    """Computes 64 rows of all items of the CTA, and zeroes results without keys."""
    ctx = ctx.as_consumer()
    ctx.release_all()
    item = _receive(ctx, jnp.int32(0))
    has_items = item.blocks > 0
    pl.when(has_items)(functools.partial(_attend, ctx, item))

    @pl.when(~has_items)
    def _() -> None:
        plgpu.barrier_arrive(ctx.shared.query.free.at[0])  # the slot of the end

    _zero_rest(ctx)
    # Stores must be complete when the CTA ends.
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _stage(ctx: GdpaContext, slot: Any, out: jax.Array) -> None:
    tiles = ctx.shared.query.tiles[0].at[slot, ctx.consumer]
    for i, columns in enumerate(operand_tiles.column_blocks(out, tiles.shape[0])):
        block = tiles.at[pl.ds(i, 1)]
        operand_tiles.stage_rows(block, columns, reads_late=True)
    plgpu.commit_smem()


def _store_staged(ctx: GdpaContext, slot: Any, head: Any, first_row: Any, rows: Any) -> None:
    """Stores the first `rows` of the 64 rows staged in a query slot; all 64 by TMA."""
    stores.store_staged(
        ctx,
        [tuple(view.at[slot, ctx.consumer] for view in ctx.shared.query.tiles)],
        [ctx.outputs.out],
        (first_row, head),
        (0 * rows, rows),
        is_full=rows == WGMMA_M,
        is_partial=(rows > 0) & (rows < WGMMA_M),
    )


def _consumer_rows(ctx: GdpaContext, target: Any, rows: Any) -> tuple[Any, Any]:
    """Returns (first row in the result, rows) of this consumer's part of a tile."""
    before = ctx.consumer * WGMMA_M
    return target + before, jnp.clip(rows - before, 0, WGMMA_M)


def _store_item(ctx: GdpaContext, index: Any, acc: jax.Array, statistics: Any) -> None:
    head, target, rows = ctx.destination(index)
    first_row, rows = _consumer_rows(ctx, target, rows)

    def store() -> None:
        if ctx.shape.log2_scale is not None:
            scaled = gdpa_softmax.normalised(ctx, acc, statistics, first_row, head, rows)
        else:
            scaled = gdpa_weights.scale_result(ctx.shape.activation, head, acc)
        out = scaled.astype(ctx.outputs.out.dtype)
        if ctx.config.q_slots > 1:
            slot = ctx.shared.query.slot(index)
            _stage(ctx, slot, out)
            _store_staged(ctx, slot, head, first_row, rows)
        else:
            stores.store_rows(ctx.outputs.out, out, first_row, head, 0 * rows, rows)

    if ctx.config.skip_empty:
        pl.when(rows > 0)(store)
    else:
        store()


def _zero_rest(ctx: GdpaContext) -> None:
    """Zeroes the results of tiles without keys: rows with empty sequences, rows of no sequence."""
    heads = ctx.shape.q_heads
    with_keys, tiles = (ctx.operands.counts[i] for i in range(2))
    count = ctx.work_items((tiles - with_keys) * heads)

    @pl.when(count > 0)
    def _() -> None:
        slot = jnp.int32(0)
        _stage(ctx, slot, mma.zeros(ctx.shape.head_dim, ctx.outputs.out.dtype))

        @pl.loop(0, count)
        def _(i: Any) -> None:
            number = ctx.work_item(i)
            tile, head = with_keys + lax.div(number, heads), lax.rem(number, heads)
            words = ctx.operands.words
            target, rows = words[tile, lists.TARGET], words[tile, lists.ROWS]
            first_row, rows = _consumer_rows(ctx, target, rows)
            _store_staged(ctx, slot, head, first_row, rows)
            if ctx.outputs.lse is not None:
                lse = gdpa_softmax.rows_of(-jnp.inf)
                stores.store_rows(ctx.outputs.lse, lse, first_row, head, 0 * rows, rows)
