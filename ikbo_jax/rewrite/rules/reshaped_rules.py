"""Rules of reshaped values: an equation on them becomes one on the values before the reshape."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.rewrite.facts import known
from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import elementwise, row_rules
from ikbo_jax.rewrite.rules.batched import dims_of
from ikbo_jax.rewrite.rules.reshaped_axes import (
    Axes,
    again,
    axes_at,
    axes_of,
    flattened,
    run_before,
    to_shape_again,
)
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Concat
from ikbo_jax.rewrite.values.registry import NotCovered, Rule
from ikbo_jax.rewrite.values.reshaped import Group, Reshaped, is_split, plain_groups

#: Computes the parameters before the reshape, and the axes of the results.
_Params = Callable[[Axes, Any, Any], tuple[dict[str, Any], Any]]


def _rule(params_of: _Params) -> Rule:
    """Makes the rule of a primitive whose operands all have their groups at the same place."""

    def rule(ctx: Context, eqn: Any, *operands: Any) -> Any:
        own = [x for x in operands if isinstance(x, Reshaped)]
        if eqn.primitive.name == "mul" and all(x.inner.rule is None for x in own):
            eqn, operands = elementwise.with_mask(ctx, eqn, operands)
        if Concat in map(type, operands) and (found := _without_batch(ctx, eqn, operands)):
            return found[0]
        axes = axes_of(own[0].groups, own[0].order)
        params, out = params_of(axes, eqn, operands)
        flat = [flattened(ctx, eqn, x, axes) for x in operands]
        return run_before(ctx, eqn, flat, out, **params)

    return rule


def _without_batch(ctx: Context, eqn: Any, operands: Any) -> list[Any]:
    """Runs an equation of concatenated rows and what is the same for all rows, as for positions.

    A table of such values, looked up by fixed positions, is an array then; [] without one.
    """
    size = math.prod(eqn.outvars[0].aval.shape)
    small = [isinstance(x, Reshaped) and math.prod(x.shape) < size for x in operands]
    reason = "the same for all rows of a concatenation"
    arrays = [
        ctx.materialise(eqn, x, reason) if n else x for x, n in zip(operands, small, strict=True)
    ]
    return ctx.run_equation(eqn, arrays) if any(small) else []


@_rule
def in_place(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Works element by element, or along other dimensions, and moves no dimension."""
    names = [name for name in ("axis", "dimension") if name in eqn.params]
    found: dict[str, Any] = {name: axes.single(eqn.params[name]) for name in names}
    if "dimensions" in eqn.params:
        found["dimensions"] = tuple(map(axes.single, eqn.params["dimensions"]))
    return found, axes


