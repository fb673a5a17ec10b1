"""Values that stand for a reshape of a looked-up or concatenated value, which is not computed.

`x.reshape(batch * positions, width)` of a lookup `x` merges the looked-up axis with another one,
and interleaves a concatenation along positions. `x[index]` with an index [requests, slots] is
`x[index.reshape(-1)]`, whose looked-up axis is split. A `Reshaped` keeps the value before the
reshape, and an equation on it becomes the same equation on the value before it. A reshape back
returns to that value. An `Apart` is a transpose of such a value that puts other dimensions between
the parts of the looked-up axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

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
class Moved(Deferred):
    """Is the base class of values that stand for another value in another layout.

    Attributes:
      inner: the other value.
      kind: tells the rules of the value, see `registry.rule_of`.
      layout: all but the inner value that tells its form.
    """

    inner: Any

    kind: ClassVar[Any]
    layout: ClassVar[Any]

    @property
    def dtype(self) -> Any:
        return self.inner.dtype

    @property
    def origins(self) -> frozenset:
        return origins_of(self.inner)

    def rule(self, ctx: Any, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has such values among its operands.

        If no rule covers it, these values are materialised, and other rules see the rest.
        """
        name, kind = eqn.primitive.name, self.kind
        if Apart in map(type, operands):
            kind = Apart.kind
        rule = rule_of(name, kind) or (rule_of(name, "lazy") if name in CALLS else None)
        try:
            if rule is None:
                raise NotCovered(f"{name} of {_KINDS[kind]}")
            return rule(ctx, eqn, *operands)
        except NotCovered as error:
            why = str(error)
        built = [ctx.materialise(eqn, x, why) if isinstance(x, Moved) else x for x in operands]
        results = ctx.run_equation(eqn, built)
        return results if eqn.primitive.multiple_results else results[0]


#: What the values of a kind are, for the report.
_KINDS = {
    "apart": "a value that is looked up by dimensions which are moved apart",
    "merged": "a value whose looked-up axis is merged by a reshape",
    "split": "a value that is looked up by several dimensions",
    "taken": "a concatenation in another order",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Reshaped(Moved):
    """Stands for `reshape(inner, shape)`, which merges dimensions or splits one.

    Attributes:
      inner: a deferred value.
      groups: all dimensions, in order.
      splits: whether the reshape splits a dimension.
    """

    groups: tuple[Group, ...]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple([n for group in self.groups for n in group.sizes])

    @functools.cached_property
    def splits(self) -> bool:
        return len(self.shape) > len(self.groups)

    @property
    def kind(self) -> str:
        return "split" if self.splits else "merged"

    @property
    def layout(self) -> tuple[Any, ...]:
        return (self.groups,)

    def build(self, ctx: Any) -> jax.Array:
        return staged.reshape(ctx.build(self.inner), self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Apart(Moved):
    """Stands for `transpose(inner, order)`, which has others between dimensions that look rows up.

    Attributes:
      inner: a `Reshaped` that splits a dimension.
    """

    order: tuple[int, ...]

    kind = "apart"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([self.inner.shape[d] for d in self.order])

    @property
    def layout(self) -> tuple[Any, ...]:
        return (self.order,)

    def build(self, ctx: Any) -> jax.Array:
        return staged.transpose(ctx.build(self.inner), self.order)


@dataclasses.dataclass(frozen=True, eq=False)
class Taken(Moved):
    """Stands for `take(inner, at, axis)`: positions that the program fixes, maybe repeated.

    Attributes:
      inner: a concatenation along `axis`, or an array.
    """

    at: tuple[int, ...]
    axis: int

    kind = "taken"

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.inner.shape
        return (*shape[: self.axis], len(self.at), *shape[self.axis + 1 :])

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.at, self.axis

    def build(self, ctx: Any) -> jax.Array:
        return staged.take(ctx.build(self.inner), self.at, self.axis)


def is_split(value: Any) -> bool:
    """Whether a value is a reshape that splits a dimension."""
    return type(value) is Reshaped and value.splits


def plain_groups(shape: Sequence[Any]) -> tuple[Group, ...]:
    """Returns the groups of a value of this shape that is not reshaped."""
    return tuple([Group((n,), (n,)) for n in shape])


def reshaped(x: Any, groups: Sequence[Group]) -> Any:
    """Merges or splits dimensions of a value; a reshaped array is computed."""
    if isinstance(x, Deferred):
        return Reshaped(x, tuple(groups))
    return staged.reshape(x, [n for group in groups for n in group.sizes])


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
