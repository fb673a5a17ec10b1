"""Lookups of rows in a rewritten program: XLA's gather, whose gradient is `segment_sum`.

All lookups that a rewritten program makes or keeps come here. Rows are read by XLA's gather, which
XLA fuses with what reads the rows; `ikbo_jax.look_up` would write them first. The gradient of the
gather would be a scatter: it adds in any order, and rounds every addition in 16 bits. The gradient
here is `ikbo_jax.segment_sum`.

Both are primitives, each the other's transpose, since lookups have a derivative in forward mode,
which the ops lack. JAX's own gather remains where rows are no float32, bfloat16 or float16, where
types name Explicit mesh axes, and for slices, several indices, batches of tables, and indices that
int32 does not hold.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from ikbo_jax.ops.by_xla import jaxpr_primitive
from ikbo_jax.ops.look_up import segment_sum
from ikbo_jax.ops.sharded import vary_over_same_axes
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.jaxprs import Checked, CheckedPrimitive, trace

_FLOAT32 = np.dtype(np.float32)
_SUMMED = frozenset([_FLOAT32, np.dtype(jnp.bfloat16), np.dtype(np.float16)])
_Modes = lax.GatherScatterMode


class _Lookup(NamedTuple):
    """Describes how rows are looked up.

    Attributes:
      axis: the axis of the rows.
      mode: of JAX's gather: what an index out of bounds takes, the nearest row or a filled row.
      fill_value: of JAX's gather.
      drops: whether the gradient of an index out of bounds is dropped; if not, it goes to the
        nearest row.
      is_sorted: whether the index never decreases.
    """

    axis: int
    mode: lax.GatherScatterMode = _Modes.PROMISE_IN_BOUNDS
    fill_value: Any = None
    drops: bool = False
    is_sorted: bool = False


#: Takes x and an index [B] int32; returns rows of x. `call_jaxpr` is for `checkify`.
rows_p = CheckedPrimitive("ikbo_rows")
#: Takes rows and the index; returns their sums, `users` rows.
sums_p = jaxpr_primitive("ikbo_row_sums")
sums_p.is_high = lambda *_, **__: False  # type: ignore[method-assign]  # See `rewritten_p`.


def take_rows(x: Any, index: Any, axis: int, *, is_sorted: bool = False) -> Any:
    """Takes the rows `index` [B] of `x` along `axis`; all indices must be in bounds.

    `is_sorted` says that the index never decreases.
    """
    dtype, explicit = _type_of(x).dtype, _has_explicit_axes(x, index)
    if staged.is_narrow(x) and (explicit or dtype not in _SUMMED):
        # The casts change no value; their transposes make the gradient's sums float32.
        wide = take_rows(staged.cast(x, _FLOAT32), index, axis, is_sorted=is_sorted)
        return staged.cast(wide, dtype)
    if explicit or dtype not in _SUMMED:
        return staged.gather_rows(x, index, axis)
    return _rows(x, index, _Lookup(axis, is_sorted=is_sorted))


def gathered(operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Computes JAX's gather if it takes rows along one axis by one index; None for any other."""
    (x, indices), numbers = operands, params["dimension_numbers"]
    shape, batch = staged.shape_of(x), staged.shape_of(indices)[:-1]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims or 0 in shape:
        return None
    (axis,) = numbers.start_index_map
    after = range(axis + len(batch), len(shape) - 1 + len(batch))
    if (
        _type_of(x).dtype not in _SUMMED
        or not np.can_cast(_type_of(indices).dtype, np.int32)
        or params["mode"] not in (_Modes.CLIP, _Modes.FILL_OR_DROP, _Modes.PROMISE_IN_BOUNDS)
        or _has_explicit_axes(x, indices)
        or selects_features(x, axis)
        or numbers.collapsed_slice_dims != (axis,)
        or numbers.offset_dims != (*range(axis), *after)
        or tuple(params["slice_sizes"]) != (*shape[:axis], 1, *shape[axis + 1 :])
    ):
        return None
    index = staged.cast(staged.reshape(indices, (math.prod(batch),)), np.dtype(np.int32))
    is_sorted = params["indices_are_sorted"] and len(batch) == 1
    drops = params["mode"] != _Modes.CLIP
    how = _Lookup(axis, params["mode"], params["fill_value"], drops, is_sorted)
    return staged.reshape(_rows(x, index, how), (*shape[:axis], *batch, *shape[axis + 1 :]))


