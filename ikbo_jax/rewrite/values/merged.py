"""Values whose looked-up or concatenated axis a reshape has merged with other axes.

`x.reshape(batch * positions, width)` of a lookup `x` has no axis of users any more, and a
concatenation along positions is interleaved. Neither is computed: `Merged` keeps the value before
the reshape, and an equation on the merged value becomes the same equation on the value before it.
A reshape that splits the axes again returns to that value.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Deferred
from ikbo_jax.rewrite.values.registry import NotCovered, rule_of

#: Calls of programs, whose rules interpret the program on any values.
CALLS = ("jit", "custom_jvp_call", "remat2", "checkpoint")


class Reshaped(Deferred):
    """Is the base class of values that stand for a reshape of another value.

    Attributes:
      inner: the value before the reshape; `layout` is all other fields.
    """

    inner: Any

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        return self.inner.dtype

    @property
    def origins(self) -> frozenset:
        return self.inner.origins

    def build(self, ctx: Any) -> jax.Array:
        return staged.reshape(ctx.build(self.inner), self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Merged(Reshaped):
    """Stands for `reshape(inner, shape)`, where dimensions merge neighbouring ones of `inner`.

    Attributes:
      inner: a `Lazy` or a `Concat`.
      groups: for every dimension, the dimensions of `inner` that it merges, in order.
    """

    inner: Any
    groups: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.inner.shape[d] for d in group) for group in self.groups)

    @property
    def layout(self) -> tuple[Any, ...]:
        return (self.groups,)

    def rule(self, ctx: Any, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has merged values among its operands."""
        name = eqn.primitive.name
        rule = rule_of(name, "lazy" if name in CALLS else "merged")
        if rule is None:
            raise NotCovered(f"{name} of a value whose looked-up axis is merged by a reshape")
        return rule(ctx, eqn, *operands)


def merged(x: Any, shape: Sequence[int], groups: Any) -> Merged:
    """Reshapes `x` to `shape`; NotCovered if that splits a dimension.

    `groups` are the groups of dimensions of x, and of dimensions of `shape`, with equal products.
    """
    merges: list[tuple[int, ...]] = []
    for dims, targets in groups:
        first = next((t for t in targets if shape[t] != 1), targets[0] if targets else None)
        if any(t != first and shape[t] != 1 for t in targets):
            raise NotCovered("the looked-up axis is merged or split by a reshape")
        for t in targets:
            merges.append(tuple(dims) if t == first else ())
        if first is None and merges:
            merges[-1] = (*merges[-1], *dims)
        elif first is None:
            raise NotCovered("the looked-up axis is merged or split by a reshape")
    return Merged(x, tuple(merges))
