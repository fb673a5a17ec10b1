"""A function of one row, mapped over a batch in turns, also over a batch that devices divide."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

#: Rows that are computed in one turn, at most.
_AT_ONCE = 64
#: The largest number of devices over which every batch that they divide stays divided.
_DEVICES = 8


def in_turns(fn: Callable[..., jax.Array], rows: tuple[jax.Array, ...]) -> jax.Array:
    """Computes `jax.vmap(fn)(rows)`, some rows in a turn, in the memory that these need.

    The rows of a turn are spread over the batch, so that each device has its share of them where
    the batch is divided. Of rows that follow each other, as `lax.map` takes them, XLA's partitioner
    gathers the whole batch.
    """
    batch = len(rows[0])
    count = _rows_in_a_turn(batch) if isinstance(batch, int) else 0
    if not count:
        found: jax.Array = lax.map(fn, rows, batch_size=min(_AT_ONCE, batch))
        return found
    turns = [jnp.moveaxis(x.reshape(count, batch // count, *x.shape[1:]), 1, 0) for x in rows]
    found = jnp.moveaxis(lax.map(jax.vmap(fn), tuple(turns)), 0, 1)
    return found.reshape(batch, *found.shape[2:])


def _rows_in_a_turn(batch: int) -> int:
    """Finds a divisor of the batch with as many factors of two as the batch; 0 if too few rows.

    So as many devices, whose number is a power of two, divide the rows of a turn as the batch.
    """
    power = min(batch & -batch, _AT_ONCE)
    if power < _DEVICES:
        return 0
    return max(n for n in range(power, _AT_ONCE + 1, power) if batch % n == 0)
