"""Activations and their slopes (derivatives) in a kernel, element by element on f32 [64, columns].

The special function unit limits their speed.  It returns 16 results a cycle, and at H = 128 the
products consume 8 scores a cycle: with two results per score it takes as long as the tensor core.
Therefore the sigmoids of two neighbouring scores share one reciprocal, and Φ takes one exponential.

    activation, approximation             results per value    per value and slope
    gelu_tanh, silu                       1.5                  1.5
    gelu                                  1                    2
    gelu_tanh, silu, approx "tanh"        1                    1
    all others, approx "polynomial"       0                    0

The two neighbours are columns of one row: an infinite or NaN score can spoil only its own row,
which the product that follows spoils anyway.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic
from ikbo_jax.reference.activations import (
    APPROXIMATIONS,
    LEAKY_SLOPE,
    POLYNOMIAL,
    POLYNOMIAL_DOMAIN,
    TANH_CUBIC,
    TANH_SCALE,
    one_by_one,
)

LOG2_E = math.log2(math.e)
#: Columns that are activated at a time.  Every operation is emitted for all columns of a chunk:
#: with 128 columns, scores and their exponentials would be live together, which spills.  A branch
#: with 128 results spills, too.
CHUNK = 16
#: Coefficients, in rising powers, of log2(Φ(−x)) on 0 ≤ x ≤ `PHI_DOMAIN`.  The errors of Φ(−x) and
#: x · Φ(−x) are below 1.5e-8, less than their rounding; beyond the domain both are below 1e-14.
PHI_DOMAIN = 8.0
LOG2_PHI = (
    -0.99999994,
    -1.151107,
    -0.45919305,
    -0.052546434,
    0.0071427813,
    -0.00020247867,
    -0.00015727888,
    3.296803e-05,
    -2.275873e-06,
)
#: Scores are raised to these bounds, below which |gelu_tanh| and |silu| are less than 1e-17.  So
#: their sigmoids stay above 2⁻⁶³, and the product of two reciprocals of sigmoids is finite.
MIN_GELU_TANH = -7.5
MIN_SILU = -42.0
#: Slopes of gelu_tanh lower scores to this bound, above which the sigmoid is 1: the square of a
#: huge score would be infinite.
MAX_GELU_TANH = 10.0

Pair = tuple[jax.Array, jax.Array]


def activate(names: tuple[str, ...], approx: str | None, head: Any, x: jax.Array) -> jax.Array:
    """Computes act(x) of one head, for x [64, columns] f32; `names` are of all heads, or one for
    all.
    """
    return by_chunks(
        names, head, x, lambda name, x: evaluate_one(name, approx, x, needs_slope=False)[0]
    )


def activate_with_slope(
    names: tuple[str, ...], approx: str | None, head: Any, x: jax.Array
) -> Pair:
    """Computes (act(x), act'(x)) of one head; for the arguments see `activate`."""
    return by_chunks(
        names, head, x, lambda name, x: evaluate_one(name, approx, x, needs_slope=True)
    )


def by_chunks(names: tuple[str, ...], head: Any, x: jax.Array, evaluate: Any) -> Any:
    """Calls `evaluate(name, x)` for the head's activation, a chunk of x [64, columns] at a time."""

    kinds = tuple(dict.fromkeys(names))

    def of_head(x: jax.Array) -> Any:
        if len(kinds) == 1:
            return evaluate(kinds[0], x)
        kind = jnp.int32(0)
        for i, name in enumerate(names):
            if number := kinds.index(name):
                kind = jnp.where(head == i, jnp.int32(number), kind)
        return lax.switch(kind, [functools.partial(evaluate, name, x) for name in kinds])

    if mosaic.is_interpreted():
        return of_head(x)
    chunks = [lax.slice(x, (0, i), (x.shape[0], i + CHUNK)) for i in range(0, x.shape[1], CHUNK)]
    return jax.tree.map(lambda *parts: lax.concatenate(parts, 1), *map(of_head, chunks))


def evaluate_one(name: str, approx: str | None, x: jax.Array, *, needs_slope: bool) -> Pair:
    """Computes (act(x), act'(x)); unless `needs_slope`, the second array is a placeholder."""
    return _FUNCTIONS[full_name(name, approx)](x, needs_slope)


def full_name(name: str, approx: str | None) -> str:
    """Names an activation with its approximation, if it has one."""
    approx = one_by_one(approx)
    return f"{approx} {name}" if approx and name in APPROXIMATIONS[approx] else name


def weight(name: str, scores: jax.Array, scale: float) -> jax.Array:
    """Computes act(scale * scores) / scale, or act(scores) of what is linear or squared.

    For activations without approximation, but hardswish.
    """
    return _FUNCTIONS[name](scores, needs_slope=False, scale=scale)[0]


def horner(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    """Evaluates the polynomial of x with `coefficients` in rising powers."""
    total = x * jnp.float32(coefficients[-1]) + jnp.float32(coefficients[-2])
    for c in coefficients[-3::-1]:
        total = total * x + jnp.float32(c)
    return total


def _limit(x: jax.Array, low: float, high: float) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, jnp.float32(low)), jnp.float32(high))


