"""Parts of queries, keys and values, and the products of their blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.rewrite.attention.blocks import transposed
from ikbo_jax.rewrite.attention.scores import Label
from ikbo_jax.rewrite.interpret import shape_of
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Lazy,
    Lineage,
    base_of,
    has_lineage,
    is_plain,
    spread,
)
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the queries, or of the keys and values.

    Attributes:
      value: the queries or keys.
      start: its first row.
      stop: the row after its last.
      values: the values of these keys; None for queries.
    """

    value: Any
    start: int
    stop: int
    values: Any = None


def parts_of(x: Any, axis: int, values: Any = None) -> list[Part]:
    """The parts of a value along an axis, with the same parts of the values."""
    if not isinstance(x, Concat):
        return [Part(x, 0, shape_of(x)[axis] if axis < len(shape_of(x)) else 1, values)]
    if values is not None and (not isinstance(values, Concat) or values.sizes != x.sizes):
        raise NotCovered("attention is not recognised: its values are not concatenated as its keys")
    parts, begin = [], 0
    for n, (part, size) in enumerate(zip(x.parts, x.sizes, strict=True)):
        own = None if values is None else values.parts[n]
        if own is not None and lineage_of(own) is not lineage_of(part):
            raise NotCovered(
                "attention is not recognised: its values are not looked up as its keys"
            )
        parts.append(Part(part, begin, begin + size, own))
        begin += size
    return parts


def lineage_of(x: Any) -> Lineage | None:
    """The lineage of a value; None without one."""
    return x.lineage if has_lineage(x) else None


def reordered(x: Any, have: list[Label], order: list[Label], shape: tuple[int, ...]) -> Any:
    """A value with dimensions `have`, as dimensions `order`; those of ONE are added or dropped."""
    real = [label for label in order if label in have]
    dropped = [n for n, label in enumerate(have) if label not in real]
    permutation = [*(have.index(label) for label in real), *dropped]
    if any(shape_of(x)[n] != 1 for n in dropped):
        raise NotCovered("attention is not recognised: another product with its values")
    x = transposed(x, permutation)

    def reshaped(x: Any, shape: tuple[int, ...], numbers: dict[int, int]) -> Any:
        if is_plain(x):
            return staged.reshape(x, shape)
        base = [1] * len(shape)
        for old, new in numbers.items():
            base[new] = x.base.shape[old]
        axis = numbers[x.axis] if has_lineage(x) else -1
        return Lazy(staged.reshape(x.base, base), shape, x.lineage, axis, x.origins)

    numbers = {n: order.index(label) for n, label in enumerate(real)}
    if not isinstance(x, Concat):
        return reshaped(x, shape, numbers)
    axis = numbers[x.axis]
    parts = []
    for part, size in zip(x.parts, x.sizes, strict=True):
        part_shape = (*shape[:axis], size, *shape[axis + 1 :])
        parts.append(reshaped(part, part_shape, numbers))
    return Concat(tuple(parts), axis)


def block_of(x: Any, axis: int, begin: int, end: int) -> Any:
    """`x[..., begin:end, ...]` along `axis`; a dimension of size 1 stays."""
    if not isinstance(x, Concat):
        return lineage.slice_along(x, begin, end, axis)
    if x.axis != axis:
        return Concat(tuple(block_of(part, axis, begin, end) for part in x.parts), x.axis)
    found, offset = [], 0
    for part, size in zip(x.parts, x.sizes, strict=True):
        first, last = max(begin - offset, 0), min(end - offset, size)
        offset += size
        if first < last:
            found.append(block_of(part, axis, first, last))
    return found[0] if len(found) == 1 else Concat(tuple(found), axis)


def at_users(x: Any, users: Lineage) -> Any:
    """The array of a value at user batch, along axis 0; None if the value differs by candidate."""
    if isinstance(x, Concat):
        parts = [at_users(part, users) for part in x.parts]
        if any(part is None for part in parts):
            return None
        common = lax.broadcast_shapes(
            *(tuple(1 if d == x.axis else n for d, n in enumerate(p.shape)) for p in parts)
        )
        parts = [
            spread(p, (*common[: x.axis], size, *common[x.axis + 1 :]))
            for p, size in zip(parts, x.sizes, strict=True)
        ]
        return staged.concatenate(parts, x.axis)
    if has_lineage(x):
        return x.base if x.lineage is users and x.axis == 0 else None
    array = base_of(x)
    return array if array.shape[0] == 1 else None


def concatenated(arrays: list[jax.Array], axis: int = 1) -> jax.Array:
    """The concatenation of arrays."""
    return arrays[0] if len(arrays) == 1 else staged.concatenate(arrays, axis)


# These are written in `lax`: tracing `jnp.einsum` and `jax.nn.softmax` takes several times as long.


def logits_of(query: jax.Array, key: jax.Array, scale: float) -> jax.Array:
    """scale · query · key in float32: [batch, heads, queries, keys]."""
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    logits = staged.product(query, key, numbers, jnp.float32)
    return logits if scale == 1 else staged.times(logits, scale)


def weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """The weighted sum of values in float32: [batch, queries, heads, width]."""
    numbers = (((3,), (1,)), ((0, 1), (0, 2)))
    out = staged.product(weights, value, numbers, jnp.float32)
    return staged.transpose(out, (0, 2, 1, 3))


def masked(mask: jax.Array, logits: jax.Array, fill: float) -> jax.Array:
    """The logits, or a number where the mask is False."""
    mask = spread(mask, staged.shape_of(logits))
    return staged.select(mask, logits, staged.full_like(logits, fill))
