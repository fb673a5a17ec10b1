"""Rules of the primitives that broadcast: lookups of rows, tiles, dimensions of size 1."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import positions, reselect, reshaped_axes, reshaped_lookups, taken
from ikbo_jax.rewrite.rules.elementwise import at_user_batch, concat, slice_along
from ikbo_jax.rewrite.rules.table_rows import column_of, looked_up
from ikbo_jax.rewrite.values import lineage, rows, staged
from ikbo_jax.rewrite.values.equations import op_plan
from ikbo_jax.rewrite.values.lineage import Concat, Lazy
from ikbo_jax.rewrite.values.registry import NotCovered


def gather(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks rows up, as a lazy value."""
    numbers = eqn.params["dimension_numbers"]
    if numbers.operand_batching_dims and not lineage.is_plain(indices):
        whole, vectors = positions.along_whole_axis(ctx, eqn, indices)
        if whole is not eqn:
            return gather(ctx, whole, operand, vectors)
    if reshaped_lookups.looks_up_by_dimensions(eqn, operand, indices):
        return reshaped_lookups.gather_by_dimensions(ctx, eqn, operand, indices)
    if positions.are_looked_up(indices) and (
        len(positions.columns(indices)) > 1
        or numbers.start_indices_batching_dims
        or not lineage.is_plain(operand)
    ):
        operand, axis = _rows_of_table(ctx, eqn, operand, indices)
        return positions.gather(ctx, eqn, operand, indices, axis)
    if positions.are_in_parts(indices):
        return _gather_by_parts(ctx, eqn, operand, indices, eqn.outvars[0].aval.shape)
    if isinstance(operand, Concat):
        return _gather_of_parts(ctx, eqn, operand, indices)
    if lineage.has_lineage(indices):
        return _gather_by_lazy_indices(ctx, eqn, operand, indices, eqn.outvars[0].aval.shape)
    if lineage.has_lineage(operand) and operand.axis in numbers.operand_batching_dims:
        return positions.gather_of_candidates(ctx, eqn, operand, indices)
    if lineage.has_lineage(operand) and operand.axis not in numbers.start_index_map:
        return _gather_of_features(ctx, eqn, operand, indices)
    return _gather_rows_or_bind(ctx, eqn, operand, indices, eqn.outvars[0].aval.shape)


def look_up(ctx: Context, eqn: Any, user: Any, index: Any) -> Any:
    """Rewrites a call of `ikbo_jax.look_up` as a gather; the call stays if nothing is gained."""
    plan = op_plan(eqn)
    assert plan is not None
    avals = (v.aval for v in eqn.invars)
    column, lookup = rows.as_gather(*avals, is_sorted=plan.problem.is_sorted).eqns
    info = eqn.source_info
    (indices,) = ctx.run_equation(column.replace(source_info=info), [index])
    found = ctx.run_equation(lookup.replace(source_info=info), [user, indices])
    is_kept = lineage.is_plain(found[0])
    return ctx.bind(eqn, ctx.build(user), ctx.build(index)) if is_kept else found


def _rows_of_table(ctx: Context, eqn: Any, table: Any, indices: Any) -> tuple[Any, int | None]:
    """Looks up users' tables, of which index vectors choose one row: `history[index, last[index]]`.

    Returns the looked-up rows and their axis; the table and None if no column is the index by which
    the positions are looked up.
    """
    numbers, batch = eqn.params["dimension_numbers"], shape_of(indices)[0]
    if not lineage.is_plain(table) or len(shape_of(indices)) != 2 or numbers.operand_batching_dims:
        return table, None
    users = {x.lineage for x in positions.columns(indices) if lineage.has_lineage(x)}
    column = 0
    for part in positions.columns(indices):
        axis = numbers.start_index_map[column]
        rows = table.shape[axis]
        one = eqn.params["slice_sizes"][axis] == 1 and lineage.is_at_least(batch, rows + 1)
        if lineage.is_plain(part) and part.shape[1] == 1 and one:
            found, fine = looked_up(ctx, eqn, table, indices, column, axis)
            if {fine, fine.nearest} & users:
                shape = (*table.shape[:axis], batch, *table.shape[axis + 1 :])
                what = f"{lineage.text(table)} looked up by {batch} pairs of indices"
                origin = ctx.recorder.found(eqn, what, True)
                return Lazy(lineage.base_of(found), shape, fine, axis, frozenset({origin})), axis
        column += shape_of(part)[1]
    return table, None


