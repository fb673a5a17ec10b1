"""Ranks requests that arrive at given times; whatever waits goes into the next call.

A call is started late: while one is under way, the next one starts shortly before that one is
expected to end, so that requests that arrive until then are part of it, and the device does not
wait. Calls that are full start at once. A request then waits for the rest of one call and for its
own, instead of for up to three.
"""

import bisect
import collections
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from examples.serving import offline
from ikbo_jax import serving
from ikbo_jax.serving.base import Pending
from ikbo_jax.serving.batches import fitting_parts

#: Seconds between two looks at a call that is under way, and seconds by which a call starts earlier
#: than the estimates say.
POLL, MARGIN = 5e-5, 1e-4
#: Weight of the newest call in running means.
NEWEST = 0.2


class UnderWay(NamedTuple):
    """A call that was started.

    Attributes:
      positions: of the call's requests.
      pending: the call.
      bucket: candidates of the call with padding.
      started: when the host had started it, in seconds from the start of the stream.
    """

    positions: range
    pending: Pending
    bucket: int
    started: float


class Estimates:
    """Running means of the seconds that calls take.

    Attributes:
      host: seconds in which the host starts a call.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self._device: dict[int, float] = {}

    def started(self, seconds: float) -> None:
        """The host took so many seconds to start a call."""
        self.host += NEWEST * (seconds - self.host)

    def ended(self, bucket: int, seconds: float, *, is_bound: bool) -> None:
        """A call took the device so many seconds, or at most so many if `is_bound`."""
        mean = self._device.get(bucket, seconds)
        newer = mean + NEWEST * (seconds - mean)
        self._device[bucket] = min(mean, seconds) if is_bound else newer

    def device(self, bucket: int) -> float:
        """Seconds of a call of this bucket; 0 if none has ended."""
        return self._device.get(bucket, 0.0)


class Stream:
    """Ranks requests, see `rank`."""

    def __init__(
        self,
        scorer: serving.Scorer,
        requests: Sequence[serving.Request],
        times: Sequence[float],
    ) -> None:
        self.scorer, self.requests, self.times = scorer, requests, times
        self.latencies: list[float] = []
        self.calls = 0
        self._before = np.cumsum([0, *(request.size for request in requests)])
        self._taken, self._ended = 0, 0.0
        self._under_way: collections.deque[UnderWay] = collections.deque()
        self._estimates = Estimates()
        self._start = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def run(self) -> None:
        """Ranks all requests."""
        while self._taken < len(self.requests) or self._under_way:
            now, calls = self._now(), self._under_way
            arrived = bisect.bisect_right(self.times, now, lo=self._taken)
            if self._taken < arrived and len(calls) < offline.AHEAD and self._is_due(arrived, now):
                self._start_call(arrived, now)
            elif not calls:
                time.sleep(max(0.0, self.times[self._taken] - now))
            elif (
                len(calls) == offline.AHEAD
                or self._taken == len(self.requests)
                or calls[0].pending.ready()
            ):
                self._collect(calls.popleft())
            else:
                time.sleep(POLL)

    def _is_due(self, arrived: int, now: float) -> bool:
        """Whether a call of what has arrived should start."""
        if not self._under_way:
            return True
        first = self._under_way[0]
        begin = max(first.started, self._ended)
        expected = begin + self._estimates.device(first.bucket)
        waiting = self._before[arrived] - self._before[self._taken]
        return bool(
            waiting >= self.scorer.buckets.largest[0]
            or now >= expected - self._estimates.host - MARGIN
            or first.pending.ready()
        )

    def _start_call(self, arrived: int, now: float) -> None:
        first = next(
            fitting_parts(enumerate(self.requests[self._taken : arrived]), self.scorer.buckets)
        )
        chosen = [request for _, request in first]
        positions = range(self._taken, self._taken + len(chosen))
        candidates = int(self._before[positions.stop] - self._before[positions.start])
        users = len({request.key for request in chosen})
        bucket, _ = self.scorer.buckets.fitting(candidates, users)
        pending = self.scorer.start(chosen)
        started = self._now()
        self._estimates.started(started - now)
        self._under_way.append(UnderWay(positions, pending, bucket, started))
        self._taken, self.calls = positions.stop, self.calls + 1

    def _collect(self, call: UnderWay) -> None:
        """Waits for a call, and hands out its answers."""
        # The call may have ended a while ago.
        is_bound = call.pending.ready()
        call.pending.wait()
        ended = self._now()
        seconds = ended - max(call.started, self._ended)
        self._estimates.ended(call.bucket, seconds, is_bound=is_bound)
        self._ended = ended
        for answer in call.pending.answers():
            if isinstance(answer, Exception):
                raise answer
        done = self._now()
        self.latencies += [done - self.times[n] for n in call.positions]

    def figures(self) -> dict[str, float]:
        """What `rank` returns."""
        # Calls end in their order: the last request has the last answer.
        seconds = self.latencies[-1] + self.times[-1] - self.times[0]
        p50, p99 = np.percentile(self.latencies, (50, 99))
        return {
            "candidates_per_second": float(self._before[-1]) / seconds,
            "p50_s": float(p50),
            "p99_s": float(p99),
            "requests_per_call": len(self.requests) / self.calls,
        }


def rank(
    scorer: serving.Scorer, requests: Sequence[serving.Request], times: Sequence[float]
) -> dict[str, float]:
    """Ranks requests that arrive at their times.

    Args:
      scorer: the scorer.
      requests: the requests, in the order of their times.
      times: seconds from the start at which they arrive.

    Returns:
      Candidates a second from the first arrival to the last answer; p50 and p99 of the seconds from
      a request's arrival to its answer; requests of a call.
    """
    stream = Stream(scorer, requests, times)
    stream.run()
    return stream.figures()
