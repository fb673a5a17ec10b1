"""Rules of primitives that work row by row, and of primitives that only move data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import reselect
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Deferred,
    Lazy,
    Lineage,
    base_of,
    carries,
    has_lineage,
    is_plain,
    lazy,
    origins_of,
    spread,
    spread_axes,
)
from ikbo_jax.rewrite.values.registry import NotCovered

#: Primitives that work element by element and broadcast dimensions of size 1 themselves.
ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clz complex conj
    convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge
    gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min
    mul name ne neg nextafter not or population_count pow real reduce_precision rem round rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
""".split()  # noqa: SIM905  A table of words reads better.


def at_user_batch(
    ctx: Context, eqn: Any, base: Any, shape: Any, value_lineage: Any, axis: Any, origins: Any
) -> Any:
    """The value of a result computed at the smaller batch; records the saved work."""
    if value_lineage is not None:
        ctx.recorder.saved(eqn, origins, "work at the smaller batch", False)
    return lazy(base, tuple(shape), value_lineage, axis, origins)


def common_lineage(operands: Any) -> tuple[Lineage | None, int, bool]:
    """The first operand's lineage and axis, and whether another operand has different ones.

    Operands without a lineage do not count.
    """
    looked_up = [x for x in operands if has_lineage(x)]
    if not looked_up:
        return None, -1, False
    first = looked_up[0]
    differ = any((x.lineage, x.axis) != (first.lineage, first.axis) for x in looked_up)
    return first.lineage, first.axis, differ


