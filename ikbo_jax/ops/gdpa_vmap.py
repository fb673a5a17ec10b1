"""`vmap` of generalised dot-product attention: folds many problems into one.

Folding concatenates the sequences of the problems. It appends one filler sequence per problem for
the rows after its last sequence; the queries of a filler sequence attend to no keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.ops.stacking import concatenate, stack
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences


def folds_keys(settings: Settings, batched: Any) -> bool | None:
    """Whether problems that are folded have keys of their own; None: folding would copy some."""
    if settings.broadcast_q and batched.query:
        return None
    if batched.key and batched.value:
        return True
    return None if batched.key or batched.value or batched.cu_seqlens_kv else False


def fold(size: int, batched: Any, arrays: Arrays, fold_kv: bool) -> Arrays:
    """Joins `size` problems' arrays into one problem's; `batched` as in `Op.fold`.

    With `fold_kv` keys and values are concatenated, and copied for every problem if they are not
    batched; else all problems share them.
    """
    concatenated = functools.partial(concatenate, size)

    def offsets(cu: jax.Array, is_batched: bool, total: int) -> jax.Array:
        """Appends a filler sequence for each problem's trailing rows: [size * (batch + 1) + 1]."""
        # Clamp before the shift: an offset outside one problem's rows would otherwise point to
        # rows of another problem.
        inside = jax.lax.cummax(jnp.clip(stack(size, cu, is_batched), 0, total), axis=1)
        shifted = inside + jnp.arange(size, dtype=jnp.int32)[:, None] * total
        return jnp.append(shifted.reshape(-1), jnp.int32(size * total))

    first: Arrays = jax.tree.map(lambda x, is_batched: x[0] if is_batched else x, arrays, batched)
    query, key, value, cu_q, cu_kv, index, intervals, *_ = arrays
    batch, batch_kv = num_sequences(first), first.cu_seqlens_kv.shape[0] - 1
    if index is None:
        index = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32), (size, batch))
    else:
        index = jnp.clip(stack(size, index, batched.q_to_kv), 0, batch_kv - 1)
    if fold_kv:
        key, value = concatenated(key, batched.key), concatenated(value, batched.value)
        cu_kv = offsets(cu_kv, batched.cu_seqlens_kv, first.key.shape[0])
        index = index + jnp.arange(size, dtype=jnp.int32)[:, None] * (batch_kv + 1)
    if cu_q is not None:
        query = concatenated(query, batched.query)
        cu_q = offsets(cu_q, batched.cu_seqlens_q, first.query.shape[0])
        # Appends an empty key-value sequence, to which the filler sequences of queries point.
        cu_kv = jnp.append(cu_kv, jnp.full(2, key.shape[0], jnp.int32))
        empty = jnp.full((size, 1), cu_kv.shape[0] - 2, jnp.int32)
        index = jnp.concatenate((index, empty), axis=1)
    intervals = concatenated(intervals, batched.intervals)
    return Arrays(query, key, value, cu_q, cu_kv, index.reshape(-1), intervals)
