"""Soft caps in the kernels: tanh of scores, element by element on f32 [64, columns].

With a `logit_cap`, an activation or a softmax is of logit_cap * tanh(scale * s / logit_cap). A
kernel computes tanh from raw scores s, and goes on with tanh as raw scores and `logit_cap` as their
scale. So caps cost an activation's or a softmax's code nothing else; a raw score of 0 stays 0.

    tanh(x) = 1 - 2 / (exp2(y) + 1),  y = 2 * log2(e) * x

has an absolute error of about 2⁻²²; near 0, a polynomial of degree 3 takes its place. The relative
error is below 2⁻¹⁸, so a score's rounding to bf16 or f16 hides it. Two neighbouring columns share a
reciprocal (`values.reciprocal`): 12 instructions a score, of which the special function unit
executes 1.5. With tanh.approx.f32, whose relative error is 2⁻¹¹, it takes 2 instructions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.activations import values

#: Up to this |x|, tanh(x) = x * (c + d * x²), whose coefficients minimise the relative error: 2⁻¹⁹.
NEAR, NEAR_COEFFICIENTS = 0.1, (0.99999834, -0.33200482)
#: exp2(y) is lowered to exp2 of this number, where tanh is 1; see `values.reciprocal`.
MAX_EXPONENT = 62.0
#: Factors of scores are cut to this number: larger ones make tanh 1 or -1, unless a score is 0.
MAX_FACTOR = 1e37


class Cap(NamedTuple):
    """A cap: tanh(factor * s) of raw scores s, by tanh.approx.f32 if `is_approx`."""

    factor: float
    is_approx: bool = False


def scale_and_cap(
    scale: float, logit_cap: float | None, *, is_approx: bool = False
) -> tuple[float, Cap | None]:
    """Returns the scale of capped scores, and the cap; `scale` and None without a `logit_cap`."""
    if logit_cap is None:
        return scale, None
    factor = scale / logit_cap
    return logit_cap, Cap(max(-MAX_FACTOR, min(factor, MAX_FACTOR)), is_approx)


def capped(cap: Cap | None, scores: jax.Array, *, interpret: bool) -> jax.Array:
    """Computes tanh(factor * scores), [64, columns] f32; returns `scores` without a cap."""
    if cap is None:
        return scores

    def evaluate(_: str, scores: jax.Array) -> jax.Array:
        if cap.is_approx:
            return jnp.tanh(scores * jnp.float32(cap.factor))
        unit = math.log(2) / 2  # x / y
        y = scores * jnp.float32(cap.factor / unit)
        powers = jnp.exp2(jnp.minimum(y, jnp.float32(MAX_EXPONENT)))
        inverse = values.reciprocal(powers + jnp.float32(1), interpret=interpret)
        linear, cubic = (c * unit**k for c, k in zip(NEAR_COEFFICIENTS, (1, 3), strict=True))
        near = y * (y * y * jnp.float32(cubic) + jnp.float32(linear))
        far = jnp.float32(1) - inverse * jnp.float32(2)
        return jnp.where(jnp.abs(y) < NEAR / unit, near, far)

    found: jax.Array = values.by_chunks(("",), None, scores, evaluate, interpret)
    return found


def through_cap(
    cap: Cap | None, capped: jax.Array, slope: jax.Array, zero: float = 0.0
) -> jax.Array:
    """Multiplies slopes by the slope of the cap, 1 - tanh², from `capped` scores.

    `zero`: the slope that means 0; differences from it are multiplied.
    """
    if cap is None:
        return slope
    square = capped * capped
    return slope - (slope * square if zero == 0 else slope * square - square * jnp.float32(zero))
