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
    scores = jnp.where(seen[:, None, None], products * jnp.float32(scale), -jnp.inf)
    empty = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    # Rows without keys get scores that have a softmax, so that no gradient meets a NaN.
    scores = jnp.where(empty, 0, scores)
    lse = jnp.where(empty[..., 0], -jnp.inf, jax.nn.logsumexp(scores, axis=-1))
    probabilities = jnp.where(empty, 0, jax.nn.softmax(scores, axis=-1))
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
    scores = products * jnp.float32(scale)
    row_max = jax.lax.stop_gradient(finite_offset(jnp.max(scores, axis=-1)))
    powers = jnp.exp(scores - row_max[..., None])
    total = jnp.sum(powers, axis=-1)
    out = jnp.einsum(
        "btkrs,bskh->btkrh", powers.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    out, lse = normalise(out, total, row_max)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def finite_offset(row_max: jax.Array) -> jax.Array:
    """What to subtract from a row's scores: 0 where all of them are -inf, which gives powers 0."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def normalise(out: jax.Array, total: jax.Array, row_max: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The softmax's result and lse from sums of powers relative to `row_max`."""
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, row_max + jnp.log(safe_total))
    return jnp.where(is_empty[..., None], 0.0, out / safe_total[..., None]), lse
