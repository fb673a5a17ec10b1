"""Phases, tiles and embeddings of the kernel in `resident`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.problems.packed_compression import GRANULE, block_width
from ikbo_jax.problems.resident_compression import Layout


@dataclasses.dataclass(frozen=True)
class Phase:
    """Static description of a level.

    Attributes:
      layout: how it is divided among CTAs.
      coarser: the level whose fragments it adds; None if there is none.
      users: the coarser level's batch; 0 if there is none.
      workers: CTAs of a group and a split; each has a range of column tiles.
    """

    batch: int
    k: int
    m: int
    n: int
    layout: Layout
    coarser: Phase | None
    users: int
    workers: int

    @property
    def width(self) -> int:
        """Columns of a block."""
        return block_width(self.n)

    @property
    def blocks_of_row(self) -> int:
        return self.n // self.width

    @property
    def blocks(self) -> int:
        """Blocks of a tile."""
        return self.layout.block_n // self.width

    @property
    def tiles(self) -> int:
        """Column tiles of a strip."""
        return self.layout.tiles(self.batch, self.n)

    def first_block(self, place: Place, tile: Any) -> Any:
        """The number of a tile's first block."""
        if self.layout.strips == 1:
            return tile * self.blocks
        return tile * self.blocks_of_row + place.strip * self.blocks

    @property
    def granules(self) -> int:
        """Granules of a split's fragments, of whole tiles."""
        return self.tiles * self.layout.block_n // GRANULE


class Operands(NamedTuple):
    """Device memory of a level; `index` and `fragments` are None at the coarsest level."""

    weight: Any  # [M, K]
    embedding: Any  # [B, K, N]
    of_users: Any  # (weight, embedding) of the coarser level, if a tile loads them
    index: Any  # [B] int32
    fragments: Any  # fragment.Fragment of [splits * granules, ...]


class Place(NamedTuple):
    """What a CTA computes."""

    group: Any  # of compressed rows
    split: Any  # of K
    strip: Any  # of N
    begin: Any  # column tiles
    end: Any


def place_of(ctx: WarpgroupContext) -> Place:
    """What this CTA computes: neighbouring CTAs share column tiles."""
    phase = ctx.shape
    layout = phase.layout
    worker, share = lax.div(ctx.worker, layout.shares), lax.rem(ctx.worker, layout.shares)
    begin, end = (lax.div(x * phase.tiles, phase.workers) for x in (worker, worker + 1))
    share, strip = lax.div(share, layout.strips), lax.rem(share, layout.strips)
    return Place(lax.div(share, layout.splits), lax.rem(share, layout.splits), strip, begin, end)


def block_at(phase: Phase, number: Any) -> tuple[Any, Any]:
    """Row of the batch and columns of a block."""
    row, of_row = lax.div(number, phase.blocks_of_row), lax.rem(number, phase.blocks_of_row)
    return row, pl.ds(of_row * phase.width, phase.width)


class Source(NamedTuple):
    """Embeddings in shared memory that are multiplied by the weights from a block on."""

    tiles: Any  # [stages * steps, column blocks, depth, block_width]
    ready: Any
    first_block: int
    steps: int
    depth: int

    def await_ready(self, stage: Any) -> None:
        if self.ready is None:  # threads have loaded them
            return
        for step in range(self.steps):
            plgpu.barrier_wait(self.ready.at[stage * self.steps + step])


def sources_of(ctx: WarpgroupContext, *, of_user: bool) -> list[Source]:
    """The embeddings of a tile, or of the only user."""
    layout, shared = ctx.shape.layout, ctx.shared
    own = [Source(shared.embedding, shared.ready, 0, layout.steps, layout.depth)]
    if layout.gathered is None:
        return own
    first, _ = layout.k_blocks
    gathered = [Source(shared.gathered, shared.gathered_ready, first, *layout.gathered)]
    if layout.has_one_user:
        return gathered if of_user else own
    return own + gathered
