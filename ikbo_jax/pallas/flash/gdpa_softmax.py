"""The softmax of the GDPA forward kernel with masks.

A mask may hide the first block from some rows of a tile, so here the maximum runs. Sums stay
relative to an earlier maximum until a row's maximum has grown by more than `MOST_GROWTH`, since a
rescaled accumulator must be complete.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.cap import capped
from ikbo_jax.pallas.flash import gdpa_masked, softmax
from ikbo_jax.pallas.hopper import mma, per_thread, stores
from ikbo_jax.problems.hopper import WGMMA_M

#: Growth of a row's maximum, as a power of 2, from which on sums are rescaled. Weights are at most
#: 2^8, so that sums of 2^16 of them, and in f16 each of them, are far from overflow.
MOST_GROWTH = 8.0
#: Scaled maximum from which on it is subtracted before scores are scaled: the rounded product of
#: maximum and scale errs by 2^-10 there, and from 2^31 on, no weight would be 1.
LARGE_MAXIMUM = 2.0**14


class Statistics(NamedTuple):
    """Sums of weights of 64 rows between blocks, relative to `extreme`, unscaled scores; [64] f32
    both.
    """

    extreme: jax.Array
    sums: jax.Array


#: Takes the accumulator without the block; returns rounded weights, accumulator and statistics.
Finish = Callable[[Any], tuple[jax.Array, Any, Statistics]]


def weigh(ctx: Any, index: Any, block: Any, scores: jax.Array, before: Statistics | None) -> Finish:
    """Computes weights of raw scores [64, block_kv]; None `before` an item's first block."""
    scale, dtype = ctx.shape.log2_scale, ctx.outputs.out.dtype
    scores = capped(ctx.shape.activation.cap, scores)
    scores = gdpa_masked.keep_visible(ctx, index, block, scores, softmax.masked_score(scale))
    largest = softmax.row_extreme(scores, scale)
    if before is None:
        weights = softmax.exact_exponentials(scores, softmax.finite(largest, scale), scale)
        found = Statistics(largest, jnp.sum(weights, axis=1))
        return lambda acc: (weights.astype(dtype), acc, found)
    largest = softmax.further(scale)(before.extreme, largest)
    base = softmax.finite(before.extreme, scale)
    maximum, growth = (x * jnp.float32(scale) for x in (base, largest - before.extreme))
    is_far = (growth > jnp.float32(MOST_GROWTH)) | (jnp.abs(maximum) >= jnp.float32(LARGE_MAXIMUM))
    has_grown = per_thread.any_of_warp(is_far, layout=stores.ROW_LAYOUT)

    def grown() -> Any:
        base = softmax.finite(largest, scale)
        rest = scores - lax.broadcast_in_dim(base, scores.shape, (0,))
        return rest, rows_of(0.0), base, largest

    scores, maximum, base, extreme = lax.cond(
        has_grown, grown, lambda: (scores, maximum, base, before.extreme)
    )
    weights = softmax.exponentials(scores, maximum, scale)
    # With shuffles, which stay here: ptxas would move the sums of a thread's own weights past the
    # wait for the product that they should overlap with.
    sums = jnp.sum(weights, axis=1)

    def rescaled(acc: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        shrink = jnp.exp2((before.extreme - base) * jnp.float32(scale))
        return acc * lax.broadcast_in_dim(shrink, acc.shape, (0,)), sums * shrink

    def finish(acc: Any) -> tuple[jax.Array, Any, Statistics]:
        acc = mma.after_wait(acc)
        acc, earlier = lax.cond(has_grown, rescaled, lambda *x: x, acc, before.sums)
        return weights.astype(dtype), acc, Statistics(extreme, earlier + sums)

    return finish


def normalised(
    ctx: Any, acc: jax.Array, found: Statistics, first_row: Any, head: Any, rows: Any
) -> jax.Array:
    """Divides an item's sums by its rows' sums of weights, whose logarithms it stores if wanted."""
    if ctx.outputs.lse is not None:
        unit = jnp.float32(ctx.shape.log2_scale * softmax.LN_2)
        lse = jnp.where(found.sums != 0, jnp.log(found.sums) + found.extreme * unit, -jnp.inf)
        store_lse(ctx, lse, first_row, head, rows)
    inverse = softmax.inverse_sums(found.sums, ctx.shape.activation.output_scale)
    return acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))


def store_lse(ctx: Any, lse: jax.Array, first_row: Any, head: Any, rows: Any) -> None:
    """Stores lse [64] of the first `rows` of a consumer's rows."""
    stores.store_rows(*(ctx.outputs.lse, lse, first_row, head, 0 * rows, rows))


def rows_of(value: float) -> jax.Array:
    """Makes [64] f32 with one value for all rows."""
    return plgpu.layout_cast(jnp.full((WGMMA_M,), value, jnp.float32), stores.ROW_LAYOUT)
