"""What the primitives of JAX compute, in float64: for `float64_oracle`.

Each function takes the equation and the values of its operands. Most are NumPy's; some that are
rare run as JAX's own operations.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Array = np.ndarray


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


def select(_: Any, which: Array, *cases: Array) -> Array:
    which = np.broadcast_to(which, cases[0].shape).astype(int)
    return np.choose(which, cases)


def _mode(eqn: Any) -> str:
    return str(eqn.params["mode"]).lower()


def _windows(shape: Any, indices: Array, starts_of: Any, batching: Any, sizes: Any) -> Any:
    """Finds the window of `shape` that each row of indices names.

    Args:
      starts_of: for each number of a row, the axis at which it is the window's first position.
      batching: axes along which windows stand at the row's own position, and these axes of indices.
      sizes: of a window.

    Returns:
      For each axis, the positions in the windows, clipped, which broadcast to [*rows, *sizes]; and
      for each row, whether its window lies in bounds.
    """
    rows = indices.shape[:-1]
    starts = np.zeros((*rows, len(shape)), int)
    starts[..., list(starts_of)] = indices
    for axis, of in zip(*batching, strict=True):
        starts[..., axis] = np.indices(rows)[of]
    clipped = np.clip(starts, 0, np.subtract(shape, sizes))
    positions = [
        clipped[..., axis].reshape(*rows, *[1] * len(shape)) + _along(np.arange(size), axis, sizes)
        for axis, size in enumerate(sizes)
    ]
    return tuple(positions), (clipped == starts).all(-1)


def _along(x: Array, axis: int, shape: Any) -> Array:
    """A vector as an array of as many dimensions as `shape` that varies along one axis."""
    return x.reshape([len(x) if d == axis else 1 for d in range(len(shape))])


def _gather(eqn: Any, x: Array, indices: Array) -> Array:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = {"f": np.nan, "b": True}.get(x.dtype.kind)
    if fill is None:
        fill = np.iinfo(x.dtype).min if x.dtype.kind == "i" else np.iinfo(x.dtype).max
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    positions, inside = _windows(x.shape, indices, numbers.start_index_map, batching, sizes)
    rows = inside.ndim
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    out = np.squeeze(x[positions], tuple(rows + d for d in gone))
    if "fill" in _mode(eqn):
        out[~inside] = fill
    return np.moveaxis(out, range(rows, out.ndim), numbers.offset_dims)


def _scatter(eqn: Any, x: Array, indices: Array, updates: Array) -> Array:
    numbers, out = eqn.params["dimension_numbers"], np.array(x)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    rows = indices.ndim - 1
    updates = np.moveaxis(updates, numbers.update_window_dims, range(rows, updates.ndim))
    updates = np.expand_dims(updates, tuple(sorted(rows + d for d in gone)))
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    axes, sizes = numbers.scatter_dims_to_operand_dims, updates.shape[rows:]
    positions, inside = _windows(x.shape, indices, axes, batching, sizes)
    kept = inside | ("clip" in _mode(eqn))
    where = tuple(np.broadcast_to(at, updates.shape)[kept] for at in positions)
    if eqn.primitive.name == "scatter-add":
        np.add.at(out, where, updates[kept])
    else:
        out[where] = updates[kept]
    return out


def _by_jax(eqn: Any, *operands: Array) -> Any:
    """Runs an equation as JAX does, on float64 arrays; each new shape takes it some 10 ms."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, eqn.primitive.bind(*operands, **eqn.params))


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, x: function(x, axis=tuple(eqn.params["axes"]))


def _pad(eqn: Any, x: Array, value: Array) -> Array:
    config = [tuple(map(int, amounts)) for amounts in eqn.params["padding_config"]]
    # `inner` values stand between two elements.
    apart = [(n - 1) * inner + n for n, (_, _, inner) in zip(x.shape, config, strict=True)]
    spaced = np.full(apart, value, x.dtype)
    spaced[tuple(slice(None, None, inner + 1) for _, _, inner in config)] = x
    padded = np.pad(spaced, [np.maximum(c[:2], 0) for c in config], constant_values=value)
    # Negative amounts cut elements.
    cuts = (slice(max(-low, 0), min(high, 0) or None) for low, high, _ in config)
    return padded[tuple(cuts)]


