"""Gradient of a weight of linear compression, as a warp-specialised Mosaic GPU kernel for Hopper.

    d_weight = sum over b of d_out[b] @ embedding[b].T

The contraction runs over the batch and over the embedding's columns, so both operands lie K-major
in memory, and no operand is transposed. The kernel computes the transposed gradient [K, M]: so the
compressed rows M are the n of a WGMMA, a multiple of 8.

A weight has few tiles and a long contraction, so the batch is split: a work item is a tile of 128
rows of K and `block_m` compressed rows, summed over a part of the batch. Each CTA computes one work
item and stores its sums in f32; XLA adds the parts in a fixed order. Work items of one part have
neighbouring numbers, so they run at the same time and find each other's operands in L2.

An entry without candidates has a cotangent of zeros, and would turn a NaN of its embedding into a
gradient. `sources` points such entries past the last embedding, where TMA reads zeros. Its numbers
are read one entry ahead, since their latency would otherwise delay every load.

Warpgroups: 0 and 1 are the consumers; each multiplies 64 rows of K. One warp of warpgroup 2 is the
producer.

Synchronisations:
  1. `stages.ready[s]`  producer -> consumers: TMA has filled stage s.
  2. `stages.free[s]`   consumers -> producer: the WGMMAs of both warpgroups have read stage s, or
                        stage s is unused so far.

A CTA waits for no other CTA.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig


class _Shape(NamedTuple):
    problems: int
    batch: int  # of one problem
    k: int
    m: int
    n: int
    splits: int  # of one problem
    k_tiles: int
    m_tiles: int

    @property
    def workers(self) -> int:
        return self.m_tiles * self.k_tiles * self.splits * self.problems

    @property
    def n_steps(self) -> int:
        """k steps of one entry of the batch."""
        return pl.cdiv(self.n, BLOCK_K)


class _Item(NamedTuple):
    m_tile: Any
    k_tile: Any
    part: Any  # number of the part of all problems' batches
    first: Any  # entry of the batch
    steps: Any


class _Operands(NamedTuple):
    d_out: Any  # [B, M, N]
    embedding: Any  # [B, K, N]
    sources: Any  # [B] int32, positions in `embedding`; None if they are 0, 1, 2, …


def _item(ctx: WarpgroupContext) -> _Item:
    """This CTA's work item: tiles along M vary fastest, parts of the batch slowest."""
    shape = ctx.shape
    rest, m_tile = lax.div(ctx.worker, shape.m_tiles), lax.rem(ctx.worker, shape.m_tiles)
    part, k_tile = lax.div(rest, shape.k_tiles), lax.rem(rest, shape.k_tiles)
    problem, split = lax.div(part, shape.splits), lax.rem(part, shape.splits)
    # The first `extra` parts of a problem have one entry more.
    each, extra = divmod(shape.batch, shape.splits)
    first = problem * shape.batch + split * each + jnp.minimum(split, extra)
    count = each + (split < extra).astype(jnp.int32)
    return _Item(m_tile, k_tile, part, first, count * shape.n_steps)


def _produce(ctx: WarpgroupContext) -> None:
    shape, shared, item, sources = ctx.shape, ctx.shared, _item(ctx), ctx.operands.sources
    (_, embedding), (_, cotangent) = shared.embedding, shared.cotangent

    def load(step: Any, entry: Any, source: Any) -> None:
        stage = shared.stages.slot(step)
        shared.stages.await_free(step)
        ready = shared.stages.ready.at[stage]
        columns = pl.ds(lax.rem(step, shape.n_steps) * BLOCK_K, BLOCK_K)
        for consumer in range(NUM_CONSUMERS):
            rows = pl.ds(item.k_tile * TILE_ROWS + consumer * WGMMA_M, WGMMA_M)
            plgpu.copy_gmem_to_smem(
                ctx.operands.embedding.at[source, rows, columns],
                embedding.at[stage, consumer],
                ready,
            )
        rows = pl.ds(item.m_tile * ctx.config.block_m, ctx.config.block_m)
        plgpu.copy_gmem_to_smem(
            ctx.operands.d_out.at[entry, rows, columns], cotangent.at[stage], ready
        )

    def load_itself(step: Any, _: Any) -> None:
        entry = item.first + lax.div(step, shape.n_steps)
        load(step, entry, entry)

    def load_from_source(i: Any, source: Any) -> Any:
        entry, last = item.first + i, shape.problems * shape.batch - 1
        following = sources[jnp.minimum(entry + 1, last)]
        begin = i * shape.n_steps
        lax.fori_loop(begin, begin + shape.n_steps, lambda step, _: load(step, entry, source), None)
        return following

    if sources is None:
        lax.fori_loop(0, item.steps, load_itself, None)
    else:
        entries = lax.div(item.steps, shape.n_steps)
        lax.fori_loop(0, entries, load_from_source, sources[item.first])
    shared.stages.drain()


