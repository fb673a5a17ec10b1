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
from ikbo_jax.ops.gdpa_arguments import equal_offsets
from ikbo_jax.ops.sharded import vary_over_same_axes

Parameters = functional.Parameters
#: Takes parameters, two arrays at candidate or user batch, and the index `cand_to_user` [B] int32;
#: returns an array at candidate batch.
CandidateOp = Callable[[Parameters, jax.Array, jax.Array, jax.Array], jax.Array]

#: Elements to which a row is padded: 16 bytes of a 16-bit dtype, which tensor cores read at once.
ALIGNMENT = 8
F32 = jnp.float32


class Strategy(NamedTuple):
    """Holds the operations of one version of the network, of parameters and an index.

    Attributes:
      pool: PMA of [U, S, N] for the users' numbers [U] int32; returns [U, pooled, N].
      attend: takes [B, T, N] and [U, S, N]; returns [B, T, N].
      feed_forward: takes [B, T, N] and [U, pooled, N]; returns [B, T, N].
      compress: takes [U, K_user, N] and the result of `prepare`; returns [B, M, N].
      join: first layer of the head; takes the weight [user + cand, hidden], [U, user] and [B,
        cand]; returns [B, hidden].
      prepare: takes candidate tokens [B, K_cand, N]; returns them as `compress` expects them.
      barrier: returns its arrays unchanged; where it is an optimisation barrier, XLA computes all
        of them before any operation that reads one of the results.
    """

    pool: Callable[[Parameters, jax.Array, jax.Array], jax.Array]
    attend: CandidateOp
    feed_forward: CandidateOp
    compress: CandidateOp
    join: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    prepare: Callable[[jax.Array], jax.Array] = lambda tokens: tokens
    barrier: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]] = lambda arrays: arrays


def softmax_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, tuned: bool
) -> jax.Array:
    """Attends by `jax.nn`; with `tuned`, by cuDNN where cuDNN takes dtype and width."""
    narrow = query.dtype in (jnp.bfloat16, jnp.float16)
    fits = query.shape[-1] % ALIGNMENT == 0 and query.shape[-1] <= 128
    cudnn = tuned and narrow and fits and jax.default_backend() == "gpu"
    # `jax.nn` promotes bfloat16 scores to float32; strict promotion, if set, would reject that.
    with jax.numpy_dtype_promotion("standard"):
        out: jax.Array = jax.nn.dot_product_attention(
            query, key, value, implementation="cudnn" if cudnn else None
        )
    return out


