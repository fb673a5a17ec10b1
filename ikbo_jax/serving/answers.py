"""The answers of a scorer, and its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy.typing as npt

from ikbo_jax.serving.batches import Batch

if TYPE_CHECKING:
    from ikbo_jax.serving.base import BatchScorer

Scores = npt.NDArray[Any]


class Metrics(NamedTuple):
    """Counts since the scorer was made.

    Attributes:
      calls: number of calls of a program that scores.
      requests: number of requests in these calls.
      candidates: number of candidates in these calls.
      padding: number of candidates that were added to fill buckets.
      hits: number of users whose state, or history, was in the cache.
      misses: number of users whose state, or history, had to be computed.
      evictions: number of states, or histories, that the cache dropped to make room.
      compilations: number of programs that this process has compiled, or loaded from the cache
        folder, since the scorer was ready. It stays 0.
      weights: the version of the weights.
      pages_in_use: number of pages that histories take; 0 for a `Scorer`.
      pages: number of pages of the pool; 0 for a `Scorer`.
    """

    calls: int
    requests: int
    candidates: int
    padding: int
    hits: int
    misses: int
    evictions: int
    compilations: int
    weights: Hashable
    pages_in_use: int = 0
    pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of users whose state was in the cache; 0 before the first request."""
        return self.hits / max(1, self.hits + self.misses)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Holds a request's scores [n, ...] in its candidates' order, and the weights' version."""

    scores: Scores
    weights: Hashable


class Pending:
    """Holds started calls; `answers` waits for the calls."""

    def __init__(
        self,
        scorer: BatchScorer,
        calls: list[tuple[Batch, jax.Array]],
        answers: list[Answer | Exception],
        weights: Hashable,
    ) -> None:
        self._scorer, self._calls, self._answers = scorer, calls, answers
        self._weights = weights

    def ready(self) -> bool:
        """Whether the scores are computed; does not wait."""
        # The type `jax.Array` does not list the method.
        arrays: list[Any] = [scores for _, scores in self._calls]
        return all(array.is_ready() for array in arrays)

    def wait(self) -> None:
        """Waits until the scores are on the host; `answers` then does not wait."""
        for _, scores in self._calls:
            self._scorer.fetched(scores)

    def answers(self) -> list[Answer | Exception]:
        """Returns an answer for every request, in order, or a `BadRequestError`."""
        while self._calls:
            batch, scores = self._calls[0]
            rows = self._scorer.fetched(scores)
            start = 0
            for position, size in zip(batch.positions, batch.sizes, strict=True):
                # A copy, so that no answer keeps the scores of a whole batch alive.
                answer = Answer(rows[start : start + size].copy(), self._weights)
                self._answers[position] = answer
                start += size
            # Removed last, so that a second call of this method raises the same error.
            self._calls.pop(0)
        return self._answers


class PendingScores:
    """Holds a started call; `scores` waits for the call."""

    def __init__(self, scorer: BatchScorer, scores: jax.Array, filled: int) -> None:
        self._scorer, self._scores, self._filled = scorer, scores, filled

    def scores(self) -> Scores:
        """Returns the scores of all candidates, [n, ...], in their order."""
        return self._scorer.fetched(self._scores)[: self._filled]
