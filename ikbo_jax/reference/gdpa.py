"""Generalised dot-product attention in plain jnp: its definition and the oracle.

    out[i] = output_scale · Σⱼ act(cap(scale · query[i] · key[j])) · value[j]

over the keys j of query i's sequence, with cap(s) = logit_cap · tanh(s / logit_cap), or s without a
`logit_cap`; softmax as `act` normalises over these keys. One array holds all sequences; sequence b
has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. Offsets are clamped to the array and replaced
by their running maximum, sequences are truncated to `max_seqlen_*`, and `q_to_kv` is clamped to the
sequences that exist. Rows of no sequence have no effect, even if they are NaN, and their results
are zeros. The ops check arguments; these functions do not.

Letters: N query heads, K key heads (N a multiple of K), H head width.

Source: Meta, generalised dot-product attention (GDPA), published with its kernels for ads models.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.hstu import Rule


class Arrays(NamedTuple):
    """The arguments that are arrays.

    Attributes:
      query: [total_q, N, H], or with `broadcast_q` [T, N, H].
      key: [total_kv, K, H].
      value: [total_kv, K, H].
      cu_seqlens_q: [batch + 1] int32; None with `broadcast_q`.
      cu_seqlens_kv: [batch_kv + 1] int32.
      q_to_kv: [batch] int32; None: query sequence b attends to key-value sequence b.
      intervals: [rows of out, 4] int32, begin and end of two intervals of keys, counted from the
        first key of the row's sequence; the row sees no other keys. None: rows see all keys.
      num_targets: [batch] int32, of a `Settings.rule`, which the kernels take in place of
        intervals; None without one.
      contextual: likewise.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cu_seqlens_q: jax.Array | None
    cu_seqlens_kv: jax.Array
    q_to_kv: jax.Array | None = None
    intervals: jax.Array | None = None
    num_targets: jax.Array | None = None
    contextual: jax.Array | None = None


class Settings(NamedTuple):
    """The arguments that are known while tracing.

    Attributes:
      activations: a name for each of the N heads; see `activations.ACTIVATIONS`.
      approx: name of an approximation, or None.
      scale: of the scores, before the activation.
      output_scale: of the result.
      logit_cap: bound of the scores before the activation, or None.
      broadcast_q: whether all sequences share the same T queries.
      max_seqlen_q: longest query sequence, or None.
      max_seqlen_kv: longest key-value sequence, or None.
      rule: by which `Arrays.intervals` were computed; None: they may be any.
    """

    activations: tuple[str, ...]
    approx: str | None = None
    scale: float = 1.0
    output_scale: float = 1.0
    logit_cap: float | None = None
    broadcast_q: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    rule: Rule | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `ikbo_jax.gdpa`, without those that are None by default."""
        found = {name: x for name, x in self._asdict().items() if x is not None}
        found["activation"] = found.pop("activations")
        found.pop("rule", None)
        return found


def num_sequences(arrays: Arrays) -> int:
    """Counts the query sequences."""
    if arrays.q_to_kv is not None:
        return arrays.q_to_kv.shape[0]
    return arrays.cu_seqlens_kv.shape[0] - 1


def out_shape(arrays: Arrays, settings: Settings) -> tuple[int, int, int]:
    """Shape of the result: the queries', repeated for each sequence if they are broadcast."""
    rows, heads, width = arrays.query.shape
    return (rows * num_sequences(arrays) if settings.broadcast_q else rows), heads, width


_ORACLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu_squared": lambda x: jax.nn.relu(x) ** 2,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "hardswish": jax.nn.hard_swish,
}


def materialised(arrays: Arrays, settings: Settings) -> jax.Array:
    """Computes all scores of one sequence after another in f32, masked: the oracle.

    It computes [total_q, total_kv] scores per sequence and head. Activations are exact for every
    `settings.approx`.

    Returns:
      out in the query's dtype, rounded once; for its shape see `out_shape`.
    """
    query, key, value, cu_q, cu_kv, q_to_kv, intervals, *_ = arrays
    batch, (total_q, heads, _), total_kv = num_sequences(arrays), query.shape, key.shape[0]
    q_row, kv_row = (
        jnp.arange(total, dtype=jnp.int32)[:, None, None] for total in (total_q, total_kv)
    )

    def place_in(
        cu: jax.Array, sequence: jax.Array, row: jax.Array, longest: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Tells whether rows are in a sequence, and their places in it."""
        # The running maximum of the offsets, inside the array.
        before = jnp.arange(cu.size, dtype=jnp.int32) <= sequence
        begin = jnp.max(jnp.where(before, jnp.clip(cu, 0, row.size), 0))
        end = jnp.maximum(begin, jnp.clip(cu[sequence + 1], 0, row.size))
        if longest is not None:
            end = jnp.minimum(end, begin + longest)
        return (row >= begin) & (row < end), row - begin

    def of_sequence(sequence: jax.Array) -> jax.Array:
        kv = sequence if q_to_kv is None else jnp.clip(q_to_kv[sequence], 0, cu_kv.size - 2)
        is_query = jnp.ones_like(q_row, bool)
        if cu_q is not None:
            is_query, _ = place_in(cu_q, sequence, q_row, settings.max_seqlen_q)
        is_key, key_place = place_in(cu_kv, kv, kv_row, settings.max_seqlen_kv)
        q = jnp.where(is_query, query.astype(jnp.float32), 0)
        k, v = (jnp.where(is_key, x.astype(jnp.float32), 0) for x in (key, value))
        k, v = (jnp.repeat(x, heads // key.shape[1], axis=1) for x in (k, v))
        scores = jnp.float32(settings.scale) * jnp.einsum("inh,jnh->nij", q, k, precision="highest")
        if settings.logit_cap is not None:
            scores = settings.logit_cap * jnp.tanh(scores / settings.logit_cap)
        mask = is_query[:, 0] & is_key[:, 0, 0][None]
        if intervals is not None:
            seen = intervals.reshape(-1, total_q, 2, 2)[sequence if settings.broadcast_q else 0]
            places = key_place[None, :, 0]
            mask &= jnp.any((places >= seen[:, None, :, 0]) & (places < seen[:, None, :, 1]), -1)
        weights = jnp.stack(
            [
                _oracle_weights(name, s, mask)
                for name, s in zip(settings.activations, scores, strict=True)
            ]
        )
        out = jnp.einsum("nij,jnh->inh", weights, v, precision="highest")
        return jnp.float32(settings.output_scale) * out

    outs = jax.lax.map(of_sequence, jnp.arange(batch, dtype=jnp.int32))
    out = outs.reshape(-1, *query.shape[1:]) if settings.broadcast_q else jnp.sum(outs, axis=0)
    return out.astype(query.dtype)


def _oracle_weights(name: str, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes act(scores) [total_q, total_kv] of one head, 0 where `mask` is false."""
    if name != SOFTMAX:
        return jnp.where(mask, _ORACLE[name](scores), 0)
    masked = jnp.where(mask, scores, -jnp.inf)
    empty = jnp.all(masked == -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, masked), axis=-1))
