"""Checks of arguments that the ops share; an error quotes both conflicting values."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ikbo_jax.ops import dispatch, settings

#: Dtypes that the ops accept; the kernels accept fewer.
DTYPES = ("bfloat16", "float16", "float32")
#: Of a larger cap, the quotient score / cap is denormal for scores that matter, and devices make it
#: 0: with a cap of 1e38, all keys of a softmax had the same weight.
LARGEST_CAP = 2.0**100


def request(
    op: str, implementation: str | None, config: Any, arrays: Any, *config_types: type
) -> dispatch.Request:
    """Collects the caller's choice of an implementation; raises ValueError if it is contradictory.

    Also raises ValueError if an array is a shape without values, or if arrays lie apart.
    `arrays` are the op's, a tree, unchecked; `config_types` the classes of its kernels'
    configurations.
    """
    check_name("implementation", implementation, (None, *dispatch.IMPLEMENTATIONS))
    if config is not None and not isinstance(config, config_types):
        known = " or ".join(_with_article(t.__name__) for t in config_types)
        raise ValueError(f"config must be {known}, but is {config!r}")
    if config is not None and implementation == "xla":
        raise ValueError(f"implementation='xla' takes no config, but config is {config}")
    check_runnable(op, arrays)
    return dispatch.Request(
        op,
        implementation,
        config,
        dispatch.target_of_trace(arrays),
        precision=settings.matmul_precision(),
    )


def check_name(what: str, value: Any, known: Iterable[str | None], of: str = "") -> None:
    """Raises ValueError, quoting the value, unless it is a known name, or None if known."""
    known = tuple(known)
    if not isinstance(value, str | None) or value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"unknown {what} {value!r:.80}{of}; known: {names}")


def check_runnable(op: str, arrays: Any) -> None:
    """Raises ValueError unless all arrays have values, on the same devices if none is traced.

    Also raises it for a masked array of NumPy, some of whose values do not count, and for arrays of
    other libraries, of which JAX says only that it cannot trace them.
    """
    leaves = jax.tree.leaves(arrays)
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{op} takes arrays, but one is a ShapeDtypeStruct, {describe(leaf)}; shapes go to "
                "ikbo_jax.explain or jax.eval_shape, with the function"
            )
        if isinstance(leaf, np.ma.MaskedArray):
            # JAX refuses it only where no program for such shapes is compiled yet.
            raise ValueError(
                f"{op} takes no masked array, but one is {describe(leaf)}; fill it by .filled()"
            )
        if hasattr(leaf, "dtype") and not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            raise ValueError(
                f"{op} takes arrays of JAX or NumPy, but one is a {type(leaf).__name__}, "
                f"{describe(leaf)}; convert it by jnp.asarray"
            )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return
    placed = [x for x in leaves if isinstance(x, jax.Array) and x.committed]
    for x in placed[1:]:
        if x.sharding.device_set != placed[0].sharding.device_set:
            (a, a_on), (b, b_on) = ((describe(y), _devices(y)) for y in (placed[0], x))
            raise ValueError(
                f"{op} takes arrays on the same devices, but {a} is on {a_on} and {b} is on "
                f"{b_on}; jax.device_put moves arrays"
            )


def _devices(array: jax.Array) -> str:
    first, *others = sorted(array.sharding.device_set, key=str)
    return f"{first}" + (f" and {len(others)} more" if others else "")


def check_function(caller: str, fn: Any) -> None:
    """Raises TypeError unless `fn` is a function."""
    if not callable(fn):
        raise TypeError(
            f"pass the function and its arguments, {caller}(f, x), but fn is {describe(fn)}"
        )


def check_array(name: str, array: object, axes: str, like: tuple[str, Any] | None = None) -> None:
    """Raises ValueError unless `array` has the rank of `axes`, e.g. "[M, K]", and a known dtype.

    With `like`, the name of another array and this array, both must have one dtype.
    """
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    # A `PaddedWeight` has a shape and a dtype, but no values to index.
    if shape is None or dtype is None or not hasattr(array, "__getitem__"):
        raise ValueError(f"{name} must be an array of shape {axes}, but is {describe(array)}")
    if len(shape) != axes.count(",") + 1:
        raise ValueError(f"{name} must have shape {axes}, but has shape {shape}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"{name} must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, but is {dtype}")
    if like is not None and dtype != like[1].dtype:
        raise ValueError(f"{like[0]} is {like[1].dtype} but {name} is {dtype}")


def check_sizes(a_name: str, a: Any, b_name: str, b: Any, axes: Iterable[str]) -> None:
    """Raises ValueError unless `a` and `b` have equal sizes on every axis that has a name."""
    for axis, a_size, b_size in zip(axes, a.shape, b.shape, strict=True):
        if axis != " " and a_size != b_size:
            raise ValueError(f"{a_name} has {axis}={a_size} but {b_name} has {axis}={b_size}")


def check_attention(
    op: str, operands: tuple[Any, Any, Any], axes: str, kv_axes: str, concrete: str = ""
) -> None:
    """Raises ValueError, quoting both conflicting values, unless query, key and value agree.

    Args:
      axes: names of the query's axes, "B T N H"; the last two are heads and head width.
      kv_axes: names of the axes of key and value.
      concrete: a further axis of the key that must not be symbolic, besides heads and width.
    """
    query, key, value = operands
    names = kv_axes.split()
    check_array("query", query, f"[{', '.join(axes.split())}]")
    for name, array in (("key", key), ("value", value)):
        check_array(name, array, f"[{', '.join(names)}]", ("query", query))
    check_sizes("key", key, "value", value, names)
    check_sizes("query", query, "key", key, " " * (len(names) - 1) + "H")
    (*_, q_heads, width), (*_, kv_heads, _) = query.shape, key.shape
    if width < 1:
        raise ValueError(
            f"query must have a head width H of at least 1, but has shape {query.shape}"
        )
    if kv_heads < 1:
        raise ValueError(f"key must have at least 1 head, but has shape {key.shape}")
    further = {concrete: key.shape[names.index(concrete)]} if concrete else {}
    check_concrete(op, further | {"N": q_heads, "K": kv_heads, "H": width})
    if q_heads % kv_heads:
        raise ValueError(
            f"query has N={q_heads} heads, which is not a multiple of key's K={kv_heads}"
        )


def check_int32(name: str, array: object) -> None:
    """Raises ValueError unless `array` is an int32 array."""
    if getattr(array, "dtype", None) != "int32":
        is_integer = jax.numpy.issubdtype(getattr(array, "dtype", bool), jax.numpy.integer)
        remedy = "; convert it by .astype(np.int32)" if is_integer else ""
        raise ValueError(f"{name} must be an int32 array, but is {describe(array)}{remedy}")


def check_offsets(name: str, axis: str, array: Any) -> None:
    """Raises ValueError unless `array` is [axis + 1] int32."""
    check_int32(name, array)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} must have shape [{axis} + 1], but has shape {array.shape}")


def check_index(name: str, array: object, rows_name: str, axis: str, rows: int) -> None:
    """Raises ValueError unless `array` is [rows] int32; `rows` is `axis` of array `rows_name`."""
    check_int32(name, array)
    shape = getattr(array, "shape", None)
    if shape != (rows,):
        raise ValueError(f"{name} has shape {shape} but {rows_name} has {axis}={rows}")


def strongly_typed(arrays: Any) -> Any:
    """Removes weak types from the tree `arrays`: results have, and keep, the documented dtype."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", 0) else x,
        arrays,
    )


