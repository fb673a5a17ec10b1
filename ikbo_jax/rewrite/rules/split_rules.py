"""Rules of `Split`: an equation on split values becomes one on the values before the reshape."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import reshape
from ikbo_jax.rewrite.rules.split_axis import (
    Axis,
    axis_of,
    dims_before,
    equation,
    flattened,
    position_of,
    reshaped,
    results_of,
    run_flat,
    split_again,
)
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    has_lineage,
    is_at_least,
    is_plain,
)
from ikbo_jax.rewrite.values.registry import NotCovered, Rule
from ikbo_jax.rewrite.values.split import Split

#: Computes the parameters before the reshape, and where the axis is in the results.
_Params = Callable[[Axis, Any, Any], tuple[dict[str, Any], Axis]]


def _rule(params_of: _Params) -> Rule:
    """Makes the rule of a primitive whose operands all have the axis at the same place."""

    def rule(ctx: Context, eqn: Any, *operands: Any) -> Any:
        on = axis_of(operands)
        params, out = params_of(on, eqn.params, operands)
        flat = [flattened(ctx, eqn, x, on) for x in operands]
        return results_of(eqn, run_flat(ctx, eqn, flat, [out] * len(eqn.outvars), **params))

    return rule


@_rule
def in_place(on: Axis, params: Any, operands: Any) -> Any:
    """Works element by element, or along other dimensions, and moves no dimension."""
    names = [name for name in ("axis", "dimension") if name in params]
    found: dict[str, Any] = {name: on.before(params[name]) for name in names}
    if "dimensions" in params:
        found["dimensions"] = tuple(map(on.before, params["dimensions"]))
    return found, on


@_rule
def reduction(on: Axis, params: Any, operands: Any) -> Any:
    """Reduces other dimensions."""
    axes = tuple(params["axes"])
    out = on.at(on.axis - sum(a < on.axis for a in axes))
    return {"axes": tuple(map(on.before, axes))}, out


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
def dimension_wise(on: Axis, params: Any, operands: Any) -> Any:
    """Pads, slices, or pools over windows, along other dimensions."""
    found = {}
    for name, entry in _ENTRIES.items():
        if params.get(name) is None:
            continue
        of_axis = on.sizes if entry is None else (entry,) * len(on.sizes)
        if tuple(params[name][on.axis : on.dims.stop]) != of_axis:
            raise NotCovered("an operation along dimensions that look rows up together")
        found[name] = on.merged(params[name], math.prod(on.sizes) if entry is None else entry)
    return found, on


@_rule
def fft(on: Axis, params: Any, operands: Any) -> Any:
    """Transforms the last dimensions."""
    if on.dims.stop > len(shape_of(operands[0])) - len(params["fft_lengths"]):
        raise NotCovered("fft along dimensions that look rows up together")
    return {}, on


@_rule
def transpose(on: Axis, params: Any, operands: Any) -> Any:
    """Transposes; the dimensions of the axis stay together."""
    permutation = list(params["permutation"])
    out = on.moved([permutation.index(d) for d in on.dims])
    kept = [d for d in permutation if d not in on.dims[1:]]
    return {"permutation": tuple(on.before(d) if d != on.axis else d for d in kept)}, out


@_rule
def stack(on: Axis, params: Any, operands: Any) -> Any:
    """Concatenates along a new dimension."""
    axis = params["axis"]
    if on.axis < axis < on.dims.stop:
        raise NotCovered("stack between dimensions that look rows up together")
    out = on.at(on.axis + (axis <= on.axis))
    return {"axis": axis if axis <= on.axis else axis - len(on.sizes) + 1}, out


@_rule
def unstack(on: Axis, params: Any, operands: Any) -> Any:
    """Slices along another dimension, without the dimension."""
    axis = params["axis"]
    return {"axis": on.before(axis)}, on.at(on.axis - (axis < on.axis))


@_rule
def broadcast(on: Axis, params: Any, operands: Any) -> Any:
    """Adds dimensions."""
    if len(operands) > 1:
        raise NotCovered("broadcast to a dynamic shape")
    shape, dims = params["shape"], list(params["broadcast_dimensions"])
    out = on.moved(dims[on.axis : on.dims.stop])
    return {
        "shape": out.shape(shape),
        "broadcast_dimensions": tuple(
            t if d == on.axis else out.before(t) for d, t in enumerate(dims) if d not in on.dims[1:]
        ),
    }, out


def dynamic_slice(ctx: Context, eqn: Any, x: Any, *starts: Any) -> Any:
    """Slices along other dimensions."""
    if not isinstance(x, Split):
        raise NotCovered("dynamic_slice at positions that are looked up")
    on, sizes = axis_of([x]), eqn.params["slice_sizes"]
    if tuple(sizes[on.axis : on.dims.stop]) != on.sizes:
        raise NotCovered("dynamic_slice along dimensions that look rows up together")
    # A start along an axis that is taken whole is clamped to 0.
    own = eqn.invars[1:]
    inner = eqn.replace(invars=[eqn.invars[0], *on.merged(own, own[on.axis])])
    operands = [x.inner, *on.merged(starts, starts[on.axis])]
    whole = on.merged(sizes, math.prod(on.sizes))
    (result,) = run_flat(ctx, inner, operands, [on], slice_sizes=whole)
    return result


def reshape_split(ctx: Context, eqn: Any, x: Split) -> Any:
    """Reshapes the value before the reshape, if the axis stays split or is whole again."""
    shape = tuple(eqn.outvars[0].aval.shape)
    on = axis_of([x])
    whole = math.prod(on.sizes)
    before = math.prod(x.shape[: on.axis])
    # The axis is where as many elements are before it.
    for axis in range(len(shape) + 1):
        if math.prod(shape[:axis]) != before or 0 in shape:
            continue
        if shape[axis : axis + len(on.sizes)] == on.sizes:
            out = on.at(axis)
            return split_again(ctx, eqn, reshaped(ctx, eqn, x.inner, out.shape(shape)), out)
        if axis < len(shape) and shape[axis] == whole:
            return reshaped(ctx, eqn, x.inner, shape)
    return reshape.reshape_to(ctx, eqn, x.inner, shape)


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Multiplies; the axis is a batch dimension of both operands, or is in one of them only."""
    (contract, batch), operands = eqn.params["dimension_numbers"], (lhs, rhs)
    side = 0 if isinstance(lhs, Split) else 1
    on: list[Any] = [None, None]
    on[side] = axis_of([operands[side]])
    own, other = [list(map(int, batch[s])) for s in (side, 1 - side)]
    of_batch = [d for d in on[side].dims if d in own]
    if of_batch:
        if len(of_batch) < len(on[side].dims):
            raise NotCovered("product over a part of the dimensions that look rows up together")
        on[1 - side] = on[side].moved([other[own.index(d)] for d in on[side].dims])
        out = on[side].moved([own.index(d) for d in on[side].dims])
    else:
        free = [
            (s, d)
            for s in (0, 1)
            for d in range(len(shape_of(operands[s])))
            if d not in contract[s] and d not in batch[s]
        ]
        if any(d in contract[side] for d in on[side].dims):
            raise NotCovered("product that sums over dimensions that look rows up together")
        out = on[side].moved([len(own) + free.index((side, d)) for d in on[side].dims])
        if isinstance(operands[1 - side], Split):
            raise NotCovered("product of values that are looked up by different dimensions")
    flat = [
        x if a is None else flattened(ctx, eqn, x, a) for x, a in zip(operands, on, strict=True)
    ]

    numbers = tuple(
        tuple(dims_before(dims, a) for dims, a in zip(pair, on, strict=True))
        for pair in (contract, batch)
    )
    (result,) = run_flat(ctx, eqn, flat, [out], dimension_numbers=numbers)
    return result


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
        index = reshaped(ctx, eqn, proofs.selected(ctx, operands[0]), (count,))
        params = {"shape": (count, 1), "broadcast_dimensions": (0,), "sharding": None}
        column = equation(eqn, lax.broadcast_in_dim_p, [index], (count, 1), params)
        return ctx.run_equation(column, [index])[0]
    return reshaped(ctx, eqn, indices, (count, shape[-1]))


