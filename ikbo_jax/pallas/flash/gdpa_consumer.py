"""A consumer warpgroup of the GDPA forward kernel: computes 64 rows of every item of its CTA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import weights as gdpa_weights
from ikbo_jax.pallas.flash import gdpa_store, turns
from ikbo_jax.pallas.flash.gdpa_context import Item, WarpgroupContext
from ikbo_jax.pallas.hopper import mma, mosaic, stores
from ikbo_jax.problems.hopper import WGMMA_M


class _State(NamedTuple):
    """What a consumer carries from one step to the next."""

    weights: jax.Array  # [64, block_kv], attention weights of the current block
    acc: jax.Array  # [64, H] f32, without the current block; see `_begin_item`


def _receive(ctx: WarpgroupContext, index: Any) -> Item:
    """Waits for the descriptor of item `index`."""
    slot = ctx.item_slot(index)
    plgpu.barrier_wait(ctx.shared.item_ready.at[slot])
    return Item(*(ctx.shared.items[slot, i] for i in range(len(Item._fields))))


def _has_rows(ctx: WarpgroupContext, index: Any) -> Any:
    """Whether this consumer has rows of item `index`; the end of the items has no rows."""
    return ctx.destination(index).rows > ctx.consumer * WGMMA_M


def _is_half(ctx: WarpgroupContext, item: Item) -> Any:
    """Whether keys fill no more than half of an item's last block."""
    block_kv = ctx.config.block_kv
    return item.length <= item.blocks * block_kv - block_kv // 2


def _await_block(ctx: WarpgroupContext, tiles: Any, ready: Any, item: Item, block: Any) -> None:
    """Waits for a stage, and zeroes its rows past the sequence's end: they are another sequence's.

    Zeroed keys have scores 0, and act(0) = 0; but 0 times another sequence's NaN is NaN, so values
    are zeroed as well.  Consumer 0 zeroes before its turn, and consumer 1 reads the stage in the
    turn that follows, so neither consumer waits for the other.
    """
    plgpu.barrier_wait(ready)
    keys = item.length - block * ctx.config.block_kv

    is_cut = keys < ctx.config.block_kv
    if ctx.config.run > 1:
        is_cut = is_cut & (item.is_resident == 0)

    @pl.when((ctx.consumer == 0) & is_cut)
    def _() -> None:
        stores.zero_rows(tiles, keys, interpret=ctx.interpret)
        plgpu.commit_smem()


def _await_keys(ctx: WarpgroupContext, item: Item, block: Any, step: Any) -> None:
    stage = ctx.k_stage(step)
    _await_block(ctx, ctx.shared.key[0].at[stage], ctx.shared.k_ready.at[stage], item, block)


def _await_values(ctx: WarpgroupContext, item: Item, block: Any, step: Any) -> None:
    stage = ctx.v_stage(step)
    _await_block(ctx, ctx.shared.value[0].at[stage], ctx.shared.v_ready.at[stage], item, block)


def _issue_scores(
    ctx: WarpgroupContext, index: Any, step: Any, columns: int | None = None
) -> jax.Array:
    """Issues the scores of item `index` and the first `columns` keys of the block at `step`."""
    return mma.product(
        ctx.shared.query[0].at[ctx.slot(index), ctx.consumer],
        ctx.shared.key[0].at[ctx.k_stage(step)],
        ctx.shape.head_dim,
        columns=columns,
        interpret=ctx.interpret,
    )


def _issue_values(
    ctx: WarpgroupContext, state: _State, is_defined: Any, step: Any, keys: int | None = None
) -> jax.Array:
    """Issues the sum of the accumulator and weights times the first `keys` values at `step`."""
    weights = state.weights
    return mma.add_product(
        state.acc,
        weights if keys is None else lax.slice(weights, (0, 0), (WGMMA_M, keys)),
        ctx.shared.value[0].at[ctx.v_stage(step)],
        ctx.shared.staging.at[ctx.consumer] if ctx.interpret else None,
        is_defined=is_defined,
        interpret=ctx.interpret,
    )


