"""Soft caps in the kernels: tanh of scores, element by element on f32 [64, columns].

With a `logit_cap`, an activation or a softmax is of logit_cap * tanh(scale * s / logit_cap). A
kernel computes tanh from raw scores s, and goes on with tanh as raw scores and `logit_cap` as their
scale. So caps cost an activation's or a softmax's code nothing else; a raw score of 0 stays 0.

    tanh(x) = 1 - 2 / (exp2(y) + 1),  y = 2 * log2(e) * x

has an absolute error of about 2⁻²². A softmax needs no more, unless the cap is large, since only
differences of its scores count. Activations need small scores exactly, too: near 0, a polynomial of
degree 3 takes the place of this formula, and the relative error is below 2⁻¹⁸. Two neighbouring
columns share a reciprocal (`values.reciprocal`). tanh.approx.f32, whose relative error is 2⁻¹¹, is
for activations whose tanh the caller lets be approximate. Instructions a score, those of them that
the special function unit executes, and time of a softmax's forward pass (32 sequences of 1,024, 20
query and 4 key heads of 128, on an H100; without a cap 0.50 ms; one instruction less):

    SMALL_EXACT      13      1.5      0.90 ms
    EXACT             8      1.5      0.74 ms
    APPROXIMATE       2      1        0.62 ms
"""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.activations import values

#: Up to this |x|, tanh(x) = x * (c + d * x²), whose coefficients minimise the relative error: 2⁻¹⁹.
NEAR, NEAR_COEFFICIENTS = 0.1, (0.99999834, -0.33200482)
#: exp2(y) is lowered to exp2 of this number, where tanh is 1; see `values.reciprocal`.
MAX_EXPONENT = 62.0
#: Factors of scores are cut to this number, so that factors times scores are finite. Tanh of larger
#: ones is 1 or -1, unless a score is below 1e-17.
MAX_FACTOR = 1e18
#: Largest cap of a softmax for which the absolute error of tanh suffices: weights err by 2⁻¹³, less
#: than by their rounding to f16.
MAX_EXACT_CAP = 256.0


class Method(enum.Enum):
    """How tanh is computed: with a small absolute error, a small relative one, or tanh.approx."""

    EXACT = enum.auto()
    SMALL_EXACT = enum.auto()
    APPROXIMATE = enum.auto()


class Cap(NamedTuple):
    """A cap: tanh(factor * s) of raw scores s."""

    factor: float
    method: Method


def scale_and_cap(
    scale: float, logit_cap: float | None, method: Method | None = None
) -> tuple[float, Cap | None]:
    """Returns scale and cap of capped scores; None is a softmax's `method`, or no cap at all."""
    if logit_cap is None:
        return scale, None
    if method is None:
        method = Method.EXACT if logit_cap <= MAX_EXACT_CAP else Method.SMALL_EXACT
    factor = max(-MAX_FACTOR, min(scale / logit_cap, MAX_FACTOR))
    return logit_cap, Cap(factor, method)


def capped(cap: Cap | None, scores: jax.Array) -> jax.Array:
    """Computes tanh(factor * scores), [64, columns] f32; returns `scores` without a cap.

    What is not finite becomes NaN, or with tanh.approx stays so, and does not reach neighbours.
    """
    if cap is None:
        return scores

    def evaluate(_: str, scores: jax.Array) -> jax.Array:
        if cap.method is Method.APPROXIMATE:
            return jnp.tanh(scores * jnp.float32(cap.factor))
        unit = math.log(2) / 2  # x / y
        y = scores * jnp.float32(cap.factor / unit)
        # NaN becomes a number, since neighbours share a reciprocal, and is NaN again thereafter.
        exponent = jnp.where(y < MAX_EXPONENT, y, jnp.full_like(y, MAX_EXPONENT))
        powers = jnp.exp2(exponent) + jnp.float32(1)
        inverse = values.reciprocal(powers)
        far = y * jnp.float32(0) + (jnp.float32(1) - inverse * jnp.float32(2))
        if cap.method is Method.EXACT:
            return far
        linear, cubic = (c * unit**k for c, k in zip(NEAR_COEFFICIENTS, (1, 3), strict=True))
        near = y * (y * y * jnp.float32(cubic) + jnp.float32(linear))
        return jnp.where(jnp.abs(y) < NEAR / unit, near, far)

    return values.by_chunks(("",), None, scores, evaluate)


def through_cap(
    cap: Cap | None, capped: jax.Array, slope: jax.Array, zero: float = 0.0
) -> jax.Array:
    """Multiplies slopes, of which `zero` means 0, by 1 - tanh², the slope of the cap."""
    if cap is None:
        return slope
    square = capped * capped
    return slope - (slope * square if zero == 0 else slope * square - square * jnp.float32(zero))
