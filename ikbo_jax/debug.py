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
    if not jnp.issubdtype(getattr(cand_to_user, "dtype", np.dtype(object)), jnp.integer):
        raise TypeError(
            "cand_to_user must be an array of integers, but is "
            f"{getattr(cand_to_user, 'dtype', type(cand_to_user).__name__)}"
        )
    if cand_to_user.size == 0:
        return
    if isinstance(cand_to_user, jax.core.Tracer):
        flat = jnp.ravel(cand_to_user)
        outside = (flat < 0) | (flat >= num_users)
        first = jnp.argmax(outside)
        checkify.debug_check(
            ~jnp.any(outside),
            f"cand_to_user.ravel()[{{position}}] is {{value}}, outside [0, {num_users})",
            value=flat[first],
            position=first,
        )
        return
    index = np.asarray(cand_to_user)
    outside_at = np.argwhere((index < 0) | (index >= num_users))
    if len(outside_at):
        position = tuple(int(i) for i in outside_at[0])
        where = ", ".join(map(str, position))
        raise ValueError(
            f"cand_to_user[{where}] is {int(index[position])}, outside [0, {num_users}); "
            f"{len(outside_at)} of {index.size} indices are"
        )
