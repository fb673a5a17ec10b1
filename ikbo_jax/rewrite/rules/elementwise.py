"""Rules of primitives that work row by row, and of primitives that only move data."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

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
    is_only_broadcast,
    is_plain,
    lazy,
    origins_of,
    spread,
    transposed,
)
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.rows import take_rows

#: Primitives that work element by element and broadcast dimensions of size 1 themselves.
ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log
    log1p log2 logistic lt lt_to max min mul name ne neg nextafter not one_minus_square or polygamma
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
""".split()  # noqa: SIM905  A table of words reads better.


def at_user_batch(
    ctx: Context, eqn: Any, base: Any, users: Any, axis: int, origins: Any, shape: Any = None
) -> Any:
    """Returns a result computed at the smaller batch as a value; records the saved work.

    `users` is its lineage, or None; its shape is the equation's unless it is a part of the result.
    """
    if users is not None:
        ctx.recorder.saved(eqn, origins, "work at the smaller batch", False)
    shape = eqn.outvars[0].aval.shape if shape is None else shape
    return lazy(base, shape, users, axis, origins)


def common_lineage(operands: Any) -> tuple[Lineage | None, int, bool]:
    """Returns the first operand's lineage and axis, and whether another operand's differ.

    Operands without a lineage do not count.
    """
    looked_up = [x for x in operands if has_lineage(x)]
    if not looked_up:
        return None, -1, False
    first = looked_up[0]
    differ = any((x.lineage, x.axis) != (first.lineage, first.axis) for x in looked_up)
    return first.lineage, first.axis, differ


def of_one_user(ctx: Context, x: Any, axis: int) -> Any:
    """Looks a value that is only broadcast along `axis` up in a batch of one user."""
    if not is_only_broadcast(x) or x.base.shape[axis] != 1 or x.shape[axis] == 1:
        return x
    return dataclasses.replace(x, lineage=ctx.scope.of_one_user(x.shape[axis]), axis=axis)


