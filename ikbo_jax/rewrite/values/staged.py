"""Adds equations to the program that is being traced, in less time than `jax.lax`.

Most equations of a rewritten program have traced arrays as operands, and no programs among their
parameters. `Primitive.bind` spends half of its work on finding that out, for every operand again,
and the functions of `jax.lax` check their arguments besides. Here, such an equation is given to the
trace at once: 30 calls of functions instead of 60, or instead of 70 to 110 by way of `jax.lax`. All
other equations take the usual way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval
from jax.sharding import AxisType, PartitionSpec

from ikbo_jax.ops import explain

#: The type of values that are traced. Comparing with it takes less time than `isinstance`.
TRACER: Any = partial_eval.DynamicJaxprTracer
#: Primitives that hold no programs and that a trace processes as any other primitive.
_DIRECT = frozenset(
    x
    for x in vars(lax).values()
    if isinstance(x, core.Primitive) and x.name in explain.WITHOUT_PROGRAMS
)


def bind(
    primitive: core.Primitive,
    operands: Sequence[Any],
    params: dict[str, Any],
    invars: Sequence[Any] = (),
) -> Any:
    """`primitive.bind` on operands.

    Args:
      primitive: any primitive.
      operands: its operands.
      params: its parameters, as an equation holds them.
      invars: the operands of the equation that is run again. A literal among `operands` that is
        also the literal there needs no conversion.
    """
    if primitive in _DIRECT and (trace := _trace_of(operands)) is not None:
        tracers = operands
        info = source_info_util.current()
        for n, x in enumerate(operands):
            if type(x) is not TRACER:
                v = invars[n] if n < len(invars) else None
                if type(v) is not core.Literal or v.val is not x:
                    break
                tracers = [*tracers[:n], TRACER(trace, v.aval, v, info), *tracers[n + 1 :]]
        else:
            # A sharding of a conversion is a constraint on its result.
            if primitive is not lax.convert_element_type_p or params.get("sharding") is None:
                return trace.default_process_primitive(primitive, tracers, params, info)
    return primitive.bind(*operands, **primitive.get_bind_params(params))


def _trace_of(operands: Sequence[Any]) -> Any:
    """The current trace, if all tracers among the operands, at least one, are arrays of it.

    None if there is no trace, if a tracer belongs to another one, and if its type names a mesh.
    """
    trace = core.find_top_trace(())
    found = None
    for x in operands:
        if type(x) is TRACER:
            aval: Any = x.aval
            if x._trace is not trace or type(aval) is not jax.core.ShapedArray:
                return None
            if not aval.sharding.mesh.empty:
                return None
            found = trace
    return found


def is_local(aval: Any) -> bool:
    """Whether a value is an array whose type names no mesh."""
    return type(aval) is jax.core.ShapedArray and aval.sharding.mesh.empty


def _direct(primitive: core.Primitive, operands: Sequence[Any], **params: Any) -> Any:
    """The result of a primitive on tracers; None if `bind` would take the usual way."""
    for x in operands:
        if type(x) is not TRACER:
            return None
    trace = _trace_of(operands)
    if trace is None:
        return None
    merged = {**_params(primitive.name), **params}
    return trace.default_process_primitive(primitive, operands, merged)


@functools.cache
def _params(name: str) -> dict[str, Any]:
    """The parameters of an equation of a primitive, as the function of `jax.lax` sets them."""
    index, kept = jax.ShapeDtypeStruct((1, 1), "int32"), lax.GatherScatterMode.PROMISE_IN_BOUNDS
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    examples: dict[str, Callable[..., Any]] = {
        "broadcast_in_dim": lambda x, _: lax.broadcast_in_dim(x, (1, 2), (1, 0)),
        "concatenate": lambda x, _: lax.concatenate([x, x], 0),
        "convert_element_type": lambda x, _: lax.convert_element_type(x, "float16"),
        "gather": lambda x, index: lax.gather(x, index, numbers, (1, 1), mode=kept),
        "reshape": lambda x, _: lax.reshape(x, (2,)),
        "slice": lambda x, _: lax.slice(x, (0, 0), (1, 1)),
        "squeeze": lambda x, _: lax.squeeze(x, (1,)),
        "transpose": lambda x, _: lax.transpose(x, (1, 0)),
        "div": lambda x, _: lax.div(x, x),
        "dot_general": lambda x, _: lax.dot_general(x, x, (((0,), (0,)), ((), ()))),
        "exp": lambda x, _: lax.exp(x),
        "mul": lambda x, _: lax.mul(x, x),
        "reduce_max": lambda x, _: lax.reduce_max(x, (0,)),
        "reduce_sum": lambda x, _: lax.reduce_sum(x, (0,)),
        "select_n": lambda x, _: lax.select(lax.full((2, 1), True), x, x),
        "sub": lambda x, _: lax.sub(x, x),
    }
    args = jax.ShapeDtypeStruct((2, 1), "float32"), index
    *_, eqn = jax.make_jaxpr(examples[name])(*args).eqns
    return eqn.params


# These return what the functions of `jax.lax` with the same names return.


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a value; () for a Python number."""
    # `shape` of a tracer is looked up on the array type, by functions of Python.
    shape: Any = x.aval.shape if type(x) is TRACER else getattr(x, "shape", ())
    return tuple(shape)