@_rule
def reduction(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Reduces other dimensions, or all dimensions that a dimension merges."""
    numbers = [axes.numbers[a] for a in eqn.params["axes"]]
    if any(len(axes.groups[n].sizes) > 1 for n in numbers):
        raise NotCovered("an operation along dimensions that look rows up together")
    inner = tuple([d for n in numbers for d in axes.inner[n]])
    if eqn.primitive.name in ("argmax", "argmin") and len(inner) != 1:
        raise NotCovered(f"{eqn.primitive.name} over a merged axis")
    return {"axes": inner}, axes.moved([d for d, n in enumerate(axes.numbers) if n not in numbers])


#: Parameters with an entry for every dimension, and the entry of a dimension that is taken whole;
#: None is its size.
_ENTRIES: dict[str, Any] = {
    "base_dilation": 1,
    "limit_indices": None,
    "padding": (0, 0),
    "padding_config": (0, 0, 0),
    "start_indices": 0,
    "strides": 1,
    "window_dilation": 1,
    "window_dimensions": 1,
    "window_strides": 1,
}


@_rule
def dimension_wise(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Pads, slices, or pools over windows, along other dimensions."""
    found = {}
    for name, entry in _ENTRIES.items():
        if eqn.params.get(name) is None:
            continue
        entries: list[Any] = []
        for dims, group in zip(axes.dims, axes.groups, strict=True):
            own = tuple([eqn.params[name][d] for d in dims])
            whole = group.sizes if entry is None else (entry,) * len(own)
            if not group.is_plain and own != whole:
                raise NotCovered("an operation along dimensions that look rows up together")
            before = group.before if entry is None else (entry,) * len(group.before)
            entries += own if group.is_plain else before
        found[name] = tuple(entries)
    return found, axes


def in_rows(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Works along other dimensions, which parameters number or have an entry for."""
    axes = axes_of(operands[0].groups, operands[0].order)
    along = row_rules.IN_ROWS[eqn.primitive.name](eqn.params, len(axes.shape))
    inner, rank = [axes.single(axis) for axis in along], len(axes.before_shape)
    if "fft_lengths" in eqn.params and inner != list(range(rank - len(inner), rank)):
        raise NotCovered("fft along dimensions that are moved")
    has_entries = "window_dimensions" in eqn.params
    return (dimension_wise if has_entries else in_place)(ctx, eqn, *operands)


@_rule
def _transpose(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Transposes before the reshape."""
    order = eqn.params["permutation"]
    return {"permutation": axes.before(order)}, axes.moved(order)


def transpose(ctx: Context, eqn: Any, x: Reshaped) -> Any:
    """Transposes; where dimensions that look rows up together change places, their rows do."""
    order = list(map(int, eqn.params["permutation"]))
    own = axes_of(x.groups, x.order).together if x.splits else []
    at = [order.index(d) for d in own]
    between = [d for d in order[min(at, default=0) : max(at, default=0)] if d not in own]
    if at == sorted(at) or x.inner.rule is not None or any(x.shape[d] != 1 for d in between):
        return _transpose(ctx, eqn, x)
    within = [own.index(d) for d in order if d in own]
    x = _with_rows_moved(ctx, eqn, x, lambda rows: rows.transpose(within))
    order = [own[within.index(own.index(d))] if d in own else d for d in order]
    return _run_on(ctx, eqn, x, permutation=tuple(order))


def slice_(ctx: Context, eqn: Any, x: Reshaped) -> Any:
    """Slices, also along dimensions that look rows up together."""
    cuts = known.cuts(eqn.params)
    own = axes_of(x.groups, x.order).together
    if all(cuts[d] == slice(0, x.shape[d], 1) for d in own):
        return dimension_wise(ctx, eqn, x)
    x = _with_rows_moved(ctx, eqn, x, lambda rows: rows[tuple([cuts[d] for d in own])])
    whole = [slice(0, x.shape[d], 1) if d in own else cut for d, cut in enumerate(cuts)]
    names = {"start_indices": "start", "limit_indices": "stop", "strides": "step"}
    params = {name: tuple([getattr(x, of) for x in whole]) for name, of in names.items()}
    return _run_on(ctx, eqn, x, **params)


def _run_on(ctx: Context, eqn: Any, x: Any, **params: Any) -> Any:
    """Runs an equation with other parameters on another value; its result has the same shape."""
    inner = at_shapes(eqn, [x], [eqn.outvars[0].aval.shape], **params)
    return ctx.run_equation(inner, [x])[0]


def _with_rows_moved(
    ctx: Context, eqn: Any, x: Reshaped, move: Callable[[np.ndarray], np.ndarray]
) -> Any:
    """Looks the rows of several dimensions up as `move` moves their numbers, which have these."""
    axes = axes_of(x.groups, x.order)
    (n,), sizes = axes.special, axes.places[0][1].sizes
    if not all(isinstance(size, int) for size in sizes):
        raise NotCovered("an operation along dimensions that look rows up together")
    rows = move(np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes))
    if not rows.size:
        raise NotCovered("an empty slice")
    # Equal numbers are one object, so that the same rows have one lineage.
    key = "moved rows", rows.tobytes()
    numbers = ctx.scope.once(key, [], lambda: jnp.asarray(rows.reshape(-1)))
    like = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x.inner, numbers)]
    program = jax.make_jaxpr(functools.partial(staged.gather_rows, axis=axes.inner[n].start))(*like)
    groups = (*axes.groups[:n], Group(rows.shape, (rows.size,)), *axes.groups[n + 1 :])
    (found,) = ctx.run_closed(program, [x.inner, numbers])
    return again(ctx, eqn, found, axes_of(groups, axes.order))


