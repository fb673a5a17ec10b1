"""The operations that differ between versions of the network `ranking`: its strategies."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ikbo_jax.layers import functional
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.gated_linear import gated_linear
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.gdpa_arguments import equal_offsets
from ikbo_jax.ops.norm_linear import norm_linear
from ikbo_jax.ops.sharded import vary_over_same_axes

Parameters = functional.Parameters
#: Takes parameters, two arrays at candidate or user batch, and the index `cand_to_user` [B] int32;
#: returns an array at candidate batch.
CandidateOp = Callable[[Parameters, jax.Array, Any, jax.Array], jax.Array]

#: Elements to which a row is padded: 16 bytes of a 16-bit dtype, which tensor cores read at once.
ALIGNMENT = 8


def rms_norm(x: jax.Array) -> jax.Array:
    """Divides rows of the last axis by their root mean square, in f32; rounds to `x`'s dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def softmax_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, tuned: bool = False
) -> jax.Array:
    """Attends by `jax.nn`; with `tuned`, by cuDNN where cuDNN takes dtype and width."""
    narrow = query.dtype in (jnp.bfloat16, jnp.float16)
    fits = query.shape[-1] % ALIGNMENT == 0 and query.shape[-1] <= 128
    cudnn = tuned and narrow and fits and jax.default_backend() == "gpu"
    dtype = query.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        # XLA for CPUs refuses the algorithm by which `jax.nn` multiplies float16.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    # `jax.nn` promotes bfloat16 scores to float32; strict promotion, if set, would reject that.
    with jax.numpy_dtype_promotion("standard"):
        out: jax.Array = jax.nn.dot_product_attention(
            query, key, value, implementation="cudnn" if cudnn else None
        )
    return out.astype(dtype)


def _attend_to_itself(params: Parameters, history: jax.Array) -> jax.Array:
    x = rms_norm(history)
    out = softmax_attention(*functional.projected(params, x, x), tuned=True)
    return history + functional.merge_heads(out, params["w_out"])


def _remember(layer: Any, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    del layer
    normed = rms_norm(history)
    return normed, normed


class Strategy(NamedTuple):
    """Holds the operations of one version of the network, of parameters and an index.

    Attributes:
      pool: PMA of a history for the users' numbers [U] int32; returns [U, pooled, N].
      attend: takes queries [B, T, N], which it normalises, and a history; returns the queries and
        what it found, added.
      feed_forward: takes queries [B, T, N] and [U, pooled, N], which it normalises, and further
        arguments: the index, and [B, N]; returns both and the net's result, added.
      compress: takes [U, K_user, N] and the result of `prepare`; returns [B, M, N].
      join: first layer of the head; takes the weight [user + cand, hidden], [U, user] and [B,
        cand]; returns [B, hidden].
      prepare: takes candidate tokens [B, K_cand, N]; returns them as `compress` expects them.
      barrier: returns its arrays unchanged; where it is an optimisation barrier, XLA computes all
        of them before any operation that reads one of the results.
      joins_queries: whether the first layer's `compress` makes the queries, too.
      attend_to_itself: adds a history [U, S, N] and what it finds in itself, normalised.
      remember: takes a layer's parameters and the history; returns what `pool` and `attend` read of
        it, once normalised.
    """

    pool: Callable[[Parameters, Any, jax.Array], jax.Array]
    attend: CandidateOp
    feed_forward: Callable[[Parameters, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    compress: CandidateOp
    join: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    prepare: Callable[[jax.Array], jax.Array] = lambda tokens: tokens
    barrier: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]] = lambda arrays: arrays
    joins_queries: bool = True
    attend_to_itself: Callable[[Parameters, jax.Array], jax.Array] = _attend_to_itself
    remember: Callable[[Any, jax.Array], tuple[Any, Any]] = _remember


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def activated_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    product: Callable[..., jax.Array] = _product,
) -> jax.Array:
    """Computes gelu(query · keyᵀ / √H) · value / √S with f32 scores, by an einsum `product`."""
    scores = product("btnh,bsnh->bnts", query, key)
    weights = jax.nn.gelu(scores * jnp.float32(query.shape[-1] ** -0.5), approximate=False)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)
    return out * jnp.asarray(key.shape[1] ** -0.5, out.dtype)


