"""Ranking offline: many requests in full calls."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.base import Answer, BatchScorer, PendingScores, Scores
from ikbo_jax.serving.batches import (
    Buckets,
    Form,
    Request,
    Tree,
    check_counts,
    check_hashable,
    check_size,
    fitting_parts,
)
from ikbo_jax.serving.scorer import Scorer


def rank_offline(
    scorer: BatchScorer, requests: Iterable[Request], *, ahead: int = 2
) -> Iterator[tuple[int, Answer]]:
    """Scores many requests in full batches; the host prepares calls while the device computes.

    Args:
      scorer: the scorer.
      requests: requests, read as they are needed. Batches are fullest if requests of one user
        follow one another.
      ahead: number of calls that are started before the first call is waited for.

    Yields:
      The position of a request, and its answer; requests of a batch in any order.

    Raises:
      BadRequestError: if a request does not fit the model.
      ValueError: if `ahead` is no integer of at least 0.
    """
    parts = (
        zip(*x, strict=True) for x in fitting_parts(_countable(scorer, requests), scorer.buckets)
    )
    started = ((positions, scorer.start(chosen)) for positions, chosen in parts)
    for positions, pending in _later(started, ahead):
        for position, answer in zip(positions, pending.answers(), strict=True):
            if isinstance(answer, Exception):
                raise answer
            yield position, answer


def _later[Call](started: Iterable[Call], ahead: int) -> Iterator[Call]:
    """Yields a call when `ahead` further calls have started, or all."""
    check_size("ahead", ahead, 0)
    waiting: collections.deque[Call] = collections.deque()
    for call in started:
        waiting.append(call)
        if len(waiting) > ahead:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _countable(scorer: BatchScorer, requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
    """Numbers the requests; raises BadRequestError if a request cannot be counted."""
    for entry in enumerate(requests):
        try:
            hash(entry[1].key)
            entry[1].size  # noqa: B018 - kept by the request
        except Exception:
            scorer.check(entry[1])  # raises the error with a message
            raise
        yield entry


def rank_arrays(
    scorer: Scorer,
    users: npt.NDArray[Any] | Sequence[Hashable],
    counts: npt.ArrayLike,
    candidates: Tree,
    *,
    version: Hashable = 0,
    ahead: int = 2,
) -> Iterator[tuple[slice, Scores]]:
    """Scores many users' candidates in arrays, without a `Request` for each user.

    With a scorer made with `joint=True`, every call runs one program, which encodes the call's
    users: no state is written to the user cache or read from it, and a user who occurs in several
    calls is encoded in each of them. With another scorer, users without a state are encoded and
    kept in the user cache as for requests.

    Args:
      scorer: a scorer with `features_of`, and best with `joint=True`.
      users: ids of n users; a NumPy array or a sequence. One may occur several times.
      counts: [n] integers, number of candidates of every user; may be 0.
      candidates: a tree of arrays [B, ...], the users' candidates in the order of the users.
      version: the version of the users' features.
      ahead: number of calls that are started before the first call is waited for.

    Yields:
      For every call, in order, the scored candidates, as a slice, and their scores
      [stop - start, ...].

    Raises:
      BadRequestError: before the first call, if the candidates' structure, shape or dtype is not
        what the model expects, their number is not the sum of `counts`, users and counts differ in
        number, a user is not hashable, or a count is negative or larger than the largest bucket.
      ValueError: if `ahead` is no integer of at least 0.
      Exception: whatever the scorer's `features_of` raises.
    """
    ids = users.tolist() if isinstance(users, np.ndarray) else list(users)
    sizes = np.asarray(counts)
    check_hashable([(user, version) for user in ids])
    leaves = Form(scorer.specs.candidate, "candidates").leaves_of(candidates, stacked=True)
    check_counts(sizes, len(ids), len(leaves[0]), scorer.buckets)
    asked = np.flatnonzero(sizes)
    if len(asked) < len(ids):
        ids, sizes = [ids[n] for n in asked.tolist()], sizes[asked]

    def started() -> Iterator[tuple[slice, PendingScores]]:
        for first, last, rows in _full_calls(sizes, scorer.buckets):
            part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], candidates)
            counted = ids[first:last], sizes[first:last]
            yield rows, scorer.start_arrays(*counted, part, version=version)

    for rows, pending in _later(started(), ahead):
        yield rows, pending.scores()


def _full_calls(
    counts: npt.NDArray[np.integer], buckets: Buckets
) -> Iterator[tuple[int, int, slice]]:
    """Yields the users [first, last) of every call, and the slice of their candidates."""
    most_candidates, most_users = buckets.largest
    ends = np.cumsum(counts)
    first, start = 0, 0
    while first < len(counts):
        fitting = int(np.searchsorted(ends, start + most_candidates, side="right"))
        last = min(first + most_users, fitting)
        stop = int(ends[last - 1])
        yield first, last, slice(start, stop)
        first, start = last, stop