def gather(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks up in other dimensions of a split value, or by split indices, or in each table."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, of_tables = eqn.outvars[0].aval.shape, list(map(int, numbers.operand_batching_dims))
    of_indices = list(map(int, numbers.start_indices_batching_dims))
    on = on_indices = None
    if isinstance(operand, Split):
        on = axis_of([operand])
    elif of_tables:
        on_indices = axis_of([indices])
        on = on_indices.moved([of_tables[position_of(of_indices, d)] for d in on_indices.dims])
    if on is not None and on.axis in of_tables:
        on_indices = on.moved([of_indices[position_of(of_tables, d)] for d in on.dims])
    elif on is not None:
        if isinstance(indices, Split) or tuple(sizes[on.axis : on.dims.stop]) != on.sizes:
            raise NotCovered("lookup along dimensions that look rows up together")
        removed = (*numbers.collapsed_slice_dims, *of_tables)
        kept = [d for d in range(len(sizes)) if d not in removed]
        out = on.moved([numbers.offset_dims[kept.index(d)] for d in on.dims])
    else:
        on_indices = axis_of([indices])
    if on_indices is not None:
        batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
        out = on_indices.moved([batch[d] for d in on_indices.dims])
        indices = flattened(ctx, eqn, indices, on_indices)
    params: dict[str, Any] = {}
    if on is not None:
        whole = 1 if on.axis in of_tables else math.prod(on.sizes)
        params["slice_sizes"] = on.merged(sizes, whole)
        operand = flattened(ctx, eqn, operand, on)
    params["dimension_numbers"] = numbers._replace(
        offset_dims=dims_before(numbers.offset_dims, out),
        collapsed_slice_dims=dims_before(numbers.collapsed_slice_dims, on),
        start_index_map=dims_before(numbers.start_index_map, on),
        operand_batching_dims=dims_before(of_tables, on),
        start_indices_batching_dims=dims_before(of_indices, on_indices),
    )
    (result,) = run_flat(ctx, eqn, [operand, indices], [out], **params)
    return result


def scatter(ctx: Context, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
    """Updates the same positions of every row."""
    numbers = eqn.params["dimension_numbers"]
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(shape_of(x))) if d not in removed]
    window = list(map(int, numbers.update_window_dims))
    if isinstance(indices, Split) or numbers.operand_batching_dims:
        raise NotCovered(f"{eqn.primitive.name} at looked-up positions")
    if isinstance(x, Split):
        on = axis_of([x])
        of_updates = on.moved([window[position_of(kept, d)] for d in on.dims])
    else:
        of_updates = axis_of([updates])
        on = of_updates.moved([kept[position_of(window, d)] for d in of_updates.dims])
    if shape_of(updates)[of_updates.axis : of_updates.dims.stop] != on.sizes:
        raise NotCovered(f"{eqn.primitive.name} along dimensions that look rows up together")
    numbers = numbers._replace(
        update_window_dims=dims_before(window, of_updates),
        inserted_window_dims=dims_before(numbers.inserted_window_dims, on),
        scatter_dims_to_operand_dims=dims_before(numbers.scatter_dims_to_operand_dims, on),
    )
    flat = [flattened(ctx, eqn, x, on), indices, flattened(ctx, eqn, updates, of_updates)]
    (result,) = run_flat(ctx, eqn, flat, [on], dimension_numbers=numbers)
    return result


