"""WGMMA products of the attention backward kernels that `hopper.mma` does not have."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline, mma, mosaic, operand_tiles, stores, turns
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_K, WGMMA_M

#: Bytes of WGMMA_K rows of an operand tile.
STEP_BYTES = WGMMA_K * mosaic.SWIZZLE


def sum_over_keys(keys: Any, d_scores: Any, column_block: Any, rows: Any) -> Any:
    """Issues sum(keys[c, column_block].T @ d_scores[c, rows].T) over consumers c as one group.

    `keys` [2 consumers, column blocks, 64, 64] and `d_scores` [2 consumers, block, 64] are both
    read with their rows as the depth; `rows` are (first row, a multiple of 8 as int32; number of
    rows). Returns [64, number of rows] f32; read it by `mma.wait`, then `mma.after_wait`.
    """
    begin, count = rows
    if mosaic.is_interpreted():

        def multiply(acc: Any) -> jax.Array:
            for c in range(NUM_CONSUMERS):
                plgpu.wgmma(
                    acc,
                    keys.at[c, column_block].transpose((1, 0)),
                    d_scores.at[c, pl.ds(begin, count)].transpose((1, 0)),
                )
            return plgpu.wgmma_accumulator_load(acc, wait_n=1)

        return pl.run_scoped(multiply, plgpu.ACC((WGMMA_M, count)))

    _, blocks, key_rows, _ = keys.shape
    _, block, _ = d_scores.shape

    @inline.code(
        *(mosaic.operand(keys), mosaic.operand(d_scores), column_block, begin),
        returns=mma.accumulator_type(count),
    )
    def issued(
        keys: ir.Value, d_scores: ir.Value, column_block: Integer, begin: Integer
    ) -> mgpu.FragmentedArray:
        key_base = _offset(mma.descriptor(keys), column_block, key_rows * mosaic.SWIZZLE)
        d_scores_base = _offset(mma.descriptor(d_scores), begin, mosaic.SWIZZLE)
        with mma.Group(keys, count) as group:
            for c in range(NUM_CONSUMERS):
                for step in range(key_rows // WGMMA_K):
                    key_bytes = c * blocks * key_rows * mosaic.SWIZZLE + step * STEP_BYTES
                    d_scores_bytes = c * block * mosaic.SWIZZLE + step * WGMMA_K * 2
                    a = mma.advance(key_base, key_bytes)
                    b = mma.advance(d_scores_base, d_scores_bytes)
                    group.multiply([a], b, transposes="1, 0")
        return group.result

    return issued


def sum_over_blocks(
    ctx: WarpgroupContext,
    blocks: Any,
    first_step: Any,
    length: Any,
    store: Callable[[jax.Array], None],
    *,
    is_transposed: bool = False,
) -> None:
    """Calls `store` with scale * dS @ rows, [64, H] f32, of the blocks of 64 rows from a step on.

    A slot has stored gradients of scores, of 64 queries by 64 keys for each consumer, then the
    blocks of columns of 64 keys, or of 64 queries if `is_transposed`: then of dS.T. Rows from
    `length` on are zeroed: they are others', or may be NaN. A block is freed when the next one's
    products are issued.
    """
    ring, width, consumer = ctx.shared.blocks, ctx.shape.head_dim, mosaic.warpgroup_index()

    def rows_of(step: Any) -> Any:
        return ring.matrix(step).at[pl.ds(NUM_CONSUMERS, ctx.shape.column_blocks)]

    def receive(block: Any, step: Any) -> None:
        ring.await_ready(step)
        visible = Visible.in_block(length, block, BLOCK_K)

        @pl.when(visible.is_partial)
        def _() -> None:
            if is_transposed:
                visible.zero_rest(ring.matrix(step).at[pl.ds(consumer, 1)])
            pl.when(consumer == 0)(lambda: visible.zero_rest(rows_of(step)))
            plgpu.commit_smem()
            turns.synchronise_consumers()

    def one_block(block: Any, total: Any) -> Any:
        step = first_step + block
        receive(block, step)
        d_scores = ring.matrix(step).at[consumer]
        total = mma.add_tile_product(total, d_scores, rows_of(step), is_transposed=is_transposed)
        mma.wait(1)
        pl.when(block > 0)(lambda: ring.release(step - 1))
        return total

    def finish(total: Any) -> None:
        mma.wait(0)
        pl.when(blocks > 0)(lambda: ring.release(first_step + blocks - 1))
        store(mma.after_wait(total) * jnp.float32(ctx.shape.scale))

    if not ctx.interpret:
        finish(mma.accumulate(0, blocks, one_block, mma.zeros(width, jnp.float32)))
        return

    def with_accumulators(*parts: Any) -> None:
        mma.accumulate(0, blocks, one_block, parts)
        finish(jnp.concatenate([x[...] for x in parts], axis=1)[:, :width])

    accumulators = [plgpu.ACC((WGMMA_M, WGMMA_M))] * ctx.shape.column_blocks
    pl.run_scoped(with_accumulators, *accumulators)


def store_keys(
    ctx: WarpgroupContext,
    sums: Sequence[tuple[Any, jax.Array, Sequence[Any]]],
    part: Any,
    head: Any,
    first: Any,
) -> None:
    """Stores sums [64, H] f32 of keys from `first` on: to f32 by threads, to 16 bits by TMA.

    `sums` are targets, sums, and the two views of the operand tiles in which a sum is staged.
    """
    kv_len, blocks = ctx.shape.kv_len, ctx.shape.column_blocks
    if sums[0][0].dtype == jnp.float32:
        rows = jnp.clip(kv_len - first, 0, WGMMA_M)
        place = (part * kv_len + first, head, jnp.int32(0), rows)
        for target, total, _views in sums:
            stores.store_rows(target, total, *place)
        return
    for target, total, staged in sums:
        columns = operand_tiles.column_blocks(total.astype(target.dtype), blocks)
        # One call for all blocks compiles to other code, without spills too; neither was timed.
        for i, values in enumerate(columns):
            operand_tiles.stage_rows(staged[0].at[pl.ds(i, 1)], values, reads_late=True)
    plgpu.commit_smem()

    @pl.when(first < kv_len)
    def _() -> None:
        for target, _, staged in sums:
            ctx.store(staged[1], target, (part, pl.ds(first, WGMMA_M), head))


def _offset(descriptor: ir.Value, count: Integer, num_bytes: int) -> ir.Value:
    """Makes the descriptor of operand tiles that begin `count * num_bytes` later.

    The product has 32 bits: where descriptors add one of 64 bits, ptxas 12.9 and 13.0 may crash.
    """
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, arith.extui(i64, count * (num_bytes >> 4)))