@_rule
def stack(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Concatenates along a new dimension."""
    axis, rank = eqn.params["axis"], len(axes.shape)
    wide = axes.beside(axes_of(plain_groups([len(operands)])))
    out = wide.moved([*range(axis), rank, *range(axis, rank)])
    return {"axis": out.single(axis)}, out


@_rule
def unstack(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Slices along another dimension, without the dimension."""
    axis = eqn.params["axis"]
    return {"axis": axes.single(axis)}, axes.moved([d for d in range(len(axes.shape)) if d != axis])


@_rule
def broadcast(axes: Axes, eqn: Any, operands: Any) -> Any:
    """Adds dimensions."""
    if len(operands) > 1:
        raise NotCovered("broadcast to a dynamic shape")
    shape, dims = eqn.params["shape"], list(map(int, eqn.params["broadcast_dimensions"]))
    places = [([dims[d] for d in own], group) for own, group in axes.places]
    if any(tuple([shape[t] for t in own]) != group.sizes for own, group in places):
        raise NotCovered("broadcast of a merged axis")
    out = axes_at(shape, places)
    return {"shape": out.before_shape, "broadcast_dimensions": out.before(dims)}, out


def dynamic_slice(ctx: Context, eqn: Any, x: Any, *rest: Any) -> Any:
    """Slices, or updates a slice, along other dimensions."""
    is_update = eqn.primitive.name == "dynamic_update_slice"
    cut, starts = (x, *rest[:is_update]), rest[is_update:]
    if any(isinstance(y, Reshaped) for y in starts):
        raise NotCovered(f"{eqn.primitive.name} at positions that are looked up")
    like = next(y for y in cut if isinstance(y, Reshaped))
    sizes = shape_of(rest[0]) if is_update else eqn.params["slice_sizes"]
    of_slice = axes_of(like.groups, like.order).fitted(sizes, eqn.primitive.name)
    axes, params = of_slice.fitted(shape_of(x), eqn.primitive.name), dict[str, Any]()
    if not is_update:
        params["slice_sizes"] = of_slice.before_shape
    # A start along an axis that is taken whole is clamped to 0.
    flat = [flattened(ctx, eqn, y, axes) for y in cut]
    flat += [starts[dims[0]] for dims in axes.dims]
    inner = eqn.replace(invars=eqn.invars[: len(flat)])
    return run_before(ctx, inner, flat, axes, **params)


def reshape_again(ctx: Context, eqn: Any, x: Reshaped) -> Any:
    """Reshapes the value before the reshape."""
    return to_shape_again(ctx, eqn, x, tuple(eqn.outvars[0].aval.shape))


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Multiplies; a group is summed or a batch dimension of both operands, or is in one of them."""
    (contract, batch), operands = dims_of(eqn), (lhs, rhs)
    axes = [
        axes_of(x.groups, x.order) if type(x) is Reshaped else axes_of(plain_groups(shape_of(x)))
        for x in operands
    ]
    wanted = [_paired(axes, contract, batch, side) for side in (0, 1)]
    if all(map(is_split, operands)) and not wanted[1]:
        raise NotCovered("product of values that are looked up by different dimensions")
    full = [x.put(found) for x, found in zip(axes, wanted, strict=True)]
    flat = [flattened(ctx, eqn, x, whole) for x, whole in zip(operands, full, strict=True)]
    numbers = tuple(tuple(map(Axes.before, full, pair)) for pair in (contract, batch))
    free = [
        [d for d in range(len(x.shape)) if d not in (*contract[side], *batch[side])]
        for side, x in enumerate(full)
    ]
    out = full[0].moved([*batch[0], *free[0]]).beside(full[1].moved(free[1]))
    return run_before(ctx, eqn, flat, out, dimension_numbers=numbers)


def _paired(axes: list[Axes], contract: Any, batch: Any, side: int) -> list[tuple[Any, Group]]:
    """Finds the groups that an operand of a product has as the other one, with its dimensions."""
    other, found = axes[1 - side], []
    pairs = dict(zip(contract[1 - side], contract[side], strict=True))
    pairs |= zip(batch[1 - side], batch[side], strict=True)
    for n in other.special:
        theirs = other.dims[n]
        own = [pairs[d] for d in theirs if d in pairs]
        if len(theirs) > 1 and any(d in contract[1 - side] for d in theirs):
            raise NotCovered("product that sums over dimensions that look rows up together")
        if 0 < len(own) < len(theirs):
            reason = "product over a part of the dimensions that look rows up together"
            raise NotCovered(reason)
        if own:
            found.append((own, other.groups[n]))
    return found
