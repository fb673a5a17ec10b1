"""Phases, tiles and context of linear compression; how a tile's columns are accessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import fragment, mma, schedule
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.linear_compression import STAGING_SLOTS
from ikbo_jax.problems.packed_compression import GRANULE, block_width, row_parts

#: Embedding columns of a tile.
BLOCK_N = NUM_CONSUMERS * WGMMA_M
#: Compressed rows of all of a consumer's accumulators up to which registers hold fragments while
#: the previous tile is stored: accumulators, fragments and that tile take 144 of 240 registers.
MAX_EARLY_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Phase:
    """Static description of one level's tiles."""

    batch: int
    k: int
    m: int
    n: int
    block_m: int
    k_offset: int  # first column of this level in the weight operand
    from_fragments: bool  # whether its tiles add fragments of the coarser level
    cluster: int
    block_n: int = BLOCK_N

    @property
    def accumulators(self) -> int:
        """Number of a consumer's accumulators, each of 64 embedding columns by `block_m`."""
        return pl.cdiv(self.block_n, BLOCK_N)

    @property
    def parts(self) -> int:
        """Number of parts of a tile's compressed rows: 2 if each consumer has a half."""
        return row_parts(self.block_n)

    @property
    def consumer_rows(self) -> int:
        """Number of compressed rows of an accumulator."""
        return self.block_m // self.parts

    @property
    def holds_fragments_early(self) -> bool:
        """Whether registers hold a tile's fragments beside the finished tile and accumulators."""
        return False

    @property
    def rows(self) -> int:
        """Number of rows of tiles: a tile's columns belong to one row of the batch."""
        return self.batch

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.k, BLOCK_K)

    @property
    def m_tiles(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def last_consumer_rows(self) -> int:
        """Number of a consumer's compressed rows in the last M tile, a multiple of 8 for WGMMA."""
        if self.parts > 1:
            return self.consumer_rows
        return pl.cdiv(self.m - (self.m_tiles - 1) * self.block_m, 8) * 8

    @property
    def n_tiles(self) -> int:
        return pl.cdiv(self.n, BLOCK_N)

    @property
    def tiles(self) -> int:
        """Number of tiles of clusters; each has `cluster` rows of the batch."""
        return pl.cdiv(self.rows, self.cluster) * self.n_tiles * self.m_tiles

    @property
    def cost(self) -> int:
        """Relative time of a tile."""
        return self.k_steps * self.consumer_rows * self.accumulators


class Blocks:
    """Columns of consecutive rows of the batch, in blocks of `width` columns of one row."""

    n: int

    @property
    def width(self) -> int:
        return block_width(self.n)

    @property
    def blocks_of_row(self) -> int:
        """Number of column blocks of a row of the batch."""
        return self.n // self.width

    def at(self, number: Any) -> tuple[Any, Any]:
        """Returns the row of the batch and the columns of a block; `number` counts all rows'."""
        row, of_row = lax.div(number, self.blocks_of_row), lax.rem(number, self.blocks_of_row)
        return row, pl.ds(of_row * self.width, self.width)

    def store(self, staging: Any, output: Any, first: Any, compressed: Any) -> None:
        """Stores staged blocks from number `first` on; TMA drops rows past the batch and past M."""
        blocks = staging.shape[0]
        if self.blocks_of_row == 1:
            plgpu.copy_smem_to_gmem(staging, output.at[pl.ds(first, blocks), compressed])
            return
        for i in range(blocks):
            row, columns = self.at(first + i)
            plgpu.copy_smem_to_gmem(
                staging.at[i], output.at[row, compressed, columns], commit_group=i == blocks - 1
            )


@dataclasses.dataclass(frozen=True)
class PackedPhase(Blocks, Phase):
    """Tiles that span rows of the batch: column c of all tiles is column c % N of row c // N."""

    @property
    def holds_fragments_early(self) -> bool:
        return self.accumulators * self.consumer_rows <= MAX_EARLY_ROWS

    @property
    def rows(self) -> int:
        """Number of tiles along the columns of all rows."""
        return pl.cdiv(self.batch * self.n, self.block_n)

    @property
    def n_tiles(self) -> int:
        return 1

    @property
    def blocks(self) -> int:
        """Number of a tile's column blocks."""
        return self.block_n // self.width

    @property
    def granules_of_row(self) -> int:
        """Number of granules of 16 columns in a row of the batch."""
        return self.n // GRANULE

    @property
    def granules(self) -> int:
        """Number of granules in all rows of the batch."""
        return self.batch * self.granules_of_row


class Shape(NamedTuple):
    """Static description of a launch."""

    tiles: schedule.TileSchedule
    phases: tuple[Phase | None, Phase | None]  # of the user level and of the candidate level


class Operands(NamedTuple):
    """Device memory of one phase; `index` and `fragments_in` are None at the coarsest level."""

    weight: Any  # [M, columns], of all levels of a launch
    embedding: Any  # [B, K, N]
    index: Any  # [B] int32, rows of the coarser level's batch
    fragments_in: Any  # fragment.Fragment of [U, n_tiles, 2, ...], or of [granules, ...]


class Tile(NamedTuple):
    """Position of a tile."""

    row: Any  # row of the batch; of a `PackedPhase`, row of tiles
    n_tile: Any  # number of the tile along N
    m_tile: Any  # number of the tile along M


class Claims(NamedTuple):
    """How the CTAs of a single launch claim its user tiles; other launches have no claims."""

    counter: Any  # device-wide counter of tickets
    tickets: Any  # ring that passes tickets from the producer to the consumers
    users_ready: Any  # device-wide counter


@dataclasses.dataclass(frozen=True)
class CompressionContext(WarpgroupContext):
    """The context of a warpgroup of linear compression; a *step* numbers the k steps of all tiles.

    `operands` are of the user level and of the candidate level; `outputs` are the result and the
    users' fragments.
    """

    columns: Any = None  # the class of `Columns`
    claims: Claims | None = None

    def columns_of(self, phase: Phase) -> Any:
        return self.columns(self, phase)

    def in_claimed_phase(self) -> CompressionContext:
        """Returns the context of the user phase: a CTA frees its stages without its cluster."""
        stages = self.shared.stages._replace(free=self.shared.user_stage_free)
        return self.replace(shared=self.shared._replace(stages=stages))


def locate(phase: Phase, tile: Any) -> Tile:
    """Locates tile number `tile`.

    M tiles vary fastest, so that their common embedding tile is read from device memory once.
    """
    rest, m_tile = lax.div(tile, phase.m_tiles), lax.rem(tile, phase.m_tiles)
    row, n_tile = lax.div(rest, phase.n_tiles), lax.rem(rest, phase.n_tiles)
    if phase.cluster > 1:  # the last row may lie past the batch; its result is not stored
        row = row * phase.cluster + lax.axis_index("cluster")
    return Tile(row, n_tile, m_tile)


@dataclasses.dataclass(frozen=True)
class Columns:
    """A tile's columns: 128 columns of one row of the batch; each consumer has 64 of them.

    `looks_up_ahead`: whether a tile's users are looked up during the tile before.
    """

    ctx: CompressionContext
    phase: Any
    looks_up_ahead: ClassVar[bool] = False

    @staticmethod
    def fragment_types(phase: Any, columns: int) -> fragment.Fragment:
        """Declares device memory for a level's fragments, of `columns` rows of M."""
        return fragment.types(columns, (phase.batch, phase.n_tiles, NUM_CONSUMERS))

    def weight_parts(self, stage: Any) -> tuple[Any, ...]:
        """Returns the parts of a stage's weight tile, each of `Phase.consumer_rows`."""
        _, weight = self.ctx.shared.weight
        return (weight.at[stage, : self.phase.block_m],)

    def load(self, embedding: Any, tile: Tile, k: Any, stage: Any) -> None:
        """Loads 64 embedding rows from `k` on to a stage."""
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
        return mma.with_accumulator(lambda acc: body((acc,)), columns)

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
        )
        return (acc,)

    def look_up(self, operands: Operands, tile: Tile) -> Any:
        """Looks up the coarser level's row, clamped to the array."""
        row = jnp.minimum(tile.row, operands.index.shape[0] - 1)
        return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)

    def load_fragments(
        self, memory: fragment.Fragment, users: Any, tile: Tile
    ) -> tuple[fragment.Fragment, ...]:
        """Issues the loads of the users' fragments, one for each accumulator."""
        part = self._fragment_at(memory, users, tile)
        return (fragment.load(part, self.phase.block_m),)

    def store_fragments(
        self, memory: fragment.Fragment, tile: Tile, accs: tuple[jax.Array, ...]
    ) -> None:
        """Stores a tile's accumulators for a finer level, which looks them up."""

        @pl.when(tile.row < self.phase.batch)
        def _() -> None:
            target = self._fragment_at(memory, tile.row, tile)
            fragment.store(target, *accs)

    def store_chunk(
        self, output: Any, chunk: int, finished: tuple[jax.Array, ...], tile: Tile, is_valid: Any
    ) -> None:
        """Stores `epilogue_rows` compressed rows of a finished tile."""
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
        """Selects the part of a row's fragments that belongs to a tile."""
        begin, columns = tile.m_tile * self.phase.block_m, self.phase.block_m
        return memory.part((row, tile.n_tile, self.ctx.consumer), begin, columns)