def selects_features(x: Any, axis: int) -> bool:
    """Whether a lookup along an axis has a gradient that XLA's scatter adds faster, in float32.

    It does for features of every row, as of FiBiNET's pairs of fields: the scatter computes what it
    adds. The sum of rows would read what other kernels write, transposed: four times the bytes.
    """
    return _type_of(x).dtype == _FLOAT32 and math.prod(staged.shape_of(x)[:axis]) != 1


def _type_of(x: Any) -> Any:
    return x.aval if type(x) is staged.TRACER else jax.typeof(x)


def _has_explicit_axes(*arrays: Any) -> bool:
    return any(staged.is_explicit(_type_of(x)) for x in arrays)


def _rows(x: Any, index: Any, how: _Lookup) -> Any:
    """Binds `rows_p`."""
    if not staged.is_local(_type_of(x)) or not staged.is_local(_type_of(index)):
        x, index = vary_over_same_axes((x, index))
    like = _type_of(x), _type_of(index)
    checked = Checked(lambda: trace(lambda x, index: [_gather(x, index, how)], like))
    params = {"how": how, "call_jaxpr": checked}
    if (current := staged.trace_of((x, index))) and type(x) is type(index):
        return current.default_process_primitive(rows_p, (x, index), params)[0]
    return rows_p.bind(x, index, **params)[0]


def _gather(x: Any, index: Any, how: _Lookup) -> Any:
    shape, axis = x.shape, how.axis
    offset = tuple([d for d in range(len(shape)) if d != axis])
    numbers = lax.GatherDimensionNumbers(offset, (axis,), (axis,))
    sizes = (*shape[:axis], 1, *shape[axis + 1 :])
    options: dict[str, Any] = {"mode": how.mode, "fill_value": how.fill_value}
    column = lax.expand_dims(index, (1,))
    return lax.gather(x, column, numbers, sizes, indices_are_sorted=how.is_sorted, **options)


def as_gather(x: Any, index: Any, *, is_sorted: bool) -> core.Jaxpr:
    """Traces `ikbo_jax.look_up`, for two types, as JAX's gather by a column of indices."""
    how = _Lookup(0, _Modes.CLIP, is_sorted=is_sorted)
    return trace(lambda x, index: [_gather(x, index, how)], (x, index))


def _sum_rows(values: Any, index: Any, how: _Lookup, users: Any) -> Any:
    """Sums `values` [..., B, ...] by user, along the axis of the lookup."""
    values, batch = jnp.moveaxis(values, how.axis, 0), index.shape[0]
    total = functools.partial(segment_sum, indices_are_sorted=how.is_sorted)
    if not how.drops:
        sums = total(values, index, users)
    elif isinstance(batch, int) and isinstance(users, int) and users <= batch:
        # Two more users, which take what is dropped, keep a sorted index sorted.
        sums = total(values, jnp.clip(index, -1, users) + 1, users + 2)[1 : users + 1]
    else:
        inside = jnp.expand_dims((index >= 0) & (index < users), tuple(range(1, values.ndim)))
        sums = total(jnp.where(inside, values, jnp.zeros_like(values)), index, users)
    return jnp.moveaxis(sums, 0, how.axis)


def _bind_sums(values: Any, index: Any, how: _Lookup, users: Any, **_: Any) -> Any:
    """Binds `sums_p`. Its jaxpr is a parameter, so that JAX sees that devices may divide it."""

    def sums(values: Any, index: Any) -> list[Any]:
        return [_sum_rows(values, index, how, users)]

    jaxpr = trace(sums, (values, index))
    return sums_p.bind(values, index, how=how, users=users, jaxpr=jaxpr)[0]


