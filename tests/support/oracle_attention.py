"""Broadcast attention, and its gradients, in NumPy and f64; the error rule beside them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import problems

from ikbo_jax.reference import attention


class _Attended(NamedTuple):
    """Broadcast attention of every candidate on its own, in f64.

    Attributes:
      weights: softmax, [B, T, N, S + T_self].
      lse: [B, T, N].
      keys: [B, S + T_self, N, H]; those that do not exist are zeros.
      values: likewise.
      users: the user of each candidate.
      slope: of the cap of scores, [B, T, N, S + T_self], or 1.
    """

    weights: np.ndarray
    lse: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    users: np.ndarray
    slope: Any = 1


def ranges_of_keys(batch: int, keys: int, seed: int = 0) -> np.ndarray:
    """[batch, 2] int32, ranges of keys: from the first one, any, empty, and out of bounds."""
    rng = np.random.default_rng(seed)
    ranges = rng.integers(-3, keys + 4, (batch, 2))
    ranges[::2].sort(axis=1)
    ranges[1::3, 0] = 0
    ranges[3::5] = -(2**31), 2**31 - 1
    return ranges.astype(np.int32)


def _attended(
    inputs: problems.AttentionInputs,
    scale: float,
    self_key: Any = None,
    self_value: Any = None,
    ranges: Any = None,
    logit_cap: float | None = None,
) -> _Attended:
    query, key, value, index, lengths = inputs.f64()
    users = np.clip(index, 0, key.shape[0] - 1)
    exists = np.ones((len(users), key.shape[1]), bool)
    if lengths is not None:
        exists = np.arange(key.shape[1])[None] < lengths[users][:, None]
    if ranges is not None:
        place, ranges = np.arange(key.shape[1])[None], np.asarray(ranges)
        exists &= (ranges[:, :1] <= place) & (place < ranges[:, 1:])

    def of_candidates(array: np.ndarray, own: Any) -> np.ndarray:
        each = np.where(exists[:, :, None, None], array[users], 0)
        if own is not None:
            each = np.concatenate((each, *problems.f64_of([own])), axis=1)
        return np.repeat(each, query.shape[2] // key.shape[2], axis=2)

    keys, values = of_candidates(key, self_key), of_candidates(value, self_value)
    is_own = np.ones((len(users), keys.shape[1] - key.shape[1]), bool)
    exists = np.concatenate((exists, is_own), axis=1)
    scores, slope = scale * np.einsum("btnh,bsnh->btns", query, keys), 1
    if logit_cap is not None:
        inner = np.tanh(scores / logit_cap)
        scores, slope = logit_cap * inner, 1 - inner**2
    scores = np.where(exists[:, None, None], scores, -np.inf)
    row_max = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    row_max = np.where(row_max == -np.inf, 0, row_max)
    powers = np.exp(scores - row_max)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(total))[..., 0]
    return _Attended(powers / np.where(total == 0, 1, total), lse, keys, values, users, slope)


def numpy_attention_oracle(
    inputs: problems.AttentionInputs, *, scale: float, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Broadcast attention in NumPy and f64: out [B, T, N, H] and lse [B, T, N].

    `options`: self_key, self_value, ranges and logit_cap.
    """
    weights, lse, _, values, *_ = _attended(inputs, scale, **options)
    return np.einsum("btns,bsnh->btnh", weights, values), lse


#: What plain jnp makes of the inputs in their own dtype, compiled.
materialised = jax.jit(attention.materialised, static_argnames=("scale", "logit_cap"))


def numpy_attention_gradients(
    inputs: problems.AttentionInputs,
    d_out: Any,
    d_lse: Any,
    *,
    scale: float,
    merged: Any = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of <d_out, out> + <d_lse, lse> by query, key and value, in NumPy and f64.

    `merged`: out and lse, if the rows attend to further keys, too. `options`: ranges and logit_cap.
    """
    weights, own_lse, keys, values, users, slope = _attended(inputs, scale, **options)
    query, key, value, _, _ = inputs.f64()
    d_out, d_lse = problems.f64_of([d_out, d_lse])
    d_weights = np.einsum("btnh,bsnh->btns", d_out, values)
    expected = np.sum(weights * d_weights, axis=-1, keepdims=True)
    if merged is not None:
        out, lse = problems.f64_of(merged)
        with np.errstate(invalid="ignore"):  # of rows without keys
            weights = weights * np.nan_to_num(np.exp(own_lse - lse))[..., None]
        expected = np.sum(d_out * out, axis=-1, keepdims=True)
    d_scores = scale * slope * weights * (d_weights - expected + d_lse[..., None])
    d_query = np.einsum("btns,bsnh->btnh", d_scores, keys)

    def summed(per_candidate: np.ndarray, like: np.ndarray) -> np.ndarray:
        """[B, S, N, H] summed over the candidates of a user and the query heads of a key head."""
        batch, kv_len, _, width = per_candidate.shape
        heads = per_candidate.reshape(batch, kv_len, like.shape[2], -1, width).sum(3)
        total = np.zeros_like(like)
        np.add.at(total, users, heads)
        return total

    d_key = summed(np.einsum("btns,btnh->bsnh", d_scores, query), key)
    return d_query, d_key, summed(np.einsum("btns,btnh->bsnh", weights, d_out), value)


def assert_attention_within_error_rule(
    actual: tuple[Any, Any],
    inputs: problems.AttentionInputs,
    *,
    scale: float,
    exact: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Asserts the error rule for out, and for lse, whose infinities must be the oracle's."""
    out, lse = actual
    exact_out, exact_lse = exact or numpy_attention_oracle(inputs, scale=scale)
    plain_out, plain_lse = materialised(*inputs, scale=scale)
    problems.assert_within_error_rule(out, exact_out, plain_out)
    assert jax.device_put(lse).dtype == jnp.float32
    is_empty = exact_lse == -np.inf
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, is_empty)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[is_empty], 0)
    found, exactly, plain = (np.asarray(x)[~is_empty] for x in (lse, exact_lse, plain_lse))
    # An lse near 0 is the difference of terms that are not, so its error may be that of 1.
    np.testing.assert_allclose(
        found, exactly, rtol=1e-6, atol=2 * np.max(np.abs(plain - exactly), initial=0.0) + 1e-6
    )


def own_gradient(
    d_query: Any,
    query: Any,
    key: Any,
    value: Any,
    lse: Any,
    d_out: Any,
    delta: Any,
    *,
    scale: float,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds own tokens to `d_query`, like `attention_backward.own.add_own_tokens`, in f32."""
    group = query.shape[2] // key.shape[2]
    q, d = (x.astype(jnp.float32) for x in (query, d_out))
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    weights = jnp.exp(jnp.sum(q * k, axis=-1) * scale - lse)
    d_scores = scale * weights * (jnp.sum(d * v, axis=-1) - delta)

    def of_token(x: jax.Array) -> jax.Array:
        by_key_head = x.reshape(*x.shape[:2], -1, group, x.shape[-1])
        return jnp.sum(by_key_head, axis=(1, 3))[:, None].astype(dtype or key.dtype)

    d_query = (d_query.astype(jnp.float32) + d_scores[..., None] * k).astype(query.dtype)
    return d_query, of_token(d_scores[..., None] * q), of_token(weights[..., None] * d)
