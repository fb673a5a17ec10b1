"""Adds equations to the program that is being traced, in less time than `jax.lax`.

Most equations of a rewritten program have traced arrays as operands, and no programs among their
parameters. `Primitive.bind` spends half of its work on finding that out, for every operand again,
and the functions of `jax.lax` check their arguments besides. Here, such an equation is given to the
trace at once: 30 calls of functions instead of 60, or instead of 70 to 110 by way of `jax.lax`. All
other equations take the usual way.
"""

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
    """Binds a primitive to operands, with parameters as an equation holds them.

    `invars` are the operands of an equation that is run again. A literal among `operands` that is
    also the literal there needs no conversion.
    """
    if primitive in _DIRECT and (trace := trace_of(operands)) is not None:
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


def trace_of(operands: Sequence[Any]) -> Any:
    """Returns the current trace, if all tracers among the operands, at least one, belong to it.

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


@functools.cache
def _equation(name: str) -> tuple[core.Primitive, dict[str, Any]]:
    """Returns the primitive of a function of `jax.lax`, and the parameters that it sets."""
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
    }
    args = jax.ShapeDtypeStruct((2, 1), "float32"), index
    *_, eqn = jax.make_jaxpr(examples[name])(*args).eqns
    return eqn.primitive, eqn.params


# These return what the functions of `jax.lax` with the same names return.


def shape_of(x: Any) -> tuple[int, ...]:
    """Returns the shape of a value; () for a Python number."""
    # `shape` of a tracer is looked up on the array type, by functions of Python.
    shape: Any = x.aval.shape if type(x) is TRACER else getattr(x, "shape", ())
    return tuple(shape)


def transpose(x: Any, permutation: Sequence[int]) -> Any:
    """Computes `lax.transpose(x, permutation)`."""
    permutation = tuple(permutation)
    if permutation == tuple(range(len(permutation))):
        return x
    primitive, params = _equation("transpose")
    return bind(primitive, (x,), {**params, "permutation": permutation})


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """Computes `lax.reshape(x, shape)`."""
    shape = tuple(shape)
    if type(x) is not TRACER:
        return lax.reshape(x, shape)
    if x.aval.shape == shape:
        return x
    primitive, params = _equation("reshape")
    return bind(primitive, (x,), {**params, "new_sizes": shape})


def squeeze(x: Any, dimensions: Sequence[int]) -> Any:
    """Computes `lax.squeeze(x, dimensions)`, for dimensions in ascending order."""
    dimensions = tuple(dimensions)
    if not dimensions:
        return x
    primitive, params = _equation("squeeze")
    return bind(primitive, (x,), {**params, "dimensions": dimensions})


def broadcast_in_dim(x: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    """Computes `lax.broadcast_in_dim(x, shape, dims)`."""
    primitive, params = _equation("broadcast_in_dim")
    own = {"shape": tuple(shape), "broadcast_dimensions": tuple(dims)}
    return bind(primitive, (x,), {**params, **own})


def expand_dims(x: Any, dimensions: Sequence[int]) -> Any:
    """Computes `lax.expand_dims(x, dimensions)`, for dimensions in ascending order."""
    if type(x) is not TRACER or not dimensions:
        return lax.expand_dims(x, dimensions)
    shape = list(x.aval.shape)
    for d in dimensions:
        shape.insert(d, 1)
    return broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d not in dimensions])


def slice_of(x: Any, starts: Sequence[int], stops: Sequence[int], strides: Any = None) -> Any:
    """Computes `lax.slice(x, starts, stops, strides)`."""
    strides = None if strides is None or all(n == 1 for n in strides) else tuple(strides)
    primitive, params = _equation("slice")
    own = {"start_indices": tuple(starts), "limit_indices": tuple(stops), "strides": strides}
    return bind(primitive, (x,), {**params, **own})


def slice_in_dim(x: Any, start: int, stop: int, axis: int) -> Any:
    """Computes `lax.slice_in_dim(x, start, stop, axis=axis)`, for numbers in bounds."""
    if type(x) is not TRACER:
        return lax.slice_in_dim(x, start, stop, axis=axis)
    starts, stops = [0] * x.aval.ndim, list(x.aval.shape)
    starts[axis], stops[axis] = start, stop
    return slice_of(x, starts, stops)


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """Computes `lax.concatenate(arrays, axis)`."""
    if len(arrays) == 1:
        return arrays[0]
    primitive, params = _equation("concatenate")
    return bind(primitive, arrays, {**params, "dimension": axis})


def cast(x: Any, dtype: Any) -> Any:
    """Computes `x.astype(dtype)`."""
    if type(x) is TRACER and isinstance(dtype, np.dtype):
        old: Any = x.aval.dtype
        if old == dtype and not x.aval.weak_type:
            return x
        if isinstance(old, np.dtype) and old.kind != "c":
            primitive, params = _equation("convert_element_type")
            return bind(primitive, (x,), {**params, "new_dtype": dtype})
    return lax.convert_element_type(x, dtype)


_FLOAT32 = np.dtype(np.float32)


def is_narrow(x: Any) -> bool:
    """Whether an array holds real floating-point numbers of fewer than 32 bits."""
    return is_narrow_dtype((x.aval if type(x) is TRACER else jax.typeof(x)).dtype)


@functools.cache
def is_narrow_dtype(dtype: Any) -> bool:
    """Whether a dtype is of real floating-point numbers of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < _FLOAT32.itemsize


