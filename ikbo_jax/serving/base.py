"""What the scorers share: from requests to calls of compiled programs, answers, and counts."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.batches import (
    BadRequestError,
    Batch,
    Buckets,
    Checked,
    Form,
    Request,
    Tree,
    check_hashable,
    fitting_parts,
    merged,
)
from ikbo_jax.serving.programs import Specs, check_finite, compilations

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


#: Scorers whose calls are waited for when the process ends.
_scorers: weakref.WeakSet[BatchScorer] = weakref.WeakSet()


def _wait_for_calls() -> None:
    """Waits for the calls of all scorers at the end of the process, which would abort otherwise.

    With jaxlib 0.11.2, a thread of XLA takes the interpreter's lock when the transfer of an array
    to the host ends. Before Python 3.14, a thread that asks for the lock while the interpreter ends
    is ended inside C++ code that allows no unwinding: "terminate called without an active
    exception". 24 of 24 processes that ended with a call under way aborted.
    """
    for scorer in list(_scorers):
        scorer.wait()


# Registered after JAX's own function, and therefore called before it.
atexit.register(_wait_for_calls)


class BatchScorer:
    """Answers batches of requests; a subclass says what it keeps of users, and runs the programs.

    A subclass calls `_ready` when its programs are compiled and have run once. Its methods below
    that raise NotImplementedError run with the lock held.

    Args:
      specs: of the model.
      weights: a tree of arrays.
      buckets: the sizes that programs are compiled for.
      device: the device that the programs run on; None if there are several.
      version: a name of the weights.
    """

    def __init__(
        self,
        specs: Specs,
        weights: Tree,
        buckets: Buckets,
        device: jax.Device | None,
        version: Hashable,
    ) -> None:
        self.specs, self.buckets = specs, buckets
        self._weights_form = Form(specs.weights, "weights")
        self._candidate_form = Form(specs.candidate, "candidates")
        self._lock = threading.Lock()
        self._calls = self._requests = self._candidates = self._padding = 0
        self._device = device
        self._weights, self._version = self._on_device(weights, device), version
        self.call_seconds: dict[tuple[int, int], float] = {}
        self._no_scores = np.zeros((0, *specs.score.shape), specs.score.dtype)
        self._newest: jax.Array | None = None

    def _ready(self) -> None:
        """Counts compilations from now on."""
        self._compiled = compilations()
        # On a CPU, NumPy reads the device's own array. A transfer would only run Python in a thread
        # of XLA for which nobody waits: 35 of 90 processes that read such scores last aborted.
        devices = [self._device] if self._device else jax.devices()
        self._transfers = any(device.platform != "cpu" for device in devices)
        _scorers.add(self)

    @property
    def metrics(self) -> Metrics:
        """Counts since the scorer was made."""
        with self._lock:
            return Metrics(
                calls=self._calls,
                requests=self._requests,
                candidates=self._candidates,
                padding=self._padding,
                **self._users_counts(),
                compilations=compilations() - self._compiled,
                weights=self._version,
            )

    def _on_device(self, weights: Tree, device: jax.Device | None) -> list[jax.Array]:
        # On a CPU, JAX reads NumPy's own memory, to which the caller may write later.
        leaves = jax.tree.leaves(weights)
        leaves = [np.array(x) if isinstance(x, np.ndarray) else x for x in leaves]
        return jax.block_until_ready(jax.device_put(leaves, device))

    def set_weights(self, weights: Tree, version: Hashable) -> None:
        """Scores later calls with other weights, and forgets users' states.

        Raises:
          ValueError: if structure, shape or dtype differ from the weights so far, or a weight is
            not finite. The scorer then keeps its weights.
        """
        leaves = self._weights_form.leaves_of(weights, stacked=False)
        check_finite(jax.tree.unflatten(self._weights_form.structure, leaves))
        placed = self._on_device(leaves, self._device)
        with self._lock:
            self._weights, self._version = placed, version
            self._forget()

    def forget_users(self) -> None:
        """Forgets all users' states; later requests compute them again."""
        with self._lock:
            self._forget()

    def fetched(self, scores: jax.Array) -> Scores:
        """Waits for a call and returns its scores on the host."""
        try:
            return np.asarray(scores)
        except Exception:
            # The call did not write its users' states.
            with self._lock:
                self._reset()
            raise

    def wait(self) -> None:
        """Waits until the scores of all calls that were started are on the host."""
        with self._lock:
            newest, self._newest = self._newest, None
        # Calls end in the order of their starts. The reader of the scores gets an error.
        if newest is not None:
            with contextlib.suppress(Exception):
                np.asarray(newest)

    def check(self, request: Request) -> None:
        """Checks a request, as `start` does.

        Raises:
          BadRequestError: if the candidates' structure, shape or dtype is not what the model
            expects, they are more than the largest bucket has, the key is not hashable, or
            `features` is neither a function nor None.
        """
        self._checked(request)

    def _checked(self, request: Request) -> Checked:
        try:
            candidates, key, features = request.candidates, request.key, request.features
        except AttributeError:
            message = f"a request is {request!r:.80}, expected a serving.Request"
            raise BadRequestError(message) from None
        leaves = self._candidate_form.leaves_of(candidates, stacked=True)
        try:
            hash(key)
        except Exception:
            check_hashable([key])
        found, most = len(leaves[0]), self.buckets.candidates[-1]
        if found > most:
            raise BadRequestError(f"a request has {found} candidates, at most {most} are possible")
        if features is not None:
            # `callable` would be one more call for each request.
            try:
                features.__call__  # type: ignore[operator]  # noqa: B018
            except AttributeError:
                kind = type(features).__name__
                message = f"features is of {kind}, expected a function that returns them"
                raise BadRequestError(message) from None
        return Checked(key, found, leaves, features)

    def rank(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Scores requests, in as few calls as possible.

        Returns:
          For every request, in order, its answer, or a `BadRequestError` if the request does not
          fit the model. One request's error leaves the others alone.
        """
        return self.start(requests).answers()

    def start(self, requests: Sequence[Request]) -> Pending:
        """Starts the calls of `rank`; returns while the device still computes."""
        if not hasattr(requests, "__len__"):
            raise TypeError(f"requests is {requests!r:.80}, expected a sequence of Request")
        with self._lock:
            answers: list[Any] = [None] * len(requests)
            fitting = []
            for position, request in enumerate(requests):
                try:
                    checked = self._checked(request)
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
                    calls += self._start_part(part, answers)
            except BaseException:
                # A failed encoder may have lost the donated pool; an interrupted one did not write
                # the states that the user cache lists.
                self._reset()
                raise
            return Pending(self, calls, answers, self._version)

    def _start_part(
        self, part: list[tuple[int, Checked]], answers: list[Any]
    ) -> list[tuple[Batch, jax.Array]]:
        """Starts the call of one part; errors of users' features become requests' answers."""
        batch = merged(part, self.buckets)
        inputs, failed = self._inputs_for(batch)
        if failed:
            for position, one in part:
                answers[position] = failed.get(one.key)
            part = [entry for entry in part if entry[1].key not in failed]
            if not part:
                return []
            batch = merged(part, self.buckets)
        return [(batch, self._call(batch, inputs))]

    def _counted(self, batch: Batch, scores: jax.Array) -> jax.Array:
        """Counts a call and starts the transfer of its scores, which it returns."""
        self._calls += 1
        self._requests += len(batch.sizes)
        self._candidates += batch.filled
        self._padding += batch.bucket[0] - batch.filled
        if self._transfers:
            # The transfer follows the program without another command of the host.
            scores.copy_to_host_async()
        self._newest = scores
        return scores

    def _users_counts(self) -> dict[str, int]:
        """Counts of users for `Metrics`."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Forgets all users."""
        raise NotImplementedError

    def _reset(self) -> None:
        """Forgets all users, and makes a new pool where a call that failed may have lost it."""
        raise NotImplementedError

    def _inputs_for(self, batch: Batch) -> tuple[Any, dict[Hashable, Exception]]:
        """Fetches what `_call` needs of the users, and the error of every key that failed."""
        raise NotImplementedError

    def _call(self, batch: Batch, inputs: Any) -> jax.Array:
        """Starts the programs of one batch, whose keys have not failed; returns its scores."""
        raise NotImplementedError


def seconds_of(score: Callable[..., jax.Array], *arguments: Any) -> float:
    """Measures a call: the first run allocates, the second run is timed."""
    for _ in range(2):
        start = time.perf_counter()
        np.asarray(score(*arguments))
        seconds = time.perf_counter() - start
    return seconds
