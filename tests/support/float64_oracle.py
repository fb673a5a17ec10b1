"""Evaluates a traced program with NumPy, in float64 or as it is written: no program is compiled.

The program is traced at its own dtypes, so that its constants are the numbers that it really uses.
Then each equation runs on float64 arrays, whatever floating-point dtype the equation has. Its
result is

* left as it is: the oracle (`EXACT`);
* rounded to the equation's dtype: what the program computes (`ROUNDED`);
* rounded in the first equations alone (`Leading`): what a program computes that leaves the other
  roundings out; or
* moved at random by up to one rounding of that dtype (`Moved`): how far the program's results then
  move tells how well the program determines them.

A compiled program takes 0.3 s and more however small it is, an evaluation some milliseconds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from float64_primitives import EXACT_PRIMITIVES, LINEAR, MOVES, PRIMITIVES, same, select
from jax.extend import core

Array = np.ndarray
EXACT, ROUNDED = "exact", "rounded"
#: A value and the magnitude of the terms that it is a sum of: |value| if it is no sum.
Pair = tuple[Array, Array]


def is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def as_float64(x: Any) -> Array:
    """Floating-point arrays in float64, the others as they are."""
    x = np.asarray(x)
    return x.astype(np.float64) if is_floating(x.dtype) else x


class Leading:
    """Rounds the first results of a program alone.

    Attributes:
      left: how many are still to be rounded.
    """

    def __init__(self, count: int) -> None:
        self.left = count


class Moved:
    """Moves results at random.

    Every result is moved by up to one rounding of its dtype. A softmax's weights are moved besides
    as attention moves them that recomputes them as exp(logit - lse), or merges two parts by their
    lse: by up to one float32 rounding of their logit and one of the row's largest. In e / sum(e)
    such errors cancel for the largest weight. They stem from products: a number that a mask puts
    in has none.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        # By identity of a value: the value, the products' magnitude in it, and whether it is the
        # exponential of such a value. Entries hold the value, so that no identity is used again.
        self._logits: dict[int, tuple[Array, Array, bool]] = {}

    def by(self, x: Array, roundings: Any) -> Array:
        """x, moved by up to so many roundings, each a share of x."""
        return x * (1 + roundings * self._rng.uniform(-1, 1, x.shape))

    def weighed(self, eqn: Any, operands: list[Pair], result: Pair) -> Array:
        """The result of an equation, moved if it is a softmax's weight."""
        name, (x, magnitude) = eqn.primitive.name, result
        known = [self._logits.get(id(value)) for value, _ in operands]
        found = [n for n, of in enumerate(known) if of is not None]
        if name == "dot_general":
            return x if found else self._keep(x, magnitude, False)
        if not found:
            return x
        at = found[0]
        _, logits, is_exponential = next(of for of in known if of is not None)
        if name == "exp" or (name == "div" and is_exponential and at == 0):
            x = self.by(x, float(jnp.finfo(jnp.float32).eps) / 2 * logits)
            return self._keep(x, logits, True)
        if len(operands) == 1 and name in (*MOVES, "neg", "reduce_max"):
            moves = same if name == "neg" else PRIMITIVES[name]
            return self._keep(x, moves(eqn, logits), is_exponential)
        if is_exponential or name not in ("add", "sub", "max", "min", "select_n", "mul", "div"):
            return x
        zeros = np.zeros(x.shape)
        of_each = [zeros if of is None else zeros + of[1] for of in known]
        if name == "select_n":
            return self._keep(x, select(eqn, operands[0][0], *of_each[1:]), False)
        if name not in ("mul", "div"):
            return self._keep(x, np.sum(of_each, axis=0), False)
        if len(found) > 1 or (name == "div" and at == 1):
            return x
        factor = np.abs(operands[1 - at][0])
        return self._keep(x, of_each[at] * (factor if name == "mul" else 1 / factor), False)

    def _keep(self, x: Array, logits: Array, is_exponential: bool) -> Array:
        self._logits[id(x)] = (x, logits, is_exponential)
        return x


#: What happens to results: `EXACT` or `ROUNDED`, or one of the classes above.
Rounding = Leading | Moved | str


class UnknownPrimitive(Exception):
    """No evaluation is known of an equation that the results need."""


def evaluate(program: Any, args: Sequence[Any], rounding: Rounding = EXACT) -> list[Pair]:
    """Results of a closed jaxpr on arrays of any dtypes, in float64, and their magnitudes.

    Args:
      program: what `jax.make_jaxpr` returns.
      args: arrays, flat.
      rounding: what happens to each equation's result.

    Raises:
      UnknownPrimitive: the program must be compiled to be run.
    """
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in program.in_avals):
        raise UnknownPrimitive("random keys")
    consts = [as_float64(c) for c in program.consts]
    with np.errstate(all="ignore"):
        pairs = [(x, np.abs(x)) for x in map(as_float64, [*consts, *args])]
        return _run(program.jaxpr, pairs[: len(consts)], pairs[len(consts) :], rounding)


