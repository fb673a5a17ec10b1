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

from ikbo_jax.integers import integer


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
    offsets = cu_seqlens
    if not isinstance(cu_seqlens, jax.core.Tracer):
        offsets = np.asarray(cu_seqlens).astype(np.int64)
    begin, end = offsets[:-1], offsets[1:]
    message = f"{name} decreases from {{begin}} to {{end}} in sequence {{place}}"
    _refuse(end < begin, message, "lengths are negative", begin=begin, end=end)
    lengths = end - begin
    message = f"sequence {{place}} of {name} has {{rows}} rows, but max_seqlen is {max_seqlen}"
    _refuse(_exceeds(lengths, max_length), message, "sequences are longer", rows=lengths)
    if num_targets is not None:
        _check_targets(name, lengths, num_targets)


def _check_targets(name: str, lengths: Any, num_targets: Any) -> None:
    """Checks that every sequence has at most as many targets as rows."""
    _check_range("num_targets", num_targets, 2**31 - 1, "[0, 2147483647]", "numbers")
    if num_targets.shape != lengths.shape:
        raise ValueError(
            f"num_targets has shape {num_targets.shape} but {name} has batch={lengths.size}"
        )
    message = f"sequence {{place}} of {name} has {{rows}} rows but {{targets}} targets"
    # int32 holds both, which may be integers of two kinds.
    has_more = num_targets.astype(np.int32) > lengths.astype(np.int32)
    _refuse(has_more, message, "sequences have too many", rows=lengths, targets=num_targets)


def _check_size(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer of at least 0, or symbolic."""
    if not jax.export.is_symbolic_dim(value):
        integer(name, value)


def _check_range(name: str, values: Any, largest: int, interval: str, plural: str) -> None:
    """Checks 0 <= values <= largest immediately, or under checkify if the values are traced."""
    # A `jax.ShapeDtypeStruct` has a dtype, but no values.
    dtype = getattr(values, "dtype", None) if hasattr(values, "__array__") else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        found = dtype or type(values).__name__
        raise TypeError(f"{name} must be an array of integers, but is {found}")
    place = f"{name}[{{place}}]"
    if isinstance(values, jax.core.Tracer):
        values, place = jnp.ravel(values), f"{name}.ravel()[{{place}}]"
    else:
        values = np.asarray(values)
    message = f"{place} is {{value}}, outside {interval}"
    _refuse((values < 0) | _exceeds(values, largest), message, f"{plural} are", value=values)


def _refuse(is_bad: Any, message: str, counted: str, **values: Any) -> None:
    """Raises ValueError if any of `is_bad` is true, immediately or under checkify if it is traced.

    `message` is a format of the first such place and of `values` there. If it is raised
    immediately, it also says of how many places it is true: these `counted`.
    """
    if is_bad.size == 0:
        return
    if isinstance(is_bad, jax.core.Tracer):
        place = jnp.argmax(is_bad)
        there = {name: jnp.asarray(array)[place] for name, array in values.items()}
        checkify.debug_check(~jnp.any(is_bad), message, place=place, **there)
    elif is_bad.any():
        first = np.unravel_index(np.argmax(is_bad), is_bad.shape)
        there = {name: array[first] for name, array in values.items()}
        text = message.format(place=", ".join(map(str, first)), **there)
        raise ValueError(f"{text}; {is_bad.sum()} of {is_bad.size} {counted}")


def _exceeds(values: Any, bound: int) -> Any:
    """Whether values exceed a bound, which JAX would convert: 300 is 44 in uint8, and -1 is 255."""
    limits = jnp.iinfo(values.dtype)
    if limits.min <= bound <= limits.max:
        return values > bound
    return jnp.full(values.shape, bound < limits.min)
