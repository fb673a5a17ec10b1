"""A consumer warpgroup of the attention kernel: 64 rows through all passes of its CTA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import accumulator, attention_store, mosaic, softmax, turns
from ikbo_jax.pallas.attention_role import COMMON_ITEM_WORDS, FLAG_WORDS, Item, Role
from ikbo_jax.tuning.configs import NUM_CONSUMERS, WGMMA_M

#: The named barrier where both consumers wait for each other; those before it are the turns'.
MEETING_BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS


class _State(NamedTuple):
    """What a consumer carries from one step to the next."""

    weights: jax.Array  # [64, block_kv] of the block at hand
    maximum: jax.Array  # [64] f32
    sums: jax.Array  # [64, 8] f32
    acc: jax.Array  # [64, H] f32, without the block at hand; before the first, of the last pass


def _receive(role: Role, index: Any) -> Item:
    """Waits for the producer's description of a pass."""
    plgpu.barrier_wait(role.shared.item_ready.at[role.slot(index)])
    return _item(role, index)


def _item(role: Role, index: Any) -> Item:
    """A description that was received, and whose slot is not free yet."""
    slot = role.slot(index)
    words = role.shared.items
    own = COMMON_ITEM_WORDS + 3 * role.consumer
    return Item(
        *(words[slot, i] for i in range(COMMON_ITEM_WORDS)),
        *(words[slot, own + i] for i in range(3)),
    )


def _issue_scores(role: Role, item: Item, index: Any, step: Any) -> jax.Array:
    """Scores of the pass number `index` and its user's keys in ring position `step`."""
    stage = role.k_stage(step)
    ready = role.shared.k_ready.at[stage]
    role.unless(item.is_here, functools.partial(plgpu.barrier_wait, ready))
    return accumulator.product(
        role.shared.query[0].at[role.slot(index), role.consumer],
        role.shared.key[0].at[stage],
        pl.cdiv(role.shape.head_dim, accumulator.WGMMA_K) * accumulator.WGMMA_K,
        interpret=role.interpret,
    )


def _issue_values(role: Role, item: Item, state: _State, is_defined: Any, step: Any) -> jax.Array:
    """Adds the product of the weights at hand and the values in ring position `step`."""
    stage = role.v_stage(step)
    ready = role.shared.v_ready.at[stage]
    role.unless(item.is_here, functools.partial(plgpu.barrier_wait, ready))
    staging = role.shared.rows.at[role.consumer] if role.interpret else None
    return accumulator.add_product(
        state.acc,
        is_defined,
        state.weights,
        role.shared.value[0].at[stage],
        staging,
        interpret=role.interpret,
    )


def _free_values(role: Role, item: Item, step: Any) -> None:
    free = role.shared.v_free.at[role.v_stage(step)]
    role.unless(item.is_kept, functools.partial(plgpu.barrier_arrive, free))


def _scores(role: Role, scores: jax.Array, item: Item, block: Any, step: Any) -> jax.Array:
    """Scores that have been waited for, without those past the user's length; frees their keys."""
    scores = accumulator.settled(scores, interpret=role.interpret)
    free = role.shared.k_free.at[role.k_stage(step)]
    role.unless(item.is_kept, functools.partial(plgpu.barrier_arrive, free))
    keys = item.length - block * role.config.block_kv
    return lax.cond(
        keys < role.config.block_kv,
        lambda: softmax.mask(scores, keys, role.shape.log2_scale),
        lambda: scores,
    )


def _free_read_queries(role: Role, index: Any, is_last: Any) -> None:
    """With a single slot, the next queries may come as soon as the last scores are there."""
    if role.config.q_slots == 1:

        @pl.when(is_last)
        def _() -> None:
            plgpu.barrier_arrive(role.shared.q_free.at[role.slot(index)])


