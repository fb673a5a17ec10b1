"""Parts of queries, keys and values, and the products of their blocks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.rewrite.interpret import shape_of
from ikbo_jax.rewrite.values import lineage
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


# These are jitted, so that JAX traces them once for all layers.


@functools.partial(jax.jit, static_argnames=("scale", "cap", "numbers"))
def masked_logits(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    masks: Sequence[jax.Array],
    *,
    scale: float,
    cap: float | None,
    numbers: tuple[float, ...],
) -> jax.Array:
    """Computes logits in float32, [batch, heads, queries, keys]: the numbers where masks are False.

    Bias and masks are [batch, heads, queries, keys]; sizes may be 1. Each mask has its number.
    """
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    logits = logits if cap is None else jnp.tanh(logits) * cap
    logits = logits if bias is None else logits + bias
    for mask, number in zip(masks, numbers, strict=True):
        logits = jnp.where(mask, logits, number)
    return logits


@jax.jit
def weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the weighted sum of values in float32: [batch, queries, heads, width]."""
    weights = weights.astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, preferred_element_type=jnp.float32)


@jax.jit
def softmax_of_keys(logits: jax.Array) -> jax.Array:
    """Computes the softmax of logits over the keys; NaN for a row of -inf."""
    exponentials = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, 3, keepdims=True)))
    return exponentials / jnp.sum(exponentials, 3, keepdims=True)
