"""Normalises rows, gates them, multiplies them and adds a residual: one persistent kernel.

    out = [u, a, u · norm(a)] @ weight + residual, or (u · norm(a)) @ weight + residual

A CTA computes tiles of 128 rows by up to 256 columns. Warpgroups 0 and 1 are the consumers, each
of 64 rows. A tile takes two passes over the rows. In the first, WGMMAs multiply blocks of 64
columns of `a` while their consumer sums them for the statistics. In the second, WGMMAs multiply a
block of `u` while their consumer reads it and the same block of `a` again, and forms u · norm(a) in
registers, from where the next WGMMAs take it. So it is rounded as the reference rounds it, and no
memory holds it.

Blocks of the residual follow those of the rows through the same ring. A consumer adds one to its
accumulator, writes the result to the block's place, and stores it from there.

One warp of warpgroup 2 loads weights, another one rows.

Synchronisations:
  1. `weight.ready[s]`  producer -> consumers: TMA has filled slot s with a k step of weights.
  2. `weight.free[s]`   consumers -> producer: the WGMMAs of both consumers have read slot s.
  3. `rows.ready[s]`,   the same for a block of rows. Results leave from the last slots of a tile,
     `rows.free[s]`     which are free when TMA has read them: the very last one is freed in the
                        next tile's first step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma, operand_tiles
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.linear import rows
from ikbo_jax.pallas.linear.items import ItemContext
from ikbo_jax.problems import hopper
from ikbo_jax.problems.gated_linear import GatedLinearConfig
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.reference.norm_linear import Gate, GatedLinear

#: Numbers of u, a and u · norm(a) among the parts of a weight.
U, A, GATED = range(3)


class Operands(NamedTuple):
    """Device memory that the kernel reads; `scale` and `bias` may be None."""

    u: Any  # [rows, C]
    a: Any  # [rows, C]
    scale: Any  # [blocks * 64] f32
    bias: Any  # [blocks * 64] f32
    weight: Any  # [parts, C, F]
    residual: Any  # [rows, F], or None for 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch; `tile_blocks` are blocks of 64 columns of a tile."""

    rows: int
    columns: int
    features: int
    gate: Gate
    tile_blocks: int
    workers: int = 1

    @property
    def blocks(self) -> int:
        """Number of blocks of 64 columns of `a`."""
        return hopper.column_blocks(self.columns)

    @property
    def row_blocks(self) -> int:
        """Number of a tile's blocks in the ring of rows: a; u and a in pairs; the residual."""
        return 3 * self.blocks + self.tile_blocks

    @property
    def k_steps(self) -> int:
        """Number of a tile's k steps of weights."""
        return self.blocks * (3 if self.gate.concat else 1)

    @property
    def column_tiles(self) -> int:
        return -(-hopper.column_blocks(self.features) // self.tile_blocks)

    @property
    def items(self) -> int:
        return -(-self.rows // TILE_ROWS) * self.column_tiles


class Tile(NamedTuple):
    """A tile of the result: its first row and its first column."""

    row: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class GatedLinearContext(ItemContext):
    """The context of a warpgroup; steps and blocks of rows are numbered through all tiles."""

    def item(self, i: Any) -> Tile:
        number, tiles = i * self.shape.workers + self.worker, self.shape.column_tiles
        column = lax.rem(number, tiles) * (self.shape.tile_blocks * BLOCK_K)
        return Tile(lax.div(number, tiles) * TILE_ROWS, column)

    def part(self, tile: Tile, consumer: Any, column: Any) -> tuple[Any, Any]:
        """Selects 64 columns of a consumer's rows in device memory."""
        return pl.ds(tile.row + consumer * WGMMA_M, WGMMA_M), pl.ds(column, BLOCK_K)

    def rows_of(self, block: Any) -> Any:
        """Selects the consumer's rows of a block, as WGMMA sees them."""
        return self.shared.rows.matrix(block).at[self.consumer, 0]


def load_weights(ctx: GatedLinearContext) -> None:
    """Loads the weights of all tiles, as a warp of the producer."""
    ring, shape = ctx.shared.weight, ctx.shape

    def load_tile(i: Any, tile: Tile, carry: Any) -> Any:
        def load(part: int, k: Any, step: Any) -> None:
            step += i * shape.k_steps
            ring.await_reuse(step)
            for j in range(shape.tile_blocks):
                columns = pl.ds(tile.column + j * BLOCK_K, BLOCK_K)
                source = ctx.operands.weight.at[part, pl.ds(k * BLOCK_K, BLOCK_K), columns]
                plgpu.copy_gmem_to_smem(source, ring.copied(step).at[j], ring.ready_at(step))

        if not shape.gate.concat:
            pl.loop(0, shape.blocks)(lambda k: load(0, k, k))
            return carry
        pl.loop(0, shape.blocks)(lambda k: load(A, k, k))

        @pl.loop(0, shape.blocks)
        def _(k: Any) -> None:
            for second, part in enumerate((U, GATED)):
                load(part, k, shape.blocks + 2 * k + second)

        return carry

    ctx.for_items(load_tile, jnp.int32(0))
    ring.drain_uses(ctx.count * shape.k_steps)


def load_rows(ctx: GatedLinearContext) -> None:
    """Loads the rows of all tiles, as a warp of the producer."""
    ring, shape, operands = ctx.shared.rows, ctx.shape, ctx.operands
    # Without a residual, its slots still take the result: they get some rows that nothing reads.
    residual = operands.u if operands.residual is None else operands.residual

    def load_tile(i: Any, tile: Tile, carry: Any) -> Any:
        def load(source: Any, column: Any, block: Any) -> None:
            block += i * shape.row_blocks
            ring.await_reuse(block)
            for consumer in range(NUM_CONSUMERS):
                target = ring.copied(block).at[consumer, 0]
                part = source.at[ctx.part(tile, consumer, column)]
                plgpu.copy_gmem_to_smem(part, target, ring.ready_at(block))

        pl.loop(0, shape.blocks)(lambda k: load(operands.a, k * BLOCK_K, k))

        @pl.loop(0, shape.blocks)
        def _(k: Any) -> None:
            for second, source in enumerate((operands.u, operands.a)):
                load(source, k * BLOCK_K, shape.blocks + 2 * k + second)

        first = 0 if operands.residual is None else tile.column
        for j in range(shape.tile_blocks):
            load(residual, first + j * BLOCK_K, 3 * shape.blocks + j)
        return carry

    ctx.for_items(load_tile, jnp.int32(0))
    ring.drain_uses(ctx.count * shape.row_blocks)


# Consumers


def _statistics(
    ctx: GatedLinearContext, first: Any, multiply: Callable[[Any], None]
) -> list[rows.Statistics]:
    raise NotImplementedError