def activated_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, tuned: bool = False
) -> jax.Array:
    """Computes gelu(query · keyᵀ / √H) · value / √S with f32 scores.

    With `tuned`, the gradient also multiplies in the arrays' dtype (`einsum_f32`).
    """
    product = einsum_f32 if tuned else functools.partial(jnp.einsum, preferred_element_type=F32)
    scores = product("btnh,bsnh->bnts", query, key)
    weights = jax.nn.gelu(scores * jnp.float32(query.shape[-1] ** -0.5), approximate=False)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)
    return out * jnp.asarray(key.shape[1] ** -0.5, out.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_f32(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums like `jnp.einsum` in f32; rounds the cotangent to the operands' dtype.

    JAX' own gradient would multiply the f32 cotangent with widened operands: twice the time.
    """
    return jnp.einsum(axes, a, b, preferred_element_type=F32)


def _einsum_f32_vjp(
    axes: str, operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = operands
    of_operands, of_result = axes.split("->")
    of_a, of_b = of_operands.split(",")
    d_out = d_out.astype(a.dtype)
    return (
        jnp.einsum(f"{of_result},{of_b}->{of_a}", d_out, b),
        jnp.einsum(f"{of_result},{of_a}->{of_b}", d_out, a),
    )


einsum_f32.defvjp(lambda axes, a, b: (einsum_f32(axes, a, b), (a, b)), _einsum_f32_vjp)


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


def _pool_by_seeds(
    params: Parameters, x: jax.Array, numbers: jax.Array, *, tuned: bool
) -> jax.Array:
    del numbers
    query, key, value = functional.projected(params, params["seeds"], x)
    seeds = jnp.broadcast_to(query, (x.shape[0], *query.shape))
    out = softmax_attention(seeds, key, value, tuned=tuned)
    return functional.merge_heads(out, params["w_out"])


def _attend_to_copies(
    params: Parameters, queries: jax.Array, history: jax.Array, index: jax.Array, *, tuned: bool
) -> jax.Array:
    out = softmax_attention(
        *functional.projected(params, queries, look_up(history, index)), tuned=tuned
    )
    return functional.merge_heads(out, params["w_out"])


def _feed_forward_by_copies(
    params: Parameters, queries: jax.Array, pooled: jax.Array, index: jax.Array
) -> jax.Array:
    out = activated_attention(*functional.projected(params, queries, look_up(pooled, index)))
    return functional.merge_heads(out, params["w_out"])


def _compress_copies(
    params: Parameters, rows: jax.Array, tokens: jax.Array, index: jax.Array, *, tuned: bool
) -> jax.Array:
    parts, weights = [look_up(rows, index), tokens], [params["w_user"], params["w_cand"]]
    padding = -(rows.shape[1] + tokens.shape[1]) % ALIGNMENT if tuned else 0
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
    pool=functools.partial(_pool_by_seeds, tuned=False),
    attend=functools.partial(_attend_to_copies, tuned=False),
    feed_forward=_feed_forward_by_copies,
    compress=functools.partial(_compress_copies, tuned=False),
    join=_join_copies,
)
TUNED = MATERIALISED._replace(
    pool=functools.partial(_pool_by_seeds, tuned=True),
    attend=functools.partial(_attend_to_copies, tuned=True),
    compress=functools.partial(_compress_copies, tuned=True),
)


# The layers of this library, which copy no user.


def _pool(params: Parameters, x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Pools by attention from every user's seeds, since all histories have one length."""
    queries = params.get("queries")  # of `ranking.prepare`
    if queries is None:
        queries = functional.project(params["seeds"], params["w_query"])
    keys = (functional.project(x, params[name]) for name in ("w_key", "w_value"))
    # Inside `shard_map`, the seeds' gradients must be summed over users before devices.
    queries, key, value = vary_over_same_axes((queries, *keys))
    seeds = jnp.broadcast_to(queries, (x.shape[0], *queries.shape))
    out = attention(seeds, key, value, numbers, indices_are_sorted=True)
    assert isinstance(out, jax.Array)
    return functional.merge_heads(out, params["w_out"])


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


def _join(
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
    pool=_pool,
    # A request's index is sorted. Otherwise XLA would copy queries and cotangents for the gradient.
    attend=functools.partial(functional.attend, indices_are_sorted=True),
    feed_forward=_feed_forward,
    compress=functional.compress,
    join=_join,
    # Without the barrier, XLA computes the histories of later layers while this layer's compressed
    # rows are live: 370 MiB of temporaries instead of 294 at the default sizes on an H200.
    barrier=jax.lax.optimization_barrier,
)


# Optimised by hand for XLA, without this library.


class Fold(NamedTuple):
    """Describes a layout in which the candidates of each user are contiguous.

    All moves are gathers, forward and backward: XLA's gradient of a gather would be a scatter.

    Attributes:
      slot: [B] int32, the slot of every candidate; U · slots_per_user or more: it has no slot.
      members: [U · slots_per_user] int32, the candidate of every slot; B for an empty slot.
      cand_to_user: [B] int32, the user of every candidate.
    """

    slot: jax.Array
    members: jax.Array
    cand_to_user: jax.Array
    users: int
    slots_per_user: int

    def fold(self, x: jax.Array) -> jax.Array:
        """Moves [B, T, ...] to [U, slots_per_user · T, ...]; empty slots are zero."""
        slots = move(x, self.members, self.slot, 0.0)
        return slots.reshape(self.users, self.slots_per_user * x.shape[1], *x.shape[2:])

    def unfold(self, x: jax.Array) -> jax.Array:
        """Moves [U, slots_per_user · T, ...] back to [B, T, ...]; NaN without a slot."""
        shape = (self.users * self.slots_per_user, x.shape[1] // self.slots_per_user, *x.shape[2:])
        return move(x.reshape(shape), self.slot, self.members, math.nan)

    def look_up(self, user: jax.Array) -> jax.Array:
        """Takes the user's entry of every candidate, [B, ...] from [U, ...]."""
        return _look_up_folded(user, self.cand_to_user, self.members)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def move(x: jax.Array, source: jax.Array, target: jax.Array, fill: float) -> jax.Array:
    """Takes `x[source]`, `fill` out of range; `target` is the inverse of `source`."""
    return x.at[source].get(mode="fill", fill_value=fill)


move.defvjp(
    lambda x, source, target, fill: (move(x, source, target, fill), target),
    lambda fill, target, d_out: (d_out.at[target].get(mode="fill", fill_value=0.0), None, None),
)


@jax.custom_vjp
def _look_up_folded(user: jax.Array, index: jax.Array, members: jax.Array) -> jax.Array:
    del members
    return user[index]


def _sum_of_candidates(saved: tuple[int, jax.Array], d_out: jax.Array) -> tuple[Any, ...]:
    users, members = saved
    parts = d_out.at[members].get(mode="fill", fill_value=0.0)
    parts = parts.reshape(users, -1, *d_out.shape[1:])
    return jnp.sum(parts, axis=1, dtype=jnp.float32).astype(d_out.dtype), None, None


_look_up_folded.defvjp(
    lambda user, index, members: (user[index], (user.shape[0], members)), _sum_of_candidates
)


def fold_by_user(index: jax.Array, users: int, slots_per_user: int) -> Fold:
    """Makes the layout of `index` [B] int32; a user's candidates beyond the slots get none."""
    order = jnp.argsort(index, stable=True)
    sorted_index = index[order]
    # By comparison: the default method is a loop of log2(B) steps, each a kernel on a GPU.
    first = jnp.searchsorted(
        sorted_index, jnp.arange(users, dtype=index.dtype), method="compare_all"
    ).astype(jnp.int32)
    number = jnp.arange(index.shape[0], dtype=jnp.int32)
    rank = number - first[sorted_index]
    # Candidates without a slot get different numbers, since slots are declared to be unique.
    sorted_slot = jnp.where(
        rank < slots_per_user,
        sorted_index * jnp.int32(slots_per_user) + rank,
        jnp.int32(users * slots_per_user) + number,
    )
    slot = jnp.zeros_like(index).at[order].set(sorted_slot, unique_indices=True)
    members = jnp.full_like(index, index.shape[0], shape=users * slots_per_user)
    members = members.at[slot].set(number, unique_indices=True, mode="drop")
    return Fold(slot, members, index, users, slots_per_user)


@jax.custom_vjp
def _product_by_hand(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies [M, K] by [B, K, N]; the weight's gradient is one product over B and N.

    JAX' own gradient, which contracts two dimensions that are not adjacent, takes 1.5 times as
    long.
    """
    return jnp.einsum("mk,bkn->bmn", weight, x)


def _product_by_hand_vjp(
    operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    weight, x = operands
    rows, columns = (jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1) for a in (d_out, x))
    d_weight = jnp.einsum("mc,kc->mk", rows, columns)
    transposed = jnp.broadcast_to(weight.T, (x.shape[0], *weight.T.shape))
    return d_weight, transposed @ d_out


_product_by_hand.defvjp(
    lambda weight, x: (_product_by_hand(weight, x), (weight, x)), _product_by_hand_vjp
)


def hand_optimised(fold: Fold) -> Strategy:
    """Returns the strategy of an expert who uses XLA and cuDNN alone."""

    def padded(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % ALIGNMENT)
        return jnp.pad(x, widths)

    def folded(
        attention: Callable[..., jax.Array],
        params: Parameters,
        queries: jax.Array,
        keys: jax.Array,
        index: jax.Array,
    ) -> jax.Array:
        query, key, value = functional.projected(params, queries, keys)
        out = fold.unfold(attention(fold.fold(query), key, value, tuned=True))
        return functional.merge_heads(out, params["w_out"])

    def compress(
        params: Parameters, rows: jax.Array, tokens: jax.Array, index: jax.Array
    ) -> jax.Array:
        # Each product is rounded before the addition: 0.74 ms on an H200, 0.82 ms with f32 sums.
        user = _product_by_hand(padded(params["w_user"], 1), padded(rows, 1))
        return _product_by_hand(padded(params["w_cand"], 1), tokens) + fold.look_up(user)

    def join(weight: jax.Array, user: jax.Array, cand: jax.Array, index: jax.Array) -> jax.Array:
        return _join(weight, user, cand, index, look_up=lambda x, _: fold.look_up(x))

    return Strategy(
        # All layers compress the same tokens: pad them once.
        prepare=lambda tokens: padded(tokens, 1),
        pool=functools.partial(_pool_by_seeds, tuned=True),
        attend=functools.partial(folded, softmax_attention),
        feed_forward=functools.partial(folded, activated_attention),
        compress=compress,
        join=join,
    )
