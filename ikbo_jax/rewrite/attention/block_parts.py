"""Parts of queries, keys and values, and the products of their blocks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.rewrite.interpret import shape_of
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Lineage
from ikbo_jax.rewrite.values.registry import NotCovered


@dataclasses.dataclass(frozen=True)
class Part:
    """Holds the rows `start` to `stop` of the queries, or of the keys with their values."""

    value: Any
    start: int
    stop: int
    values: Any = None


def parts_of(x: Any, axis: int, values: Any = None) -> list[Part]:
    """Splits a value along an axis into its parts, with the same parts of the values."""
    if not isinstance(x, Concat):
        return [Part(x, 0, shape_of(x)[axis] if axis < len(shape_of(x)) else 1, values)]
    if values is not None and (not isinstance(values, Concat) or values.sizes != x.sizes):
        raise NotCovered("attention is not recognised: its values are not concatenated as its keys")
    parts = []
    for n, (part, begin, end) in enumerate(x.pieces()):
        own = None if values is None else values.parts[n]
        if own is not None and lineage_of(own) is not lineage_of(part):
            raise NotCovered(
                "attention is not recognised: its values are not looked up as its keys"
            )
        parts.append(Part(part, begin, end, own))
    return parts


def lineage_of(x: Any) -> Lineage | None:
    """Returns the lineage of a value; None without one."""
    return x.lineage if lineage.has_lineage(x) else None


def block_of(x: Any, axis: int, begin: int, end: int) -> Any:
    """Returns `x[..., begin:end, ...]` along `axis`; a dimension of size 1 stays."""
    if not isinstance(x, Concat):
        return lineage.slice_along(x, begin, end, axis)
    if x.axis != axis:
        return Concat(tuple(block_of(part, axis, begin, end) for part in x.parts), x.axis)
    found = []
    for part, first, last in x.pieces():
        if max(begin, first) < min(end, last):
            found.append(block_of(part, axis, max(begin, first) - first, min(end, last) - first))
    return found[0] if len(found) == 1 else Concat(tuple(found), axis)


def at_users(x: Any, users: Lineage, axis: int = 0) -> Any:
    """Returns the array at user batch along `axis`; None if the value differs by candidate."""
    if isinstance(x, Concat):
        parts = [at_users(part, users, axis) for part in x.parts]
        if any(part is None for part in parts) or x.axis == axis:
            return None
        before, after = slice(x.axis), slice(x.axis + 1, None)
        shapes = [
            (*p.shape[before], n, *p.shape[after]) for p, n in zip(parts, x.sizes, strict=True)
        ]
        return lineage.joined(list(map(lineage.spread, parts, shapes)), x.axis)
    if lineage.has_lineage(x):
        return x.base if x.lineage is users and x.axis == axis else None
    array = lineage.base_of(x)
    return array if array.shape[axis] == 1 else None


# These are written in `lax`: tracing `jnp.einsum` and `jax.nn.softmax` takes several times as long.


def logits_of(query: jax.Array, key: jax.Array, root: Any) -> jax.Array:
    """Computes the logits of `root` in float32: [batch, heads, queries, keys]."""
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    logits = staged.product(query, key, numbers, jnp.float32)
    logits = logits if root.scale == 1 else staged.times(logits, root.scale)
    return logits if root.cap is None else staged.times(lax.tanh(logits), root.cap)


def weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the weighted sum of values in float32: [batch, queries, heads, width]."""
    numbers = (((3,), (1,)), ((0, 1), (0, 2)))
    out = staged.product(weights, value, numbers, jnp.float32)
    return staged.transpose(out, (0, 2, 1, 3))


def masked(mask: jax.Array, logits: jax.Array, fill: float) -> jax.Array:
    """Replaces logits by a number where the mask is False."""
    mask = lineage.spread(mask, staged.shape_of(logits))
    return staged.select(mask, logits, staged.full_like(logits, fill))