def _weights(
    ctx: WarpgroupContext, scores: jax.Array, item: Item, step: Any
) -> Callable[[], jax.Array]:
    """Computes weights from computed scores, and frees the block of keys.

    The returned function rounds the weights.  Call it after the product with the previous weights:
    ptxas serialises products whose operands are written while other products are in flight.
    """
    scores = mma.after_wait(scores, interpret=ctx.interpret)
    plgpu.barrier_arrive(ctx.shared.k_free.at[ctx.k_stage(step)])
    spec = ctx.shape.activation
    weights = gdpa_weights.compute_weights(spec, item.head, scores, interpret=ctx.interpret)
    return functools.partial(gdpa_weights.round_weights, weights, ctx.out.dtype)


def _free_read_queries(ctx: WarpgroupContext, index: Any, is_last: Any) -> None:
    """With one query slot, frees it as soon as the last scores of the item are computed."""
    if ctx.config.q_slots == 1:

        @pl.when(is_last)
        def _() -> None:
            plgpu.barrier_arrive(ctx.shared.q_free.at[ctx.slot(index)])


def _free_stored_slot(ctx: WarpgroupContext, index: Any) -> None:
    """With more query slots, frees a slot after TMA has read the output that was staged in it."""
    if ctx.config.q_slots > 1:

        @pl.when(index >= 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(ctx.shared.q_free.at[ctx.slot(index)])


def _step(
    ctx: WarpgroupContext,
    item: Item,
    index: Any,
    first_step: Any,
    block: Any,
    state: _State,
    meanwhile: Callable[[], None] | None = None,
    columns: int | None = None,
) -> _State:
    """Multiplies block `block` by its weights, and computes the weights of the next block.

    Weights of the next block past its first `columns` columns are zero.  `meanwhile` reads the
    accumulator for the last time, while the scores are in flight.
    """
    step = first_step + block
    _await_keys(ctx, item, block + 1, step + 1)
    # Only an item's last block may hold another sequence's values.
    plgpu.barrier_wait(ctx.shared.v_ready.at[ctx.v_stage(step)])
    turns.take(ctx)
    # Eight matrix descriptors of the queries, constant for the item, would occupy 16 registers.
    opaque_index = mosaic.opaque(index, interpret=ctx.interpret)
    scores = _issue_scores(ctx, opaque_index, step + 1, columns)
    if meanwhile is not None:
        turns.hand_over(ctx)
        meanwhile()
    acc = _issue_values(ctx, state, block > 0, step)
    if meanwhile is None:
        turns.await_scores(ctx)
    else:
        mma.wait(1, interpret=ctx.interpret)
    _free_read_queries(ctx, index, block + 2 == item.blocks)
    weights = _weights(ctx, scores, item, step + 1)
    pl.when(block == 0)(functools.partial(_free_stored_slot, ctx, index - 1))
    mma.wait(0, interpret=ctx.interpret)
    plgpu.barrier_arrive(ctx.shared.v_free.at[ctx.v_stage(step)])
    narrow = weights()
    if columns is None:
        return _State(narrow, acc)
    rest = jnp.zeros((WGMMA_M, ctx.config.block_kv - columns), narrow.dtype)
    rest = plgpu.layout_cast(rest, plgpu.Layout.WGMMA)
    return _State(jnp.concatenate([narrow, rest], axis=1), acc)


def _idle_step(ctx: WarpgroupContext, item: Item, index: Any, first_step: Any, block: Any) -> None:
    """For a consumer without rows: the same synchronisation as `_step`, no computation."""
    step = first_step + block
    plgpu.barrier_wait(ctx.shared.k_ready.at[ctx.k_stage(step + 1)])
    plgpu.barrier_wait(ctx.shared.v_ready.at[ctx.v_stage(step)])
    turns.take(ctx)
    turns.hand_over(ctx)
    _free_read_queries(ctx, index, block + 2 == item.blocks)
    plgpu.barrier_arrive(ctx.shared.k_free.at[ctx.k_stage(step + 1)])
    if not ctx.config.early_scores:  # with early_scores, `_begin_item` has freed it
        pl.when(block == 0)(functools.partial(_free_stored_slot, ctx, index - 1))
    plgpu.barrier_arrive(ctx.shared.v_free.at[ctx.v_stage(step)])


def _middle_steps(
    ctx: WarpgroupContext, item: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """All steps of an item except the last, and except the first with `early_scores`."""
    config = ctx.config
    begin, end = int(config.early_scores), item.blocks - 1
    step = functools.partial(_step, ctx, item, index, first_step)
    busy_end = jnp.where(_has_rows(ctx, index), end, 0) if config.skip_empty else end
    whole_end = busy_end
    if config.half_blocks:
        whole_end = jnp.maximum(busy_end - _is_half(ctx, item).astype(jnp.int32), begin)
    state = lax.fori_loop(begin, whole_end, step, state)
    if config.half_blocks:  # a loop of at most one step serves as a branch
        half = functools.partial(step, columns=config.block_kv // 2)
        state = lax.fori_loop(whole_end, busy_end, half, state)
    if config.skip_empty:

        @pl.loop(busy_end, end)
        def _(block: Any) -> None:
            _idle_step(ctx, item, index, first_step, block)

    return state


def _last_step(
    ctx: WarpgroupContext, item: Item, next_item: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """This item's accumulator, and the weights of the next item's first block.

    All branches have the same synchronisation; they differ in the products that they issue.
    """
    config = ctx.config
    is_defined, step = item.blocks > 1, first_step + item.blocks - 1
    next_step = ctx.step_after(first_step, item.blocks, next_item.is_resident)
    has_next = next_item.blocks > 0
    _await_values(ctx, item, item.blocks - 1, step)

    def await_next() -> None:
        plgpu.barrier_wait(ctx.shared.q_ready.at[ctx.slot(index + 1)])
        _await_keys(ctx, next_item, jnp.int32(0), next_step)

    def free_next_queries() -> None:
        _free_read_queries(ctx, index + 1, next_item.blocks == 1)

    def scores_and_values(keys: int | None = None) -> tuple[jax.Array, jax.Array]:
        await_next()
        turns.take(ctx)
        scores = _issue_scores(ctx, index + 1, next_step)
        acc = _issue_values(ctx, state, is_defined, step, keys)
        turns.await_scores(ctx)
        free_next_queries()
        weights = _weights(ctx, scores, next_item, next_step)
        mma.wait(0, interpret=ctx.interpret)
        return acc, weights()

    def without_scores(*, has_values: bool) -> tuple[jax.Array, jax.Array]:
        if config.skip_empty:
            pl.when(has_next)(await_next)
        turns.take(ctx)
        acc = _issue_values(ctx, state, is_defined, step) if has_values else state.acc
        # Consumer 1 handed over the first turn, to consumer 0; so at the end it hands over none.
        pl.when(has_next | (ctx.consumer == 0))(functools.partial(turns.hand_over, ctx))
        if config.skip_empty:

            @pl.when(has_next)
            def _() -> None:
                free_next_queries()
                plgpu.barrier_arrive(ctx.shared.k_free.at[ctx.k_stage(next_step)])

        if has_values:
            mma.wait(0, interpret=ctx.interpret)
        return acc, state.weights

    def without_values() -> tuple[jax.Array, jax.Array]:
        await_next()
        turns.take(ctx)
        scores = _issue_scores(ctx, index + 1, next_step)
        turns.await_scores(ctx, pending=0)
        free_next_queries()
        weights = _weights(ctx, scores, next_item, next_step)
        return state.acc, weights()

    branches: list[Callable[[], Any]] = [
        functools.partial(without_scores, has_values=True),
        scores_and_values,
    ]
    has_scores = _has_rows(ctx, index + 1) if config.skip_empty else has_next
    number = has_scores.astype(jnp.int32)
    if config.half_blocks:
        number = jnp.where(has_scores & _is_half(ctx, item), len(branches), number)
        branches.append(functools.partial(scores_and_values, config.block_kv // 2))
    if config.skip_empty:
        empty = len(branches) + has_scores.astype(jnp.int32)
        number = jnp.where(_has_rows(ctx, index), number, empty)
        branches += [functools.partial(without_scores, has_values=False), without_values]
    acc, weights = lax.switch(number, branches)
    acc = mma.after_wait(acc, interpret=ctx.interpret)
    plgpu.barrier_arrive(ctx.shared.v_free.at[ctx.v_stage(step)])
    return _State(weights, acc)


def _begin_item(
    ctx: WarpgroupContext, item: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """Stores the previous item while the scores of this item's second block are in flight.

    Without a second block, or without rows under `skip_empty`, it stores alone.
    """

    def store_last() -> None:
        pl.when(index > 0)(functools.partial(gdpa_store.store_item, ctx, index - 1, state.acc))

    def several_blocks() -> _State:
        return _step(ctx, item, index, first_step, jnp.int32(0), state, store_last)

    def store_only() -> _State:
        store_last()
        _free_stored_slot(ctx, index - 1)
        return state

    has_second = item.blocks > 1
    if ctx.config.skip_empty:
        has_second = has_second & _has_rows(ctx, index)
    result: _State = lax.cond(has_second, several_blocks, store_only)
    return result


def _attend(ctx: WarpgroupContext, item: Item) -> None:
    """All items of this CTA, at least one, pipelined."""
    is_early = ctx.config.early_scores
    pl.when(ctx.consumer == 1)(functools.partial(turns.hand_over, ctx))
    zero = jnp.int32(0)
    plgpu.barrier_wait(ctx.shared.q_ready.at[0])
    _await_keys(ctx, item, zero, zero)
    turns.take(ctx)
    scores = _issue_scores(ctx, zero, zero)
    turns.hand_over(ctx)
    mma.wait(0, interpret=ctx.interpret)
    _free_read_queries(ctx, zero, item.blocks == 1)
    undefined_sums = functools.partial(mma.undefined, ctx.shape.head_dim, interpret=ctx.interpret)
    weights = _weights(ctx, scores, item, zero)()

    def one_item(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step, state = carry
        if is_early:
            state = _begin_item(ctx, item, index, first_step, state)
        state = _middle_steps(ctx, item, index, first_step, state)
        if not is_early:
            pl.when(item.blocks == 1)(functools.partial(_free_stored_slot, ctx, index - 1))
        next_item = _receive(ctx, index + 1)
        state = _last_step(ctx, item, next_item, index, first_step, state)
        if not is_early:
            gdpa_store.store_item(ctx, index, state.acc)
            state = _State(state.weights, undefined_sums())
        first_step = ctx.step_after(first_step, item.blocks, next_item.is_resident)
        return next_item, index + 1, first_step, state

    _, items, _, state = lax.while_loop(
        lambda carry: carry[0].blocks > 0,
        one_item,
        (item, zero, zero, _State(weights, undefined_sums())),
    )
    if is_early:
        gdpa_store.store_item(ctx, items - 1, state.acc)
    _free_stored_slot(ctx, items - 1)
    plgpu.barrier_arrive(ctx.shared.q_free.at[ctx.slot(items)])  # the slot of the end


def consume(ctx: WarpgroupContext) -> None:
    """A consumer warpgroup."""
    shared, config = ctx.shared, ctx.config
    rings = ((shared.k_free, config.k_stages), (shared.v_free, config.v_stages))
    for free, stages in (*rings, (shared.q_free, config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_arrive(free.at[stage])
    item = _receive(ctx, jnp.int32(0))
    has_items = item.blocks > 0
    pl.when(has_items)(functools.partial(_attend, ctx, item))

    @pl.when(~has_items)
    def _() -> None:
        plgpu.barrier_arrive(shared.q_free.at[0])  # the slot of the end

    gdpa_store.zero_rest(ctx)
    # What was stored must not be lost when the CTA ends.
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
