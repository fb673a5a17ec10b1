"""Benchmark of the whole ranking network: materialised, hand-optimised, co-designed, rewritten.

    python -m benchmarks.ranking --out benchmarks/results/ranking-h200.json

Every version scores the same request with the same parameters and is checked against the
materialised network in float32. Memory is what XLA counts for the program and its arrays: the peak
of the device's allocator was larger by 1e-6 of it at most, for five versions on an H200.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.records import Record, describe_all, provider_of
from ikbo_jax.cases import ranking as cases
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.models import ranking
from ikbo_jax.models.ranking import Sizes
from ikbo_jax.rewrite import rewrite

DEFAULT = Sizes()
SWEEPS = ("default", "ratio", "candidates")
RATIOS = (10, 70, 300, 1000)
CANDIDATES = (256, 512, 1024, 2048, 4096, 8192)
#: Candidates per user in the sweep over candidates.
RATIO = 70
#: Bars at the default point: speed-up of co-designed over materialised and over hand-optimised;
#: time of rewritten over co-designed; memory of co-designed over materialised.
COPIES_BAR, BY_HAND_BAR, REWRITE_BAR, MEMORY_BAR = 3.0, 1.25, 1.05, 0.25


class Provider(NamedTuple):
    """One version of the network; `options` are XLA's for its program.

    `make` takes the largest number of candidates of one user and returns a function of parameters
    and request. `prepare` makes the function's parameters of the network's before the timing.
    """

    name: str
    stage: str
    make: Callable[[int], Callable[..., jax.Array]]
    prepare: Callable[[Any], Any] | None = None
    options: dict[str, Any] | None = None

    def inputs(self, inputs: tuple[Any, ranking.Request]) -> tuple[Any, ranking.Request]:
        if self.prepare is None:
            return inputs
        return jax.block_until_ready(jax.jit(self.prepare)(inputs[0])), inputs[1]


COPIES = Provider("materialised", "users copied to candidates", lambda most: ranking.materialised)
TUNED_COPIES = functools.partial(ranking.materialised, tuned=True)
STAGE = "users copied to candidates, K aligned, cuDNN"
TUNED = Provider("materialised-tuned", STAGE, lambda most: TUNED_COPIES)
BY_HAND = Provider(
    "hand-optimised",
    "decomposed and folded by hand in XLA, cuDNN",
    lambda most: functools.partial(ranking.hand_optimised, most=most),
)
OURS = Provider("co-designed", "ikbo_jax's layers", lambda most: ranking.co_designed)
REWRITTEN = Provider(
    "rewritten", "ikbo_jax.rewrite of the copies", lambda most: rewrite(ranking.materialised)
)
REWRITTEN_TUNED = Provider(
    "rewritten-tuned", "ikbo_jax.rewrite of the tuned copies", lambda most: rewrite(TUNED_COPIES)
)
#: The layers as small requests want them; measured over candidates.
SERVED = Provider(
    "served",
    "ikbo_jax's layers, parameters prepared, concurrent graphs",
    lambda most: ranking.co_designed,
    ranking.prepare,
    {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
)
ALL = (OURS, REWRITTEN, REWRITTEN_TUNED, BY_HAND, TUNED, COPIES)


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    default = DEFAULT.candidates
    sizes: dict[str, dict[str, tuple[int, float]]] = {
        "default": {f"B={default}": (default, DEFAULT.users)},
        "ratio": {f"{ratio}:1": (default, default / ratio) for ratio in RATIOS},
        "candidates": {f"B={b}": (b, b / RATIO) for b in CANDIDATES},
    }
    for label, (candidates, users) in sizes[sweep].items():
        case = dataclasses.replace(DEFAULT, candidates=candidates, users=max(1, round(users)))
        yield Point(sweep, label, case)


def small(sizes: Sizes) -> Sizes:
    """Makes sizes small enough for a CPU, with the same number of candidates per user."""
    candidates = max(1, sizes.candidates // 16)
    users = max(1, round(candidates * sizes.users / sizes.candidates))
    small = dataclasses.replace(ranking.SMALL, candidates=candidates, users=users, layers=1)
    return dataclasses.replace(small, history=64, user_tokens=35, cand_tokens=55)


def inputs_of(sizes: Sizes) -> tuple[Any, ranking.Request]:
    """Draws parameters and a request, on the device."""
    return ranking.init(sizes), ranking.make_request(sizes)


def max_candidates_per_user(sizes: Sizes) -> int:
    """Counts the candidates of the user who has the most."""
    return int(ranking.candidate_counts(sizes).max())


def measure_point(
    point: Point, providers: Sequence[Provider], protocol: harness.Protocol
) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved."""
    sizes, inputs = point.case, inputs_of(point.case)
    most = max_candidates_per_user(sizes)
    exact = np.asarray(cases.oracle(*inputs), np.float64)

    def compare(scores: jax.Array) -> Check:
        return Check(float(np.abs(np.asarray(scores, np.float64) - exact).max()), math.inf)

    def compiled(provider: Provider) -> harness.Contender:
        def prepare() -> tuple[Any, Any]:
            return provider.make(most), provider.inputs(inputs)

        head = provider.name, provider.stage, prepare, compare, provider.options
        return harness.compile_and_check(*head, harness.why_too_large)

    measured = harness.measure(list(map(compiled, providers)), protocol)
    runnable = {p["name"]: p for p in measured["providers"] if "error" in p}
    # The materialised network's error defines the tolerance; if it did not run, the error of the
    # first provider that ran.
    names = [name for name in (COPIES.name, TUNED.name, *runnable) if name in runnable]
    largest = float(np.abs(exact).max())
    for record in runnable.values():
        bound = cases.tolerance(sizes, runnable[names[0]]["error"], largest)
        record |= {
            "us_per_candidate": record["median_ms"] * 1e3 / sizes.candidates,
            "bound": bound,
            "ok": record["error"] <= bound,
        }
    return {"most": most, "largest": largest, **measured}


