"""A bias of the scores in the XLA path of broadcast attention, and its gradient.

A bias is [U, S, heads, queries] here, so that a chunk of it is gathered like a chunk of keys; heads
and queries are all of them, or 1. Rows of scores are those of `attention_grouped`: the members of
a group, their queries, and the query heads of a key head.
"""

import jax
import jax.numpy as jnp

from ikbo_jax.reference.attention import soft_capped


def with_keys_second(bias: jax.Array | None) -> jax.Array | None:
    """Transposes [U, heads, queries, S] to [U, S, heads, queries]."""
    return None if bias is None else bias.transpose(0, 3, 1, 2)


def scores_of(
    products: jax.Array,
    scale: float,
    logit_cap: float | None,
    bias: jax.Array | None,
    query: jax.Array,
) -> tuple[jax.Array, float, jax.Array]:
    """Adds a chunk of a bias [groups, keys, heads, queries] to products [groups, K, rows, keys].

    `query`: [B, T, N, H].

    Returns:
      The scores, the scale that is left, and the capped products.
    """
    products, left = soft_capped(products, scale, logit_cap)
    if bias is None:
        return products, left, products
    shape = _dims(products.shape, query)
    groups, keys, heads, queries = bias.shape
    # One head counts for all of them.
    pairs = (shape[1], shape[4]) if heads != 1 else (1, 1)
    added = bias.reshape(groups, keys, *pairs, queries).transpose(0, 2, 4, 3, 1)[:, :, None]
    scores = (products * jnp.float32(left)).astype(bias.dtype).reshape(shape) + added
    return scores.astype(jnp.float32).reshape(products.shape), 1.0, products


def gradient(d_scores: jax.Array, bias: jax.Array, query: jax.Array) -> jax.Array:
    """Adds gradients of scores up to the gradient of the chunk of the bias, f32."""
    _, keys, heads, queries = bias.shape
    split = d_scores.reshape(_dims(d_scores.shape, query))
    summed = (2, *((1, 4) if heads == 1 else ()), *((3,) if queries == 1 else ()))
    total = jnp.sum(split, summed, keepdims=True)[:, :, 0]
    groups, kv_heads, _, per_head, _ = total.shape
    return total.transpose(0, 4, 1, 3, 2).reshape(groups, keys, kv_heads * per_head, queries)


def _dims(shape: tuple[int, ...], query: jax.Array) -> tuple[int, ...]:
    """Splits [groups, K, rows, keys] to [groups, K, members, T, N / K, keys]."""
    groups, kv_heads, rows, keys = shape
    _, q_len, q_heads, _ = query.shape
    per_head = q_heads // kv_heads
    return groups, kv_heads, rows // (q_len * per_head), q_len, per_head, keys
