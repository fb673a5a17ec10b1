"""A consumer warpgroup of the backward kernels: 64 rows through all tiles of its CTA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import accumulator, gdpa_slopes, mosaic, softmax, stores
from ikbo_jax.pallas.gdpa_backward_product import add_rows
from ikbo_jax.pallas.gdpa_backward_role import (
    BLOCKS,
    FIRST_ROW,
    HEAD,
    MEETS,
    ROWS,
    Role,
)
from ikbo_jax.pallas.gdpa_backward_store import (
    stage_rows,
    store_wide_rows,
    zero_tiles,
)
from ikbo_jax.tuning.configs import NUM_CONSUMERS, WGMMA_M
from ikbo_jax.tuning.gdpa_backward_configs import SLOTS

#: Named barrier where the consumers wait for each other.
MEETING_BARRIER = 4
#: Columns of scores that are activated at a time beside two sums, and multiplied at once: without
#: products between them, ptxas activates all columns together, and spills. For the same reason what
#: is in flight meanwhile is the product of activated scores, not the gradients of weights.
ACTIVATED_COLUMNS = 16
CONSUMER_THREADS = NUM_CONSUMERS * softmax.WARPGROUP_SIZE


def _receive(role: Role, step: Any) -> None:
    """Waits for a block and zeroes rows that it has not got."""
    shared, stage = role.shared, role.stage(step)
    plgpu.barrier_wait(shared.others_ready.at[stage])
    rows = shared.blocks[stage, 0]

    # A zero row scores 0, and its weight and the gradient of its score are 0.
    @pl.when(rows < role.config.block)
    def _() -> None:
        consumer = mosaic.warpgroup_index("warpgroup", interpret=role.interpret)
        tiles = shared.others[0].at[stage, consumer]
        softmax.zero_rows(tiles, rows, interpret=role.interpret)
        plgpu.commit_smem()
        mosaic.named_barrier("sync", jnp.int32(MEETING_BARRIER), CONSUMER_THREADS)


def _receive_tile(role: Role, item: Any) -> None:
    """Waits for a tile; one that meets nothing may have any operands, which are zeroed."""
    shared, slot = role.shared, role.slot(item)
    plgpu.barrier_wait(shared.own_ready.at[slot])

    @pl.when(shared.items[slot, MEETS] == 0)
    def _() -> None:
        for operand in (0, 1):
            zero_tiles(shared.own[0].at[slot, operand, role.consumer], interpret=role.interpret)
        plgpu.commit_smem()


def _issue_scores(role: Role, operand: int, item: Any, step: Any) -> jax.Array:
    """Own rows times a block's: scores of operand 0, gradients of activated scores of operand 1."""
    # What is made from the tile's number before the loop would live through it.
    slot = role.slot(mosaic.opaque(item, interpret=role.interpret))
    consumer = mosaic.warpgroup_index("warpgroup", interpret=role.interpret)
    return accumulator.product(
        role.shared.own[0].at[slot, operand, consumer],
        role.shared.others[0].at[role.stage(step), operand],
        pl.cdiv(role.shape.head_dim, accumulator.WGMMA_K) * accumulator.WGMMA_K,
        interpret=role.interpret,
    )


def _issue_sum(
    role: Role, total: jax.Array | None, rows: jax.Array, begin: int, operand: int, step: Any
) -> jax.Array:
    """A sum, None if it is empty, and `rows` times a block's rows from `begin` on."""
    return add_rows(
        total,
        rows,
        role.shared.others[0].at[role.stage(step), operand],
        begin,
        role.shape.head_dim,
        role.shared.staging.at[role.consumer, operand] if role.interpret else None,
        interpret=role.interpret,
    )


