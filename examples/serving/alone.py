"""Measures the scorer in one process, without the engine: latency under load, user cache, offline.

    python -m examples.serving alone --out FILE.json

Needs nothing of the engine, so that its overhead can be told from the scorer's. Three figures:

- *Stream.* Requests arrive at random times, whatever the answers do, and whatever waits goes into
  the next call. Several rates are tried; the highest one counts at which p99 stays below `LATENCY`
  times the time of the largest call. Its throughput is divided by that of the same requests in full
  calls, one after another.
- *Hits.* The throughput of full calls in which a share of `HITS` of the users has a state in the
  cache, divided by that of full calls of new users.
- *Offline.* The throughput of ranking many candidates of many users, divided by that of the same
  number of calls of the program alone.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import operator
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from examples.serving import models, offline, plans, records, stream
from examples.serving.settings import Settings
from ikbo_jax import serving
from ikbo_jax.serving.batches import fitting_parts

#: Bars of the three figures on a GPU, and of the stream's p99 in times of the largest call.
STREAM, LATENCY, CACHED, OFFLINE = 0.80, 3.0, 1.5, 0.9
HITS = 0.8
#: Where the three figures stand in the results.
FIGURES = (("stream", "share"), ("hits", "ratio"), ("offline", "share_of_bound"))
NAMES = tuple(name for name, _ in FIGURES)
#: Rates of the stream, as shares of the throughput of full calls of as many requests.
SHARES = (0.5, 0.6, 0.7, 0.75, 0.775, 0.8, 0.825, 0.85, 0.875, 0.9, 0.95)


def prepared(source: models.Source, asked: Sequence[plans.Asked]) -> list[serving.Request]:
    """The requests, whose users' features are made in advance: to fetch them is not measured."""
    users = sorted({one.user for one in asked})
    rows = source.features_of(users)
    features = {u: jax.tree.map(operator.itemgetter(n), rows) for n, u in enumerate(users)}
    return [
        dataclasses.replace(
            models.request(source, one.user, one.items),
            features=functools.partial(features.__getitem__, one.user),
        )
        for one in asked
    ]


def call_seconds(scorer: serving.Scorer, source: models.Source) -> float:
    """Seconds of a call of the largest bucket, from the request to its scores."""
    items = np.zeros(scorer.buckets.largest[0], np.int32)
    request, times = models.request(source, 0, items), records.Times()
    for _ in range(8):  # The first ones warm up.
        with times.measured():
            scorer.rank([request])
    return statistics.median(times.seconds[2:])


def host_times(
    scorer: serving.Scorer, requests: Sequence[serving.Request]
) -> dict[str, dict[str, float]]:
    """Where the time of a full call goes if no other call is under way.

    Returns:
      By "start" (from the requests to the last command to the device), "wait" (until the scores are
      on the host) and "answers": seconds of a call, and of a request.
    """
    times = {name: records.Times() for name in ("start", "wait", "answers")}
    for part in fitting_parts(enumerate(requests), scorer.buckets):
        with times["start"].measured():
            pending = scorer.start([request for _, request in part])
        with times["wait"].measured():
            pending.wait()
        with times["answers"].measured():
            pending.answers()
    return {
        name: {
            "call_s": statistics.mean(found.seconds),
            "request_s": sum(found.seconds) / len(requests),
        }
        for name, found in times.items()
    }


