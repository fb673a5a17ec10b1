"""Lookups in reshaped values or by reshaped indices, and updates of reshaped values.

A lookup by an index of several dimensions is a lookup by the flattened index, reshaped.
"""

import math
from typing import Any

import numpy as np
from jax import lax

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import positions
from ikbo_jax.rewrite.rules.reshaped_axes import (
    again,
    axes_at,
    axes_of,
    equation,
    flattened,
    run_before,
    to_shape,
)
from ikbo_jax.rewrite.values.lineage import Concat, has_lineage, is_at_least, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Group, Reshaped, is_split, plain_groups


def flat_indices(ctx: Context, eqn: Any, indices: Any) -> Any:
    """Merges all dimensions of gather indices but the last, which holds the index vectors.

    Columns are merged one by one, so that proofs find where they come from.
    """
    shape = shape_of(indices)
    count = math.prod(shape[:-1])
    name, made_by, operands = ctx.made_by(indices)
    if name == "concatenate" and made_by.params["dimension"] == len(shape) - 1:
        flat = [flat_indices(ctx, eqn, x) for x in operands]
        params: dict[str, Any] = {"dimension": 1}
        joined = equation(eqn, lax.concatenate_p, flat, (count, shape[-1]), params)
        return ctx.run_equation(joined, flat)[0]
    if not is_plain(indices):
        # A column of equal numbers, as of `x[index, 0]`.
        number = proofs.single(ctx, indices)
        column = ctx.build(indices) if number is None else np.full(shape, number, indices.dtype)
        return column.reshape(count, shape[-1])
    if name in ("broadcast_in_dim", "reshape") and shape == (*shape_of(operands[0]), 1):
        index = to_shape(ctx, eqn, proofs.selected(ctx, operands[0]), (count,))
        params = {"shape": (count, 1), "broadcast_dimensions": (0,), "sharding": None}
        column = equation(eqn, lax.broadcast_in_dim_p, [index], (count, 1), params)
        return ctx.run_equation(column, [index])[0]
    return to_shape(ctx, eqn, indices, (count, shape[-1]))


