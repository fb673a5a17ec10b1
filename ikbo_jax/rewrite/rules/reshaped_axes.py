"""Dimensions of reshaped values, and equations before the reshape, which have others.

An equation before the reshape runs like any equation of the program, by the rule of its operands,
and its results are reshaped again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import reshape
from ikbo_jax.rewrite.rules.elementwise import sliced
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, has_lineage, is_only_broadcast, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Group, Reshaped, is_split, plain_groups, reshaped


class Axes:
    """Numbers the dimensions of a value after and before the reshape.

    Attributes:
      groups: its groups.
      order: see `Reshaped`.
      dims: for every group, its dimensions.
      inner: for every group, its dimensions before the reshape.
      numbers: for every dimension, the number of its group.
      special: numbers of the groups that the reshape merges or splits.
      places: these groups, each with its dimensions.
      splits: whether the reshape splits a dimension.
      shape: sizes after the reshape.
      before_shape: sizes before the reshape.
    """

    def __init__(self, groups: tuple[Group, ...], order: tuple[int, ...]) -> None:
        sizes = [n for group in groups for n in group.sizes]
        places = inverse(order) if order else range(len(sizes))
        self.groups = groups
        self.order = order
        self.dims: list[list[int]] = []
        self.inner: list[range] = []
        after = before = 0
        for group in groups:
            self.dims.append([*places[after : after + len(group.sizes)]])
            self.inner.append(range(before, before + len(group.before)))
            after, before = after + len(group.sizes), self.inner[-1].stop
        of_dims = {d: n for n, dims in enumerate(self.dims) for d in dims}
        self.numbers = [of_dims[d] for d in range(len(sizes))]
        self.special = [n for n, group in enumerate(groups) if not group.is_plain]
        self.places = [(self.dims[n], groups[n]) for n in self.special]
        self.splits = any(len(group.sizes) > 1 for group in groups)
        self.shape = tuple([sizes[d] for d in order]) if order else tuple(sizes)
        self.before_shape = tuple([n for group in groups for n in group.before])

    @property
    def together(self) -> list[int]:
        """Dimensions of the only special group."""
        ((dims, _),) = self.places
        return dims

    def runs(self, dims: Sequence[int]) -> list[int]:
        """Numbers the groups of dimensions, in order; NotCovered if some of a group are missing."""
        found = list(dict.fromkeys([self.numbers[d] for d in dims]))
        if sum([len(self.dims[n]) for n in found]) != len(dims):
            raise NotCovered("an operation along some dimensions that look rows up together")
        return found

    def before(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Numbers dimensions as before the reshape."""
        return tuple([d for n in self.runs(dims) for d in self.inner[n]])

    def single(self, dim: int) -> int:
        """Numbers a dimension that the reshape keeps; NotCovered for another one."""
        n = self.numbers[dim]
        if not self.groups[n].is_plain:
            raise NotCovered("an operation along dimensions that look rows up together")
        return self.inner[n][0]

    def fitted(self, shape: Sequence[int], name: str) -> Axes:
        """Returns axes with the same special groups for another shape; NotCovered if none fit.

        `name` is the primitive whose operand or result has the shape.
        """
        for dims, group in self.places:
            if max(dims) >= len(shape) or tuple([shape[d] for d in dims]) != group.sizes:
                raise NotCovered(f"{name} of a part of dimensions that look rows up together")
        return axes_at(shape, self.places)

    def put(self, groups: Iterable[tuple[Sequence[int], Group]]) -> Axes:
        """Puts groups in place of dimensions."""
        new = [(list(dims), group) for dims, group in groups]
        taken = {d for dims, _ in new for d in dims}
        old = zip(self.dims, self.groups, strict=True)
        return _sorted(new + [(dims, x) for dims, x in old if taken.isdisjoint(dims)])

    def at(self, shape: Sequence[int], dims: Sequence[int]) -> Axes:
        """Puts the only special group in place of dimensions of another shape."""
        ((_, group),) = self.places
        return axes_at(shape, [(dims, group)])

    def moved(self, dims: Sequence[int]) -> Axes:
        """Returns axes of these dimensions alone, in this order, which may lack whole groups."""
        places = {d: n for n, d in enumerate(dims)}
        own = self.runs(dims)
        return _sorted([([places[d] for d in self.dims[n]], self.groups[n]) for n in own])

    def beside(self, other: Axes) -> Axes:
        """Puts the dimensions of other axes after these."""
        count = len(self.shape)
        after = zip(([count + d for d in dims] for dims in other.dims), other.groups, strict=True)
        return _sorted([*zip(self.dims, self.groups, strict=True), *after])


