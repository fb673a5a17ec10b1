"""Proves that an elementwise function of the logits is an activation of `ikbo_jax.gdpa`.

Models write an activation in many forms, and other functions resemble activations. A curve is the
activation `output_scale * g(scale * x)` only if, at every point,

1. its value lies among output_scale * g(scale * x * (1 + d)), |d| <= eps, up to eps relative to
   this value;
2. its value with every equation rounded to its dtype differs from the value in 1 by at most 2 eps *
   |output_scale| * max(|scale * x|, |g(scale * x)|): rounding does not turn the function into a
   coarser one;
3. its slope, by the rules by which JAX differentiates the equations, agrees as in 1.

eps is two roundings of the coarsest dtype among the equations. The points are all values of a
16-bit dtype; for float32, 16 numbers per power of two with both signs, zeros, infinities, NaN, and
both sides of every constant in the equations. If only 3 fails, the activation has the right values
and another derivative.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.facts.curves import Curve, Dual, erfc, jvp_rule, logistic


class Match(NamedTuple):
    """Describes a curve as `output_scale * activation(scale * x)`, by the activation's name.

    `same_slope` says whether the curve also has the activation's slope.
    """

    activation: str
    scale: float
    output_scale: float
    same_slope: bool


# The elementwise activations of `gdpa`, with the slopes that `gdpa` uses.


def _gelu(x: np.ndarray) -> Dual:
    phi = 0.5 * erfc(-x * math.sqrt(0.5))
    return Dual(x * phi, phi + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _gelu_tanh(x: np.ndarray) -> Dual:
    inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    near = np.clip(x, -30, 30)
    growth = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * near * near)
    return Dual(0.5 * x * (1 + inner), 0.5 * (1 + inner) + 0.5 * near * (1 - inner**2) * growth)


def _silu(x: np.ndarray) -> Dual:
    gate = logistic(x)
    return Dual(x * gate, gate + x * gate * (1 - gate))


def _hardswish(x: np.ndarray) -> Dual:
    slope = np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, (2 * x + 3) / 6))
    return Dual(x * np.clip(x + 3, 0, 6) / 6, slope)


#: The activations by name.
KNOWN: dict[str, Callable[[np.ndarray], Dual]] = {
    "relu": lambda x: Dual(np.maximum(x, 0), np.where(x > 0, 1.0, 0.0)),
    "leaky_relu": lambda x: Dual(np.where(x >= 0, x, 0.01 * x), np.where(x >= 0, 1.0, 0.01)),
    "relu_squared": lambda x: Dual(np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "hardswish": _hardswish,
}


#: An input at which act(x) is x or x² in float64, so that the result gives the output scale.
_FAR = 40.0
#: Points of a quick first comparison, as multiples of 1 / scale.
_FEW = np.concatenate([np.linspace(-9, 9, 73), np.linspace(-0.7, 0.7, 8)])
#: Error of float64 where an equation cancels, as in 1 + erf(x), relative to the point.
_CANCELLED = 2.0**-46


def match(curve: Curve) -> Match | None:
    """Finds the activation that a curve equals by the conditions of this module, or None."""
    found: Match | None = _once(_match, curve)
    return found


def vanishes(curve: Curve | float) -> bool:
    """Whether a function is 0, with slope 0, at all logits that are less than a mask's number."""
    if not isinstance(curve, Curve):
        return abs(curve) <= _ZERO
    return len(curve.roots) == 1 and _once(_vanishes, curve)


def _once(compute: Callable[[Curve], Any], curve: Curve) -> Any:
    """Computes a fact once for curves that have equal equations."""
    key = compute, _key(curve)
    if key not in _FACTS:
        if len(_FACTS) >= 512:
            _FACTS.clear()
        with np.errstate(all="ignore"):
            _FACTS[key] = compute(curve)
    return _FACTS[key]


_FACTS: dict[Any, Any] = {}
#: A number up to this is 0 in float32.
_ZERO = 2.0**-160
#: Logits that are less than a mask's number: from -1e8 down, as for a softmax.
_LARGEST = 1e7


def _vanishes(curve: Curve) -> bool:
    return _is_flat(curve, _FEW) and _is_flat(curve, _points(curve))


def _is_flat(curve: Curve, points: np.ndarray) -> bool:
    return all(np.all(np.abs(y) <= _ZERO) for y in curve(points[np.abs(points) <= _LARGEST]))


def _key(curve: Curve) -> Any:
    """Returns a hashable key, equal for curves that have equal equations."""
    numbers = {x: n for n, x in enumerate(curve.nodes)}

    def named(x: Curve | float) -> Any:
        return numbers[x] if isinstance(x, Curve) else float(x).hex()

    return tuple((_text(x.eqn), *map(named, x.operands), str(x.dtype)) for x in curve.nodes)


def _text(eqn: core.JaxprEqn | None) -> str:
    if eqn is None:
        return ""
    rest = {k: str(v) for k, v in eqn.params.items() if k not in ("jvp_jaxpr_fun", "out_sharding")}
    rule = jvp_rule(eqn) if eqn.primitive.name == "custom_jvp_call" else ()
    return f"{eqn.primitive.name} {sorted(rest.items())} {rule}"


