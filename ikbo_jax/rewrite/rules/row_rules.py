"""Rules of primitives that work on every row by itself, if they take the looked-up axis whole."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.facts.known import known
from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import placing, positions, reselect
from ikbo_jax.rewrite.rules.concatenation import MOST_LOOPS
from ikbo_jax.rewrite.rules.elementwise import (
    at_user_batch,
    common_lineage,
    concat,
    sliced,
    sliced_along,
)
from ikbo_jax.rewrite.values import constraints, lineage
from ikbo_jax.rewrite.values.lineage import Concat, Lazy
from ikbo_jax.rewrite.values.registry import NotCovered


def sharding_constraint(ctx: Context, eqn: Any, x: Any) -> Any:
    """Returns the value, whose array is placed if it is built."""
    return constraints.constrained(ctx, x, eqn.params["sharding"], lambda x: ctx.bind(eqn, x))


def iota(ctx: Context, eqn: Any, *dynamic: Any) -> Any:
    """Counts along one dimension; the numbers are equal along all others."""
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    if dynamic or eqn.params.get("sharding") is not None:
        return ctx.bind(eqn, *dynamic)
    own = tuple(n if d == dimension else 1 for d, n in enumerate(shape))
    return lineage.lazy(ctx.bind(eqn, shape=own), tuple(shape), None, -1, frozenset())


def sort(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Sorts along another axis than the looked-up axis; operands may be equal in all rows."""
    along, operands = eqn.params["dimension"], tuple(lineage.aligned(operands))
    if not all(lineage.is_plain(x) or isinstance(x, Lazy) for x in operands):
        raise NotCovered("sort of a concatenation")
    users, axis, differ = common_lineage(operands)
    if differ:
        raise NotCovered("sort of different lookups")
    if axis == along:
        raise NotCovered("sort along the looked-up axis")
    if users is not None and any(lineage.carries(x, axis) for x in operands):
        raise NotCovered("sort with a value at candidate batch")
    own = list(lax.broadcast_shapes(*(np.shape(lineage.base_of(x)) for x in operands)))
    own[along] = shape_of(operands[0])[along]
    bases = ctx.bind(eqn, *(lineage.spread(lineage.base_of(x), tuple(own)) for x in operands))
    origins = lineage.origins_of(*operands)
    return [at_user_batch(ctx, eqn, base, users, axis, origins) for base in bases]