def inverse(order: Sequence[int]) -> list[int]:
    """Inverts a permutation."""
    return [order.index(d) for d in range(len(order))]


def _sorted(places: list[tuple[list[int], Group]]) -> Axes:
    """Returns the axes of groups that are at these dimensions."""
    places.sort(key=lambda place: min(place[0]))
    dims = [d for own, _ in places for d in own]
    groups = tuple([group for _, group in places])
    return axes_of(groups, () if dims == sorted(dims) else tuple(inverse(dims)))


def axes_at(shape: Sequence[int], groups: Any) -> Axes:
    """Returns the axes of a shape with groups in place of some dimensions."""
    return axes_of(plain_groups(shape)).put(groups)


@functools.lru_cache(maxsize=4096)
def axes_of(groups: tuple[Group, ...], order: tuple[int, ...] = ()) -> Axes:
    """Returns the axes of these groups, which the layers of a model share."""
    return Axes(groups, order)


def transposed(ctx: Context, eqn: Any, x: Any, order: Sequence[int]) -> Any:
    """Transposes any value, once in every scope."""
    order, shape = tuple(order), shape_of(x)
    if order == tuple(range(len(order))):
        return x
    sizes = [shape[d] for d in order]
    moved = equation(eqn, lax.transpose_p, [x], sizes, {"permutation": order})
    return ctx.scope.once(("transposed", *order), [x], lambda: ctx.run_equation(moved, [x])[0])


def equation(eqn: Any, primitive: Any, avals: Sequence[Any], out_shape: Any, params: Any) -> Any:
    """Returns an equation at the place of `eqn`, whose result has the dtype of its operands."""
    out = core.Var(jax.core.ShapedArray(tuple(out_shape), avals[0].dtype))
    invars = [core.Var(jax.core.ShapedArray(shape_of(x), x.dtype)) for x in avals]
    return eqn.replace(primitive=primitive, invars=invars, outvars=[out], params=params)


def to_shape(ctx: Context, eqn: Any, x: Any, shape: Sequence[int]) -> Any:
    """Reshapes a value, once in every scope."""
    shape = tuple(shape)
    params: dict[str, Any] = {"new_sizes": shape, "dimensions": None, "sharding": None}

    def run() -> Any:
        (result,) = ctx.run_equation(equation(eqn, lax.reshape_p, [x], shape, params), [x])
        return result

    return x if shape_of(x) == shape else ctx.scope.once(("flat", *shape), [x], run)


def repeated(ctx: Context, eqn: Any, x: Any, wide: Any, dims: Iterable[int], shape: Any) -> Any:
    """Reshapes `broadcast_in_dim(x, wide, dims)`, both by the rules of these equations."""
    params = {"shape": wide, "broadcast_dimensions": tuple(dims), "sharding": None}
    broadcast = equation(eqn, lax.broadcast_in_dim_p, [x], wide, params)
    return to_shape(ctx, eqn, ctx.run_equation(broadcast, [x])[0], shape)


def flattened(ctx: Context, eqn: Any, x: Any, axes: Axes) -> Any:
    """Reshapes an operand as before the reshape; its special groups may have size 1."""
    if type(x) is Reshaped:
        if axes_of(x.groups, x.order).places == axes.places:
            return x.inner
        x = ctx.materialise(eqn, x, "values that are reshaped differently")
    if not shape_of(x):
        return x
    x = transposed(ctx, eqn, x, inverse(axes.order)) if axes.order else x
    shape, stop = shape_of(x), 0
    target: list[int] = []
    wide = list(shape)
    for group in axes.groups:
        start, stop = stop, stop + len(group.sizes)
        own_sizes = shape[start:stop]
        if group.is_plain:
            target += own_sizes
        elif all(n == 1 for n in own_sizes):
            target += [1] * len(group.before)
        else:
            target += group.before
            wide[start:stop] = group.sizes
    target += shape[stop:]
    if has_lineage(x) and len(axes.groups[axes_of(axes.groups).numbers[x.axis]].before) > 1:
        reason = "looked up by other rows than the merged value"
        return ctx.materialise(eqn, to_shape(ctx, eqn, x, target), reason)
    if tuple(wide) != shape:
        if not is_plain(x) and not is_only_broadcast(x):
            raise NotCovered("a value that is broadcast along dimensions that look rows up")
        base = x if is_plain(x) else x.base
        x = ctx.scope.once(("wide", *wide), [x], lambda: Lazy(base, tuple(wide)))
    return to_shape(ctx, eqn, x, target)


