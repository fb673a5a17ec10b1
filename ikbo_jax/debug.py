"""Checks that cost time and so never run unasked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify


def check_index(cand_to_user: jax.Array | np.ndarray, num_users: int) -> None:
    """Checks that every index lies in [0, num_users).

    The ops clamp an index outside that range, so that nothing is read out of bounds; this finds it.
    Negative indices do not count from the end. Called with arrays, it raises at once. Called on
    traced values it takes effect under `jax.experimental.checkify`; inside a plain `jax.jit`, which
    has no way to raise, it does nothing.

    Args:
      cand_to_user: integers of any shape; for a multi-level term its `parent`.
      num_users: rows of the array that the index points into, at least 0.

    Raises:
      ValueError: an index is out of range; names the position, the value and the bound.
      TypeError: the index is not an array of integers.
    """
    _check_range("cand_to_user", cand_to_user, num_users - 1, f"[0, {num_users})", "indices")


def check_lengths(key_value_seq_lengths: jax.Array | np.ndarray, kv_len: int) -> None:
    """Checks that every length lies in [0, kv_len].

    `attention` clamps a length outside that range; this finds it. When and how it raises is as for
    `check_index`.

    Args:
      key_value_seq_lengths: integers of any shape, the numbers of keys that users have.
      kv_len: S, the keys that the arrays have room for.

    Raises:
      ValueError: a length is out of range; names the position, the value and the bound.
      TypeError: the lengths are not an array of integers.
    """
    _check_range(
        "key_value_seq_lengths", key_value_seq_lengths, kv_len, f"[0, {kv_len}]", "lengths"
    )


def _check_range(
    name: str, values: jax.Array | np.ndarray, largest: int, interval: str, plural: str
) -> None:
    """Checks 0 <= values <= largest at once, or under checkify if they are traced."""
    if not jnp.issubdtype(getattr(values, "dtype", np.dtype(object)), jnp.integer):
        raise TypeError(
            f"{name} must be an array of integers, but is "
            f"{getattr(values, 'dtype', type(values).__name__)}"
        )
    if values.size == 0:
        return
    if isinstance(values, jax.core.Tracer):
        flat = jnp.ravel(values)
        outside = (flat < 0) | (flat > largest)
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
