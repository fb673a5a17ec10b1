"""Arguments of generalised dot-product attention: their checks, and folding for `vmap`.

Errors quote both conflicting values. Folding concatenates the sequences of several problems, with a
filler sequence for the rows after each problem's last one, whose queries attend to no keys.
"""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.integers import integer
from ikbo_jax.ops import arguments
from ikbo_jax.ops.stacking import concatenate, stack
from ikbo_jax.reference.activations import ACTIVATIONS, APPROXIMATIONS
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences


def settings(
    arrays: Arrays,
    activation: str | tuple[str, ...],
    approx: str | None,
    scale: float,
    output_scale: float | jax.Array,
    broadcast_q: bool,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    logit_cap: float | None,
) -> Settings:
    """Checks all arguments of `gdpa`; raises ValueError, quoting both conflicting values.

    Of an `output_scale` for each sequence, the settings have the scale 1.
    """
    broadcast_q = arguments.flag("broadcast_q", broadcast_q)
    arguments.check_attention("gdpa", arrays[:3], "total_q N H", "total_kv K H")
    check_sequences(arrays, broadcast_q)
    rows = arrays.query.shape[0]
    activations = activations_of(activation, arrays.query.shape[1])
    check_approx(approx, activations)
    if has_scales(output_scale):
        check_scales(output_scale, num_sequences(arrays))
        output_scale = 1.0
    scales = (
        arguments.finite_number("scale", scale),
        arguments.finite_number("output_scale", output_scale),
    )
    most_q = bound("max_seqlen_q", max_seqlen_q, rows)
    most_kv = bound("max_seqlen_kv", max_seqlen_kv, arrays.key.shape[0])
    if broadcast_q and most_q is not None and most_q < rows:
        raise ValueError(
            f"max_seqlen_q is {most_q} but every sequence has the query's T={rows} rows"
        )
    cap = arguments.logit_cap(logit_cap)
    return Settings(activations, approx, *scales, cap, broadcast_q, most_q, most_kv)


def has_scales(output_scale: Any) -> TypeGuard[jax.Array]:
    """Whether `output_scale` is an array with a scale for each sequence, and not a number."""
    return getattr(output_scale, "ndim", 0) > 0


def check_scales(output_scale: Any, batch: int) -> None:
    """Raises ValueError unless `output_scale` is [batch] float32."""
    if output_scale.dtype != jnp.float32:
        raise ValueError(
            "output_scale must be a number or a float32 array, "
            f"but is {arguments.describe(output_scale)}"
        )
    if output_scale.shape != (batch,):
        raise ValueError(
            f"output_scale has shape {output_scale.shape} but the queries have batch={batch} "
            "sequences"
        )


def check_sequences(arrays: Arrays, broadcast_q: bool) -> None:
    """Raises ValueError, quoting both conflicting values, unless offsets and index agree."""
    cu_q, cu_kv, index = arrays[3:6]
    if broadcast_q and cu_q is not None:
        raise ValueError(
            "with broadcast_q=True every sequence has all queries, so cu_seqlens_q must be None, "
            f"but is {arguments.describe(cu_q)}"
        )
    if not broadcast_q:
        arguments.check_offsets("cu_seqlens_q", "batch", cu_q)
    arguments.check_offsets("cu_seqlens_kv", "batch_kv", cu_kv)
    batch_kv = cu_kv.shape[0] - 1
    if index is not None:
        if cu_q is None:
            arguments.check_int32("q_to_kv", index)
            if index.ndim != 1:
                raise ValueError(f"q_to_kv must have shape [batch], but has shape {index.shape}")
        else:
            arguments.check_index("q_to_kv", index, "cu_seqlens_q", "batch", cu_q.shape[0] - 1)
        if index.size and not batch_kv:
            raise ValueError(
                f"cu_seqlens_kv has no sequences, shape {cu_kv.shape}, but q_to_kv has "
                f"batch={index.size}"
            )
    elif cu_q is not None and cu_q.shape != cu_kv.shape:
        raise ValueError(
            f"cu_seqlens_q has batch={cu_q.shape[0] - 1} sequences but cu_seqlens_kv has "
            f"batch_kv={batch_kv}; pass q_to_kv, the key-value sequence of every query sequence"
        )


def activations_of(activation: str | tuple[str, ...], heads: int) -> tuple[str, ...]:
    """Returns a name for each head; raises ValueError for unknown names or another number."""
    names = activation if isinstance(activation, (tuple, list)) else (activation,) * max(heads, 1)
    for name in names:
        arguments.check_name("activation", name, ACTIVATIONS)
    if isinstance(activation, (tuple, list)) and len(names) != heads:
        raise ValueError(f"activation has {len(names)} names but query has N={heads} heads")
    return tuple(names)


def equal_offsets(sequences: int, length: int) -> jax.Array:
    """Offsets [sequences + 1] int32 of sequences that all have `length` rows."""
    if isinstance(sequences, int) and isinstance(length, int):
        # Tracing this takes a third of the time of `jnp.arange`.
        return lax.mul(lax.iota(jnp.int32, sequences + 1), np.int32(length))
    return jnp.arange(sequences + 1, dtype=jnp.int32) * jnp.int32(length)


def check_approx(approx: str | None, activations: tuple[str, ...]) -> None:
    """Raises ValueError unless `approx` is None, or known and applies to one of the activations."""
    arguments.check_name("approx", approx, (None, *APPROXIMATIONS))
    if approx is not None and not set(APPROXIMATIONS[approx]) & set(activations):
        raise ValueError(
            f"approx={approx!r} applies to {' and '.join(APPROXIMATIONS[approx])}, but activation "
            f"is {', '.join(dict.fromkeys(activations))}"
        )


def bound(name: str, value: int | None, rows: int) -> int | None:
    """Cuts a bound of lengths to `rows`; raises ValueError unless it is an integer of at least 0.

    The device adds the bound to int32 offsets: a sum of at most twice the rows is an int32, too.
    """
    if value is None:
        return None
    return min(integer(name, value), rows if isinstance(rows, int) else 2**31 - 1)


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
