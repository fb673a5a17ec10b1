"""Elementwise functions of the logits that a program computes, with their slopes.

The equations that follow the logits are kept as a `Curve`. NumPy evaluates its values and slopes
together, in float64. Slopes follow the rules by which JAX differentiates the equations, so
`stop_gradient` and `custom_jvp` count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.facts.known import OF_TWO
from ikbo_jax.rewrite.values.jaxprs import interpret


class Dual(NamedTuple):
    """Holds values and their slopes, in float64; booleans have slope 0."""

    value: Any
    slope: Any = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """Describes an elementwise function of the logits.

    Attributes:
      eqn: the producing equation; None for the logits themselves.
      operands: the operands of the equation: curves and numbers.
      dtype: the dtype of its values.
      slope: of a linear curve, its slope; None for others.
    """

    eqn: core.JaxprEqn | None
    operands: tuple[Curve | float, ...]
    dtype: Any
    slope: float | None

    @functools.cached_property
    def _others(self) -> tuple[Curve, ...]:
        curves = (x for x in self.operands if isinstance(x, Curve))
        return tuple(dict.fromkeys(y for x in curves for y in x.nodes))

    @property
    def nodes(self) -> tuple[Curve, ...]:
        """All curves that it is computed from, each after its operands; the last is itself."""
        return (*self._others, self)

    @property
    def roots(self) -> list[Curve]:
        """The logits that it is computed from."""
        return [x for x in self.nodes if x.eqn is None]

    @functools.cached_property
    def slopes(self) -> Sequence[float]:
        """Slopes of all linear curves in it: the possible scales of an activation."""
        return list(dict.fromkeys(x.slope for x in self.nodes if x.slope is not None))

    @functools.cached_property
    def inside(self) -> list[Any]:
        """All equations of the programs that its equations hold."""
        return [eqn for x in self.nodes if x.eqn is not None for eqn in _inside(x.eqn)]

    @property
    def numbers(self) -> set[float]:
        """All constants that occur in its equations."""
        found: list[Any] = [y for x in self.nodes for y in x.operands if not isinstance(y, Curve)]
        found += [v.val for eqn in self.inside for v in eqn.invars if isinstance(v, core.Literal)]
        return {float(np.asarray(x, np.float64)) for x in found if np.size(x) == 1}

    @functools.cached_property
    def dtypes(self) -> set[Any]:
        """All dtypes that its equations compute in."""
        found = {jnp.dtype(v.aval.dtype) for eqn in self.inside for v in eqn.outvars}
        found |= {x.dtype for x in self.nodes}
        return {dtype for dtype in found if jnp.issubdtype(dtype, jnp.inexact)}

    def __call__(self, x: np.ndarray, rounded: bool = False) -> Dual:
        """Evaluates the curve at x; `rounded` rounds every result to its equation's dtype."""
        found = {node: Dual(x, np.ones_like(x)) for node in self.roots}
        for node in self.nodes:
            operands = [
                found[y] if isinstance(y, Curve) else Dual(np.float64(y)) for y in node.operands
            ]
            if node.eqn is not None:
                found[node] = _evaluate(node.eqn, operands, rounded)
        return Dual(*(np.broadcast_to(np.asarray(y, np.float64), x.shape) for y in found[self]))


def logits(dtype: Any) -> Curve:
    """Returns the curve of the logits themselves."""
    return Curve(None, (), jnp.dtype(dtype), 1.0)


def then(eqn: Any, operands: Sequence[Curve | float]) -> Curve | None:
    """Returns the curve of an equation's result; None if it cannot be evaluated."""
    if len(eqn.outvars) != 1 or not _is_known(eqn):
        return None
    if not all(_is_known(e) and len(e.outvars) == 1 for e in _inside(eqn)):
        return None
    dtype = jnp.dtype(eqn.outvars[0].aval.dtype)
    return Curve(eqn, tuple(operands), dtype, _slope(eqn.primitive.name, operands))


def _slope(name: str, operands: Sequence[Curve | float]) -> float | None:
    """Returns the slope of the result of an equation on one linear curve; None for others."""
    numbers = [x for x in operands if not isinstance(x, Curve)]
    curves = [x for x in operands if isinstance(x, Curve)]
    slope = curves[0].slope if len(curves) == 1 else None
    if slope is None or name in ("convert_element_type", "copy", "name"):
        return slope
    if name == "neg":
        return -slope
    if name == "mul":
        return slope * numbers[0]
    if name == "div" and isinstance(operands[0], Curve) and numbers[0]:
        return slope * (1 / numbers[0])
    return None