def _gather_rows_or_bind(
    ctx: Context, eqn: Any, operand: Any, indices: Any, out_shape: tuple[int, ...]
) -> Any:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = shape_of(operand)
    if not numbers.operand_batching_dims and len(shape_of(indices)) == 2:
        fixed = _fixed_positions(ctx, eqn, operand, indices)
        axes = [a for a, size in enumerate(sizes) if size != shape[a] and a not in fixed]
        if not axes and len(fixed) == 1:
            # All candidates look up one row, whose number is proven.
            axes, fixed = list(fixed), {}
        if not axes:
            axes = _single_rows(ctx, operand, indices, numbers)
        if len(axes) == 1 and axes[0] in numbers.start_index_map and sizes[axes[0]] == 1:
            (axis,) = axes
            count, users = shape_of(indices)[0], shape[axis]
            if lineage.has_lineage(operand) and operand.axis == axis:
                # A shuffle of looked-up rows is a lookup again.
                users = operand.lineage.users
            is_larger = lineage.is_at_least(count, users + 1) and lineage.is_at_least(users, 1)
            of_features = lineage.is_plain(operand) and rows.selects_features(operand, axis)
            if is_larger and of_features and proofs.is_fixed(ctx, indices):
                # The program fixes which features of each row it takes, and XLA adds their
                # gradients. Products before they are taken cost less, but their gradients more.
                if ctx.differentiated:
                    return ctx.bind(eqn, operand, ctx.build(indices))
                ctx.gradient_differs()
            if is_larger and not (lineage.has_lineage(operand) and operand.axis in fixed):
                _check_no_other_column_fills(ctx, eqn, indices, {axis, *fixed})
                for other, start in fixed.items():
                    operand = slice_along(operand, start, start + sizes[other], other)
                return _gather_rows(ctx, eqn, operand, indices, axis, out_shape)
    if lineage.has_lineage(operand):
        raise NotCovered("gather along the looked-up axis that is no lookup of rows")
    is_uniform = isinstance(indices, Lazy) and indices.base.shape[-1] == indices.shape[-1]
    if is_uniform and lineage.is_plain(operand) and not numbers.start_indices_batching_dims:
        return _gather_by_lazy_indices(ctx, eqn, operand, indices, out_shape)
    return ctx.bind(eqn, ctx.build(operand), ctx.build(indices))


def _check_no_other_column_fills(ctx: Context, eqn: Any, indices: Any, looked_up: set[int]) -> None:
    """Raises NotCovered if a column may fill rows, other than by the axes that are looked up.

    On an axis that slices take whole, every start but 0 is out of bounds.
    """
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return
    axes = enumerate(eqn.params["dimension_numbers"].start_index_map)
    whole = [column for column, axis in axes if axis not in looked_up]
    if any(proofs.single(ctx, column_of(ctx, indices, c)[0]) != 0 for c in whole):
        raise NotCovered("lookup by several indices that fills rows out of bounds")


def _single_rows(ctx: Context, operand: Any, indices: Any, numbers: Any) -> list[int]:
    """Finds the axes of size 1 that are looked up, as in the table of a single user."""
    shape = shape_of(operand)
    columns = [c for c, axis in enumerate(numbers.start_index_map) if shape[axis] == 1]
    if len(columns) > 1:
        columns = [c for c in columns if proofs.single(ctx, column_of(ctx, indices, c)[0]) is None]
    return [numbers.start_index_map[c] for c in columns]


