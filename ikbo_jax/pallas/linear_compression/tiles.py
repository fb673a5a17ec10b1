"""Phases, tiles, memory and barriers of a launch of linear compression."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import schedule
from ikbo_jax.pallas.hopper.launch import OperandTile, barrier
from ikbo_jax.problems import LinearCompressionConfig
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.linear_compression import STAGING_SLOTS

#: Embedding columns of a tile.
BLOCK_N = NUM_CONSUMERS * WGMMA_M


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
    def k_steps(self) -> int:
        return pl.cdiv(self.k, BLOCK_K)

    @property
    def m_tiles(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def last_block_m(self) -> int:
        """Compressed rows of the last M tile, rounded up to a multiple of 8, for a WGMMA's n."""
        return pl.cdiv(self.m - (self.m_tiles - 1) * self.block_m, 8) * 8

    @property
    def n_tiles(self) -> int:
        return pl.cdiv(self.n, BLOCK_N)

    @property
    def tiles(self) -> int:
        """Number of tiles of clusters; each has `cluster` rows of the batch."""
        return pl.cdiv(self.batch, self.cluster) * self.n_tiles * self.m_tiles

    @property
    def cost(self) -> int:
        """Time of a tile, in arbitrary units."""
        return self.k_steps * self.block_m


class Operands(NamedTuple):
    """Device memory of one phase; `index` and `fragments_in` are None at the coarsest level."""

    weight: Any  # [M, columns], of all levels of a launch
    embedding: Any  # [B, K, N]
    index: Any  # [B] int32, rows of the coarser level's batch
    fragments_in: Any  # fragment.Fragment of [U, n_tiles, 2, ...]


class Tile(NamedTuple):
    """Position of a tile."""

    row: Any  # row of the batch
    n_tile: Any  # number of the tile along N
    m_tile: Any  # number of the tile along M


class Shared(NamedTuple):
    """Shared memory and barriers; an operand has two views, (for WGMMA, for TMA): see
    `mosaic.tile_views`."""

    weight: Any  # [stages, block_m, 64]
    embedding: Any  # [stages, 2, 64, 64]
    staging: Any  # [2, STAGING_SLOTS, epilogue_rows, 64]
    stage_ready: Any
    stage_free: Any
    tickets: Any = None  # the fields of `Claims`, if CTAs claim tiles
    tickets_ready: Any = None
    user_stage_free: Any = None


class Claims(NamedTuple):
    """How the CTAs of a single launch claim its user tiles; other launches have no claims."""

    counter: Any  # device-wide counter of tickets
    tickets: Any  # shared memory [slots] int32: tickets that the producer passes to the consumers
    tickets_ready: Any
    stage_free: Any
    users_ready: Any  # device-wide counter


class WarpgroupContext(NamedTuple):
    """Arguments that all functions of a warpgroup share; `consumer` is 0 or 1 (producer: unused).

    A *step* numbers the k steps of all tiles of the CTA; its remainder by the number of stages is
    the stage of its operands.
    """

    config: LinearCompressionConfig
    tiles: schedule.TileSchedule
    shared: Shared
    operands: tuple[Operands, Operands]  # of the user level and of the candidate level
    outputs: tuple[Any, Any]  # the result, and the users' fragments
    claims: Claims | None
    interpret: bool
    worker: Any = None  # CTA or cluster, as counted by `tiles`
    consumer: Any = None

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.num_stages)

    def in_claimed_phase(self, claims: Claims) -> WarpgroupContext:
        """The context of the user phase, in which a CTA frees its stages without its cluster."""
        return self._replace(shared=self.shared._replace(stage_free=claims.stage_free))


def locate(phase: Phase, tile: Any) -> Tile:
    """The position of tile number `tile`.

    M tiles vary fastest, so that their common embedding tile is read from device memory once.
    """
    rest, m_tile = lax.div(tile, phase.m_tiles), lax.rem(tile, phase.m_tiles)
    row, n_tile = lax.div(rest, phase.n_tiles), lax.rem(rest, phase.n_tiles)
    if phase.cluster > 1:  # the last row may lie past the batch; its result is not stored
        row = row * phase.cluster + lax.axis_index("cluster")
    return Tile(row, n_tile, m_tile)


def shared_types(dtype: Any, config: LinearCompressionConfig, *, with_claims: bool) -> Shared:
    """Types of shared memory and barriers."""
    stages = config.num_stages
    free_in_cta = barrier(NUM_CONSUMERS, stages)
    free: Any = free_in_cta
    if config.cluster > 1:
        free = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=NUM_CONSUMERS, num_barriers=stages
        )
    shared = Shared(
        weight=OperandTile((stages, config.block_m, BLOCK_K), dtype),
        embedding=OperandTile((stages, NUM_CONSUMERS, BLOCK_K, WGMMA_M), dtype),
        staging=OperandTile((NUM_CONSUMERS, STAGING_SLOTS, config.epilogue_rows, WGMMA_M), dtype),
        stage_ready=barrier(1 + NUM_CONSUMERS, stages),
        stage_free=free,
    )
    if not with_claims:
        return shared
    # The producer is at most `stages` tiles ahead, since each tile uses at least one stage.
    slots = stages + 2
    return shared._replace(
        tickets=plgpu.SMEM((slots,), jnp.int32),
        tickets_ready=barrier(1, slots),
        user_stage_free=free_in_cta,
    )
