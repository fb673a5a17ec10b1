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

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
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
        at, (_, logits, is_exponential) = found[0], known[found[0]]
        if name == "exp" or (name == "div" and is_exponential and at == 0):
            x = self.by(x, float(jnp.finfo(jnp.float32).eps) / 2 * logits)
            return self._keep(x, logits, True)
        if len(operands) == 1 and name in (*_MOVES, "neg", "reduce_max"):
            moves = _same if name == "neg" else _PRIMITIVES[name]
            return self._keep(x, moves(eqn, logits), is_exponential)
        if is_exponential or name not in ("add", "sub", "max", "min", "select_n", "mul", "div"):
            return x
        zeros = np.zeros(x.shape)
        of_each = [zeros if of is None else zeros + of[1] for of in known]
        if name == "select_n":
            return self._keep(x, _select(eqn, operands[0][0], *of_each[1:]), False)
        if name not in ("mul", "div"):
            return self._keep(x, sum(of_each), False)
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
    for inner in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if inner in eqn.params:
            return _call(eqn.params[inner], operands, rounding)
    if name not in _PRIMITIVES:
        raise UnknownPrimitive(name)
    found = _PRIMITIVES[name](eqn, *(x for x, _ in operands))
    results = list(found) if eqn.primitive.multiple_results else [found]
    dtypes = [v.aval.dtype for v in eqn.outvars]
    results = [
        np.asarray(x, np.float64 if is_floating(d) else d)
        for x, d in zip(results, dtypes, strict=True)
    ]
    for x, v in zip(results, eqn.outvars, strict=True):
        assert x.shape == v.aval.shape, (eqn, x.shape)
    magnitudes = [np.abs(x) for x in results]
    if len(results) == 1 and is_floating(dtypes[0]):
        magnitudes = [_magnitude(eqn, operands, results[0])]
    if name not in _EXACT and rounding is not EXACT:
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
        tuple(np.stack([step[n][part] for step in each]) for part in (0, 1))
        for n in range(len(each[0]))
    ]
    return [*state, *stacked]


def _while(eqn: Any, operands: list[Pair], rounding: Any) -> list[Pair]:
    p = eqn.params
    first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    state = operands[second:]
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
        return _PRIMITIVES[name](eqn, operands[0][0], *magnitudes[1:])
    if name == "clamp":
        return np.abs(result)
    if name in ("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice"):
        whole = [
            x if is_floating(x.dtype) else y for (y, _), x in zip(operands, magnitudes, strict=True)
        ]
        return np.abs(_PRIMITIVES[name](eqn, *whole))
    if name in _LINEAR and all(is_floating(x.dtype) for x, _ in operands):
        return np.asarray(_PRIMITIVES[name](eqn, *magnitudes))
    return np.abs(result)


# The primitives. Each takes the equation and the values of its operands.


def _dot(eqn: Any, x: Array, y: Array) -> Array:
    (x_contract, y_contract), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    of_x = [next(letters) for _ in range(x.ndim)]
    of_y = [next(letters) for _ in range(y.ndim)]
    for a, b in zip((*x_contract, *x_batch), (*y_contract, *y_batch), strict=True):
        of_y[b] = of_x[a]
    out = [of_x[d] for d in x_batch]
    out += [of_x[d] for d in range(x.ndim) if d not in (*x_contract, *x_batch)]
    out += [of_y[d] for d in range(y.ndim) if d not in (*y_contract, *y_batch)]
    return np.einsum(f"{''.join(of_x)},{''.join(of_y)}->{''.join(out)}", x, y)


def _broadcast(eqn: Any, x: Array, *_: Any) -> Array:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for d, target in enumerate(dims):
        inner[target] = x.shape[d]
    return np.broadcast_to(x.reshape(inner), shape)


def _select(_: Any, which: Array, *cases: Array) -> Array:
    which = np.broadcast_to(which, cases[0].shape).astype(int)
    return np.choose(which, cases)


def _mode(eqn: Any) -> str:
    return str(eqn.params["mode"]).lower()


def _windows(sizes: Any, numbers: Any, indices: Array, batching: Any, limits: Any):
    """Of each row of indices: its position, its starts, and whether it lies in bounds."""
    starts_of, operand_batching, indices_batching = batching
    last = [limit - size for limit, size in zip(limits, sizes, strict=True)]
    for at in np.ndindex(indices.shape[:-1]):
        starts = [0] * len(limits)
        for axis, start in zip(starts_of, indices[at].tolist(), strict=True):
            starts[axis] = start
        for axis, of in zip(operand_batching, indices_batching, strict=True):
            starts[axis] = at[of]
        clipped = [min(max(start, 0), most) for start, most in zip(starts, last, strict=True)]
        yield at, clipped, clipped == starts