def erfc(x: Any) -> Any:
    """Computes 1 - erf(x), without cancellation."""
    return np.vectorize(math.erfc, otypes=[np.float64])(x)


def logistic(x: Any) -> Any:
    """Computes 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def _div(x: Dual, y: Dual) -> Dual:
    value = np.divide(x.value, y.value)
    return Dual(value, np.divide(x.slope, y.value) - value * np.divide(y.slope, y.value))


def _extremum(pick: Any, is_first: Any) -> Callable[..., Dual]:
    """Returns the rule of max or min. As in JAX, equal operands each get half of the slope."""

    def rule(x: Dual, y: Dual) -> Dual:
        equal = x.value == y.value
        share = np.where(equal, 0.5, np.where(is_first(x.value, y.value), 1.0, 0.0))
        return Dual(pick(x.value, y.value), share * x.slope + (1 - share) * y.slope)

    return rule


def _clamp(low: Dual, x: Dual, high: Dual) -> Dual:
    inside = (x.value > low.value) & (x.value < high.value)
    value = np.minimum(np.maximum(x.value, low.value), high.value)
    return Dual(value, np.where(inside, x.slope, 0.0))


def _select(which: Dual, no: Dual, yes: Dual) -> Dual:
    mask = np.asarray(which.value, bool)
    return Dual(*(np.where(mask, b, a) for a, b in zip(no, yes, strict=True)))


def _of_one(value: Any, slope: Any) -> Callable[[Dual], Dual]:
    """Returns the rule of a function of one operand; `slope` takes the operand and the result."""

    def rule(x: Dual) -> Dual:
        y = value(x.value)
        return Dual(y, slope(x.value, y) * x.slope)

    return rule


def _flat(value: Any) -> Callable[..., Dual]:
    return lambda *operands: Dual(value(*(x.value for x in operands)))


_ROOT_PI = math.sqrt(math.pi)
#: Value and slope, as JAX computes them, by primitive. Without a rule there is no curve.
_RULES: dict[str, Callable[..., Dual]] = {
    **{name: _flat(OF_TWO[name]) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    **dict.fromkeys(("convert_element_type", "copy", "name"), lambda x: x),
    "abs": _of_one(np.abs, lambda x, _: np.sign(x)),
    "add": lambda x, y: Dual(x.value + y.value, x.slope + y.slope),
    "and": _flat(np.logical_and),
    "clamp": _clamp,
    "div": _div,
    "erf": _of_one(lambda x: 1 - erfc(x), lambda x, _: 2 / _ROOT_PI * np.exp(-x * x)),
    "erfc": _of_one(erfc, lambda x, _: -2 / _ROOT_PI * np.exp(-x * x)),
    "exp": _of_one(np.exp, lambda _, y: y),
    "expm1": _of_one(np.expm1, lambda _, y: y + 1),
    "log": _of_one(np.log, lambda x, _: np.divide(1, x)),
    "log1p": _of_one(np.log1p, lambda x, _: np.divide(1, 1 + x)),
    "logistic": _of_one(logistic, lambda _, y: y * (1 - y)),
    "max": _extremum(np.maximum, np.greater),
    "min": _extremum(np.minimum, np.less),
    "mul": lambda x, y: Dual(x.value * y.value, x.slope * y.value + x.value * y.slope),
    "neg": lambda x: Dual(-x.value, -x.slope),
    "not": _flat(np.logical_not),
    "or": _flat(np.logical_or),
    "select_n": _select,
    "sign": _flat(np.sign),
    "sqrt": _of_one(np.sqrt, lambda _, y: np.divide(0.5, y)),
    "square": _of_one(np.square, lambda x, _: 2 * x),
    "stop_gradient": lambda x: Dual(x.value),
    "sub": lambda x, y: Dual(x.value - y.value, x.slope - y.slope),
    "tanh": _of_one(np.tanh, lambda _, y: 1 - y * y),
}
#: Primitives that curves follow only if the operand is a single number.
_OF_NUMBERS = ("broadcast_in_dim", "reshape", "squeeze")
_PROGRAMS = {"custom_jvp_call": "call_jaxpr", "jit": "jaxpr"}
#: Names of the elementwise primitives that curves follow.
ELEMENTWISE = frozenset((*_RULES, "integer_pow", "custom_jvp_call"))


def _evaluate(eqn: Any, operands: list[Dual], rounded: bool, slopes: bool = True) -> Dual:
    """Computes an equation's only result; without `slopes`, its slope may be wrong."""
    name, params = eqn.primitive.name, eqn.params
    if name in _PROGRAMS:
        if name == "custom_jvp_call" and slopes:
            return _custom_jvp(eqn, operands, rounded)
        return _run(params[_PROGRAMS[name]], operands, rounded, slopes)[0]
    if name in _OF_NUMBERS:
        return operands[0]
    if name == "integer_pow":
        (x,), y = operands, params["y"]
        result = Dual(x.value ** float(y), y * x.value ** float(y - 1) * x.slope)
    else:
        result = _RULES[name](*operands)
    dtype = eqn.outvars[0].aval.dtype
    if dtype == np.bool_:
        return Dual(np.asarray(result.value, bool))
    if rounded:
        result = result._replace(value=np.asarray(result.value).astype(dtype).astype(np.float64))
    return Dual(np.asarray(result.value, np.float64), result.slope)


