"""Rules of concatenations in another order, as of pairs of fields: `x[:, a] * x[:, b]`.

`x` has fields of users and of candidates, and `a` and `b` are positions that the program fixes. So
pairs of two users' fields stand between pairs with candidates' fields. Pairs of the same lookups
become one part of a concatenation; a `Taken` is the concatenation in the program's order. What is
summed over the pairs needs no order, and weights of the pairs are taken in the parts' order.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.report import kernels
from ikbo_jax.rewrite.rules import elementwise, placing, reshape
from ikbo_jax.rewrite.rules.batched import dims_of
from ikbo_jax.rewrite.rules.concatenation import of_one_lineage
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.equations import kept_dims
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Lazy,
    has_lineage,
    is_plain,
    of_bases,
    transposed,
)
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Taken

#: Elements that combine lookups in more ways than this are not sorted by them.
_MOST_GROUPS = 16
#: Weights in more runs than this are taken by a lookup, whose gradient is a scatter.
_MOST_SLICES = 32


class Sorted(NamedTuple):
    """Holds the parts of a value along an axis, one for each lookup.

    Attributes:
      values: the parts.
      group: for every position, the number of its part.
      offset: for every position, its position in the part.
    """

    values: Sequence[Any]
    group: np.ndarray
    offset: np.ndarray


def sorted_by_lookup(ctx: Context, x: Any, axis: int, most: int = _MOST_GROUPS) -> Sorted:
    """Sorts the parts of any value along `axis` by their lookups.

    Of more lookups than the root of `most`, only those of one lookup stay lazy.
    """
    if isinstance(x, Taken) and x.axis == axis:
        parts = x.inner.parts if isinstance(x.inner, Concat) else [x.inner]
        sizes, at = [part.shape[axis] for part in parts], np.array(x.at)
        group = np.repeat(np.arange(len(parts)), sizes)[at]
        return Sorted(parts, group, at - np.cumsum([0, *sizes])[group])
    group, offset = (np.zeros(shape_of(x)[axis], np.int64) for _ in range(2))
    if not isinstance(x, Concat) or x.axis != axis:
        return Sorted([x], group, np.arange(len(group)))
    fields: dict[Any, int] = {}
    for part, size in zip(x.parts, x.sizes, strict=True):
        if has_lineage(part):
            fields[part.lineage] = fields.get(part.lineage, 0) + size
    kept = max(fields, key=lambda x: fields[x], default=None)
    groups: dict[Any, list[Any]] = {}
    for part, start, stop in x.pieces():
        key: Any = is_plain(part) or id(part)
        if type(part) is Lazy:
            # Without a lookup, parts differ by the dimensions that they are broadcast along: in a
            # grid of users and items, users along the items and items along the users.
            key = part.lineage or tuple(n == 1 for n in part.base.shape)
        if len(fields) ** 2 > most and has_lineage(part) and part.lineage is not kept:
            part, key = ctx.materialise(None, part, "fields of many lookups"), True
        same = groups.setdefault(key, [])
        group[start:stop] = list(groups).index(key)
        offset[start:stop] = sum(y.shape[axis] for y in same) + np.arange(stop - start)
        same.append(part)
    values = [of_one_lineage(y, axis) if len(y) > 1 else y[0] for y in groups.values()]
    return Sorted(values, group, offset)


def in_order(parts: Sequence[Any], places: Sequence[np.ndarray], axis: int) -> Any:
    """Concatenates parts whose elements have these places along `axis`."""
    inside = (x.parts if isinstance(x, Concat) and x.axis == axis else (x,) for x in parts)
    flat = [x for own in inside for x in own]
    whole = Concat(tuple(flat), axis) if len(flat) > 1 else flat[0]
    return reordered(whole, np.argsort(np.concatenate(places), kind="stable"), axis)


def reordered(x: Any, at: np.ndarray, axis: int) -> Any:
    """Takes elements as `taken`, but leaves an array in its order until the program needs it."""
    is_array = is_plain(x) and not np.array_equal(at, np.arange(x.shape[axis]))
    return Taken(x, tuple(at.tolist()), axis) if is_array else taken(x, at, axis)


def taken(x: Any, at: np.ndarray, axis: int) -> Any:
    """Takes elements of any value at constant positions along `axis`."""
    shape = shape_of(x)
    if len(at) == shape[axis] and (at == np.arange(len(at))).all():
        return x
    if isinstance(x, Taken) and x.axis == axis:
        return taken(x.inner, np.array(x.at)[at], axis)
    if isinstance(x, Concat):
        if x.axis == axis:
            return Taken(x, tuple(at.tolist()), axis)
        return elementwise.concat([taken(part, at, axis) for part in x.parts], x.axis)
    if is_plain(x):
        return staged.take(x, at, axis)
    if not isinstance(x, Lazy) or x.axis == axis:
        raise NotCovered("fixed positions of a value that is looked up along the axis")
    base = x.base if x.base.shape[axis] == 1 else staged.take(x.base, at, axis)
    return Lazy(base, (*shape[:axis], len(at), *shape[axis + 1 :]), x.lineage, x.axis, x.origins)


def in_groups(
    ctx: Context, eqn: Any, operands: Sequence[Any], axes: Sequence[int | None], out: int | None
) -> Any:
    """Runs an equation on the positions that combine the same lookups, group by group.

    `axes` holds the axis of every operand; None for an operand that is the same at all positions.
    `out` is the axis of the result; None if the equation sums over the positions.
    """
    sides = {
        k: sorted_by_lookup(ctx, x, axis)
        for k, (x, axis) in enumerate(zip(operands, axes, strict=True))
        if axis is not None
    }
    keys = np.stack([side.group for side in sides.values()], axis=1)
    different, which = np.unique(keys, axis=0, return_inverse=True)
    if len(different) > _MOST_GROUPS:
        raise NotCovered("fields of many lookups")
    # Elements of one value whose order is another one stay in the order of the value.
    in_parts_order = (side for k, side in sides.items() if isinstance(operands[k], Taken))
    order = next(in_parts_order, next(iter(sides.values())))
    is_elementwise, results, places = eqn.primitive is not lax.concatenate_p, [], []
    for n, key in enumerate(different.tolist()):
        at, cut = (which.reshape(-1) == n).nonzero()[0], list(operands)
        at = at[np.argsort(order.offset[at], kind="stable")]
        parts = [side.values[number] for side, number in zip(sides.values(), key, strict=True)]
        for (k, side), part in zip(sides.items(), parts, strict=True):
            axis = axes[k] or 0
            is_mixed = is_elementwise and any(map(is_plain, parts)) and has_lineage(part)
            if is_mixed and len(at) > part.shape[axis]:
                # Rows are looked up before their elements are repeated beside a candidate's.
                part = ctx.materialise(eqn, part, "pairs with a candidate's fields", copied=False)
            cut[k] = taken(part, side.offset[at], axis)
        shape = [len(at) if d == out else n for d, n in enumerate(eqn.outvars[0].aval.shape)]
        results += ctx.run_equation(at_shapes(eqn, cut, [tuple(shape)]), cut)
        places.append(at)
    if out is None:
        return functools.reduce(lax.add, map(ctx.build, results))
    return in_order(results, places, out)


def _settled(ctx: Context, x: Taken) -> Taken:
    """Takes every element of the parts once, so that the parts' order is another order only."""
    if sorted(x.at) == list(range(x.inner.shape[x.axis])):
        return x
    side, parts, places = sorted_by_lookup(ctx, x, x.axis), list[Any](), list[np.ndarray]()
    for n in np.unique(side.group).tolist():
        places.append((side.group == n).nonzero()[0])
        parts.append(taken(side.values[n], side.offset[places[-1]], x.axis))
    at = np.argsort(np.concatenate(places)).tolist()
    return Taken(Concat(tuple(parts), x.axis), tuple(at), x.axis)