def bars(point: Record, all_points: Sequence[Record], name: str) -> str:
    """Formats the figures of a provider at the default point, each next to its bar."""
    del all_points
    ours, copies, hand, rewritten = (
        provider_of(point, p.name) for p in (OURS, COPIES, BY_HAND, REWRITTEN)
    )
    if point["sweep"] != "default" or ours is None:
        return ""
    if name == REWRITTEN.name and rewritten is not None:
        share = rewritten["median_ms"] / ours["median_ms"]
        return f"{share:.3f} of the layers' time, bar {REWRITE_BAR}"
    found: list[str] = []
    if name != OURS.name:
        return ""
    if copies is not None:
        faster = copies["median_ms"] / ours["median_ms"]
        found.append(f"{faster:.2f} x the copies, bar {COPIES_BAR}")
        if ours.get("total_bytes") and copies.get("total_bytes"):
            share = ours["total_bytes"] / copies["total_bytes"]
            found.append(f"{share:.2f} of their memory, bar {MEMORY_BAR}")
    if hand is not None:
        faster = hand["median_ms"] / ours["median_ms"]
        found.append(f"{faster:.2f} x XLA by hand, bar {BY_HAND_BAR}")
    return "; ".join(found)


def _measure(point: Point, run: harness.Run) -> dict[str, Any]:
    # Sweeps omit the tuned copies, which take longer to compile than to time.
    providers = [p for p in ALL if point.sweep == "default" or p is not TUNED]
    providers += [SERVED] if point.sweep == "candidates" else []
    return measure_point(point, providers, run.protocol)


BENCHMARK = Benchmark(
    "ranking",
    SWEEPS,
    harness.of_sweeps(points),
    lambda point: dataclasses.replace(point, case=small(point.case)),
    _measure,
    bars,
    describe_all,
    times_matmul=False,
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
