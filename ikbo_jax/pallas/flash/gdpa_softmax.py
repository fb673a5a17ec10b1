"""The softmax of the GDPA forward kernel with masks.

A mask may hide the first block from some rows of a tile, so here the maximum runs. Weights of a
block are relative to the maximum before it. Only if a sum of weights reaches `MOST_SUM`, a warp
computes the block's own maximum, and its weights again, from scores that registers keep until then.
"""

import functools
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

#: Sum of 16 weights relative to an earlier maximum from which on a block is weighed again, relative
#: to its own: weights, and in f16 each of them, are far from overflow.
MOST_SUM = 2.0**10
#: Scaled maximum from which on it is subtracted before scores are scaled: the rounded product of
#: maximum and scale errs by 2^-10 there, and from 2^31 on, no weight would be 1.
LARGE_MAXIMUM = 2.0**14


class Statistics(NamedTuple):
    """Sums of weights of 64 rows between blocks, relative to `extreme`."""

    extreme: jax.Array  # [64] f32, unscaled scores
    sums: jax.Array  # [64, 8] f32, whose row sums are the sums of weights


def weigh(
    ctx: Any, place: Any, scores: jax.Array, before: Statistics | None
) -> Callable[[Any], tuple[jax.Array, Any, Statistics]]:
    """Computes weights of raw scores [64, block_kv]; None `before` an item's first block.

    The result takes the accumulator without the block, and returns rounded weights, accumulator and
    statistics.
    Weights are relative to the maximum before the block; no maximum of the block is computed unless
    a sum says that it has grown.
    """
    scale, dtype = ctx.shape.log2_scale, ctx.outputs.out.dtype
    scores = capped(ctx.shape.activation.cap, scores)
    scores = gdpa_masked.keep_visible(ctx, place, scores, softmax.masked_score(scale))

    def exact(extreme: jax.Array) -> tuple[jax.Array, ...]:
        weights = softmax.exact_exponentials(scores, softmax.finite(extreme, scale), scale)
        return mma.round_early(weights, dtype), _partial_sums(weights), extreme

    if before is None:
        weights, sums, extreme = exact(softmax.row_extreme(scores, scale))
        return lambda acc: (mma.rounded(weights), acc, Statistics(extreme, sums))
    maximum = before.extreme * jnp.float32(scale)
    # Without a maximum, or with a large one, every weight but 0 is infinite.
    is_small = jnp.abs(maximum) < jnp.float32(LARGE_MAXIMUM)
    maximum = jnp.where(is_small, maximum, jnp.finfo(jnp.float32).min)
    weights = softmax.exponentials(scores, maximum, scale)
    sums, weights = _partial_sums(weights), mma.round_early(weights, dtype)
    is_far = ~(sums < jnp.float32(MOST_SUM))
    has_grown = per_thread.any_of_warp(is_far, layout=plgpu.Layout.WGMMA)

    def grown() -> tuple[jax.Array, ...]:
        largest = softmax.row_extreme(scores, scale)
        return exact(softmax.further(scale)(before.extreme, largest))

    rounded, sums, extreme = lax.cond(has_grown, grown, lambda: (weights, sums, before.extreme))

    def rescaled(acc: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        base = softmax.finite(extreme, scale)
        shrink = jnp.exp2((before.extreme - base) * jnp.float32(scale))
        by_acc, by_sums = (lax.broadcast_in_dim(shrink, x.shape, (0,)) for x in (acc, sums))
        return acc * by_acc, sums * by_sums

    def finish(acc: Any) -> tuple[jax.Array, Any, Statistics]:
        acc = mma.after_wait(acc)
        acc, earlier = lax.cond(has_grown, rescaled, lambda *x: x, acc, before.sums)
        return mma.rounded(rounded), acc, Statistics(extreme, earlier + sums)

    return finish


def _partial_sums(weights: jax.Array) -> jax.Array:
    """Adds columns one after the other; a tree, as in `softmax.partial_sums`, spills at H = 128."""
    step = softmax.PARTIAL
    parts = (weights[:, i : i + step] for i in range(0, weights.shape[1], step))
    return functools.reduce(jnp.add, parts)


def normalised(
    ctx: Any, acc: jax.Array, found: Statistics, first_row: Any, head: Any, rows: Any
) -> jax.Array:
    """Divides an item's sums by its rows' sums of weights, whose logarithms it stores if wanted."""
    sums = jnp.sum(found.sums, axis=1)
    if ctx.outputs.lse is not None:
        unit = jnp.float32(ctx.shape.log2_scale * softmax.LN_2)
        lse = jnp.where(sums != 0, jnp.log(sums) + found.extreme * unit, -jnp.inf)
        stores.store_rows(ctx.outputs.lse, lse, first_row, head, 0 * rows, rows)
    inverse = softmax.inverse_sums(sums, ctx.shape.activation.output_scale)
    return acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))


def rows_of(value: float) -> jax.Array:
    """Makes [64] f32 with one value for all rows."""
    return plgpu.layout_cast(jnp.full((WGMMA_M,), value, jnp.float32), stores.ROW_LAYOUT)