def _consume(ctx: WarpgroupContext) -> None:
    shared, item = ctx.shared, _item(ctx)
    (embedding, _), (cotangent, _) = shared.embedding, shared.cotangent
    block_m = ctx.config.block_m
    shared.stages.release_all()

    def k_step(step: Any, acc: Any, *, is_first: bool = False) -> Any:
        stage = shared.stages.slot(step)
        shared.stages.await_ready(step)
        acc = mma.wgmma(
            acc,
            embedding.at[stage, ctx.consumer],
            cotangent.at[stage],
            overwrite=is_first,
            a_is_transposed=False,
        )
        # Waits for the WGMMAs of the previous k step, and frees their stage.
        plgpu.wgmma_wait(1)
        if not is_first:
            shared.stages.release(step - 1)
        return acc

    def all_k_steps(acc: Any) -> jax.Array:
        acc = k_step(jnp.int32(0), acc, is_first=True)
        acc = mma.accumulate(1, item.steps, k_step, acc)
        plgpu.wgmma_wait(0)
        shared.stages.release(item.steps - 1)
        return mma.after_wait(acc)

    acc = mma.with_accumulator(all_k_steps, block_m)
    stores.store_transposed(
        ctx.outputs[0].at[item.part],
        acc,
        item.m_tile * block_m,
        item.k_tile * TILE_ROWS + ctx.consumer * WGMMA_M,
    )


def d_weight_kernel(
    d_out: jax.Array,
    embedding: jax.Array,
    *,
    config: WeightGradientConfig,
    num_sms: int,
    problems: int = 1,
    sources: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """Computes a level's weight gradients [problems, M, K], one of each problem, summed in f32.

    Args:
      d_out: [problems * B, M, N], bf16 or f16, cotangent of the level's result; B at least 1.
      embedding: [problems * B, K, N] in the same dtype; N a multiple of 8.
      sources: [problems * B] int32, where each entry's embedding is; past the last one it is zeros.
        None if every entry has its own.
      dtype: of the gradients, which are rounded once; None means the operands'.
    """
    m, n = d_out.shape[1:]
    batch, k = d_out.shape[0] // problems, embedding.shape[1]
    m_tiles = pl.cdiv(m, config.block_m)
    splits = config.splits(batch, k, m, n, problems=problems, num_sms=num_sms)
    shape = _Shape(problems, batch, k, m, n, splits, pl.cdiv(k, TILE_ROWS), m_tiles)
    # The sums of whole tiles, so that no store is conditional, and M by K, so that XLA adds and
    # rounds the parts in one kernel.
    parts_shape = (problems * splits, m_tiles * config.block_m, shape.k_tiles * TILE_ROWS)
    (parts,) = launch(
        Roles(functools.partial(WarpgroupContext, shape, config), _produce, _consume),
        _Operands(d_out, embedding, sources),
        (jax.ShapeDtypeStruct(parts_shape, jnp.float32),),
        config.shared,
        dtype=d_out.dtype,
        name="ikbo_linear_compression_d_weight",
        workers=shape.workers,
    )
    parts = parts.reshape(problems, splits, *parts.shape[1:])[..., :m, :k]
    return jnp.sum(parts, axis=1).astype(dtype or d_out.dtype)
