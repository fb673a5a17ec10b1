"""Functions of one number, put together from a program's equations, and the activations they are.

Models spell an activation in many ways. What counts is its curve: it is followed from equation to
equation as a function of NumPy arrays, and at last compared with the activations that are known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

Function = Callable[[np.ndarray], np.ndarray]
#: Where curves are compared, as multiples of the scale: the activations differ there.
_SAMPLES = np.concatenate([np.linspace(-9, 9, 73), np.linspace(-0.7, 0.7, 8)])


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """A function of one number.

    Attributes:
      value: computes it in float64.
      slopes: of the linear functions on the way to it: the scales that an activation may have.
      linear: whether it is linear itself, by the last of `slopes`.
    """

    value: Function
    slopes: tuple[float, ...]
    linear: bool = False


class Match(NamedTuple):
    """A curve as `output_scale * activation(scale * x)`."""

    activation: str
    scale: float
    output_scale: float


IDENTITY = Curve(lambda x: x, (1.0,), linear=True)


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erfc, otypes=[np.float64])(x)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


#: NumPy's version of the primitives that activations are made of, by name; each takes the equation.
_NUMPY: dict[str, Callable[..., Any]] = {
    "abs": lambda _, x: np.abs(x),
    "add": lambda _, x, y: x + y,
    "clamp": lambda _, low, x, high: np.clip(x, low, high),
    "convert_element_type": lambda _, x: x,
    "copy": lambda _, x: x,
    "div": lambda _, x, y: np.divide(x, y),
    "erf": lambda _, x: 1 - _erfc(x),
    "erfc": lambda _, x: _erfc(x),
    "exp": lambda _, x: np.exp(x),
    "ge": lambda _, x, y: np.greater_equal(x, y),
    "gt": lambda _, x, y: np.greater(x, y),
    "integer_pow": lambda eqn, x: x ** float(eqn.params["y"]),
    "le": lambda _, x, y: np.less_equal(x, y),
    "log1p": lambda _, x: np.log1p(x),
    "logistic": lambda _, x: _logistic(x),
    "lt": lambda _, x, y: np.less(x, y),
    "max": lambda _, x, y: np.maximum(x, y),
    "min": lambda _, x, y: np.minimum(x, y),
    "mul": lambda _, x, y: x * y,
    "name": lambda _, x: x,
    "neg": lambda _, x: -x,
    "reduce_precision": lambda _, x: x,
    "select_n": lambda _, which, no, yes: np.where(which, yes, no),
    "square": lambda _, x: x * x,
    "stop_gradient": lambda _, x: x,
    "sub": lambda _, x, y: x - y,
    "tanh": lambda _, x: np.tanh(x),
}
_PROGRAMS = {"custom_jvp_call": "call_jaxpr", "jit": "jaxpr", "pjit": "jaxpr"}
#: Names of the primitives that curves follow.
ELEMENTWISE = frozenset((*_NUMPY, "custom_jvp_call"))


def then(eqn: core.JaxprEqn, operands: Sequence[Curve | float]) -> Curve | None:
    """The curve of an equation's result, made of curves and numbers; None if it is unknown."""
    name = eqn.primitive.name
    if name in _PROGRAMS and not _is_known(eqn.params[_PROGRAMS[name]]):
        return None
    found = [x for x in operands if isinstance(x, Curve)]

    def value(x: np.ndarray) -> np.ndarray:
        return _evaluate(eqn, [c.value(x) if isinstance(c, Curve) else c for c in operands])

    slopes = tuple(dict.fromkeys(slope for curve in found for slope in curve.slopes))
    factor = _factor(name, operands)
    if factor is None:
        return Curve(value, slopes)
    (last,) = found
    return Curve(value, (*slopes, last.slopes[-1] * factor), linear=True)


def _factor(name: str, operands: Sequence[Curve | float]) -> float | None:
    """What a linear curve is multiplied by; None if the result is not linear."""
    numbers = [x for x in operands if not isinstance(x, Curve)]
    curves = [x for x in operands if isinstance(x, Curve)]
    if len(curves) != 1 or not curves[0].linear:
        return None
    if name in ("convert_element_type", "copy", "name", "reduce_precision", "stop_gradient"):
        return 1.0
    if name == "neg":
        return -1.0
    if name == "mul":
        return numbers[0]
    if name == "div" and isinstance(operands[0], Curve) and numbers[0]:
        return 1 / numbers[0]
    return None


def _is_known(program: Any) -> bool:
    jaxpr = getattr(program, "jaxpr", program)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = _PROGRAMS.get(name)
        if name not in _NUMPY and (inner is None or not _is_known(eqn.params[inner])):
            return False
    return not getattr(program, "consts", ()) and len(jaxpr.outvars) == 1


def _evaluate(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Any:
    name = eqn.primitive.name
    if name in _NUMPY:
        return _NUMPY[name](eqn, *operands)
    program = eqn.params[_PROGRAMS[name]]
    jaxpr = getattr(program, "jaxpr", program)
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(v: Any) -> Any:
        return np.asarray(v.val, np.float64) if isinstance(v, core.Literal) else env[v]

    for inner in jaxpr.eqns:
        env[inner.outvars[0]] = _evaluate(inner, [read(v) for v in inner.invars])
    return read(jaxpr.outvars[0])


#: The activations of `ikbo_jax.gdpa` that work element by element.
_ACTIVATIONS: dict[str, Function] = {
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: 0.5 * x * _erfc(-x * math.sqrt(0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _logistic(x),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}


def match(curve: Curve, rounding: float) -> Match | None:
    """The activation that a curve is; None if it is none.

    Args:
      curve: any.
      rounding: of the coarsest dtype that the program computes the curve in, whose constants are
        rounded to it.
    """
    best, least = None, 8 * rounding
    with np.errstate(all="ignore"):
        for scale in curve.slopes:
            if scale == 0:
                continue
            found = np.asarray(curve.value(_SAMPLES / scale), np.float64)
            largest = np.max(np.abs(found))
            if found.shape != _SAMPLES.shape or not 0 < largest < math.inf:
                continue
            for name, activation in _ACTIVATIONS.items():
                expected = activation(_SAMPLES)
                factor = float(expected @ found / (expected @ expected))
                error = np.max(np.abs(found - factor * expected)) / largest
                if error < least:
                    best, least = Match(name, scale, factor), error
    return best
