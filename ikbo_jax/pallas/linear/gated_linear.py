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

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles
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


def _first_pass(
    ctx: GatedLinearContext, first: Any, step: Any, acc: Any, free_last: Callable[[], None]
) -> tuple[Any, rows.Statistics | None]:
    """Multiplies `a` if the gate concatenates; returns the accumulator and the rows' statistics.

    `first` and `step` number the tile's first block of rows and k step of weights. Statistics of
    several groups of columns stay in shared memory.
    """
    shape, interpret = ctx.shape, ctx.interpret
    ring, weight, gate = ctx.shared.rows, ctx.shared.weight, shape.gate
    of_group = shape.blocks // gate.groups

    def add(k: Any, acc: Any, sums: Any, columns: int = BLOCK_K, is_first: bool = False) -> Any:
        ring.await_ready(first + k)
        tiles = ctx.rows_of(first + k)
        if gate.concat:
            weight.await_ready(step + k)
            right = weight.matrix(step + k)
            acc = mma.add_tile_product(acc, tiles, right, interpret=interpret)
        if is_first:
            free_last()
        elif gate.concat:
            mma.wait(1, interpret=interpret)
            weight.release(step + k - 1)
            ring.release(first + k - 1)
        if is_first or gate.groups > 1:
            fresh = rows.begin_sums(tiles, gate.norm.kind, interpret=interpret)
            begins = lax.rem(k, of_group) == 0
            sums = fresh if is_first else _select(begins, fresh, sums)
        sums = rows.add_sums(sums, tiles, columns, interpret=interpret)
        if gate.groups > 1:
            pl.when(lax.rem(k, of_group) == of_group - 1)(lambda: keep(lax.div(k, of_group), sums))
        mosaic.fence_accesses(interpret=interpret)
        if not gate.concat:
            ring.release(first + k)
        return acc, sums

    def statistics(sums: rows.Sums) -> rows.Statistics:
        size = shape.columns // gate.groups
        return rows.statistics(sums, size, gate.norm.eps, interpret=interpret)

    def keep(group: Any, sums: rows.Sums) -> None:
        for i, values in enumerate(statistics(sums)):
            if values is not None:
                own = pl.ds(ctx.consumer * WGMMA_M, WGMMA_M)
                ctx.shared.statistics[group, i, own] = values

    whole, rest = divmod(shape.columns, BLOCK_K)  # no rest if there are several groups
    acc, sums = add(jnp.int32(0), acc, None, BLOCK_K if whole else rest, is_first=True)
    if interpret:  # the accumulator is a reference
        sums = lax.fori_loop(1, max(whole, 1), lambda k, sums: add(k, acc, sums)[1], sums)
    else:
        acc, sums = lax.fori_loop(1, max(whole, 1), lambda k, x: add(k, *x), (acc, sums))
    if whole and rest:
        acc, sums = add(jnp.int32(whole), acc, sums, rest)
    return acc, statistics(sums) if gate.groups == 1 else None


def _select(predicate: Any, x: rows.Sums, y: rows.Sums) -> rows.Sums:
    return jax.tree.map(functools.partial(lax.select, predicate), x, y)