def looks_up_by_dimensions(eqn: Any, operand: Any, indices: Any) -> bool:
    """Whether a lookup by an index of several dimensions may have fewer rows than indices."""
    numbers = eqn.params["dimension_numbers"]
    if len(shape_of(indices)) < 3 or numbers.operand_batching_dims:
        return False
    if not is_plain(indices) and not isinstance(indices, Concat):
        return False
    if isinstance(indices, Concat) and any(map(has_lineage, indices.parts)):
        return False
    if has_lineage(operand) and operand.axis not in numbers.start_index_map:
        return False
    count, sizes = math.prod(shape_of(indices)[:-1]), eqn.params["slice_sizes"]
    shape = shape_of(operand)
    return any(sizes[a] == 1 and is_at_least(count, shape[a] + 1) for a in numbers.start_index_map)


def gather_by_dimensions(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks rows up by an index of several dimensions: by the flattened index."""
    numbers, sizes = eqn.params["dimension_numbers"], shape_of(indices)[:-1]
    shape = eqn.outvars[0].aval.shape
    out = Axis(0, sizes).moved([d for d in range(len(shape)) if d not in numbers.offset_dims])
    flat = flat_indices(ctx, eqn, indices)
    inner = eqn.replace(
        invars=[eqn.invars[0], core.Var(eqn.invars[1].aval.update(shape=shape_of(flat)))],
        outvars=[core.Var(eqn.outvars[0].aval.update(shape=out.shape(shape)))],
        params={
            **eqn.params,
            "dimension_numbers": numbers._replace(
                offset_dims=tuple(map(out.before, numbers.offset_dims))
            ),
        },
    )
    (result,) = ctx.run_equation(inner, [operand, flat])
    if is_plain(result) and is_plain(operand):
        return ctx.bind(eqn, operand, ctx.build(indices))
    return split_again(ctx, eqn, result, out)
