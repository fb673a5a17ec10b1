"""Lookups and updates in every row at positions of the same row, such as a history's last item.

`history[index][jnp.arange(batch), length[index] - 1]` takes one item of every candidate's row. Both
the rows and the positions are looked up by the same index, so that the items are taken at user
batch. `jnp.take_along_axis` and `jax.vmap` write the same by batching dimensions.
"""

from typing import Any

import jax
import numpy as np
from jax import lax

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules.elementwise import at_user_batch, concat
from ikbo_jax.rewrite.rules.reshaped_axes import equation, to_shape
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage
from ikbo_jax.rewrite.values.registry import NotCovered

#: Candidates' positions that the program promises to be sorted may be unsorted in users' order.
_OF_USERS = {"indices_are_sorted": False}


def columns(indices: Any) -> tuple[Any, ...]:
    """Splits index vectors into their parts along the last dimension."""
    if isinstance(indices, Concat) and indices.axis == len(indices.shape) - 1:
        return indices.parts
    return (indices,)


def are_in_parts(indices: Any) -> bool:
    """Whether index vectors are a concatenation with looked-up parts, or of concatenations."""
    parts = indices.parts if isinstance(indices, Concat) else ()
    return any(map(lineage.has_lineage, parts)) or Concat in map(type, parts)


def are_looked_up(indices: Any) -> bool:
    """Whether index vectors hold looked-up positions, and their vectors are whole."""
    vector = len(shape_of(indices)) - 1
    return any(lineage.has_lineage(x) and x.axis != vector for x in columns(indices))


