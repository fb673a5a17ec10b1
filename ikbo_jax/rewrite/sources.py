"""Rules of the primitives that make broadcasts: lookups of rows, tiles, dimensions of size 1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite import facts, lineage
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.lineage import (
    Concat,
    Lazy,
    Lineage,
    base_of,
    has_lineage,
    is_plain,
    lazy,
    nbytes,
    origins_of,
    spread_axes,
    take_rows,
)
from ikbo_jax.rewrite.registry import NotCovered, register_rule
from ikbo_jax.rewrite.rules import at_user_batch, concat


@register_rule("gather", source=True)
def _gather(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    numbers = eqn.params["dimension_numbers"]
    if isinstance(indices, Concat) and any(map(has_lineage, indices.parts)):
        raise NotCovered("gather by a concatenation")
    if isinstance(operand, Concat):
        return _gather_of_parts(ctx, eqn, operand, indices)
    if has_lineage(indices):
        return _gather_by_lazy_indices(ctx, eqn, operand, indices)
    if has_lineage(operand) and operand.axis not in numbers.start_index_map:
        return _gather_of_features(ctx, eqn, operand, indices)
    return _gather_rows_or_bind(ctx, eqn, operand, indices, eqn.outvars[0].aval.shape)


def _gather_rows_or_bind(
    ctx: Context, eqn: Any, operand: Any, indices: Any, out_shape: tuple[int, ...]
) -> Any:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = shape_of(operand)
    if not numbers.operand_batching_dims and len(shape_of(indices)) == 2:
        fixed = _fixed_positions(ctx, eqn, operand, indices)
        axes = [a for a, size in enumerate(sizes) if size != shape[a] and a not in fixed]
        if not axes and len(fixed) == 1:
            # All candidates look up the same known row.
            axes, fixed = list(fixed), {}
        if not axes:
            axes = _single_rows(ctx, operand, indices, numbers)
        if len(axes) == 1 and axes[0] in numbers.start_index_map and sizes[axes[0]] == 1:
            (axis,) = axes
            if shape_of(indices)[0] > shape[axis] > 0 and not _is_lookup_of(operand, fixed):
                _check_no_other_column_fills(ctx, eqn, indices, {axis, *fixed})
                for other, start in fixed.items():
                    operand = lineage.slice_along(operand, start, start + sizes[other], other)
                return _gather_rows(ctx, eqn, operand, indices, axis, out_shape)
    if has_lineage(operand):
        raise NotCovered("gather along the looked-up axis that is no lookup of rows")
    return ctx.bind(eqn, ctx.build(operand), ctx.build(indices))


def _check_no_other_column_fills(ctx: Context, eqn: Any, indices: Any, looked_up: set[int]) -> None:
    """Of an axis that slices take whole, any start but 0 is out of bounds."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return
    axes = enumerate(eqn.params["dimension_numbers"].start_index_map)
    others = [column for column, axis in axes if axis not in looked_up]
    if any(facts.interval(ctx, _column(ctx, indices, c)[0]) != (0, 0) for c in others):
        raise NotCovered("lookup by several indices that fills rows out of bounds")


def _single_rows(ctx: Context, operand: Any, indices: Any, numbers: Any) -> list[int]:
    """The axis of one row, that of a request's only user, that is looked up."""

    def is_known(column: int) -> bool:
        known = facts.interval(ctx, _column(ctx, indices, column)[0])
        return known is not None and known[0] == known[1]

    shape = shape_of(operand)
    columns = [c for c, axis in enumerate(numbers.start_index_map) if shape[axis] == 1]
    if len(columns) > 1:
        columns = [c for c in columns if not is_known(c)]
    return [numbers.start_index_map[c] for c in columns]


def _is_lookup_of(operand: Any, axes: Any) -> bool:
    return has_lineage(operand) and operand.axis in axes


