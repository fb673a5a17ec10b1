"""The values that a rewritten program computes with: arrays and deferred values.

A value is a plain `jax.Array` or one of these deferred values:

- `Lazy`: an array whose rows a `Lineage` looks up, or whose dimensions of size 1 the program sees
  at full size, or both;
- `Concat`: parts of any kind, concatenated along one axis;
- another subclass of `Deferred`, which a rule defines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.rows import take_rows
from ikbo_jax.rewrite.values.staged import TRACER


@dataclasses.dataclass(frozen=True, eq=False)
class Lineage:
    """Tells which row of a smaller batch every row of a larger batch comes from.

    Two lineages are the same only if they are the same object; the scope creates one for each
    index of the program.

    Attributes:
      index: [batch] int32, values in [0, users).
      users: rows of the smaller batch.
      batch: rows of the larger batch.
      composed_of: the lineages whose composition this is, coarsest first; () if it is not composed.
      nearest: None, or if this lineage maps indices out of bounds to two appended rows, the lineage
        of the same index that maps them to the nearest rows.
      is_sorted: whether the index is known to never decrease, so that the gradient need not sort.
      numbers: None, or by which numbers [batch] the program looks rows up, and of how many rows.
    """

    index: jax.Array
    users: int
    batch: int
    composed_of: tuple[Lineage, ...] = ()
    nearest: Lineage | None = None
    is_sorted: bool = False
    numbers: tuple[Any, int] | None = None

    @property
    def steps(self) -> tuple[Lineage, ...]:
        """Lineages of `composed_of`, or the lineage itself if it is not composed."""
        return self.composed_of or (self,)


class Deferred:
    """Is the base class of values that are not computed yet, with their common interface.

    Attributes:
      shape: the shape that the program sees.
      dtype: the dtype that the program sees.
      origins: the broadcasts that the value stems from.
    """

    #: Rewrites every equation that has the value as an operand, called as
    #: `rule(ctx, eqn, operands)`; if None, the rules of the primitives do.
    rule: Callable[..., Any] | None = None
    #: Whether `build` computes with copies of other values, instead of being the copy itself.
    is_computed = False

    def build(self, ctx: Any) -> jax.Array:
        """Computes the array that the program sees."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy(Deferred):
    """Stands for the array `broadcast_to(take(base, lineage.index, axis), shape)`.

    Attributes:
      base: an array of the same rank as `shape`. Its dimension `axis` has `lineage.users` rows;
        every other dimension has its size in `shape`, or 1.
      lineage: how rows are looked up; None if dimensions of size 1 are only broadcast.
      axis: the dimension that is looked up; -1 without a lineage.
    """

    base: jax.Array
    shape: tuple[int, ...]
    lineage: Lineage | None = None
    axis: int = -1
    origins: frozenset = frozenset()

    @property
    def dtype(self) -> Any:
        base = self.base
        return base.aval.dtype if type(base) is TRACER else base.dtype

    def build(self, ctx: Any) -> jax.Array:
        x = self.base
        if self.lineage is not None:
            users = self.lineage
            x = take_rows(x, users.index, self.axis, is_sorted=users.is_sorted)
        return spread(x, self.shape)


class Concat(Deferred):
    """Stands for the concatenation of `parts` along `axis`; at least one part is not an array.

    Attributes:
      sizes: length of every part along the axis.
    """

    def __init__(self, parts: tuple[Any, ...], axis: int) -> None:
        # All at once: every equation on a sequence [history, candidate] makes one and reads these.
        arrays = [part.aval if type(part) is TRACER else part for part in parts]
        shape, sizes = arrays[0].shape, tuple([x.shape[axis] for x in arrays])
        self.parts = parts
        self.axis = axis
        self.sizes: tuple[int, ...] = sizes
        self.shape: tuple[int, ...] = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        self.dtype: Any = arrays[0].dtype
        self.origins: frozenset = origins_of(*parts)

    def build(self, ctx: Any) -> jax.Array:
        return staged.concatenate([ctx.build(part) for part in self.parts], self.axis)

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but the parts that tells its form."""
        return self.axis, self.sizes

    def pieces(self) -> list[tuple[Any, int, int]]:
        """Returns the parts, each with its first row along the axis and the row after its last."""
        ends = itertools.accumulate(self.sizes)
        return [(x, end - n, end) for x, n, end in zip(self.parts, self.sizes, ends, strict=True)]


def is_plain(value: Any) -> bool:
    """Whether the value is an array."""
    return type(value) is TRACER or not isinstance(value, Deferred)


def is_only_broadcast(value: Any) -> bool:
    """Whether the value is an array whose dimensions of size 1 are broadcast, and no lookup."""
    return isinstance(value, Lazy) and value.lineage is None


def has_lineage(value: Any) -> bool:
    """Whether the value is looked up along an axis."""
    return type(value) is Lazy and value.lineage is not None


def base_of(value: Any) -> Any:
    """Returns the base of a `Lazy`; any other value unchanged."""
    return value.base if type(value) is Lazy else value


def of_bases(fn: Callable[[Any], Any], x: Any) -> Any:
    """Applies an elementwise function to an array, or to the bases of the parts of a value."""
    if isinstance(x, Concat):
        return Concat(tuple(of_bases(fn, part) for part in x.parts), x.axis)
    return dataclasses.replace(x, base=fn(x.base)) if isinstance(x, Lazy) else fn(x)


def origins_of(*values: Any) -> frozenset:
    """Returns the broadcasts that any of the values stems from."""
    found: frozenset | None = None
    for value in values:
        if type(value) is not TRACER and isinstance(value, Deferred):
            origins: frozenset = value.origins  # type: ignore[attr-defined]
            # Most values stem from the same broadcasts, and share the set.
            if found is None:
                found = origins
            elif origins is not found:
                found = found | origins
    return frozenset() if found is None else found


def carries(value: Any, axis: int) -> bool:
    """Whether the value has several rows along `axis` that are not looked up."""
    if type(value) is Lazy:
        if value.lineage is not None and value.axis == axis:
            return False
        value = value.base
    shape = staged.shape_of(value)
    return len(shape) > 0 and shape[axis] != 1


def with_nearest_rows(base: jax.Array, axis: int, change: Any = None) -> jax.Array:
    """Appends copies of the first and of the last row of `base` along `axis`.

    Indices below 0 look up the first appended row, indices past the end the second. `change` is
    applied to both rows.
    """
    last = base.shape[axis] - 1
    ends = [staged.slice_in_dim(base, n, n + 1, axis=axis) for n in (0, last)]
    ends = ends if change is None else list(map(change, ends))
    return staged.concatenate([base, *ends], axis)


def aligned(values: Any) -> list[Any]:
    """Gives the values one lineage for each index.

    If one value looks up rows appended for indices out of bounds, and another takes the nearest
    rows by the same index (`Lineage.nearest`), the second gets these rows appended, too.
    """
    extended = {
        v.lineage.nearest: v.lineage for v in values if has_lineage(v) and v.lineage.nearest
    }

    def one(value: Any) -> Any:
        if not has_lineage(value) or value.lineage not in extended:
            return value
        base = with_nearest_rows(value.base, value.axis)
        return dataclasses.replace(value, base=base, lineage=extended[value.lineage])

    return list(map(one, values)) if extended else list(values)


def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts the dimensions of size 1 of `x` to `shape`, which has the same rank."""
    if staged.shape_of(x) == tuple(shape):
        return x
    return staged.broadcast_in_dim(x, shape, range(len(shape)))


