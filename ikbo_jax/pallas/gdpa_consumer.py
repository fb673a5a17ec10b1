"""A consumer warpgroup of the GDPA forward kernel: 64 rows of each of its CTA's items."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import accumulator, gdpa_tiles, gdpa_weights, mosaic, softmax
from ikbo_jax.pallas.gdpa_role import Item, Place, Role
from ikbo_jax.tuning.configs import BLOCK_K, NUM_CONSUMERS, WGMMA_M

#: Named barriers of the consumers' turns, one each.
TURN_BARRIER = 4
CONSUMER_THREADS = NUM_CONSUMERS * softmax.WARPGROUP_SIZE


class _State(NamedTuple):
    """What a consumer carries from one step to the next."""

    weights: jax.Array  # [64, block_kv] of the block at hand
    acc: jax.Array  # [64, H] f32, without the block at hand


def _receive(role: Role, index: Any) -> Item:
    """Waits for the producer's description of an item."""
    slot = role.item_slot(index)
    plgpu.barrier_wait(role.shared.item_ready.at[slot])
    return Item(*(role.shared.items[slot, i] for i in range(len(Item._fields))))


def _place(role: Role, index: Any) -> Place:
    first, slot = len(Item._fields), role.item_slot(index)
    return Place(*(role.shared.items[slot, first + i] for i in range(len(Place._fields))))


def _take_turn(role: Role) -> None:
    mosaic.named_barrier("sync", TURN_BARRIER + role.consumer, CONSUMER_THREADS)


def _pass_turn(role: Role) -> None:
    mosaic.named_barrier("arrive", TURN_BARRIER + 1 - role.consumer, CONSUMER_THREADS)


def _await_block(role: Role, tiles: Any, ready: Any, item: Item, block: Any) -> None:
    """Waits for a stage, and zeroes its rows past the sequence's end, which are another sequence's.

    Zeroed keys have scores 0, and every activation of 0 is 0; but 0 times another sequence's NaN is
    NaN, so values are zeroed as well.  Consumer 0 does it before its turn, and consumer 1 reads the
    stage in the turn that follows, so neither has to wait for the other.
    """
    plgpu.barrier_wait(ready)
    keys = item.length - block * role.config.block_kv

    is_cut = keys < role.config.block_kv
    if role.config.run > 1:
        is_cut = is_cut & (item.is_here == 0)

    @pl.when((role.consumer == 0) & is_cut)
    def _() -> None:
        softmax.zero_rows(tiles, keys, interpret=role.interpret)
        plgpu.commit_smem()


def _await_keys(role: Role, item: Item, block: Any, step: Any) -> None:
    stage = role.k_stage(step)
    _await_block(role, role.shared.key[0].at[stage], role.shared.k_ready.at[stage], item, block)


def _await_values(role: Role, item: Item, block: Any, step: Any) -> None:
    stage = role.v_stage(step)
    _await_block(role, role.shared.value[0].at[stage], role.shared.v_ready.at[stage], item, block)


def _issue_scores(role: Role, index: Any, step: Any) -> jax.Array:
    """Scores of the item number `index` and the keys in ring position `step`."""
    return accumulator.product(
        role.shared.query[0].at[role.slot(index), role.consumer],
        role.shared.key[0].at[role.k_stage(step)],
        pl.cdiv(role.shape.head_dim, accumulator.WGMMA_K) * accumulator.WGMMA_K,
        interpret=role.interpret,
    )


def _issue_values(role: Role, state: _State, is_defined: Any, step: Any) -> jax.Array:
    return accumulator.add_product(
        state.acc,
        is_defined,
        state.weights,
        role.shared.value[0].at[role.v_stage(step)],
        role.shared.rows.at[role.consumer] if role.interpret else None,
        interpret=role.interpret,
    )


def _weights(role: Role, scores: jax.Array, item: Item, step: Any) -> Callable[[], jax.Array]:
    """Makes weights of scores that have been waited for, and frees their keys.

    What it returns rounds them, to be called after the product with the weights before them: ptxas
    serialises products whose operands are made while others are in flight.
    """
    scores = accumulator.settled(scores, interpret=role.interpret)
    plgpu.barrier_arrive(role.shared.k_free.at[role.k_stage(step)])
    how = role.shape.weighing
    weights = gdpa_weights.weigh(how, item.head, scores, interpret=role.interpret)
    return functools.partial(gdpa_weights.rounded, weights, role.out.dtype)


def _free_read_queries(role: Role, index: Any, is_last: Any) -> None:
    """With a single slot, the next queries may come as soon as the last scores are there."""
    if role.config.q_slots == 1:

        @pl.when(is_last)
        def _() -> None:
            plgpu.barrier_arrive(role.shared.q_free.at[role.slot(index)])