def gather_rows(x: Any, index: Any, axis: int) -> Any:
    """Gathers the rows `index` of `x` along `axis`, which must be in bounds."""
    shape = shape_of(x)
    offset = tuple([d for d in range(len(shape)) if d != axis])
    numbers = lax.GatherDimensionNumbers(offset, (axis,), (axis,))
    sizes = (*shape[:axis], 1, *shape[axis + 1 :])
    column = expand_dims(index, (1,))
    primitive, others = _equation("gather")
    params = {**others, "dimension_numbers": numbers, "slice_sizes": sizes}
    if not any(entries := mesh_axes(index)):
        return bind(primitive, (x, column), params)
    spec = [*jax.typeof(x).sharding.spec]
    spec[axis : axis + 1] = entries
    sharding = jax.typeof(index).sharding.update(spec=PartitionSpec(*spec))
    return over_auto_axes(lambda *arrays: bind(primitive, arrays, params), sharding)(x, column)


#: Of more runs of neighbouring positions than this, a lookup takes the elements.
_MOST_RUNS = 4


def take(x: Any, at: Any, axis: int, most_runs: int = _MOST_RUNS) -> Any:
    """Takes elements of `x` at constant positions along `axis`, by slices if these are few."""
    numbers, (*before, size), after = np.array(at), x.shape[: axis + 1], x.shape[axis + 1 :]
    count = len(numbers)
    for repeats in (True, False) if count > size and count % size == 0 else ():
        # A gather of all pairs would transpose them: FiBiNET took 1.7 times as long on a CPU.
        grid = np.broadcast_to(np.arange(size), (count // size, size))
        if (numbers == (grid.T if repeats else grid).reshape(-1)).all():
            wide = expand_dims(x, [axis + repeats])
            pair = (size, count // size) if repeats else (count // size, size)
            wide = broadcast_in_dim(wide, (*before, *pair, *after), range(len(wide.shape)))
            return reshape(wide, (*before, count, *after))
    breaks = (numbers[1:] != numbers[:-1] + 1).nonzero()[0]
    if len(breaks) >= most_runs:
        return gather_rows(x, jnp.asarray(numbers, jnp.int32), axis)
    first, last = numbers[[0, *(breaks + 1)]].tolist(), numbers[[*breaks, -1]].tolist()
    runs = zip(first, last, strict=True)
    return concatenate([slice_in_dim(x, start, end + 1, axis) for start, end in runs], axis)


def alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Divides arrays of one shape, and numbers, as the first of them that mesh axes divide."""
    if trace_of(arrays) is not None:
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
    """Divides an array as the type says, if that names Explicit mesh axes.

    A broadcast that is put off forgets how its result is divided.
    """
    if not is_explicit(aval) or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def mesh_axes(x: Any) -> Sequence[Any]:
    """Returns the mesh axes over which the type of an array divides it; () without a mesh."""
    aval = jax.typeof(x)
    return () if is_local(aval) else aval.sharding.spec


def over_auto_axes(fn: Callable[..., Any], sharding: Any) -> Callable[..., Any]:
    """Wraps a function of arrays with one result to run as if its mesh axes were Auto.

    The function must not close over arrays. It is returned if no Explicit axes divide its result.
    """
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return fn
    if not any(sharding.spec):
        return fn
    divided: Callable[..., Any] = jax.sharding.auto_axes(fn, out_sharding=sharding)
    return divided
