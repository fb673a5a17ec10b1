"""The proof that a function of the logits is an activation of `ikbo_jax.gdpa`.

Models spell an activation in many ways, and other functions resemble activations. A curve is the
activation `output_scale * g(scale * x)` only if, at every point tried,

1. its value is one of g(scale * x * (1 + d)), |d| <= eps, up to eps relative to the value itself;
2. its value with every equation rounded to its own dtype differs from 1 by at most 2 eps of
   |output_scale| * max(|scale * x|, |g(scale * x)|): the program computes the function that it
   spells, and not a coarser one;
3. its slope agrees as in 1, by the rules that JAX differentiates the equations with.

eps is two roundings of the coarsest dtype among the equations. Points are every value of a 16-bit
dtype; in float32 16 numbers per power of two, both signs, zeros, infinities, NaN, and both sides of
every constant in the equations. If only 3 fails, the activation has the right values and another
derivative.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.curves import Curve, Dual, erfc, logistic, own_rule


class Match(NamedTuple):
    """A curve as `output_scale * activation(scale * x)`.

    Attributes:
      activation: its name in `ikbo_jax.gdpa`.
      scale: factor of the logits.
      output_scale: factor of the activation.
      same_slope: whether the slope is the activation's, too.
    """

    activation: str
    scale: float
    output_scale: float
    same_slope: bool


# The activations that work element by element, with the slopes that `gdpa` uses.


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


#: By name.
KNOWN: dict[str, Callable[[np.ndarray], Dual]] = {
    "relu": lambda x: Dual(np.maximum(x, 0), np.where(x > 0, 1.0, 0.0)),
    "leaky_relu": lambda x: Dual(np.where(x >= 0, x, 0.01 * x), np.where(x >= 0, 1.0, 0.01)),
    "relu_squared": lambda x: Dual(np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "hardswish": _hardswish,
}

# The proof.

#: Where every activation is its argument, or the square of it, to float64: shows the output scale.
_FAR = 40.0
#: Points for a first look, as multiples of 1 / scale.
_FEW = np.concatenate([np.linspace(-9, 9, 73), np.linspace(-0.7, 0.7, 8)])
#: What float64 loses where an equation cancels, as in 1 + erf(x), relative to the point.
_CANCELLED = 2.0**-46


def match(curve: Curve) -> Match | None:
    """The activation that a curve is; None if it is none. See the module for what is required."""
    key = _key(curve)
    if key not in _MATCHES:
        if len(_MATCHES) >= 256:
            _MATCHES.clear()
        with np.errstate(all="ignore"):
            _MATCHES[key] = _match(curve)
    return _MATCHES[key]


_MATCHES: dict[Any, Match | None] = {}


def _key(curve: Curve | float) -> Any:
    """What two curves with the same equations have in common."""
    known: dict[int, int] = {}
    nodes: list[Any] = []

    def visit(x: Curve | float) -> Any:
        if not isinstance(x, Curve):
            return float(x).hex()
        if id(x) not in known:
            operands = tuple(map(visit, x.operands))
            known[id(x)] = len(nodes)
            nodes.append((_text(x.eqn), operands, str(x.dtype)))
        return known[id(x)]

    visit(curve)
    return tuple(nodes)


def _text(eqn: core.JaxprEqn | None) -> str:
    if eqn is None:
        return ""
    rest = {k: str(v) for k, v in eqn.params.items() if k not in ("jvp_jaxpr_fun", "out_sharding")}
    rule = own_rule(eqn) if eqn.primitive.name == "custom_jvp_call" else ()
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
    """Whether values agree at all points, and whether slopes do."""
    found, coarse = curve(x), curve(x, rounded=True).value
    near = [activation(scale * x * (1 + d)) for d in (-eps, -eps / 2, 0.0, eps / 2, eps)]
    exact = near[2]
    point = np.maximum(np.abs(scale * x), np.abs(exact.value)) * abs(output_scale)
    noise = tiny + _CANCELLED * point
    same = _agree(found.value, [output_scale * g.value for g in near], eps, noise)
    # Near the end of a dtype's range a factor comes too late, as in x * clip(x + 3, 0, 6) / 6, or
    # what is scaled overflows before a gate closes, as in silu(2 * x).
    largest = min(float(jnp.finfo(d).max) for d in curve.dtypes)
    at_the_end = np.maximum(np.abs(found.value), np.abs(scale * x)) > largest / 64
    beyond = ~np.isfinite(coarse) & at_the_end & np.isfinite(x)
    kind = np.isnan(coarse) == np.isnan(found.value)
    near_enough = np.abs(coarse - found.value) <= 2 * eps * point + tiny
    same &= beyond | (kind & (near_enough | ~np.isfinite(found.value)))
    if not np.all(same):
        return False, False
    factor = scale * output_scale
    finite = np.isfinite(x)
    share = np.abs(factor) * np.maximum(np.abs(exact.slope), np.abs(exact.value / (scale * x)))
    share = np.where(np.isfinite(share), share, 0.0)
    slopes = [factor * g.slope for g in near]
    slope = _agree(found.slope, slopes, eps, eps * share + noise / np.maximum(np.abs(x), tiny))
    # Beyond 1e9 rules of derivatives multiply 0 by infinity, in float64 as in the program.
    overflows = np.abs(scale * x) > 1e9
    return True, bool(np.all(slope | ~finite | (np.isnan(found.slope) & overflows)))


def _agree(found: np.ndarray, near: list[np.ndarray], eps: float, noise: np.ndarray) -> np.ndarray:
    """Whether values lie among others, up to eps relative to these and to noise."""
    low, high = functools.reduce(np.fmin, near), functools.reduce(np.fmax, near)
    inside = (found >= low - eps * np.abs(low) - noise) & (
        found <= high + eps * np.abs(high) + noise
    )
    exact = near[len(near) // 2]
    return np.where(
        np.isfinite(exact), inside, (found == exact) | (np.isnan(found) & np.isnan(exact))
    )


def _points(curve: Curve) -> np.ndarray:
    """Where a curve is compared: values of the dtype that its logits have."""
    dtype = next(iter(_roots(curve))).dtype
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    mantissas = np.linspace(1, 2, 16, endpoint=False)
    grid = (mantissas * 2.0 ** np.arange(-149, 128)[:, None]).ravel()
    constants = np.array(sorted(_derived(curve)), np.float64).astype(dtype)
    constants = constants[np.isfinite(constants)]
    sides = [np.nextafter(constants, dtype.type(s)) for s in (-np.inf, np.inf)]
    special = np.array([0.0, np.inf, np.nan])
    points = np.concatenate([grid.astype(dtype), *sides, constants, special]).astype(np.float64)
    return np.concatenate([points, -points])


def _roots(curve: Curve) -> set[Curve]:
    if curve.eqn is None:
        return {curve}
    return set().union(*(_roots(x) for x in curve.operands if isinstance(x, Curve)))


def _derived(curve: Curve) -> set[float]:
    """Points at which a constant of the equations may count: itself, sums, inverse functions."""
    numbers = [n for n in curve.numbers if math.isfinite(n)]
    found = set(numbers)
    for n in numbers:
        found |= {math.sqrt(abs(n)), n * n, 1 / n if n else 0.0}
        found |= {math.log(abs(n)) if n else 0.0, math.exp(min(n, 80.0))}
    if len(numbers) <= 24:
        found |= {f(a, b) for a, b in itertools.permutations(numbers, 2) for f in (_minus, _over)}
    return {n / s for n in found for s in curve.slopes if s and abs(n / s) < 3e38}


def _minus(a: float, b: float) -> float:
    return a - b


def _over(a: float, b: float) -> float:
    return a / b if b else a
