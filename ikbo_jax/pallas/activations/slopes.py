"""Elementwise work of the GDPA backward kernels: weights, slopes, and gradients of scores.

Unless it takes few instructions, this work takes more time than the products. Therefore, as in
`activations.weights`, the functions take raw scores s and omit constants,

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
activation. Activations that it lacks, and heads with different activations, are computed from
scale * s by `activations`. In f16, whose range ends at 65504, weights and slopes include their
constants.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.activations import values as activations
from ikbo_jax.pallas.activations.cap import capped, through_cap
from ikbo_jax.pallas.activations.values import Pair
from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.reference.activations import SOFTMAX, TANH_CUBIC, TANH_SCALE


def weights_and_slopes(spec: ActivationSpec, head: Any, scores: jax.Array) -> Pair:
    """Computes (weights, slopes for `d_scores`) of one query head's raw scores."""
    scores = capped(spec.cap, scores)
    weights, slope = _of_capped(spec, head, scores)
    return weights, through_cap(spec.cap, scores, slope, zero_slope(spec))


def _of_capped(spec: ActivationSpec, head: Any, scores: jax.Array) -> Pair:
    raw = _raw(spec)
    if raw is None:
        scaled = scores if spec.scale == 1 else scores * jnp.float32(spec.scale)
        return activations.activate_with_slope(spec.names, spec.approx, head, scaled)

    def evaluate(_: str, s: jax.Array) -> Pair:
        weights, slope = raw(s, spec.scale)
        if spec.has_f32_range:
            return weights, slope
        name = spec.names[0]
        by_weight, by_slope = spec.constant(name), _slope_constant(spec)
        offset = by_slope if _has_offset(spec) else 0.0
        return weights * jnp.float32(by_weight), slope * jnp.float32(by_slope) + jnp.float32(offset)

    return activations.by_chunks(spec.names, head, scores, evaluate)


def d_scores(spec: ActivationSpec, d_weights: jax.Array, slope: jax.Array) -> jax.Array:
    """Computes gradients of scores from those of weights, without the second of `constants`."""
    if spec.has_f32_range and _has_offset(spec):
        return d_weights * slope + d_weights
    return d_weights * slope


def zero_slope(spec: ActivationSpec) -> float:
    """Returns the slope with which `d_scores` are 0."""
    return -1.0 if spec.has_f32_range and _has_offset(spec) else 0.0


def constants(spec: ActivationSpec) -> tuple[float, float]:
    """Returns the constants of sums of weights and of `d_scores`, which a softmax lacks."""
    if SOFTMAX in spec.names or not spec.has_f32_range or _raw(spec) is None:
        return 1.0, 1.0
    return spec.constant(spec.names[0]), _slope_constant(spec)


def _raw(spec: ActivationSpec) -> Callable[[jax.Array, float], Pair] | None:
    """Finds the function of raw scores, if all heads have one activation with such a function."""
    if len(set(spec.names)) > 1 or not spec.takes_raw_scores:
        return None
    return _SLOPES.get(activations.full_name(spec.names[0], spec.approx))


def _has_offset(spec: ActivationSpec) -> bool:
    return _raw(spec) in (_tanh_silu, _tanh_gelu_tanh)


def _slope_constant(spec: ActivationSpec) -> float:
    if _has_offset(spec):
        return 0.5
    return 2 * spec.scale if _raw(spec) is _relu_squared else 1.0


def _linear(name: str) -> Callable[[jax.Array, float], Pair]:
    return lambda s, _: activations.evaluate_one(name, None, s, needs_slope=True)


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


_SLOPES = {
    "relu": _linear("relu"),
    "leaky_relu": _linear("leaky_relu"),
    "relu_squared": _relu_squared,
    "tanh silu": _tanh_silu,
    "tanh gelu_tanh": _tanh_gelu_tanh,
}