def gather(ctx: Context, eqn: Any, operand: Any, indices: Any, axis: int | None = None) -> Any:
    """Looks up in every row of `operand`, at positions that are looked up as the row is.

    `axis` is the axis of the rows if it is known; otherwise it is proven here.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, *parts = lineage.aligned([operand, *columns(indices)])
    users, dim = _lineage_of(parts)
    mapped, batching = numbers.start_index_map, numbers.start_indices_batching_dims
    if axis is None:
        axis = _axis_of_rows(ctx, parts, dim, mapped, numbers.operand_batching_dims, batching)
    if eqn.params["slice_sizes"][axis] != 1:
        raise NotCovered("gather of several rows at looked-up positions")
    _check_rows(eqn, operand, users, axis)
    base = ctx.bind(
        eqn,
        lineage.rows_of(operand, axis, users.users),
        _indices_at_users(parts, mapped, axis, dim, users),
        **_OF_USERS,
    )
    rank = len(eqn.outvars[0].aval.shape)
    out_axis = [d for d in range(rank) if d not in numbers.offset_dims][dim]
    return at_user_batch(ctx, eqn, base, users, out_axis, lineage.origins_of(operand, *parts))


def gather_of_candidates(ctx: Context, eqn: Any, operand: Lazy, indices: Any) -> Any:
    """Looks up in looked-up rows at a candidate's positions, as of retrieved items.

    The positions become pairs of a user and a position, by which the users' rows are looked up.
    """
    numbers = eqn.params["dimension_numbers"]
    axis, batching = operand.axis, list(numbers.operand_batching_dims)
    of_indices = numbers.start_indices_batching_dims
    dim = int(of_indices[batching.index(axis)])
    assert operand.lineage is not None
    indices = ctx.build(indices)
    if not np.issubdtype(indices.dtype, np.signedinteger):
        raise NotCovered("gather at unsigned positions of looked-up rows")
    if operand.lineage.users - 1 > np.iinfo(indices.dtype).max:
        raise NotCovered("gather at positions of fewer bits than users")
    column = lax.convert_element_type(operand.lineage.index, indices.dtype)
    column = lax.broadcast_in_dim(column, (*indices.shape[:-1], 1), (dim,))
    numbers = numbers._replace(
        collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, axis))),
        start_index_map=(axis, *numbers.start_index_map),
        operand_batching_dims=tuple(a for a in batching if a != axis),
        start_indices_batching_dims=tuple(d for d in of_indices if d != dim),
    )
    operand = lineage.spread_axes(operand, range(len(operand.shape)))
    ctx.recorder.saved(eqn, operand.origins, "lookup of pairs", True)

    def look_up(base: Any, column: Any, indices: Any) -> Any:
        pairs = lax.concatenate([column, indices], indices.ndim - 1)
        unknown = {"indices_are_sorted": False, "unique_indices": False}
        return ctx.bind(eqn, base, pairs, dimension_numbers=numbers, **unknown)

    sharding = eqn.outvars[0].aval.sharding
    return staged.over_auto_axes(look_up, sharding)(operand.base, column, indices)


def along_whole_axis(ctx: Context, eqn: Any, indices: Any) -> tuple[Any, Any]:
    """Takes an axis of the operand whole if equal index vectors look all of its elements up.

    So does an index that is broadcast along features: in `take_along_axis`, whose features are a
    batching dimension, and in `x[index[:, None], arange(width)]`, where a column counts them.
    Returns the equation and the index vectors without this axis, or as they are if there is none.
    """
    numbers, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    batched, batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    parts, mapped = columns(indices), numbers.start_index_map
    shape, rank = eqn.invars[0].aval.shape, len(eqn.outvars[0].aval.shape)
    removed = (*numbers.collapsed_slice_dims, *batched)
    out = [d for d in range(rank) if d not in numbers.offset_dims]
    for dim, size in enumerate(shape_of(indices)[:-1]):
        kept, axis = parts, -1
        if dim in batching:
            axis = batched[list(batching).index(dim)]
        elif len(parts) == len(mapped) > 1:
            counts = [n for n, x in enumerate(parts) if proofs.counts_along(ctx, x, dim)]
            axis = mapped[counts[0]] if len(counts) == 1 else -1
            kept = tuple(x for n, x in enumerate(parts) if n not in counts)
        if (
            axis not in removed
            or size == 1
            or shape[axis] != size
            or not all(type(x) is Lazy and x.axis != dim and x.base.shape[dim] == 1 for x in kept)
        ):
            continue
        window = sorted([axis, *(a for a in range(len(shape)) if a not in removed)])
        offset = sorted([out[dim], *numbers.offset_dims])
        # A slice's dimensions are in the operand's order.
        if window.index(axis) != offset.index(out[dim]):
            continue
        sizes[axis] = size
        numbers = numbers._replace(
            offset_dims=tuple(offset),
            collapsed_slice_dims=tuple(a for a in numbers.collapsed_slice_dims if a != axis),
            start_index_map=tuple(a for a in mapped if a != axis),
            operand_batching_dims=tuple(a for a in batched if a != axis),
            start_indices_batching_dims=tuple(d - (d > dim) for d in batching if d != dim),
        )
        of_rows = [_without_dimension(ctx, eqn, x, dim) for x in kept]
        vectors = of_rows[0] if len(kept) == 1 else concat(of_rows, len(shape_of(of_rows[0])) - 1)
        given = {"dimension_numbers": numbers, "slice_sizes": tuple(sizes), **_OF_USERS}
        operand, result = eqn.invars[0].aval, eqn.outvars[0].aval.shape
        return at_shapes(eqn, [operand, vectors], [result], **given), vectors
    return eqn, indices


def _without_dimension(ctx: Context, eqn: Any, x: Lazy, dim: int) -> Any:
    """Removes a dimension along which a value is broadcast."""
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    params = {"start_indices": (0,) * len(shape), "limit_indices": shape, "strides": None}
    (first,) = ctx.run_equation(equation(eqn, lax.slice_p, [x], shape, params), [x])
    return to_shape(ctx, eqn, first, (*shape[:dim], *shape[dim + 1 :]))


def scatter(ctx: Context, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    """Updates every row of `x`, at positions that are looked up as the row is."""
    numbers = eqn.params["dimension_numbers"]
    x, updates, *parts = lineage.aligned([x, updates, *columns(indices)])
    users, dim = _lineage_of(parts)
    mapped, batching = numbers.scatter_dims_to_operand_dims, numbers.scatter_indices_batching_dims
    axis = _axis_of_rows(ctx, parts, dim, mapped, numbers.operand_batching_dims, batching)
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    if axis not in removed or shape_of(x)[axis] != shape_of(parts[0])[dim]:
        raise NotCovered(f"{eqn.primitive.name} of several rows at looked-up positions")
    rank = len(shape_of(updates))
    update_axis = [d for d in range(rank) if d not in numbers.update_window_dims][dim]
    _check_rows(eqn, x, users, axis)
    _check_rows(eqn, updates, users, update_axis)
    base = ctx.bind(
        eqn,
        lineage.rows_of(x, axis, users.users),
        _indices_at_users(parts, mapped, axis, dim, users),
        lineage.rows_of(updates, update_axis, users.users),
        **_OF_USERS,
    )
    return at_user_batch(ctx, eqn, base, users, axis, lineage.origins_of(x, updates, *parts))


def _lineage_of(parts: list[Any]) -> tuple[Lineage, int]:
    """Returns the only lineage of index vectors, and the dimension that it looks up."""
    if not all(lineage.is_plain(x) or isinstance(x, Lazy) for x in parts):
        raise NotCovered("positions that are a concatenation")
    found = {(x.lineage, x.axis) for x in parts if isinstance(x, Lazy) and x.lineage is not None}
    if len(found) != 1:
        raise NotCovered("positions by different lookups")
    users, dim = found.pop()
    return users, dim


def _axis_of_rows(
    ctx: Context, parts: list[Any], dim: int, mapped: Any, batched: Any, batching: Any
) -> int:
    """Finds the axis of the operand along which every row takes its own row.

    It is a batching dimension, or the axis of a column that is proven to count the rows.
    """
    if dim in batching:
        return int(batched[list(batching).index(dim)])
    column, counts = 0, []
    for part in parts:
        width = shape_of(part)[-1]
        if not lineage.has_lineage(part) and width == 1 and proofs.counts_along(ctx, part, dim):
            counts.append(column)
        column += width
    if len(counts) != 1:
        raise NotCovered("positions of other rows")
    return int(mapped[counts[0]])


def _check_rows(eqn: Any, x: Any, users: Lineage, axis: int) -> None:
    """Raises NotCovered unless a value has the users' rows along `axis`, or equal rows."""
    if isinstance(x, Concat) or not lineage.is_plain(x) and not isinstance(x, Lazy):
        raise NotCovered(f"{eqn.primitive.name} at looked-up positions of a concatenation")
    if lineage.has_lineage(x) and (x.lineage, x.axis) != (users, axis):
        raise NotCovered(f"{eqn.primitive.name} at positions by another lookup")
    if lineage.carries(x, axis):
        raise NotCovered(f"{eqn.primitive.name} at looked-up positions of a value of candidates")


def _indices_at_users(
    parts: list[Any], mapped: Any, axis: int, dim: int, users: Lineage
) -> jax.Array:
    """Returns users' index vectors: their own row number along `axis`, and their positions."""
    arrays, column = [], 0
    for part in parts:
        width = shape_of(part)[-1]
        if width == 1 and not lineage.has_lineage(part) and mapped[column] == axis:
            shape = list(shape_of(part))
            shape[dim] = users.users
            arrays.append(lax.broadcasted_iota(part.dtype, tuple(shape), dim))
        else:
            if lineage.carries(part, dim):
                raise NotCovered("positions of candidates")
            arrays.append(lineage.rows_of(part, dim, users.users))
        column += width
    return arrays[0] if len(arrays) == 1 else staged.concatenate(arrays, arrays[0].ndim - 1)