def look_up(user: jax.Array, index: jax.Array) -> jax.Array:
    """Takes the user's entry of every candidate, sharded as the candidates are."""
    sharding = jax.typeof(index).sharding
    if sharding.mesh.empty:
        return user[index]
    # With Explicit mesh axes, JAX asks for the sharding of what it looks up.
    return user.at[index].get(
        out_sharding=sharding.update(spec=PartitionSpec(*sharding.spec, *[None] * (user.ndim - 1)))
    )


# The user is copied to each of its candidates.


def pool_by_seeds(
    params: Parameters, x: jax.Array, numbers: jax.Array, *, tuned: bool = False
) -> jax.Array:
    """Pools a normalised history by softmax attention from the seeds, for every user."""
    del numbers
    query, key, value = functional.projected(params, params["seeds"], x)
    seeds = jnp.broadcast_to(query, (x.shape[0], *query.shape))
    out = softmax_attention(seeds, key, value, tuned=tuned)
    return functional.merge_heads(out, params["w_out"])


def attend_to_copies(
    params: Parameters,
    queries: jax.Array,
    history: jax.Array,
    index: jax.Array,
    *,
    tuned: bool = False,
) -> jax.Array:
    """Attends from queries, which are normalised, to a copy of the history for every candidate."""
    out = softmax_attention(
        *functional.projected(params, rms_norm(queries), look_up(history, index)), tuned=tuned
    )
    return queries + functional.merge_heads(out, params["w_out"])


def _feed_forward_by_copies(
    params: Parameters, queries: jax.Array, pooled: jax.Array, index: jax.Array, of_all: jax.Array
) -> jax.Array:
    query, memory = rms_norm(queries), look_up(rms_norm(pooled), index)
    out = activated_attention(*functional.projected(params, query, memory))
    return queries + functional.merge_heads(out, params["w_out"]) + of_all[:, None]


def compress_copies(
    params: Parameters,
    rows: jax.Array,
    tokens: jax.Array,
    index: jax.Array,
    *,
    padding: int = 0,
) -> jax.Array:
    """Compresses a copy of the user's rows beside a candidate's, and `padding` rows of zeros."""
    parts, weights = [look_up(rows, index), tokens], [params["w_user"], params["w_cand"]]
    if padding:
        parts.append(jnp.zeros((tokens.shape[0], padding, tokens.shape[2]), tokens.dtype))
        weights.append(jnp.zeros((weights[0].shape[0], padding), tokens.dtype))
    embeddings = jnp.concatenate(parts, axis=1)
    return jnp.einsum("mk,bkn->bmn", jnp.concatenate(weights, axis=1), embeddings)


def _join_copies(
    weight: jax.Array, user: jax.Array, cand: jax.Array, index: jax.Array
) -> jax.Array:
    return jnp.concatenate([look_up(user, index), cand], axis=1) @ weight


MATERIALISED = Strategy(
    pool=pool_by_seeds,
    attend=attend_to_copies,
    feed_forward=_feed_forward_by_copies,
    compress=compress_copies,
    join=_join_copies,
    joins_queries=False,
)


# The ops of this library, which copy no user.


