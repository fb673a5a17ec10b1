"""The softmax of a warpgroup's 64 rows; scores are [64, keys] f32, unscaled products.

p = exp2(score * log2_scale - maximum), where `maximum` is the maximum scaled score.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from ikbo_jax.pallas.hopper import inline, mma, mosaic
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.stores import ROW_LAYOUT
from ikbo_jax.problems.hopper import WGMMA_M

#: Columns of a partial sum: with 8, a thread adds only values that it holds.
PARTIAL = 8
LN_2 = 0.6931471805599453

#: From these row sums on, a fixed maximum may have cost precision or range.  bf16 has f32's range:
#: its limit keeps sums of weights times values far from overflow.  f16 weights end at 65504.
SUM_LIMITS = {"bfloat16": 2.0**40, "float16": 2.0**15}
#: Row sums below this have lost the weight of the maximum, which should be 1.  `exponentials` takes
#: one instruction that rounds once, so beyond 2^24 that weight is exp2 of the maximum's rounding
#: error.
SUM_MINIMUM = 0.5


def row_extreme(scores: jax.Array, log2_scale: float) -> jax.Array:
    """Finds the unscaled score of each row whose scaled score is largest, [64]."""
    return jnp.max(scores, axis=1) if log2_scale > 0 else jnp.min(scores, axis=1)


def exponentials(scores: jax.Array, maximum: jax.Array, log2_scale: float) -> jax.Array:
    """Computes exp2(score * log2_scale - maximum), [64, keys]."""
    shift = lax.broadcast_in_dim(maximum, scores.shape, (0,))
    return jnp.exp2(scores * jnp.float32(log2_scale) - shift)


def exact_exponentials(scores: jax.Array, extreme: jax.Array, log2_scale: float) -> jax.Array:
    """Computes exp2((score - extreme) * log2_scale), [64, keys]: 1 at an extreme of any size.

    Takes one more instruction per element than `exponentials`.
    """
    shift = lax.broadcast_in_dim(extreme, scores.shape, (0,))
    return jnp.exp2((scores - shift) * jnp.float32(log2_scale))


class Running(NamedTuple):
    """State of a softmax between blocks of keys; exact for every input.

    Attributes:
      extreme: [64] f32, the unscaled score of each row whose scaled score is largest so far.
      sums: [64, 8] f32, whose row sums are sums of weights relative to `extreme`.
      acc: [64, H] f32, sums of weights times values.
    """

    extreme: jax.Array
    sums: jax.Array
    acc: jax.Array


def no_extreme(log2_scale: float) -> jax.Array:
    """Returns the `Running.extreme` of rows without scores, [64]."""
    nothing = jnp.full((WGMMA_M,), masked_score(log2_scale), jnp.float32)
    return plgpu.layout_cast(nothing, ROW_LAYOUT)


def further(log2_scale: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the function that selects the score whose scaled score is larger."""
    return jnp.maximum if log2_scale > 0 else jnp.minimum


def finite(extreme: jax.Array, log2_scale: float) -> jax.Array:
    """Replaces the extreme by 0 in rows that have had no score above -inf: all weights are 0."""
    return jnp.where(extreme == masked_score(log2_scale), 0.0, extreme)