def _gather(eqn: Any, x: Array, indices: Array) -> Array:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = {"f": np.nan, "b": True}.get(x.dtype.kind)
    if fill is None:
        fill = np.iinfo(x.dtype).min if x.dtype.kind == "i" else np.iinfo(x.dtype).max
    shape = eqn.outvars[0].aval.shape
    out = np.zeros(shape, x.dtype)
    batch_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    batching = (
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    for at, starts, inside in _windows(sizes, numbers, indices, batching, x.shape):
        window = x[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
        window = np.squeeze(window, tuple(gone))
        where: list[Any] = [slice(None)] * len(shape)
        for d, n in zip(batch_dims, at, strict=True):
            where[d] = n
        out[tuple(where)] = fill if "fill" in _mode(eqn) and not inside else window
    return out


def _scatter(eqn: Any, x: Array, indices: Array, updates: Array) -> Array:
    numbers, out = eqn.params["dimension_numbers"], np.array(x)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(x.ndim) if d not in gone]
    sizes = [1] * x.ndim
    for d, of in zip(kept, numbers.update_window_dims, strict=True):
        sizes[d] = updates.shape[of]
    batch_dims = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    batching = (
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    for at, starts, inside in _windows(sizes, numbers, indices, batching, x.shape):
        if not inside and "clip" not in _mode(eqn):
            continue
        where: list[Any] = [slice(None)] * updates.ndim
        for d, n in zip(batch_dims, at, strict=True):
            where[d] = n
        window = tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))
        update = updates[tuple(where)].reshape(sizes)
        adds = eqn.primitive.name == "scatter-add"
        out[window] = out[window] + update if adds else update
    return out


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, x: function(x, axis=tuple(eqn.params["axes"]))


def _pad(eqn: Any, x: Array, value: Array) -> Array:
    config = eqn.params["padding_config"]
    assert all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
    return np.pad(x, [c[:2] for c in config], constant_values=value)


