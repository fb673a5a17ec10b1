"""Which embedding columns a tile has: how they are loaded, looked up and stored.

`Columns` are 128 columns of one row of the batch; `packed.PackedColumns` are columns of
consecutive rows.
"""

from __future__ import annotations

import dataclasses
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
    Tile,
)
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.linear_compression import STAGING_SLOTS


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a tile: 128 columns of one row of the batch; each consumer has 64 of them.

    A consumer has `Phase.accumulators` accumulators; `acc` is one of them. `users` are the users
    whose fragments a tile adds.

    Attributes:
      looks_up_ahead: whether a tile's users are looked up during the tile before; else its own k
        steps must hide the latency of the index.
    """

    ctx: CompressionContext
    phase: Any
    looks_up_ahead: ClassVar[bool] = False

    @staticmethod
    def fragment_types(phase: Any, columns: int, *, interpret: bool) -> fragment.Fragment:
        """Types of the device memory for the fragments of a level, of `columns` rows of M."""
        rows = (phase.batch, phase.n_tiles, NUM_CONSUMERS)
        return fragment.types(columns, rows, interpret=interpret)

    def weight_parts(self, stage: Any) -> tuple[Any, ...]:
        """The parts of a stage's weight tile, each of `Phase.consumer_rows`; for the producer."""
        _, weight = self.ctx.shared.weight
        return (weight.at[stage, : self.phase.block_m],)

    def load(self, embedding: Any, tile: Tile, k: Any, stage: Any) -> None:
        """Loads 64 embedding rows from `k` on to a stage; for the producer."""
        _, target = self.ctx.shared.embedding
        for consumer in range(NUM_CONSUMERS):
            columns = pl.ds(tile.n_tile * BLOCK_N + consumer * WGMMA_M, WGMMA_M)
            plgpu.copy_gmem_to_smem(
                embedding.at[tile.row, pl.ds(k, BLOCK_K), columns],
                target.at[stage, consumer],
                self.ctx.shared.stages.ready.at[stage],
            )

    def with_accumulators(self, body: Callable[[tuple[Any, ...]], Any], columns: int) -> Any:
        """Calls `body` with accumulators of `columns` columns, which `multiply` must overwrite."""
        return mma.with_accumulator(lambda acc: body((acc,)), columns, interpret=self.ctx.interpret)

    def multiply(
        self, accs: tuple[Any, ...], stage: Any, columns: int, *, overwrite: bool, k: int
    ) -> tuple[Any, ...]:
        """Issues a k step's products, one WGMMA group for each accumulator."""
        (weight, _), (embedding, _) = self.ctx.shared.weight, self.ctx.shared.embedding
        (acc,) = accs
        acc = mma.wgmma(
            acc,
            embedding.at[stage, self.ctx.consumer],
            weight.at[stage, :columns],
            overwrite=overwrite,
            k=k,
            interpret=self.ctx.interpret,
        )
        return (acc,)

    def finish(self, accs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """The values of the accumulators, whose products are over."""
        return tuple(mma.after_wait(acc, interpret=self.ctx.interpret) for acc in accs)

    def look_up(self, operands: Operands, tile: Tile) -> Any:
        """The coarser level's row, clamped: an index out of range never reads outside the array."""
        row = jnp.minimum(tile.row, operands.index.shape[0] - 1)
        return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)

    def load_fragments(
        self, memory: fragment.Fragment, users: Any, tile: Tile
    ) -> tuple[fragment.Fragment, ...]:
        """Issues the loads of the users' fragments, one for each accumulator."""
        part = self._fragment_at(memory, users, tile)
        return (fragment.load(part, self.phase.block_m, interpret=self.ctx.interpret),)

    def store_fragments(
        self, memory: fragment.Fragment, tile: Tile, accs: tuple[jax.Array, ...]
    ) -> None:
        """Stores the accumulators of a tile of a level that a finer level looks up."""

        @pl.when(tile.row < self.phase.batch)
        def _() -> None:
            target = self._fragment_at(memory, tile.row, tile)
            fragment.store(target, *accs, interpret=self.ctx.interpret)

    def store_chunk(
        self, output: Any, chunk: int, finished: tuple[jax.Array, ...], tile: Tile, is_valid: Any
    ) -> None:
        """Stores `epilogue_rows` compressed rows of one of the accumulators of a finished tile."""
        (values,) = finished
        rows = self.ctx.config.epilogue_rows
        registers_view, copy_view = (
            view.at[self.ctx.consumer, chunk % STAGING_SLOTS] for view in self.ctx.shared.staging
        )

        if self.phase.batch % self.phase.cluster:
            # TMA drops rows past the batch, but not past a batch of one: Mosaic GPU leaves axes of
            # size one out of its descriptors, so that all their indices mean the same row.
            is_valid &= tile.row < self.phase.batch

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
                    pl.ds(tile.m_tile * self.phase.block_m + chunk * rows, rows),
                    pl.ds(tile.n_tile * BLOCK_N + self.ctx.consumer * WGMMA_M, WGMMA_M),
                ],
            )

    def _fragment_at(self, memory: fragment.Fragment, row: Any, tile: Tile) -> fragment.Fragment:
        """The part of a row's fragments that belongs to a tile."""
        upper, lower = (plane.at[row, tile.n_tile, self.ctx.consumer] for plane in memory)
        part = fragment.Fragment(upper, lower)
        begin, columns = tile.m_tile * self.phase.block_m, self.phase.block_m
        return fragment.columns_of(part, begin, columns, interpret=self.ctx.interpret)
