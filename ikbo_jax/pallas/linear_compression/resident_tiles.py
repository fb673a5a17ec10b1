"""Phases, tiles and loads of the kernel in `resident`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import fragment, granules
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.linear_compression import weights
from ikbo_jax.pallas.linear_compression.tiles import Blocks
from ikbo_jax.problems.packed_compression import GRANULE
from ikbo_jax.problems.resident_compression import Layout


@dataclasses.dataclass(frozen=True)
class Phase(Blocks):
    """Static description of a level; `users` is the batch of the `coarser` level whose fragments it
    adds.

    `workers` are the CTAs of a group and a split, each with a range of column tiles.
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
    def blocks(self) -> int:
        return self.layout.block_n // self.width

    @property
    def tiles(self) -> int:
        """Number of a strip's column tiles."""
        return self.layout.tiles(self.batch, self.n)

    def first_block(self, place: Place, tile: Any) -> Any:
        if self.layout.strips == 1:
            return tile * self.blocks
        return tile * self.blocks_of_row + place.strip * self.blocks

    @property
    def granules(self) -> int:
        """Number of granules of a split's fragments, of whole tiles."""
        return self.tiles * self.layout.block_n // GRANULE


class Operands(NamedTuple):
    """Device memory of a level; `index` and `fragments` are None at the coarsest level."""

    weight: Any  # [M, K]
    embedding: Any  # [B, K, N]
    of_users: Any  # (weight, embedding) of the coarser level, if a tile loads them
    index: Any  # [B] int32
    fragments: Any  # fragment.Fragment of [splits * granules, ...]


class Place(NamedTuple):
    """The part of a level that a CTA computes."""

    group: Any  # of compressed rows
    split: Any  # of K
    strip: Any  # of N
    begin: Any  # column tiles
    end: Any


def place_of(ctx: WarpgroupContext) -> Place:
    """Finds the CTA's part of a level; neighbouring CTAs share column tiles."""
    phase = ctx.shape
    layout = phase.layout
    worker, share = lax.div(ctx.worker, layout.shares), lax.rem(ctx.worker, layout.shares)
    begin, end = (lax.div(x * phase.tiles, phase.workers) for x in (worker, worker + 1))
    share, strip = lax.div(share, layout.strips), lax.rem(share, layout.strips)
    return Place(lax.div(share, layout.splits), lax.rem(share, layout.splits), strip, begin, end)


class Source(NamedTuple):
    """Embeddings in shared memory, multiplied by the weights from `first_block` on."""

    tiles: Any  # [stages * steps, column blocks, depth, width]
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
    """Returns the embeddings of a tile, or of the only user."""
    layout, shared = ctx.shape.layout, ctx.shared
    own = [Source(shared.embedding, shared.ready, 0, layout.steps, layout.depth)]
    if layout.gathered is None:
        return own
    first, _ = layout.k_blocks
    gathered = [Source(shared.gathered, shared.gathered_ready, first, *layout.gathered)]
    if layout.has_one_user:
        return gathered if of_user else own
    return own + gathered


def load_tile(ctx: WarpgroupContext, place: Place, tile: Any) -> None:
    """Issues the loads of a tile's embeddings."""
    phase, shared, embedding = ctx.shape, ctx.shared, ctx.operands.embedding
    layout = phase.layout
    if layout.by_threads:
        first, first_k = phase.first_block(place, tile), place.split * layout.k
        weights.load_blocks(embedding, shared.embedding, first, phase.blocks_of_row, first_k)
        return
    stage = lax.rem(tile - place.begin, layout.stages)
    for step in range(layout.steps):
        slot = stage * layout.steps + step
        target, ready = shared.embedding.at[slot], shared.ready.at[slot]
        rows = pl.ds(place.split * layout.k + step * layout.depth, layout.depth)
        first = phase.first_block(place, tile)
        if phase.blocks_of_row == 1:
            source = embedding.at[pl.ds(first, phase.blocks), rows]
            plgpu.copy_gmem_to_smem(source, target, ready)
            continue
        for i in range(phase.blocks):
            row, columns = phase.at(first + i)
            plgpu.copy_gmem_to_smem(embedding.at[row, rows, columns], target.at[i], ready)
    if layout.gathered is not None and not layout.has_one_user:
        _gather(ctx, place, tile, stage)


def _gather(ctx: WarpgroupContext, place: Place, tile: Any, stage: Any) -> None:
    """Issues the loads of the embeddings of a tile's users."""
    phase, (steps, depth) = ctx.shape, ctx.shape.layout.gathered
    _, embedding = ctx.operands.of_users
    for i in range(phase.blocks):
        row, columns = phase.at(phase.first_block(place, tile) + i)
        row = jnp.minimum(row, phase.batch - 1)
        user = jnp.clip(ctx.operands.index[row], 0, phase.users - 1)
        for step in range(steps):
            slot = stage * steps + step
            # Pallas would reject a static end past K.
            rows = pl.ds(step * depth + 0 * ctx.worker, depth)
            plgpu.copy_gmem_to_smem(
                embedding.at[user, rows, columns],
                ctx.shared.gathered.at[slot, i],
                ctx.shared.gathered_ready.at[slot],
            )


def load_one_user(ctx: WarpgroupContext, place: Place) -> None:
    """Loads the only user's embeddings; all tiles of a CTA have the same columns of it."""
    phase = ctx.shape
    weights.load_blocks(
        ctx.operands.of_users[1],
        ctx.shared.gathered,
        place.strip * phase.blocks if phase.layout.strips > 1 else jnp.int32(0),
        phase.blocks_of_row,
        jnp.int32(0),
    )


def load_weights(ctx: WarpgroupContext, place: Place) -> None:
    """Loads the weights of a CTA's compressed rows and split of K, and the users' if it gathers."""
    layout, (tiles, _) = ctx.shape.layout, ctx.shared.weight
    own, gathered = layout.k_blocks
    first_row, first_k = place.group * layout.rows, place.split * layout.k
    region = weights.Region(0, own, own + gathered)
    weights.load(ctx.operands.weight, tiles, region, first_row, first_k)
    if layout.gathered is not None:
        weight, _ = ctx.operands.of_users
        region = weights.Region(own, gathered, own + gathered)
        weights.load(weight, tiles, region, first_row, jnp.int32(0))
    weights.finish()


def look_up(ctx: WarpgroupContext, place: Place, tile: Any) -> Any:
    """Looks up the coarser level's granules that a tile adds; past the end, the last tile's."""
    phase = ctx.shape
    if phase.coarser is None:
        return None
    tile = jnp.minimum(tile, place.end - 1)
    return granules.look_up(
        ctx.operands.index,
        tile * (phase.layout.block_n // GRANULE),
        phase.layout.accumulators,
        of_row=phase.n // GRANULE,
        coarser_rows=phase.users,
    )


def load_fragments(
    ctx: WarpgroupContext, users: Any, split: int, begin: Any
) -> tuple[fragment.Fragment, ...]:
    """Issues the loads of a split's user fragments, for a part from row `begin` on."""
    phase, layout = ctx.shape, ctx.shape.layout
    return granules.load(
        ctx.operands.fragments,
        users + split * phase.coarser.granules if split else users,
        layout.accumulators,
        begin,
        layout.block_m,
    )
