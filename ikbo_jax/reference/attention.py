"""Broadcast attention in plain jnp: the materialised oracle, merging, a candidate's own tokens.

    out[b] = softmax(scale · query[b] · key[u(b)]ᵀ) · value[u(b)],  u(b) = cand_to_user[b]

with lse[b] the natural logarithm of the softmax's denominator. Indices outside the users are
clamped to their ends, negative ones to 0, and lengths to [0, S]; keys and values at or past a
user's length have no effect, whatever they hold. A row without keys, or all of whose scores are
-inf, has out = 0 and lse = -inf. Nothing is checked here; the ops do that. The XLA path stands in
`attention_grouped`.

Letters: B candidates, U users, T queries of a candidate, S keys of a user, N query heads, K key
heads (N a multiple of K), H head width.

Source: Meta IKBO, flash attention with in-kernel broadcast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def materialised(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    key_value_seq_lengths: jax.Array | None = None,
    *,
    scale: float,
    self_key: jax.Array | None = None,
    self_value: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies every user's keys and values to its candidates and attends in f32: the oracle.

    Args:
      query: [B, T, N, H].
      key: [U, S, K, H].
      value: [U, S, K, H].
      cand_to_user: [B] int32.
      key_value_seq_lengths: [U] int32, or None for S everywhere.
      scale: of the scores.
      self_key: [B, T_self, K, H], further keys of each candidate alone, or None.
      self_value: [B, T_self, K, H], or None.

    Returns:
      out [B, T, N, H] in the query's dtype, rounded once, and lse [B, T, N] in f32.
    """
    rows = jnp.clip(cand_to_user, 0, key.shape[0] - 1)
    keys, values = key[rows].astype(jnp.float32), value[rows].astype(jnp.float32)
    seen = jnp.ones(keys.shape[:2], bool)
    if key_value_seq_lengths is not None:
        length = key_value_seq_lengths[rows][:, None]
        seen = jnp.arange(key.shape[1], dtype=jnp.int32)[None] < length
    if self_key is not None and self_value is not None:
        keys = jnp.concatenate((keys, self_key.astype(jnp.float32)), axis=1)
        values = jnp.concatenate((values, self_value.astype(jnp.float32)), axis=1)
        seen = jnp.concatenate((seen, jnp.ones(self_key.shape[:2], bool)), axis=1)
    visible = seen[:, :, None, None]
    heads = query.shape[2] // key.shape[2]
    keys = jnp.repeat(jnp.where(visible, keys, 0), heads, axis=2)
    values = jnp.repeat(jnp.where(visible, values, 0), heads, axis=2)

    highest = jax.lax.Precision.HIGHEST
    products = jnp.einsum("btnh,bsnh->btns", query.astype(jnp.float32), keys, precision=highest)
    products = jnp.where(seen[:, None, None], directed(products, scale), -jnp.inf)
    empty = jnp.all(products == -jnp.inf, axis=-1, keepdims=True)
    # Rows without keys get scores that have a softmax, so that no gradient meets a NaN.
    products = jnp.where(empty, 0, products)
    largest = jnp.max(products, axis=-1, keepdims=True)
    below = scaled(products - largest, scale)
    lse = scaled(largest[..., 0], scale) + jax.nn.logsumexp(below, axis=-1)
    lse = jnp.where(empty[..., 0], -jnp.inf, lse)
    probabilities = jnp.where(empty, 0, jax.nn.softmax(below, axis=-1))
    out = jnp.einsum("btns,bsnh->btnh", probabilities, values, precision=highest)
    return out.astype(query.dtype), lse