def transpose(x: Any, permutation: Sequence[int]) -> Any:
    """`lax.transpose(x, permutation)`."""
    permutation = tuple(permutation)
    if permutation == tuple(range(len(permutation))):
        return x
    out = _direct(lax.transpose_p, (x,), permutation=permutation)
    return lax.transpose(x, permutation) if out is None else out


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """`lax.reshape(x, shape)`."""
    shape = tuple(shape)
    if type(x) is not TRACER:
        return lax.reshape(x, shape)
    if x.aval.shape == shape:
        return x
    out = _direct(lax.reshape_p, (x,), new_sizes=shape)
    return lax.reshape(x, shape) if out is None else out


def squeeze(x: Any, dimensions: Sequence[int]) -> Any:
    """`lax.squeeze(x, dimensions)`, for dimensions in ascending order."""
    dimensions = tuple(dimensions)
    out = _direct(lax.squeeze_p, (x,), dimensions=dimensions) if dimensions else None
    return lax.squeeze(x, dimensions) if out is None else out


def broadcast_in_dim(x: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """`lax.broadcast_in_dim(x, shape, dims)`."""
    shape, dims = tuple(shape), tuple(dims)
    out = _direct(lax.broadcast_in_dim_p, (x,), shape=shape, broadcast_dimensions=dims)
    return lax.broadcast_in_dim(x, shape, dims) if out is None else out


def expand_dims(x: Any, dimensions: Sequence[int]) -> Any:
    """`lax.expand_dims(x, dimensions)`, for dimensions in ascending order."""
    if type(x) is not TRACER or not dimensions:
        return lax.expand_dims(x, dimensions)
    shape = list(x.aval.shape)
    for d in dimensions:
        shape.insert(d, 1)
    return broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d not in dimensions])


def slice_of(x: Any, starts: Sequence[int], stops: Sequence[int], strides: Any = None) -> Any:
    """`lax.slice(x, starts, stops, strides)`."""
    starts, stops = tuple(starts), tuple(stops)
    strides = None if strides is None or all(n == 1 for n in strides) else tuple(strides)
    params = {"start_indices": starts, "limit_indices": stops, "strides": strides}
    out = _direct(lax.slice_p, (x,), **params)
    return lax.slice(x, starts, stops, strides) if out is None else out


def slice_in_dim(x: Any, start: int, stop: int, axis: int) -> Any:
    """`lax.slice_in_dim(x, start, stop, axis=axis)`, for numbers in bounds."""
    if type(x) is not TRACER:
        return lax.slice_in_dim(x, start, stop, axis=axis)
    starts, stops = [0] * x.aval.ndim, list(x.aval.shape)
    starts[axis], stops[axis] = start, stop
    return slice_of(x, starts, stops)


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """`lax.concatenate(arrays, axis)`."""
    out = _direct(lax.concatenate_p, arrays, dimension=axis) if len(arrays) > 1 else None
    return lax.concatenate(arrays, axis) if out is None else out