def _activate(role: Role, head: Any, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and slopes of a query head's scores."""
    how = role.shape.weighing

    def activate() -> tuple[jax.Array, jax.Array]:
        return gdpa_slopes.weigh_and_slope(how, head, scores, interpret=role.interpret)

    if not role.shape.has_activation_in_branch:
        return activate()
    # Always taken: ptxas moves nothing across a branch, and would spill otherwise.
    weights, slope = lax.cond(head >= 0, activate, lambda: (scores, scores))
    return weights, slope


def _multiply(
    role: Role, sums: tuple[jax.Array, ...] | None, scores: jax.Array, item: Any, step: Any
) -> tuple[jax.Array, ...]:
    """Adds a block, whose scores are there, to the sums, in flight; None are empty sums."""
    shape, dtype = role.shape, role.operands.own[0].dtype
    head = role.shared.blocks[role.stage(step), 1]
    columns = scores.shape[1]
    total, d_value = (None, None) if sums is None else (*sums, None)[:2]
    part = ACTIVATED_COLUMNS if shape.is_for_keys else columns
    slopes = []
    for begin in range(0, columns, part):
        if begin + part >= columns:
            d_weights = _issue_scores(role, 1, item, step)
        some = lax.slice(scores, (0, begin), (WGMMA_M, begin + part))
        weights, slope = _activate(role, head, some)
        slopes.append(slope)
        if shape.is_for_keys:
            d_value = _issue_sum(role, d_value, weights.astype(dtype), begin, 1, step)
    accumulator.wait(1 if shape.is_for_keys else 0, interpret=role.interpret)
    d_weights = accumulator.settled(d_weights, interpret=role.interpret)
    slope = jnp.concatenate(slopes, axis=1)
    d_scores = gdpa_slopes.d_scores(shape.weighing, d_weights, slope).astype(dtype)
    total = _issue_sum(role, total, d_scores, 0, 0, step)
    return (total,) if d_value is None else (total, d_value)


def _settle(role: Role, sums: tuple[jax.Array, ...], step: Any) -> tuple[jax.Array, ...]:
    """Sums that have been waited for; frees the block that they were made from."""
    sums = tuple(accumulator.settled(x, interpret=role.interpret) for x in sums)
    plgpu.barrier_arrive(role.shared.others_free.at[role.stage(step)])
    return sums


def _tile(role: Role, item: Any, first_step: Any) -> Any:
    """A tile, from its first scores to its results' stores; returns the number of blocks so far."""
    shared = role.shared
    _receive_tile(role, item)

    def add(step: Any, sums: tuple[jax.Array, ...] | None) -> tuple[jax.Array, ...]:
        _receive(role, step)
        scores = _issue_scores(role, 0, item, step)
        accumulator.wait(0, interpret=role.interpret)
        scores = accumulator.settled(scores, interpret=role.interpret)
        if sums is not None:
            sums = _settle(role, sums, step - 1)
        return _multiply(role, sums, scores, item, step)

    sums = add(first_step, None)
    pl.when(item > 0)(functools.partial(_free_stored_slot, role, item - 1))
    end = first_step + shared.items[role.slot(item), BLOCKS]
    sums = lax.fori_loop(first_step + 1, end, add, sums)
    accumulator.wait(0, interpret=role.interpret)
    sums = _settle(role, sums, end - 1)
    _store(role, mosaic.opaque(item, interpret=role.interpret), sums)
    return end


def _free_stored_slot(role: Role, item: Any) -> None:
    """The results that were staged in the slot of tile `item` have left."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(role.shared.own_free.at[role.slot(item)])


def _store(role: Role, item: Any, sums: tuple[jax.Array, ...]) -> None:
    """Stores the rows of a tile."""
    consumer = mosaic.warpgroup_index("warpgroup", interpret=role.interpret)
    role = role._replace(consumer=consumer)
    slot, words = role.slot(item), role.shared.items
    first_row = words[slot, FIRST_ROW] + consumer * WGMMA_M
    rows = jnp.clip(words[slot, ROWS] - consumer * WGMMA_M, 0, WGMMA_M)
    head = words[slot, HEAD]
    values = [
        (total * jnp.float32(scale)).astype(result.dtype)
        for total, scale, result in zip(sums, role.shape.scales, role.results, strict=True)
    ]
    if role.results[0].dtype == jnp.float32:
        staging = role.shared.wide_staging.at[consumer] if role.interpret else None
        store_wide_rows(
            role.results[0], values[0], first_row, head, rows, staging, interpret=role.interpret
        )
    else:
        _store_staged(role, values, slot, first_row, head, rows)


def _store_staged(
    role: Role, values: list[jax.Array], slot: Any, first_row: Any, head: Any, rows: Any
) -> None:
    """Stages rows where the tile's operands were; TMA stores them if all 64 are the tile's."""
    matrix_views, copy_views = (
        [view.at[slot, operand, role.consumer] for operand in range(len(values))]
        for view in role.shared.own
    )
    for view, value in zip(matrix_views, values, strict=True):
        stage_rows(view, value, interpret=role.interpret)
    plgpu.commit_smem()

    @pl.when(rows == WGMMA_M)
    def _() -> None:
        for view, result in zip(copy_views, role.results, strict=True):
            for i in range(role.shape.column_blocks):
                plgpu.copy_smem_to_gmem(
                    view.at[i], result.at[pl.ds(first_row, WGMMA_M), head, role.columns(i)]
                )

    @pl.when(rows < WGMMA_M)
    def _() -> None:
        for view, result in zip(matrix_views, role.results, strict=True):
            stores.store_staged_rows(
                result, view, first_row, head, jnp.int32(0), rows, interpret=role.interpret
            )
        plgpu.commit_smem()  # TMA writes the next operands where these threads have just read


def _run(role: Role) -> None:
    """All tiles of this CTA, of which there is one at least."""

    count = role.item_count
    lax.fori_loop(0, count, functools.partial(_tile, role), jnp.int32(0))
    _free_stored_slot(role, count - 1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def consume(role: Role) -> None:
    """A consumer warpgroup."""
    shared = role.shared
    for free, count in ((shared.others_free, role.config.stages), (shared.own_free, SLOTS)):
        for i in range(count):
            plgpu.barrier_arrive(free.at[i])
    pl.when(role.item_count > 0)(functools.partial(_run, role))
