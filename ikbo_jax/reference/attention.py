"""Broadcast attention in plain jnp: the materialised oracle, merging, and self-attention.

    out[b] = softmax(scale · query[b] · key[u(b)]ᵀ) · value[u(b)],  u(b) = cand_to_user[b]

with lse[b] the natural logarithm of the softmax's denominator. Indices outside the users are
clamped to [0, U - 1], and lengths to [0, S]; keys and values at or past a user's length have no
effect, even if they are NaN. A row without keys, or with only scores of -inf, has out = 0 and
lse = -inf. The ops check arguments; these functions do not. The XLA path is in `attention_grouped`.

Letters: B candidates, U users, T queries of a candidate, S keys of a user, N query heads, K key
heads (N a multiple of K), H head width.

Source: Meta IKBO, flash attention with in-kernel broadcast.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    ranges: jax.Array | None = None,
    self_key: jax.Array | None = None,
    self_value: jax.Array | None = None,
    logit_cap: float | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies every user's keys and values to its candidates and attends in f32: the oracle.

    Args:
      query: [B, T, N, H].
      key: [U, S, K, H].
      value: [U, S, K, H].
      cand_to_user: [B] int32.
      key_value_seq_lengths: [U] int32, or None for S everywhere.
      ranges: [B, 2] int32, the first key that a candidate sees, and one past the last; or None.
      self_key: [B, T_self, K, H], further keys that only their candidate sees, or None.
      self_value: [B, T_self, K, H], or None.
      logit_cap: bound of the scores, see `soft_capped`, or None.
      bias: [U, N or 1, T or 1, S], added to the scores of the users' keys, in its dtype; or None.

    Returns:
      out [B, T, N, H] in the query's dtype, rounded once, and lse [B, T, N] in f32.
    """
    user = jnp.clip(cand_to_user, 0, key.shape[0] - 1)
    keys, values = key[user].astype(jnp.float32), value[user].astype(jnp.float32)
    mask = jnp.ones(keys.shape[:2], bool)
    if key_value_seq_lengths is not None:
        length = key_value_seq_lengths[user][:, None]
        mask = jnp.arange(key.shape[1], dtype=jnp.int32)[None] < length
    if ranges is not None:
        place = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
        mask &= (place >= ranges[:, :1]) & (place < ranges[:, 1:])
    if self_key is not None and self_value is not None:
        keys = jnp.concatenate((keys, self_key.astype(jnp.float32)), axis=1)
        values = jnp.concatenate((values, self_value.astype(jnp.float32)), axis=1)
        mask = jnp.concatenate((mask, jnp.ones(self_key.shape[:2], bool)), axis=1)
    visible = mask[:, :, None, None]
    heads = query.shape[2] // key.shape[2]
    keys = jnp.repeat(jnp.where(visible, keys, 0), heads, axis=2)
    values = jnp.repeat(jnp.where(visible, values, 0), heads, axis=2)

    highest = jax.lax.Precision.HIGHEST
    products = jnp.einsum("btnh,bsnh->btns", query.astype(jnp.float32), keys, precision=highest)
    products, scale = soft_capped(products, scale, logit_cap)
    if bias is not None:
        own = products.shape[3] - bias.shape[3]
        added = jnp.pad(bias[user], ((0, 0),) * 3 + ((0, own),)).swapaxes(1, 2)
        scores = (products * jnp.float32(scale)).astype(bias.dtype) + added
        products, scale = scores.astype(jnp.float32), 1.0
    products = jnp.where(mask[:, None, None], directed(products, scale), -jnp.inf)
    empty = jnp.all(products == -jnp.inf, axis=-1, keepdims=True)
    # Rows without keys get finite scores, so that no NaN enters a gradient.
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
    """Merges attention over two sets of keys, [..., H] and [...] f32, as `ops.merge_attention`."""
    largest = jnp.maximum(lse1, lse2)
    offset = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0.0, largest))
    weight1, weight2 = jnp.exp(lse1 - offset), jnp.exp(lse2 - offset)
    total = weight1 + weight2
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, offset + jnp.log(safe_total))

    def part(out: jax.Array, lse: jax.Array, weight: jax.Array) -> jax.Array:
        is_valid = (lse != -jnp.inf)[..., None]
        values = jnp.where(is_valid, out.astype(jnp.float32), 0.0)
        return values * (weight / safe_total)[..., None]

    merged = part(out1, lse1, weight1) + part(out2, lse2, weight2)
    return merged.astype(out1.dtype), lse


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    logit_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each candidate to its few tokens: all scores exist at once.

    Returns out [B, T, N, H] and lse [B, T, N], both f32: out is not rounded, for `merge_attention`.
    """
    batch, q_len, q_heads, width = query.shape
    kv_heads = key.shape[2]
    q = query.reshape(batch, q_len, kv_heads, q_heads // kv_heads, width)
    products = jnp.einsum("btkrh,bskh->btkrs", q, key, preferred_element_type=jnp.float32)
    products, scale = soft_capped(products, scale, logit_cap)
    products = directed(products, scale)
    row_max = jax.lax.stop_gradient(finite_offset(jnp.max(products, axis=-1)))
    exponentials = jnp.exp(scaled(products - row_max[..., None], scale))
    total = jnp.sum(exponentials, axis=-1)
    out = jnp.einsum(
        "btkrs,bskh->btkrh",
        exponentials.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    out, lse = normalise(out, total, scaled(row_max, scale))
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


#: From this |lse| on, the rounding error of lse may change a weight by more than one percent.
HUGE_LSE = 2.0**18
#: Bound of lse's relative error: a few roundings of f32.
LSE_ERROR = 2.0**-21


def soft_capped(
    products: jax.Array, scale: float, logit_cap: float | None
) -> tuple[jax.Array, float]:
    """Returns logit_cap · tanh(scale · products / logit_cap), and 1 as the scale that is left.

    Without a cap, returns products and scale as they are.
    """
    if logit_cap is None:
        return products, scale
    # Two operations: the quotient of scale and cap may be beyond f32.
    return jnp.float32(logit_cap) * jnp.tanh(products * jnp.float32(scale) / logit_cap), 1.0


def soft_cap_slope(capped: jax.Array, logit_cap: float | None) -> Any:
    """Computes the derivative of capped scores by scores, from capped ones; 1 without a cap."""
    return 1.0 if logit_cap is None else 1.0 - jnp.square(capped / logit_cap)


def directed(products: jax.Array, scale: float) -> jax.Array:
    """Gives products of queries and keys the sign of `scale`: the largest has the largest score.

    With a scale of 0, all are 0. The softmax subtracts their maximum before it scales them: a
    compiler may turn products · scale - maximum into one instruction that rounds once.
    """
    if scale == 0:
        return products * jnp.float32(0)
    return products if scale > 0 else -products


def scaled(products: jax.Array, scale: float) -> jax.Array:
    """Scales `directed` products, or differences of products, to scores."""
    # 0 times the -inf of a masked score would be NaN.
    return products * jnp.float32(1.0 if scale == 0 else abs(scale))


def weight_exponents(lse: jax.Array) -> jax.Array:
    """Computes e so that a softmax weight is exp2(score · log2(e) - e), bounded by 1.

    Infinite for rows without keys, whose weights are 0. Where lse is so large that its rounding
    error matters, it is lowered by the bound of its error: a score that equals lse within this
    error is the row's clear maximum, and the bound of the weights gives it the weight 1.
    """
    lowered = lse - jnp.abs(lse) * jnp.float32(LSE_ERROR)
    exponent = jnp.where(jnp.abs(lse) >= HUGE_LSE, lowered, lse) * jnp.float32(math.log2(math.e))
    return jnp.where(lse == -jnp.inf, jnp.inf, exponent)


def finite_offset(row_max: jax.Array) -> jax.Array:
    """Returns the row maximum, or 0 where all scores are -inf: their exponentials are 0."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def normalise(out: jax.Array, total: jax.Array, row_max: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the softmax's result and lse, from sums of exponentials relative to `row_max`."""
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, row_max + jnp.log(safe_total))
    return jnp.where(is_empty[..., None], 0.0, out / safe_total[..., None]), lse


