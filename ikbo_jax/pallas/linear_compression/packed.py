"""Tiles whose columns are of consecutive rows of the batch: several candidates where N is small.

Column n of row b has number b * N + n. A tile has the next `block_n` columns, in *blocks* of 16, 32
or 64 columns of one row; a consumer's accumulator has 64 columns. WGMMA reads an accumulator's
blocks [64, width] as one operand. Both consumers multiply a tile of 64 columns, each by half of the
compressed rows.

A warp holds 16 rows of an accumulator, a *granule*: 16 columns of one row of the batch. So a warp
looks up one user for each accumulator, and stores and loads fragments by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import fragment, granules, mma, mosaic
from ikbo_jax.pallas.linear_compression.tiles import Columns, Operands, PackedPhase, Tile
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.packed_compression import STAGING_SLOTS


@dataclasses.dataclass(frozen=True)
class PackedColumns(Columns):
    """Columns of consecutive rows of the batch."""

    phase: PackedPhase
    looks_up_ahead: ClassVar[bool] = True

    @staticmethod
    def fragment_types(phase: Any, columns: int) -> fragment.Fragment:
        return granules.types(columns, phase.granules)

    def weight_parts(self, stage: Any) -> tuple[Any, ...]:
        _, weight = self.ctx.shared.weight
        rows = self.phase.consumer_rows
        return tuple(weight.at[stage, part, :rows] for part in range(self.phase.parts))

    def load(self, embedding: Any, tile: Tile, k: Any, stage: Any) -> None:
        target, ready = self.ctx.shared.embedding, self.ctx.shared.stages.ready.at[stage]
        first = tile.row * self.phase.blocks
        rows = pl.ds(k, BLOCK_K)
        if self.phase.blocks_of_row == 1:
            source = embedding.at[pl.ds(first, self.phase.blocks), rows]
            plgpu.copy_gmem_to_smem(source, target.at[stage, pl.ds(0, self.phase.blocks)], ready)
            return

        @pl.loop(0, self.phase.blocks)
        def _(i: Any) -> None:
            # LLVM would keep the blocks' rows and columns, which are the same in every k step, and
            # spill: 300 bytes with 12 blocks.
            number = mosaic.opaque(first + i)
            row, columns = self.phase.at(number)
            plgpu.copy_gmem_to_smem(embedding.at[row, rows, columns], target.at[stage, i], ready)

        # The barrier expects as many arrivals as the phase with most blocks has.
        for _spare in range(target.shape[1] - self.phase.blocks):
            plgpu.barrier_arrive(ready)

    def with_accumulators(self, body: Callable[[tuple[Any, ...]], Any], columns: int) -> Any:
        return mma.with_row_blocks(body, self.phase.accumulators, self.phase.width, columns)

    def multiply(
        self, accs: tuple[Any, ...], stage: Any, columns: int, *, overwrite: bool, k: int
    ) -> tuple[Any, ...]:
        weight, _ = self.ctx.shared.weight
        blocks = WGMMA_M // self.phase.width
        first, part = self._share
        return tuple(
            mma.wgmma_blocks(
                acc,
                self.ctx.shared.embedding.at[
                    stage, pl.ds((first * self.phase.accumulators + i) * blocks, blocks)
                ],
                weight.at[stage, part, :columns],
                overwrite=overwrite,
                k=k,
            )
            for i, acc in enumerate(accs)
        )

    def look_up(self, operands: Operands, tile: Tile) -> Any:
        """Looks up the granule of the user that each warp adds, for each accumulator."""
        return granules.look_up(
            operands.index,
            self._first_granule(tile),
            self.phase.accumulators,
            of_row=self.phase.granules_of_row,
            coarser_rows=operands.fragments_in.upper.shape[0] // self.phase.granules_of_row,
        )

    def load_fragments(
        self, memory: fragment.Fragment, users: Any, tile: Tile
    ) -> tuple[fragment.Fragment, ...]:
        begin, rows = self._first_row(tile), self.phase.consumer_rows
        return granules.load(memory, users, self.phase.accumulators, begin, rows)

    def store_fragments(
        self, memory: fragment.Fragment, tile: Tile, accs: tuple[jax.Array, ...]
    ) -> None:
        first, begin = self._first_granule(tile), self._first_row(tile)
        for i, acc in enumerate(accs):
            granules.store(memory, acc, first + i * granules.GRANULES, begin)

    def store_chunk(
        self, output: Any, chunk: int, finished: tuple[jax.Array, ...], tile: Tile, is_valid: Any
    ) -> None:
        rows = self.ctx.config.epilogue_rows
        number, part = divmod(chunk, self.phase.consumer_rows // rows)
        staging = self.ctx.shared.staging.at[self.ctx.consumer, chunk % STAGING_SLOTS]
        blocks = WGMMA_M // self.phase.width

        @pl.when(is_valid)
        def _() -> None:
            # All copies but the newest have read their staging buffers, so this buffer is free.
            plgpu.wait_smem_to_gmem(STAGING_SLOTS - 1, wait_read_only=True)
            values = lax.slice(finished[number], (0, part * rows), (WGMMA_M, (part + 1) * rows))
            granules.stage_transposed(staging, values)
            plgpu.commit_smem()
            first = self._first_accumulator(tile) + number
            compressed = pl.ds(self._first_row(tile) + part * rows, rows)
            self.phase.store(staging, output, first * blocks, compressed)

    @property
    def _share(self) -> tuple[Any, Any]:
        """Numbers of this consumer's part of a tile's columns and of its compressed rows."""
        return (0, self.ctx.consumer) if self.phase.parts > 1 else (self.ctx.consumer, 0)

    def _first_accumulator(self, tile: Tile) -> Any:
        """Returns the index of this consumer's first accumulator, counted over all tiles."""
        first, _ = self._share
        return (tile.row * (NUM_CONSUMERS // self.phase.parts) + first) * self.phase.accumulators

    def _first_granule(self, tile: Tile) -> Any:
        """Returns the number of the first granule of this consumer's first accumulator."""
        return self._first_accumulator(tile) * granules.GRANULES

    def _first_row(self, tile: Tile) -> Any:
        """Returns this consumer's first compressed row."""
        _, part = self._share
        return tile.m_tile * self.phase.block_m + part * self.phase.consumer_rows
