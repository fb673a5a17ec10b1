"""Normalises rows, gates them, multiplies them and adds a residual: one persistent kernel.

    out = [u, a, u · norm(a)] @ weight + residual, or (u · norm(a)) @ weight + residual,
    or norm(a) @ weight + residual

A CTA computes tiles of 128 rows by up to 256 columns. Warpgroups 0 and 1 are the consumers, each
of 64 rows. A tile takes two passes over the rows. In the first, WGMMAs multiply blocks of 64
columns of `a` while their consumer sums them for the statistics. In the second, WGMMAs multiply a
block of `u` while their consumer reads it and the same block of `a` again, and forms u · norm(a) in
registers, from where the next WGMMAs take it. So it is rounded as the reference rounds it, and no
memory holds it.

Without `u` there is the first pass alone: what a row's RMS norm multiplies by, its product is
multiplied by. If a tile has all columns and the ring of weights all k steps, they are loaded once.

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

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.linear import rows
from ikbo_jax.pallas.linear.gated_loads import (
    GatedLinearContext,
    Operands,
    Shape,
    Tile,
    load_rows,
    load_weights,
)
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_M
from ikbo_jax.problems.norm_linear import GatedLinearConfig
from ikbo_jax.reference.norm_linear import Gate, GatedLinear


def _first_pass(
    ctx: GatedLinearContext, first: Any, step: Any, acc: Any, free_last: Callable[[], None]
) -> tuple[Any, rows.Statistics | None]:
    """Multiplies `a` if that is a part; returns the accumulator and the rows' statistics.

    `first` and `step` number the tile's first block of rows and k step of weights. Statistics of
    several groups of columns stay in shared memory.
    """
    shape = ctx.shape
    ring, weight, gate = ctx.shared.rows, ctx.shared.weight, shape.gate
    of_group, multiplies = shape.blocks // gate.groups, gate.concat or not shape.is_gated
    has_norm = gate.norm.kind is not None

    def add(k: Any, acc: Any, sums: Any, columns: int = BLOCK_K, is_first: bool = False) -> Any:
        ring.await_ready(first + k)
        tiles = ctx.rows_of(first + k)
        if multiplies:
            await_weight(step + k)
            right = weight.matrix(step + k)
            acc = mma.add_tile_product(acc, tiles, right)
        if is_first:
            free_last()
        elif multiplies:
            mma.wait(1)
            free(k - 1)
        if not has_norm:
            return acc, sums
        if is_first or gate.groups > 1:
            fresh = rows.begin_sums(tiles, gate.norm.kind)
            select = functools.partial(lax.select, lax.rem(k, of_group) == 0)
            sums = fresh if is_first else jax.tree.map(select, fresh, sums)
        sums = rows.add_sums(sums, tiles, columns)
        if gate.groups > 1:
            pl.when(lax.rem(k, of_group) == of_group - 1)(lambda: keep(lax.div(k, of_group), sums))
        mosaic.fence_accesses()
        if not multiplies:
            ring.release(first + k)
        return acc, sums

    def await_weight(number: Any) -> None:
        wait = functools.partial(weight.await_ready, number)
        pl.when(first == 0)(wait) if ctx.keeps_weights else wait()

    def free(k: Any) -> None:
        if not ctx.keeps_weights:
            weight.release(step + k)
        ring.release(first + k)

    def statistics(sums: rows.Sums) -> rows.Statistics:
        size = shape.columns // gate.groups
        return rows.statistics(sums, size, gate.norm.eps)

    def keep(group: Any, sums: rows.Sums) -> None:
        for i, values in enumerate(statistics(sums)):
            if values is not None:
                own = pl.ds(ctx.consumer * WGMMA_M, WGMMA_M)
                ctx.shared.statistics[group, i, own] = values

    whole, rest = divmod(shape.columns, BLOCK_K)  # no rest if there are several groups
    acc, sums = add(jnp.int32(0), acc, None, BLOCK_K if whole else rest, is_first=True)
    if ctx.interpret:  # the accumulator is a reference
        sums = lax.fori_loop(1, max(whole, 1), lambda k, sums: add(k, acc, sums)[1], sums)
    else:
        acc, sums = lax.fori_loop(1, max(whole, 1), lambda k, x: add(k, *x), (acc, sums))
    if whole and rest:
        acc, sums = add(jnp.int32(whole), acc, sums, rest)
    if not shape.is_gated:
        mma.wait(0)
        free(shape.blocks - 1)
        acc = mma.after_wait(acc)
    return acc, statistics(sums) if has_norm and gate.groups == 1 else None


def _statistics(ctx: GatedLinearContext, k: Any) -> rows.Statistics:
    """Loads the statistics of the group of block `k`."""
    gate = ctx.shape.gate
    group = lax.div(k, ctx.shape.blocks // gate.groups)
    return rows.load_statistics(ctx.shared.statistics.at[group], ctx.consumer, gate.norm.kind)


def _gated(ctx: GatedLinearContext, block: Any, k: Any, of_rows: rows.Statistics) -> jax.Array:
    """Forms block `k` of u · norm(a), [64, 64], of blocks `block` and `block + 1` of the ring."""
    operands = ctx.operands
    u, a = (operand_tiles.read_rows(ctx.rows_of(block + i)).astype(jnp.float32) for i in range(2))
    if of_rows.mean is not None:
        a -= lax.broadcast_in_dim(of_rows.mean, a.shape, (0,))
    a *= lax.broadcast_in_dim(of_rows.scale, a.shape, (0,))
    if operands.scale is not None:
        a *= rows.of_columns(operands.scale, k * BLOCK_K, BLOCK_K)
    if operands.bias is not None:
        a += rows.of_columns(operands.bias, k * BLOCK_K, BLOCK_K)
    return (u * a).astype(operands.u.dtype)


def _second_pass(
    ctx: GatedLinearContext, first: Any, step: Any, acc: Any, of_rows: rows.Statistics | None
) -> Any:
    """Multiplies `u` if the gate concatenates, and u · norm(a); returns the accumulator."""
    shape = ctx.shape
    ring, weight, concat = ctx.shared.rows, ctx.shared.weight, shape.gate.concat

    def add_pair(k: Any, acc: Any, *, is_first: bool = False) -> Any:
        u = first + shape.blocks + 2 * k
        at = step + (shape.blocks + 2 * k if concat else k)
        ring.await_ready(u)
        if concat:
            weight.await_ready(at)
            right = weight.matrix(at)
            acc = mma.add_tile_product(acc, ctx.rows_of(u), right)
        # No WGMMA reads u · norm(a) of the last step any more: its registers are taken again.
        mma.wait(int(concat))
        if concat or not is_first:
            weight.release(at - 1)
        if concat and is_first:
            ring.release(u - 1)
        ring.await_ready(u + 1)
        gated = _gated(ctx, u, k, of_rows or _statistics(ctx, k))
        mosaic.fence_accesses()
        weight.await_ready(at + int(concat))
        acc = _add_gated(ctx, acc, gated, weight.matrix(at + int(concat)))
        if concat:
            mma.wait(1)
            weight.release(at)
        for block in (u, u + 1):
            ring.release(block)
        return acc

    acc = add_pair(jnp.int32(0), acc, is_first=True)
    acc = mma.accumulate(1, shape.blocks, add_pair, acc)
    mma.wait(0)
    weight.release(step + shape.k_steps - 1)
    return mma.after_wait(acc)


def _add_gated(ctx: GatedLinearContext, acc: Any, gated: jax.Array, weight: Any) -> Any:
    """Issues acc + gated @ weight, from registers; the interpreter stages `gated`."""
    if not ctx.interpret:
        columns = ctx.shape.tile_blocks * BLOCK_K
        return mma.add_product(acc, gated, weight, None, columns=columns)
    ctx.staging()[...] = gated
    plgpu.commit_smem()
    return mma.add_tile_product(acc, ctx.staging(), weight)


def _store(
    ctx: GatedLinearContext, tile: Tile, acc: jax.Array, scale: jax.Array | None, first: Any
) -> None:
    """Adds the residual and stores the result, from where the residual is: blocks from `first` on.

    `scale` multiplies the accumulator's rows before. All blocks but the last one are freed.
    """
    ring, (output,) = ctx.shared.rows, ctx.outputs
    shape, shared = ctx.shape, ctx.operands.shared
    group: Any = 0
    if shared is not None:
        row = jnp.minimum(tile.row + ctx.consumer * WGMMA_M, shape.rows - 1)
        group = lax.div(row, shape.shared_rows)
    for j in range(ctx.shape.tile_blocks):
        ring.await_ready(first + j)
        place = ring.matrix(first + j).at[ctx.consumer]
        values = lax.slice(acc, (0, j * BLOCK_K), (WGMMA_M, (j + 1) * BLOCK_K))
        if scale is not None:
            values *= lax.broadcast_in_dim(scale, values.shape, (0,))
        if shared is not None:
            column = group * (shape.column_tiles * shape.tile_blocks * BLOCK_K) + tile.column
            values += rows.of_columns(shared, column + j * BLOCK_K, BLOCK_K)
        if ctx.operands.residual is not None:
            values += operand_tiles.read_rows(place.at[0]).astype(jnp.float32)
        values = values.astype(output.dtype)
        operand_tiles.stage_rows(place, values, reads_late=True)
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
        first, step = i * shape.row_blocks, 0 if ctx.keeps_weights else i * shape.k_steps

        def free_last() -> None:
            @pl.when(i > 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ring.release(first - 1)

        def multiply(acc: Any) -> tuple[Any, Any]:
            acc, of_rows = _first_pass(ctx, first, step, acc, free_last)
            if shape.is_gated:
                return _second_pass(ctx, first, step, acc, of_rows), None
            return acc, None if of_rows is None else of_rows.scale

        acc, scale = mma.with_block_accumulators(multiply, shape.tile_blocks)
        _store(ctx, tile, acc, scale, first + shape.first_result)
        return carry

    ctx.for_items(compute, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    ring.release(ctx.count * shape.row_blocks - 1)


def gated_linear_kernel(
    arrays: GatedLinear, *, gate: Gate, config: GatedLinearConfig, num_sms: int
) -> jax.Array:
    """Computes `gated_linear`: [rows, F].

    Args:
      arrays: those of `gated_linear`, bf16 or f16, without a seed.
      config: legal.
    """
    a = arrays.a.reshape(arrays.a.shape[0], -1)
    u = None if arrays.u is None else arrays.u.reshape(a.shape)
    (count, columns), features = a.shape, arrays.weight.shape[1]
    shared, shared_rows = arrays.shared, 0
    if shared is not None:
        shared_rows, padding = count // shared.shape[0], -features % (config.blocks * BLOCK_K)
        shared = jnp.pad(shared, ((0, 0), (0, padding))).reshape(-1)
    shape = Shape(count, columns, features, gate, config.blocks, u is not None, shared_rows)
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
            ((load_rows, 1),),
        ),
        Operands(u, a, scale, bias, weight, arrays.residual, shared),
        (jax.ShapeDtypeStruct((count, features), a.dtype),),
        config.shared(gate.groups),
        dtype=a.dtype,
        name="ikbo_gated_linear",
        workers=min(num_sms, shape.items),
    )
    return found