def _free_stored_slot(role: Role, index: Any) -> None:
    """With more slots, a slot is free once the output that was staged in it has left."""
    if role.config.q_slots > 1:

        @pl.when(index >= 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(role.shared.q_free.at[role.slot(index)])


def _await_scores(role: Role) -> None:
    """Waits for the scores, the products before the last; the other consumer may go ahead."""
    if not role.config.late_turns:
        _pass_turn(role)
    accumulator.wait(1, interpret=role.interpret)
    if role.config.late_turns:
        _pass_turn(role)


def _step(
    role: Role,
    item: Item,
    index: Any,
    first_step: Any,
    block: Any,
    state: _State,
    meanwhile: Callable[[], None] | None = None,
) -> _State:
    """Multiplies block `block`, whose weights are at hand, and makes the weights of the next;
    `meanwhile` reads the accumulator for the last time while the scores are multiplied."""
    step = first_step + block
    _await_keys(role, item, block + 1, step + 1)
    # Before the last block no value is another sequence's.
    plgpu.barrier_wait(role.shared.v_ready.at[role.v_stage(step)])
    _take_turn(role)
    # The eight descriptors of the queries, known for the whole item, would take 16 registers.
    scores = _issue_scores(role, mosaic.opaque(index, interpret=role.interpret), step + 1)
    if meanwhile is not None:
        _pass_turn(role)
        meanwhile()
    acc = _issue_values(role, state, block > 0, step)
    if meanwhile is None:
        _await_scores(role)
    else:
        accumulator.wait(1, interpret=role.interpret)
    _free_read_queries(role, index, block + 2 == item.blocks)
    weights = _weights(role, scores, item, step + 1)
    pl.when(block == 0)(functools.partial(_free_stored_slot, role, index - 1))
    accumulator.wait(0, interpret=role.interpret)
    plgpu.barrier_arrive(role.shared.v_free.at[role.v_stage(step)])
    return _State(weights(), acc)


def _last_step(
    role: Role, item: Item, following: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """This item's accumulator, and the weights of the next item's first block."""
    is_defined, step = item.blocks > 1, first_step + item.blocks - 1
    next_step = role.step_after(first_step, item.blocks, following.is_here)
    _await_values(role, item, item.blocks - 1, step)

    def with_next() -> tuple[jax.Array, jax.Array]:
        plgpu.barrier_wait(role.shared.q_ready.at[role.slot(index + 1)])
        _await_keys(role, following, jnp.int32(0), next_step)
        _take_turn(role)
        scores = _issue_scores(role, index + 1, next_step)
        acc = _issue_values(role, state, is_defined, step)
        _await_scores(role)
        _free_read_queries(role, index + 1, following.blocks == 1)
        weights = _weights(role, scores, following, next_step)
        accumulator.wait(0, interpret=role.interpret)
        return acc, weights()

    def alone() -> tuple[jax.Array, jax.Array]:
        _take_turn(role)
        acc = _issue_values(role, state, is_defined, step)
        # The first turn was given to consumer 0, so it is consumer 1 that gives none at the end.
        pl.when(role.consumer == 0)(functools.partial(_pass_turn, role))
        accumulator.wait(0, interpret=role.interpret)
        return acc, state.weights

    acc, weights = lax.cond(following.blocks > 0, with_next, alone)
    acc = accumulator.settled(acc, interpret=role.interpret)
    plgpu.barrier_arrive(role.shared.v_free.at[role.v_stage(step)])
    return _State(weights, acc)


def _stage(role: Role, slot: Any, out: jax.Array) -> None:
    """Writes a result where the queries of a slot were."""
    shape = role.shape
    matrix_view = role.shared.query[0].at[slot, role.consumer]
    width = shape.column_blocks * BLOCK_K
    if shape.head_dim < width:  # what lies past the head width is left out
        padding = jnp.zeros((WGMMA_M, width - shape.head_dim), out.dtype)
        out = jnp.concatenate([out, plgpu.layout_cast(padding, plgpu.Layout.WGMMA)], axis=1)
    for i in range(shape.column_blocks):
        columns = lax.slice(out, (0, i * BLOCK_K), (WGMMA_M, (i + 1) * BLOCK_K))
        softmax.stage_tile(matrix_view.at[i], columns, interpret=role.interpret)
    plgpu.commit_smem()


def _store_staged(role: Role, slot: Any, head: Any, first_row: Any, rows: Any) -> None:
    """Stores the first `rows` rows of what is staged in a slot: by TMA if it is all of them."""
    shape = role.shape
    matrix_view, copy_view = (view.at[slot, role.consumer] for view in role.shared.query)

    @pl.when(rows == WGMMA_M)
    def _() -> None:
        for i in range(shape.column_blocks):
            plgpu.copy_smem_to_gmem(
                copy_view.at[i],
                role.out.at[pl.ds(first_row, WGMMA_M), head, role.columns(i)],
            )

    @pl.when((rows > 0) & (rows < WGMMA_M))
    def _() -> None:
        softmax.store_staged_rows(
            role.out, matrix_view, first_row, head, 0 * rows, rows, interpret=role.interpret
        )
        plgpu.commit_smem()  # TMA writes the next queries where these threads have just read


def _own_rows(role: Role, target: Any, rows: Any) -> tuple[Any, Any]:
    """(first row in the result, rows) of this consumer's part of a tile."""
    before = role.consumer * WGMMA_M
    return target + before, jnp.clip(rows - before, 0, WGMMA_M)


def _finish(role: Role, index: Any, acc: jax.Array) -> None:
    """Stores the rows of an item."""
    head, target, rows = _place(role, index)
    out = gdpa_weights.finish(role.shape.weighing, head, acc).astype(role.out.dtype)
    first_row, rows = _own_rows(role, target, rows)
    if role.config.q_slots > 1:
        slot = role.slot(index)
        _stage(role, slot, out)
        _store_staged(role, slot, head, first_row, rows)
        return
    softmax.store_rows(
        role.out,
        out,
        first_row,
        head,
        0 * rows,
        rows,
        role.shared.rows.at[role.consumer] if role.interpret else None,
        interpret=role.interpret,
    )


def _begin_item(role: Role, item: Item, index: Any, first_step: Any, state: _State) -> _State:
    """Stores the item before while this one's second block is multiplied, if it has one."""

    def finish_last() -> None:
        pl.when(index > 0)(functools.partial(_finish, role, index - 1, state.acc))

    def several_blocks() -> _State:
        return _step(role, item, index, first_step, jnp.int32(0), state, finish_last)

    def single_block() -> _State:
        finish_last()
        _free_stored_slot(role, index - 1)
        return state

    begun: _State = lax.cond(item.blocks > 1, several_blocks, single_block)
    return begun


def _attend(role: Role, item: Item) -> None:
    """All items of this CTA, of which there is one at least, pipelined."""
    is_early = role.config.early_scores
    pl.when(role.consumer == 1)(functools.partial(_pass_turn, role))
    zero = jnp.int32(0)
    plgpu.barrier_wait(role.shared.q_ready.at[0])
    _await_keys(role, item, zero, zero)
    _take_turn(role)
    scores = _issue_scores(role, zero, zero)
    _pass_turn(role)
    accumulator.wait(0, interpret=role.interpret)
    _free_read_queries(role, zero, item.blocks == 1)
    unset = functools.partial(accumulator.undefined, role.shape.head_dim, interpret=role.interpret)
    weights = _weights(role, scores, item, zero)()

    def one(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step, state = carry
        step = functools.partial(_step, role, item, index, first_step)
        if is_early:
            state = _begin_item(role, item, index, first_step, state)
        state = lax.fori_loop(int(is_early), item.blocks - 1, step, state)
        if not is_early:
            pl.when(item.blocks == 1)(functools.partial(_free_stored_slot, role, index - 1))
        following = _receive(role, index + 1)
        state = _last_step(role, item, following, index, first_step, state)
        if not is_early:
            _finish(role, index, state.acc)
            state = _State(state.weights, unset())
        first_step = role.step_after(first_step, item.blocks, following.is_here)
        return following, index + 1, first_step, state

    _, items, _, state = lax.while_loop(
        lambda carry: carry[0].blocks > 0, one, (item, zero, zero, _State(weights, unset()))
    )
    if is_early:
        _finish(role, items - 1, state.acc)
    _free_stored_slot(role, items - 1)
    plgpu.barrier_arrive(role.shared.q_free.at[role.slot(items)])  # of the end


def _zero_rest(role: Role) -> None:
    """Zeroes the results of tiles without keys: of empty sequences, and of rows of none."""
    heads = role.shape.q_heads
    done, tiles = (role.operands.counts[i] for i in range(2))
    count = role.share((tiles - done) * heads)

    @pl.when(count > 0)
    def _() -> None:
        slot = jnp.int32(0)
        zeros = jnp.zeros((WGMMA_M, role.shape.head_dim), role.out.dtype)
        _stage(role, slot, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

        @pl.loop(0, count)
        def _(i: Any) -> None:
            number = role.turn(i)
            tile, head = done + lax.div(number, heads), lax.rem(number, heads)
            words = role.operands.words
            target, rows = words[tile, gdpa_tiles.TARGET], words[tile, gdpa_tiles.ROWS]
            _store_staged(role, slot, head, *_own_rows(role, target, rows))


def consume(role: Role) -> None:
    """A consumer warpgroup."""
    shared, config = role.shared, role.config
    rings = ((shared.k_free, config.k_stages), (shared.v_free, config.v_stages))
    for free, stages in (*rings, (shared.q_free, config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_arrive(free.at[stage])
    item = _receive(role, jnp.int32(0))
    has_items = item.blocks > 0
    pl.when(has_items)(functools.partial(_attend, role, item))

    @pl.when(~has_items)
    def _() -> None:
        plgpu.barrier_arrive(shared.q_free.at[0])  # of the end

    _zero_rest(role)
    # What was stored must not be lost when the CTA ends.
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