def _fixed_positions(ctx: Context, eqn: Any, operand: Any, indices: Any) -> dict[int, int]:
    """The axes of which every slice takes the same known positions: `x[index, 0]`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fixed = {}
    for column, axis in enumerate(numbers.start_index_map):
        size = shape_of(operand)[axis]
        if sizes[axis] == size or size == 1:
            continue
        known = facts.interval(ctx, _column(ctx, indices, column)[0])
        if known is not None and known[0] == known[1] and 0 <= known[0] <= size - sizes[axis]:
            fixed[axis] = known[0]
    return fixed


def _gather_rows(
    ctx: Context, eqn: Any, operand: Any, indices: Any, axis: int, shape: tuple[int, ...]
) -> Any:
    """Rows of `axis` by a list of indices, not looked up yet: what all of this is about."""
    numbers = eqn.params["dimension_numbers"]
    if has_lineage(operand) and operand.axis != axis:
        raise NotCovered("rows looked up along one axis are looked up again along another")
    operand = spread_axes(operand, [axis])
    (out_axis,) = (d for d in range(len(shape)) if d not in numbers.offset_dims)
    count = shape_of(indices)[0]
    what = f"{lineage.text(operand)} looked up by {count} indices -> {_text(shape, operand)}"
    column = numbers.start_index_map.index(axis)
    operand, fine = _looked_up(ctx, eqn, operand, indices, column, axis)
    base = base_of(operand)
    copy = nbytes(shape, operand.dtype) - nbytes(base.shape, operand.dtype)
    found = ctx.recorder.found(eqn, what, copy, True)
    # The slices' dimensions stand in order; the batch stands at `out_axis` among them. A dimension
    # that is looked up but kept, with size 1, stands there besides.
    kept = [d for d in range(base.ndim) if d not in numbers.collapsed_slice_dims]
    source_dims = dict(zip(numbers.offset_dims, kept, strict=True)) | {out_axis: axis}
    order = [source_dims[d] for d in range(len(shape)) if d == out_axis or source_dims[d] != axis]
    gone = [d for d in numbers.collapsed_slice_dims if d != axis]
    order = gone + order
    base = base.transpose(order) if order != sorted(order) else base
    base = lax.squeeze(base, range(len(gone))) if gone else base
    extra = [d for d in range(len(shape)) if d != out_axis and source_dims[d] == axis]
    base = jnp.expand_dims(base, extra) if extra else base
    if has_lineage(operand):
        fine = ctx.scope.compose(operand.lineage, fine)
    return Lazy(base, tuple(shape), fine, out_axis, origins_of(operand) | {found})


def _looked_up(
    ctx: Context, eqn: Any, operand: Any, indices: Any, column: int, axis: int
) -> tuple[Any, Lineage]:
    """What a column of gather indices looks up along an axis, and how.

    An index out of bounds fills a row, or takes the nearest row with or without a gradient. What is
    no row of the operand, in value or derivative, is appended to it and looked up like the others.
    """
    rows, mode = shape_of(operand)[axis], eqn.params["mode"]
    value, own = _column(ctx, indices, column)
    root = ctx.build(value)
    batch = indices.shape[0]
    index = root if root.ndim == 1 else root[:, own]
    proven = facts.within(ctx, root, 0, rows - 1)
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP and not proven
    # `x[index]` takes the nearest row, but adds no gradient to it.
    drops = mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS and not proven

    def nearest() -> jax.Array:
        if proven:
            return lax.convert_element_type(index, jnp.int32)
        first, last = np.array([0, min(rows - 1, _largest(index))], index.dtype)
        return lax.convert_element_type(lax.clamp(first, index, last), jnp.int32)

    def outside() -> jax.Array:
        at = jnp.where(index < 0, jnp.int32(rows), nearest())
        if rows > _largest(index):
            return at
        return jnp.where(index >= np.asarray(rows, index.dtype), jnp.int32(rows + 1), at)

    differs = drops or not _takes_every_row(root, own, rows)
    if differs and not ctx.differentiated and jnp.issubdtype(operand.dtype, jnp.inexact):
        ctx.gradient_differs()
    exact = differs and ctx.differentiated
    if not fills and not exact:
        return operand, ctx.scope.lineage(("rows", root, own), rows, batch, nearest)
    if has_lineage(operand):
        # What is looked up again is copied to the batch between, which is a small one.
        operand = ctx.build(operand)
    if proven:
        found = ctx.scope.lineage(("used", root, own), rows, batch, nearest)
    else:
        plain = None if exact else ctx.scope.lineage(("rows", root, own), rows, batch, nearest)
        found = ctx.scope.lineage(("outside", root, own), rows + 2, batch, outside, plain)
        operand = _with_rows_outside(eqn, operand, axis, fills, drops)
    return (_without_unused(operand, found, axis) if exact else operand), found


def _with_rows_outside(eqn: Any, operand: Any, axis: int, fills: bool, drops: bool) -> Any:
    """With the rows that indices below 0, and past the last row, take: appended to an axis."""
    base = base_of(operand)
    if fills:
        base = lax.concatenate([base, *[_fill_row(eqn, operand, axis)] * 2], axis)
    else:
        base = lineage.with_nearest_rows(base, axis, lax.stop_gradient if drops else None)
    if is_plain(operand):
        return base
    shape = list(operand.shape)
    shape[axis] += 2
    return dataclasses.replace(operand, base=base, shape=tuple(shape))


def _takes_every_row(root: Any, column: int, rows: int) -> bool:
    """Whether an index is known and leaves no row out: then no row has a gradient of its own."""
    if isinstance(root, jax.core.Tracer):
        return False
    index = np.asarray(root)
    return len(np.unique(index if index.ndim == 1 else index[:, column])) == rows


def _without_unused(operand: Any, of: Lineage, axis: int) -> Any:
    """The operand with a used row in the place of every row that no index takes.

    The program never saw such a row. At the smaller batch it is computed with, and where that gives
    infinity or NaN, as for a norm of padding, a gradient of 0 would make NaN of every weight's.
    """
    used = jnp.zeros(of.users, jnp.bool_).at[of.index].set(True, mode="promise_in_bounds")
    rows = jnp.where(used, jnp.arange(of.users, dtype=jnp.int32), of.index[0])
    base = take_rows(base_of(operand), rows, axis)
    return base if is_plain(operand) else dataclasses.replace(operand, base=base)


def _largest(index: Any) -> int:
    return int(np.iinfo(index.dtype).max)


def _fill_row(eqn: Any, operand: Any, axis: int) -> jax.Array:
    """The row that a gather takes for an index out of bounds."""
    dtype, fill = operand.dtype, eqn.params["fill_value"]
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise NotCovered(f"lookup that fills rows out of bounds, of {dtype}")
    if fill is None and jnp.issubdtype(dtype, jnp.inexact):
        fill = jnp.nan
    elif fill is None and dtype == jnp.bool_:
        fill = True
    elif fill is None:
        limits = jnp.iinfo(dtype)
        fill = limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max
    shape = list(base_of(operand).shape)
    shape[axis] = 1
    return lax.full(shape, fill, dtype)


def _gather_of_parts(ctx: Context, eqn: Any, operand: Concat, indices: Any) -> Any:
    """Each part looked up by itself."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    along = operand.axis
    if along in numbers.collapsed_slice_dims or sizes[along] != operand.shape[along]:
        raise NotCovered("gather that cuts the concatenated axis")
    kept = [d for d in range(len(sizes)) if d not in numbers.collapsed_slice_dims]
    shape, axis, parts = eqn.outvars[0].aval.shape, numbers.offset_dims[kept.index(along)], []
    for part, size in zip(operand.parts, operand.sizes, strict=True):
        part_sizes = (*sizes[:along], size, *sizes[along + 1 :])
        part_shape = (*shape[:axis], size, *shape[axis + 1 :])
        part_eqn = eqn.replace(params={**eqn.params, "slice_sizes": part_sizes})
        parts.append(_gather_rows_or_bind(ctx, part_eqn, part, indices, part_shape))
    return concat(parts, axis)


