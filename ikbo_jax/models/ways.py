"""The places at which the ranking network's user meets its candidates, in several ways.

The network itself, `ranking`, is written once; a `Ways` holds what differs from version to version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.layers import functional
from ikbo_jax.ops.gdpa_arguments import equal_offsets

Parameters = functional.Parameters
#: Of the parameters, candidates' and users' values, and the index: a value at candidate batch.
Meeting = Callable[[Parameters, jax.Array, jax.Array, jax.Array], jax.Array]

#: Tensor cores want rows of 16 bytes.
ALIGNED = 8


class Ways(NamedTuple):
    """How one version of the network does what the versions do differently.

    Attributes:
      prepare: [B, K_cand, N] candidate tokens as `compress` takes them.
      pool: parameters of PMA and [U, S, N] to [U, pooled, N].
      attend: parameters, [B, T, N], [U, S, N] and the index to [B, T, N].
      feed_forward: parameters, [B, T, N], [U, pooled, N] and the index to [B, T, N].
      compress: parameters, [U, K_user, N], what `prepare` made and the index to [B, M, N].
      join: the weight [user + cand, hidden], [U, user], [B, cand] and the index to [B, hidden].
      finish: the same arrays, to be there before anything that takes them begins.
    """

    prepare: Callable[[jax.Array], jax.Array]
    pool: Callable[[Parameters, jax.Array], jax.Array]
    attend: Meeting
    feed_forward: Meeting
    compress: Meeting
    join: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    finish: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]


def softmax_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, tuned: bool
) -> jax.Array:
    """`jax.nn.dot_product_attention`; tuned, by cuDNN where that can be."""
    narrow = query.dtype in (jnp.bfloat16, jnp.float16)
    fits = query.shape[-1] % ALIGNED == 0 and query.shape[-1] <= 128
    cudnn = tuned and narrow and fits and jax.default_backend() == "gpu"
    # It promotes bfloat16 scores itself, which a caller's strict rules would forbid.
    with jax.numpy_dtype_promotion("standard"):
        out: jax.Array = jax.nn.dot_product_attention(
            query, key, value, implementation="cudnn" if cudnn else None
        )
    return out


def activated_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """gelu(query · keyᵀ / √H) · value / √S, in the arrays' dtype but for f32 scores."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.gelu(scores * jnp.float32(query.shape[-1] ** -0.5), approximate=False)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)
    return out * jnp.asarray(key.shape[1] ** -0.5, out.dtype)


def _projected(params: Parameters, x: jax.Array, memory: jax.Array) -> tuple[jax.Array, ...]:
    return (
        functional.project(x, params["w_query"]),
        functional.project(memory, params["w_key"]),
        functional.project(memory, params["w_value"]),
    )


# Copies.


def _pool_by_seeds(params: Parameters, x: jax.Array, *, tuned: bool) -> jax.Array:
    query, key, value = _projected(params, params["seeds"], x)
    seeds = jnp.broadcast_to(query, (x.shape[0], *query.shape))
    out = softmax_attention(seeds, key, value, tuned=tuned)
    return functional.merge_heads(out, params["w_out"])


def _attend_to_copies(
    params: Parameters, queries: jax.Array, history: jax.Array, index: jax.Array, *, tuned: bool
) -> jax.Array:
    out = softmax_attention(*_projected(params, queries, history[index]), tuned=tuned)
    return functional.merge_heads(out, params["w_out"])


def _feed_forward_by_copies(
    params: Parameters, queries: jax.Array, pooled: jax.Array, index: jax.Array
) -> jax.Array:
    out = activated_attention(*_projected(params, queries, pooled[index]))
    return functional.merge_heads(out, params["w_out"])


def _compress_copies(
    params: Parameters, rows: jax.Array, tokens: jax.Array, index: jax.Array, *, tuned: bool
) -> jax.Array:
    parts, weights = [rows[index], tokens], [params["w_user"], params["w_cand"]]
    padding = -(rows.shape[1] + tokens.shape[1]) % ALIGNED if tuned else 0
    if padding:
        parts.append(jnp.zeros((tokens.shape[0], padding, tokens.shape[2]), tokens.dtype))
        weights.append(jnp.zeros((weights[0].shape[0], padding), tokens.dtype))
    embeddings = jnp.concatenate(parts, axis=1)
    return jnp.einsum("mk,bkn->bmn", jnp.concatenate(weights, axis=1), embeddings)


def _join_copies(
    weight: jax.Array, user: jax.Array, cand: jax.Array, index: jax.Array
) -> jax.Array:
    return jnp.concatenate([user[index], cand], axis=1) @ weight


MATERIALISED = Ways(
    prepare=lambda tokens: tokens,
    pool=functools.partial(_pool_by_seeds, tuned=False),
    attend=functools.partial(_attend_to_copies, tuned=False),
    feed_forward=_feed_forward_by_copies,
    compress=functools.partial(_compress_copies, tuned=False),
    join=_join_copies,
    finish=lambda arrays: arrays,
)
TUNED = MATERIALISED._replace(
    pool=functools.partial(_pool_by_seeds, tuned=True),
    attend=functools.partial(_attend_to_copies, tuned=True),
    compress=functools.partial(_compress_copies, tuned=True),
)


