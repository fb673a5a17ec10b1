"""Turns of two consumer warpgroups: while one issues its products, the other computes."""

from __future__ import annotations

from typing import Any

from ikbo_jax.pallas import accumulator, mosaic, softmax
from ikbo_jax.tuning.configs import NUM_CONSUMERS

#: Named barriers of the consumers' turns, one each.
TURN_BARRIER = 4
CONSUMER_THREADS = NUM_CONSUMERS * softmax.WARPGROUP_SIZE


def take(role: Any) -> None:
    """Waits for the turn of this consumer, `role.consumer`."""
    mosaic.named_barrier("sync", TURN_BARRIER + role.consumer, CONSUMER_THREADS)


def give(role: Any) -> None:
    """Gives the other consumer its turn."""
    mosaic.named_barrier("arrive", TURN_BARRIER + 1 - role.consumer, CONSUMER_THREADS)


def await_scores(role: Any, pending: int = 1) -> None:
    """Waits for the scores, issued before `pending` products; the other consumer may go ahead."""
    if not role.config.late_turns:
        give(role)
    accumulator.wait(pending, interpret=role.interpret)
    if role.config.late_turns:
        give(role)
