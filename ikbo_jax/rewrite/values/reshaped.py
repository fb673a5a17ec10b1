"""Values that stand for a reshape of a looked-up or concatenated value, which is not computed.

`x.reshape(batch * positions, width)` of a lookup `x` merges the looked-up axis with another one,
and interleaves a concatenation along positions. `x[index]` with an index [requests, slots] is
`x[index.reshape(-1)]`, whose looked-up axis is split. A `Reshaped` keeps the value before the
reshape, and an equation on it becomes the same equation on the value before it. A reshape back
returns to that value. A transpose may put other dimensions between those that an axis is split
into, as `jnp.einsum("rsnh,rsknh->rnsk", query, key[index])` puts heads between requests and slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Deferred, origins_of
from ikbo_jax.rewrite.values.registry import NotCovered, rule_of

#: Calls of programs, whose rules interpret the program on any values.
CALLS = ("jit", "custom_jvp_call", "remat2", "checkpoint")


class Group(NamedTuple):
    """Holds the sizes of neighbouring dimensions that a reshape merges to one, or splits one into.

    Attributes:
      sizes: after the reshape.
      before: before the reshape; () for a new dimension of size 1.
    """

    sizes: tuple[Any, ...]
    before: tuple[Any, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it is one dimension, which the reshape keeps."""
        return len(self.sizes) == len(self.before) == 1


@dataclasses.dataclass(frozen=True, eq=False)
class Reshaped(Deferred):
    """Stands for `transpose(reshape(inner, sizes), order)`: it merges dimensions or splits one.

    Attributes:
      inner: a deferred value.
      groups: all dimensions, in the order of the first dimension of each.
      order: () if the dimensions of each group stand together.
      splits: whether the reshape splits a dimension.
    """

    inner: Any
    groups: tuple[Group, ...]
    order: tuple[int, ...] = ()

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        sizes = [n for group in self.groups for n in group.sizes]
        return tuple([sizes[d] for d in self.order] if self.order else sizes)

    @functools.cached_property
    def splits(self) -> bool:
        return len(self.shape) > len(self.groups)

    @property
    def dtype(self) -> Any:
        return self.inner.dtype

    @property
    def origins(self) -> frozenset:
        return self.inner.origins

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but the inner value that tells its form."""
        return self.groups, self.order

    def build(self, ctx: Any) -> jax.Array:
        sizes = [n for group in self.groups for n in group.sizes]
        array = staged.reshape(ctx.build(self.inner), sizes)
        return staged.transpose(array, self.order) if self.order else array

    def rule(self, ctx: Any, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has reshaped values among its operands.

        If no rule covers it, these values are materialised, and other rules see the rest.
        """
        name, kind = eqn.primitive.name, "split" if self.splits else "merged"
        try:
            if (rule := rule_of(name, "lazy" if name in CALLS else kind)) is None:
                what = "that is looked up by several dimensions"
                what = what if kind == "split" else "whose looked-up axis is merged by a reshape"
                raise NotCovered(f"{name} of a value {what}")
            return rule(ctx, eqn, *operands)
        except NotCovered as error:
            why = str(error)
        built = [ctx.materialise(eqn, x, why) if isinstance(x, Reshaped) else x for x in operands]
        results = ctx.run_equation(eqn, built)
        return results if eqn.primitive.multiple_results else results[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Taken(Deferred):
    """Stands for `take(inner, at, axis)`: positions that the program fixes, maybe repeated.

    Attributes:
      inner: a concatenation along `axis`, or an array.
    """

    inner: Any
    at: tuple[int, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.inner.shape
        return (*shape[: self.axis], len(self.at), *shape[self.axis + 1 :])

    @property
    def dtype(self) -> Any:
        return self.inner.dtype

    @property
    def origins(self) -> frozenset:
        return origins_of(self.inner)

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but the inner value that tells its form."""
        return self.at, self.axis

    def build(self, ctx: Any) -> jax.Array:
        return staged.take(ctx.build(self.inner), self.at, self.axis)

    def rule(self, ctx: Any, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has such values among its operands."""
        name = eqn.primitive.name
        if (rule := rule_of(name, "lazy" if name in CALLS else "taken")) is None:
            raise NotCovered(f"{name} of a concatenation in another order")
        return rule(ctx, eqn, *operands)


def is_split(value: Any) -> bool:
    """Whether a value is a reshape that splits a dimension."""
    return type(value) is Reshaped and value.splits


def plain_groups(shape: Sequence[Any]) -> tuple[Group, ...]:
    """Returns the groups of a value of this shape that is not reshaped."""
    return tuple([Group((n,), (n,)) for n in shape])


def reshaped(x: Any, groups: Sequence[Group], order: tuple[int, ...] = ()) -> Any:
    """Merges or splits dimensions of a value; a reshaped array is computed."""
    if isinstance(x, Deferred):
        return Reshaped(x, tuple(groups), order)
    array = staged.reshape(x, [n for group in groups for n in group.sizes])
    return staged.transpose(array, order) if order else array


def split(x: Any, axis: int, sizes: tuple[int, ...]) -> Any:
    """Splits a dimension of any value."""
    groups = list(plain_groups(x.shape))
    groups[axis] = Group(sizes, groups[axis].before)
    return reshaped(x, groups)


def merged(x: Any, shape: Sequence[int], groups: Any) -> Reshaped:
    """Reshapes `x` to `shape`; NotCovered if that splits a dimension.

    `groups` are the groups of dimensions of x, and of dimensions of `shape`, with equal products.
    """
    merges: list[Group] = []
    for dims, targets in groups:
        before = tuple([x.shape[d] for d in dims])
        first = next((t for t in targets if shape[t] != 1), targets[0] if targets else None)
        if any(t != first and shape[t] != 1 for t in targets) or first is None and not merges:
            raise NotCovered("the looked-up axis is merged or split by a reshape")
        merges += [Group((shape[t],), before if t == first else ()) for t in targets]
        if first is None:
            merges[-1] = Group(merges[-1].sizes, (*merges[-1].before, *before))
    return Reshaped(x, tuple(merges))