def _fixed_positions(ctx: Context, eqn: Any, operand: Any, indices: Any) -> dict[int, int]:
    """Finds, by axis, the start that is proven equal for all slices: 0 in `x[index, 0]`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fixed = {}
    for column, axis in enumerate(numbers.start_index_map):
        size = shape_of(operand)[axis]
        if sizes[axis] == size or size == 1:
            continue
        start = proofs.single(ctx, column_of(ctx, indices, column)[0])
        if start is not None and 0 <= start <= size - sizes[axis]:
            fixed[axis] = start
    return fixed


def _gather_rows(
    ctx: Context, eqn: Any, operand: Any, indices: Any, axis: int, shape: tuple[int, ...]
) -> Any:
    """Looks rows up along `axis` by a list of indices, as a lazy value."""
    numbers = eqn.params["dimension_numbers"]
    if lineage.has_lineage(operand) and operand.axis != axis:
        raise NotCovered("rows looked up along one axis are looked up again along another")
    operand = lineage.spread_axes(operand, [axis])
    (out_axis,) = (d for d in range(len(shape)) if d not in numbers.offset_dims)
    count = shape_of(indices)[0]
    what = f"{lineage.text(operand)} looked up by {count} indices -> {lineage.text(operand, shape)}"
    column = numbers.start_index_map.index(axis)
    operand, fine = looked_up(ctx, eqn, operand, indices, column, axis)
    base = lineage.base_of(operand)
    found = ctx.recorder.found(eqn, what, True)
    # The result has the slices' dimensions in order, and the batch at `out_axis`. If the looked-up
    # dimension is not collapsed, the result has it with size 1, too.
    kept = [d for d in range(base.ndim) if d not in numbers.collapsed_slice_dims]
    source_dims = dict(zip(numbers.offset_dims, kept, strict=True)) | {out_axis: axis}
    order = [source_dims[d] for d in range(len(shape)) if d == out_axis or source_dims[d] != axis]
    collapsed = [d for d in numbers.collapsed_slice_dims if d != axis]
    order = collapsed + order
    base = base.transpose(order) if order != sorted(order) else base
    base = staged.squeeze(base, range(len(collapsed))) if collapsed else base
    extra = [d for d in range(len(shape)) if d != out_axis and source_dims[d] == axis]
    base = jnp.expand_dims(base, extra) if extra else base
    if lineage.has_lineage(operand):
        fine = ctx.scope.compose(operand.lineage, fine)
    return Lazy(base, tuple(shape), fine, out_axis, lineage.origins_of(operand) | {found})


def _gather_of_parts(ctx: Context, eqn: Any, operand: Concat, indices: Any) -> Any:
    """Looks up in each part of a concatenation by itself."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    along = operand.axis
    if along in numbers.collapsed_slice_dims or sizes[along] != operand.shape[along]:
        return taken.gather(ctx, eqn, operand, indices)
    kept = [d for d in range(len(sizes)) if d not in numbers.collapsed_slice_dims]
    shape, axis, parts = eqn.outvars[0].aval.shape, numbers.offset_dims[kept.index(along)], []
    for part, size in zip(operand.parts, operand.sizes, strict=True):
        part_sizes = (*sizes[:along], size, *sizes[along + 1 :])
        part_shape = (*shape[:axis], size, *shape[axis + 1 :])
        part_eqn = eqn.replace(params={**eqn.params, "slice_sizes": part_sizes})
        parts.append(_gather_rows_or_bind(ctx, part_eqn, part, indices, part_shape))
    return concat(parts, axis)


def _gather_by_parts(
    ctx: Context, eqn: Any, operand: Any, indices: Concat, shape: tuple[int, ...]
) -> Any:
    """Looks up by each part of concatenated ids, and concatenates the results."""
    numbers = eqn.params["dimension_numbers"]
    if indices.axis == len(indices.shape) - 1 or numbers.start_indices_batching_dims:
        raise NotCovered("gather by a concatenation of columns")
    if not lineage.is_plain(operand):
        raise NotCovered("gather by lazy indices in a lazy value")
    axis = [d for d in range(len(shape)) if d not in numbers.offset_dims][indices.axis]
    parts = []
    for part in indices.parts:
        part_shape = (*shape[:axis], part.shape[indices.axis], *shape[axis + 1 :])
        if isinstance(part, Concat):
            parts.append(_gather_by_parts(ctx, eqn, operand, part, part_shape))
        elif isinstance(part, Lazy):
            parts.append(_gather_by_lazy_indices(ctx, eqn, operand, part, part_shape))
        else:
            parts.append(ctx.bind(eqn, operand, ctx.build(part)))
    return concat(parts, axis)


def _gather_by_lazy_indices(
    ctx: Context, eqn: Any, operand: Any, indices: Lazy, shape: tuple[int, ...]
) -> Any:
    """Looks up by looked-up indices, as in an embedding of a user's ids."""
    numbers = eqn.params["dimension_numbers"]
    if not lineage.is_plain(operand) or numbers.start_indices_batching_dims:
        raise NotCovered("gather by lazy indices in a lazy value")
    if lineage.has_lineage(indices) and indices.axis == len(indices.shape) - 1:
        raise NotCovered("gather by an index vector that is looked up")
    # Equal positions look equal slices up. What the program promises of candidates' indices may not
    # hold for users': their order is another one, and users without candidates have indices, too.
    unknown = {"indices_are_sorted": False, "unique_indices": False}
    index = lineage.spread_axes(indices, [len(indices.shape) - 1]).base
    base = ctx.bind(eqn, operand, index, **unknown)
    batch_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    axis = batch_dims[indices.axis] if lineage.has_lineage(indices) else -1
    return at_user_batch(ctx, eqn, base, indices.lineage, axis, indices.origins, shape)