def cast(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`."""
    if type(x) is TRACER and isinstance(dtype, np.dtype):
        old: Any = x.aval.dtype
        if old == dtype and not x.aval.weak_type:
            return x
        if isinstance(old, np.dtype) and old.kind != "c":
            out = _direct(lax.convert_element_type_p, (x,), new_dtype=dtype)
            return lax.convert_element_type(x, dtype) if out is None else out
    return lax.convert_element_type(x, dtype)


_FLOAT32 = np.dtype(np.float32)


def is_narrow(x: Any) -> bool:
    """Whether an array holds real floating-point numbers of fewer than 32 bits."""
    return _is_narrow((x.aval if type(x) is TRACER else jax.typeof(x)).dtype)


@functools.cache
def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < _FLOAT32.itemsize


def take_rows(x: Any, index: Any, axis: int, *, is_exact: bool = True) -> Any:
    """The rows `index` of `x` along `axis`; all indices must be in bounds.

    The gradient of a row is the sum of its copies' gradients, a scatter. In bfloat16, XLA rounds
    after every addition: 2,000 ones give 256. With `is_exact`, it adds in float32 and rounds once:
    the casts to float32 and back change no value, but their transposes cast the gradients. The sum
    that is the gradient of a broadcast needs no such casts.
    """
    if is_exact and is_narrow(x):
        wide = take_rows(cast(x, _FLOAT32), index, axis)
        return cast(wide, jax.typeof(x).dtype)
    shape = shape_of(x)
    offset = tuple([d for d in range(len(shape)) if d != axis])
    numbers = lax.GatherDimensionNumbers(offset, (axis,), (axis,))
    sizes = (*shape[:axis], 1, *shape[axis + 1 :])
    column = expand_dims(index, (1,))
    out = _direct(lax.gather_p, (x, column), dimension_numbers=numbers, slice_sizes=sizes)
    if out is not None:
        return out

    def gather(x: Any, column: Any) -> Any:
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(x, column, numbers, sizes, mode=mode)

    if not any(entries := mesh_axes(index)):
        return gather(x, column)
    spec = [*jax.typeof(x).sharding.spec]
    spec[axis : axis + 1] = entries
    sharding = jax.typeof(index).sharding.update(spec=PartitionSpec(*spec))
    return over_auto_axes(gather, sharding)(x, column)


def alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Arrays of one shape, and numbers; all divided as the first of them that mesh axes divide."""
    if _trace_of(arrays) is not None:
        return arrays
    like = next((jax.typeof(x) for x in arrays if any(mesh_axes(x))), None)
    if like is None:
        return arrays
    return [placed_as(x, like) if np.shape(x) == like.shape else x for x in arrays]


def is_explicit(aval: Any) -> bool:
    """Whether a value is an array whose type names a mesh with Explicit axes."""
    if type(aval) is not jax.core.ShapedArray:
        return False
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def placed_as(x: Any, aval: Any) -> Any:
    """An array that is divided as the type says, if that names Explicit mesh axes.

    A broadcast that is put off forgets how its result is divided.
    """
    if not is_explicit(aval) or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def mesh_axes(x: Any) -> Sequence[Any]:
    """The mesh axes over which the type of an array divides it; () where a type names no mesh."""
    aval = jax.typeof(x)
    return () if is_local(aval) else aval.sharding.spec


def over_auto_axes(fn: Callable[..., Any], sharding: Any) -> Callable[..., Any]:
    """A function of arrays with one result, which runs as if its mesh axes were Auto.

    Args:
      fn: the function. It must not close over arrays.
      sharding: how its result is divided. If no Explicit mesh axes divide it, the function is
        returned.
    """
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return fn
    if not any(sharding.spec):
        return fn
    divided: Callable[..., Any] = jax.sharding.auto_axes(fn, out_sharding=sharding)
    return divided


def exp(x: Any) -> Any:
    """`lax.exp(x)`."""
    out = _direct(lax.exp_p, (x,))
    return lax.exp(x) if out is None else out


def times(x: Any, number: float) -> Any:
    """`lax.mul(x, number)`, with the number in the dtype of `x`."""
    dtype = x.aval.dtype if type(x) is TRACER else x.dtype
    literal = _literal(number, dtype)
    return bind(lax.mul_p, (x, literal.val), _params("mul"), (None, literal))


def full_like(x: Any, number: float) -> Any:
    """`lax.full_like(x, number)`."""
    trace = _trace_of((x,))
    if trace is None:
        return lax.full_like(x, number)
    literal, info = _literal(number, x.aval.dtype), source_info_util.current()
    params = {**_params("broadcast_in_dim"), "shape": x.aval.shape, "broadcast_dimensions": ()}
    operand = TRACER(trace, literal.aval, literal, info)
    return trace.default_process_primitive(lax.broadcast_in_dim_p, (operand,), params, info)


def select(mask: Any, x: Any, y: Any) -> Any:
    """`lax.select(mask, x, y)`."""
    out = _direct(lax.select_n_p, (mask, y, x))
    return lax.select(mask, x, y) if out is None else out


@functools.lru_cache(maxsize=256)
def _literal(number: float, dtype: Any) -> core.Literal:
    """A number as an operand of an equation."""
    return core.Literal(np.asarray(number, dtype)[()], jax.core.ShapedArray((), np.dtype(dtype)))


def sub(x: Any, y: Any) -> Any:
    """`lax.sub(x, y)`."""
    out = _direct(lax.sub_p, (x, y))
    return lax.sub(x, y) if out is None else out


def div(x: Any, y: Any) -> Any:
    """`lax.div(x, y)`."""
    out = _direct(lax.div_p, (x, y))
    return lax.div(x, y) if out is None else out


def reduce_max(x: Any, axes: tuple[int, ...]) -> Any:
    """`lax.reduce_max(x, axes)`."""
    out = _direct(lax.reduce_max_p, (x,), axes=axes)
    return lax.reduce_max(x, axes) if out is None else out


def reduce_sum(x: Any, axes: tuple[int, ...]) -> Any:
    """`lax.reduce_sum(x, axes)`."""
    out = _direct(lax.reduce_sum_p, (x,), axes=axes)
    return lax.reduce_sum(x, axes) if out is None else out


def product(x: Any, y: Any, numbers: Any, dtype: Any) -> Any:
    """`lax.dot_general(x, y, numbers, preferred_element_type=dtype)`."""
    out = None
    # The precision of the equation depends on this setting.
    if jax.config.jax_default_matmul_precision is None:
        params = {"dimension_numbers": numbers, "preferred_element_type": np.dtype(dtype)}
        out = _direct(lax.dot_general_p, (x, y), precision=None, **params)
    return lax.dot_general(x, y, numbers, preferred_element_type=dtype) if out is None else out
