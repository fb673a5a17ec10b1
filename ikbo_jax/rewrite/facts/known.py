"""Values that the program fixes: numbers without any input, such as a causal mask or a column.

`known` computes such a value from its producing equations, with NumPy; lookups and updates at fixed
positions, as of `.at[].set`, with JAX.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.values.equations import constant_array
from ikbo_jax.rewrite.values.jaxprs import interpret
from ikbo_jax.rewrite.values.lineage import Lazy, is_plain

#: The number of elements up to which a value is computed.
_LARGEST = 1 << 22
_DEPTH = 64


class _NotKnown(Exception):
    """Is raised where a value depends on an input, or its equation is not computed here."""


def known(ctx: Any, value: Any) -> np.ndarray | None:
    """Computes the value as an array of NumPy; None if it depends on inputs.

    The array broadcasts to the shape of the value: dimensions along which all elements are equal
    may have size 1.
    """
    try:
        return _known(ctx, value, _DEPTH)
    except _NotKnown:
        return None


def _known(ctx: Any, value: Any, depth: int) -> np.ndarray:
    if is_plain(value) and not isinstance(value, jax.core.Tracer):
        if np.size(value) > _LARGEST or jax.dtypes.issubdtype(
            getattr(value, "dtype", np.float32), jax.dtypes.extended
        ):
            raise _NotKnown
        return constant_array(value)
    if (entry := ctx.scope.find("known", id(value))) is not None:
        if entry[1] is None:
            raise _NotKnown
        return entry[1]
    is_array = is_plain(value) or type(value) is Lazy
    memory = (ctx.scope.owner([value]) if is_array else ctx.scope).known
    memory[id(value)] = value, None
    name, eqn, operands = ctx.made_by(value)
    computed = name in COMPUTED or name in _BY_JAX or name == "jit"
    if depth == 0 or not computed or len(eqn.outvars) != 1:
        raise _NotKnown
    (result,) = _computed(eqn, [_known(ctx, x, depth - 1) for x in operands])
    memory[id(value)] = value, result
    return result


def _computed(eqn: core.JaxprEqn, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Computes the results of an equation on arrays of NumPy."""
    name = eqn.primitive.name
    if any(getattr(v.aval, "size", 0) > _LARGEST for v in eqn.outvars):
        raise _NotKnown
    if name == "jit":
        program = eqn.params["jaxpr"]
        return interpret(program, program.consts, arrays, _computed)
    if name not in COMPUTED and name not in _BY_JAX or eqn.effects:
        raise _NotKnown
    full = [
        np.broadcast_to(constant_array(x), v.aval.shape)  # type: ignore[attr-defined]
        for x, v in zip(arrays, eqn.invars, strict=True)
    ]
    if name in _BY_JAX:
        return [_by_jax(eqn, full)]
    aval: Any = eqn.outvars[0].aval
    with np.errstate(all="ignore"):
        result = np.asarray(COMPUTED[name](eqn.params, *full)).astype(aval.dtype)
        if not _is_exact(name, full, result):
            raise _NotKnown
    return [result]


def _is_exact(name: str, operands: Sequence[np.ndarray], result: np.ndarray) -> bool:
    """Whether an equation on floating-point numbers, or a cast, rounds nothing.

    XLA multiplies by 1 / 3 instead of dividing by 3, adds products without rounding them, and
    leaves out casts to 16 bits and back. Only where nothing is rounded, the result is the same.
    """
    if name not in _ROUNDED or operands[0].dtype.kind in "biu" and result.dtype.kind in "biu":
        return True
    wide = [x.astype(np.float64) for x in (*operands, result)]
    if name == "convert_element_type":
        # A cast to integers drops a fraction, but has no result for numbers that they cannot hold.
        into_integers = result.dtype.kind in "iu"
        return np.array_equal(np.trunc(wide[0]) if into_integers else wide[0], wide[-1])
    if name == "cumsum" or result.dtype == np.float64:
        most = 2.0 ** jax.numpy.finfo(result.dtype).nmant
        sums = [np.abs(wide[0]).sum()] if name == "cumsum" else []
        return all(np.all((x == np.trunc(x)) & (np.abs(x) <= most)) for x in (*wide, *sums))
    x, y, z = wide
    if name == "div":
        return bool(np.all(z * y == x))
    if name == "mul":
        return np.array_equal(x * y, z)
    y = -y if name == "sub" else y
    # The rounding error of a sum.
    rest = z - x
    return bool(np.all((x - (z - rest)) + (y - rest) == 0))


