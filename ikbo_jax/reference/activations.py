"""Activations of generalised dot-product attention and their derivatives, exact and approximate.

They apply to f32 scores, element by element, and are 0 at 0, so that a score of 0 has the effect of
a missing key. Softmax is not among them, since it needs a whole row; see `SOFTMAX`.

    approx        activation       largest error of the value    ... of the derivative
    tanh          gelu_tanh        2⁻¹² · |x|                    2⁻¹² · (1 + 2 |x| + |x|³ / 4)
    tanh          silu             2⁻¹² · |x|                    2⁻¹² · (1 + |x|)
    tanh_bf16     gelu_tanh, silu  2⁻⁶ · |x|                     as "tanh"
    polynomial    gelu             5.0e-4                        5.4e-3

"tanh": kernels compute tanh by tanh.approx.f32, whose relative error is at most 2⁻¹¹ (PTX ISA);
other paths, such as this module, compute the exact tanh. "tanh_bf16": kernels compute two scores at
a time in bfloat16, if inputs are bfloat16 and all heads have one activation; elsewhere it is
"tanh". Its error amounts to about six roundings to bfloat16; every weight for bfloat16 values has
one. "polynomial": the normal distribution's Φ(x) becomes 1/2 + x · p(x²), of degree 11, on
|x| ≤ 3.7, and 0 or 1 outside. Its derivative becomes the polynomial's derivative, so that gradients
match values.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

#: The activation that normalises over the keys of a sequence.
SOFTMAX = "softmax"
#: Slope of leaky_relu at negative scores.
LEAKY_SLOPE = 0.01
#: The polynomial approximates Φ(x) for |x| up to this bound.
POLYNOMIAL_DOMAIN = 3.7
#: Coefficients of p, in rising powers of x², that minimise the largest error of x · Φ(x). At the
#: ends of the domain 1/2 + x · p(x²) exceeds [0, 1] by 1e-6, more than its rounding error. So
#: clamping it to [0, 1], which costs a GPU nothing, makes it exactly 0 and 1 there.
POLYNOMIAL = (0.39647512, -0.062587462, 0.0078486111, -0.00061748916, 2.6887923e-05, -4.8995281e-07)
#: The tanh form's constants: sqrt(2 / pi), and the cubic term of Hendrycks and Gimpel, 2016.
TANH_SCALE = math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715


class Activation(NamedTuple):
    """An activation and its derivative, each from f32 to f32, element by element.

    JAX's derivative of `value` is `slope`, also at a kink, where JAX's derivative of its equation
    may be another one: half of the slopes' sum for a maximum.
    """

    value: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


def _activation(
    value: Callable[[jax.Array], jax.Array], slope: Callable[[jax.Array], jax.Array]
) -> Activation:
    function = jax.custom_jvp(value)

    @function.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return function(*primals), slope(*primals) * tangents[0]

    return Activation(function, slope)


def _step(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1.0, 0.0)


def _gelu_phi(x: jax.Array) -> jax.Array:
    # 1 + erf would lose the small values at negative scores.
    return 0.5 * jax.lax.erfc(x * -math.sqrt(0.5))


def _gelu_slope(x: jax.Array) -> jax.Array:
    density = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return _gelu_phi(x) + x * density


def _gelu_tanh_inner(x: jax.Array) -> jax.Array:
    return jnp.tanh(TANH_SCALE * (x + TANH_CUBIC * x * x * x))


def _gelu_tanh_slope(x: jax.Array) -> jax.Array:
    # Beyond 10 the tanh is 1 in f32, and the cube of a huge score would make 0 · inf.
    bounded = jnp.clip(x, -10.0, 10.0)
    inner = _gelu_tanh_inner(bounded)
    growth = TANH_SCALE * (1.0 + 3 * TANH_CUBIC * bounded * bounded)
    return 0.5 * (1.0 + inner) + 0.5 * bounded * (1.0 - inner * inner) * growth


def _silu_slope(x: jax.Array) -> jax.Array:
    gate = jax.lax.logistic(x)
    return gate + x * gate * (1.0 - gate)


def _hardswish_gate(x: jax.Array) -> jax.Array:
    return jnp.clip((x + 3.0) * (1 / 6), 0.0, 1.0)


def _hardswish_slope(x: jax.Array) -> jax.Array:
    middle = (2.0 * x + 3.0) * (1 / 6)
    return jnp.where(x <= -3.0, 0.0, jnp.where(x >= 3.0, 1.0, middle))


def _horner(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    return functools.reduce(lambda total, c: total * x + c, reversed(coefficients), 0.0 * x)


def _polynomial_phi(x: jax.Array) -> jax.Array:
    inside = jnp.clip(x, -POLYNOMIAL_DOMAIN, POLYNOMIAL_DOMAIN)
    return jnp.clip(0.5 + inside * _horner(POLYNOMIAL, inside * inside), 0.0, 1.0)


def _polynomial_slope(x: jax.Array) -> jax.Array:
    coefficients = tuple((2 * k + 1) * c for k, c in enumerate(POLYNOMIAL))
    inside = jnp.clip(x, -POLYNOMIAL_DOMAIN, POLYNOMIAL_DOMAIN)
    density = jnp.where(jnp.abs(x) < POLYNOMIAL_DOMAIN, _horner(coefficients, inside * inside), 0.0)
    return _polynomial_phi(x) + x * density


_EXACT = {
    "identity": _activation(lambda x: x, jnp.ones_like),
    "relu": _activation(lambda x: jnp.maximum(x, 0.0), _step),
    "leaky_relu": _activation(
        lambda x: jnp.where(x >= 0, x, LEAKY_SLOPE * x),
        lambda x: jnp.where(x >= 0, 1.0, LEAKY_SLOPE),
    ),
    "relu_squared": _activation(
        lambda x: jnp.square(jnp.maximum(x, 0.0)), lambda x: 2.0 * jax.nn.relu(x)
    ),
    "gelu": _activation(lambda x: x * _gelu_phi(x), _gelu_slope),
    "gelu_tanh": _activation(lambda x: 0.5 * x * (1.0 + _gelu_tanh_inner(x)), _gelu_tanh_slope),
    "silu": _activation(lambda x: x * jax.lax.logistic(x), _silu_slope),
    "hardswish": _activation(lambda x: x * _hardswish_gate(x), _hardswish_slope),
}
_APPROXIMATE = {
    ("tanh", "gelu_tanh"): _EXACT["gelu_tanh"],
    ("tanh", "silu"): _EXACT["silu"],
    ("tanh_bf16", "gelu_tanh"): _EXACT["gelu_tanh"],
    ("tanh_bf16", "silu"): _EXACT["silu"],
    ("polynomial", "gelu"): _activation(lambda x: x * _polynomial_phi(x), _polynomial_slope),
}

#: The approximation that computes two scores at a time.
PACKED = "tanh_bf16"
#: Names of all activations.
ACTIVATIONS = (*_EXACT, SOFTMAX)
#: Names of the approximations, and the activations that each approximates.
APPROXIMATIONS = {
    name: tuple(activation for approx, activation in _APPROXIMATE if approx == name)
    for name in dict.fromkeys(approx for approx, _ in _APPROXIMATE)
}


def one_by_one(approx: str | None) -> str | None:
    """Returns the approximation for scores that are computed one at a time."""
    return "tanh" if approx == PACKED else approx


def elementwise(name: str, approx: str | None) -> Activation:
    """Returns an activation, approximated if `approx` applies to it; softmax is none."""
    return _APPROXIMATE.get((approx or "", name), _EXACT[name])