def describe(value: object) -> str:
    """Formats a value for an error: dtype and shape of an array, the type of any other value."""
    has_values = hasattr(value, "__getitem__") or isinstance(value, jax.ShapeDtypeStruct)
    if has_values and hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'AEIOUaeiou' else 'a'} {word}"


def finite_number(name: str, value: Any) -> float:
    """Returns `value` as a float; it must be a number that is finite in float32.

    A denormal float32 becomes 0, as devices take it: nothing downstream can tell them apart.
    Raises ValueError, quoting the value, for a bool, text, a complex number, an array of rank above
    0, a traced value, NaN, an infinity, and a number beyond float32's range.
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_real = not str(dtype).startswith(("bool", "complex"))
    is_number = hasattr(value, "__float__") and shape == () and is_real
    try:
        if isinstance(value, bool) or not is_number:
            raise TypeError(f"{type(value).__name__} is not a number")
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    except (TypeError, ValueError) as error:
        # `float` of a traced value raises one of these as well.
        is_plain = isinstance(value, (bool, str, bytes, np.bool_))
        what = f"{describe(value)}, {value!r:.80}" if is_plain else describe(value)
        raise ValueError(f"{name} must be a number known while tracing, but is {what}") from error
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(np.float32(number)))
    if not is_finite:
        beyond = ", beyond float32" if math.isfinite(number) else ""
        raise ValueError(f"{name} must be a finite number, but is {number}{beyond}")
    return 0.0 if abs(number) < float(np.finfo(np.float32).tiny) else number


def logit_cap(value: Any) -> float | None:
    """Returns a cap of scores as a float; raises ValueError unless it is None or above 0.

    Larger caps than `LARGEST_CAP` become that one.
    """
    if value is None:
        return None
    number = finite_number("logit_cap", value)
    if number <= 0:
        raise ValueError(f"logit_cap must be above 0 in float32, but is {value}")
    return min(number, LARGEST_CAP)


def flag(name: str, value: Any) -> bool:
    """Returns `value` as a bool; it must be one, or 0 or 1, of Python, NumPy or JAX.

    Raises ValueError, quoting the value, for anything else, such as the text "False", which Python
    takes for true, and for a traced value.
    """
    kinds = (int, np.bool_, np.integer, np.ndarray, jax.Array)
    has_values = not str(getattr(value, "dtype", "")).startswith("key")
    if isinstance(value, kinds) and has_values and not isinstance(value, jax.core.Tracer):
        known = np.asarray(value)
        if not known.shape and known in (0, 1):
            return bool(known)
    what = describe(value)
    if isinstance(value, (str, bytes, int)):
        what += f", {value!r:.80}"
    raise ValueError(f"{name} must be a bool known while tracing, but is {what}")


def check_concrete(op: str, sizes: dict[str, Any]) -> None:
    """Raises NotImplementedError if one of `sizes`, keyed by axis, is a symbolic dimension."""
    for axis, size in sizes.items():
        if dispatch.is_symbolic(size):
            raise NotImplementedError(
                f"{op}: {axis} is symbolic ({str(size)!r}), but every implementation needs it "
                f"concrete; export with a concrete {axis}"
            )