class Softmax(NamedTuple):
    """Sums of softmaxes over the keys so far, f32.

    Attributes:
      row_max: [...], the largest score, of `directed` products.
      total: [...], of the scores' exponentials, relative to the largest score.
      weighted: [..., X], of the exponentials times the keys' vectors.
    """

    row_max: jax.Array
    total: jax.Array
    weighted: jax.Array

    @staticmethod
    def of_none(like: jax.Array) -> Softmax:
        """Starts with no keys; `like` has the shape of `weighted`."""
        zeros = jnp.zeros_like(like, jnp.float32)
        return Softmax(zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)

    def plus(self, scores: jax.Array, scale: float) -> tuple[Softmax, jax.Array]:
        """Adds scores [..., keys], but not to `weighted`; also returns their exponentials."""
        row_max = jnp.maximum(self.row_max, jnp.max(scores, axis=-1))
        offset = finite_offset(row_max)
        exponentials = jnp.exp(scaled(scores - offset[..., None], scale))
        shrink = jnp.exp(scaled(self.row_max - offset, scale))
        total = self.total * shrink + jnp.sum(exponentials, axis=-1)
        return Softmax(row_max, total, self.weighted * shrink[..., None]), exponentials

    def plus_gradients(self, scores: jax.Array, d_weights: jax.Array, scale: float) -> Softmax:
        """Adds scores and, as vectors, the gradients of their weights [..., keys]."""
        state, exponentials = self.plus(scores, scale)
        # A cotangent of NaN has no effect on rows and keys that are masked.
        products = jnp.where(scores == -jnp.inf, 0.0, exponentials * d_weights)
        return state._replace(weighted=state.weighted + jnp.sum(products, axis=-1, keepdims=True))

    def pull_back(
        self, scores: jax.Array, d_weights: jax.Array, scale: float, d_lse: Any = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """Computes weights and gradients of scores [..., keys], from `plus_gradients` of all keys.

        Weights are not exp(scores - lse): of logits near 2e6, lse is rounded to 0.25, the gradients
        of a row's scores would not sum to 0, and a part that all keys have in common would have a
        gradient: d_query was 1e4 times as wrong as with a materialised softmax.
        """
        inverse = 1 / jnp.where(self.total == 0, 1.0, self.total)
        offset = finite_offset(self.row_max)[..., None]
        weights = jnp.exp(scaled(scores - offset, scale)) * inverse[..., None]
        delta = self.weighted[..., 0] * inverse - d_lse
        return weights, weights * (d_weights - delta[..., None])
