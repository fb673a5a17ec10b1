"""The tile schedule: every tile once, users from below, candidates from above, evenly."""

from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ikbo_jax.pallas.hopper import schedule as schedules
from ikbo_jax.pallas.hopper.schedule import TileSchedule, make_schedule

#: User tiles, candidate tiles, cost of a user tile in candidate tiles, workers.
Sizes = tuple[int, int, float, int]


def assignments(schedule: TileSchedule) -> tuple[list[list[int]], list[list[int]]]:
    """User tiles and candidate tiles of every worker, in order; NumPy is faster than JAX here."""
    workers = range(schedule.num_workers)
    with mock.patch.object(schedules, "jnp", np):
        users = [
            [int(schedule.user_tile(w, i)) for i in range(schedule.user_count(w))] for w in workers
        ]
        cands = [
            [int(schedule.cand_tile(w, i)) for i in range(schedule.cand_count(w))] for w in workers
        ]
    return users, cands


def assert_waves(each: list[list[int]]) -> None:
    """Wave by wave, without gaps; the first of the workers have a tile more than the others."""
    counts = [len(tiles) for tiles in each]
    assert counts == sorted(counts, reverse=True)
    for i in range(max(counts)):
        wave = [tiles[i] for tiles in each if len(tiles) > i]
        assert wave == list(range(wave[0], wave[0] + len(wave)))


@hypothesis.given(
    sizes=st.tuples(
        st.integers(0, 400), st.integers(0, 1500), st.floats(1e-3, 60), st.integers(1, 150)
    )
)
@hypothesis.settings(max_examples=100)
@hypothesis.example(sizes=(15 * 2 * 4, 1024 * 2 * 2, 0.7, 132))  # the default shape
@hypothesis.example(sizes=(1024 * 2 * 4, 1024 * 2 * 2, 0.7, 132))  # a user each
@hypothesis.example(sizes=(2 * 4, 10_000 * 2 * 2, 0.7, 132))  # one user
@hypothesis.example(sizes=(132, 132, 1.0, 132))
def test_every_tile_is_computed_once_users_first_and_evenly(sizes: Sizes) -> None:
    """Who waits for user tiles waits for workers that were dispatched no later than it was.

    Users belong to the lowest workers, candidates are handed out from the top.
    """
    user_tiles, cand_tiles, user_cost, workers = sizes
    schedule = make_schedule(*sizes)
    assert schedule.num_workers == max(1, min(workers, user_tiles + cand_tiles))
    assert 0 <= schedule.rest_from < schedule.num_workers
    users, cands = assignments(schedule)
    assert sorted(sum(users, [])) == list(range(user_tiles))
    assert sorted(sum(cands, [])) == list(range(cand_tiles))
    assert_waves(users)
    assert len(users[0]) - len(users[-1]) <= 1
    assert_waves(cands[::-1])
    assert all(tiles == sorted(tiles) for tiles in cands)
    ends = [len(u) * user_cost + len(c) for u, c in zip(users, cands, strict=True)]
    # No schedule ends before all workers would if tiles could be split, nor before the user tiles.
    evenly = (user_tiles * user_cost + cand_tiles) / schedule.num_workers
    users_alone = -(-user_tiles // schedule.num_workers) * user_cost
    assert max(ends) <= max(evenly, users_alone) + 1 + 1e-6


@pytest.mark.parametrize(("workers", "count"), [(1, 5), (3, 0), (3, 2), (3, 7), (4, 8), (4, 14)])
def test_back_and_forth_takes_every_task_once_and_no_worker_always_first(workers, count) -> None:
    shares = [int(schedules.back_and_forth_share(w, workers, count)) for w in range(workers)]
    tasks = [
        [int(schedules.back_and_forth(w, workers, i)) for i in range(shares[w])]
        for w in range(workers)
    ]
    assert sorted(sum(tasks, [])) == list(range(count))
    if count % (2 * workers) == 0:  # work that falls by one from task to task is shared equally
        assert len({sum(own) for own in tasks}) == 1