def merge_attention(
    out1: jax.Array, lse1: jax.Array, out2: jax.Array, lse2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys from the attention over each.

    Args:
      out1: [..., H].
      lse1: [...] f32; where it is -inf, `out1` has no effect.
      out2: [..., H].
      lse2: [...] f32.

    Returns:
      out in `out1`'s dtype and lse in f32; computed in f32.
    """
    largest = jnp.maximum(lse1, lse2)
    offset = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0.0, largest))
    weight1, weight2 = jnp.exp(lse1 - offset), jnp.exp(lse2 - offset)
    total = weight1 + weight2
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, offset + jnp.log(safe_total))

    def part(out: jax.Array, lse: jax.Array, weight: jax.Array) -> jax.Array:
        known = (lse != -jnp.inf)[..., None]
        values = jnp.where(known, out.astype(jnp.float32), 0.0)
        return values * (weight / safe_total)[..., None]

    merged = part(out1, lse1, weight1) + part(out2, lse2, weight2)
    return merged.astype(out1.dtype), lse


def self_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention of each candidate over a few tokens of its own; holds all its scores at once.

    Args:
      query: [B, T, N, H].
      key: [B, T_self, K, H].
      value: [B, T_self, K, H].
      scale: of the scores.

    Returns:
      out [B, T, N, H] and lse [B, T, N], both f32: out is not rounded, since it is to be merged.
    """
    batch, q_len, q_heads, width = query.shape
    kv_heads = key.shape[2]
    q = query.reshape(batch, q_len, kv_heads, q_heads // kv_heads, width)
    products = jnp.einsum("btkrh,bskh->btkrs", q, key, preferred_element_type=jnp.float32)
    products = directed(products, scale)
    row_max = jax.lax.stop_gradient(finite_offset(jnp.max(products, axis=-1)))
    powers = jnp.exp(scaled(products - row_max[..., None], scale))
    total = jnp.sum(powers, axis=-1)
    out = jnp.einsum(
        "btkrs,bskh->btkrh", powers.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    out, lse = normalise(out, total, scaled(row_max, scale))
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


#: |lse| from which on the rounding of lse may change a weight by more than a percent.
HUGE_LSE = 2.0**18
#: Relative error that an lse may have: some roundings of f32.
LSE_ERROR = 2.0**-21


def directed(products: jax.Array, scale: float) -> jax.Array:
    """Products of queries and keys whose largest has the largest score: of which a negative scale
    makes the smallest, and a scale of 0 none.

    The softmax subtracts its maximum from these, before they are scaled. Of scores,
    products · scale - maximum, a compiler may make one instruction that rounds once. The largest
    score is then not 0, but what rounding `maximum` cost: 64 or more where scores are beyond 1e9.
    """
    if _is_zero(scale):
        return products * jnp.float32(0)
    return products if scale > 0 else -products


def scaled(products: jax.Array, scale: float) -> jax.Array:
    """Scores of `directed` products, or differences of scores of their differences."""
    return products * jnp.float32(1.0 if _is_zero(scale) else abs(scale))


def _is_zero(scale: float) -> bool:
    # XLA takes f32 below the normal ones for 0, and 0 times the -inf of a masked score is NaN.
    return abs(scale) < float(jnp.finfo(jnp.float32).tiny)


def weights_again(products: jax.Array, lse: jax.Array, scale: float) -> jax.Array:
    """exp(score - lse), the softmax's weights from `directed` products [..., keys] and lse [...].

    Where lse is so large that its rounding matters, a score that is as large as lse within its
    error has weight 1: the row's clear maximum.
    """
    is_huge = jnp.abs(lse) >= HUGE_LSE
    offset = finite_offset(jnp.where(is_huge, lse - jnp.abs(lse) * jnp.float32(LSE_ERROR), lse))
    exponent = scaled(products, scale) - offset[..., None]
    return jnp.exp(jnp.where(is_huge[..., None], jnp.minimum(exponent, 0.0), exponent))


def finite_offset(row_max: jax.Array) -> jax.Array:
    """What to subtract from a row's scores: 0 where all of them are -inf, which gives powers 0."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def normalise(out: jax.Array, total: jax.Array, row_max: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The softmax's result and lse from sums of powers relative to `row_max`."""
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, row_max + jnp.log(safe_total))
    return jnp.where(is_empty[..., None], 0.0, out / safe_total[..., None]), lse
