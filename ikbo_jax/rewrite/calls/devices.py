"""Rules of `jax.shard_map` and `reshard`: looked-up rows are divided over devices without copies.

Every device holds the rows of all users and its part of the index. So a looked-up operand whose
batch a `shard_map` divides becomes its rows, replicated, and the index, divided as the batch.

With Explicit mesh axes, `x.at[index].get(out_sharding=...)` looks up where the axes are Auto. JAX
reshards the operand and the index to there, and the result from there. A looked-up value is rows
and an index, so these two arrays are resharded, as the program reshards the value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.forms import unpack
from ikbo_jax.rewrite.values.jaxprs import ending_its_trace
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage, is_plain, spread_axes
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
                users = Lineage(index, x.lineage.users, shape[x.axis])
                users = lineages.setdefault((x.lineage, names), users)
                if names:
                    # The rows meet values that differ between devices; their gradients are summed.
                    value = lax.pcast(value, names, to="varying")
                value = Lazy(value, shape, users, x.axis, x.origins)
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


def reshard(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reshards rows and index, as the looked-up rows are resharded."""
    spec = eqn.params["dst_sharding"].spec
    entries = [*spec, *[None] * (len(x.shape) - len(spec))]
    try:
        if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
            raise NotCovered("reshard of partial sums")
        return _placed(ctx, eqn, x, entries)
    except NotCovered as error:
        # The rows exist on the mesh that is left, and can be looked up only there.
        mesh = jax.typeof(unpack(x)[0][0]).sharding.mesh
        with jax.sharding.use_abstract_mesh(mesh):
            array = ctx.materialise(eqn, x, str(error))
        return ctx.bind(eqn, array)


def _placed(ctx: Context, eqn: Any, x: Any, entries: Sequence[Any]) -> Any:
    """Reshards a value; `entries` are the mesh axes of its dimensions."""
    if is_plain(x):
        return _bound(ctx, eqn, x, entries)
    if isinstance(x, Concat):
        if entries[x.axis] is not None:
            raise NotCovered("reshard of a concatenation along a dimension that is divided")
        return Concat(tuple(_placed(ctx, eqn, part, entries) for part in x.parts), x.axis)
    if type(x) is not Lazy:
        raise NotCovered("reshard of a value that is no lookup")
    for d, entry in enumerate(entries):
        if entry is not None and d != x.axis and x.base.shape[d] != x.shape[d]:
            raise NotCovered("reshard of a broadcast along a dimension that is divided")
    of_base = [None if d == x.axis else entry for d, entry in enumerate(entries)]
    base = _bound(ctx, eqn, x.base, of_base)
    users = None if x.lineage is None else _lineage(ctx, eqn, x.lineage, entries[x.axis])
    return dataclasses.replace(x, base=base, lineage=users)


def _bound(ctx: Context, eqn: Any, x: Any, entries: Sequence[Any]) -> Any:
    sharding = eqn.params["dst_sharding"].update(spec=PartitionSpec(*entries))
    return ctx.bind(eqn, x, dst_sharding=sharding)


def _lineage(ctx: Context, eqn: Any, users: Lineage, entry: Any) -> Lineage:
    """Returns the lineage whose index is divided over the mesh axes `entry`.

    All lookups of a program by one index are resharded to the same lineage, and back again.
    """
    *coarse, last = users.steps
    found = _step(ctx, eqn, last, entry)
    for step in reversed(coarse):
        found = ctx.scope.compose(_step(ctx, eqn, step, None), found)
    return found


#: Marks the lineage that another one was resharded from at first.
_FIRST = "resharded"


def _step(ctx: Context, eqn: Any, step: Lineage, entry: Any) -> Lineage:
    (first,) = ctx.scope.results((_FIRST, id(step))) or [step]
    mesh, wanted = eqn.params["dst_sharding"].mesh, PartitionSpec(entry)
    sharding = jax.typeof(first.index).sharding
    if (sharding.mesh, sharding.spec) == (mesh, wanted):
        return first
    near = None if first.nearest is None else _step(ctx, eqn, first.nearest, entry)
    found = ctx.scope.lineage(
        (_FIRST, first, f"{mesh} {wanted}"),
        first.users,
        first.batch,
        lambda: _bound(ctx, eqn, step.index, [entry]),
        near,
    )
    ctx.scope.keep_results((_FIRST, id(found)), [found], [first])
    return found