def elementwise(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs at the smaller batch if all operands belong to it; otherwise looks rows up in place."""
    if eqn.primitive.name == "mul":
        eqn, operands = with_mask(ctx, eqn, operands)
    return elementwise_to(ctx, eqn, eqn.outvars[0].aval.shape, operands)


def with_mask(ctx: Context, eqn: Any, operands: Any) -> tuple[Any, Any]:
    """A product with the cast of a mask of the result's shape, as the select that XLA makes of it.

    XLA would not recognise it at the smaller batch, where the mask may be broadcast. A product with
    0 is NaN for infinity and NaN, which the select hides.
    """
    shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
    for x, cast, v in zip(operands, operands[::-1], eqn.invars[::-1], strict=True):
        if v.aval.shape != shape or shape_of(x) != shape:
            continue
        mask = ctx.provenance.cast_mask(cast)
        if mask is None:
            continue
        zero = lazy(lax.full((1,) * len(shape), 0, dtype), shape, None, -1, frozenset())
        return eqn.replace(primitive=lax.select_n_p, params={}), (mask, zero, x)
    return eqn, operands


def elementwise_to(ctx: Context, eqn: Any, shape: tuple[int, ...], operands: Any) -> Any:
    """`elementwise`, with a result of this shape."""
    if (found := _of_one_batch(ctx, eqn, shape, operands)) is not None:
        return found
    operands = [x if isinstance(x, Deferred) else narrowed(x) for x in operands]
    first = next((x for x in operands if isinstance(x, Concat)), None)
    if first is not None:
        return _over_parts(ctx, eqn, first, shape, operands)
    operands = lineage.aligned(operands)
    value_lineage, axis, differ = common_lineage(operands)
    if value_lineage is not None and (differ or any(carries(x, axis) for x in operands)):
        operand = "another lookup" if differ else "a value at candidate batch"
        reason = f"{eqn.primitive.name} with {operand}"
        operands = [
            ctx.materialise(eqn, x, reason, copied=False) if has_lineage(x) else x for x in operands
        ]
        value_lineage = None
    origins = origins_of(*operands)
    bases = [base_of(x) for x in operands]
    base = ctx.bind(eqn, *_common_shape(eqn, bases))
    if not origins and 1 < base.size < math.prod(shape):
        # One user, broadcast by a sum with zeros or by a product with ones.
        what = f"{lineage.text(base)} broadcast -> {lineage.text(base, shape)}"
        origins = frozenset({ctx.recorder.found(eqn, what, False)})
    return at_user_batch(ctx, eqn, base, shape, value_lineage, axis, origins)


def _of_one_batch(ctx: Context, eqn: Any, shape: tuple[int, ...], operands: Any) -> Any:
    """The result of the most frequent cases, in less time: traced arrays, or lookups by one index.

    None in all other cases.
    """
    first, traced = None, False
    for x in operands:
        if type(x) is Lazy:
            if x.lineage is None:
                return None
            if first is None:
                first = x
            elif x.lineage is not first.lineage or x.axis != first.axis:
                return None
        elif isinstance(x, jax.core.Tracer):
            traced = True
            if x.aval.shape != shape:  # type: ignore[attr-defined]
                return None
        elif isinstance(x, Deferred) or np.ndim(x):
            return None
    if first is None:
        return ctx.bind(eqn, *operands)
    if traced:
        return None
    bases = [x.base if type(x) is Lazy else x for x in operands]
    base = ctx.bind(eqn, *_common_shape(eqn, bases))
    return at_user_batch(ctx, eqn, base, shape, first.lineage, first.axis, origins_of(*operands))


#: Constant arrays of at most this size are searched for equal numbers.
_SMALL = 1 << 16


def narrowed(x: Any) -> Any:
    """A constant array of equal numbers as one number of the same rank."""
    if isinstance(x, (Deferred, jax.core.Tracer)) or not 1 < np.size(x) <= _SMALL:
        return x
    array = np.asarray(x).reshape(-1)
    first = array[:1]
    return first.reshape([1] * np.ndim(x)) if array.tobytes() == first.tobytes() * len(array) else x


def _common_shape(eqn: Any, bases: Sequence[Any]) -> Sequence[Any]:
    """Broadcasts the operands of primitives that require equal shapes, and equal shardings."""
    if eqn.primitive.name not in ("select_n", "clamp"):
        return bases
    shape = lax.broadcast_shapes(*(np.shape(x) for x in bases))
    return staged.alike([spread(x, shape) if np.ndim(x) else x for x in bases])


def _over_parts(
    ctx: Context, eqn: Any, first: Concat, shape: tuple[int, ...], operands: Any
) -> Any:
    """Runs an elementwise equation on each part of `first` and of other concatenations."""
    if _is_candidate_batch(first, operands):
        # No part would run at a smaller batch: one operation replaces one for every part.
        reason = f"{eqn.primitive.name} with a value at candidate batch"
        whole = [
            ctx.materialise(eqn, x, reason, copied=False) if isinstance(x, Concat) else x
            for x in operands
        ]
        return elementwise_to(ctx, eqn, shape, whole)
    for x in operands:
        if isinstance(x, Concat):
            if x.axis != first.axis or x.sizes != first.sizes:
                raise NotCovered(f"{eqn.primitive.name} of concatenations with different parts")
        elif has_lineage(x) and x.axis == first.axis:
            raise NotCovered(
                f"{eqn.primitive.name} with a value that is looked up along the concatenation"
            )

    def run(cut: list[Any], part_shape: tuple[int, ...]) -> Any:
        return elementwise_to(ctx, eqn, part_shape, cut)

    return concat(by_part(first, operands, shape, run), first.axis)


def by_part(
    first: Concat,
    operands: Any,
    shape: tuple[int, ...],
    run: Callable[[list[Any], tuple[int, ...]], Any],
) -> list[Any]:
    """The results of an operation on each part of a concatenation.

    Args:
      first: the concatenation.
      operands: concatenations with the parts of `first`, and values that are sliced alike.
      shape: of the whole result.
      run: takes the operands and the shape of a part.
    """
    parts, start, axis = [], 0, first.axis
    before, after = shape[:axis], shape[axis + 1 :]
    for number, size in enumerate(first.sizes):
        cut = [
            x.parts[number]
            if isinstance(x, Concat)
            else lineage.slice_along(x, start, start + size, axis)
            for x in operands
        ]
        parts.append(run(cut, (*before, size, *after)))
        start += size
    return parts


def _is_candidate_batch(first: Concat, operands: Any) -> bool:
    """Whether every lazy part is combined with a value that differs between candidates."""
    values = [x for x in operands if type(x) is not Concat]
    if not values:
        return False
    lazy_parts = [x for x in first.parts if not is_plain(x)]
    return all(
        has_lineage(part) and any(carries(x, part.axis) for x in values) for part in lazy_parts
    )


def concat(parts: list[Any], axis: int) -> Any:
    """The concatenation of parts: an array if all parts are arrays."""
    if not any(isinstance(x, Deferred) for x in parts):
        return staged.concatenate(parts, axis)
    return Concat(tuple(parts), axis)


def transpose(ctx: Context, eqn: Any, x: Any) -> Any:
    """A transpose, of the base or of every part."""
    permutation = [int(d) for d in eqn.params["permutation"]]
    if isinstance(x, Concat):
        parts = tuple(transpose(ctx, eqn, part) for part in x.parts)
        return Concat(parts, permutation.index(x.axis))
    base = ctx.bind(eqn, base_of(x))
    if is_plain(x):
        return base
    axis = permutation.index(x.axis) if x.lineage else -1
    return Lazy(base, tuple(x.shape[d] for d in permutation), x.lineage, axis, x.origins)


def reduction(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reductions that keep the looked-up axis."""
    axes = tuple(int(a) for a in eqn.params["axes"])
    if isinstance(x, Concat):
        if x.axis in axes:
            return _reduce_concat(ctx, eqn, x)
        parts = [reduction(ctx, eqn, part) for part in x.parts]
        return concat(parts, x.axis - sum(a < x.axis for a in axes))
    if is_plain(x):
        return ctx.bind(eqn, x)
    if x.axis in axes:
        raise NotCovered(f"{eqn.primitive.name} over the looked-up axis")
    x = spread_axes(x, axes)
    base = ctx.bind(eqn, x.base)
    shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    axis = x.axis - sum(a < x.axis for a in axes) if x.lineage else -1
    return at_user_batch(ctx, eqn, base, shape, x.lineage, axis, x.origins)


_COMBINED = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


def _reduce_concat(ctx: Context, eqn: Any, x: Concat) -> Any:
    """A reduction over the concatenated axis: of every part at its batch, then of the results."""
    combine = _COMBINED.get(eqn.primitive.name)
    if combine is None:
        raise NotCovered(f"{eqn.primitive.name} over a concatenation")
    total: Any = None
    for part in x.parts:
        reduced = ctx.materialise(eqn, reduction(ctx, eqn, part), "sum of parts", copied=False)
        total = reduced if total is None else combine(total, reduced)
    return total


#: Primitives that reduce some axes.
REDUCTIONS = (*_COMBINED, "reduce_xor", "argmax", "argmin")


def cumulative(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Cumulative operations along another axis than the looked-up axis."""
    along, x = eqn.params["axis"], operands[0]
    if len(operands) != 1 or isinstance(x, Concat):
        raise NotCovered(f"{eqn.primitive.name} of a concatenation or of several values")
    if x.axis == along:
        raise NotCovered(f"{eqn.primitive.name} along the looked-up axis")
    x = spread_axes(x, [along])
    return at_user_batch(ctx, eqn, ctx.bind(eqn, x.base), x.shape, x.lineage, x.axis, x.origins)


def slice_(ctx: Context, eqn: Any, x: Any) -> Any:
    """Slices the base or every part."""
    starts, stops = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides = list(eqn.params["strides"] or [1] * len(starts))
    whole = [
        (start, stop, stride) == (0, n, 1)
        for start, stop, stride, n in zip(starts, stops, strides, shape_of(x), strict=True)
    ]
    if isinstance(x, Concat):
        return _slice_concat(ctx, eqn, x, starts, stops, strides)
    if x.axis >= 0 and not whole[x.axis]:
        axis = x.axis
        x = reselect.sliced(ctx, eqn, x, starts[axis], stops[axis], strides[axis])
        starts[axis], stops[axis], strides[axis] = 0, x.shape[axis], 1
        if is_plain(x):
            rest = (tuple(stops), max(strides)) != (x.shape, 1) or any(starts)
            return lax.slice(x, starts, stops, strides) if rest else x
    shape = [-(-(b - a) // s) for a, b, s in zip(starts, stops, strides, strict=True)]
    for d, n in enumerate(x.base.shape):
        if n == 1 or d == x.axis:
            starts[d], stops[d], strides[d] = 0, n, 1
    bounds = zip(starts, stops, x.base.shape, strict=True)
    cut = any(stop - start != n for start, stop, n in bounds)
    # Slices that cut only the looked-up axis share one base.
    base = x.base
    if cut or max(strides) > 1:
        base = staged.slice_of(x.base, starts, stops, strides)
    return lazy(base, tuple(shape), x.lineage, x.axis, x.origins)


def _slice_concat(ctx: Context, eqn: Any, x: Concat, starts: Any, stops: Any, strides: Any) -> Any:
    if strides[x.axis] != 1:
        raise NotCovered("slice of a concatenation with a stride")
    parts, offset = [], 0
    for part, size in zip(x.parts, x.sizes, strict=True):
        first = max(starts[x.axis] - offset, 0)
        last = min(stops[x.axis] - offset, size)
        offset += size
        if first >= last:
            continue
        begin, end = list(starts), list(stops)
        begin[x.axis], end[x.axis] = first, last
        if is_plain(part):
            parts.append(staged.slice_of(part, begin, end, strides))
            continue
        params = {"start_indices": tuple(begin), "limit_indices": tuple(end)}
        parts.append(slice_(ctx, eqn.replace(params={**eqn.params, **params}), part))
    if not parts:
        raise NotCovered("empty slice of a concatenation")
    return parts[0] if len(parts) == 1 else concat(parts, x.axis)


def split(ctx: Context, eqn: Any, x: Any) -> Any:
    """Slices the value once for every piece."""
    axis, start, pieces = eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        if isinstance(x, Concat):
            ends = list(x.shape)
            begin = [0] * len(ends)
            begin[axis], ends[axis] = start, start + size
            params = {"start_indices": begin, "limit_indices": ends, "strides": None}
            pieces.append(slice_(ctx, eqn.replace(params=params), x))
        elif has_lineage(x) and x.axis == axis:
            pieces.append(reselect.sliced(ctx, eqn, x, start, start + size))
        else:
            pieces.append(lineage.slice_along(x, start, start + size, axis))
        start += size
    return pieces


def optimization_barrier(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Passes bases through the barrier."""
    if any(isinstance(x, Concat) for x in operands):
        raise NotCovered("optimization_barrier of a concatenation")
    bases = ctx.bind(eqn, *map(base_of, operands))
    return [
        base if is_plain(x) else dataclasses.replace(x, base=base)
        for x, base in zip(operands, bases, strict=True)
    ]