def _statistics(ctx: GatedLinearContext, k: Any) -> rows.Statistics:
    """Loads the statistics of the group of block `k`."""
    gate = ctx.shape.gate
    group = lax.div(k, ctx.shape.blocks // gate.groups)
    mean, scale = (
        rows.load_statistic(
            ctx.shared.statistics.at[group, i], ctx.consumer, interpret=ctx.interpret
        )
        for i in range(2)
    )
    return rows.Statistics(None if gate.norm.kind == "rms" else mean, scale)


def _gated(ctx: GatedLinearContext, block: Any, k: Any, of_rows: rows.Statistics) -> jax.Array:
    """Forms block `k` of u · norm(a), [64, 64], of blocks `block` and `block + 1` of the ring."""
    interpret, operands = ctx.interpret, ctx.operands
    u, a = (
        operand_tiles.read_rows(ctx.rows_of(block + i), interpret=interpret).astype(jnp.float32)
        for i in range(2)
    )
    if of_rows.mean is not None:
        a -= lax.broadcast_in_dim(of_rows.mean, a.shape, (0,))
    a *= lax.broadcast_in_dim(of_rows.scale, a.shape, (0,))
    if operands.scale is not None:
        a *= rows.of_columns(operands.scale, k * BLOCK_K, BLOCK_K, interpret=interpret)
    if operands.bias is not None:
        a += rows.of_columns(operands.bias, k * BLOCK_K, BLOCK_K, interpret=interpret)
    return (u * a).astype(operands.u.dtype)


def _second_pass(
    ctx: GatedLinearContext, first: Any, step: Any, acc: Any, of_rows: rows.Statistics | None
) -> Any:
    """Multiplies `u` if the gate concatenates, and u · norm(a); returns the accumulator."""
    shape, interpret = ctx.shape, ctx.interpret
    ring, weight, concat = ctx.shared.rows, ctx.shared.weight, shape.gate.concat

    def add_pair(k: Any, acc: Any, *, is_first: bool = False) -> Any:
        u = first + shape.blocks + 2 * k
        at = step + (shape.blocks + 2 * k if concat else k)
        ring.await_ready(u)
        if concat:
            weight.await_ready(at)
            right = weight.matrix(at)
            acc = mma.add_tile_product(acc, ctx.rows_of(u), right, interpret=interpret)
        # No WGMMA reads u · norm(a) of the last step any more: its registers are taken again.
        mma.wait(int(concat), interpret=interpret)
        if concat or not is_first:
            weight.release(at - 1)
        if concat and is_first:
            ring.release(u - 1)
        ring.await_ready(u + 1)
        gated = _gated(ctx, u, k, of_rows or _statistics(ctx, k))
        mosaic.fence_accesses(interpret=interpret)
        weight.await_ready(at + int(concat))
        acc = _add_gated(ctx, acc, gated, weight.matrix(at + int(concat)))
        if concat:
            mma.wait(1, interpret=interpret)
            weight.release(at)
        for block in (u, u + 1):
            ring.release(block)
        return acc

    acc = add_pair(jnp.int32(0), acc, is_first=True)
    acc = mma.accumulate(1, shape.blocks, add_pair, acc, interpret=interpret)
    mma.wait(0, interpret=interpret)
    weight.release(step + shape.k_steps - 1)
    return mma.after_wait(acc, interpret=interpret)


def _add_gated(ctx: GatedLinearContext, acc: Any, gated: jax.Array, weight: Any) -> Any:
    """Issues acc + gated @ weight, from registers; the interpreter stages `gated`."""
    if not ctx.interpret:
        columns = ctx.shape.tile_blocks * BLOCK_K
        return mma.add_product(acc, gated, weight, None, columns=columns, interpret=False)
    ctx.staging()[...] = gated
    plgpu.commit_smem()
    return mma.add_tile_product(acc, ctx.staging(), weight, interpret=True)


def _store(ctx: GatedLinearContext, tile: Tile, acc: jax.Array, first: Any) -> None:
    """Adds the residual and stores the result, from where the residual is: blocks from `first` on.

    All blocks but the last one are freed.
    """
    ring, interpret, (output,) = ctx.shared.rows, ctx.interpret, ctx.outputs
    for j in range(ctx.shape.tile_blocks):
        ring.await_ready(first + j)
        place = ring.matrix(first + j).at[ctx.consumer]
        values = lax.slice(acc, (0, j * BLOCK_K), (WGMMA_M, (j + 1) * BLOCK_K))
        if ctx.operands.residual is not None:
            values += operand_tiles.read_rows(place.at[0], interpret=interpret).astype(jnp.float32)
        values = values.astype(output.dtype)
        operand_tiles.stage_rows(place, values, reads_late=True, interpret=interpret)
        plgpu.commit_smem()
        target = output.at[ctx.part(tile, ctx.consumer, tile.column + j * BLOCK_K)]
        plgpu.copy_smem_to_gmem(ring.copied(first + j).at[ctx.consumer, 0], target)
        if j > 0:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            ring.release(first + j - 1)


def consume(ctx: GatedLinearContext) -> None:
    """Computes all tiles of the CTA, as a consumer warpgroup."""
    ctx = ctx.as_consumer()
    shape, ring = ctx.shape, ctx.shared.rows

    def compute(i: Any, tile: Tile, carry: Any) -> Any:
        first, step = i * shape.row_blocks, i * shape.k_steps

        def free_last() -> None:
            @pl.when(i > 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ring.release(first - 1)

        def multiply(acc: Any) -> jax.Array:
            acc, of_rows = _first_pass(ctx, first, step, acc, free_last)
            return _second_pass(ctx, first, step, acc, of_rows)

        acc = mma.with_block_accumulators(multiply, shape.tile_blocks, interpret=ctx.interpret)
        _store(ctx, tile, acc, first + 3 * shape.blocks)
        return carry

    ctx.for_items(compute, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    ring.release(ctx.count * shape.row_blocks - 1)


def gated_linear_kernel(
    arrays: GatedLinear,
    *,
    gate: Gate,
    config: GatedLinearConfig,
    num_sms: int,
    interpret: Any = False,
) -> jax.Array:
    """Computes `gated_linear`: [rows, F].

    Args:
      arrays: those of `gated_linear`, bf16 or f16, without a seed.
      config: legal.
      interpret: as for `launch`.
    """
    u, a = (x.reshape(x.shape[0], -1) for x in (arrays.u, arrays.a))
    (count, columns), features = a.shape, arrays.weight.shape[1]
    shape = Shape(count, columns, features, gate, config.blocks)
    shape = dataclasses.replace(shape, workers=min(num_sms, shape.items))
    scale, bias = (
        None if y is None else rows.padded(jnp.repeat(y, columns // y.size), BLOCK_K)
        for y in (arrays.norm_scale, arrays.norm_bias)
    )
    weight = arrays.weight.reshape(-1, columns, features)
    (found,) = launch(
        Roles(
            functools.partial(GatedLinearContext, shape, config),
            load_weights,
            consume,
            assist=load_rows,
        ),
        Operands(u, a, scale, bias, weight, arrays.residual),
        (jax.ShapeDtypeStruct((count, features), a.dtype),),
        config.shared(gate.groups),
        dtype=a.dtype,
        name="ikbo_gated_linear",
        workers=shape.workers,
        interpret=interpret,
    )
    return found