def joined(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    """Concatenates arrays, each of them broadcast along all dimensions but `axis`."""
    common = lax.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in arrays))
    full = [spread(x, (*common[:axis], x.shape[axis], *common[axis + 1 :])) for x in arrays]
    return full[0] if len(full) == 1 else staged.concatenate(full, axis)


def transposed(x: Any, order: Sequence[int]) -> Any:
    """Transposes a value."""
    if list(order) == list(range(len(order))):
        return x
    if isinstance(x, Concat):
        return Concat(tuple(transposed(p, order) for p in x.parts), list(order).index(x.axis))
    if is_plain(x):
        return staged.transpose(x, order)
    axis = list(order).index(x.axis) if has_lineage(x) else -1
    shape = tuple(x.shape[d] for d in order)
    return Lazy(staged.transpose(x.base, order), shape, x.lineage, axis, x.origins)


def spread_axes(value: Any, axes: Any) -> Any:
    """Broadcasts the dimensions `axes` of a value's base, except the looked-up axis."""
    if type(value) is not Lazy:
        return value
    shape = staged.shape_of(value.base)
    full = [n for n in axes if n != value.axis and shape[n] != value.shape[n]]
    if not full:
        return value
    shape = tuple([value.shape[d] if d in full else n for d, n in enumerate(shape)])
    return dataclasses.replace(value, base=spread(value.base, shape))


def rows_of(x: Any, axis: int, users: int) -> jax.Array:
    """Returns `users` rows of a value along `axis`, which are looked up or all equal."""
    return spread(base_of(x), (*x.shape[:axis], users, *x.shape[axis + 1 :]))


def lazy(
    base: jax.Array, shape: tuple[int, ...], lineage: Lineage | None, axis: int, origins: frozenset
) -> Any:
    """Returns a `Lazy`, or `base` itself if nothing is left to broadcast."""
    if lineage is None and staged.shape_of(base) == tuple(shape):
        return base
    return Lazy(base, tuple(shape), lineage, axis if lineage is not None else -1, origins)


def is_at_least(size: Any, other: Any) -> bool:
    """Whether `size >= other`, for all values of symbolic dimensions."""
    difference = size - other
    if type(difference) is int:
        return difference >= 0
    return export.symbolic_dim_bounds(difference)[0] >= 0


def most(size: Any) -> Any:
    """Returns the largest value of a size: infinity if it is symbolic and has no bound."""
    return export.symbolic_dim_bounds(size)[1] if export.is_symbolic_dim(size) else size


def number(size: Any, dtype: Any) -> Any:
    """Returns a size, which may be symbolic, in an integer dtype; at most its largest number."""
    limit = int(np.iinfo(dtype).max)
    if isinstance(size, int):
        return np.array(min(size, limit), dtype)
    value = jnp.asarray(size)
    limit = min(limit, int(np.iinfo(value.dtype).max))
    return staged.cast(jnp.minimum(value, limit), dtype)


def largest[T](items: Iterable[T], size: Callable[[T], Any]) -> T:
    """Returns the item of the largest size; of sizes whose order is unknown, that of the last."""
    return functools.reduce(lambda a, b: a if is_at_least(size(a), size(b)) else b, items)


def bytes_of(shape: tuple[Any, ...], dtype: Any) -> Any:
    """Computes the bytes of an array; an expression if a dimension is symbolic."""
    # Extended dtypes, such as the dtype of PRNG keys, are not NumPy dtypes.
    itemsize = getattr(dtype, "itemsize", None) or jnp.dtype(dtype).itemsize
    return math.prod(shape) * itemsize


def text(value: Any, shape: Any = None) -> str:
    """Formats dtype and shape (by default the value's) for the report: `bfloat16[15,64]`."""
    return f"{value.dtype}[{','.join(map(str, value.shape if shape is None else shape))}]"