def _run(
    jaxpr: Any, operands: Sequence[Dual], rounded: bool, slopes: bool, consts: Any = ()
) -> list[Dual]:
    def run(eqn: Any, operands: list[Any]) -> list[Dual]:
        return [_evaluate(eqn, list(map(_dual, operands)), rounded, slopes)]

    return list(map(_dual, interpret(jaxpr, consts, operands, run)))


def _dual(x: Any) -> Dual:
    return x if isinstance(x, Dual) else Dual(np.asarray(x, np.float64))


def _custom_jvp(eqn: core.JaxprEqn, operands: list[Dual], rounded: bool) -> Dual:
    """Evaluates a custom_jvp function, with the slope by its JVP rule."""
    jaxpr, consts, zeros = jvp_rule(eqn)
    (value,) = _run(eqn.params["call_jaxpr"], operands, rounded, False)
    if zeros[0]:
        return Dual(value.value)
    both = [Dual(x.value) for x in operands] + [Dual(x.slope) for x in operands]
    results = _run(jaxpr, both, rounded, False, consts)
    return Dual(value.value, results[1].value)


def jvp_rule(eqn: core.JaxprEqn) -> tuple[Any, Any, Any]:
    """Returns a custom_jvp function's JVP rule: jaxpr, constants, and which tangents are zero."""
    rule = eqn.params["jvp_jaxpr_fun"]
    jaxpr, consts, zeros = rule.call_wrapped(*[False] * len(eqn.invars))
    # JAX returns arrays that the rule closes over apart from the program, as its first arguments.
    return core.ClosedJaxpr(jaxpr, consts) if consts else jaxpr, consts, zeros


def _inside(eqn: core.JaxprEqn, slopes: bool = True) -> Iterator[Any]:
    """Lists the equations of the programs that an equation holds; of JVP rules only if `slopes`."""
    name = eqn.primitive.name
    if name not in _PROGRAMS:
        return
    programs = [(eqn.params[_PROGRAMS[name]], slopes)]
    if name == "custom_jvp_call" and slopes:
        # A JVP rule often calls its function again; in the rule, only the function's value counts.
        programs.append((jvp_rule(eqn)[0], False))
    for program, more in programs:
        for inner in program.eqns:
            yield inner
            yield from _inside(inner, more)


def _is_known(eqn: Any) -> bool:
    """Whether an equation can be evaluated, apart from the equations that it holds."""
    name = eqn.primitive.name
    dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    if any(d is None or not (d == np.bool_ or jnp.issubdtype(d, jnp.inexact)) for d in dtypes):
        # The only integers allowed are literals that are cast at once.
        return name == "convert_element_type" and isinstance(eqn.invars[0], core.Literal)
    if name in _PROGRAMS:
        return not eqn.params.get("num_consts") and not any(eqn.params[_PROGRAMS[name]].consts)
    if name in _OF_NUMBERS:
        return eqn.invars[0].aval.size == 1
    return name in ELEMENTWISE
