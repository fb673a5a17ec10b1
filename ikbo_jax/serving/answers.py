"""What a scorer answers, and what it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy.typing as npt

from ikbo_jax.serving.batches import Batch

if TYPE_CHECKING:
    from ikbo_jax.serving.scorer import Scorer

Scores = npt.NDArray[Any]


class Metrics(NamedTuple):
    """What a scorer has done since it was made.

    Attributes:
      calls: number of calls of a program that scores.
      requests: number of requests in these calls.
      candidates: number of candidates in these calls.
      padding: number of candidates that were added to fill buckets.
      hits: number of users of calls whose state was in the cache.
      misses: number of users of calls whose state had to be computed.
      evictions: number of states that left the cache for others.
      compilations: number of programs that this process has compiled, or loaded from the cache
        folder, since the scorer was ready. It stays 0.
      weights: the version of the weights.
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

    @property
    def hit_rate(self) -> float:
        """The share of users whose state was in the cache; 0 before the first request."""
        return self.hits / max(1, self.hits + self.misses)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A request's scores, and the weights that computed them.

    Attributes:
      scores: [n, ...], one row for each candidate, in the request's order.
      weights: the version of the weights.
    """

    scores: Scores
    weights: Hashable


class Pending:
    """Calls that were started; `answers` waits for them."""

    def __init__(
        self,
        scorer: Scorer,
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
        """Waits until the scores are on the host; `answers` then only hands them out."""
        for _, scores in self._calls:
            self._scorer.fetched(scores)

    def answers(self) -> list[Answer | Exception]:
        """An answer for every request, in order; a `BadRequestError` where one does not fit."""
        while self._calls:
            batch, scores = self._calls[0]
            rows = self._scorer.fetched(scores)
            start = 0
            for position, size in zip(batch.positions, batch.sizes, strict=True):
                # A copy, so that no answer keeps the scores of a whole batch alive.
                answer = Answer(rows[start : start + size].copy(), self._weights)
                self._answers[position] = answer
                start += size
            # Not before: asked again after an error, it is an error again.
            self._calls.pop(0)
        return self._answers


class PendingScores:
    """A call that was started; `scores` waits for it."""

    def __init__(self, scorer: Scorer, scores: jax.Array, filled: int) -> None:
        self._scorer, self._scores, self._filled = scorer, scores, filled

    def scores(self) -> Scores:
        """The scores of all candidates, [n, ...], in their order."""
        return self._scorer.fetched(self._scores)[: self._filled]
