"""The launch of `gated_linear`'s kernel, and the warps that load what it multiplies.

See `gated_linear` for the ring of rows and for synchronisations.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper.launch import ItemContext
from ikbo_jax.problems import hopper
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.reference.norm_linear import Gate

#: Numbers of u, a and u · norm(a) among the parts of a weight.
U, A, GATED = range(3)


class Operands(NamedTuple):
    """Device memory that the kernel reads; `scale`, `bias` and those that say so may be None."""

    u: Any  # [rows, C], or None for 1
    a: Any  # [rows, C]
    scale: Any  # [blocks * 64] f32
    bias: Any  # [blocks * 64] f32
    weight: Any  # [parts, C, F]
    residual: Any  # [rows, F], or None for 0
    shared: Any  # [groups of rows * columns of all tiles], or None for 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      tile_blocks: blocks of 64 columns of a tile.
      is_gated: whether there is `u`.
      shared_rows: rows that have a row of the shared residual in common.
    """

    rows: int
    columns: int
    features: int
    gate: Gate
    tile_blocks: int
    is_gated: bool
    shared_rows: int

    @property
    def blocks(self) -> int:
        """Number of blocks of 64 columns of `a`."""
        return hopper.column_blocks(self.columns)

    @property
    def row_blocks(self) -> int:
        """Number of a tile's blocks in the ring of rows: a; u and a in pairs; the residual."""
        return self.first_result + self.tile_blocks

    @property
    def first_result(self) -> int:
        """Number of the first block of the residual, in whose place the result is written."""
        return self.blocks * (3 if self.is_gated else 1)

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

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay in shared memory: the first tile's k steps are those of all."""
        shape = self.shape
        is_whole = shape.column_tiles == 1 and shape.k_steps <= self.config.weight_slots
        return is_whole and not shape.is_gated

    def item(self, i: Any) -> Tile:
        number, tiles = self.number(i), self.shape.column_tiles
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

        def load_pair(k: Any) -> None:
            for second, part in enumerate((U, GATED)):
                load(part, k, shape.blocks + 2 * k + second)

        first = A if shape.gate.concat else 0
        loop = pl.loop(0, jnp.where(i == 0, shape.blocks, 0) if ctx.keeps_weights else shape.blocks)
        loop(lambda k: load(first, k, k))
        if shape.gate.concat:
            pl.loop(0, shape.blocks)(load_pair)
        return carry

    ctx.for_items(load_tile, jnp.int32(0))
    if not ctx.keeps_weights:
        ring.drain_uses(ctx.count * shape.k_steps)


def load_rows(ctx: GatedLinearContext) -> None:
    """Loads the rows of all tiles, as a warp of the producer."""
    ring, shape, operands = ctx.shared.rows, ctx.shape, ctx.operands

    def load_tile(i: Any, tile: Tile, carry: Any) -> Any:
        def load(source: Any, column: Any, block: Any) -> None:
            block += i * shape.row_blocks
            ring.await_reuse(block)
            for consumer in range(NUM_CONSUMERS):
                if source is None:  # the slot is for the result alone
                    plgpu.barrier_arrive(ring.ready_at(block))
                    continue
                target = ring.copied(block).at[consumer, 0]
                part = source.at[ctx.part(tile, consumer, column)]
                plgpu.copy_gmem_to_smem(part, target, ring.ready_at(block))

        pl.loop(0, shape.blocks)(lambda k: load(operands.a, k * BLOCK_K, k))

        def load_pair(k: Any) -> None:
            for second, source in enumerate((operands.u, operands.a)):
                load(source, k * BLOCK_K, shape.blocks + 2 * k + second)

        if shape.is_gated:
            pl.loop(0, shape.blocks)(load_pair)
        for j in range(shape.tile_blocks):
            load(operands.residual, tile.column + j * BLOCK_K, shape.first_result + j)
        return carry

    ctx.for_items(load_tile, jnp.int32(0))
    ring.drain_uses(ctx.count * shape.row_blocks)
