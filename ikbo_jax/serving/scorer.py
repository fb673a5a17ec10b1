"""Answers batches of requests with programs that were compiled before."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.batches import (
    BadRequestError,
    Batch,
    Buckets,
    Numbered,
    Request,
    Tree,
    check,
    fitting_parts,
    merged,
    padded,
    stacked,
)
from ikbo_jax.serving.programs import Model, Programs, compilations, specs_of
from ikbo_jax.serving.users import UserCache

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

    def answers(self) -> list[Answer | Exception]:
        """An answer for every request, in order; a `BadRequestError` where one does not fit."""
        while self._calls:
            batch, scores = self._calls.pop(0)
            try:
                rows = np.asarray(scores)
            except Exception:
                self._scorer.forget_users()
                raise
            start = 0
            for position, size in zip(batch.positions, batch.sizes, strict=True):
                # A copy, so that no answer keeps the scores of a whole batch alive.
                answer = Answer(rows[start : start + size].copy(), self._weights)
                self._answers[position] = answer
                start += size
        return self._answers


class Scorer:
    """Scores requests of several users in one call, with programs that are compiled in advance.

    A call's requests are padded to a bucket of candidates and users; scores of padding are dropped.
    Users' states stay on the device, in a pool of slots, and a user whose state is there is not
    encoded again. All methods may be called from several threads.

    Args:
      model: two functions, see `Model`.
      weights: a tree of arrays.
      user: a user's features as a tree of `jax.ShapeDtypeStruct`, without an axis of users.
      candidate: a candidate's features in the same form.
      buckets: the sizes that programs are compiled for.
      user_bytes: bytes of the pool of users' states.
      version: a name of the weights, in every answer.

    Raises:
      ValueError: if the states of the largest bucket's users take more than `user_bytes`.
    """

    def __init__(
        self,
        model: Model,
        weights: Tree,
        user: Tree,
        candidate: Tree,
        *,
        buckets: Buckets | None = None,
        user_bytes: int = 1 << 28,
        version: Hashable = 0,
    ) -> None:
        self.buckets = buckets or Buckets()
        self.specs = specs_of(model, weights, user, candidate)
        row_bytes = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.specs.state)
        )
        self._users = UserCache(user_bytes, row_bytes, self.buckets.largest[1])
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._programs = Programs(model, self.specs, self.buckets, self._users.slots)
        self._weights, self._version = self._on_device(weights), version
        self._pool = self._empty_pool()
        self._run_every_program()
        self._no_scores = np.zeros((0, *self.specs.score.shape), self.specs.score.dtype)
        self._compiled = compilations()

    def _on_device(self, weights: Tree) -> Tree:
        return jax.block_until_ready(jax.device_put(weights))

    def _empty_pool(self) -> Tree:
        # Of NumPy arrays: `jnp.zeros` would compile.
        slots = self._users.slots
        return jax.tree.map(
            lambda leaf: jax.device_put(np.zeros((slots, *leaf.shape), leaf.dtype)),
            self.specs.state,
        )

    def _run_every_program(self) -> None:
        """Whatever a first run allocates or loads is there before the first request."""

        def zeros(row: Tree, size: int) -> Tree:
            return jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), row)

        for users, encode in self._programs.encode.items():
            nowhere = np.full(users, self._users.slots, np.int32)
            self._pool = encode(self._weights, self._pool, zeros(self.specs.user, users), nowhere)
        for (candidates, users), score in self._programs.score.items():
            np.asarray(
                score(
                    self._weights,
                    self._pool,
                    np.zeros(users, np.int32),
                    zeros(self.specs.candidate, candidates),
                    np.zeros(candidates, np.int32),
                )
            )

    @property
    def metrics(self) -> Metrics:
        """Counts since the scorer was made."""
        with self._lock:
            counts = self._counts
            return Metrics(
                calls=counts["calls"],
                requests=counts["requests"],
                candidates=counts["candidates"],
                padding=counts["padding"],
                hits=self._users.hits,
                misses=self._users.misses,
                evictions=self._users.evictions,
                compilations=compilations() - self._compiled,
                weights=self._version,
            )

    def set_weights(self, weights: Tree, version: Hashable) -> None:
        """Scores later calls with other weights; calls that have started keep theirs.

        Users' states were computed with the old weights and are forgotten.

        Raises:
          ValueError: if structure, shape or dtype differ from the weights so far.
        """
        check(weights, self.specs.weights, "weights", stacked=False)
        placed = self._on_device(weights)
        with self._lock:
            self._weights, self._version = placed, version
            self._users.clear()

    def forget_users(self) -> None:
        """Forgets all users' states; later requests compute them again."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        self._users.clear()
        self._pool = self._empty_pool()

    def check(self, request: Request) -> Request:
        """The request with NumPy arrays as candidates.

        Raises:
          BadRequestError: if the candidates' structure, shape or dtype is not what the model
            expects, or there are more than the largest bucket has.
        """
        candidates = check(request.candidates, self.specs.candidate, "candidates", stacked=True)
        found, most = request.size, self.buckets.largest[0]
        if found > most:
            raise BadRequestError(f"a request has {found} candidates, at most {most} are possible")
        return dataclasses.replace(request, candidates=candidates)

    def rank(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Scores requests, in as few calls as possible.

        Returns:
          For every request, in order, its answer, or a `BadRequestError` if the request does not
          fit the model. One request's error leaves the others alone.
        """
        return self.start(requests).answers()

    def start(self, requests: Sequence[Request]) -> Pending:
        """Like `rank`, but returns while the device still computes."""
        with self._lock:
            answers: list[Any] = [None] * len(requests)
            fitting = []
            for position, request in enumerate(requests):
                try:
                    checked = self.check(request)
                except BadRequestError as error:
                    answers[position] = error
                    continue
                if checked.size:
                    fitting.append((position, checked))
                else:
                    answers[position] = Answer(self._no_scores, self._version)
            calls = []
            try:
                for part in fitting_parts(fitting, self.buckets):
                    features = self._features_of(part, answers)
                    if left := [entry for entry in part if answers[entry[0]] is None]:
                        batch = merged(left, self.buckets)
                        calls.append((batch, self._call(batch, features)))
            except Exception:
                # An encoder that failed may have taken the pool with it.
                self._reset()
                raise
            return Pending(self, calls, answers, self._version)

    def _features_of(self, part: Numbered, answers: list[Any]) -> dict[Hashable, Tree]:
        """The features of users without a state, by key; errors become their requests' answers."""
        first: dict[Hashable, Request] = {}
        for _, request in part:
            first.setdefault(request.key, request)
        keys = list(first)
        features: dict[Hashable, Tree] = {}
        failed: dict[Hashable, Exception] = {}
        for key in (keys[position] for position in self._users.missing(keys)):
            try:
                found = first[key].features()
                features[key] = check(found, self.specs.user, "features", stacked=False)
            except Exception as error:
                failed[key] = error
        for position, request in part:
            answers[position] = failed.get(request.key)
        return features

    def _call(self, batch: Batch, features: dict[Hashable, Tree]) -> jax.Array:
        """Starts the programs for one batch."""
        slots, missing = self._users.slots_of(batch.keys)
        if missing:
            self._encode(
                [features[batch.keys[row]] for row in missing], [slots[row] for row in missing]
            )
        candidates, cand_to_user = batch.candidates()
        bucket_candidates, bucket_users = batch.bucket
        filled = sum(batch.sizes)
        self._counts.update(
            calls=1,
            requests=len(batch.requests),
            candidates=filled,
            padding=bucket_candidates - filled,
        )
        return self._programs.score[batch.bucket](
            self._weights,
            self._pool,
            padded(np.asarray(slots, np.int32), bucket_users),
            candidates,
            cand_to_user,
        )

    def _encode(self, features: list[Tree], slots: list[int]) -> None:
        sizes = self.buckets.new_users
        for start in range(0, len(features), sizes[-1]):
            part = features[start : start + sizes[-1]]
            bucket = sizes[bisect.bisect_left(sizes, len(part))]
            # Padding is written nowhere.
            at = np.full(bucket, self._users.slots, np.int32)
            at[: len(part)] = slots[start : start + len(part)]
            self._pool = self._programs.encode[bucket](
                self._weights, self._pool, stacked(part, bucket), at
            )


def rank_offline(
    scorer: Scorer, requests: Iterable[Request], *, ahead: int = 2
) -> Iterator[tuple[int, Answer]]:
    """Scores many requests in full batches; the host prepares calls while the device computes.

    Args:
      scorer: the scorer.
      requests: requests, in any number; they are read as they are needed. Batches are fullest if
        requests of one user follow one another.
      ahead: number of calls that are started before the first one is waited for.

    Yields:
      The position of a request, and its answer; requests of a batch in any order.

    Raises:
      BadRequestError: if a request does not fit the model.
    """
    waiting: collections.deque[tuple[list[int], Pending]] = collections.deque()

    def finished() -> Iterator[tuple[int, Answer]]:
        positions, pending = waiting.popleft()
        for position, answer in zip(positions, pending.answers(), strict=True):
            if isinstance(answer, Exception):
                raise answer
            yield position, answer

    for part in fitting_parts(enumerate(requests), scorer.buckets):
        positions, chosen = zip(*part, strict=True)
        waiting.append((list(positions), scorer.start(chosen)))
        if len(waiting) > ahead:
            yield from finished()
    while waiting:
        yield from finished()