def _identity(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    slope = jnp.full_like(x, 1.0) if needs_slope else x
    # A constant has no layout, unlike other slopes.
    return x, slope if mosaic.is_interpreted() else plgpu.layout_cast(slope, plgpu.Layout.WGMMA)


def _relu(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    value = jnp.maximum(x, jnp.float32(0))
    if not needs_slope:
        return value, x
    return value, jnp.where(x > 0, jnp.full_like(x, 1.0), jnp.full_like(x, 0.0))


def _leaky_relu(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    value = jnp.maximum(x, x * jnp.float32(LEAKY_SLOPE))
    if not needs_slope:
        return value, x
    return value, jnp.where(x >= 0, jnp.full_like(x, 1.0), jnp.full_like(x, LEAKY_SLOPE))


def _relu_squared(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    positive = jnp.maximum(x, jnp.float32(0))
    return positive * positive, positive + positive if needs_slope else x


def _hardswish(x: jax.Array, needs_slope: bool) -> Pair:
    value = x * _limit(x * jnp.float32(1 / 6) + jnp.float32(0.5), 0.0, 1.0)
    if not needs_slope:
        return value, x
    middle = x * jnp.float32(1 / 3) + jnp.float32(0.5)
    slope = jnp.where(x >= 3.0, jnp.full_like(x, 1.0), middle)
    return value, jnp.where(x <= -3.0, jnp.full_like(x, 0.0), slope)


def _gelu(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    """x · Φ(x) = max(x, 0) − |x| · Φ(−|x|), which keeps the small results at negative scores."""
    distance = jnp.minimum(jnp.abs(x), jnp.float32(PHI_DOMAIN / scale))
    tail = jnp.exp2(horner(tuple(c * scale**k for k, c in enumerate(LOG2_PHI)), distance))
    value = jnp.maximum(x, jnp.float32(0)) - distance * tail
    if not needs_slope:
        return value, x
    phi = jnp.where(x > 0, jnp.float32(1) - tail, tail)
    density = jnp.exp2(distance * distance * jnp.float32(-0.5 * LOG2_E))
    inside = _limit(x, -PHI_DOMAIN, PHI_DOMAIN)
    return value, phi + inside * density * jnp.float32(1 / math.sqrt(2 * math.pi))


def _polynomial_gelu(x: jax.Array, needs_slope: bool) -> Pair:
    inside = _limit(x, -POLYNOMIAL_DOMAIN, POLYNOMIAL_DOMAIN)
    square = inside * inside
    phi = _limit(inside * horner(POLYNOMIAL, square) + jnp.float32(0.5), 0.0, 1.0)
    if not needs_slope:
        return x * phi, x
    coefficients = tuple((2 * k + 1) * c for k, c in enumerate(POLYNOMIAL))
    density = horner(coefficients, square)
    is_inside = jnp.abs(x) < POLYNOMIAL_DOMAIN
    return x * phi, phi + inside * jnp.where(is_inside, density, jnp.full_like(x, 0.0))


def reciprocal(x: jax.Array) -> jax.Array:
    """Computes 1 / x for 1 ≤ x < 2⁶³; two neighbouring columns share one: 1 / a = b · (1 / ab)."""
    if mosaic.is_interpreted():
        return 1 / x

    @inline.code(x, returns=x)
    def inverted(x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        registers = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            a, b = (vector.extract(register, [], [i]) for i in (0, 1))
            inverse = mgpu.utils.inline_ptx(
                "rcp.approx.ftz.f32 $0, $1;", arith.mulf(a, b), result_types=f32
            )
            products = [arith.mulf(inverse, factor) for factor in (b, a)]
            registers[index] = vector.from_elements(pair, products)
        return inline.accumulator(registers)

    return inverted


def _silu(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    bounded = jnp.maximum(x, jnp.float32(MIN_SILU / scale))
    exponential = jnp.exp2(bounded * jnp.float32(-LOG2_E * scale))
    gate = reciprocal(exponential + jnp.float32(1))
    value = bounded * gate
    if not needs_slope:
        return value, x
    return value, gate + value * (exponential * gate)


def _gelu_tanh(x: jax.Array, needs_slope: bool, scale: float = 1.0) -> Pair:
    """x · sigmoid(2y), where (1 + tanh(y)) / 2 = sigmoid(2y)."""
    bounded = jnp.maximum(x, jnp.float32(MIN_GELU_TANH / scale))
    linear = -2 * LOG2_E * TANH_SCALE * scale
    cubic = linear * TANH_CUBIC * scale**2
    exponential = jnp.exp2(bounded * (bounded * bounded * jnp.float32(cubic) + jnp.float32(linear)))
    gate = reciprocal(exponential + jnp.float32(1))
    value = bounded * gate
    if not needs_slope:
        return value, x
    inside = jnp.minimum(bounded, jnp.float32(MAX_GELU_TANH))
    growth = inside * inside * jnp.float32(6 * TANH_SCALE * TANH_CUBIC)
    growth = inside * (growth + jnp.float32(2 * TANH_SCALE))
    return value, gate + gate * (exponential * gate) * growth


def _tanh_silu(x: jax.Array, needs_slope: bool) -> Pair:
    half = x * jnp.float32(0.5)
    inner = jnp.tanh(half)  # tanh.approx.f32: see `mosaic.compiler_params`
    value = half * inner + half
    if not needs_slope:
        return value, x
    rest = jnp.float32(1) - inner * inner
    inside = _limit(half, -32.0, 32.0)
    return value, inner * jnp.float32(0.5) + jnp.float32(0.5) + inside * rest * jnp.float32(0.5)


def _tanh_gelu_tanh(x: jax.Array, needs_slope: bool) -> Pair:
    scaled = x * jnp.float32(TANH_SCALE)
    inner = jnp.tanh(x * x * (scaled * jnp.float32(TANH_CUBIC)) + scaled)
    half = x * jnp.float32(0.5)
    value = half * inner + half
    if not needs_slope:
        return value, x
    inside = _limit(half, -MAX_GELU_TANH / 2, MAX_GELU_TANH / 2)
    growth = inside * inside * jnp.float32(12 * TANH_SCALE * TANH_CUBIC) + jnp.float32(TANH_SCALE)
    rest = jnp.float32(1) - inner * inner
    return value, inner * jnp.float32(0.5) + jnp.float32(0.5) + inside * rest * growth


#: A function that takes a `scale` computes values of raw scores; slopes are of the scale 1.
_FUNCTIONS: dict[str, Callable[..., Pair]] = {
    "identity": _identity,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "relu_squared": _relu_squared,
    "hardswish": _hardswish,
    "gelu": _gelu,
    "polynomial gelu": _polynomial_gelu,
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "tanh silu": _tanh_silu,
    "tanh gelu_tanh": _tanh_gelu_tanh,
}