def _slice(eqn: Any, x: Array) -> Array:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _dynamic_slice(eqn: Any, x: Array, *starts: Any) -> Array:
    sizes = eqn.params["slice_sizes"]
    starts = [int(np.clip(s, 0, n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(s, s + k) for s, k in zip(starts, sizes, strict=True))]


def _dynamic_update_slice(_: Any, x: Array, update: Array, *starts: Any) -> Array:
    sizes, out = update.shape, np.array(x)
    starts = [int(np.clip(s, 0, n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    out[tuple(slice(s, s + k) for s, k in zip(starts, sizes, strict=True))] = update
    return out


def _iota(eqn: Any) -> Array:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    inner = [n if a == d else 1 for a, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[d]).reshape(inner), shape)


def _top_k(eqn: Any, x: Array) -> tuple[Array, Array]:
    order = np.argsort(-x, axis=-1, kind="stable")[..., : eqn.params["k"]]
    return np.take_along_axis(x, order, -1), order


def _sort(eqn: Any, *xs: Array) -> list[Array]:
    order = np.argsort(xs[0], axis=eqn.params["dimension"], kind="stable")
    return [np.take_along_axis(x, order, eqn.params["dimension"]) for x in xs]


def _split(eqn: Any, x: Array) -> list[Array]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"])


def _cumulative(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(eqn: Any, x: Array) -> Array:
        axis, is_reversed = eqn.params["axis"], eqn.params["reverse"]
        x = np.flip(x, axis) if is_reversed else x
        x = function(x, axis=axis)
        return np.flip(x, axis) if is_reversed else x

    return run


def _away(x: Array) -> Array:
    """Rounded to whole numbers, halves away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def _bits(eqn: Any, x: Array) -> Array:
    """The bits of the value that the program has: one of its dtype, not of float64."""
    return x.astype(eqn.invars[0].aval.dtype).view(eqn.params["new_dtype"])


def _shift_right_logical(_: Any, x: Array, count: Array) -> Array:
    unsigned = x.view(f"u{x.dtype.itemsize}")
    return np.right_shift(unsigned, count.astype(unsigned.dtype)).view(x.dtype)


def _same(_: Any, x: Array, *__: Any) -> Array:
    return x


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *xs: function(*xs)


_PRIMITIVES: dict[str, Callable[..., Any]] = {
    "argmax": lambda eqn, x: np.argmax(x, axis=eqn.params["axes"][0]),
    "bitcast_convert_type": _bits,
    "broadcast_in_dim": _broadcast,
    "clamp": lambda _, low, x, high: np.minimum(np.maximum(x, low), high),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "cummax": _cumulative(np.maximum.accumulate),
    "cumsum": _cumulative(np.cumsum),
    "div": lambda eqn, x, y: x / y if x.dtype == np.float64 else (x / y).astype(int),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "empty2": lambda _: np.zeros(()),
    "erf": lambda _, x: 1 - _erfc(x),
    "erfc": lambda _, x: _erfc(x),
    "exp2": _plain(np.exp2),
    "gather": _gather,
    "integer_pow": lambda eqn, x: x ** eqn.params["y"],
    "iota": _iota,
    "logistic": lambda _, x: 1 / (1 + np.exp(-x)),
    "one_minus_square": lambda _, x: 1 - x * x,
    "not": lambda _, x: np.logical_not(x) if x.dtype == bool else np.invert(x),
    "pad": _pad,
    "polynomial": lambda _, x, *coefficients: np.polynomial.polynomial.polyval(x, coefficients),
    "pow": lambda _, x, y: np.power(x, np.asarray(y, np.float64)),
    "reduce_and": _reduce(np.all),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_or": _reduce(np.any),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "reshape": lambda eqn, x: x.reshape(eqn.params["new_sizes"]),
    "rev": lambda eqn, x: np.flip(x, tuple(eqn.params["dimensions"])),
    "round": lambda eqn, x: np.rint(x) if int(eqn.params["rounding_method"]) else _away(x),
    "rsqrt": lambda _, x: 1 / np.sqrt(x),
    "scatter": _scatter,
    "scatter-add": _scatter,
    "select_n": _select,
    "shift_right_logical": _shift_right_logical,
    "sign": _plain(np.sign),
    "slice": _slice,
    "sort": _sort,
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "split": _split,
    "squeeze": lambda eqn, x: np.squeeze(x, tuple(eqn.params["dimensions"])),
    "top_k": _top_k,
    "unstack": lambda eqn, x: list(np.moveaxis(x, eqn.params["axis"], 0)),
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
}
_PRIMITIVES |= {
    name: _plain(function)
    for name, function in {
        "abs": np.abs,
        "add": np.add,
        "add_any": np.add,
        "and": np.bitwise_and,
        "cos": np.cos,
        "eq": np.equal,
        "exp": np.exp,
        "expm1": np.expm1,
        "floor": np.floor,
        "ge": np.greater_equal,
        "gt": np.greater,
        "is_finite": np.isfinite,
        "le": np.less_equal,
        "log": np.log,
        "log1p": np.log1p,
        "le_to": np.less_equal,
        "lt": np.less,
        "lt_to": np.less,
        "max": np.maximum,
        "min": np.minimum,
        "mul": np.multiply,
        "ne": np.not_equal,
        "neg": np.negative,
        "or": np.bitwise_or,
        "rem": np.fmod,
        "shift_left": np.left_shift,
        "shift_right_arithmetic": np.right_shift,
        "sin": np.sin,
        "sqrt": np.sqrt,
        "square": np.square,
        "sub": np.subtract,
        "tanh": np.tanh,
    }.items()
}
_MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "copy_p", "convert_element_type"),
    *("name", "pad", "reduce_precision", "rev", "reshape", "slice", "squeeze", "stop_gradient"),
    *("transpose", "ikbo_note", "ikbo_plan", "ikbo_reverse_only"),
)
_PRIMITIVES |= {name: _same for name in _MOVES if name not in _PRIMITIVES}
#: Their magnitude is what they make of their operands' magnitudes.
_LINEAR = frozenset((*_MOVES, "cumsum", "dot_general", "mul", "reduce_sum"))
#: They round nothing. A cast does if it narrows, which the next equation repeats.
_EXACT = frozenset(
    (*_MOVES, "abs", "clamp", "gather", "max", "min", "neg", "reduce_max", "reduce_min")
    + (
        "select_n",
        "sign",
        "split",
        "dynamic_slice",
        "dynamic_update_slice",
        "empty2",
        "iota",
        "floor",
        "round",
        "sort",
        "top_k",
        "unstack",
    )
) - {"convert_element_type", "reduce_precision"}
