"""The rule of `jax.shard_map`: its body is rewritten, and takes looked-up rows without copies.

Every device holds the rows of all users and its part of the index. So a looked-up operand whose
batch is divided becomes its rows, replicated, and the index, divided as the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.jaxprs import ending_its_trace
from ikbo_jax.rewrite.values.lineage import Lazy, Lineage, is_plain, spread_axes
from ikbo_jax.rewrite.values.registry import NotCovered


def shard_map(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Passes rows and indices of lookups to every device."""
    params = eqn.params
    body = params["jaxpr"]
    if all(map(is_plain, operands)) and ctx.programs.is_plain(body):
        return ctx.bind(eqn, *operands)
    if body.effects:
        raise NotCovered("a shard_map with effects")
    # Of a looked-up operand, the value and how the original divides its batch.
    taken: list[tuple[Lazy, Any] | None] = []
    arrays: list[Any] = []
    specs: list[Any] = []
    for x, spec in zip(operands, params["in_specs"], strict=True):
        if not isinstance(x, Lazy) or x.lineage is None or not isinstance(spec, PartitionSpec):
            taken.append(None)
            arrays.append(ctx.materialise(eqn, x, "operand of a shard_map"))
            specs.append(spec)
            continue
        full = (*spec, *[None] * (len(x.shape) - len(spec)))
        x = spread_axes(x, [d for d, names in enumerate(full) if names is not None])
        taken.append((x, full[x.axis]))
        arrays += [x.base, x.lineage.index]
        rows = (*full[: x.axis], None, *full[x.axis + 1 :])
        specs += [PartitionSpec(*rows), PartitionSpec(full[x.axis])]

    def run(*arrays: Any) -> Sequence[Any]:
        # Arrays of the scopes outside are whole, not parts.
        inner, rest = Context(ctx.recorder, ctx, outlives=True), iter(arrays)
        lineages: dict[Any, Any] = {}
        values: list[Any] = []
        for key, v in zip(taken, body.invars, strict=True):
            value = next(rest)
            if key is not None:
                (x, names), index, shape = key, next(rest), tuple(v.aval.shape)
                assert x.lineage is not None
                users = (x.lineage, names)
                if users not in lineages:
                    lineages[users] = Lineage(index, x.lineage.users, shape[x.axis])
                if names:
                    # The rows meet values that differ between devices; their gradients are summed.
                    value = lax.pcast(value, names, to="varying")
                value = Lazy(value, shape, lineages[users], x.axis, x.origins)
            values.append(value)
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
            check_vma=params["check_vma"],
        )(*arrays)
    )
