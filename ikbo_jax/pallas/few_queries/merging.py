"""The CTAs of a cluster add the parts of an item's keys through distributed shared memory.

All CTAs of a cluster take the same items, and each of them a part of the keys. At an item's end,
consumer 0 of each holds the sums of its part. It writes them to its own shared memory, waits for
the others', reads some columns of all parts, adds them up and stores them: each CTA stores as many
columns, and none waits for a launch of XLA's, which takes 2 to 4 us.

Synchronisations, of the CTAs' consumers 0:
  1. `merge_ready`, all -> all: the parts are in `merged`.
  2. `merge_free`, all -> all: the parts were read. A CTA waits for it before it writes the next
     item's part, and before it exits.

A CTA waits only for CTAs of its cluster, which run at the same time, and which take the same items.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import exchange, store
from ikbo_jax.pallas.few_queries.context import Context, Part


def begin(ctx: Context) -> None:
    """Before the first item: `merged` is free."""
    plgpu.barrier_arrive(ctx.shared.merge_free.at[0])


def end(ctx: Context) -> None:
    """After the last item: no other CTA reads `merged`."""
    plgpu.barrier_wait(ctx.shared.merge_free.at[0])


def merge(
    ctx: Context, part: Part, head: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> None:
    """Adds the parts of all CTAs of the cluster, and stores some columns; see `store.store`."""
    shared, shape = ctx.shared, ctx.shape
    rank = ctx.rank
    plgpu.barrier_wait(shared.merge_free.at[0])
    if ctx.interpret:
        _give_in_device_memory(ctx, rank, acc, maximum, sums)
    else:
        exchange.write(shared.merged, acc, maximum, sums)
        _fence(ctx)
        plgpu.commit_smem()
    plgpu.barrier_arrive(shared.merge_ready.at[0])
    plgpu.barrier_wait(shared.merge_ready.at[0])
    _fence(ctx)

    statistics = [exchange.statistics_of(ctx, i) for i in range(shape.cluster)]
    further = jnp.maximum if shape.log2_scale > 0 else jnp.minimum
    largest = functools.reduce(further, [x for x, _ in statistics])
    nothing = -float("inf") if shape.log2_scale > 0 else float("inf")
    finite = jnp.where(largest == nothing, 0.0, largest)
    factors = [jnp.exp2((x - finite) * jnp.float32(shape.log2_scale)) for x, _ in statistics]
    parts = [factor * x for factor, (_, x) in zip(factors, statistics, strict=True)]
    total = functools.reduce(jnp.add, parts)
    columns = jnp.minimum(rank * shape.share, shape.head_dim - shape.share)
    result = _weighted(ctx, 0, columns, factors[0])
    for i, factor in enumerate(factors[1:], start=1):
        result = result + _weighted(ctx, i, columns, factor)
    store.store_merged(ctx, part, head, result, finite, total, columns)
    if not ctx.interpret:  # all threads have read
        plgpu.commit_smem()
    plgpu.barrier_arrive(shared.merge_free.at[0])


def _weighted(ctx: Context, rank: int, columns: Any, factor: jax.Array) -> jax.Array:
    of_cta = exchange.columns_of(ctx, rank, columns)
    return of_cta * lax.broadcast_in_dim(factor, of_cta.shape, (0,))


def _give_in_device_memory(
    ctx: Context, rank: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> None:
    """What `exchange.give` does, where CTAs cannot read each other's shared memory."""
    parts, width = ctx.outputs.parts, ctx.shape.head_dim
    parts[ctx.worker, rank, :, pl.ds(0, width)] = acc
    parts[ctx.worker, rank, :, width] = maximum
    parts[ctx.worker, rank, :, width + 1] = sums


def _fence(ctx: Context) -> None:
    """Orders shared memory's accesses before it and after it, for all CTAs of the cluster."""
    if ctx.interpret:
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()