def elementwise(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs at the smaller batch if all operands belong to it; otherwise looks rows up in place."""
    if eqn.primitive.name == "mul":
        eqn, operands = with_mask(ctx, eqn, operands)
    if eqn.primitive.name == "select_n" and not ctx.differentiated:
        for x, y in itertools.permutations(operands[1:], 2):
            if _is_stopped(ctx, x, y):
                ctx.gradient_differs()
                return x
    return elementwise_to(ctx, eqn, eqn.outvars[0].aval.shape, operands)


def _is_stopped(ctx: Context, x: Any, y: Any) -> bool:
    """Whether y is x without its gradient, as `vmap` of a `cond` gives it to the other branch."""
    of_y = ctx.scope.producer(y, ("broadcast_in_dim", "stop_gradient"))
    if of_y is None or of_y[0].primitive.name == "stop_gradient":
        return of_y is not None and of_y[1][0] is x
    of_x = ctx.scope.producer(x, ("broadcast_in_dim",))
    if of_x is None or of_x[0].params != of_y[0].params:
        return False
    return _is_stopped(ctx, of_x[1][0], of_y[1][0])


def with_mask(ctx: Context, eqn: Any, operands: Any) -> tuple[Any, Any]:
    """Replaces a product with the cast of a mask of the result's shape by XLA's select.

    XLA would not recognise it at the smaller batch, where the mask may be broadcast. A product with
    0 is NaN for infinity and NaN, which the select hides.
    """
    shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
    sides = zip(operands, eqn.invars, operands[::-1], eqn.invars[::-1], strict=True)
    for x, of_x, cast, v in sides:
        if v.aval.shape != shape or shape_of(x) != shape:
            continue
        mask = ctx.scope.cast_mask(cast)
        if mask is None:
            continue
        zero = lazy(lax.full((1,) * len(shape), 0, dtype), shape, None, -1, frozenset())
        invars = [core.Var(jax.core.ShapedArray(shape, np.dtype(bool))), of_x, of_x]
        return eqn.replace(primitive=lax.select_n_p, params={}, invars=invars), (mask, zero, x)
    return eqn, operands


def elementwise_to(ctx: Context, eqn: Any, shape: tuple[int, ...], operands: Any) -> Any:
    """Runs `elementwise`, with a result of this shape."""
    if (found := _of_one_batch(ctx, eqn, shape, operands)) is not None:
        return found
    operands = [x if isinstance(x, Deferred) else narrowed(x) for x in operands]
    if concats := [x for x in operands if isinstance(x, Concat)]:
        return _over_parts(ctx, eqn, concats[0], shape, operands)
    value_lineage, axis, differ = common_lineage(operands)
    if differ and all(x.axis == axis for x in operands if has_lineage(x)):
        operands = reselect.at_last_steps(ctx, operands)
        value_lineage, axis, differ = common_lineage(operands)
    if differ:
        operands = _of_one_lineage(operands)
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
    base = ctx.bind(eqn, *common_shape(eqn, bases))
    if not origins and base.size != 1 and lineage.is_at_least(math.prod(shape), base.size + 1):
        # One user, broadcast by a sum with zeros or by a product with ones.
        what = f"{lineage.text(base)} broadcast -> {lineage.text(base, shape)}"
        origins = frozenset({ctx.recorder.found(eqn, what, False)})
    return at_user_batch(ctx, eqn, base, value_lineage, axis, origins, shape)


def _of_one_lineage(operands: list[Any]) -> list[Any]:
    """Looks rows up that are equal for all rows of another lookup, such as tiled positions.

    If every lookup differs between the rows of every other one, all are kept.
    """
    for first in filter(has_lineage, operands):
        kept = first.lineage, first.axis
        others = [x for x in operands if has_lineage(x) and (x.lineage, x.axis) != kept]
        if not any(x.axis == first.axis or carries(x, first.axis) for x in others):
            return [_at_once(x) if any(x is y for y in others) else x for x in operands]
    return operands


def _at_once(x: Lazy) -> Any:
    """Looks rows up; dimensions of size 1 stay broadcast."""
    assert x.lineage is not None
    rows = take_rows(x.base, x.lineage.index, x.axis, is_sorted=x.lineage.is_sorted)
    return lazy(rows, x.shape, None, -1, x.origins)


def _of_one_batch(ctx: Context, eqn: Any, shape: tuple[int, ...], operands: Any) -> Any:
    """Runs traced arrays, or lookups by one index, in less time; None in all other cases."""
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
    base = ctx.bind(eqn, *common_shape(eqn, bases))
    origins = origins_of(*operands)
    return at_user_batch(ctx, eqn, base, first.lineage, first.axis, origins, shape)


#: Constant arrays of at most this size are searched for equal numbers.
_SMALL = 1 << 16


def narrowed(x: Any) -> Any:
    """Narrows a constant array of equal numbers to one number of the same rank."""
    if isinstance(x, (Deferred, jax.core.Tracer)) or not 1 < np.size(x) <= _SMALL:
        return x
    array = np.asarray(x).reshape(-1)
    first = array[:1]
    return first.reshape([1] * np.ndim(x)) if array.tobytes() == first.tobytes() * len(array) else x


def common_shape(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Broadcasts the operands of primitives that require equal shapes, and equal shardings.

    The condition of a select and the bounds of a clamp may be numbers.
    """
    name = eqn.primitive.name
    if name not in ("select_n", "clamp"):
        return operands
    may_be_numbers = (0, 2) if name == "clamp" else (0,)
    shape = lax.broadcast_shapes(*map(np.shape, operands))
    full = []
    for n, x in enumerate(operands):
        is_number = np.ndim(x) == 0
        wide = staged.broadcast_in_dim(x, shape, ()) if is_number else spread(x, shape)
        full.append(x if is_number and n in may_be_numbers else wide)
    return staged.alike(full)


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
    if eqn.outvars[0].aval.dtype == np.bool_ and any(
        isinstance(x, Concat) and x.axis != first.axis for x in operands
    ):
        # Masks are known by the equations between them.
        raise NotCovered(f"{eqn.primitive.name} of concatenations along two axes")
    # Such as embeddings of the types of tokens.
    operands = [_at_once(x) if has_lineage(x) and x.axis == first.axis else x for x in operands]

    def run(cut: list[Any], part_shape: tuple[int, ...]) -> Any:
        return elementwise_to(ctx, eqn, part_shape, cut)

    operands = _cut_alike(ctx, operands, first.axis)
    first = next(x for x in operands if isinstance(x, Concat) and x.axis == first.axis)
    return concat(by_part(first, operands, shape, run), first.axis)


def _cut_alike(ctx: Context, operands: Any, axis: int) -> list[Any]:
    """Cuts concatenations along `axis` where a part of any of them ends."""
    whole = [x for x in operands if isinstance(x, Concat) and x.axis == axis]
    if all(x.sizes == whole[0].sizes for x in whole):
        return list(operands)
    ends = sorted({end for x in whole for *_, end in x.pieces()})
    bounds = list(itertools.pairwise([0, *ends]))

    def cut(x: Any) -> Any:
        parts = tuple(sliced_along(ctx, x, start, stop, axis) for start, stop in bounds)
        return Concat(parts, axis) if isinstance(x, Concat) and x.axis == axis else x

    return list(map(cut, operands))


def by_part(
    first: Concat,
    operands: Any,
    shape: tuple[int, ...],
    run: Callable[[list[Any], tuple[int, ...]], Any],
) -> list[Any]:
    """Runs an operation on each part of the concatenation `first`.

    Other concatenations along its axis have the parts of `first`; other values are sliced alike.
    `shape` is the shape of the whole result; `run` takes the operands and the shape of a part.
    """
    parts, axis = [], first.axis
    for n, (_, start, stop) in enumerate(first.pieces()):
        cut = [
            x.parts[n]
            if isinstance(x, Concat) and x.axis == axis
            else slice_along(x, start, stop, axis)
            for x in operands
        ]
        parts.append(run(cut, (*shape[:axis], stop - start, *shape[axis + 1 :])))
    return parts


def _is_candidate_batch(first: Concat, operands: Any) -> bool:
    """Whether every lazy part is combined with a value that differs between candidates."""
    values = [x for x in operands if type(x) is not Concat]
    return all(
        has_lineage(part) and any(carries(x, part.axis) for x in values)
        for part in first.parts
        if not is_plain(part)
    )


def concat(parts: list[Any], axis: int) -> Any:
    """Concatenates parts: an array if all parts are arrays."""
    deferred = [x for x in parts if isinstance(x, Deferred)]
    return Concat(tuple(parts), axis) if deferred else staged.concatenate(parts, axis)


def transpose(ctx: Context, eqn: Any, x: Any) -> Any:
    """Transposes the base or every part."""
    return transposed(x, [int(d) for d in eqn.params["permutation"]])


def slice_(ctx: Context, eqn: Any, x: Any) -> Any:
    """Slices the base or every part."""
    params = eqn.params
    return sliced(ctx, x, params["start_indices"], params["limit_indices"], params["strides"])


def sliced(ctx: Context | None, x: Any, starts: Any, stops: Any, strides: Any = None) -> Any:
    """Computes `lax.slice(x, starts, stops, strides)` of any value."""
    starts, stops, strides = list(starts), list(stops), list(strides or [1] * len(starts))
    if isinstance(x, Concat):
        return _slice_concat(ctx, x, starts, stops, strides)
    if has_lineage(x):
        axis, count = x.axis, x.shape[x.axis]
        if (starts[axis], stops[axis], strides[axis]) != (0, count, 1):
            x = reselect.sliced(ctx, x, starts[axis], stops[axis], strides[axis])
            starts[axis], stops[axis], strides[axis] = 0, x.shape[axis], 1
    base, axis = base_of(x), -1 if is_plain(x) else x.axis
    shape = [-(-(b - a) // s) for a, b, s in zip(starts, stops, strides, strict=True)]
    for d, n in enumerate(base.shape):
        if n == 1 and not is_plain(x) or d == axis:
            starts[d], stops[d], strides[d] = 0, n, 1
    # Slices that cut only the looked-up axis share one base.
    if (starts, stops, max(strides)) != ([0] * base.ndim, list(base.shape), 1):
        base = staged.slice_of(base, starts, stops, strides)
    return base if is_plain(x) else lazy(base, tuple(shape), x.lineage, axis, x.origins)


def sliced_along(ctx: Context | None, x: Any, start: int, stop: int, axis: int) -> Any:
    """Computes `x[..., start:stop, ...]` along `axis`, of any value."""
    starts, stops = [0] * len(x.shape), list(x.shape)
    starts[axis], stops[axis] = start, stop
    return sliced(ctx, x, starts, stops)


def slice_along(x: Any, start: int, stop: int, axis: int) -> Any:
    """Slices along `axis`, which must not be looked up; a dimension of size 1 stays."""
    if not (shape := shape_of(x)) or shape[axis] == 1:
        return x
    if is_plain(x):
        return staged.slice_in_dim(x, start, stop, axis)
    return sliced_along(None, x, start, stop, axis)


def _slice_concat(ctx: Context | None, x: Concat, starts: Any, stops: Any, strides: Any) -> Any:
    if strides[x.axis] != 1:
        raise NotCovered("slice of a concatenation with a stride")
    parts = []
    for part, first, last in x.pieces():
        begin, end = list(starts), list(stops)
        begin[x.axis] = max(starts[x.axis], first) - first
        end[x.axis] = min(stops[x.axis], last) - first
        if begin[x.axis] < end[x.axis]:
            parts.append(sliced(ctx, part, begin, end, strides))
    if not parts:
        raise NotCovered("empty slice of a concatenation")
    return parts[0] if len(parts) == 1 else concat(parts, x.axis)


def split(ctx: Context, eqn: Any, x: Any) -> Any:
    """Slices the value once for every piece."""
    # From `jnp.split`, sizes are NumPy's integers, which are no sizes of the report, nor keys.
    sizes = (int(n) if isinstance(n, np.integer) else n for n in eqn.params["sizes"])
    ends, axis = itertools.accumulate(sizes, initial=0), eqn.params["axis"]
    return [sliced_along(ctx, x, start, stop, axis) for start, stop in itertools.pairwise(ends)]


def optimization_barrier(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Passes bases through the barrier."""
    if any(isinstance(x, Concat) for x in operands):
        raise NotCovered("optimization_barrier of a concatenation")
    bases = ctx.bind(eqn, *map(base_of, operands))
    return [
        base if is_plain(x) else dataclasses.replace(x, base=base)
        for x, base in zip(operands, bases, strict=True)
    ]
