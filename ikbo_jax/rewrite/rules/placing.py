"""Updates of slices at constant positions, as concatenations: `user[index].at[:, 0].set(cand)`.

A buffer that holds a user's rows, in which a slice is set to a candidate's values, is the
concatenation of the buffer's other slices and of these values.
"""

from typing import Any

import numpy as np

from ikbo_jax.rewrite.facts.known import known
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import concatenation
from ikbo_jax.rewrite.rules.elementwise import sliced_along
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, has_lineage, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered

#: Most pieces that become a concatenation.
_MOST_PIECES = 64


def placed(ctx: Context, eqn: Any, x: Any, pieces: dict[int, Any], axis: int) -> Any:
    """Writes each piece into `x` at its offset along `axis`, the key of `pieces`."""
    for value in (x, *pieces.values()):
        if has_lineage(value) and value.axis == axis:
            raise NotCovered(f"{eqn.primitive.name} along the looked-up axis")
        if not is_plain(value) and not isinstance(value, (Lazy, Concat)):
            raise NotCovered(f"{eqn.primitive.name} of a value that is not computed")
    parts, at = [], 0
    for start in sorted(pieces):
        if start < at:
            raise NotCovered(f"{eqn.primitive.name} of positions that repeat")
        if start > at:
            parts.append(sliced_along(ctx, x, at, start, axis))
        parts.append(pieces[start])
        at = start + shape_of(pieces[start])[axis]
    if at < shape_of(x)[axis]:
        parts.append(sliced_along(ctx, x, at, shape_of(x)[axis], axis))
    if len(parts) > _MOST_PIECES:
        raise NotCovered(f"{eqn.primitive.name} of many slices")
    if len(parts) == 1:
        return parts[0]
    return concatenation.concatenated(ctx, eqn, parts, axis, tuple(shape_of(x)))


def scattered(ctx: Context, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    """Scatters slices along one axis, at constant positions."""
    numbers = eqn.params["dimension_numbers"]
    if (
        eqn.primitive.name != "scatter"
        or len(numbers.scatter_dims_to_operand_dims) != 1
        or numbers.operand_batching_dims
    ):
        raise NotCovered(f"{eqn.primitive.name} with a value at candidate batch")
    (axis,) = map(int, numbers.scatter_dims_to_operand_dims)
    fixed = known(ctx, indices)
    if fixed is None:
        raise NotCovered("scatter of a value of candidates at positions that are not constant")
    positions = np.broadcast_to(fixed, shape_of(indices)).reshape(-1).tolist()
    if tuple(numbers.inserted_window_dims) not in ((), (axis,)):
        raise NotCovered("scatter of a value of candidates along several axes")
    rank = len(shape_of(x))
    if len(shape_of(indices)) == 1:
        if numbers.inserted_window_dims:
            updates = concatenation.with_new_axis(ctx, eqn, updates, axis)
        pieces = {positions[0]: updates}
    elif len(shape_of(indices)) == 2 and numbers.inserted_window_dims:
        if [d for d in range(rank) if d not in numbers.update_window_dims] != [axis]:
            raise NotCovered("scatter of a value of candidates in another order")
        if len(set(positions)) < len(positions):
            raise NotCovered("scatter of positions that repeat")
        pieces = {at: sliced_along(ctx, updates, n, n + 1, axis) for n, at in enumerate(positions)}
    else:
        raise NotCovered("scatter of a value of candidates in several windows")
    for at, piece in pieces.items():
        wanted, shape = list(shape_of(x)), list(shape_of(piece))
        if not 0 <= at <= wanted[axis] - shape[axis]:
            raise NotCovered("scatter out of bounds")
        wanted[axis] = shape[axis]
        if shape != wanted:
            raise NotCovered("scatter of a part of the rows")
    return placed(ctx, eqn, x, pieces, axis)


def update_slice(ctx: Context, eqn: Any, x: Any, update: Any, starts: Any) -> Any:
    """Updates whole slices along one axis at constant positions."""
    sizes, full = shape_of(update), shape_of(x)
    axes = [d for d, (n, m) in enumerate(zip(sizes, full, strict=True)) if n != m]
    if not axes:
        return update
    if len(axes) != 1:
        raise NotCovered("dynamic_update_slice of a value of candidates along several axes")
    (axis,) = axes
    start = known(ctx, starts[axis])
    if start is None:
        raise NotCovered("dynamic_update_slice of a value of candidates, not at a constant")
    at = clamped(ctx, start, full[axis] - sizes[axis])
    return placed(ctx, eqn, x, {at: update}, axis)


def clamped(ctx: Context, start: Any, last: int) -> int:
    """Clamps a constant position to [0, last]; `checkify` must find this in derivatives, too."""
    at = min(max(int(start), 0), last)
    if at != int(start):
        if ctx.differentiated:
            raise NotCovered("a position outside the array")
        ctx.gradient_differs()
    return at


def constant_positions(
    ctx: Context, eqn: Any, x: Any, indices: Any, axes: tuple[int, ...]
) -> tuple[np.ndarray, list[int]]:
    """Returns the constant positions [count, axes] at which a gather takes slices of size 1.

    The gather takes all other dimensions whole. The second result has the operand's dimension for
    every dimension of the gather's result: the first of `axes` for the positions' dimension.
    """
    numbers, shape = eqn.params["dimension_numbers"], shape_of(x)
    batched, batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    kept = [d for d in range(len(shape)) if d not in (*axes, *batched)]
    fixed = known(ctx, indices)
    if (
        tuple(numbers.start_index_map) != axes
        or tuple(numbers.collapsed_slice_dims) != axes
        or fixed is None
        or any(eqn.params["slice_sizes"][d] != shape[d] for d in kept)
        or len(shape_of(indices)) != len(batching) + 2
    ):
        raise NotCovered("gather that is no lookup of whole slices at constant positions")
    for dim in batching:
        # As of `take_along_axis`: all rows have the same positions.
        first = fixed.take([0], axis=dim)
        if fixed.shape[dim] > 1 and (fixed != first).any():
            raise NotCovered("gather at constant positions that differ between rows")
        fixed = first
    count = [n for d, n in enumerate(shape_of(indices)[:-1]) if d not in batching]
    positions = np.broadcast_to(fixed.reshape(-1, fixed.shape[-1]), (*count, len(axes)))
    if (positions < 0).any() or (positions >= [shape[a] for a in axes]).any():
        raise NotCovered("gather out of bounds")
    whole, of_indices = iter(kept), dict(zip(batching, batched, strict=True))
    rows = iter([of_indices.get(d, axes[0]) for d in range(len(batching) + 1)])
    rank = len(eqn.outvars[0].aval.shape)
    order = [next(whole if d in numbers.offset_dims else rows) for d in range(rank)]
    return positions.astype(np.int64), list(map(int, order))