def _match(curve: Curve) -> Match | None:
    if any(d.itemsize < 2 or d.itemsize > 4 for d in curve.dtypes):
        return None
    eps = max(float(jnp.finfo(d).eps) for d in curve.dtypes)
    tiny = max(float(jnp.finfo(d).tiny) for d in curve.dtypes)
    for scale in curve.slopes:
        if scale == 0 or not math.isfinite(scale):
            continue
        for name, activation in KNOWN.items():
            far = float(curve(np.array([_FAR / scale])).value[0])
            output_scale = far / float(activation(np.array([_FAR])).value[0])
            if output_scale == 0 or not math.isfinite(output_scale):
                continue
            compare = functools.partial(_compare, curve, activation, scale, output_scale, eps, tiny)
            if not compare(_FEW / scale)[0]:
                continue
            same, same_slope = compare(_points(curve))
            if same:
                return Match(name, scale, output_scale, same_slope)
    return None


def _compare(
    curve: Curve,
    activation: Callable[[np.ndarray], Dual],
    scale: float,
    output_scale: float,
    eps: float,
    tiny: float,
    x: np.ndarray,
) -> tuple[bool, bool]:
    """Whether the values agree at all points, and whether the slopes do."""
    computed, coarse = curve(x), curve(x, rounded=True).value
    near = [activation(scale * x * (1 + d)) for d in (-eps, -eps / 2, 0.0, eps / 2, eps)]
    exact = near[2]
    point = np.maximum(np.abs(scale * x), np.abs(exact.value)) * abs(output_scale)
    noise = tiny + _CANCELLED * point
    same = _agree(computed.value, [output_scale * g.value for g in near], eps, noise)
    # Near the largest number of a dtype, an intermediate result may overflow although the result
    # would not: before a factor < 1, as in x * clip(x + 3, 0, 6) / 6 or in square(relu(x)) / n, or
    # where a scaled logit should be multiplied by 0, as in silu(2 * x).
    largest = min(float(jnp.finfo(d).max) for d in curve.dtypes)
    from_ = largest / (64 if largest < 1e6 else 2.0**32)
    near_largest = np.maximum(np.abs(computed.value), np.abs(scale * x)) > from_
    overflowed = ~np.isfinite(coarse) & near_largest & np.isfinite(x)
    same_nan = np.isnan(coarse) == np.isnan(computed.value)
    near_enough = np.abs(coarse - computed.value) <= 2 * eps * point + tiny
    same &= overflowed | (same_nan & (near_enough | ~np.isfinite(computed.value)))
    if not np.all(same):
        return False, False
    factor = scale * output_scale
    finite = np.isfinite(x)
    share = np.abs(factor) * np.maximum(np.abs(exact.slope), np.abs(exact.value / (scale * x)))
    share = np.where(np.isfinite(share), share, 0.0)
    slopes = [factor * g.slope for g in near]
    # At 0, where a value is no noise, slopes differ as those of relu(x) and maximum(x, 0) do.
    noise = np.where(x == 0, 0.0, noise / np.maximum(np.abs(x), tiny))
    slope = _agree(computed.slope, slopes, eps, eps * share + noise)
    # Beyond 1e9, differentiation rules multiply 0 by infinity, in float64 as in the program.
    overflows = np.abs(scale * x) > 1e9
    return True, bool(np.all(slope | ~finite | (np.isnan(computed.slope) & overflows)))


def _agree(
    computed: np.ndarray, near: list[np.ndarray], eps: float, noise: np.ndarray
) -> np.ndarray:
    """Whether values lie between the values `near`, up to eps relative to these, plus noise."""
    low, high = functools.reduce(np.fmin, near), functools.reduce(np.fmax, near)
    inside = (computed >= low - eps * np.abs(low) - noise) & (
        computed <= high + eps * np.abs(high) + noise
    )
    exact = near[len(near) // 2]
    return np.where(
        np.isfinite(exact), inside, (computed == exact) | (np.isnan(computed) & np.isnan(exact))
    )


def _points(curve: Curve) -> np.ndarray:
    """Returns the points at which a curve is compared: values of the dtype of its logits."""
    dtype = curve.roots[0].dtype
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    mantissas = np.linspace(1, 2, 16, endpoint=False)
    grid = (mantissas * 2.0 ** np.arange(-149, 128)[:, None]).ravel()
    constants = np.array(sorted(_derived(curve)), np.float64).astype(dtype)
    sides = [np.nextafter(constants, dtype.type(s)) for s in (-np.inf, np.inf)]
    special = np.array([0.0, np.inf, np.nan])
    points = np.concatenate([grid.astype(dtype), *sides, constants, special]).astype(np.float64)
    return np.concatenate([points, -points])


def _derived(curve: Curve) -> set[float]:
    """Returns points where the curve may change: its constants and functions of them, scaled."""
    numbers = [n for n in curve.numbers if math.isfinite(n)]
    points = set(numbers)
    for n in numbers:
        points |= {math.sqrt(abs(n)), n * n, 1 / n if n else 0.0}
        points |= {math.log(abs(n)) if n else 0.0, math.exp(min(n, 80.0))}
    if len(numbers) <= 24:
        for a, b in itertools.permutations(numbers, 2):
            points |= {a - b, a / b if b else a}
    return {n / s for n in points for s in curve.slopes if s and abs(n / s) < 3e38}
