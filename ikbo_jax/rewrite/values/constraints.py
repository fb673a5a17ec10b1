"""Sharding constraints on deferred values: they apply to the arrays that exist after all.

A constraint changes no value. If the array that it places is built, as for a result of the function
or inside an elementwise operation, it is placed as the constraint says. If another array by the
same lookup is built instead, or the result of an op that takes its place, the candidates of this
array are divided over the same mesh axes.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ikbo_jax.rewrite.values.lineage import Concat, has_lineage, origins_of

#: Names the constraint on one value.
_ON_VALUE = "constrained"


class Division(NamedTuple):
    """Holds the mesh axes `entry` over which a constraint divides the candidates of a broadcast."""

    batch: int
    sharding: NamedSharding
    entry: Any

    def apply(self, array: jax.Array, axis: int) -> jax.Array:
        """Divides the candidates of an array along `axis`."""
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
        spec[axis] = self.entry
        sharding = self.sharding.update(spec=PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(array, sharding)


def constrained(ctx: Any, x: Any, sharding: Any, place: Callable[[Any], Any]) -> Any:
    """Copies a deferred value, whose array `place` places where it is built.

    The copy has the producing equation of the value.
    """
    found = copy.copy(x)
    produced = ctx.producer(x)
    if produced is not None:
        ctx.scope.record(produced[0], [found], produced[1])
    ctx.scope.keep_results((_ON_VALUE, id(found)), found, [place])
    ctx.programs.has_constraints = True
    for part in x.parts if isinstance(x, Concat) else (x,):
        entry = _entry(sharding, part.axis) if has_lineage(part) else None
        if entry is not None:
            division = Division(part.lineage.batch, sharding, entry)
            ctx.programs.divisions.update(dict.fromkeys(part.origins, division))
    return found


def _entry(sharding: Any, axis: int) -> Any:
    """Returns the mesh axes that divide a dimension; None without any, or if they are not Auto."""
    if not isinstance(sharding, NamedSharding) or axis >= len(sharding.spec):
        return None
    if set(sharding.mesh.axis_types) != {AxisType.Auto}:
        return None
    entry = sharding.spec[axis]
    return None if entry is PartitionSpec.UNCONSTRAINED else entry


def placed(ctx: Any, value: Any, array: jax.Array) -> jax.Array:
    """Applies the constraint on a deferred value, or on its candidates, to the value's array."""
    if (found := ctx.scope.results((_ON_VALUE, id(value)))) is not None:
        placed: jax.Array = found[0](array)
        return placed
    if not has_lineage(value):
        return array
    division = _division(ctx, origins_of(value), value.lineage.batch)
    return array if division is None else division.apply(array, value.axis)


def divided(ctx: Any, origins: Iterable[Any], results: Sequence[Any]) -> Sequence[Any]:
    """Divides the candidates of the results of an equation on values of these broadcasts."""
    origins = list(origins)

    def one(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            return x
        found = [(d, _division(ctx, origins, size)) for d, size in enumerate(x.shape)]
        # The candidates' dimension is known only by its size.
        divisions = [(d, division) for d, division in found if division is not None]
        if len(divisions) != 1:
            return x
        ((axis, division),) = divisions
        return division.apply(x, axis)

    return list(map(one, results))


def _division(ctx: Any, origins: Iterable[Any], batch: Any) -> Division | None:
    """Finds how so many candidates of broadcasts are divided; None if constraints disagree."""
    divisions = ctx.programs.divisions
    found = [divisions[o] for o in origins if o in divisions and divisions[o].batch == batch]
    return found[0] if found and all(x == found[0] for x in found) else None
