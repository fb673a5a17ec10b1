"""Which embedding columns a tile has: how they are loaded, looked up and stored.

`Columns` are 128 columns of one row of the batch; `packed.PackedColumns` are columns of
consecutive rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import fragment, mma
from ikbo_jax.pallas.linear_compression.tiles import (
    BLOCK_N,
    CompressionContext,
    Operands,
    Phase,
    Tile,
)
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.linear_compression import STAGING_SLOTS


class Columns:
    """The columns of a tile: 128 columns of one row of the batch; each consumer has 64 of them.

    A consumer has `Phase.accumulators` accumulators; `acc` is one of them. `users` are the users
    whose fragments a tile adds.

    Attributes:
      looks_up_ahead: whether a tile's users are looked up during the tile before; else its own k
        steps must hide the latency of the index.
    """

    looks_up_ahead: ClassVar[bool] = False

    def fragment_types(self, phase: Any, columns: int, *, interpret: bool) -> fragment.Fragment:
        """Types of the device memory for the fragments of a level, of `columns` rows of M."""
        rows = (phase.batch, phase.n_tiles, NUM_CONSUMERS)
        return fragment.types(columns, rows, interpret=interpret)

    def weight_parts(self, ctx: CompressionContext, phase: Any, stage: Any) -> tuple[Any, ...]:
        """The parts of a stage's weight tile, each of `Phase.consumer_rows`; for the producer."""
        _, weight = ctx.shared.weight
        return (weight.at[stage, : phase.block_m],)

    def load(
        self, ctx: CompressionContext, phase: Any, embedding: Any, tile: Tile, k: Any, stage: Any
    ) -> None:
        """Loads 64 embedding rows from `k` on to a stage; for the producer."""
        _, target = ctx.shared.embedding
        for consumer in range(NUM_CONSUMERS):
            columns = pl.ds(tile.n_tile * BLOCK_N + consumer * WGMMA_M, WGMMA_M)
            plgpu.copy_gmem_to_smem(
                embedding.at[tile.row, pl.ds(k, BLOCK_K), columns],
                target.at[stage, consumer],
                ctx.shared.stages.ready.at[stage],
            )

    def with_accumulators(
        self,
        ctx: CompressionContext,
        phase: Any,
        body: Callable[[tuple[Any, ...]], Any],
        columns: int,
    ) -> Any:
        """Calls `body` with accumulators of `columns` columns, which `multiply` must overwrite."""
        return mma.with_accumulator(lambda acc: body((acc,)), columns, interpret=ctx.interpret)

    def multiply(
        self,
        ctx: CompressionContext,
        phase: Any,
        accs: tuple[Any, ...],
        stage: Any,
        columns: int,
        *,
        overwrite: bool,
        k: int,
    ) -> tuple[Any, ...]:
        """Issues a k step's products, one WGMMA group for each accumulator."""
        (weight, _), (embedding, _) = ctx.shared.weight, ctx.shared.embedding
        (acc,) = accs
        acc = mma.wgmma(
            acc,
            embedding.at[stage, ctx.consumer],
            weight.at[stage, :columns],
            overwrite=overwrite,
            k=k,
            interpret=ctx.interpret,
        )
        return (acc,)

    def finish(self, ctx: CompressionContext, accs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """The values of the accumulators, whose products are over."""
        return tuple(mma.after_wait(acc, interpret=ctx.interpret) for acc in accs)

    def look_up(self, ctx: CompressionContext, phase: Any, operands: Operands, tile: Tile) -> Any:
        """The coarser level's row, clamped: an index out of range never reads outside the array."""
        row = jnp.minimum(tile.row, operands.index.shape[0] - 1)
        return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)

    def load_fragments(
        self,
        ctx: CompressionContext,
        phase: Any,
        memory: fragment.Fragment,
        users: Any,
        tile: Tile,
    ) -> tuple[fragment.Fragment, ...]:
        """Issues the loads of the users' fragments, one for each accumulator."""
        part = _fragment_at(ctx, phase, memory, users, tile)
        return (fragment.load(part, phase.block_m, interpret=ctx.interpret),)

    def store_fragments(
        self,
        ctx: CompressionContext,
        phase: Any,
        memory: fragment.Fragment,
        tile: Tile,
        accs: tuple[jax.Array, ...],
    ) -> None:
        """Stores the accumulators of a tile of a level that a finer level looks up."""

        @pl.when(tile.row < phase.batch)
        def _() -> None:
            target = _fragment_at(ctx, phase, memory, tile.row, tile)
            fragment.store(target, *accs, interpret=ctx.interpret)

    def store_chunk(
        self,
        ctx: CompressionContext,
        phase: Any,
        output: Any,
        chunk: int,
        finished: tuple[jax.Array, ...],
        tile: Tile,
        is_valid: Any,
    ) -> None:
        """Stores `epilogue_rows` compressed rows of one of the accumulators of a finished tile."""
        (values,) = finished
        rows = ctx.config.epilogue_rows
        registers_view, copy_view = (
            view.at[ctx.consumer, chunk % STAGING_SLOTS] for view in ctx.shared.staging
        )

        if phase.batch % phase.cluster:
            # TMA drops rows past the batch, but not past a batch of one: Mosaic GPU leaves axes of
            # size one out of its descriptors, so that all their indices mean the same row.
            is_valid &= tile.row < phase.batch

        @pl.when(is_valid)
        def _() -> None:
            # All copies but the newest have read their staging buffers, so this buffer is free.
            plgpu.wait_smem_to_gmem(STAGING_SLOTS - 1, wait_read_only=True)
            registers_view.transpose((1, 0))[...] = lax.slice(
                values, (0, chunk * rows), (WGMMA_M, (chunk + 1) * rows)
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                copy_view,
                output.at[
                    tile.row,
                    pl.ds(tile.m_tile * phase.block_m + chunk * rows, rows),
                    pl.ds(tile.n_tile * BLOCK_N + ctx.consumer * WGMMA_M, WGMMA_M),
                ],
            )


def _fragment_at(
    ctx: CompressionContext, phase: Phase, memory: fragment.Fragment, row: Any, tile: Tile
) -> fragment.Fragment:
    """The part of a row's fragments that belongs to a tile of `phase`."""
    upper, lower = (plane.at[row, tile.n_tile, ctx.consumer] for plane in memory)
    columns = (tile.m_tile * phase.block_m, phase.block_m)
    return fragment.columns_of(fragment.Fragment(upper, lower), *columns, interpret=ctx.interpret)
