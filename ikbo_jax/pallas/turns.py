"""Turns of two consumer warpgroups: while one issues its products, the other computes."""

from __future__ import annotations

from typing import Any

from ikbo_jax.pallas import accumulator, mosaic, softmax
from ikbo_jax.tuning.configs import NUM_CONSUMERS

#: Named barriers of the consumers' turns, one each.
TURN_BARRIER = 4
CONSUMER_THREADS = NUM_CONSUMERS * softmax.WARPGROUP_SIZE


def take(ctx: Any) -> None:
    """Waits for the turn of this consumer, `role.consumer`."""
    mosaic.named_barrier("sync", TURN_BARRIER + ctx.consumer, CONSUMER_THREADS)


def hand_over(ctx: Any) -> None:
    """Gives the other consumer its turn."""
    mosaic.named_barrier("arrive", TURN_BARRIER + 1 - ctx.consumer, CONSUMER_THREADS)


def await_scores(ctx: Any, pending: int = 1) -> None:
    """Waits for the scores, issued before `pending` products; the other consumer may go ahead."""
    if not ctx.config.late_turns:
        hand_over(ctx)
    accumulator.wait(pending, interpret=ctx.interpret)
    if ctx.config.late_turns:
        hand_over(ctx)
