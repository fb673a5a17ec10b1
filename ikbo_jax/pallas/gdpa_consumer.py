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

from ikbo_jax.pallas import accumulator, gdpa_store, gdpa_weights, mosaic, softmax, turns
from ikbo_jax.pallas.gdpa_role import Item, Role
from ikbo_jax.tuning.configs import WGMMA_M


class _State(NamedTuple):
    """What a consumer carries from one step to the next."""

    weights: jax.Array  # [64, block_kv] of the block at hand
    acc: jax.Array  # [64, H] f32, without the block at hand


def _receive(role: Role, index: Any) -> Item:
    """Waits for the producer's description of an item."""
    slot = role.item_slot(index)
    plgpu.barrier_wait(role.shared.item_ready.at[slot])
    return Item(*(role.shared.items[slot, i] for i in range(len(Item._fields))))


def _has_rows(role: Role, index: Any) -> Any:
    """Whether this consumer has rows of an item; it has none of the end."""
    return role.place(index).rows > role.consumer * WGMMA_M


def _is_half(role: Role, item: Item) -> Any:
    """Whether no more than half of an item's last block are keys."""
    block_kv = role.config.block_kv
    return item.length <= item.blocks * block_kv - block_kv // 2


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


def _issue_scores(role: Role, index: Any, step: Any, columns: int | None = None) -> jax.Array:
    """Scores of the item number `index` and the first `columns` keys in ring position `step`."""
    return accumulator.product(
        role.shared.query[0].at[role.slot(index), role.consumer],
        role.shared.key[0].at[role.k_stage(step)],
        pl.cdiv(role.shape.head_dim, accumulator.WGMMA_K) * accumulator.WGMMA_K,
        columns=columns,
        interpret=role.interpret,
    )