def gather(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks up in a reshaped value, or by reshaped indices."""
    if is_split(operand) or is_split(indices):
        return _gather_split(ctx, eqn, operand, indices)
    return _gather_merged(ctx, eqn, operand, indices)


def _gather_merged(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks rows up by indices that are flattened before the lookup."""
    numbers = eqn.params["dimension_numbers"]
    if not isinstance(indices, Reshaped) or isinstance(operand, Reshaped):
        raise NotCovered("lookup in a value whose looked-up axis is merged by a reshape")
    if len(indices.groups[-1].before) != 1 or numbers.start_indices_batching_dims:
        raise NotCovered("lookup by index vectors that are merged by a reshape")
    rest = iter(indices.groups[:-1])
    own = enumerate(plain_groups(eqn.outvars[0].aval.shape))
    out = axes_of(tuple([x if d in numbers.offset_dims else next(rest) for d, x in own]))
    numbers = numbers._replace(offset_dims=out.before(numbers.offset_dims))
    operands = [operand, indices.inner]
    return run_before(ctx, eqn, operands, out, dimension_numbers=numbers)


def _position(dims: list[int], dim: int) -> int:
    """Finds a dimension in a list; NotCovered if it is not there."""
    if dim not in dims:
        raise NotCovered("lookup along dimensions that look rows up together")
    return dims.index(dim)


def _gather_split(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks up in other dimensions of a split value, or by split indices, or in each table."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, of_tables = eqn.outvars[0].aval.shape, list(map(int, numbers.operand_batching_dims))
    of_indices = list(map(int, numbers.start_indices_batching_dims))
    on, on_indices = (
        axes_of(x.groups, x.order) if is_split(x) else axes_of(plain_groups(shape_of(x)))
        for x in (operand, indices)
    )
    if on.special and on.together[0] in of_tables:
        dims = [of_indices[_position(of_tables, d)] for d in on.together]
        on_indices = on.at(shape_of(indices), dims)
    elif on.special:
        whole = on.groups[on.special[0]].sizes
        if on_indices.special or tuple([sizes[d] for d in on.together]) != whole:
            raise NotCovered("lookup along dimensions that look rows up together")
        removed = (*numbers.collapsed_slice_dims, *of_tables)
        kept = [d for d in range(len(sizes)) if d not in removed]
        out = on.at(shape, [numbers.offset_dims[kept.index(d)] for d in on.together])
    elif of_tables:
        dims = [of_tables[_position(of_indices, d)] for d in on_indices.together]
        on = on_indices.at(shape_of(operand), dims)
    if on_indices.special:
        batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
        out = on_indices.at(shape, [batch[d] for d in on_indices.together])
        indices = flattened(ctx, eqn, indices, on_indices)
    if on.special:
        operand = flattened(ctx, eqn, operand, on)
    sizes = tuple(
        sizes[dims[0]] if x.is_plain or dims[0] in of_tables else x.before[0]
        for dims, x in zip(on.dims, on.groups, strict=True)
    )
    numbers = numbers._replace(
        offset_dims=out.before(numbers.offset_dims),
        collapsed_slice_dims=on.before(numbers.collapsed_slice_dims),
        start_index_map=on.before(numbers.start_index_map),
        operand_batching_dims=on.before(of_tables),
        start_indices_batching_dims=on_indices.before(of_indices),
    )
    given = {"dimension_numbers": numbers, "slice_sizes": sizes}
    return run_before(ctx, eqn, [operand, indices], out, **given)


def scatter(ctx: Context, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    """Updates the same positions of every row."""
    numbers = eqn.params["dimension_numbers"]
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(shape_of(x))) if d not in removed]
    window = list(map(int, numbers.update_window_dims))
    is_same = not isinstance(indices, Reshaped) and not numbers.operand_batching_dims
    if not is_same or not (is_split(x) or is_split(updates)):
        raise NotCovered(f"{eqn.primitive.name} at looked-up positions")
    if is_split(x):
        on = axes_of(x.groups, x.order)
        dims = [window[_position(kept, d)] for d in on.together]
        of_updates = on.at(shape_of(updates), dims)
    else:
        of_updates = axes_of(updates.groups, updates.order)
        dims = [kept[_position(window, d)] for d in of_updates.together]
        on = of_updates.at(shape_of(x), dims)
    whole, shape = on.groups[on.special[0]].sizes, shape_of(updates)
    if tuple([shape[d] for d in of_updates.together]) != whole:
        raise NotCovered(f"{eqn.primitive.name} along dimensions that look rows up together")
    numbers = numbers._replace(
        update_window_dims=of_updates.before(window),
        inserted_window_dims=on.before(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=on.before(numbers.scatter_dims_to_operand_dims),
    )
    x, updates = (flattened(ctx, eqn, y, axes) for y, axes in ((x, on), (updates, of_updates)))
    return run_before(ctx, eqn, [x, indices, updates], on, dimension_numbers=numbers)


def looks_up_by_dimensions(eqn: Any, operand: Any, indices: Any) -> bool:
    """Whether a lookup by an index of several dimensions may have fewer rows than indices."""
    numbers = eqn.params["dimension_numbers"]
    if len(shape_of(indices)) < 3 or numbers.operand_batching_dims:
        return False
    if not is_plain(indices) and type(indices) is not Concat or positions.are_in_parts(indices):
        return False
    if has_lineage(operand) and operand.axis not in numbers.start_index_map:
        return False
    count, sizes = math.prod(shape_of(indices)[:-1]), eqn.params["slice_sizes"]
    shape = shape_of(operand)
    return any(sizes[a] == 1 and is_at_least(count, shape[a] + 1) for a in numbers.start_index_map)


def gather_by_dimensions(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks rows up by an index of several dimensions: by the flattened index."""
    if isinstance(indices, Concat):
        whole, vectors = positions.along_whole_axis(ctx, eqn, indices)
        if whole is not eqn:
            return ctx.run_equation(whole, [operand, vectors])[0]
    numbers, sizes = eqn.params["dimension_numbers"], shape_of(indices)[:-1]
    shape = eqn.outvars[0].aval.shape
    dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    out = axes_at(shape, [(dims, Group(sizes, (math.prod(sizes),)))])
    flat = flat_indices(ctx, eqn, indices)
    numbers = numbers._replace(offset_dims=out.before(numbers.offset_dims))
    operands = [operand, flat]
    inner = at_shapes(eqn, operands, [out.before_shape], dimension_numbers=numbers)
    (result,) = ctx.run_equation(inner, operands)
    if is_plain(result) and is_plain(operand):
        return ctx.bind(eqn, operand, ctx.build(indices))
    if kept := [d for d in dims if shape[d] != 1]:
        # Dimensions of size 1 look nothing up.
        group = Group(tuple([shape[d] for d in kept]), (math.prod(sizes),))
        out = axes_at(shape, [(kept, group)])
        result = to_shape(ctx, eqn, result, out.before_shape)
    return again(ctx, eqn, result, out)
