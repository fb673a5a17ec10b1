"""The tile schedule, with plain integers: who computes what, and how evenly."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from ikbo_jax.pallas.schedule import TileSchedule, make_schedule

#: User tiles, candidate tiles, cost of a user tile in candidate tiles, workers.
EXAMPLES = {
    "nothing": (0, 0, 1.0, 132),
    "one_user_tile": (1, 0, 1.0, 132),
    "one_candidate_tile": (0, 1, 1.0, 132),
    "default_shape": (15 * 2 * 4, 1024 * 2 * 2, 0.7, 132),
    "default_shape_in_clusters": (8 * 2 * 4, 512 * 2 * 2, 0.7, 66),
    "a_user_each": (1024 * 2 * 4, 1024 * 2 * 2, 0.7, 132),
    "one_user": (2 * 4, 10_000 * 2 * 2, 0.7, 132),
    "dear_users": (7, 200, 40.0, 5),
    "dear_users_and_few_candidates": (7, 3, 40.0, 5),
    "cheap_users": (200, 7, 0.01, 5),
    "one_worker": (3, 5, 0.5, 1),
    "more_workers_than_tiles": (2, 3, 0.5, 132),
    "a_wave_each": (132, 132, 1.0, 132),
    "one_short_of_a_wave": (131, 131, 1.0, 132),
    "one_over_a_wave": (133, 133, 1.0, 132),
}

sizes = st.tuples(
    st.integers(0, 400),
    st.integers(0, 1500),
    st.floats(1e-3, 60, allow_nan=False),
    st.integers(1, 150),
)


def for_many_sizes(test):
    """Runs a test for the named examples and for random sizes."""
    for name, example in EXAMPLES.items():
        test = hypothesis.example(example).via(name)(test)
    return hypothesis.settings(max_examples=60)(hypothesis.given(sizes)(test))


def user_tiles(schedule: TileSchedule, worker: int) -> list[int]:
    return [int(schedule.user_tile(worker, i)) for i in range(int(schedule.user_count(worker)))]


def cand_tiles(schedule: TileSchedule, worker: int) -> list[int]:
    return [int(schedule.cand_tile(worker, i)) for i in range(int(schedule.cand_count(worker)))]