def rev(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reverses the base, the index, or every part."""
    along = [int(d) for d in eqn.params["dimensions"]]
    if isinstance(x, Concat):
        parts = [rev(ctx, eqn, part) for part in x.parts]
        return concat(parts[::-1] if x.axis in along else parts, x.axis)
    if lineage.is_plain(x):
        return ctx.bind(eqn, x)
    if x.axis in along:
        count = x.shape[x.axis]
        x = reselect.rows(ctx, x, ("rev",), count, lambda index: lax.rev(index, (0,)))
        along.remove(x.axis)
    base = ctx.bind(eqn, x.base, dimensions=tuple(along)) if along else x.base
    return at_user_batch(ctx, eqn, base, x.lineage, x.axis, x.origins, x.shape)


def pad(ctx: Context, eqn: Any, x: Any, number: Any) -> Any:
    """Pads with a number; along the looked-up or concatenated axis, by a concatenation."""
    config = [tuple(amounts) for amounts in eqn.params["padding_config"]]
    padded = [d for d, amounts in enumerate(config) if amounts != (0, 0, 0)]
    if not lineage.is_plain(x) and x.axis in padded:
        return _pad_by_rows(ctx, eqn, x, number, config)
    return in_rows(ctx, eqn, x, number, axes=padded)


def _pad_by_rows(ctx: Context, eqn: Any, x: Any, number: Any, config: list[Any]) -> Any:
    """Pads every part along the other axes, and adds rows of a number along the axis."""
    axis, aval = x.axis, eqn.outvars[0].aval
    # `jnp.pad` makes NumPy's integers, which sizes of values are not.
    low, high, between = (n.item() if isinstance(n, np.generic) else n for n in config[axis])
    if low < 0 or high < 0 or between or not lineage.is_plain(number):
        raise NotCovered("pad that cuts or spaces the looked-up axis, or a concatenation")
    config[axis], shape = (0, 0, 0), aval.shape
    if any(map(any, config)):
        whole = (*shape[:axis], x.shape[axis], *shape[axis + 1 :])
        x = pad(ctx, at_shapes(eqn, (x, number), [whole], padding_config=tuple(config)), x, number)
    parts: list[Any] = list(x.parts) if isinstance(x, Concat) else [x]
    ones = (1,) * len(shape)
    # Products that sum over the axis leave zeros out that are known as such.
    is_zero = proofs.constant(ctx, number) == 0
    base: Any = np.zeros(ones, aval.dtype) if is_zero else lax.broadcast(number, ones)
    for at, size in ((0, low), (len(parts) + 1, high)):
        if size:
            whole = (*shape[:axis], size, *shape[axis + 1 :])
            parts.insert(at, lineage.lazy(base, whole, None, -1, frozenset()))
    if isinstance(x, Concat):
        return concat(parts, axis)
    # A row of numbers that is as long as it is broadcast is looked up, too.
    parts = [Lazy(y, y.shape) if lineage.is_plain(y) else y for y in parts]
    return reselect.concatenated(ctx, parts, axis, shape)


def convolution(ctx: Context, eqn: Any, x: Any, kernel: Any) -> Any:
    """Convolves looked-up rows, such as a history, with weights."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if not isinstance(x, Lazy) or not lineage.is_plain(kernel) or params["batch_group_count"] != 1:
        raise NotCovered("convolution of a concatenation, or by a looked-up kernel")
    batch = numbers.lhs_spec[0]
    if lineage.has_lineage(x) and x.axis != batch:
        raise NotCovered("convolution along the looked-up axis")
    x = lineage.spread_axes(x, [d for d in range(len(x.shape)) if d != batch])
    base = ctx.bind(eqn, x.base, kernel)
    ctx.recorder.saved(eqn, x.origins, "product at the smaller batch", True)
    return lineage.lazy(base, eqn.outvars[0].aval.shape, x.lineage, numbers.out_spec[0], x.origins)


def _windowed(params: Any, rank: int) -> Sequence[int]:
    """Returns the axes along which windows have more than one element, or are strided or padded."""
    dilation = [params.get(f"{of}_dilation") or (1,) * rank for of in ("base", "window")]
    sizes = zip(params["window_dimensions"], params["window_strides"], *dilation, strict=True)
    of_axes = zip(sizes, params["padding"], strict=True)
    return [d for d, (own, padding) in enumerate(of_axes) if (*own, *padding) != (1, 1, 1, 1, 0, 0)]


_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
_WINDOWS = ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
#: Along which axes an equation works, by its parameters and the number of axes, by primitive.
IN_ROWS: dict[str, Callable[[Any, int], Sequence[int]]] = {
    **dict.fromkeys(_CUMULATIVE, lambda params, _: [params["axis"]]),
    "fft": lambda params, rank: range(rank - len(params["fft_lengths"]), rank),
    **dict.fromkeys(_WINDOWS, _windowed),
    "top_k": lambda params, rank: [params.get("axis", rank - 1)],
}


def in_rows(ctx: Context, eqn: Any, x: Any, *rest: Any, axes: Any = None) -> Any:
    """Runs an equation that works along some axes in every row, or part, by itself."""
    if not isinstance(x, (Concat, Lazy)) or not all(map(lineage.is_plain, rest)):
        raise NotCovered(f"{eqn.primitive.name} of other values than one lookup")
    axes = IN_ROWS[eqn.primitive.name](eqn.params, len(x.shape)) if axes is None else axes
    if (axis := x.axis) in axes:
        joined = _TOTALS.get(eqn.primitive.name)
        if isinstance(x, Concat) and joined and len(x.parts) <= MOST_LOOPS:
            return _accumulated(ctx, eqn, x, joined)
        kind = "concatenated" if isinstance(x, Concat) else "looked-up"
        raise NotCovered(f"{eqn.primitive.name} along the {kind} axis")
    if isinstance(x, Concat):
        shapes, found = [v.aval.shape for v in eqn.outvars], []
        for part in x.parts:
            cut = [(*shape[:axis], part.shape[axis], *shape[axis + 1 :]) for shape in shapes]
            operands = [part, *rest]
            found.append(ctx.run_equation(at_shapes(eqn, operands, cut), operands))
        out = [concat(list(parts), axis) for parts in zip(*found, strict=True)]
    else:
        found = ctx.bind(eqn, lineage.spread_axes(x, axes).base, *rest)
        bases = found if eqn.primitive.multiple_results else [found]
        out = [at_user_batch(ctx, eqn, y, x.lineage, axis, x.origins) for y in bases]
    return out if eqn.primitive.multiple_results else out[0]


#: What joins a total to what is accumulated after it.
_TOTALS: dict[str, Callable[..., jax.Array]] = {"cumprod": jnp.multiply, "cumsum": jnp.add}


def _accumulated(ctx: Context, eqn: Any, x: Concat, joined: Callable[..., jax.Array]) -> Any:
    """Accumulates piece by piece: [history, candidate] begins with the history's own values."""
    axis, step, found, total = x.axis, -1 if eqn.params["reverse"] else 1, list[Any](), None
    for part in x.parts[::step]:
        size = part.shape[axis]
        (own,) = ctx.run_equation(at_shapes(eqn, [part], [part.shape]), [part])
        if total is not None:
            like = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (own, total)]
            (own,) = ctx.run_closed(jax.make_jaxpr(joined)(*like), [own, total], eqn)
        found.append(own)
        end = 0 if step < 0 else size - 1
        total = sliced_along(ctx, own, end, end + 1, axis) if size else total
    return concat(found[::step], axis)


