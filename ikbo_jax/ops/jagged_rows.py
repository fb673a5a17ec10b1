"""Appends new rows to every sequence of jagged arrays."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ikbo_jax.ops.look_up import look_up
from ikbo_jax.reference import jagged


def append(
    held: Sequence[jax.Array],
    cu_held: jax.Array,
    new: Sequence[jax.Array],
    cu_new: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """Appends the rows of each new sequence to the held sequence of the same number.

    Args:
      held: arrays [total_held, ...].
      cu_held: [batch + 1] int32, offsets as in `ikbo_jax.gdpa`.
      new: as many arrays [total_new, ...].
      cu_new: [batch + 1] int32.

    Returns:
      Arrays [total_held + total_new, ...] without rows between sequences, and their offsets. Rows
      after the last sequence hold anything; their gradients should be 0.
    """
    joined = [jnp.concatenate(pair) for pair in zip(held, new, strict=True)]
    if cu_new.shape[0] == 1:  # there is no sequence, and so no number of one
        return joined, jnp.zeros_like(cu_new)
    held_rows, new_rows = held[0].shape[0], new[0].shape[0]
    held_start, held_length = jagged.bounds(cu_held, held_rows, None)
    new_start, new_length = jagged.bounds(cu_new, new_rows, None)
    length = held_length + new_length
    end = jnp.cumsum(length)
    row = jnp.arange(held_rows + new_rows, dtype=jnp.int32)
    sequence = jnp.minimum(jagged.search_right(end, row), length.shape[0] - 1)
    place = row - (end - length)[sequence]
    further = place - held_length[sequence]
    index = jnp.where(
        further < 0, held_start[sequence] + place, held_rows + new_start[sequence] + further
    )
    return [look_up(rows, index) for rows in joined], jnp.pad(end, (1, 0))