def _column(ctx: Context, indices: Any, column: int) -> tuple[Any, int]:
    """What a column of gather indices was made from, as far back as that is known.

    Returns:
      An array or other value of one dimension; or one of two, of which the column counts.
    """
    parts: Any = indices.parts if isinstance(indices, Concat) else None
    made = ctx.producer(indices)
    name = made[0].primitive.name if made is not None else ""
    if made is not None and name == "concatenate":
        parts = made[1]
    if parts is not None:
        for part in parts:
            if column < part.shape[1]:
                return _column(ctx, part, column)
            column -= part.shape[1]
    if made is None or len(shape_of(indices)) != 2 or indices.shape[1] != 1:
        return indices, column
    first = made[1][0]
    if name in ("reshape", "broadcast_in_dim") and shape_of(first) == indices.shape[:1]:
        return facts.chosen(ctx, first), 0
    return indices, column


def _gather_by_lazy_indices(ctx: Context, eqn: Any, operand: Any, indices: Lazy) -> Any:
    """A table looked up by indices that are looked up themselves: an embedding of a user's ids."""
    numbers = eqn.params["dimension_numbers"]
    if not is_plain(operand) or numbers.start_indices_batching_dims:
        raise NotCovered("gather by lazy indices in what is lazy itself")
    if indices.axis == len(indices.shape) - 1:
        raise NotCovered("gather by an index vector that is looked up")
    indices = spread_axes(indices, range(len(indices.shape)))
    base = ctx.bind(eqn, operand, indices.base)
    shape = eqn.outvars[0].aval.shape
    batch_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    axis = batch_dims[indices.axis]
    return at_user_batch(ctx, eqn, base, shape, indices.lineage, axis, indices.origins)