def merging_factors(
    extreme: jax.Array, extreme2: jax.Array, log2_scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes (extreme of both parts of the keys, factor of each part's weights)."""
    larger = further(log2_scale)(extreme, extreme2)
    base, scale = finite(larger, log2_scale), jnp.float32(log2_scale)
    return larger, jnp.exp2((extreme - base) * scale), jnp.exp2((extreme2 - base) * scale)


def running_weights(
    extreme: jax.Array, scores: jax.Array, log2_scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes (the extreme with a block's scores, factor of earlier weights, weights in f32)."""
    larger = further(log2_scale)(extreme, row_extreme(scores, log2_scale))
    base = finite(larger, log2_scale)
    shrink = jnp.exp2((extreme - base) * jnp.float32(log2_scale))
    return larger, shrink, exact_exponentials(scores, base, log2_scale)


def running_start(head_dim: int, log2_scale: float) -> Running:
    """Returns the state before the first block."""
    return Running(
        no_extreme(log2_scale), mma.zeros(PARTIAL, jnp.float32), mma.zeros(head_dim, jnp.float32)
    )


def running_step(state: Running, scores: jax.Array, log2_scale: float) -> tuple[Running, jax.Array]:
    """Returns the state, without the product, and the weights in f32, of one more block."""
    extreme, shrink, p = running_weights(state.extreme, scores, log2_scale)
    scaled = state.sums * lax.broadcast_in_dim(shrink, state.sums.shape, (0,))
    acc = state.acc * lax.broadcast_in_dim(shrink, state.acc.shape, (0,))
    return Running(extreme, scaled + partial_sums(p), acc), p


def inverse_sums(row_sum: jax.Array, output_scale: float) -> jax.Array:
    """Computes output_scale / row_sum, [64]; 0 where the sum is 0, NaN where it is NaN."""
    inverse = jnp.where(row_sum > 0, 1 / row_sum, 0.0)
    # A NaN sum gives a NaN row.
    inverse = jnp.where(row_sum != row_sum, row_sum, inverse)
    return inverse if output_scale == 1 else inverse * jnp.float32(output_scale)


def merged(state: Running, other: Running, *, log2_scale: float) -> Running:
    """Merges the states of two parts of the keys."""

    def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x * lax.broadcast_in_dim(factor, x.shape, (0,))

    extreme, *factors = merging_factors(state.extreme, other.extreme, log2_scale)
    pairs = zip(state[1:], other[1:], strict=True)
    sums, acc = (scaled(x, factors[0]) + scaled(y, factors[1]) for x, y in pairs)
    return Running(extreme, sums, acc)


def partial_sums(p: jax.Array) -> jax.Array:
    """Adds columns of `p`; the result [64, 8] has the same row sums."""
    parts = [lax.slice(p, (0, i), (p.shape[0], i + PARTIAL)) for i in range(0, p.shape[1], PARTIAL)]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def nan_where_not_finite(sums: jax.Array, acc: jax.Array) -> jax.Array:
    """Puts NaN into rows of `sums` [64, 8] where `acc` [64, width] holds NaN or infinity."""
    for i in range(0, acc.shape[1], PARTIAL):
        # 0 times NaN or infinity is NaN; one FFMA per element.
        sums = lax.slice(acc, (0, i), (acc.shape[0], i + PARTIAL)) * jnp.float32(0) + sums
    return sums


def masked_score(log2_scale: float) -> float:
    """Returns the score whose weight is 0."""
    return -math.inf if log2_scale > 0 else math.inf


def flag_rows(
    flags: Any, index: Any, row_sum: jax.Array, begin: Any, end: Any, limit: float
) -> None:
    """Sets flags[index] and flags[0] to 1 if a row in [begin, end) has a sum out of bounds."""
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_M,), 0, layout=ROW_LAYOUT)
    is_good = (row_sum < jnp.float32(limit)) & (row_sum >= jnp.float32(SUM_MINIMUM))
    is_good = is_good | (row < begin) | (row >= end)
    if mosaic.is_interpreted():

        @pl.when(~jnp.all(is_good))
        def _() -> None:
            flags[index] = 1
            flags[0] = 1

        return

    @inline.code(flags, index, is_good.astype(jnp.int32))
    def _(flags: ir.Value, index: Integer, is_good: mgpu.FragmentedArray) -> None:
        i32 = ir.IntegerType.get_signless(32)
        first, second = (Integer(vector.extract(r, [], [0])) for r in is_good.registers.flat)
        bad = (first & second).equals(0)
        base = mgpu.utils.memref_ptr(flags)
        for at in (index, inline.i32(0)):
            address = mgpu.utils.getelementptr(base, [at], i32)
            inline.issue("st.shared.b32 [$0], $1;", address, inline.i32(1), predicate=bad)
