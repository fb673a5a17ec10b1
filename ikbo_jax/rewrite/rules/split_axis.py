"""A split axis: equations before the reshape, which have one dimension for several.

An equation before the reshape runs like any equation of the program, by the rule of its operands,
and its results are split again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import reshape
from ikbo_jax.rewrite.values.lineage import Lazy, is_only_broadcast, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.split import Split, split


class Axis:
    """The dimensions `axis`, `axis + 1`, ... of sizes `sizes`, which are one before the reshape."""

    def __init__(self, axis: int, sizes: tuple[int, ...]) -> None:
        self.axis, self.sizes = axis, sizes
        self.dims = range(axis, axis + len(sizes))

    def before(self, dim: int) -> int:
        """Numbers another dimension as before the reshape; NotCovered for one of the axis."""
        if dim in self.dims:
            raise NotCovered("an operation along dimensions that look rows up together")
        return dim if dim < self.axis else dim - len(self.sizes) + 1

    def merged(self, entries: Sequence[Any], entry: Any) -> tuple[Any, ...]:
        """Replaces the entries of the axis's dimensions by one entry."""
        return (*entries[: self.axis], entry, *entries[self.dims.stop :])

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.merged(shape, math.prod(shape[self.axis : self.dims.stop]))

    def at(self, axis: int) -> Axis:
        return Axis(axis, self.sizes)

    def moved(self, dims: Sequence[int]) -> Axis:
        """Returns the axis where its dimensions are at `dims`; NotCovered if they are apart."""
        if list(dims) != list(range(dims[0], dims[0] + len(dims))):
            raise NotCovered("dimensions that look rows up together are moved apart")
        return self.at(dims[0])


def equation(eqn: Any, primitive: Any, avals: Sequence[Any], out_shape: Any, params: Any) -> Any:
    """Returns an equation at the place of `eqn`, whose result has the dtype of its operands."""
    out = core.Var(jax.core.ShapedArray(tuple(out_shape), avals[0].dtype))
    invars = [core.Var(jax.core.ShapedArray(shape_of(x), x.dtype)) for x in avals]
    return eqn.replace(primitive=primitive, invars=invars, outvars=[out], params=params)


def reshaped(ctx: Context, eqn: Any, x: Any, shape: Sequence[int]) -> Any:
    """Reshapes a value, once in every scope."""
    shape = tuple(shape)
    params: dict[str, Any] = {"new_sizes": shape, "dimensions": None, "sharding": None}

    def run() -> Any:
        (result,) = ctx.run_equation(equation(eqn, lax.reshape_p, [x], shape, params), [x])
        return result

    return x if shape_of(x) == shape else ctx.scope.once(("flat", *shape), [x], run)


def flattened(ctx: Context, eqn: Any, x: Any, on: Axis) -> Any:
    """Merges the dimensions of the axis in an operand, where it may have size 1."""
    if isinstance(x, Split):
        if (x.axis, x.sizes) == (on.axis, on.sizes):
            return x.inner
        x = ctx.materialise(eqn, x, "values that are looked up by different dimensions")
    shape = shape_of(x)
    if not shape:
        return x
    own = shape[on.axis : on.dims.stop]
    if own != on.sizes and any(n != 1 for n in own):
        if not is_plain(x) and not is_only_broadcast(x):
            raise NotCovered("a value that is broadcast along dimensions that look rows up")
        base = x if is_plain(x) else x.base
        wide = (*shape[: on.axis], *on.sizes, *shape[on.dims.stop :])
        x = ctx.scope.once(("wide", on.axis, *on.sizes), [x], lambda: Lazy(base, wide))
    return reshaped(ctx, eqn, x, on.shape(shape_of(x)))


def run_flat(
    ctx: Context, eqn: Any, operands: Sequence[Any], out: Sequence[Axis], **params: Any
) -> list[Any]:
    """Runs the equation before the reshape, on operands before the reshape; splits its results."""
    outvars = [
        core.Var(v.aval.update(shape=on.shape(v.aval.shape)))
        for v, on in zip(eqn.outvars, out, strict=True)
    ]
    invars = [
        v if v.aval.shape == shape_of(x) else core.Var(v.aval.update(shape=shape_of(x)))
        for v, x in zip(eqn.invars, operands, strict=True)
    ]
    inner = eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, **params})
    return [
        split_again(ctx, eqn, x, on)
        for x, on in zip(ctx.run_equation(inner, list(operands)), out, strict=True)
    ]


def split_again(ctx: Context, eqn: Any, x: Any, on: Axis) -> Any:
    """Splits a result before the reshape along the axis."""
    if is_only_broadcast(x):
        return reshape.reshape_to(ctx, eqn, x, _wide(x.shape, on))
    return split(x, on.axis, on.sizes)


def _wide(shape: Sequence[int], on: Axis) -> tuple[int, ...]:
    return (*shape[: on.axis], *on.sizes, *shape[on.axis + 1 :])


def results_of(eqn: Any, results: list[Any]) -> Any:
    """Returns the list for a primitive of several results, otherwise its one element."""
    return results if eqn.primitive.multiple_results else results[0]


def axis_of(operands: Sequence[Any]) -> Axis:
    """Returns the axis of the first operand that is split."""
    first = next(x for x in operands if isinstance(x, Split))
    return Axis(first.axis, first.sizes)


def position_of(dims: list[int], dim: int) -> int:
    """Finds a dimension in a list; NotCovered if it is not there."""
    if dim not in dims:
        raise NotCovered("lookup along dimensions that look rows up together")
    return dims.index(dim)


def dims_before(dims: Sequence[int], on: Axis | None) -> tuple[int, ...]:
    """Numbers dimensions as before the reshape; the axis is one of them at most."""
    if on is None:
        return tuple(dims)
    kept = (int(d) for d in dims if d not in on.dims[1:])
    return tuple(d if d == on.axis else on.before(d) for d in kept)