def full_calls(scorer: serving.Scorer, requests: Sequence[serving.Request]) -> float:
    """Candidates a second, in calls that are as full as the buckets allow."""
    start = time.perf_counter()
    collections.deque(serving.rank_offline(scorer, requests, ahead=offline.AHEAD), maxlen=0)
    return sum(request.size for request in requests) / (time.perf_counter() - start)


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """The garbage collector leaves alone what exists at the start, as in a replica of the service.

    It takes 0.12 s for the objects of JAX and of the prepared requests, which would be the p99.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def full_speed(scorer: serving.Scorer, source: models.Source, rate: float, seconds: float) -> float:
    """Requests a second in full calls of the requests of a stream, all of whose users are new."""
    requests = prepared(source, plans.requests(plans.plan_for(source, rate=rate, seconds=seconds)))
    scorer.forget_users()
    with objects_frozen():
        speed = full_calls(scorer, requests)
    return speed / statistics.mean(request.size for request in requests)


def stream_figures(
    scorer: serving.Scorer, source: models.Source, seconds: float, say: records.Say
) -> dict[str, Any]:
    """The stream at all rates of `SHARES`, each beside the same requests in full calls."""
    limit = LATENCY * call_seconds(scorer, source)
    trial = prepared(source, plans.requests(plans.plan_for(source, rate=500, seconds=1)))
    full_calls(scorer, trial)
    host = host_times(scorer, trial)
    parts = ", ".join(f"{name} {found['call_s'] * 1e6:.0f} µs" for name, found in host.items())
    say(f"a full call, all users known: {parts}")
    # The more requests, the fewer of them have new users: as many as in a stream of full calls.
    speed = full_speed(scorer, source, full_speed(scorer, source, 500, seconds), seconds)
    say(f"full calls: {speed:.0f} requests a second")
    points = []
    for number, share in enumerate(SHARES):
        plan = plans.plan_for(source, rate=share * speed, seconds=seconds, seed=number)
        asked = plans.requests(plan)
        requests = prepared(source, asked)
        with objects_frozen():
            scorer.forget_users()
            full = full_calls(scorer, requests)
            scorer.forget_users()
            found = stream.rank(scorer, requests, [one.at for one in asked])
        point = {"rate": plan.rate, **found, "share": found["candidates_per_second"] / full}
        point["kept"] = point["p99_s"] <= limit
        points.append(point)
        say(
            f"stream, {plan.rate:.0f} requests a second: {point['share']:.2f} of full calls, p99 "
            f"{point['p99_s'] * 1e3:.1f} ms (bar {limit * 1e3:.1f}), "
            f"{point['requests_per_call']:.1f} requests a call"
        )
    share = max((point["share"] for point in points if point["kept"]), default=0.0)
    figures = {"points": points, "full_requests_per_second": speed}
    figures |= {"p99_bar_s": limit, "share": share, "bar": STREAM}
    return figures | {"full_call": host}


def hit_figures(
    scorer: serving.Scorer, source: models.Source, seconds: float, turns: int, say: records.Say
) -> dict[str, Any]:
    """Full calls in which so many users have a state, by turns with full calls of new users."""
    asked = plans.requests(plans.plan_for(source, rate=500, seconds=seconds))
    requests = prepared(source, asked)
    rng, versions = np.random.default_rng(0), itertools.count(1)
    speeds: dict[float, list[float]] = {0.0: [], HITS: []}
    # Lower than the share of requests with a known version: requests of one user in a call count
    # once, and some states had to leave the cache.
    rates: dict[float, list[float]] = {hits: [] for hits in speeds}
    for hits, found in list(speeds.items()) * turns:
        full_calls(scorer, requests)
        before = scorer.metrics
        found.append(full_calls(scorer, plans.with_new_users(requests, hits, rng, versions)))
        known = scorer.metrics.hits - before.hits
        new = scorer.metrics.misses - before.misses
        rates[hits].append(known / max(1, known + new))
    without, with_hits = (statistics.median(found) for found in speeds.values())
    say(
        f"user cache: {HITS:.0%} hits ({statistics.median(rates[HITS]):.0%} of the users of calls) "
        f"are {with_hits / without:.2f} times as fast as none"
    )
    return {
        "candidates_per_second": {f"{hits:.0%}": found for hits, found in speeds.items()},
        "hit_rate": {f"{hits:.0%}": found for hits, found in rates.items()},
        "ratio": with_hits / without,
        "bar": CACHED,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--cache", default="", help="folder of compiled programs")
    buckets = [2048, 4096, 8192, 16384]
    parser.add_argument("--buckets", type=int, nargs="+", default=buckets, help="of candidates")
    # With the hopper source's ranker, 256 states are 164 MB, which a call of 28 requests writes and
    # does not need.
    users = [64, 256]
    parser.add_argument("--bucket-users", type=int, nargs="+", default=users, help="of a call")
    # A full call has 22 users; with 80 % hits, 5 of them are new.
    new = [8, 32, 64, 256]
    parser.add_argument("--new-users", type=int, nargs="+", default=new, help="of a call")
    # The states of 256 users of `histories-hopper` take 1.2 GB.
    parser.add_argument("--user-bytes", type=int, default=1 << 31, help="of the user cache")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a stream")
    parser.add_argument("--candidates", type=int, default=1_000_000, help="ranked offline")
    parser.add_argument("--users", type=int, default=10_000, help="ranked offline")
    parser.add_argument("--turns", type=int, default=3, help="of what is compared")
    parser.add_argument("--figures", choices=NAMES, nargs="+", default=NAMES, help="to measure")


def run(options: argparse.Namespace, say: records.Say) -> dict[str, Any]:
    """The figures."""
    most = options.bucket_users[-1]
    settings = Settings(
        source=options.source,
        checkpoint=options.checkpoint,
        data=options.data,
        cache=options.cache,
        candidates=tuple(options.buckets),
        users=tuple(options.bucket_users),
        new_users=tuple(sorted({min(n, most) for n in (*options.new_users, most)})),
        user_bytes=options.user_bytes,
        joint="offline" in options.figures,
    )
    source = settings.load()
    largest = plans.plan_for(source, seconds=options.seconds).most
    if largest > options.buckets[-1]:
        raise SystemExit(
            f"requests have up to {largest} candidates, but the largest bucket has "
            f"{options.buckets[-1]}"
        )
    start = time.perf_counter()
    scorer = settings.scorer(source)
    say(f"programs compiled or loaded in {time.perf_counter() - start:.1f} s")
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "settings": records.recorded(settings),
    }
    if "stream" in options.figures:
        found["stream"] = stream_figures(scorer, source, options.seconds, say)
    if "hits" in options.figures:
        found["hits"] = hit_figures(scorer, source, options.seconds, options.turns, say)
    if "offline" in options.figures:
        compared = offline.compare(scorer, source, options.candidates, options.users, options.turns)
        say(
            f"offline: {compared['candidates_per_second']:,.0f} candidates a second, "
            f"{compared['share_of_bound']:.2f} of the program alone"
        )
        found["offline"] = {**compared, "bar": OFFLINE}
    missed = [x for x, key in FIGURES if x in found and found[x][key] < found[x]["bar"]]
    return {**found, "missed": missed}