def dynamic_slice(ctx: Context, eqn: Any, x: Any, *starts: Any) -> Any:
    """Slices at any positions along other axes than the looked-up axis."""
    sizes = list(eqn.params["slice_sizes"])
    if not all(map(lineage.is_plain, starts)) or lineage.is_plain(x):
        raise NotCovered("dynamic_slice at positions that are looked up")
    if isinstance(x, Concat):
        begins = []
        for start, size, full in zip(starts, sizes, x.shape, strict=True):
            number = known(ctx, start) if size != full else 0
            if number is None:
                where = "at positions that are not constant"
                raise NotCovered(f"dynamic_slice of a concatenation {where}")
            begins.append(placing.clamped(ctx, number, full - size))
        return sliced(ctx, x, begins, [b + n for b, n in zip(begins, sizes, strict=True)])
    if lineage.has_lineage(x) and sizes[x.axis] != x.shape[x.axis]:
        axis, size = x.axis, sizes[x.axis]

        def choose(index: Any) -> Any:
            # The equation's start is final: a negative one is clamped, not counted from the end.
            start = (starts[axis],)
            return lax.dynamic_slice(index, start, (size,), allow_negative_indices=False)

        x = reselect.rows(ctx, x, ("dynamic", starts[axis], size), size, choose)
        if lineage.is_plain(x):
            return ctx.bind(eqn, x, *starts)
    sizes = [min(n, m) for n, m in zip(sizes, x.base.shape, strict=True)]
    if lineage.has_lineage(x):
        sizes[x.axis] = x.base.shape[x.axis]
    # A start along an axis that is taken whole is clamped to 0.
    base = ctx.bind(eqn, x.base, *starts, slice_sizes=tuple(sizes))
    return lineage.lazy(base, eqn.outvars[0].aval.shape, x.lineage, x.axis, x.origins)


def dynamic_update_slice(ctx: Context, eqn: Any, x: Any, update: Any, *starts: Any) -> Any:
    """Updates a slice that takes the looked-up axis whole."""
    if not all(map(lineage.is_plain, starts)):
        raise NotCovered("dynamic_update_slice at positions that are looked up")
    if any(isinstance(y, Concat) for y in (x, update)):
        return placing.update_slice(ctx, eqn, x, update, starts)
    x, update = lineage.aligned([x, update])
    users, axis, differ = common_lineage([x, update])
    if users is None or differ or lineage.carries(x, axis) or lineage.carries(update, axis):
        return placing.update_slice(ctx, eqn, x, update, starts)
    if shape_of(update)[axis] != shape_of(x)[axis]:
        raise NotCovered("dynamic_update_slice of the looked-up axis")
    bases = [lineage.rows_of(y, axis, users.users) for y in (x, update)]
    base = ctx.bind(eqn, *bases, *starts)
    return at_user_batch(ctx, eqn, base, users, axis, lineage.origins_of(x, update))


def scatter(ctx: Context, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    """Updates the same positions of every row: `x.at[:, 0].set(y)`."""
    numbers = eqn.params["dimension_numbers"]
    if positions.are_looked_up(indices):
        return positions.scatter(ctx, eqn, x, indices, updates)
    if not lineage.is_plain(indices):
        raise NotCovered(f"{eqn.primitive.name} at looked-up positions")
    if any(isinstance(y, Concat) for y in (x, updates)):
        return placing.scattered(ctx, eqn, x, indices, updates)
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape_of(x))) if d not in removed]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    x, updates = lineage.aligned([x, updates])
    users, axis = (x.lineage, x.axis) if lineage.has_lineage(x) else (None, -1)
    if lineage.has_lineage(updates):
        found = next((d for d, u in window.items() if u == updates.axis), -1)
        if users is not None and (updates.lineage, found) != (users, axis):
            return placing.scattered(ctx, eqn, x, indices, updates)
        users, axis = updates.lineage, found
    if users is None or axis not in window or axis in numbers.scatter_dims_to_operand_dims:
        raise NotCovered(f"{eqn.primitive.name} along the looked-up axis")
    update_axis = window[axis]
    if shape_of(updates)[update_axis] != shape_of(x)[axis]:
        raise NotCovered(f"{eqn.primitive.name} of a part of the looked-up axis")
    if lineage.carries(x, axis) or lineage.carries(updates, update_axis):
        return placing.scattered(ctx, eqn, x, indices, updates)
    rows = lineage.rows_of(x, axis, users.users)
    base = ctx.bind(eqn, rows, indices, lineage.rows_of(updates, update_axis, users.users))
    return at_user_batch(ctx, eqn, base, users, axis, lineage.origins_of(x, updates))


def hi_primitive(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs `jnp.searchsorted` of jax 0.12: every query has a place among the same keys."""
    found = eqn.params["_prim"]
    if type(found).__name__ != "SearchSorted":
        raise NotCovered(f"no rule for {type(found).__name__}")
    keys, queries = operands
    if not lineage.is_plain(keys) or np.ndim(keys) != 1 or not isinstance(queries, Lazy):
        raise NotCovered("searchsorted in keys that are looked up, or in several sequences")
    # The primitive itself is made for one shape of queries.
    places = jax.numpy.searchsorted(keys, queries.base, side=found.side, method=found.method)
    return [lineage.lazy(places, queries.shape, queries.lineage, queries.axis, queries.origins)]
