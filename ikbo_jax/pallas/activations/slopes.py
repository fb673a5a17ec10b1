"""Elementwise work of the GDPA backward kernels: weights, slopes, and gradients of scores.

Unless it takes few instructions, this work takes more time than the products. Therefore, as in
`gdpa_weights`, the functions take raw scores s and omit constants,

    act(scale * s)  = weight constant * weight(s)
    act'(scale * s) = slope constant * (slope(s) + offset),        offset = 0 or 1,

which multiply the sums of a tile instead. The offset costs nothing: the gradient of a score is the
gradient of its weight times (slope + offset), one fused multiply-add. Instructions per score in
bf16, including rounding and that multiply-add, for d_query (slopes only) and for d_key and d_value
(with weights):

    activation    approx     slopes   with weights
    relu          -          2.5      4
    leaky_relu    -          3.5      6
    relu_squared  -          2.5      4
    silu          "tanh"     5.5      7
    gelu_tanh     "tanh"     10.5     12

With scale * s as its argument, gelu_tanh took 18.5 and 20. The table applies if all heads have one
activation. Activations that it lacks, and heads with different activations, take scale * s. There,
and in f16, whose range ends at 65504, weights and slopes include their constants.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import values as activations
from ikbo_jax.pallas.activations.cap import capped, through_cap
from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.reference.activations import (
    LEAKY_SLOPE,
    POLYNOMIAL,
    POLYNOMIAL_DOMAIN,
    SOFTMAX,
    TANH_CUBIC,
    TANH_SCALE,
)

Pair = tuple[jax.Array, jax.Array]


def weights_and_slopes(spec: ActivationSpec, head: Any, scores: jax.Array) -> Pair:
    """Computes (weights, slopes for `d_scores`) of one query head's raw scores."""
    scores = capped(spec.cap, scores)
    weights, slope = _of_capped(spec, head, scores)
    return weights, through_cap(spec.cap, scores, slope, zero_slope(spec))


def _of_capped(spec: ActivationSpec, head: Any, scores: jax.Array) -> Pair:
    is_raw = _takes_raw_scores(spec)
    of_scores = spec if is_raw else spec._replace(scale=1.0)
    if spec.scale != of_scores.scale:
        scores = scores * jnp.float32(spec.scale)

    def evaluate(name: str, s: jax.Array) -> Pair:
        full_name = spec.full_name(name)
        if full_name in _OF_SCALED:
            return _OF_SCALED[full_name](s)
        weights, slope = _OF_RAW[full_name](s, of_scores.scale)
        if is_raw and spec.has_f32_range:
            return weights, slope
        by_slope = _slope_constant(of_scores, name)
        offset = by_slope if _has_offset(full_name) else 0.0
        return _linear(weights, of_scores.constant(name)), _linear(slope, by_slope, offset)

    return activations.by_chunks(spec.names, head, scores, evaluate)


def _linear(x: jax.Array, factor: float, offset: float = 0.0) -> jax.Array:
    x = x if factor == 1 else x * jnp.float32(factor)
    return x + jnp.float32(offset) if offset else x


def d_scores(spec: ActivationSpec, d_weights: jax.Array, slope: jax.Array) -> jax.Array:
    """Computes gradients of scores from those of weights, without the second of `constants`."""
    return d_weights * slope + d_weights if _omits_offset(spec) else d_weights * slope


def zero_slope(spec: ActivationSpec) -> float:
    """Returns the slope with which `d_scores` are 0."""
    return -1.0 if _omits_offset(spec) else 0.0


def constants(spec: ActivationSpec) -> tuple[float, float]:
    """Returns the constants of sums of weights and of `d_scores`, which a softmax lacks."""
    if SOFTMAX in spec.names or not spec.has_f32_range or not _takes_raw_scores(spec):
        return 1.0, 1.0
    return spec.constant(spec.names[0]), _slope_constant(spec, spec.names[0])


def _takes_raw_scores(spec: ActivationSpec) -> bool:
    """Whether all heads have one activation, of those that take raw scores."""
    is_one = len(set(spec.names)) == 1 and spec.full_name(spec.names[0]) in _OF_RAW
    return is_one and spec.takes_raw_scores


def _omits_offset(spec: ActivationSpec) -> bool:
    is_raw = spec.has_f32_range and _takes_raw_scores(spec)
    return is_raw and _has_offset(spec.full_name(spec.names[0]))


def _has_offset(full_name: str) -> bool:
    return full_name in ("tanh silu", "tanh gelu_tanh")


def _slope_constant(spec: ActivationSpec, name: str) -> float:
    if _has_offset(spec.full_name(name)):
        return 0.5
    return 2 * spec.scale if name == "relu_squared" else 1.0


def _relu(s: jax.Array, scale: float) -> Pair:
    return jnp.maximum(s, jnp.float32(0)), _choose(s > 0, s, 1.0, 0.0)


def _leaky_relu(s: jax.Array, scale: float) -> Pair:
    return jnp.maximum(s, s * jnp.float32(LEAKY_SLOPE)), _choose(s >= 0, s, 1.0, LEAKY_SLOPE)


def _choose(condition: jax.Array, like: jax.Array, a: float, b: float) -> jax.Array:
    return jnp.where(condition, jnp.full_like(like, a), jnp.full_like(like, b))


