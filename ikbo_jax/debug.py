"""Checks of index values, lengths and offsets; ops never call the checks, which cost time.

The checks raise TypeError unless they get an array of integers, and ValueError for a bad value or
size; the message has the position, the value and the bound. They raise immediately for arrays. For
traced values they take effect under `jax.experimental.checkify`: compiled code without it cannot
raise.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify


def check_index(
    cand_to_user: jax.Array | np.ndarray, num_users: int, name: str = "cand_to_user"
) -> None:
    """Checks that every index lies in [0, num_users).

    The ops clamp an index outside the range; this function finds such an index. Negative indices do
    not count from the end.

    Args:
      cand_to_user: integers of any shape; also the `parent` of a `Term`, or `q_to_kv` of `gdpa`.
      num_users: size of the axis that the index points into, at least 0: users, entries of the
        coarser level, or key-value sequences.
      name: the index's name in messages.
    """
    _check_size("num_users", num_users)
    _check_range(name, cand_to_user, num_users - 1, f"[0, {num_users})", "indices")


def check_lengths(key_value_seq_lengths: jax.Array | np.ndarray, kv_len: int) -> None:
    """Checks that every length lies in [0, kv_len].

    `attention` clamps a length outside the range; this function finds such a length.

    Args:
      key_value_seq_lengths: integers of any shape, the number of valid keys of every user.
      kv_len: S, the size of the key axis.
    """
    _check_size("kv_len", kv_len)
    _check_range(
        "key_value_seq_lengths", key_value_seq_lengths, kv_len, f"[0, {kv_len}]", "lengths"
    )


def check_offsets(
    cu_seqlens: jax.Array | np.ndarray,
    total: int,
    max_seqlen: int | None = None,
    name: str = "cu_seqlens",
    *,
    num_targets: jax.Array | np.ndarray | None = None,
) -> None:
    """Checks that offsets lie in [0, total], do not decrease, and are at most `max_seqlen` apart.

    `gdpa` clamps offsets to the range, makes a sequence with decreasing offsets empty, and cuts
    sequences at `max_seqlen_q` and `max_seqlen_kv`; `masks.hstu` clamps targets to a sequence's
    length. This function finds them. It raises at the same time as `check_index`.

    Args:
      cu_seqlens: [batch + 1] integers, the offsets of jagged sequences.
      total: number of rows of the array that the offsets point into.
      max_seqlen: bound of the lengths, or None.
      name: the offsets' name in messages.
      num_targets: [batch] integers, the targets of `masks.hstu`; None: there are none.

    Raises:
      ValueError: offsets have another shape than [batch + 1], lie outside the range, decrease, or
        are too far apart; a sequence has more targets than rows, or a negative number of them; the
        message has the position, the values and the bound.
      TypeError: the offsets, or the numbers of targets, are not an array of integers.
    """
    _check_size("total", total)
    if max_seqlen is not None:
        _check_size("max_seqlen", max_seqlen)
    _check_range(name, cu_seqlens, total, f"[0, {total}]", "offsets")
    if cu_seqlens.ndim != 1 or not cu_seqlens.size:
        raise ValueError(f"{name} must have shape [batch + 1], but has shape {cu_seqlens.shape}")
    max_length = total if max_seqlen is None else max_seqlen
    if num_targets is not None:
        _check_targets(name, cu_seqlens, num_targets)
    if isinstance(cu_seqlens, jax.core.Tracer):
        _check_lengths_traced(name, cu_seqlens, max_length, max_seqlen)
        return
    offsets = np.asarray(cu_seqlens).astype(np.int64)
    lengths = np.diff(offsets)
    decreasing, too_long = np.flatnonzero(lengths < 0), np.flatnonzero(lengths > max_length)
    if decreasing.size:
        i = int(decreasing[0])
        raise ValueError(
            f"{name}[{i + 1}] is {offsets[i + 1]}, below {name}[{i}], which is {offsets[i]}; "
            f"{decreasing.size} of {lengths.size} lengths are negative"
        )
    if too_long.size:
        i = int(too_long[0])
        raise ValueError(
            f"sequence {i} of {name} has {lengths[i]} rows, but max_seqlen is {max_seqlen}; "
            f"{too_long.size} of {lengths.size} sequences are longer"
        )


def _check_targets(name: str, cu_seqlens: Any, num_targets: Any) -> None:
    """Checks that every sequence has at most as many targets as rows."""
    _check_range("num_targets", num_targets, 2**31 - 1, "[0, 2147483647]", "numbers")
    if num_targets.shape != (cu_seqlens.size - 1,):
        raise ValueError(
            f"num_targets has shape {num_targets.shape} but {name} has batch={cu_seqlens.size - 1}"
        )
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    is_above = num_targets > lengths
    if any(isinstance(x, jax.core.Tracer) for x in (cu_seqlens, num_targets)):
        first = jnp.argmax(is_above) if is_above.size else 0
        checkify.debug_check(
            ~jnp.any(is_above),
            f"sequence {{sequence}} of {name} has {{rows}} rows but {{targets}} targets",
            sequence=first,
            rows=lengths[first],
            targets=num_targets[first],
        )
    elif is_above.any():
        first = int(np.argmax(is_above))
        raise ValueError(
            f"sequence {first} of {name} has {lengths[first]} rows but {num_targets[first]} "
            f"targets; {np.sum(is_above)} of {is_above.size} sequences have too many"
        )


def _check_lengths_traced(
    name: str, cu_seqlens: jax.Array, max_length: int, max_seqlen: int | None
) -> None:
    if cu_seqlens.size == 1:
        return
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    is_decreasing = end < begin
    first = jnp.argmax(is_decreasing)
    checkify.debug_check(
        ~jnp.any(is_decreasing),
        f"{name} decreases from {{begin}} to {{end}} in sequence {{sequence}}",
        begin=begin[first],
        end=end[first],
        sequence=first,
    )
    is_long = _exceeds(end - begin, max_length)
    first = jnp.argmax(is_long)
    checkify.debug_check(
        ~jnp.any(is_long),
        f"sequence {{sequence}} of {name} has {{rows}} rows, but max_seqlen is {max_seqlen}",
        sequence=first,
        rows=(end - begin)[first],
    )


def _check_size(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer of at least 0, or symbolic."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or (isinstance(value, int | np.integer) and value < 0):
        raise ValueError(f"{name} must be an integer of at least 0, but is {value!r:.80}")


def _check_range(
    name: str, values: jax.Array | np.ndarray, largest: int, interval: str, plural: str
) -> None:
    """Checks 0 <= values <= largest immediately, or under checkify if the values are traced."""
    if not jnp.issubdtype(getattr(values, "dtype", np.dtype(object)), jnp.integer):
        raise TypeError(
            f"{name} must be an array of integers, but is "
            f"{getattr(values, 'dtype', type(values).__name__)}"
        )
    if values.size == 0:
        return
    if isinstance(values, jax.core.Tracer):
        flat = jnp.ravel(values)
        outside = (flat < 0) | _exceeds(flat, largest)
        first = jnp.argmax(outside)
        checkify.debug_check(
            ~jnp.any(outside),
            f"{name}.ravel()[{{position}}] is {{value}}, outside {interval}",
            value=flat[first],
            position=first,
        )
        return
    array = np.asarray(values)
    outside_at = np.argwhere((array < 0) | (array > largest))
    if len(outside_at):
        position = tuple(int(i) for i in outside_at[0])
        where = ", ".join(map(str, position))
        raise ValueError(
            f"{name}[{where}] is {int(array[position])}, outside {interval}; "
            f"{len(outside_at)} of {array.size} {plural} are"
        )


def _exceeds(values: jax.Array, bound: int) -> jax.Array:
    """Whether values exceed a bound, which JAX would convert: 300 is 44 in uint8, and -1 is 255."""
    limits = jnp.iinfo(values.dtype)
    if limits.min <= bound <= limits.max:
        return values > bound
    return jnp.full(values.shape, bound < limits.min)
