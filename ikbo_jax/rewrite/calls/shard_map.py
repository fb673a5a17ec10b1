"""The rule of `jax.shard_map`: its body is rewritten, and takes looked-up rows without copies.

Every device holds the rows of all users and its part of the index. So a looked-up operand whose
batch is divided becomes its rows, replicated, and the index, divided as the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules.elementwise import elementwise
from ikbo_jax.rewrite.values.jaxprs import ending_its_trace
from ikbo_jax.rewrite.values.lineage import Lazy, Lineage, has_lineage, is_plain, spread_axes
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Holds a looked-up operand, and how the original divides it."""

    value: Lazy
    spec: tuple[Any, ...]

    @classmethod
    def of(cls, value: Lazy, spec: PartitionSpec) -> _Rows:
        full = (*spec, *[None] * (len(value.shape) - len(spec)))
        divided = [d for d, names in enumerate(full) if names is not None]
        return cls(spread_axes(value, divided), full)

    @property
    def specs(self) -> list[PartitionSpec]:
        """Specs of the rows and of the index."""
        axis = self.value.axis
        rows = (*self.spec[:axis], None, *self.spec[axis + 1 :])
        return [PartitionSpec(*rows), PartitionSpec(self.spec[axis])]

    @property
    def arrays(self) -> list[jax.Array]:
        lineage = self.value.lineage
        assert lineage is not None
        return [self.value.base, lineage.index]

    def inside(
        self, base: jax.Array, index: jax.Array, shape: tuple[int, ...], lineages: dict[Any, Any]
    ) -> Lazy:
        """Returns the operand in the body, of one device's shape."""
        axis, outer = self.value.axis, self.value.lineage
        assert outer is not None
        key = outer, self.spec[axis]
        if key not in lineages:
            lineages[key] = Lineage(index, outer.users, shape[axis])
        if names := self.spec[axis]:
            # The rows meet values that differ between devices; their gradients are summed.
            base = lax.pcast(base, names, to="varying")
        return Lazy(base, shape, lineages[key], axis, self.value.origins)


def shard_map(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Passes rows and indices of lookups to every device."""
    params = eqn.params
    body = params["jaxpr"]
    if all(map(is_plain, operands)) and ctx.programs.is_plain(body):
        return ctx.bind(eqn, *operands)
    if body.effects:
        raise NotCovered("a shard_map with effects")
    checked = params["check_vma"]
    taken: list[Any] = []
    for x, spec in zip(operands, params["in_specs"], strict=True):
        if isinstance(x, Lazy) and has_lineage(x) and isinstance(spec, PartitionSpec):
            taken.append(_Rows.of(x, spec))
        else:
            taken.append(ctx.materialise(eqn, x, "operand of a shard_map"))
    arrays: list[Any] = []
    specs: list[Any] = []
    for x, spec in zip(taken, params["in_specs"], strict=True):
        arrays += x.arrays if isinstance(x, _Rows) else [x]
        specs += x.specs if isinstance(x, _Rows) else [spec]

    def run(*arrays: Any) -> Sequence[Any]:
        # Arrays of the scopes outside are whole, not parts.
        inner, rest = Context(ctx.recorder, ctx, outlives=True), iter(arrays)
        lineages: dict[Any, Any] = {}
        values: list[Any] = []
        for x, v in zip(taken, body.invars, strict=True):
            if isinstance(x, _Rows):
                pair = next(rest), next(rest)
                values.append(x.inside(*pair, tuple(v.aval.shape), lineages))
            else:
                values.append(next(rest))
        with inner.recorder.inside(eqn):
            results = inner.run(body, (), values)
        return tuple(inner.materialise(eqn, y, "result of a shard_map") for y in results)

    return list(
        jax.shard_map(
            ending_its_trace(run),
            mesh=params["mesh"],
            in_specs=tuple(specs),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=checked,
        )(*arrays)
    )


def pvary(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Marks a value that differs between devices from now on: a fact of types, for every row."""
    if len(operands) != 1:
        raise NotCovered("pvary of several values")
    return elementwise(ctx, eqn, *operands)