def _projected(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    """Normalises [..., F] and projects it by weights [F, N, H], in one kernel: [..., N, H] each."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    groups = norm_linear(rows, weights, norm="rms")
    return [group.reshape(*x.shape[:-1], *group.shape[1:]) for group in groups]


def _queries(params: Parameters, x: jax.Array) -> jax.Array:
    """Normalises [..., F] and projects it to queries [..., N, H], in one kernel."""
    features, *heads = params["w_query"].shape
    flat = params["w_query"].reshape(features, -1)
    out = gated_linear(None, x.reshape(-1, features), flat, norm="rms")
    return out.reshape(-1, *heads).reshape(*x.shape[:-1], *heads)


def _added(
    params: Parameters, x: jax.Array, heads: jax.Array, of_all: jax.Array | None = None
) -> jax.Array:
    """Adds `x` [B, T, F], the product of heads [B, T, N, H], and [B, F] to all T, in one kernel."""
    rows, weight, residual = (a.reshape(-1, *a.shape[2:]) for a in (heads, params["w_out"], x))
    return gated_linear(None, rows, weight, residual, of_all, norm=None).reshape(x.shape)


def _attend_to_itself_fused(params: Parameters, history: jax.Array) -> jax.Array:
    weights = (params[name] for name in ("w_query", "w_key", "w_value"))
    return _added(params, history, softmax_attention(*_projected(history, *weights), tuned=True))


def _keys_and_values(layer: Any, history: jax.Array) -> tuple[Any, Any]:
    """Projects the history for pooling and for attention, by one kernel."""
    names = ((part, name) for part in ("pma", "attention") for name in ("w_key", "w_value"))
    arrays = _projected(history, *(layer[part][name] for part, name in names))
    return arrays[:2], arrays[2:]


#: A request's index is sorted. Otherwise XLA would copy queries and cotangents for the gradient.
_attended = functools.partial(attention, indices_are_sorted=True)


def _pool(params: Parameters, keys_and_values: Any, numbers: jax.Array) -> jax.Array:
    """Pools by attention from every user's seeds, since all histories have one length."""
    queries = params.get("queries")  # of `ranking.prepare`
    if queries is None:
        queries = functional.project(params["seeds"], params["w_query"])
    # Inside `shard_map`, the seeds' gradients must be summed over users before devices.
    queries, key, value = vary_over_same_axes((queries, *keys_and_values))
    seeds = jnp.broadcast_to(queries, (key.shape[0], *queries.shape))
    return functional.merge_heads(_attended(seeds, key, value, numbers), params["w_out"])


def _attend(
    params: Parameters, queries: jax.Array, keys_and_values: Any, index: jax.Array
) -> jax.Array:
    query = _queries(params, queries)
    return _added(params, queries, _attended(query, *keys_and_values, index))


def _feed_forward(
    params: Parameters, queries: jax.Array, pooled: jax.Array, index: jax.Array, of_all: jax.Array
) -> jax.Array:
    query = _queries(params, queries)
    key, value = _projected(pooled, params["w_key"], params["w_value"])
    (batch, length, *heads), (users, rows, *_) = query.shape, key.shape
    out = gdpa(
        query.reshape(batch * length, *heads),
        key.reshape(users * rows, *heads),
        value.reshape(users * rows, *heads),
        equal_offsets(batch, length),
        equal_offsets(users, rows),
        activation="gelu",
        scale=heads[-1] ** -0.5,
        output_scale=rows**-0.5,
        q_to_kv=index,
        max_seqlen_q=length,
        max_seqlen_kv=rows,
    )
    return _added(params, queries, out.reshape(query.shape), of_all)


def join(
    weight: jax.Array | tuple[jax.Array, jax.Array],
    user: jax.Array,
    cand: jax.Array,
    index: jax.Array,
    look_up: Callable[[jax.Array, jax.Array], jax.Array] = look_up,
) -> jax.Array:
    """Adds products by a weight, which may be split, at both batches in f32; rounds once."""
    if not isinstance(weight, tuple):
        weight = weight[: user.shape[1]], weight[user.shape[1] :]
    of_user, of_cand = weight
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    return (look_up(dot(user, of_user), index) + dot(cand, of_cand)).astype(of_user.dtype)


CO_DESIGNED = Strategy(
    attend_to_itself=_attend_to_itself_fused,
    remember=_keys_and_values,
    pool=_pool,
    attend=_attend,
    feed_forward=_feed_forward,
    compress=functional.compress,
    join=join,
    # Without the barrier, XLA computes the histories of later layers while this layer's compressed
    # rows are live: 370 MiB of temporaries instead of 294 at the default sizes on an H200.
    barrier=jax.lax.optimization_barrier,
)