def _issue_values(
    role: Role, state: _State, is_defined: Any, step: Any, keys: int | None = None
) -> jax.Array:
    """The accumulator with the first `keys` values in ring position `step`."""
    weights = state.weights
    return accumulator.add_product(
        state.acc,
        is_defined,
        weights if keys is None else lax.slice(weights, (0, 0), (WGMMA_M, keys)),
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


def _step(
    role: Role,
    item: Item,
    index: Any,
    first_step: Any,
    block: Any,
    state: _State,
    meanwhile: Callable[[], None] | None = None,
    columns: int | None = None,
) -> _State:
    """Multiplies block `block`, whose weights are at hand, and makes the weights of the next, of
    which all but the first `columns` are zero; `meanwhile` reads the accumulator for the last time
    while the scores are multiplied."""
    step = first_step + block
    _await_keys(role, item, block + 1, step + 1)
    # Before the last block no value is another sequence's.
    plgpu.barrier_wait(role.shared.v_ready.at[role.v_stage(step)])
    turns.take(role)
    # The eight descriptors of the queries, known for the whole item, would take 16 registers.
    opaque_index = mosaic.opaque(index, interpret=role.interpret)
    scores = _issue_scores(role, opaque_index, step + 1, columns)
    if meanwhile is not None:
        turns.give(role)
        meanwhile()
    acc = _issue_values(role, state, block > 0, step)
    if meanwhile is None:
        turns.await_scores(role)
    else:
        accumulator.wait(1, interpret=role.interpret)
    _free_read_queries(role, index, block + 2 == item.blocks)
    weights = _weights(role, scores, item, step + 1)
    pl.when(block == 0)(functools.partial(_free_stored_slot, role, index - 1))
    accumulator.wait(0, interpret=role.interpret)
    plgpu.barrier_arrive(role.shared.v_free.at[role.v_stage(step)])
    narrow = weights()
    if columns is None:
        return _State(narrow, acc)
    rest = jnp.zeros((WGMMA_M, role.config.block_kv - columns), narrow.dtype)
    rest = plgpu.layout_cast(rest, plgpu.Layout.WGMMA)
    return _State(jnp.concatenate([narrow, rest], axis=1), acc)


def _rest_step(role: Role, item: Item, index: Any, first_step: Any, block: Any) -> None:
    """`_step` of a consumer without rows: whatever that waits for, passes and frees."""
    step = first_step + block
    plgpu.barrier_wait(role.shared.k_ready.at[role.k_stage(step + 1)])
    plgpu.barrier_wait(role.shared.v_ready.at[role.v_stage(step)])
    turns.take(role)
    turns.give(role)
    _free_read_queries(role, index, block + 2 == item.blocks)
    plgpu.barrier_arrive(role.shared.k_free.at[role.k_stage(step + 1)])
    if not role.config.early_scores:  # else it is free already
        pl.when(block == 0)(functools.partial(_free_stored_slot, role, index - 1))
    plgpu.barrier_arrive(role.shared.v_free.at[role.v_stage(step)])


def _middle_steps(role: Role, item: Item, index: Any, first_step: Any, state: _State) -> _State:
    """All steps of an item but the last and, with `early_scores`, the first."""
    config = role.config
    begin, end = int(config.early_scores), item.blocks - 1
    step = functools.partial(_step, role, item, index, first_step)
    busy_end = jnp.where(_has_rows(role, index), end, 0) if config.skip_empty else end
    whole_end = busy_end
    if config.half_blocks:
        whole_end = jnp.maximum(busy_end - _is_half(role, item).astype(jnp.int32), begin)
    state = lax.fori_loop(begin, whole_end, step, state)
    if config.half_blocks:  # one step or none; a branch
        half = functools.partial(step, columns=config.block_kv // 2)
        state = lax.fori_loop(whole_end, busy_end, half, state)
    if config.skip_empty:

        @pl.loop(busy_end, end)
        def _(block: Any) -> None:
            _rest_step(role, item, index, first_step, block)

    return state


def _last_step(
    role: Role, item: Item, following: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """This item's accumulator, and the weights of the next item's first block.

    Every branch waits, passes and frees alike: a branch is chosen for what it multiplies.
    """
    config = role.config
    is_defined, step = item.blocks > 1, first_step + item.blocks - 1
    next_step = role.step_after(first_step, item.blocks, following.is_here)
    has_next = following.blocks > 0
    _await_values(role, item, item.blocks - 1, step)

    def await_next() -> None:
        plgpu.barrier_wait(role.shared.q_ready.at[role.slot(index + 1)])
        _await_keys(role, following, jnp.int32(0), next_step)

    def free_next_queries() -> None:
        _free_read_queries(role, index + 1, following.blocks == 1)

    def both(keys: int | None = None) -> tuple[jax.Array, jax.Array]:
        await_next()
        turns.take(role)
        scores = _issue_scores(role, index + 1, next_step)
        acc = _issue_values(role, state, is_defined, step, keys)
        turns.await_scores(role)
        free_next_queries()
        weights = _weights(role, scores, following, next_step)
        accumulator.wait(0, interpret=role.interpret)
        return acc, weights()

    def without_scores(*, has_values: bool) -> tuple[jax.Array, jax.Array]:
        if config.skip_empty:
            pl.when(has_next)(await_next)
        turns.take(role)
        acc = _issue_values(role, state, is_defined, step) if has_values else state.acc
        # The first turn was given to consumer 0, so it is consumer 1 that gives none at the end.
        pl.when(has_next | (role.consumer == 0))(functools.partial(turns.give, role))
        if config.skip_empty:

            @pl.when(has_next)
            def _() -> None:
                free_next_queries()
                plgpu.barrier_arrive(role.shared.k_free.at[role.k_stage(next_step)])

        if has_values:
            accumulator.wait(0, interpret=role.interpret)
        return acc, state.weights

    def without_values() -> tuple[jax.Array, jax.Array]:
        await_next()
        turns.take(role)
        scores = _issue_scores(role, index + 1, next_step)
        turns.await_scores(role, pending=0)
        free_next_queries()
        weights = _weights(role, scores, following, next_step)
        return state.acc, weights()

    branches: list[Callable[[], Any]] = [
        functools.partial(without_scores, has_values=True),
        both,
    ]
    has_scores = _has_rows(role, index + 1) if config.skip_empty else has_next
    number = has_scores.astype(jnp.int32)
    if config.half_blocks:
        number = jnp.where(has_scores & _is_half(role, item), len(branches), number)
        branches.append(functools.partial(both, config.block_kv // 2))
    if config.skip_empty:
        empty = len(branches) + has_scores.astype(jnp.int32)
        number = jnp.where(_has_rows(role, index), number, empty)
        branches += [functools.partial(without_scores, has_values=False), without_values]
    acc, weights = lax.switch(number, branches)
    acc = accumulator.settled(acc, interpret=role.interpret)
    plgpu.barrier_arrive(role.shared.v_free.at[role.v_stage(step)])
    return _State(weights, acc)


def _begin_item(role: Role, item: Item, index: Any, first_step: Any, state: _State) -> _State:
    """Stores the item before while this one's second block is multiplied, if it is."""

    def finish_last() -> None:
        pl.when(index > 0)(functools.partial(gdpa_store.finish, role, index - 1, state.acc))

    def several_blocks() -> _State:
        return _step(role, item, index, first_step, jnp.int32(0), state, finish_last)

    def finish_only() -> _State:
        finish_last()
        _free_stored_slot(role, index - 1)
        return state

    has_second = item.blocks > 1
    if role.config.skip_empty:
        has_second = has_second & _has_rows(role, index)
    begun: _State = lax.cond(has_second, several_blocks, finish_only)
    return begun


def _attend(role: Role, item: Item) -> None:
    """All items of this CTA, of which there is one at least, pipelined."""
    is_early = role.config.early_scores
    pl.when(role.consumer == 1)(functools.partial(turns.give, role))
    zero = jnp.int32(0)
    plgpu.barrier_wait(role.shared.q_ready.at[0])
    _await_keys(role, item, zero, zero)
    turns.take(role)
    scores = _issue_scores(role, zero, zero)
    turns.give(role)
    accumulator.wait(0, interpret=role.interpret)
    _free_read_queries(role, zero, item.blocks == 1)
    unset = functools.partial(accumulator.undefined, role.shape.head_dim, interpret=role.interpret)
    weights = _weights(role, scores, item, zero)()

    def one(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step, state = carry
        if is_early:
            state = _begin_item(role, item, index, first_step, state)
        state = _middle_steps(role, item, index, first_step, state)
        if not is_early:
            pl.when(item.blocks == 1)(functools.partial(_free_stored_slot, role, index - 1))
        following = _receive(role, index + 1)
        state = _last_step(role, item, following, index, first_step, state)
        if not is_early:
            gdpa_store.finish(role, index, state.acc)
            state = _State(state.weights, unset())
        first_step = role.step_after(first_step, item.blocks, following.is_here)
        return following, index + 1, first_step, state

    _, items, _, state = lax.while_loop(
        lambda carry: carry[0].blocks > 0, one, (item, zero, zero, _State(weights, unset()))
    )
    if is_early:
        gdpa_store.finish(role, items - 1, state.acc)
    _free_stored_slot(role, items - 1)
    plgpu.barrier_arrive(role.shared.q_free.at[role.slot(items)])  # of the end


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

    gdpa_store.zero_rest(role)
    # What was stored must not be lost when the CTA ends.
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
