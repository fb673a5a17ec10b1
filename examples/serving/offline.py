"""Ranks many candidates of many users through the scorer, without an engine."""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from examples.serving import models, records
from ikbo_jax import serving

#: Calls that may be under way before the first one is waited for.
AHEAD = 2


class Job(NamedTuple):
    """What is ranked.

    Attributes:
      users: [n] int64, ids.
      counts: [n] int64, number of candidates of every user.
      items: [B] int32, the users' candidates in the order of the users.
    """

    users: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]


def job(source: models.Source, candidates: int, users: int, seed: int = 0) -> Job:
    """So many users with so many candidates in total."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(candidates, np.full(users, 1 / users))
    items = rng.integers(0, source.num_items, candidates, np.int32)
    return Job(np.arange(users) % source.num_users, counts, items)


def rank(
    scorer: serving.Scorer,
    source: models.Source,
    candidates: int,
    users: int,
) -> dict[str, Any]:
    """Ranks; the figures, with a digest of the scores.

    The time is that from ids of users and items in NumPy arrays to scores in NumPy arrays. Users'
    features come from the source: `RandomSource` reads them from a table that is ready before.
    """
    asked = job(source, candidates, users)
    source.features_of(asked.users[:1])
    before, start = scorer.metrics, time.perf_counter()
    done, total, best = 0, 0.0, -np.inf
    items = models.candidates(source, asked.items)
    for rows, scores in serving.rank_arrays(scorer, asked.users, asked.counts, items, ahead=AHEAD):
        done = rows.stop
        total += float(np.sum(scores, dtype=np.float64))
        best = max(best, float(np.max(scores)))
    seconds = time.perf_counter() - start
    after = scorer.metrics
    padding = after.padding - before.padding
    return {
        "candidates": done,
        "users": users,
        "seconds": seconds,
        "candidates_per_second": done / seconds,
        "calls": after.calls - before.calls,
        "padding_share": padding / max(1, padding + done),
        "mean_score": total / max(1, done),
        "largest_score": best,
        "compilations": after.compilations - before.compilations,
    }


def bound(source: models.Source, weights: str, buckets: serving.Buckets) -> Callable[[int], None]:
    """The model's two functions alone, at the largest bucket: one program, compiled.

    Returns:
      A function that takes a number of calls and waits for all of them; all arrays are on the
      device before the first call.
    """
    candidates, users = buckets.largest
    model = source.model

    @jax.jit
    def program(weights: Any, features: Any, candidates: Any, cand_to_user: Any) -> jax.Array:
        state = model.encode_users(weights, features)
        return model.score(weights, state, candidates, cand_to_user)

    rng = np.random.default_rng(0)
    features = source.features_of(np.arange(users) % source.num_users)
    arrays = jax.device_put(
        (
            source.weights(weights),
            features,
            source.candidates(rng.integers(0, source.num_items, candidates, np.int32)),
            np.sort(rng.integers(0, users, candidates, np.int32)),
        )
    )
    jax.block_until_ready(program(*arrays))

    def run(calls: int) -> None:
        waiting: collections.deque[jax.Array] = collections.deque()
        for _ in range(calls):
            waiting.append(program(*arrays))
            if len(waiting) > AHEAD:
                np.asarray(waiting.popleft())
        for scores in waiting:
            np.asarray(scores)

    return run


def compare(
    scorer: serving.Scorer, source: models.Source, candidates: int, users: int, turns: int
) -> dict[str, Any]:
    """Ranks, by turns with as many calls of `bound`; the figures of the last turn.

    `share_of_bound` is the median, over the turns, of the bound's seconds over the ranking's;
    `cpu_share_of_bound` is the same of CPU time, which other processes disturb less.
    """
    ranking, alone, figures = records.Times(), records.Times(), {}
    run_alone = bound(source, str(scorer.metrics.weights), scorer.buckets)
    for _ in range(turns):
        # Every turn encodes all users.
        scorer.forget_users()
        with ranking.measured():
            figures = rank(scorer, source, candidates, users)
        with alone.measured():
            run_alone(figures["calls"])
    shares = np.divide(alone.seconds, ranking.seconds).tolist()
    return {
        **figures,
        "shares": shares,
        "share_of_bound": statistics.median(shares),
        "cpu_share_of_bound": float(np.median(np.divide(alone.cpu_seconds, ranking.cpu_seconds))),
    }
