"""Admission control: refuses requests that would wait too long, by measured times of calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ikbo_jax.serving.batches import Buckets, check_size

#: Share of the seconds left that a request may wait for its call. Times of calls change by up to 2x
#: when another process takes a core; a longer queue would make no call fuller.
SHARE = 0.5
#: Weight of the measurements so far, at every further call.
MEMORY = 0.9
#: A call counts as at most this much slower than the estimate, so that one stall of the machine
#: does not close the service for the calls that follow.
STALL = 8.0


class Admission:
    """Estimates how long a request would wait, and refuses requests that would wait too long.

    A queue that is bounded by a number of requests may hold more work than any deadline allows:
    every request is then computed after its client has gone. A request's work is its share of a
    full call, in seconds measured alone. The expected wait is the work that was admitted and is not
    answered yet, divided by the calls that run side by side, times the seconds that the newest
    calls took for a second of work: more on a busy machine, and where calls are not full.

    The methods belong to one thread, such as the thread of an event loop.

    Args:
      buckets: the scorer's buckets.
      seconds: by bucket, seconds of a call alone: `Scorer.call_seconds`.
      concurrent: number of calls side by side.

    Raises:
      ValueError: `concurrent` is no integer of at least 1, or a bucket has no seconds above 0.
    """

    def __init__(
        self, buckets: Buckets, seconds: Mapping[tuple[int, int], float], concurrent: int = 1
    ) -> None:
        check_size("concurrent", concurrent)
        self._buckets, self._seconds, self._concurrent = buckets, dict(seconds), concurrent
        for bucket in buckets.pairs:
            found = self._seconds.get(bucket)
            if not isinstance(found, int | float) or not 0 < found < math.inf:
                raise ValueError(
                    f"the seconds of bucket {bucket} are {found!r:.80}, expected a number above 0"
                )
        self._full = self._seconds[buckets.largest]
        self._measured = self._worked = self._full
        self._pending, self._requests = 0.0, 0

    @property
    def slowdown(self) -> float:
        """Seconds that the newest calls took for a second of work."""
        return self._measured / self._worked

    @property
    def wait(self) -> float:
        """Expected seconds until everything that was admitted is answered."""
        return self._pending * self.slowdown / self._concurrent

    def work(self, size: int) -> float:
        """Returns the share of full calls that a request of `size` candidates takes, in seconds."""
        candidates, users = self._buckets.largest
        return self._full * max(size / candidates, 1 / users)

    def excess(self, size: int, left: float) -> float:
        """Returns the seconds by which a request of `size` candidates would wait too long, or 0.

        It must be answered in `left` seconds. An idle scorer takes every request, so that its
        estimates stay those of this machine.
        """
        if not self._requests:
            return 0.0
        return max(0.0, self.wait - SHARE * (left - self._alone(size)))

    def admit(self, size: int, left: float) -> float:
        """Admits a request unless `excess` says that it would wait too long; returns the excess.

        Call `done` for every admitted request, whether or not it was answered.
        """
        excess = self.excess(size, left)
        if not excess:
            self._pending += self.work(size)
            self._requests += 1
        return excess

    def done(self, size: int) -> None:
        """Counts a request of `size` candidates as answered, or given up."""
        self._requests -= 1
        # Exactly 0 when no request is left, whatever the sums were rounded to.
        self._pending = self._requests and self._pending - self.work(size)

    def measured(self, sizes: Sequence[int], seconds: float) -> None:
        """Counts the seconds of a batch of requests with so many candidates each."""
        seconds = min(seconds, STALL * sum(map(self._alone, sizes)))
        self._measured = MEMORY * self._measured + seconds
        self._worked = MEMORY * self._worked + sum(map(self.work, sizes))

    def _alone(self, size: int) -> float:
        """Estimates the seconds of a request's call if no other request is part of it."""
        alone = self._seconds[self._buckets.fitting(size, 1)]
        return max(alone, self.work(size) * self.slowdown)
