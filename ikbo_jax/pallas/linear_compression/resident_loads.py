"""Loads of the kernel in `resident`: embeddings by TMA, weights, users and their fragments."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import fragment, granules
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.linear_compression import weights
from ikbo_jax.pallas.linear_compression.resident_tiles import Place, block_at
from ikbo_jax.problems.packed_compression import GRANULE


def load_tile(ctx: WarpgroupContext, place: Place, tile: Any) -> None:
    """Issues the loads of a tile's embeddings."""
    phase, shared = ctx.shape, ctx.shared
    layout = phase.layout
    if layout.by_threads:
        weights.load_blocks(
            ctx.operands.embedding,
            shared.embedding,
            phase.first_block(place, tile),
            phase.blocks_of_row,
            place.split * layout.k,
            interpret=ctx.interpret,
        )
        return
    stage = lax.rem(tile - place.begin, layout.stages)
    for step in range(layout.steps):
        slot = stage * layout.steps + step
        target, ready = shared.embedding.at[slot], shared.ready.at[slot]
        rows = pl.ds(place.split * layout.k + step * layout.depth, layout.depth)
        first = phase.first_block(place, tile)
        if phase.blocks_of_row == 1:
            source = ctx.operands.embedding.at[pl.ds(first, phase.blocks), rows]
            plgpu.copy_gmem_to_smem(source, target, ready)
            continue
        for i in range(phase.blocks):
            row, columns = block_at(phase, first + i)
            plgpu.copy_gmem_to_smem(
                ctx.operands.embedding.at[row, rows, columns], target.at[i], ready
            )
    if layout.gathered is not None and not layout.has_one_user:
        gather(ctx, place, tile, stage)


def gather(ctx: WarpgroupContext, place: Place, tile: Any, stage: Any) -> None:
    """Issues the loads of the embeddings of a tile's users."""
    phase, (steps, depth) = ctx.shape, ctx.shape.layout.gathered
    _, embedding = ctx.operands.of_users
    for i in range(phase.blocks):
        row, columns = block_at(phase, phase.first_block(place, tile) + i)
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
        interpret=ctx.interpret,
    )


def load_weights(ctx: WarpgroupContext, place: Place) -> None:
    """Loads the weights of a CTA's compressed rows and split of K, and the users' if it gathers."""
    layout, (tiles, _) = ctx.shape.layout, ctx.shared.weight
    own, gathered = layout.k_blocks
    first_row, first_k = place.group * layout.rows, place.split * layout.k
    load = functools.partial(weights.load, interpret=ctx.interpret)
    region = weights.Region(0, own, own + gathered)
    load(ctx.operands.weight, tiles, region, first_row, first_k)
    if layout.gathered is not None:
        weight, _ = ctx.operands.of_users
        load(weight, tiles, weights.Region(own, gathered, own + gathered), first_row, jnp.int32(0))
    weights.finish(interpret=ctx.interpret)


def look_up(ctx: WarpgroupContext, place: Place, tile: Any) -> Any:
    """The granules of the coarser level that a tile adds; of the last tile past the end."""
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
        interpret=ctx.interpret,
    )


def load_fragments(
    ctx: WarpgroupContext, users: Any, split: int, begin: Any
) -> tuple[fragment.Fragment, ...]:
    """Issues the loads of the users' fragments of a split, of a part from row `begin` on."""
    phase, layout = ctx.shape, ctx.shape.layout
    return granules.load(
        ctx.operands.fragments,
        users + split * phase.coarser.granules if split else users,
        layout.accumulators,
        begin,
        layout.block_m,
        interpret=ctx.interpret,
    )
