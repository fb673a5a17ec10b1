"""Ranks many candidates of many users through the scorer, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from examples.serving import models
from ikbo_jax import serving


def scorer_of(
    source: models.Source,
    candidates: tuple[int, ...],
    users: int,
    new_users: tuple[int, ...],
    *,
    weights: str = "1",
    user_bytes: int = 1 << 28,
) -> serving.Scorer:
    """A scorer of a source."""
    return serving.Scorer(
        source.model,
        source.weights(weights),
        source.user,
        source.candidate,
        buckets=serving.Buckets(candidates, (users,), new_users),
        user_bytes=user_bytes,
        version=weights,
    )


def requests(
    source: models.Source, candidates: int, users: int, seed: int = 0
) -> Iterator[serving.Request]:
    """Requests of so many users with so many candidates in total; each user has one request."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(candidates, np.full(users, 1 / users))
    for user, count in enumerate(counts):
        items = rng.integers(0, source.num_items, count, np.int32)
        yield models.request(source, user % source.num_users, items)


def rank(
    scorer: serving.Scorer,
    source: models.Source,
    candidates: int,
    users: int,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Ranks; the figures, with a digest of the scores."""
    start = time.perf_counter()
    done, total, best = 0, 0.0, -np.inf
    for _, answer in serving.rank_offline(scorer, requests(source, candidates, users)):
        done += len(answer.scores)
        total += float(np.sum(answer.scores, dtype=np.float64))
        best = max(best, float(np.max(answer.scores, initial=-np.inf)))
        progress(done, candidates)
    seconds = time.perf_counter() - start
    counts = scorer.metrics
    return {
        "candidates": done,
        "users": users,
        "seconds": seconds,
        "candidates_per_second": done / seconds,
        "calls": counts.calls,
        "padding_share": counts.padding / max(1, counts.padding + counts.candidates),
        "mean_score": total / max(1, done),
        "largest_score": best,
        "compilations": counts.compilations,
    }
