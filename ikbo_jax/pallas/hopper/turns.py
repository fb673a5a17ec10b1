"""Ping-pong scheduling: one consumer warpgroup issues its products while the other computes."""

from typing import Any

import jax.numpy as jnp

from ikbo_jax.pallas.hopper import mma, mosaic
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WARPGROUP_SIZE

#: First of two named barriers, one for each consumer's turn.
TURN_BARRIER = 4
CONSUMER_THREADS = NUM_CONSUMERS * WARPGROUP_SIZE


def synchronise_consumers() -> None:
    """Waits for the other consumer; then each sees the other's writes to shared memory."""
    mosaic.named_barrier("sync", jnp.int32(TURN_BARRIER), CONSUMER_THREADS)


def take(ctx: Any) -> None:
    """Waits for the turn of this consumer, `ctx.consumer`."""
    mosaic.named_barrier("sync", TURN_BARRIER + ctx.consumer, CONSUMER_THREADS)


def hand_over(ctx: Any) -> None:
    """Hands the turn to the other consumer."""
    mosaic.named_barrier("arrive", TURN_BARRIER + 1 - ctx.consumer, CONSUMER_THREADS)


def await_scores(ctx: Any, pending: int = 1) -> None:
    """Waits for scores issued before the last `pending` products, and hands over the turn.

    The turn goes to the other consumer before the wait, or after it with `late_turns`.
    """
    if not ctx.config.late_turns:
        hand_over(ctx)
    mma.wait(pending)
    if ctx.config.late_turns:
        hand_over(ctx)
