"""Dimensions of reshaped values, and equations before the reshape, which have others.

An equation before the reshape runs like any equation of the program, by the rule of its operands,
and its results are reshaped again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import reshape
from ikbo_jax.rewrite.values.lineage import Lazy, has_lineage, is_only_broadcast, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Group, Reshaped, is_split, plain_groups, reshaped


class Axes:
    """Numbers the dimensions of a value after and before the reshape.

    Attributes:
      groups: its groups.
      dims: for every group, its dimensions.
      inner: for every group, its dimensions before the reshape.
      numbers: for every dimension, the number of its group.
      special: numbers of the groups that the reshape merges or splits.
      places: these groups, each with its dimensions.
      splits: whether the reshape splits a dimension.
      shape: sizes after the reshape.
      before_shape: sizes before the reshape.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.dims: list[range] = []
        self.inner: list[range] = []
        after = before = 0
        for group in groups:
            self.dims.append(range(after, after + len(group.sizes)))
            self.inner.append(range(before, before + len(group.before)))
            after, before = self.dims[-1].stop, self.inner[-1].stop
        self.numbers = [n for n, dims in enumerate(self.dims) for _ in dims]
        self.special = [n for n, group in enumerate(groups) if not group.is_plain]
        self.places = [(self.dims[n], groups[n]) for n in self.special]
        self.splits = any(len(group.sizes) > 1 for group in groups)
        self.shape = tuple([n for group in groups for n in group.sizes])
        self.before_shape = tuple([n for group in groups for n in group.before])

    @property
    def together(self) -> range:
        """Dimensions of the only special group."""
        (n,) = self.special
        return self.dims[n]

    def runs(self, dims: Sequence[int]) -> list[int]:
        """Numbers the groups of dimensions, in order; NotCovered if those of a group are apart."""
        found, rest = [], list(map(int, dims))
        while rest:
            n = self.numbers[rest[0]]
            own = list(self.dims[n])
            if rest[: len(own)] != own:
                raise NotCovered("dimensions that look rows up together are moved apart")
            found.append(n)
            rest = rest[len(own) :]
        return found

    def before(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Numbers dimensions as before the reshape."""
        return tuple([d for n in self.runs(dims) for d in self.inner[n]])

    def chosen(self, dims: Sequence[int]) -> list[Group]:
        return [self.groups[n] for n in self.runs(dims)]

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
        last = max(self.special, default=-1)
        groups, at = [], 0
        for group in self.groups[: last + 1]:
            own = tuple(shape[at : at + len(group.sizes)])
            if own != group.sizes and not group.is_plain:
                raise NotCovered(f"{name} of a merged value that is broadcast")
            groups.append(Group(own, own) if group.is_plain else group)
            at += len(own)
        return axes_of((*groups, *plain_groups(shape[at:])))

    def put(self, groups: Iterable[tuple[Sequence[int], Group]]) -> Axes:
        """Puts groups in place of dimensions; NotCovered if the dimensions of one are apart."""
        found = {dims.start: x for dims, x in zip(self.dims, self.groups, strict=True)}
        for dims, group in groups:
            if list(dims) != list(range(dims[0], dims[0] + len(dims))):
                raise NotCovered("dimensions that look rows up together are moved apart")
            found = {d: x for d, x in found.items() if d not in dims} | {dims[0]: group}
        return axes_of(tuple([found[d] for d in sorted(found)]))

    def at(self, shape: Sequence[int], dims: Sequence[int]) -> Axes:
        """Puts the only special group in place of dimensions of another shape."""
        (n,) = self.special
        return axes_of(plain_groups(shape)).put([(dims, self.groups[n])])


@functools.lru_cache(maxsize=4096)
def axes_of(groups: tuple[Group, ...]) -> Axes:
    """Returns the axes of these groups, which the layers of a model share."""
    return Axes(groups)


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


def flattened(ctx: Context, eqn: Any, x: Any, axes: Axes) -> Any:
    """Reshapes an operand as before the reshape; its special groups may have size 1."""
    if type(x) is Reshaped:
        if axes_of(x.groups).places == axes.places:
            return x.inner
        x = ctx.materialise(eqn, x, "values that are reshaped differently")
    shape = shape_of(x)
    if not shape:
        return x
    target: list[int] = []
    wide = list(shape)
    for dims, group in zip(axes.dims, axes.groups, strict=True):
        own_sizes = shape[dims.start : dims.stop]
        if group.is_plain:
            target += own_sizes
        elif all(n == 1 for n in own_sizes):
            target += [1] * len(group.before)
        else:
            target += group.before
            wide[dims.start : dims.stop] = group.sizes
    target += shape[axes.dims[-1].stop :]
    if has_lineage(x) and len(axes.groups[axes.numbers[x.axis]].before) > 1:
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
    if axes.splits and is_only_broadcast(x):
        return reshape.reshape_to(ctx, eqn, x, axes.shape)
    if is_split(x) and not axes.splits:
        return to_shape_again(ctx, eqn, x, axes.shape)
    if not axes.special:
        return x
    result = reshaped(x, axes.groups)
    if is_plain(x):
        # Later equations before the reshape find the value, and the equation that made it.
        ctx.scope.once(("flat", *shape_of(x)), [result], lambda: x)
    return result


def to_shape_again(ctx: Context, eqn: Any, x: Reshaped, shape: tuple[int, ...]) -> Any:
    """Reshapes the value before the reshape, if a split axis stays split or is whole again."""
    axes = axes_of(x.groups)
    if not is_split(x):
        return reshape.reshape_to(ctx, eqn, x.inner, shape)
    (n,) = axes.special
    group, before = axes.groups[n], math.prod(x.shape[: axes.together.start])
    # The axis is where as many elements are before it.
    for axis in range(len(shape) + 1):
        if math.prod(shape[:axis]) != before or 0 in shape:
            continue
        if end := _end_of(shape, axis, group.sizes):
            own = Group(shape[axis:end], group.before)
            out = axes_of(plain_groups(shape)).put([(range(axis, end), own)])
            return again(ctx, eqn, to_shape(ctx, eqn, x.inner, out.before_shape), out)
        if axis < len(shape) and (shape[axis],) == group.before:
            return to_shape(ctx, eqn, x.inner, shape)
    return reshape.reshape_to(ctx, eqn, x.inner, shape)


def _end_of(shape: tuple[int, ...], start: int, sizes: tuple[int, ...]) -> int:
    """Finds where dimensions of these sizes end, of which some of size 1 may be left out or new.

    0 if other dimensions begin at `start`, or a single one.
    """
    if shape[start : start + len(sizes)] == sizes:
        return start + len(sizes)
    wanted, end = [n for n in sizes if n != 1], start
    while wanted and end < len(shape) and shape[end] in (1, wanted[0]):
        wanted = wanted[shape[end] != 1 :]
        end += 1
    return end if not wanted and end > start + 1 else 0
