"""Phases, tiles and context of a launch of linear compression."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import schedule
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.packed_compression import GRANULE, row_parts

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

    @property
    def accumulators(self) -> int:
        """Accumulators of a consumer, each of 64 embedding columns by `block_m`."""
        return 1

    @property
    def parts(self) -> int:
        """Parts of a tile's compressed rows: two if each consumer has a half of them."""
        return 1

    @property
    def consumer_rows(self) -> int:
        """Compressed rows of each of a consumer's accumulators."""
        return self.block_m // self.parts

    @property
    def holds_fragments_early(self) -> bool:
        """Whether registers hold a tile's fragments beside the finished tile and accumulators."""
        return False

    @property
    def rows(self) -> int:
        """Rows of tiles: a tile's columns are all of one row of the batch."""
        return self.batch

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.k, BLOCK_K)

    @property
    def m_tiles(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def last_consumer_rows(self) -> int:
        """A consumer's compressed rows of the last M tile, a multiple of 8, for a WGMMA's n."""
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
        """Time of a tile, in arbitrary units."""
        return self.k_steps * self.consumer_rows * self.accumulators


@dataclasses.dataclass(frozen=True)
class PackedPhase(Phase):
    """Tiles that span rows of the batch: column c of all tiles is column c % N of row c // N.

    Attributes:
      block_n: embedding columns of a tile; consumers share 64, and have halves of more.
      block_width: columns of a block, which is of one row of the batch.
    """

    block_n: int
    block_width: int

    @property
    def accumulators(self) -> int:
        return pl.cdiv(self.block_n, BLOCK_N)

    @property
    def parts(self) -> int:
        return row_parts(self.block_n)

    @property
    def last_consumer_rows(self) -> int:
        return self.consumer_rows if self.parts > 1 else super().last_consumer_rows

    @property
    def holds_fragments_early(self) -> bool:
        return self.accumulators * self.consumer_rows <= MAX_EARLY_ROWS

    @property
    def rows(self) -> int:
        """Rows of tiles: each has the next `block_n` columns."""
        return pl.cdiv(self.batch * self.n, self.block_n)

    @property
    def n_tiles(self) -> int:
        return 1

    @property
    def blocks(self) -> int:
        """Column blocks of a tile."""
        return self.block_n // self.block_width

    @property
    def blocks_of_row(self) -> int:
        """Column blocks of a row of the batch."""
        return self.n // self.block_width

    @property
    def granules_of_row(self) -> int:
        """Granules of 16 columns of a row of the batch."""
        return self.n // GRANULE

    @property
    def granules(self) -> int:
        """Granules of all rows of the batch."""
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
    """The context of a warpgroup of linear compression.

    A *step* numbers the k steps of all tiles of the CTA. `operands` are of the user level and of
    the candidate level; `outputs` are the result and the users' fragments.
    """

    columns: Any = None  # the class of `columns.Columns`
    claims: Claims | None = None

    def columns_of(self, phase: Phase) -> Any:
        """The columns of a phase's tiles."""
        return self.columns(self, phase)

    def in_claimed_phase(self) -> CompressionContext:
        """The context of the user phase, in which a CTA frees its stages without its cluster."""
        stages = self.shared.stages._replace(free=self.shared.user_stage_free)
        return self.replace(shared=self.shared._replace(stages=stages))


def locate(phase: Phase, tile: Any) -> Tile:
    """The position of tile number `tile`.

    M tiles vary fastest, so that their common embedding tile is read from device memory once.
    """
    rest, m_tile = lax.div(tile, phase.m_tiles), lax.rem(tile, phase.m_tiles)
    row, n_tile = lax.div(rest, phase.n_tiles), lax.rem(rest, phase.n_tiles)
    if phase.cluster > 1:  # the last row may lie past the batch; its result is not stored
        row = row * phase.cluster + lax.axis_index("cluster")
    return Tile(row, n_tile, m_tile)
