"""`vmap` of generalised dot-product attention: many problems as one, or one after another.

Problems become one by putting their sequences one after another. What lies between the last
sequence of one and the first of the next becomes a sequence as well, which attends to nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences


def can_fold(settings: Settings, size: int, batched: Any) -> bool:
    """Whether `size` problems are one without copies of keys or values."""
    has_own_q = not settings.broadcast_q or not batched.query
    return size > 0 and has_own_q and (has_own_kv(batched) or not _any_kv(batched))


def has_own_kv(batched: Any) -> bool:
    """Whether problems share neither keys nor values."""
    return bool(batched.key and batched.value)


def _any_kv(batched: Any) -> bool:
    return bool(batched.key or batched.value or batched.cu_seqlens_kv)


def fold(size: int, batched: Any, arrays: Arrays, own_kv: bool) -> Arrays:
    """`size` problems, stacked along the leading axis of the arrays that are `batched`, as one.

    Args:
      size: the number of problems, at least 1.
      batched: `Arrays` of bools, which arrays hold `size` problems.
      arrays: the problems.
      own_kv: that keys and values are laid side by side, copied if they are not batched; otherwise
        all problems have the same.
    """

    def of_first(array: jax.Array, is_batched: bool) -> jax.Array:
        return array[0] if is_batched else array

    def side_by_side(array: jax.Array, is_batched: bool) -> jax.Array:
        return stack(size, array, is_batched).reshape(-1, *array.shape[1 + is_batched :])

    def offsets(cu: jax.Array, is_batched: bool, total: int) -> jax.Array:
        """[size * (batch + 1) + 1]: with a sequence of what lies past each problem's last one."""
        # Clamp first: an offset past one problem's rows would land in the next one's.
        inside = jax.lax.cummax(jnp.clip(stack(size, cu, is_batched), 0, total), axis=1)
        shifted = inside + jnp.arange(size, dtype=jnp.int32)[:, None] * total
        return jnp.append(shifted.reshape(-1), jnp.int32(size * total))

    one: Arrays = jax.tree.map(of_first, arrays, batched)
    query, key, value, cu_q, cu_kv, index = arrays
    batch, batch_kv = num_sequences(one), one.cu_seqlens_kv.shape[0] - 1
    if index is None:
        index = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32), (size, batch))
    else:
        index = jnp.clip(stack(size, index, batched.q_to_kv), 0, batch_kv - 1)
    if own_kv:
        key, value = side_by_side(key, batched.key), side_by_side(value, batched.value)
        cu_kv = offsets(cu_kv, batched.cu_seqlens_kv, one.key.shape[0])
        index = index + jnp.arange(size, dtype=jnp.int32)[:, None] * (batch_kv + 1)
    if cu_q is not None:
        query = side_by_side(query, batched.query)
        cu_q = offsets(cu_q, batched.cu_seqlens_q, one.query.shape[0])
        # The last sequence of keys is empty: queries between problems attend to nothing.
        cu_kv = jnp.append(cu_kv, jnp.full(2, key.shape[0], jnp.int32))
        nothing = jnp.full((size, 1), cu_kv.shape[0] - 2, jnp.int32)
        index = jnp.concatenate((index, nothing), axis=1)
    return Arrays(query, key, value, cu_q, cu_kv, index.reshape(-1))


def stack(size: int, array: jax.Array, is_batched: bool) -> jax.Array:
    """`array` with a leading axis of `size`, which it has if it is batched."""
    return array if is_batched else jnp.broadcast_to(array, (size, *array.shape))


def unfold(size: int, results: Any) -> Any:
    """Results of a folded problem, with a leading axis of `size` problems."""
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
