"""Measures the service: batching against one request at a time, and the start from a warm cache."""

import asyncio
import collections
import dataclasses
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from examples.serving import load, local, models, plans
from examples.serving.settings import Settings
from ikbo_jax import serving

Say = Callable[[str], None]

#: A rate is kept up if so much of it is answered, and if no request fails.
KEPT_UP = 0.97
#: Each rate is this much above the one before.
STEP = 1.2

#: Requests of one call, and the share of users whose state is there, of the scorer alone.
MERGES, HITS = (1, 4, 16), (0.0, 0.8, 1.0)
OFFLINE = (0, 1.0)
SECONDS_ALONE = 1.0

_START = """
import time
start = time.perf_counter()
import jax
jax.devices()
jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
ready, busy = time.perf_counter(), time.process_time()
from examples.serving.settings import Settings
settings = {settings!r}
settings.scorer(settings.load())
done = time.perf_counter()
print(ready - start, done - ready, time.process_time() - busy)
"""


def start_up(settings: Settings, say: Say, runs: int = 3) -> dict[str, Any]:
    """Seconds from JAX's own start to a scorer that is ready; the first run fills the cache."""
    with tempfile.TemporaryDirectory() as cache:
        return _start_up(dataclasses.replace(settings, cache=cache), say, runs)


def _start_up(settings: Settings, say: Say, runs: int) -> dict[str, Any]:
    code = _START.format(settings=settings)
    found = []
    for number in range(runs + 1):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=local.ROOT
        )
        jax_s, scorer_s, cpu_s = (float(word) for word in done.stdout.split()[-3:])
        found.append({"jax_s": jax_s, "scorer_s": scorer_s, "scorer_cpu_s": cpu_s})
        say(
            f"start {number}: JAX {jax_s:.1f} s, then {scorer_s:.1f} s to a ready scorer "
            f"({cpu_s:.1f} s of CPU time)"
        )
    return {"first": found[0], "warm": found[1:]}


def in_process(settings: Settings, plan: plans.Plan, say: Say, rounds: int = 3) -> dict[str, Any]:
    """The scorer alone: requests a second and the latency of a call, for several merges and hits.

    All cases take turns, so that other load on the machine meets them alike. A request whose
    user's state is not to be found has a version of its own.
    """
    source = settings.load()
    scorer = settings.scorer(source)
    asked = plans.requests(dataclasses.replace(plan, rate=100, seconds=SECONDS_ALONE))
    known = [models.request(source, one.user, one.items) for one in asked]
    rng, versions = np.random.default_rng(plan.seed), itertools.count(1)
    seconds: dict[tuple[int, float], list[float]] = collections.defaultdict(list)
    busy: dict[tuple[int, float], float] = collections.defaultdict(float)
    latencies: dict[tuple[int, float], list[float]] = collections.defaultdict(list)
    for _ in range(rounds):
        for case in itertools.product(MERGES, HITS):
            merge, hits = case
            scorer.rank(known)
            requests = plans.with_new_users(known, hits, rng, versions)
            start, cpu = time.perf_counter(), time.process_time()
            for first in range(0, len(requests), merge):
                begin = time.perf_counter()
                scorer.rank(requests[first : first + merge])
                latencies[case].append(time.perf_counter() - begin)
            seconds[case].append(time.perf_counter() - start)
            busy[case] += time.process_time() - cpu
        start, cpu = time.perf_counter(), time.process_time()
        collections.deque(serving.rank_offline(scorer, known), maxlen=0)
        seconds[OFFLINE].append(time.perf_counter() - start)
        busy[OFFLINE] += time.process_time() - cpu
    found = []
    for case, times in seconds.items():
        name = "offline" if case == OFFLINE else f"{case[0]} merged, {case[1]:.0%} hits"
        rate = len(known) / statistics.median(times)
        milliseconds = np.asarray(latencies[case] or [np.nan]) * 1e3
        found.append(
            {
                "merged": case[0],
                "hits": case[1],
                "requests_per_second": rate,
                "cpu_ms_per_request": busy[case] / len(known) / rounds * 1e3,
                "call_p50_ms": float(np.percentile(milliseconds, 50)),
                "call_p99_ms": float(np.percentile(milliseconds, 99)),
                "seconds": times,
            }
        )
        say(f"{name}: {rate:.0f} requests/s, {found[-1]['cpu_ms_per_request']:.1f} ms of CPU each")
    return {
        "requests": len(known),
        "candidates": sum(request.size for request in known),
        "cases": found,
        "compilations": scorer.metrics.compilations,
    }