def _run(jaxpr: Any, consts: Any, args: Any, rounding: Any) -> list[Pair]:
    env: dict[Any, Pair] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(v: Any) -> Pair:
        if isinstance(v, core.Literal):
            x = as_float64(v.val)
            return x, np.abs(x)
        return env[v]

    # What a derivative does not need may be of a primitive that is not known here.
    needed = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
    for eqn in reversed(eqns):
        found = _equation(eqn, [read(v) for v in eqn.invars], rounding)
        env |= zip(eqn.outvars, found, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Pair], rounding: Any) -> list[Pair]:
    name = eqn.primitive.name
    if name in _LOOPS:
        return _LOOPS[name](eqn, operands, rounding)
    if name == "ikbo_without_gradient":
        return operands[:1]
    for inner in ("jaxpr", "program", "call_jaxpr", "fun_jaxpr", "call", "elsewhere"):
        if inner in eqn.params:
            return _call(eqn.params[inner], operands, rounding)
    if name not in PRIMITIVES:
        raise UnknownPrimitive(name)
    found = PRIMITIVES[name](eqn, *(x for x, _ in operands))
    results = list(found) if eqn.primitive.multiple_results else [found]
    dtypes = [v.aval.dtype for v in eqn.outvars]
    results = [
        np.asarray(x, np.float64 if is_floating(d) else d)
        for x, d in zip(results, dtypes, strict=True)
    ]
    for x, v in zip(results, eqn.outvars, strict=True):
        assert x.shape == v.aval.shape, (eqn, x.shape)
    magnitudes = [np.abs(x) for x in results]
    has_magnitudes = rounding is EXACT or isinstance(rounding, Moved)
    if has_magnitudes and len(results) == 1 and is_floating(dtypes[0]):
        magnitudes = [_magnitude(eqn, operands, results[0])]
    if name not in EXACT_PRIMITIVES and rounding is not EXACT:
        results = [_rounded(x, d, rounding) for x, d in zip(results, dtypes, strict=True)]
    if isinstance(rounding, Moved) and len(results) == 1 and is_floating(dtypes[0]):
        results = [rounding.weighed(eqn, operands, (results[0], magnitudes[0]))]
    return list(zip(results, magnitudes, strict=True))


def _rounded(x: Array, dtype: Any, rounding: Any) -> Array:
    if not is_floating(dtype):
        return x
    if isinstance(rounding, Moved):
        return rounding.by(x, float(jnp.finfo(dtype).eps) / 2)
    if isinstance(rounding, Leading):
        rounding.left -= 1
        if rounding.left < 0:
            return x
    return x.astype(dtype).astype(np.float64)


def _call(program: Any, operands: list[Pair], rounding: Any) -> list[Pair]:
    consts = [(as_float64(c), np.abs(as_float64(c))) for c in getattr(program, "consts", ())]
    return _run(getattr(program, "jaxpr", program), consts, operands, rounding)


def _scan(eqn: Any, operands: list[Pair], rounding: Any) -> list[Pair]:
    p = eqn.params
    consts, carry, _ = (len(group) for group in p["ft_in"].unpack())
    fixed, state = operands[:consts], operands[consts : consts + carry]
    per_step = operands[consts + carry :]
    steps = range(p["length"])
    each = []
    for n in reversed(steps) if p["reverse"] else steps:
        slices = [(x[n], m[n]) for x, m in per_step]
        found = _call(p["jaxpr"], [*fixed, *state, *slices], rounding)
        state = found[:carry]
        each.append(found[carry:])
    each = each[::-1] if p["reverse"] else each
    stacked = [
        (np.stack([step[n][0] for step in each]), np.stack([step[n][1] for step in each]))
        for n in range(len(each[0]))
    ]
    return [*state, *stacked]


def _while(eqn: Any, operands: list[Pair], rounding: Any) -> list[Pair]:
    p = eqn.params
    first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    state = operands[second:]
    if p["cond_jaxpr"].out_avals[0].shape:
        raise UnknownPrimitive("while of a batch, of which each element has its own end")
    while _call(p["cond_jaxpr"], [*operands[:first], *state], rounding)[0][0]:
        state = _call(p["body_jaxpr"], [*operands[first:second], *state], rounding)
    return state


def _cond(eqn: Any, operands: list[Pair], rounding: Any) -> list[Pair]:
    branches = eqn.params["branches"]
    taken = int(np.clip(int(operands[0][0]), 0, len(branches) - 1))
    return _call(branches[taken], operands[1:], rounding)


_LOOPS: dict[str, Callable[..., list[Pair]]] = {"scan": _scan, "while": _while, "cond": _cond}


def _magnitude(eqn: Any, operands: list[Pair], result: Array) -> Array:
    name = eqn.primitive.name
    magnitudes = [m for _, m in operands]
    if name in ("add", "sub", "add_any"):
        return magnitudes[0] + magnitudes[1]
    if name == "div":
        return magnitudes[0] / np.abs(operands[1][0])
    if name in ("neg", "abs"):
        return magnitudes[0]
    if name == "select_n":
        return PRIMITIVES[name](eqn, operands[0][0], *magnitudes[1:])
    if name == "clamp":
        return np.abs(result)
    if name in ("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice"):
        whole = [
            x if is_floating(x.dtype) else y for (y, _), x in zip(operands, magnitudes, strict=True)
        ]
        return np.abs(PRIMITIVES[name](eqn, *whole))
    if name in LINEAR and all(is_floating(x.dtype) for x, _ in operands):
        return np.asarray(PRIMITIVES[name](eqn, *magnitudes))
    return np.abs(result)
