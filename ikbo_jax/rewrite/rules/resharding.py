"""The rule of reshard, between Explicit mesh axes and the Auto axes of a lookup.

With Explicit axes, `x.at[index].get(out_sharding=...)` looks up where the axes are Auto. JAX
reshards the operand and the index to there, and the result from there. A looked-up value is rows
and an index, so these two arrays are resharded, as the program reshards the value.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.values.forms import unpack
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered


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
    if x.lineage is None:
        return dataclasses.replace(x, base=base)
    return dataclasses.replace(x, base=base, lineage=_lineage(ctx, eqn, x.lineage, entries[x.axis]))


def _bound(ctx: Context, eqn: Any, x: Any, entries: Sequence[Any]) -> Any:
    sharding = eqn.params["dst_sharding"]
    spec = PartitionSpec(*entries)
    return ctx.bind(eqn, x, dst_sharding=sharding.update(spec=spec))


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