def run_before(ctx: Context, eqn: Any, operands: Sequence[Any], out: Axes, **params: Any) -> Any:
    """Runs an equation before the reshape, on operands before the reshape; reshapes its results.

    `out` are the axes of the results.
    """
    outs = [
        out if v.aval.shape == out.shape else out.fitted(v.aval.shape, eqn.primitive.name)
        for v in eqn.outvars
    ]
    inner = at_shapes(eqn, operands, [axes.before_shape for axes in outs], **params)
    found = ctx.run_equation(inner, list(operands))
    results = [again(ctx, eqn, x, axes) for x, axes in zip(found, outs, strict=True)]
    return results if eqn.primitive.multiple_results else results[0]


def again(ctx: Context, eqn: Any, x: Any, axes: Axes) -> Any:
    """Reshapes a result before the reshape."""
    if axes.splits and type(x) is Lazy and x.axis not in axes.inner[axes.special[0]]:
        wide = reshape.reshape_to(ctx, eqn, x, axes_of(axes.groups).shape)
        return transposed(ctx, eqn, wide, axes.order) if axes.order else wide
    if is_split(x) and not axes.splits:
        return to_shape_again(ctx, eqn, x, axes.shape)
    if not axes.special:
        return x
    result = reshaped(x, axes.groups, axes.order)
    if is_plain(x) and not axes.order:
        # Later equations before the reshape find the value, and the equation that made it.
        ctx.scope.once(("flat", *shape_of(x)), [result], lambda: x)
    return result


def to_shape_again(ctx: Context, eqn: Any, x: Reshaped, shape: tuple[int, ...]) -> Any:
    """Reshapes the value before the reshape, if a split axis stays split or is whole again."""
    axes = axes_of(x.groups, x.order)
    own = [d for d in axes.together if x.shape[d] != 1] if x.splits else []
    places: dict[int, int] = {}
    for dims, targets in reshape.groups_of(x.shape, shape) if own else ():
        old = [d for d in dims if x.shape[d] != 1]
        new = [d for d in targets if shape[d] != 1]
        if len(new) == 1 and (len(old) == 1 or old == own):
            places |= dict.fromkeys(old, new[0])
    if not own or not places.keys() >= set(own):
        if axes.order:
            return _broadcast_last(ctx, eqn, x, shape)
        return reshape.reshape_to(ctx, eqn, x.inner, shape)
    at = list(dict.fromkeys([places[d] for d in own]))
    group = Group(tuple([shape[d] for d in at]), axes.places[0][1].before)
    out = axes_at(shape, [(at, group)])
    return again(ctx, eqn, to_shape(ctx, eqn, x.inner, out.before_shape), out)


def _broadcast_last(ctx: Context, eqn: Any, x: Reshaped, shape: tuple[int, ...]) -> Any:
    """Reshapes a value that is broadcast between dimensions that look rows up together.

    The rows are looked up before: embedded ids of users' histories, repeated for their candidates.
    """
    groups, sizes = list(x.groups), list(x.inner.shape)
    for n, dims in enumerate(axes_of(x.groups, x.order).inner):
        if x.groups[n].is_plain and _is_broadcast(x.inner, dims[0]):
            groups[n], sizes[dims[0]] = Group((1,), (1,)), 1
    if tuple(sizes) == x.inner.shape:
        raise NotCovered("dimensions that are moved apart are merged by a reshape")
    few = sliced(ctx, x.inner, [0] * len(sizes), sizes)
    before = dataclasses.replace(x, inner=few, groups=tuple(groups))
    rows = ctx.materialise(eqn, before, "broadcast of a value that is looked up by dimensions")
    return repeated(ctx, eqn, rows, x.shape, range(len(x.shape)), shape)


def _is_broadcast(x: Any, dim: int) -> bool:
    if isinstance(x, Concat):
        return dim != x.axis and all(_is_broadcast(part, dim) for part in x.parts)
    return type(x) is Lazy and x.axis != dim and x.base.shape[dim] == 1 != x.shape[dim]
