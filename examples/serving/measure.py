"""Measures the service: batching against one request at a time, and the start from a warm cache."""

import collections
import contextlib
import dataclasses
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import uvloop

from examples.serving import load, local, models, plans, records
from examples.serving.settings import Settings
from ikbo_jax import serving

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


def start_up(settings: Settings, say: records.Say, runs: int = 3) -> dict[str, Any]:
    """Seconds from JAX's own start to a scorer that is ready; the first run fills the cache."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        code = _START.format(settings=dataclasses.replace(settings, cache=cache))
        command = [sys.executable, "-c", code]
        for number in range(runs + 1):
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=local.ROOT
            )
            jax_s, scorer_s, cpu_s = (float(word) for word in done.stdout.split()[-3:])
            found.append({"jax_s": jax_s, "scorer_s": scorer_s, "scorer_cpu_s": cpu_s})
            say(
                f"start {number}: JAX {jax_s:.1f} s, then {scorer_s:.1f} s to a ready scorer "
                f"({cpu_s:.1f} s of CPU time)"
            )
    return {"first": found[0], "warm": found[1:]}


def in_process(
    settings: Settings, plan: plans.Plan, say: records.Say, rounds: int = 3
) -> dict[str, Any]:
    """The scorer alone: requests a second and the latency of a call, for several merges and hits.

    All cases take turns, so that other load on the machine meets them alike. A request whose
    user's state is not to be found has a version of its own.
    """
    source = settings.load()
    scorer = settings.scorer(source)
    asked = plans.requests(dataclasses.replace(plan, rate=100, seconds=SECONDS_ALONE))
    known = [models.request(source, one.user, one.items) for one in asked]
    rng, versions = np.random.default_rng(plan.seed), itertools.count(1)
    cases = [*itertools.product(MERGES, HITS), OFFLINE]
    times = {case: records.Times() for case in cases}
    calls = {case: records.Times() for case in cases}
    for (merge, hits), total in list(times.items()) * rounds:
        scorer.rank(known)
        requests = plans.with_new_users(known, hits, rng, versions)
        with total.measured():
            if merge:
                for first in range(0, len(requests), merge):
                    with calls[merge, hits].measured():
                        scorer.rank(requests[first : first + merge])
            else:
                collections.deque(serving.rank_offline(scorer, known), maxlen=0)
    found = []
    for (merge, hits), total in times.items():
        name = f"{merge} merged, {hits:.0%} hits" if merge else "offline"
        rate = len(known) / statistics.median(total.seconds)
        milliseconds = np.asarray(calls[merge, hits].seconds or [0.0]) * 1e3
        found.append(
            {
                "merged": merge,
                "hits": hits,
                "requests_per_second": rate,
                "cpu_ms_per_request": sum(total.cpu_seconds) / len(known) / rounds * 1e3,
                "call_p50_ms": float(np.percentile(milliseconds, 50)),
                "call_p99_ms": float(np.percentile(milliseconds, 99)),
                "seconds": total.seconds,
            }
        )
        say(f"{name}: {rate:.0f} requests/s, {found[-1]['cpu_ms_per_request']:.1f} ms of CPU each")
    return {
        "requests": len(known),
        "candidates": sum(request.size for request in known),
        "cases": found,
        "compilations": scorer.metrics.compilations,
    }


@contextlib.contextmanager
def offered(
    settings: Settings, plan: plans.Plan, least: float, say: records.Say
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts a service; yields a function that offers a rate to it, and returns the figures."""
    with local.Service(settings) as service:

        def at(rate: float, seed: int = plan.seed) -> dict[str, Any]:
            asked = dataclasses.replace(plan, rate=rate, seed=seed)
            deadline = settings.timeout_ms / 1000
            figures, told = uvloop.run(
                load.run(service.url, asked, replicas=settings.replicas[0], deadline_s=deadline)
            )
            kept = figures["statuses"].get("200", 0) == len(told)
            kept &= figures["throughput"] >= KEPT_UP * figures["offered_rate"]
            say(
                f"{rate:6.1f}/s: {figures['throughput']:6.1f}/s answered, {figures['goodput']:.1f} "
                f"in time, {figures['statuses']}, p50 {figures['p50_ms']:.0f} ms, p99 "
                f"{figures['p99_ms']:.0f} ms, refused after {figures['refused_p50_ms']:.0f} ms, "
                f"{figures['requests_per_call']:.1f} requests a call, hit rate "
                f"{figures['hit_rate']:.2f}, wasted {figures['wasted_share']:.3f}"
            )
            return {**figures, "rate": rate, "kept_up": kept}

        # Connections, and the first users.
        uvloop.run(load.send(service.url, dataclasses.replace(plan, rate=least, seconds=3)))
        yield at


def rising(at: Callable[..., dict[str, Any]], least: float, seed: int) -> list[dict[str, Any]]:
    """Rising rates, until two in a row are not kept up and have no more answers in time.

    Where a rate is not kept up, the next one may still have more answers in time.
    """
    found: list[dict[str, Any]] = []
    most, stalled = 0.0, 0
    while stalled < 2:
        found.append(run := at(least * STEP ** len(found), seed + len(found)))
        rises = run["goodput"] > min(most, KEPT_UP * run["offered_rate"])
        most, stalled = max(most, run["goodput"]), 0 if rises else stalled + 1
    return found


def batching(
    settings: Settings, plan: plans.Plan, least: float, say: records.Say
) -> dict[str, Any]:
    """The largest rates with and without batches; `ratio` compares them at bounded latency.

    "unmerged" computes as many requests side by side as "batched" computes batches, so that it
    tells what merging adds.
    """
    unmerged = dataclasses.replace(settings, batch=False)
    single = dataclasses.replace(unmerged, concurrent=1)
    found: dict[str, Any] = {}
    for name, chosen in (("single", single), ("unmerged", unmerged), ("batched", settings)):
        say(f"{name}:")
        with offered(chosen, plan, least, say) as at:
            found[name] = rising(at, least, plan.seed)
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


def overload(
    settings: Settings, plan: plans.Plan, least: float, say: records.Say
) -> dict[str, Any]:
    """Goodput at and above the capacity, which is the most answers in time at any rate."""
    with offered(settings, plan, least, say) as at:
        found = rising(at, least, plan.seed)
        capacity = max(run["goodput"] for run in found)
        say(f"capacity {capacity:.1f}/s")
        runs = [at(factor * capacity) for factor in OVERLOADS]
    missed = []
    for factor, run in zip(OVERLOADS, runs, strict=True):
        run["share_of_capacity"] = run["goodput"] / capacity
        run["met"] = (
            run["share_of_capacity"] >= LEAST_GOODPUT
            and run["wasted_share"] <= MOST_WASTED
            and run["refused_p50_ms"] < REFUSED_MS
            and not run["refused_without_retry_after"]
        )
        say(
            f"{factor} x capacity: {run['share_of_capacity']:.2f}, {'met' * run['met'] or 'missed'}"
        )
        missed += [f"{factor} x capacity"] * (not run["met"])
    figures = {"capacity": capacity, "rising": found, "overloads": runs}
    return {"figures": figures, "missed": missed}