def across(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs an equation element by element, or a concatenation along another axis."""
    if eqn.primitive.name == "mul":
        eqn, operands = elementwise.with_mask(ctx, eqn, operands)
    axis = next(x.axis for x in operands if isinstance(x, Taken))
    size = eqn.outvars[0].aval.shape[axis]
    axes = [axis if shape_of(x)[axis : axis + 1] == (size,) else None for x in operands]
    return in_groups(ctx, eqn, operands, axes, axis)


def concatenate(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Concatenates, also along the axis itself."""
    axis = next(x.axis for x in operands if isinstance(x, Taken))
    if eqn.params["dimension"] != axis:
        return across(ctx, eqn, *operands)
    parts, places, start = [], [], 0
    for x in operands:
        at = np.arange(x.shape[axis])
        if isinstance(x, Taken):
            x = _settled(ctx, x)
            x, at = x.inner, np.argsort(x.at)
        parts.append(x)
        places.append(start + at)
        start += len(at)
    return in_order(parts, places, axis)


def in_place(ctx: Context, eqn: Any, x: Taken) -> Any:
    """Runs an equation that keeps the axis whole, reduces it, or merges it with axes after it."""
    x, shape = _settled(ctx, x), eqn.outvars[0].aval.shape
    axis = kept_dims(eqn, 0, eqn.outvars[0]).get(x.axis)
    at = np.array(x.at)
    if axis is None and eqn.primitive.name == "reshape":
        before = math.prod(x.shape[: x.axis])
        axis = next((d for d in range(len(shape)) if math.prod(shape[:d]) == before), None)
        width, rest = divmod(shape[axis or 0], len(at))
        axis = None if rest else axis
        at = (at[:, None] * width + np.arange(width)).reshape(-1)
    if axis is None and x.axis not in eqn.params.get("axes", ()):
        raise NotCovered(f"{eqn.primitive.name} along fixed positions")
    (result,) = ctx.run_equation(eqn, [x.inner])
    return result if axis is None else reordered(result, at, axis)


def dot_general(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Multiplies; the other operand is taken in the order of the parts."""
    contract, batch = dims_of(eqn)
    side = 0 if isinstance(operands[0], Taken) else 1
    x, other = operands[side], operands[1 - side]
    paired = ([*contract[n], *batch[n]] for n in (side, 1 - side))
    axis = dict(zip(*paired, strict=True)).get(x.axis)
    out = kept_dims(eqn, side, eqn.outvars[0]).get(x.axis)
    is_in_groups = isinstance(other, (Taken, Concat)) or has_lineage(other) and other.axis != axis
    if axis is not None and not is_in_groups:
        other = ctx.materialise(eqn, other, "product of a concatenation in another order")
        x = _settled(ctx, x)
        # XLA on a CPU transposes taken columns in the product, and has no kernel for 16 bits then.
        is_half = x.dtype.itemsize == 2 and not kernels.on_gpu()
        inner = of_bases(lax.optimization_barrier, x.inner) if is_half else x.inner
        given = [inner, staged.take(other, np.argsort(x.at), axis, _MOST_SLICES)]
        (result,) = ctx.run_equation(eqn, given[:: 1 - 2 * side])
        return result if out is None else reordered(result, np.array(x.at), out)
    return in_groups(ctx, eqn, operands, [x.axis, axis][:: 1 - 2 * side], out)


def gather(ctx: Context, eqn: Any, x: Any, indices: Any) -> Any:
    """Looks constant positions up, along one concatenated axis or along two."""
    axes = tuple(map(int, eqn.params["dimension_numbers"].start_index_map))
    positions, order = placing.constant_positions(ctx, eqn, x, indices, axes)
    result = _elements(ctx, eqn, x, positions, axes)
    kept = [d for d in range(len(x.shape)) if d not in axes[1:]]
    return moved(result, [kept.index(d) for d in order])


def moved(x: Any, order: Sequence[int]) -> Any:
    """Transposes any value."""
    if not isinstance(x, Taken) or list(order) == sorted(order):
        return transposed(x, order)
    return reordered(transposed(x.inner, order), np.array(x.at), list(order).index(x.axis))


def _elements(ctx: Context, eqn: Any, x: Any, positions: np.ndarray, axes: tuple[int, ...]) -> Any:
    """Takes elements at positions [count, axes]; the result has them along the first axis."""
    first, second = axes[0], axes[-1]
    # The outer one of two nested concatenations.
    outer = int(isinstance(x, Concat) and x.axis == second != first)
    rows, parts, places = sorted_by_lookup(ctx, x, axes[outer]), list[Any](), list[np.ndarray]()
    if len(axes) == 1:
        at, ends = positions[:, 0], np.cumsum([0, *(part.shape[first] for part in rows.values)])
        whole = Concat(tuple(rows.values), first) if len(rows.values) > 1 else rows.values[0]
        return taken(whole, ends[rows.group[at]] + rows.offset[at], first)
    if second != first + 1:
        raise NotCovered("fixed positions along axes that are apart")
    for m, row in enumerate(rows.values):
        columns = sorted_by_lookup(ctx, row, axes[1 - outer])
        of_block = columns.group[positions[:, 1 - outer]]
        for n, block in enumerate(columns.values):
            at = ((rows.group[positions[:, outer]] == m) & (of_block == n)).nonzero()[0]
            if at.size:
                own = rows.offset[positions[at, outer]], columns.offset[positions[at, 1 - outer]]
                flat = own[outer] * block.shape[second] + own[1 - outer]
                sizes = block.shape[first] * block.shape[second], *block.shape[second + 1 :]
                merged = reshape.reshape_to(ctx, eqn, block, (*block.shape[:first], *sizes))
                parts.append(taken(merged, flat, first))
                places.append(at)
    return in_order(parts, places, first)


def reshape_parts(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reshapes; two axes of nested concatenations, as of products of fields, may be merged."""
    inner = x.parts[0] if isinstance(x, Concat) else None
    if isinstance(inner, Concat) and abs(inner.axis - x.axis) == 1:
        first, shape = min(inner.axis, x.axis), tuple(eqn.outvars[0].aval.shape)
        rows, columns = x.shape[first : first + 2]
        if shape == (*x.shape[:first], rows * columns, *x.shape[first + 2 :]):
            every = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
            return _elements(ctx, eqn, x, every, (first, first + 1))
    return reshape.reshape(ctx, eqn, x)
