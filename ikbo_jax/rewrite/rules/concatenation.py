"""Rules of concatenations and stacks, whose parts stay lazy."""

import itertools
from typing import Any

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import reselect, reshape
from ikbo_jax.rewrite.rules.elementwise import (
    at_user_batch,
    by_part,
    common_lineage,
    concat,
    sliced_along,
)
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Lazy,
    base_of,
    carries,
    has_lineage,
    is_plain,
    joined,
    lazy,
    origins_of,
    spread_axes,
)
from ikbo_jax.rewrite.values.registry import NotCovered

#: A scan, or a cumulative sum, along more parts than this runs on the whole: each part is a loop.
MOST_LOOPS = 4


def concatenate(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Concatenates values, whose parts stay lazy."""
    axis, shape = eqn.params["dimension"], tuple(eqn.outvars[0].aval.shape)
    return concatenated(ctx, eqn, operands, axis, shape)


def concatenated(ctx: Context, eqn: Any, operands: Any, axis: int, shape: tuple[int, ...]) -> Any:
    """Concatenates values to the shape `shape`; their parts stay lazy."""
    first = operands[0]
    if shape_of(first)[axis] == 1 and all(x is first for x in operands):
        if tuple(first.shape) == shape:
            return first
        if not (is_plain(first) or isinstance(first, Lazy) and first.axis != axis):
            raise NotCovered("copies of a concatenation")
        what = f"{lineage.text(first)} repeated -> {lineage.text(first, shape)}"
        origins = origins_of(first) | {ctx.recorder.found(eqn, what, False)}
        if is_plain(first):
            return lazy(first, shape, None, -1, origins)
        return lazy(first.base, shape, first.lineage, first.axis, origins)
    if all(map(is_plain, operands)):
        return staged.concatenate(operands, axis)
    across = [x for x in operands if isinstance(x, Concat) and x.axis != axis]
    if across:
        return _concat_of_concats(ctx, eqn, across[0], operands, axis, shape)
    parts: list[Any] = []
    for x in operands:
        parts += x.parts if isinstance(x, Concat) and x.axis == axis else (x,)
    if any(has_lineage(x) and x.axis == axis for x in parts):
        return reselect.concatenated(ctx, parts, axis, shape)
    parts = lineage.aligned(parts)
    value_lineage, user_axis, differ = common_lineage(parts)
    one_lineage = value_lineage is not None and not differ
    if _are_as_wide(parts, axis) or (one_lineage and not any(carries(x, user_axis) for x in parts)):
        base, origins = concatenated_bases(parts, axis), origins_of(*parts)
        return at_user_batch(ctx, eqn, base, value_lineage, user_axis, origins, shape)
    return Concat(tuple(_joined_neighbours(parts, axis)), axis)


def _are_as_wide(parts: list[Any], axis: int) -> bool:
    """Whether no part is looked up, and the bases' shapes are equal but for the size of `axis`."""
    if any(map(has_lineage, parts)) or not all(is_plain(x) or type(x) is Lazy for x in parts):
        return False
    shapes = [shape_of(base_of(x)) for x in parts]
    return len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) == 1


def _concat_of_concats(
    ctx: Context, eqn: Any, first: Concat, operands: Any, axis: int, shape: tuple[int, ...]
) -> Any:
    """Concatenates concatenations along another axis, part by part."""
    for x in operands:
        if isinstance(x, Concat) and (x.axis, x.sizes) != (first.axis, first.sizes):
            raise NotCovered("concatenation of concatenations with different parts")
        if has_lineage(x) and x.axis == first.axis:
            raise NotCovered("concatenation with a value looked up along another axis")

    def run(cut: list[Any], part_shape: tuple[int, ...]) -> Any:
        return concatenated(ctx, eqn, cut, axis, part_shape)

    parts = by_part(first, operands, shape, run)
    for n, part in enumerate(parts):
        if isinstance(part, Concat):
            if any(map(has_lineage, part.parts)):
                raise NotCovered("concatenation of user and candidate along two axes")
            parts[n] = ctx.build(part)
    return concat(parts, first.axis)