def _gather_of_features(ctx: Context, eqn: Any, operand: Lazy, indices: Any) -> Any:
    """Looks up along another axis than the looked-up axis, which every slice takes whole."""
    numbers, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    axis = operand.axis
    if axis in numbers.operand_batching_dims or sizes[axis] != operand.shape[axis]:
        raise NotCovered("gather that cuts the looked-up axis")
    operand = lineage.spread_axes(operand, range(len(operand.shape)))
    sizes[axis] = operand.base.shape[axis]
    base = ctx.bind(eqn, operand.base, ctx.build(indices), slice_sizes=tuple(sizes))
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(operand.shape)) if d not in removed]
    out_axis = numbers.offset_dims[kept.index(axis)]
    return at_user_batch(ctx, eqn, base, operand.lineage, out_axis, operand.origins)


def broadcast_in_dim(ctx: Context, eqn: Any, operand: Any, *dynamic: Any) -> Any:
    """Broadcasts, as a lazy value whose base has dimensions of size 1."""
    shape, dims = eqn.params["shape"], [int(d) for d in eqn.params["broadcast_dimensions"]]
    if dynamic:
        raise NotCovered("broadcast to a dynamic shape")
    if isinstance(operand, Concat):
        return _concat_broadcast(ctx, eqn, operand, shape, dims)
    seen, origins = shape_of(operand), lineage.origins_of(operand)
    if lineage.is_plain(operand) and math.prod(shape) == math.prod(seen):
        return ctx.bind(eqn, operand)
    if not lineage.has_lineage(operand) and not lineage.is_at_least(1, math.prod(seen)):
        what = f"{lineage.text(operand, seen)} broadcast -> {lineage.text(operand, shape)}"
        origins |= {ctx.recorder.found(eqn, what, False)}
    return _with_new_dims(operand, shape, dims, origins)


def _with_new_dims(x: Any, shape: tuple[int, ...], dims: list[int], origins: frozenset) -> Any:
    """Moves the dimensions of an array or a `Lazy` to `dims`; its base has size 1 in all others."""
    base = lineage.base_of(x)
    own = [1] * len(shape)
    for d, target in enumerate(dims):
        own[target] = np.shape(base)[d]
    base = staged.broadcast_in_dim(base, tuple(own), tuple(dims))
    users, axis = (x.lineage, dims[x.axis]) if lineage.has_lineage(x) else (None, -1)
    return lineage.lazy(base, shape, users, axis, origins)


def _concat_broadcast(ctx: Context, eqn: Any, operand: Concat, shape: Any, dims: Any) -> Any:
    axis, parts = dims[operand.axis], list[Any]()
    for part, size in zip(operand.parts, operand.sizes, strict=True):
        part_shape = (*shape[:axis], size, *shape[axis + 1 :])
        part_eqn = eqn.replace(params={**eqn.params, "shape": part_shape})
        parts.append(broadcast_in_dim(ctx, part_eqn, part))
    return Concat(tuple(parts), axis)


def tile(ctx: Context, eqn: Any, operand: Any) -> Any:
    """Repeats rows: a broadcast along a new dimension, and a reshape."""
    reps, seen = eqn.params["reps"], shape_of(operand)
    repeated = [d for d, rep in enumerate(reps) if not lineage.is_at_least(1, rep)]
    if len(repeated) != 1:
        return ctx.bind(eqn, ctx.materialise(eqn, operand, "tile along several dimensions"))
    (axis,) = repeated
    if lineage.has_lineage(operand) and operand.axis == axis:
        return reselect.concatenated(ctx, [operand] * reps[axis], axis, eqn.outvars[0].aval.shape)
    wide = (*seen[:axis], reps[axis], *seen[axis:])
    dims = [d + (d >= axis) for d in range(len(seen))]
    return reshaped_axes.repeated(ctx, eqn, operand, wide, dims, eqn.outvars[0].aval.shape)