def sweep(settings: Settings, plan: plans.Plan, least: float, say: Say) -> list[dict[str, Any]]:
    """Rising rates until two in a row are not kept up, which are the last ones."""
    found: list[dict[str, Any]] = []
    with local.Service(settings) as service:
        # Connections, and the first users.
        asyncio.run(load.send(service.url, dataclasses.replace(plan, rate=least, seconds=3)))
        rate = least
        while True:
            at = dataclasses.replace(plan, rate=rate, seed=plan.seed + len(found))
            figures, told = asyncio.run(load.run(service.url, at, replicas=settings.replicas[0]))
            kept = figures["statuses"].get("200", 0) == len(told)
            kept &= figures["throughput"] >= KEPT_UP * figures["offered_rate"]
            found.append({**figures, "rate": rate, "kept_up": kept})
            say(
                f"{rate:6.1f}/s: {figures['throughput']:6.1f}/s answered, p50 "
                f"{figures['p50_ms']:.0f} ms, p99 {figures['p99_ms']:.0f} ms, "
                f"{figures['requests_per_call']:.1f} requests a call, "
                f"hit rate {figures['hit_rate']:.2f}"
            )
            if not any(run["kept_up"] for run in found[-2:]) and len(found) > 1:
                return found
            rate *= STEP


def batching(settings: Settings, plan: plans.Plan, least: float, say: Say) -> dict[str, Any]:
    """The largest rates with and without batches; `ratio` compares them at bounded latency.

    "unmerged" computes as many requests side by side as "batched" computes batches, so that it
    tells what merging adds.
    """
    unmerged = dataclasses.replace(settings, batch=False)
    single = dataclasses.replace(unmerged, concurrent=1)
    found: dict[str, Any] = {}
    for name, chosen in (("single", single), ("unmerged", unmerged), ("batched", settings)):
        say(f"{name}:")
        found[name] = sweep(chosen, plan, least, say)
    kept = [run for run in found["single"] if run["kept_up"]]
    if not kept:
        return found
    limit = 2 * kept[-1]["p99_ms"]
    # The largest rates that were kept up.
    within = [run for run in found["batched"] if run["kept_up"] and run["p99_ms"] <= limit]
    if within:
        found["ratio"] = within[-1]["throughput"] / kept[-1]["throughput"]
        found["p99_ratio"] = within[-1]["p99_ms"] / kept[-1]["p99_ms"]
    return found


#: Offered rates as multiples of the capacity, and the bars: the share of the capacity that is
#: answered in time, the share of scored requests that nobody waited for, and milliseconds.
OVERLOADS = (1.0, 1.5, 3.0)
LEAST_GOODPUT, MOST_WASTED, REFUSED_MS = 0.9, 0.05, 50
#: The search for the capacity: every rate is this much above the one before, and there are at most
#: so many rates.
RISE, MOST_RATES = 1.3, 16


def overload(settings: Settings, plan: plans.Plan, least: float, say: Say) -> dict[str, Any]:
    """Goodput at and above the capacity, which is the most answers in time at any rate."""
    deadline = settings.timeout_ms / 1000

    def offered(service: local.Service, rate: float) -> dict[str, Any]:
        at = dataclasses.replace(plan, rate=rate)
        figures, told = asyncio.run(load.run(service.url, at, replicas=settings.replicas[0]))
        found = {"rate": rate, **figures, **load.goodput(at, told, deadline)}
        say(
            f"{rate:6.1f}/s: {found['goodput']:6.1f}/s in time, {found['statuses']}, p99 "
            f"{found['p99_ms']:.0f} ms, refused after {found['refused_p50_ms']:.0f} ms, wasted "
            f"{found['wasted_share']:.3f}"
        )
        return found

    with local.Service(settings) as service:
        asyncio.run(load.send(service.url, dataclasses.replace(plan, rate=least, seconds=3)))
        rising: list[dict[str, Any]] = []
        capacity = 0.0
        for number in range(MOST_RATES):
            rising.append(offered(service, least * RISE**number))
            found = rising[-1]["goodput"]
            # Where a rate is not kept up, the next one may still have more answers in time.
            if found < KEPT_UP * rising[-1]["offered_rate"] and found <= capacity:
                break
            capacity = max(capacity, found)
        say(f"capacity {capacity:.1f}/s")
        runs = [offered(service, factor * capacity) for factor in OVERLOADS]
    for factor, run in zip(OVERLOADS, runs, strict=True):
        run["share_of_capacity"] = run["goodput"] / capacity
        run["met"] = bool(
            run["share_of_capacity"] >= LEAST_GOODPUT
            and run["wasted_share"] <= MOST_WASTED
            and not run["refused_p50_ms"] >= REFUSED_MS
            and not run["refused_without_retry_after"]
        )
        say(
            f"{factor} x capacity: {run['share_of_capacity']:.2f}, {'met' * run['met'] or 'missed'}"
        )
    return {"capacity": capacity, "rising": rising, "overloads": runs}