def _gather_of_features(ctx: Context, eqn: Any, operand: Lazy, indices: Any) -> Any:
    """Rows of another axis than the looked-up one, which the slices hold whole."""
    numbers, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    axis = operand.axis
    if axis in numbers.operand_batching_dims or sizes[axis] != operand.shape[axis]:
        raise NotCovered("gather that cuts the looked-up axis")
    operand = spread_axes(operand, range(len(operand.shape)))
    sizes[axis] = operand.base.shape[axis]
    base = ctx.bind(eqn, operand.base, ctx.build(indices), slice_sizes=tuple(sizes))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(operand.shape)) if d not in gone]
    out_axis = numbers.offset_dims[kept.index(axis)]
    shape = eqn.outvars[0].aval.shape
    return at_user_batch(ctx, eqn, base, shape, operand.lineage, out_axis, operand.origins)


@register_rule("broadcast_in_dim", source=True)
def _broadcast_in_dim(ctx: Context, eqn: Any, operand: Any, *dynamic: Any) -> Any:
    shape, dims = eqn.params["shape"], [int(d) for d in eqn.params["broadcast_dimensions"]]
    if dynamic or isinstance(operand, Concat):
        return _concat_broadcast(ctx, eqn, operand, shape, dims)
    base, seen = base_of(operand), shape_of(operand)
    if is_plain(operand) and math.prod(shape) == math.prod(seen):
        return ctx.bind(eqn, operand)
    base_shape = [1] * len(shape)
    for d, target in enumerate(dims):
        base_shape[target] = np.shape(base)[d]
    out = lax.broadcast_in_dim(base, tuple(base_shape), tuple(dims))
    value_lineage, axis, origins = None, -1, origins_of(operand)
    if has_lineage(operand):
        value_lineage, axis = operand.lineage, dims[operand.axis]
    elif math.prod(seen) > 1:
        copy = nbytes(shape, operand.dtype) - nbytes(seen, operand.dtype)
        what = f"{_text(seen, operand)} broadcast -> {_text(shape, operand)}"
        origins |= {ctx.recorder.found(eqn, what, copy, False)}
    return lazy(out, shape, value_lineage, axis, origins)


def _concat_broadcast(ctx: Context, eqn: Any, operand: Any, shape: Any, dims: Any) -> Any:
    if not isinstance(operand, Concat):
        raise NotCovered("broadcast to a dynamic shape")
    axis = dims[operand.axis]
    parts = []
    for part in operand.parts:
        part_shape = list(shape)
        part_shape[axis] = part.shape[operand.axis]
        if is_plain(part):
            parts.append(ctx.bind(eqn, part, shape=tuple(part_shape)))
            continue
        base_shape = [1] * len(shape)
        for d, target in enumerate(dims):
            base_shape[target] = part.base.shape[d]
        base = lax.broadcast_in_dim(part.base, tuple(base_shape), tuple(dims))
        part_axis = dims[part.axis] if part.lineage else -1
        parts.append(lazy(base, tuple(part_shape), part.lineage, part_axis, part.origins))
    return Concat(tuple(parts), axis)


@register_rule("tile", source=True)
def _tile(ctx: Context, eqn: Any, operand: Any) -> Any:
    reps, shape = eqn.params["reps"], eqn.outvars[0].aval.shape
    repeated = [d for d, rep in enumerate(reps) if rep > 1]
    if isinstance(operand, Concat):
        raise NotCovered("tile of a concatenation")
    if len(repeated) != 1:
        return ctx.bind(eqn, ctx.materialise(eqn, operand, "tile along several dimensions"))
    (axis,) = repeated
    seen = shape_of(operand)
    if has_lineage(operand) and operand.axis == axis:
        raise NotCovered("tile along the looked-up axis")
    copy = nbytes(shape, operand.dtype) - nbytes(seen, operand.dtype)
    what = f"{_text(seen, operand)} tiled -> {_text(shape, operand)}"
    if seen[axis] == 1:
        found = ctx.recorder.found(eqn, what, copy, False)
        kept = (operand.lineage, operand.axis) if has_lineage(operand) else (None, -1)
        return lazy(base_of(operand), shape, kept[0], kept[1], origins_of(operand) | {found})
    if has_lineage(operand):
        raise NotCovered("tile of what is looked up along another axis")
    rows = seen[axis]
    index = ctx.scope.lineage(
        ("tile", shape[axis]),
        rows,
        shape[axis],
        lambda: lax.iota(jnp.int32, shape[axis]) % jnp.int32(rows),
    )
    found = ctx.recorder.found(eqn, what, copy, True)
    base = base_of(spread_axes(operand, [axis]))
    return Lazy(base, shape, index, axis, origins_of(operand) | {found})


def _text(shape: Any, operand: Any) -> str:
    return f"{operand.dtype}[{','.join(map(str, shape))}]"