def _by_jax(eqn: core.JaxprEqn, operands: list[np.ndarray]) -> np.ndarray:
    """Runs an equation that moves elements, or computes with integers."""
    name, dtypes = eqn.primitive.name, {x.dtype for x in operands}
    if not _BY_JAX[name] and any(dtype.kind not in "iub" for dtype in dtypes):
        raise _NotKnown
    if name == "scatter":
        # Which of several updates of an element counts is not defined.
        _, indices, updates = operands
        if indices.size != indices.shape[-1] and (updates != updates.flat[:1]).any():
            raise _NotKnown
    with jax.ensure_compile_time_eval():
        arrays = [jax.numpy.asarray(x) for x in operands]
        return np.asarray(eqn.primitive.bind(*arrays, **eqn.params))


#: Primitives of `_by_jax`, and whether they only move elements.
_BY_JAX = {
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "gather", "pad", "scatter"), True),
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_sum", "scatter-add", "scatter-mul"), False
    ),
}
_ROUNDED = ("add", "convert_element_type", "cumsum", "div", "mul", "sub")


def expanded(params: Any, x: Any) -> Any:
    """Adds the new dimensions of a `broadcast_in_dim`, of size 1."""
    shape = [1] * len(params["shape"])
    for d, target in enumerate(params["broadcast_dimensions"]):
        shape[target] = x.shape[d]
    return x.reshape(shape)


def positions(shape: Sequence[int], dim: int) -> np.ndarray:
    """Returns 0, 1, ... along a dimension of an array; the other dimensions have size 1."""
    return np.arange(shape[dim]).reshape([n if d == dim else 1 for d, n in enumerate(shape)])


def cuts(params: Any) -> list[slice]:
    """Returns what a `slice` keeps of each dimension."""
    starts, limits = params["start_indices"], params["limit_indices"]
    return list(map(slice, starts, limits, params["strides"] or [1] * len(starts)))


def _divided(name: str) -> Callable[..., Any]:
    def compute(params: Any, x: Any, y: Any) -> Any:
        if name == "div" and x.dtype.kind == "f":
            return x / y
        if x.dtype.kind not in "iu" or (y == 0).any():
            raise _NotKnown
        return np.fmod(x, y) if name == "rem" else np.sign(x) * np.sign(y) * (abs(x) // abs(y))

    return compute


def _of_two(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda params, x, y: function(x, y)


_OPERATORS = ("add", "eq", "ge", "gt", "le", "lt", "mul", "ne", "sub")
#: Functions of two numbers, or of arrays of NumPy, by primitive.
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    "max": np.maximum,
    "min": np.minimum,
}
#: Functions of an equation's parameters and its operands, arrays of NumPy, by primitive.
COMPUTED: dict[str, Callable[..., Any]] = {
    **{name: _of_two(function) for name, function in OF_TWO.items()},
    **dict.fromkeys(("convert_element_type", "copy", "pvary", "stop_gradient"), lambda _, x: x),
    "abs": lambda _, x: np.abs(x),
    "and": _of_two(operator.and_),
    "broadcast_in_dim": lambda params, x: np.broadcast_to(expanded(params, x), params["shape"]),
    "clamp": lambda _, low, x, high: np.minimum(np.maximum(x, low), high),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "cumsum": lambda p, x: (
        np.flip(np.cumsum(np.flip(x, p["axis"]), p["axis"]), p["axis"])
        if p["reverse"]
        else np.cumsum(x, p["axis"])
    ),
    "div": _divided("div"),
    "iota": lambda p: np.broadcast_to(positions(p["shape"], p["dimension"]), p["shape"]),
    "neg": lambda _, x: -x,
    "not": lambda _, x: ~x,
    "or": _of_two(operator.or_),
    "rem": _divided("rem"),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "select_n": lambda _, which, *cases: np.choose(
        np.broadcast_to(which, cases[0].shape).astype(np.intp), cases
    ),
    "sign": lambda _, x: np.sign(x),
    "slice": lambda params, x: x[tuple(cuts(params))],
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "tile": lambda params, x: np.tile(x, params["reps"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "xor": _of_two(operator.xor),
}
