"""Values whose looked-up axis a reshape has split, or that an index of several dimensions looks up.

`x[index]` with an index [requests, slots] is `x[index.reshape(-1)]`, reshaped. `Split` keeps the
value before this reshape, and an equation on it becomes one on the value before the reshape.
"""

import dataclasses
from typing import Any

import jax

from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Deferred
from ikbo_jax.rewrite.values.merged import CALLS, Reshaped
from ikbo_jax.rewrite.values.registry import NotCovered, rule_of


@dataclasses.dataclass(frozen=True, eq=False)
class Split(Reshaped):
    """Stands for `reshape(inner, shape)`, where several dimensions take the place of `axis`.

    Attributes:
      inner: a deferred value.
      axis: its dimension that is split.
      sizes: sizes of the dimensions that it is split into.
    """

    inner: Any
    axis: int
    sizes: tuple[int, ...]

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.axis, self.sizes

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.inner.shape
        return (*shape[: self.axis], *self.sizes, *shape[self.axis + 1 :])

    def rule(self, ctx: Any, eqn: Any, operands: Any) -> Any:
        """Runs an equation that has split values among its operands.

        If no rule covers it, the split values are materialised, and other rules see the rest.
        """
        name = eqn.primitive.name
        try:
            if (rule := rule_of(name, "lazy" if name in CALLS else "split")) is None:
                raise NotCovered(f"{name} of a value that is looked up by several dimensions")
            return rule(ctx, eqn, *operands)
        except NotCovered as error:
            built = [
                ctx.materialise(eqn, x, str(error)) if isinstance(x, Split) else x for x in operands
            ]
        results = ctx.run_equation(eqn, built)
        return results if eqn.primitive.multiple_results else results[0]


def split(x: Any, axis: int, sizes: tuple[int, ...]) -> Any:
    """Splits a dimension of any value."""
    if isinstance(x, Deferred):
        return Split(x, axis, sizes)
    shape = staged.shape_of(x)
    array: jax.Array = staged.reshape(x, (*shape[:axis], *sizes, *shape[axis + 1 :]))
    return array