def _relu_squared(s: jax.Array, scale: float) -> Pair:
    positive = jnp.maximum(s, jnp.float32(0))
    return positive * positive, positive


def _tanh_silu(s: jax.Array, scale: float) -> Pair:
    half = s * jnp.float32(scale / 2)
    inner = jnp.tanh(half)  # tanh.approx.f32: see `mosaic.compiler_params`
    rest = jnp.float32(1) - inner * inner
    return s * inner + s, rest * half + inner


def _tanh_gelu_tanh(s: jax.Array, scale: float) -> Pair:
    """With u the argument of tanh: d(s * (1 + tanh u)) = 1 + tanh u + (1 - tanh² u) * s * du/ds."""
    # Beyond this square tanh is 1 or -1 anyway, and a larger square could become infinite.
    high = (activations.MAX_GELU_TANH / scale) ** 2
    square = jnp.minimum(s * s, jnp.float32(high))
    linear, cubic = TANH_SCALE * scale, TANH_SCALE * TANH_CUBIC * scale**3
    inner = jnp.tanh(s * (square * jnp.float32(cubic) + jnp.float32(linear)))
    growth = s * (square * jnp.float32(3 * cubic) + jnp.float32(linear))
    rest = jnp.float32(1) - inner * inner
    return s * inner + s, rest * growth + inner


def _identity(x: jax.Array) -> Pair:
    slope = jnp.full_like(x, 1.0)
    if not mosaic.is_interpreted():
        # A constant has no layout, unlike other slopes.
        slope = plgpu.layout_cast(slope, plgpu.Layout.WGMMA)
    return x, slope


def _limit(x: jax.Array, low: float, high: float) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, jnp.float32(low)), jnp.float32(high))


def _hardswish(x: jax.Array) -> Pair:
    value = x * _limit(x * jnp.float32(1 / 6) + jnp.float32(0.5), 0.0, 1.0)
    middle = x * jnp.float32(1 / 3) + jnp.float32(0.5)
    slope = jnp.where(x >= 3.0, jnp.full_like(x, 1.0), middle)
    return value, jnp.where(x <= -3.0, jnp.full_like(x, 0.0), slope)


def _gelu(x: jax.Array) -> Pair:
    """x · Φ(x) = max(x, 0) − |x| · Φ(−|x|), which keeps the small results at negative scores."""
    distance = jnp.minimum(jnp.abs(x), jnp.float32(activations.PHI_DOMAIN))
    tail = jnp.exp2(activations.horner(activations.LOG2_PHI, distance))
    value = jnp.maximum(x, jnp.float32(0)) - distance * tail
    phi = jnp.where(x > 0, jnp.float32(1) - tail, tail)
    density = jnp.exp2(distance * distance * jnp.float32(-0.5 * activations.LOG2_E))
    inside = _limit(x, -activations.PHI_DOMAIN, activations.PHI_DOMAIN)
    return value, phi + inside * density * jnp.float32(1 / math.sqrt(2 * math.pi))


def _polynomial_gelu(x: jax.Array) -> Pair:
    inside = _limit(x, -POLYNOMIAL_DOMAIN, POLYNOMIAL_DOMAIN)
    square = inside * inside
    phi = _limit(inside * activations.horner(POLYNOMIAL, square) + jnp.float32(0.5), 0.0, 1.0)
    coefficients = tuple((2 * k + 1) * c for k, c in enumerate(POLYNOMIAL))
    density = activations.horner(coefficients, square)
    is_inside = jnp.abs(x) < POLYNOMIAL_DOMAIN
    return x * phi, phi + inside * jnp.where(is_inside, density, jnp.full_like(x, 0.0))


def _silu(x: jax.Array) -> Pair:
    bounded = jnp.maximum(x, jnp.float32(activations.MIN_SILU))
    exponential = jnp.exp2(bounded * jnp.float32(-activations.LOG2_E))
    gate = activations.reciprocal(exponential + jnp.float32(1))
    value = bounded * gate
    return value, gate + value * (exponential * gate)


def _gelu_tanh(x: jax.Array) -> Pair:
    """x · sigmoid(2y), where (1 + tanh(y)) / 2 = sigmoid(2y)."""
    bounded = jnp.maximum(x, jnp.float32(activations.MIN_GELU_TANH))
    factor = -2 * activations.LOG2_E * TANH_SCALE
    square = bounded * bounded
    exponent = bounded * (square * jnp.float32(factor * TANH_CUBIC) + jnp.float32(factor))
    exponential = jnp.exp2(exponent)
    gate = activations.reciprocal(exponential + jnp.float32(1))
    inside = jnp.minimum(bounded, jnp.float32(activations.MAX_GELU_TANH))
    growth = inside * inside * jnp.float32(6 * TANH_SCALE * TANH_CUBIC)
    growth = inside * (growth + jnp.float32(2 * TANH_SCALE))
    return bounded * gate, gate + gate * (exponential * gate) * growth


#: Functions of raw scores and of their scale.
_OF_RAW = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "relu_squared": _relu_squared,
    "tanh silu": _tanh_silu,
    "tanh gelu_tanh": _tanh_gelu_tanh,
}
#: Functions of scaled scores.
_OF_SCALED = {
    "identity": _identity,
    "hardswish": _hardswish,
    "gelu": _gelu,
    "polynomial gelu": _polynomial_gelu,
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
}
