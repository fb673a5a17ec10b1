"""The values that a rewritten program computes with: arrays, and broadcasts not yet carried out.

A value is a plain `jax.Array`, or one of

- `Lazy`: rows of an array at user batch, looked up by a `Lineage`, and an array with dimensions of
  size 1 that the program sees at full size;
- `Concat`: parts of any kind along one axis;

or another `Deferred` that a rule makes up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Lineage:
    """Which row of a smaller batch every row of a larger one comes from.

    Two lineages are the same only if they are the same object; the context makes one for each
    index of the program.

    Attributes:
      index: [batch] int32, values in [0, users).
      users: rows of the smaller batch.
      batch: rows of the larger one.
      composed_of: the indices that it is composed of, coarsest first; () if it is one.
      nearest: the lineage of the same index whose rows out of bounds are the nearest ones, and not
        two rows appended to the others; None if there are none.
    """

    index: jax.Array
    users: int
    batch: int
    composed_of: tuple[Lineage, ...] = ()
    nearest: Lineage | None = None

    @property
    def steps(self) -> tuple[Lineage, ...]:
        """The indices that it is composed of, coarsest first; itself alone if it is one."""
        return self.composed_of or (self,)


class Deferred:
    """A value that is not computed yet. Besides `build` it has the attributes below.

    Attributes:
      shape: what the program sees.
      dtype: what the program sees.
      origins: the broadcasts that it stems from.
    """

    #: The value's own rule for equations that it is an operand of, called as
    #: `step(ctx, eqn, operands)`; None leaves that to the primitives' rules.
    step: Callable[..., Any] | None = None

    def build(self, ctx: Any) -> jax.Array:
        """The array that the program sees."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy(Deferred):
    """The array `broadcast_to(take(base, lineage.index, axis), shape)`, not yet computed.

    Attributes:
      base: an array of the rank of `shape`. Its dimension `axis` has `lineage.users` rows, the
        others have the size in `shape` or 1.
      shape: what the program sees.
      lineage: how rows are looked up; None if the array has dimensions of size 1 alone that the
        program sees larger.
      axis: the dimension that is looked up; -1 without a lineage.
      origins: the broadcasts that it stems from.
    """

    base: jax.Array
    shape: tuple[int, ...]
    lineage: Lineage | None = None
    axis: int = -1
    origins: frozenset = frozenset()

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def build(self, ctx: Any) -> jax.Array:
        x = self.base
        if self.lineage is not None:
            x = take_rows(x, self.lineage.index, self.axis)
        return spread(x, self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Concat(Deferred):
    """`parts` side by side along `axis`; at least one of them is not an array."""

    parts: tuple[Any, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(self.sizes)
        return tuple(shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of every part along the axis."""
        return tuple(part.shape[self.axis] for part in self.parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    @property
    def origins(self) -> frozenset:
        return origins_of(*self.parts)

    def build(self, ctx: Any) -> jax.Array:
        return lax.concatenate([ctx.build(part) for part in self.parts], self.axis)


def is_plain(value: Any) -> bool:
    """Whether the value is an array."""
    return not isinstance(value, Deferred)


def has_lineage(value: Any) -> bool:
    """Whether the value is looked up along an axis."""
    return isinstance(value, Lazy) and value.lineage is not None


def base_of(value: Any) -> Any:
    """The array of a `Lazy`; an array itself."""
    return value.base if isinstance(value, Lazy) else value


def origins_of(*values: Any) -> frozenset:
    """The broadcasts that any of the values stems from."""
    return frozenset().union(*(v.origins for v in values if not is_plain(v)))


def carries(value: Any, axis: int) -> bool:
    """Whether the value may differ along `axis` other than by being looked up there."""
    if isinstance(value, Lazy):
        if value.lineage is not None and value.axis == axis:
            return False
        value = value.base
    # Of a tracer, the attribute is much faster than `np.shape`. Python numbers have none.
    shape = getattr(value, "shape", ())
    return len(shape) > 0 and shape[axis] != 1


def take_rows(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """`x` at the rows `index` of `axis`; all of them must lie in bounds."""
    offset = tuple(d for d in range(x.ndim) if d != axis)
    numbers = lax.GatherDimensionNumbers(offset, (axis,), (axis,))
    sizes = tuple(1 if d == axis else size for d, size in enumerate(x.shape))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, lax.expand_dims(index, (1,)), numbers, sizes, mode=mode)


def with_nearest_rows(base: jax.Array, axis: int, change: Any = None) -> jax.Array:
    """`base` with the rows nearest to an index below, and past, the others appended to an axis.

    `change` is applied to the appended ones.
    """
    last = base.shape[axis] - 1
    ends = [lax.slice_in_dim(base, n, n + 1, axis=axis) for n in (0, last)]
    ends = ends if change is None else list(map(change, ends))
    return lax.concatenate([base, *ends], axis)


def aligned(values: Any) -> list[Any]:
    """The values, with those of one index looked up by one lineage."""
    found = {v.lineage.nearest: v.lineage for v in values if has_lineage(v) and v.lineage.nearest}

    def one(value: Any) -> Any:
        if not has_lineage(value) or value.lineage not in found:
            return value
        base = with_nearest_rows(value.base, value.axis)
        return dataclasses.replace(value, base=base, lineage=found[value.lineage])

    return list(map(one, values)) if found else list(values)


def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` with its dimensions of size 1 brought to `shape`; the same rank."""
    if tuple(x.shape) == tuple(shape):
        return x
    return lax.broadcast_in_dim(x, shape, tuple(range(len(shape))))


def spread_axes(value: Any, axes: Any) -> Any:
    """The value with the given dimensions of its base at full size, unless they are looked up."""
    if not isinstance(value, Lazy):
        return value
    shape = list(value.base.shape)
    for axis in axes:
        if axis != value.axis:
            shape[axis] = value.shape[axis]
    return dataclasses.replace(value, base=spread(value.base, tuple(shape)))


def lazy(
    base: jax.Array,
    shape: tuple[int, ...],
    lineage: Lineage | None,
    axis: int,
    origins: frozenset,
) -> Any:
    """A `Lazy`, or `base` itself if there is nothing left to broadcast."""
    if lineage is None and tuple(base.shape) == tuple(shape):
        return base
    return Lazy(base, tuple(shape), lineage, axis if lineage is not None else -1, origins)


def slice_along(value: Any, start: int, stop: int, axis: int) -> Any:
    """`value[..., start:stop, ...]` along `axis`, which must not be looked up."""
    if np.ndim(base_of(value)) == 0:
        return value
    if isinstance(value, Lazy):
        assert axis != value.axis
        shape = list(value.shape)
        shape[axis] = stop - start if shape[axis] != 1 else 1
        base = value.base
        if base.shape[axis] != 1:
            base = lax.slice_in_dim(base, start, stop, axis=axis)
        return dataclasses.replace(value, base=base, shape=tuple(shape))
    if value.shape[axis] == 1:
        return value
    return lax.slice_in_dim(value, start, stop, axis=axis)


def size_of(shape: tuple[Any, ...]) -> Any:
    """Elements of an array; an expression where a dimension is symbolic."""
    return math.prod(shape)


def nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array; 0 if the shape is not known while tracing."""
    size = math.prod(shape)
    # Those of random keys and the like are no NumPy dtypes.
    itemsize = getattr(dtype, "itemsize", None) or jnp.dtype(dtype).itemsize
    return size * itemsize if isinstance(size, int) else 0


def text(value: Any) -> str:
    """Dtype and shape for people: `bfloat16[15,64]`."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
