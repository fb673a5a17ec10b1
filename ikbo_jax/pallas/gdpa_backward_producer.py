"""The producer warp of the backward kernels: tiles, and the blocks that they meet, by TMA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.gdpa_backward_role import Role
from ikbo_jax.tuning.configs import NUM_CONSUMERS, WGMMA_M
from ikbo_jax.tuning.gdpa_backward_configs import SLOTS


def _send_own(role: Role, item: Any, tile: Any, head: Any) -> None:
    """Describes a tile and brings both of its operands."""
    shared, tiles = role.shared, role.operands.tiles
    slot = role.slot(item)
    first_rows = (tiles[tile, 0], tiles[tile, 1])
    blocks = tiles[tile, 5]
    meets = jnp.minimum(blocks, 1)
    words = (first_rows[1], tiles[tile, 2], head, meets, jnp.maximum(blocks, 1))
    plgpu.barrier_wait(shared.own_free.at[slot])
    for i, word in enumerate(words):
        shared.items[slot, i] = word
    plgpu.barrier_arrive(shared.own_ready.at[slot])
    for operand, (source, first) in enumerate(zip(role.operands.own, first_rows, strict=True)):
        for consumer in range(NUM_CONSUMERS):
            row = jnp.minimum(first + consumer * WGMMA_M, source.shape[0] - 1)
            for i in range(role.shape.column_blocks):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row, WGMMA_M), head, role.columns(i)],
                    shared.own[1].at[slot, operand, consumer, i],
                    shared.own_ready.at[slot],
                )


def _send_block(role: Role, step: Any, first_rows: Any, words: tuple[Any, ...], head: Any) -> None:
    """Describes a block and brings both of its operands."""
    shared, stage = role.shared, role.stage(step)
    plgpu.barrier_wait(shared.others_free.at[stage])
    for i, word in enumerate(words):
        shared.blocks[stage, i] = word
    plgpu.barrier_arrive(shared.others_ready.at[stage])
    for operand, (source, row) in enumerate(zip(role.operands.others, first_rows, strict=True)):
        for i in range(role.shape.column_blocks):
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(row, role.config.block), head, role.columns(i)],
                shared.others[1].at[stage, operand, i],
                shared.others_ready.at[stage],
            )


def _send_item(role: Role, item: Any, step: Any) -> Any:
    """A tile of one head, and all blocks that it meets; returns the number of blocks so far."""
    shape, config, operands = role.shape, role.config, role.operands
    number = role.worker + item * shape.workers
    tile, head = lax.div(number, shape.heads), lax.rem(number, shape.heads)
    _send_own(role, item, tile, head)
    begin, end, blocks = (operands.tiles[tile, i] for i in (3, 4, 5))

    def of_head(index: Any, step: Any) -> Any:
        block_head = lax.div(head, shape.divisor) * shape.group + index
        q_head = block_head if shape.is_for_keys else head

        def of_partner(partner: Any, step: Any) -> Any:
            source, target, rows = (operands.partners[partner, i] for i in range(3))

            @pl.loop(0, pl.cdiv(rows, config.block))
            def _(block: Any) -> None:
                done = block * config.block
                left = jnp.minimum(rows - done, config.block)
                first_rows = (source + done, target + done)
                _send_block(role, step + block, first_rows, (left, q_head), block_head)

            return step + pl.cdiv(rows, config.block)

        return lax.fori_loop(begin, end, of_partner, step)

    @pl.when(blocks > 0)
    def _() -> None:
        lax.fori_loop(0, shape.group, of_head, step)

    @pl.when(blocks == 0)
    def _() -> None:  # a block without rows, so that consumers know of tiles with blocks alone
        zero = jnp.int32(0)
        _send_block(role, step, (zero, zero), (zero, zero), zero)

    return step + jnp.maximum(blocks, 1)


def produce(role: Role) -> None:
    """The producer warp."""
    lax.fori_loop(0, role.item_count, lambda item, step: _send_item(role, item, step), jnp.int32(0))
    # No arrival may outlive its barrier.
    for free, count in (
        (role.shared.others_free, role.config.stages),
        (role.shared.own_free, SLOTS),
    ):
        for i in range(count):
            plgpu.barrier_wait(free.at[i])
