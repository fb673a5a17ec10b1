"""The network `ranking` without this library: an expert's by hand, and copies that are tuned.

Both are strategies of `ikbo_jax.models.ranking` for XLA and cuDNN alone, which the benchmarks
compare with this library's.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.layers import functional
from ikbo_jax.models import ranking, strategies
from ikbo_jax.models.strategies import (
    ALIGNMENT,
    Parameters,
    Strategy,
    activated_attention,
    attend_to_copies,
    compress_copies,
    join,
    pool_by_seeds,
    rms_norm,
    softmax_attention,
)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_f32(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums like `jnp.einsum` in f32; rounds the cotangent to the operands' dtype.

    JAX' own gradient would multiply the f32 cotangent with widened operands: twice the time.
    """
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)


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


def strategy_of(fold: Fold) -> Strategy:
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
        query, key, value = functional.projected(params, rms_norm(queries), keys)
        out = fold.unfold(attention(fold.fold(query), key, value))
        return queries + functional.merge_heads(out, params["w_out"])

    def feed_forward(
        params: Parameters, queries: jax.Array, rows: jax.Array, index: jax.Array, of_all: jax.Array
    ) -> jax.Array:
        attention = functools.partial(activated_attention, product=einsum_f32)
        fed = folded(attention, params, queries, rms_norm(rows), index)
        return fed + of_all[:, None]

    def compress(
        params: Parameters, rows: jax.Array, tokens: jax.Array, index: jax.Array
    ) -> jax.Array:
        # Each product is rounded before the addition: 0.74 ms on an H200, 0.82 ms with f32 sums.
        user = _product_by_hand(padded(params["w_user"], 1), padded(rows, 1))
        return _product_by_hand(padded(params["w_cand"], 1), tokens) + fold.look_up(user)

    def joined(weight: jax.Array, user: jax.Array, cand: jax.Array, index: jax.Array) -> jax.Array:
        return join(weight, user, cand, index, look_up=lambda x, _: fold.look_up(x))

    return Strategy(
        # All layers compress the same tokens: pad them once.
        prepare=lambda tokens: padded(tokens, 1),
        pool=functools.partial(pool_by_seeds, tuned=True),
        attend=functools.partial(folded, functools.partial(softmax_attention, tuned=True)),
        feed_forward=feed_forward,
        compress=compress,
        join=joined,
    )


def hand_optimised(params: dict[str, Any], request: ranking.Request, *, most: int) -> jax.Array:
    """Scores like `ranking.materialised`, as an expert writes it for XLA, without this library.

    User and candidate are compressed separately. The queries of all candidates of a user are folded
    into one sequence, so that attention needs no copies of the keys. A user's candidates beyond
    `most` have NaN.
    """
    fold = fold_by_user(request.cand_to_user, request.history.shape[0], most)
    return ranking.network(params, request, strategy_of(fold))


def _compress_aligned(
    params: Parameters, rows: jax.Array, tokens: jax.Array, index: jax.Array
) -> jax.Array:
    """Compresses copies of users whose embedding rows are padded to aligned ones."""
    padding = -(rows.shape[1] + tokens.shape[1]) % ALIGNMENT
    return compress_copies(params, rows, tokens, index, padding=padding)


_TUNED = strategies.MATERIALISED._replace(
    pool=functools.partial(pool_by_seeds, tuned=True),
    attend=functools.partial(attend_to_copies, tuned=True),
    compress=_compress_aligned,
)


def tuned_copies(params: dict[str, Any], request: ranking.Request) -> jax.Array:
    """Scores by `ranking.materialised` with faster copies: aligned embedding rows, and cuDNN."""
    return ranking.network(params, request, _TUNED)
