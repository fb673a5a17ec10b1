"""What a linear-compression launch consists of: its phases, tiles, shared memory and roles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import mosaic, schedule
from ikbo_jax.tuning.configs import (
    BLOCK_K,
    NUM_CONSUMERS,
    STAGING_SLOTS,
    WGMMA_M,
    LinearCompressionConfig,
)

#: Embedding columns of a CTA tile.
BLOCK_N = NUM_CONSUMERS * WGMMA_M


@dataclasses.dataclass(frozen=True)
class Phase:
    """Static description of the tiles of one level."""

    batch: int
    k: int
    m: int
    n: int
    block_m: int
    k_offset: int  # of this level's columns in the weight operand
    from_fragments: bool  # adds the fragments of the level above
    cluster: int

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.k, BLOCK_K)

    @property
    def m_tiles(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def last_block_m(self) -> int:
        """Compressed rows of the last M tile, in whole steps of a WGMMA's n."""
        return pl.cdiv(self.m - (self.m_tiles - 1) * self.block_m, 8) * 8

    @property
    def n_tiles(self) -> int:
        return pl.cdiv(self.n, BLOCK_N)

    @property
    def tiles(self) -> int:
        """Tiles that clusters compute, each of them `cluster` rows of the batch."""
        return pl.cdiv(self.batch, self.cluster) * self.n_tiles * self.m_tiles

    @property
    def cost(self) -> int:
        """Time of a tile, in arbitrary units."""
        return self.k_steps * self.block_m


class Operands(NamedTuple):
    """Device memory of one phase; `index` and `fragments_in` are None at the coarsest level."""

    weight: Any  # [M, columns], shared by the levels of a launch
    embedding: Any  # [B, K, N]
    index: Any  # [B] int32, rows of the level above
    fragments_in: Any  # fragment.Fragment of [U, n_tiles, 2, ...]


class Tile(NamedTuple):
    """Where a tile lies, in units of tiles but for its row."""

    row: Any  # of the batch
    n_tile: Any
    m_tile: Any


class Shared(NamedTuple):
    """Shared memory and barriers; a tile is (view for WGMMA, view for TMA): `mosaic.tile_views`."""

    weight: tuple[Any, Any]  # [stages, block_m, 64]
    embedding: tuple[Any, Any]  # [stages, 2, 64, 64]
    staging: tuple[Any, Any]  # [2, STAGING_SLOTS, epilogue_rows, 64]
    stage_ready: Any
    stage_free: Any


class Claims(NamedTuple):
    """How the CTAs of a single launch share out its user tiles; None anywhere else."""

    tickets: Any  # device-wide counter
    taken: Any  # shared memory [slots] int32: tickets of this CTA, on their way to its consumers
    taken_ready: Any
    stage_free: Any
    users_ready: Any  # device-wide counter


class WarpgroupContext(NamedTuple):
    """What every function of a warpgroup needs; `consumer` is 0 or 1, unused by the producer."""

    config: LinearCompressionConfig
    tiles: schedule.TileSchedule
    shared: Shared
    worker: Any  # CTA or cluster, as counted by `tiles`
    consumer: Any
    interpret: bool

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.num_stages)

    def in_claimed_phase(self, claims: Claims) -> WarpgroupContext:
        """The same with the ring of the user phase, whose stages the CTA frees alone."""
        return self._replace(shared=self.shared._replace(stage_free=claims.stage_free))


def locate(phase: Phase, tile: Any) -> Tile:
    """M tiles run fastest, so that the embedding tile they share comes from device memory once."""
    rest, m_tile = lax.div(tile, phase.m_tiles), lax.rem(tile, phase.m_tiles)
    row, n_tile = lax.div(rest, phase.n_tiles), lax.rem(rest, phase.n_tiles)
    if phase.cluster > 1:  # the last row may lie past the batch: what it reads is never stored
        row = row * phase.cluster + lax.axis_index("cluster")
    return Tile(row, n_tile, m_tile)


def scratch_types(
    dtype: Any, config: LinearCompressionConfig, *, with_claims: bool, interpret: bool
) -> tuple[Any, ...]:
    """Shared memory and barriers, in the order in which `_kernel` takes them."""
    stages = config.num_stages
    tile = functools.partial(mosaic.operand_tile, dtype=dtype, interpret=interpret)
    free_in_cta = plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages)
    free: Any = free_in_cta
    if config.cluster > 1:
        free = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=NUM_CONSUMERS, num_barriers=stages
        )
    types = (
        tile((stages, config.block_m, BLOCK_K)),
        tile((stages, NUM_CONSUMERS, BLOCK_K, WGMMA_M)),
        tile((NUM_CONSUMERS, STAGING_SLOTS, config.epilogue_rows, WGMMA_M)),
        plgpu.Barrier(num_arrivals=1 + NUM_CONSUMERS, num_barriers=stages),
        free,
    )
    if not with_claims:
        return types
    # The producer is at most `stages` tiles ahead, each of which uses a stage or more.
    slots = stages + 2
    taken = (plgpu.SMEM((slots,), jnp.int32), plgpu.Barrier(num_barriers=slots))
    return (*types, *taken, free_in_cta)