def _joined_neighbours(parts: list[Any], axis: int) -> list[Any]:
    """Joins neighbouring parts of one lineage to one part."""

    def kind(x: Any) -> Any:
        return (id(x.lineage), x.axis) if has_lineage(x) else object()

    runs = [list(run) for _, run in itertools.groupby(parts, kind)]
    return [run[0] if len(run) == 1 else of_one_lineage(run, axis) for run in runs]


def of_one_lineage(parts: list[Any], axis: int) -> Any:
    """Concatenates parts of one lineage to one `Lazy` or array."""
    base, first = concatenated_bases(parts, axis), parts[0]
    if is_plain(first):
        return base
    shape = Concat(tuple(parts), axis).shape
    return lazy(base, shape, first.lineage, first.axis, origins_of(*parts))


def stack(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Concatenates along a new axis."""
    axis, shape = eqn.params["axis"], tuple(eqn.outvars[0].aval.shape)
    if len(operands) < 2 or all(map(is_plain, operands)) and operands[0] is not operands[1]:
        return ctx.bind(eqn, *map(ctx.build, operands))
    different = {id(x): x for x in operands}
    expanded = {key: with_new_axis(ctx, eqn, x, axis) for key, x in different.items()}
    return concatenated(ctx, eqn, [expanded[id(x)] for x in operands], axis, shape)


def with_new_axis(ctx: Context, eqn: Any, x: Any, axis: int) -> Any:
    """Adds an axis of size 1 to a value."""
    shape = shape_of(x)
    return reshape.reshape_to(ctx, eqn, x, (*shape[:axis], 1, *shape[axis:]))


def unstack(ctx: Context, eqn: Any, x: Any) -> Any:
    """Slices along an axis, without the axis."""
    axis = eqn.params["axis"]
    if any(has_lineage(y) and y.axis == axis for y in (x.parts if isinstance(x, Concat) else [x])):
        raise NotCovered("unstack of the looked-up axis")
    pieces = (sliced_along(ctx, x, n, n + 1, axis) for n in range(x.shape[axis]))
    return [reshape.reshape_to(ctx, eqn, piece, eqn.outvars[0].aval.shape) for piece in pieces]


def concatenated_bases(parts: Any, axis: int) -> Any:
    """Concatenates the bases of values of one lineage."""
    return joined([base_of(spread_axes(part, [axis])) for part in parts], axis)


def without_padding(ctx: Any, whole: Concat, other: Any, axis: int) -> tuple[Any, Any]:
    """Removes the parts of a product's summed axis in which both operands are zero.

    Such zeros pad the summed axis to a size that tensor cores like. If only one of the two were
    zero, the other might be infinite. `axis` is the summed axis of `other`, which is no lookup; the
    second result is no concatenation.
    """
    zeros = _zeros_along(ctx, other, axis)
    if zeros or isinstance(other, Concat):
        other = ctx.build(other)
    if not zeros:
        return whole, other
    kept = []
    for part, begin, end in whole.pieces():
        within = any(low <= begin and end <= high for low, high in zeros)
        if not (within and proofs.constant(ctx, part) == 0):
            kept.append((part, begin, end))
    if len(kept) in (0, len(whole.parts)):
        return whole, other
    parts = [part for part, _, _ in kept]
    slices = [staged.slice_in_dim(other, begin, end, axis) for _, begin, end in kept]
    rest = concat(parts, whole.axis) if len(parts) > 1 else parts[0]
    return rest, staged.concatenate(slices, axis)


def _zeros_along(ctx: Any, x: Any, axis: int) -> list[tuple[int, int]]:
    """Finds ranges of an axis in which an array, or arrays concatenated, are proven to be zero."""
    if isinstance(x, Concat):
        if x.axis != axis:
            return []
        return [(low, high) for part, low, high in x.pieces() if proofs.constant(ctx, part) == 0]
    name, eqn, operands = ctx.made_by(x)
    if name != "pad" or proofs.constant(ctx, operands[1]) != 0:
        return []
    low, high, _ = eqn.params["padding_config"][axis]
    size = shape_of(x)[axis]
    return [(0, low), (size - high, size)]