def _of_rows(x: Any, index: Any, *, how: _Lookup, **_: Any) -> list[Any]:
    return [_gather(x, index, how)]


@rows_p.def_abstract_eval
def _type_of_rows(x: Any, index: Any, *, how: _Lookup, **_: Any) -> list[Any]:
    return [x.update(shape=(*x.shape[: how.axis], *index.shape, *x.shape[how.axis + 1 :]))]


rows_p.def_impl(_of_rows)
mlir.register_lowering(rows_p, mlir.lower_fun(_of_rows))


def _pushed_forward(primitive: core.Primitive, linear: Callable[..., Any]) -> Callable[..., Any]:
    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        tangent, results = tangents[0], primitive.bind(*primals, **params)
        if isinstance(tangent, ad.Zero):
            return results, [ad.Zero(jax.typeof(results[0]).to_tangent_aval())]
        return results, [linear(tangent, primals[1], **params)]

    return jvp


def _rows_of_tangent(x: Any, index: Any, *, how: _Lookup, **_: Any) -> Any:
    # Without a number, JAX fills with NaN.
    return _rows(x, index, how._replace(fill_value=0 if how.mode == _Modes.FILL_OR_DROP else None))


ad.primitive_jvps[rows_p] = _pushed_forward(rows_p, _rows_of_tangent)
ad.primitive_jvps[sums_p] = _pushed_forward(sums_p, _bind_sums)


def _pull_back(
    cotangents: Any, x: Any, index: Any, *, how: _Lookup, users: Any = None, **_: Any
) -> Any:
    """Sums a cotangent of rows or, given the number of users, looks a cotangent of sums up."""
    (cotangent,) = cotangents
    if isinstance(cotangent, ad.Zero):
        return ad.Zero(x.aval), None
    if users is None:
        return _bind_sums(cotangent, index, how, x.aval.shape[how.axis]), None
    mode, fill_value = (_Modes.FILL_OR_DROP, 0) if how.drops else (_Modes.CLIP, None)
    return _rows(cotangent, index, how._replace(mode=mode, fill_value=fill_value)), None


ad.primitive_transposes[rows_p] = _pull_back
ad.primitive_transposes[sums_p] = _pull_back


def _batched(operands: Any, dims: Any, *, how: _Lookup, users: Any = None, **_: Any) -> Any:
    """Looks up or, given the number of users, sums several problems at once."""
    run = _rows if users is None else functools.partial(_bind_sums, users=users)
    x, index = (
        z if dim is None else jnp.moveaxis(z, dim, 0) for z, dim in zip(operands, dims, strict=True)
    )
    axis = how.axis
    if dims[1] is None:
        return [run(x, index, how._replace(axis=axis + 1))], [0]
    size, batch = index.shape
    if dims[0] is None and users is None:
        rows = _rows(x, index.reshape(-1), how._replace(is_sorted=False))
        return [rows.reshape(*x.shape[:axis], size, batch, *x.shape[axis + 1 :])], [axis]
    if users is None and how.drops:
        # The nearest row to an index out of bounds would be another problem's.
        return [jax.vmap(functools.partial(_gather, how=how))(x, index)], [0]
    if dims[0] is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
    each = x.shape[axis + 1] if users is None else users
    near = jnp.clip(index, 0, each - 1)
    joint = near + jnp.arange(size, dtype=index.dtype)[:, None] * each
    if how.drops:
        joint = jnp.where(near == index, joint, size * each)
        how = how._replace(is_sorted=False)
    run = _rows if users is None else functools.partial(_bind_sums, users=size * users)
    x = jnp.moveaxis(x, 0, axis)
    shape, count = x.shape, batch if users is None else users
    found = run(x.reshape(*shape[:axis], -1, *shape[axis + 2 :]), joint.reshape(-1), how)
    return [found.reshape(*shape[:axis], size, count, *shape[axis + 2 :])], [axis]


batching.primitive_batchers[rows_p] = _batched
batching.primitive_batchers[sums_p] = _batched