def _free_stored_slot(role: Role, index: Any) -> None:
    """With two slots, a slot is free once the output that was staged in it has left."""
    if role.config.q_slots > 1:

        @pl.when(index >= 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(role.shared.q_free.at[role.slot(index)])


def _meet() -> None:
    """The consumers wait for one another, and then see each other's writes to shared memory."""
    mosaic.named_barrier("sync", jnp.int32(MEETING_BARRIER), turns.CONSUMER_THREADS)


def _begin(role: Role, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights in f32, maximum, sums) of a pass's first block."""
    maximum = softmax.row_maximum(scores, role.shape.log2_scale)
    p = softmax.powers(scores, maximum, role.shape.log2_scale)
    return p, maximum, softmax.partial_sums(p)


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
    turns.take(role)
    scores = _issue_scores(role, item, index, step + 1)
    if meanwhile is not None:
        turns.give(role)
        meanwhile()
    acc = _issue_values(role, item, state, block > 0, step)
    if meanwhile is None:
        turns.await_scores(role)
    else:
        accumulator.wait(1, interpret=role.interpret)
    _free_read_queries(role, index, block + 2 == item.blocks)
    scores = _scores(role, scores, item, block + 1, step + 1)
    p = softmax.powers(scores, state.maximum, role.shape.log2_scale)
    sums = state.sums + softmax.partial_sums(p)
    pl.when(block == 0)(functools.partial(_free_stored_slot, role, index - 1))
    accumulator.wait(0, interpret=role.interpret)
    _free_values(role, item, step)
    return _State(p.astype(state.weights.dtype), state.maximum, sums, acc)


def _last_step(
    role: Role, item: Item, following: Item, index: Any, first_step: Any, state: _State
) -> _State:
    """The state of the next pass at its first block, with this pass's accumulator."""
    is_defined, step = item.blocks > 1, first_step + item.blocks - 1

    def with_next() -> tuple[jax.Array, ...]:
        next_step = role.step_after(item, first_step)
        turns.take(role)
        plgpu.barrier_wait(role.shared.q_ready.at[role.slot(index + 1)])
        scores = _issue_scores(role, following, index + 1, next_step)
        acc = _issue_values(role, item, state, is_defined, step)
        turns.await_scores(role)
        _free_read_queries(role, index + 1, following.blocks == 1)
        scores = _scores(role, scores, following, jnp.int32(0), next_step)
        p, maximum, sums = _begin(role, scores)
        accumulator.wait(0, interpret=role.interpret)
        return acc, p.astype(state.weights.dtype), maximum, sums

    def alone() -> tuple[jax.Array, ...]:
        turns.take(role)
        acc = _issue_values(role, item, state, is_defined, step)
        # The first turn was given to consumer 0, so it is consumer 1 that gives none at the end.
        pl.when(role.consumer == 0)(functools.partial(turns.give, role))
        accumulator.wait(0, interpret=role.interpret)
        return acc, state.weights, state.maximum, state.sums

    acc, weights, maximum, sums = lax.cond(following.blocks > 0, with_next, alone)
    acc = accumulator.settled(acc, interpret=role.interpret)
    _free_values(role, item, step)
    return _State(weights, maximum, sums, acc)


def _begin_pass(
    role: Role, item: Item, index: Any, first_step: Any, last: tuple[Any, ...], state: _State
) -> _State:
    """Completes the last pass, of which `last` are the sums and maxima, while this one's second
    block is multiplied, if it has one."""

    def complete_last() -> None:
        @pl.when(index > 0)
        def _() -> None:  # read again: a consumer has no registers to keep it
            attention_store.complete(role, _item(role, index - 1), index - 1, state.acc, *last)

    def several_blocks() -> _State:
        return _step(role, item, index, first_step, jnp.int32(0), state, complete_last)

    def single_block() -> _State:
        complete_last()
        _free_stored_slot(role, index - 1)
        return state

    begun: _State = lax.cond(item.blocks > 1, several_blocks, single_block)
    return begun


def _attend(role: Role) -> tuple[Any, Any]:
    """All passes of this CTA, pipelined; returns the number of items, and where the rings are."""
    zero, is_early = jnp.int32(0), role.is_early
    item = _receive(role, zero)
    turns.take(role)
    plgpu.barrier_wait(role.shared.q_ready.at[0])
    scores = _issue_scores(role, item, zero, zero)
    turns.give(role)
    accumulator.wait(0, interpret=role.interpret)
    _free_read_queries(role, zero, item.blocks == 1)
    p, maximum, sums = _begin(role, _scores(role, scores, item, zero, zero))
    acc = jnp.zeros((WGMMA_M, role.shape.head_dim), jnp.float32)
    acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA)
    state = _State(p.astype(role.outputs.out.dtype), maximum, sums, acc)

    def one(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step, last, state = carry
        step = functools.partial(_step, role, item, index, first_step)
        if is_early:
            state = _begin_pass(role, item, index, first_step, last, state)
        state = lax.fori_loop(int(is_early), item.blocks - 1, step, state)
        if not is_early:
            pl.when(item.blocks == 1)(functools.partial(_free_stored_slot, role, index - 1))
        following = _receive(role, index + 1)
        this: tuple[Any, ...] = (state.sums, state.maximum)
        state = _last_step(role, item, following, index, first_step, state)
        if not is_early:
            attention_store.complete(role, item, index, state.acc, *this)
            this = ()
        return following, index + 1, role.step_after(item, first_step), this, state

    start = (item, zero, zero, (sums, maximum) if is_early else (), state)
    _, items, steps, last, state = lax.while_loop(lambda carry: carry[0].blocks > 0, one, start)
    if is_early:
        attention_store.complete(role, _item(role, items - 1), items - 1, state.acc, *last)
    _free_stored_slot(role, items - 1)
    plgpu.barrier_arrive(role.shared.q_free.at[role.slot(items)])  # of the end
    return items + 1, steps


def _clean(role: Role, stage: Any, keys: Any) -> None:
    """Zeroes the values of a stage from row `keys` on, for both consumers."""
    tiles = role.shared.value[0].at[stage]

    @pl.when(keys < role.config.block_kv)
    def _() -> None:
        @pl.when(role.consumer == 0)
        def _() -> None:
            softmax.zero_rows(tiles, keys, interpret=role.interpret)
            plgpu.commit_smem()

        _meet()


def _recompute(role: Role, index: Any, first_step: Any) -> None:
    """The flagged tiles again, block after block with the running maximum; no block is reused."""
    shape, shared = role.shape, role.shared
    nothing_yet = -jnp.inf if shape.log2_scale > 0 else jnp.inf
    further = jnp.maximum if shape.log2_scale > 0 else jnp.minimum
    row = functools.partial(plgpu.layout_cast, new_layout=softmax.ROW_LAYOUT)
    full = functools.partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA)

    def block_step(
        item: Item, index: Any, first_step: Any, block: Any, carry: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        extreme, sums, acc = carry
        step = first_step + block
        scores = _issue_scores(role, item, index, step)
        accumulator.wait(0, interpret=role.interpret)
        scores = _scores(role, scores, item, block, step)
        larger = further(extreme, softmax.row_extreme(scores, shape.log2_scale))
        # Rows without any score above -inf so far: every weight is 0.
        finite = jnp.where(larger == nothing_yet, 0.0, larger)
        shrink = jnp.exp2((extreme - finite) * jnp.float32(shape.log2_scale))
        p = softmax.exact_powers(scores, finite, shape.log2_scale)
        scaled = sums * lax.broadcast_in_dim(shrink, sums.shape, (0,))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, (0,))
        stage = role.v_stage(step)
        plgpu.barrier_wait(shared.v_ready.at[stage])
        _clean(role, stage, item.length - block * role.config.block_kv)
        staging = shared.rows.at[role.consumer] if role.interpret else None
        acc = accumulator.add_product(
            acc,
            block > 0,
            p.astype(role.outputs.out.dtype),
            shared.value[0].at[stage],
            staging,
            interpret=role.interpret,
        )
        accumulator.wait(0, interpret=role.interpret)
        acc = accumulator.settled(acc, interpret=role.interpret)
        plgpu.barrier_arrive(shared.v_free.at[stage])
        return larger, scaled + softmax.partial_sums(p), acc

    def one(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item, index, first_step = carry
        plgpu.barrier_wait(shared.q_ready.at[role.slot(index)])
        nothing = (
            row(jnp.full((WGMMA_M,), nothing_yet, jnp.float32)),
            full(jnp.zeros((WGMMA_M, softmax.PARTIAL), jnp.float32)),
            full(jnp.zeros((WGMMA_M, shape.head_dim), jnp.float32)),
        )
        step = functools.partial(block_step, item, index, first_step)
        extreme, sums, acc = lax.fori_loop(0, item.blocks, step, nothing)
        natural = shape.log2_scale * softmax.LN_2
        attention_store.finish(role, item, index, acc, jnp.sum(sums, axis=1), extreme, natural)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.q_free.at[role.slot(index)])
        return _receive(role, index + 1), index + 1, first_step + item.blocks

    first = (_receive(role, index), index, first_step)
    _, index, _ = lax.while_loop(lambda carry: carry[0].blocks > 0, one, first)
    plgpu.barrier_arrive(shared.q_free.at[role.slot(index)])


def consume(role: Role) -> None:
    """A consumer warpgroup."""
    shared, config = role.shared, role.config
    nothing = jnp.zeros((FLAG_WORDS,), jnp.int32)
    shared.flags.at[role.consumer][...] = plgpu.layout_cast(
        nothing, plgpu.Layout.WG_STRIDED((FLAG_WORDS,), vec_size=1)
    )
    plgpu.commit_smem()
    rings = ((shared.k_free, config.k_stages), (shared.v_free, config.v_stages))
    for free, stages in (*rings, (shared.q_free, config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_arrive(free.at[stage])
    pl.when(role.consumer == 1)(functools.partial(turns.give, role))
    items, steps = _attend(role)
    # What was stored must not overtake what is stored again.
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    # The address of a barrier known in advance would take a register through all that precedes.
    zero = mosaic.opaque(jnp.int32(0), interpret=role.interpret)
    plgpu.barrier_arrive(shared.flags_ready.at[zero])
    _meet()

    @pl.when((shared.flags[0, 0] | shared.flags[1, 0]) != 0)
    def _() -> None:
        _recompute(role, items, steps)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