def _slice(eqn: Any, x: Array) -> Array:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _dynamic_slice(eqn: Any, x: Array, *starts: Any) -> Array:
    sizes = eqn.params["slice_sizes"]
    first = [int(np.clip(s, 0, n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(s, s + k) for s, k in zip(first, sizes, strict=True))]


def _iota(eqn: Any) -> Array:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    return np.broadcast_to(_along(np.arange(shape[d]), d, shape), shape)


def _split(eqn: Any, x: Array) -> list[Array]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"])


def _away(x: Array) -> Array:
    """Rounded to whole numbers, halves away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def _bits(eqn: Any, x: Array) -> Array:
    """The bits of the value that the program has: one of its dtype, not of float64."""
    return x.astype(eqn.invars[0].aval.dtype).view(eqn.params["new_dtype"])


def _shift_right_logical(_: Any, x: Array, count: Array) -> Array:
    unsigned = x.view(f"u{x.dtype.itemsize}")
    return np.right_shift(unsigned, count.astype(unsigned.dtype)).view(x.dtype)


def same(_: Any, x: Array, *__: Any) -> Array:
    return x


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *xs: function(*xs)


PRIMITIVES: dict[str, Callable[..., Any]] = {
    "argmax": lambda eqn, x: np.argmax(x, axis=eqn.params["axes"][0]),
    "bitcast_convert_type": _bits,
    "broadcast_in_dim": _broadcast,
    "clamp": lambda _, low, x, high: np.minimum(np.maximum(x, low), high),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "div": lambda eqn, x, y: x / y if x.dtype == np.float64 else (x / y).astype(int),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "empty2": lambda _: np.zeros(()),
    "erf": lambda _, x: 1 - _erfc(x),
    "erfc": lambda _, x: _erfc(x),
    "gather": _gather,
    "integer_pow": lambda eqn, x: x ** eqn.params["y"],
    "iota": _iota,
    "logistic": lambda _, x: 1 / (1 + np.exp(-x)),
    "one_minus_square": lambda _, x: 1 - x * x,
    "not": lambda _, x: np.logical_not(x) if x.dtype == bool else np.invert(x),
    "pad": _pad,
    "polynomial": lambda _, x, *coefficients: np.polynomial.polynomial.polyval(x, coefficients),
    "platform_index": lambda eqn: eqn.params["platforms"].index(None),
    "pow": lambda _, x, y: np.power(x, np.asarray(y, np.float64)),
    "reduce_and": _reduce(np.all),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_or": _reduce(np.any),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "reshape": lambda eqn, x: np.transpose(
        x, range(x.ndim) if eqn.params["dimensions"] is None else eqn.params["dimensions"]
    ).reshape(eqn.params["new_sizes"]),
    "rev": lambda eqn, x: np.flip(x, tuple(eqn.params["dimensions"])),
    "round": lambda eqn, x: np.rint(x) if int(eqn.params["rounding_method"]) else _away(x),
    "rsqrt": lambda _, x: 1 / np.sqrt(x),
    "scatter": _scatter,
    "scatter-add": _scatter,
    "select_n": select,
    "shift_right_logical": _shift_right_logical,
    "slice": _slice,
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "optimization_barrier": lambda _, *operands: operands,
    "split": _split,
    "squeeze": lambda eqn, x: np.squeeze(x, tuple(eqn.params["dimensions"])),
    "tile": lambda eqn, x: np.tile(x, eqn.params["reps"]),
    "unstack": lambda eqn, x: list(np.moveaxis(x, eqn.params["axis"], 0)),
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
}
PRIMITIVES |= dict.fromkeys(
    ("cummax", "cumsum", "dynamic_update_slice", "reduce_window_sum", "sort", "top_k"), _by_jax
)
PRIMITIVES |= {
    name: _plain(getattr(np, name))
    for name in (
        *("abs", "add", "cos", "exp", "exp2", "expm1", "floor", "log", "log1p", "sign", "sin"),
        *("sqrt", "square", "tanh"),
    )
}
PRIMITIVES |= {
    name: _plain(function)
    for name, function in {
        "add_any": np.add,
        "and": np.bitwise_and,
        "eq": np.equal,
        "ge": np.greater_equal,
        "gt": np.greater,
        "is_finite": np.isfinite,
        "le": np.less_equal,
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
        "sub": np.subtract,
        "xor": np.bitwise_xor,
    }.items()
}
MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "copy_p", "convert_element_type"),
    *("name", "pad", "reduce_precision", "rev", "reshape", "slice", "squeeze", "stop_gradient"),
    *(
        "tile",
        "transpose",
        "sharding_constraint",
        "reshard",
        "ikbo_note",
        "ikbo_plan",
        "ikbo_reverse_only",
    ),
)
PRIMITIVES |= {name: same for name in MOVES if name not in PRIMITIVES}
#: Their magnitude is what they make of their operands' magnitudes.
LINEAR = frozenset((*MOVES, "cumsum", "dot_general", "mul", "reduce_sum"))
#: They round nothing. A cast does if it narrows, which the next equation repeats.
EXACT_PRIMITIVES = {
    *(*MOVES, "abs", "clamp", "gather", "max", "min", "neg", "reduce_max", "reduce_min"),
    *("select_n", "sign", "split", "dynamic_slice", "dynamic_update_slice", "empty2", "iota"),
    *("floor", "optimization_barrier", "round", "sort", "top_k", "unstack"),
} - {"convert_element_type", "reduce_precision"}