# This library's layers.


def _pool(params: Parameters, x: jax.Array) -> jax.Array:
    users, length, width = x.shape
    flat = x.reshape(users * length, width)
    return functional.pma(params, flat, equal_offsets(users, length), max_seqlen=length)


def _feed_forward(
    params: Parameters, queries: jax.Array, pooled: jax.Array, index: jax.Array
) -> jax.Array:
    (batch, length, width), (users, rows, _) = queries.shape, pooled.shape
    out = functional.pffn(
        params,
        queries.reshape(batch * length, width),
        pooled.reshape(users * rows, width),
        equal_offsets(batch, length),
        equal_offsets(users, rows),
        index,
        output_scale=rows**-0.5,
        max_seqlen=length,
        max_seqlen_memory=rows,
    )
    return out.reshape(queries.shape)


def _join(weight: jax.Array, user: jax.Array, cand: jax.Array, index: jax.Array) -> jax.Array:
    """Two products, each at its own batch, added in f32 and rounded once."""
    split, dtype = user.shape[1], weight.dtype
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    return (dot(user, weight[:split])[index] + dot(cand, weight[split:])).astype(dtype)


CO_DESIGNED = Ways(
    prepare=lambda tokens: tokens,
    pool=_pool,
    attend=functional.attend,
    feed_forward=_feed_forward,
    compress=functional.compress,
    join=_join,
    # Left alone, XLA works on the histories of later layers beside the compressed rows of this one:
    # 370 MiB of temporaries instead of 294 at the default sizes on an H200.
    finish=jax.lax.optimization_barrier,
)


# By hand.


class Fold(NamedTuple):
    """Where candidates go when those of a user are put side by side.

    Attributes:
      slot: [B] int32, of U · most slots.
      users: U.
      most: slots of a user.
    """

    slot: jax.Array
    users: int
    most: int

    def fold(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] to [U, most · T, ...], zeros where no candidate is."""
        slots = jnp.zeros((self.users * self.most, *x.shape[1:]), x.dtype)
        # Slots are all different, which spares atomic additions.
        slots = slots.at[self.slot].set(x, unique_indices=True, mode="drop")
        return slots.reshape(self.users, self.most * x.shape[1], *x.shape[2:])

    def unfold(self, x: jax.Array) -> jax.Array:
        """The reverse of `fold`."""
        rows = x.reshape(self.users * self.most, x.shape[1] // self.most, *x.shape[2:])
        return rows[self.slot]


def fold_by_user(index: jax.Array, users: int, most: int) -> Fold:
    """Folds the candidates of `index` [B] int32, in any order, at most `most` of a user."""
    order = jnp.argsort(index, stable=True)
    in_order = index[order]
    first = jnp.searchsorted(in_order, jnp.arange(users, dtype=index.dtype)).astype(jnp.int32)
    rank = jnp.arange(index.shape[0], dtype=jnp.int32) - first[in_order]
    slot = in_order * jnp.int32(most) + rank
    return Fold(jnp.zeros_like(index).at[order].set(slot, unique_indices=True), users, most)


def by_hand(fold: Fold) -> Ways:
    """What an expert does in XLA alone."""

    def padded(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % ALIGNED)
        return jnp.pad(x, widths)

    def attend(
        params: Parameters, queries: jax.Array, history: jax.Array, index: jax.Array
    ) -> jax.Array:
        query, key, value = _projected(params, queries, history)
        out = fold.unfold(softmax_attention(fold.fold(query), key, value, tuned=True))
        return functional.merge_heads(out, params["w_out"])

    def feed_forward(
        params: Parameters, queries: jax.Array, pooled: jax.Array, index: jax.Array
    ) -> jax.Array:
        query, key, value = _projected(params, queries, pooled)
        out = fold.unfold(activated_attention(fold.fold(query), key, value))
        return functional.merge_heads(out, params["w_out"])

    def compress(
        params: Parameters, rows: jax.Array, tokens: jax.Array, index: jax.Array
    ) -> jax.Array:
        # Both products rounded before they are added: on an H200 0.74 ms, with f32 sums 0.82 ms.
        dot = functools.partial(jnp.einsum, "mk,bkn->bmn")
        user: jax.Array = dot(padded(params["w_user"], 1), padded(rows, 1))
        return dot(padded(params["w_cand"], 1), tokens) + user[index]

    return Ways(
        # Once for all layers.
        prepare=lambda tokens: padded(tokens, 1),
        pool=functools.partial(_pool_by_seeds, tuned=True),
        attend=attend,
        feed_forward=feed_forward,
        compress=compress,
        join=_join,
        finish=lambda arrays: arrays,
    )
