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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness, ranking_by_hand
from benchmarks.harness import Benchmark, Point
from benchmarks.ranking_by_hand import tuned_copies
from ikbo_jax.cases import ranking as cases
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.models import ranking
from ikbo_jax.models.ranking import Sizes
from ikbo_jax.rewrite import rewrite

DEFAULT = Sizes()


class Version(NamedTuple):
    """One version of a network; `options` are XLA's for its program.

    `make` takes sizes and returns a function of parameters and inputs, or raises
    NotImplementedError with the reason. `prepare` makes the function's parameters of the network's
    before the timing. With `is_other`, it is another function, whose results are not checked.
    """

    name: str
    stage: str
    make: Callable[[Any], Callable[..., jax.Array]]
    prepare: Callable[[Any], Any] | None = None
    options: dict[str, Any] | None = None
    is_other: bool = False

    def inputs(self, inputs: tuple[Any, ranking.Request]) -> tuple[Any, ranking.Request]:
        if self.prepare is None:
            return inputs
        return jax.block_until_ready(jax.jit(self.prepare)(inputs[0])), inputs[1]


def _hand_optimised(sizes: Sizes) -> Callable[..., jax.Array]:
    most = int(ranking.candidate_counts(sizes).max())
    return functools.partial(ranking_by_hand.hand_optimised, most=most)


COPIED = "users copied to candidates"
COPIES = Version("materialised", COPIED, lambda _: ranking.materialised)
TUNED = Version("materialised-tuned", f"{COPIED}, K aligned, cuDNN", lambda _: tuned_copies)
BY_HAND = Version("hand-optimised", "decomposed and folded by hand in XLA, cuDNN", _hand_optimised)
OURS = Version("co-designed", "ikbo_jax's layers", lambda _: ranking.co_designed)
REWRITTEN = Version(
    "rewritten", "ikbo_jax.rewrite of the copies", lambda _: rewrite(ranking.materialised)
)
REWRITTEN_TUNED = Version(
    "rewritten-tuned", "ikbo_jax.rewrite of the tuned copies", lambda _: rewrite(tuned_copies)
)
#: The layers as small requests want them; measured over candidates.
SERVED = Version(
    "served",
    "ikbo_jax's layers, parameters prepared, concurrent graphs",
    lambda _: ranking.co_designed,
    ranking.prepare,
    {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
)
ALL = (OURS, REWRITTEN, REWRITTEN_TUNED, BY_HAND, TUNED, COPIES)


#: Candidates and users of the points, by sweep and label.
SWEEPS: dict[str, dict[str, tuple[int, float]]] = {
    "default": {f"B={DEFAULT.candidates}": (DEFAULT.candidates, DEFAULT.users)},
    "ratio": {f"{x}:1": (DEFAULT.candidates, DEFAULT.candidates / x) for x in (10, 70, 300, 1000)},
    "candidates": {f"B={b}": (b, b / 70) for b in (256, 512, 1024, 2048, 4096, 8192)},
}
POINTS = [
    Point(sweep, label, dataclasses.replace(DEFAULT, candidates=b, users=max(1, round(users))))
    for sweep, sizes in SWEEPS.items()
    for label, (b, users) in sizes.items()
]


def small(sizes: Sizes) -> Sizes:
    """Makes sizes small enough for a CPU, with the same number of candidates per user."""
    candidates = max(1, sizes.candidates // 16)
    users = max(1, round(candidates * sizes.users / sizes.candidates))
    small = dataclasses.replace(ranking.SMALL, candidates=candidates, users=users, layers=1)
    return dataclasses.replace(small, history=64, user_tokens=35, cand_tokens=55)


def inputs_of(sizes: Sizes) -> tuple[Any, ranking.Request]:
    """Draws parameters and a request, on the device."""
    return ranking.init(sizes), ranking.make_request(sizes)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks versions at a point, and times them interleaved."""
    sizes, inputs = point.case, inputs_of(point.case)
    exact = np.asarray(cases.oracle(*inputs), np.float64)
    # Sweeps omit the tuned copies, which take longer to compile than to time.
    versions = [version for version in ALL if point.sweep == "default" or version is not TUNED]
    versions += [SERVED] if point.sweep == "candidates" else []

    def compare(scores: jax.Array) -> Check:
        return Check(float(np.abs(np.asarray(scores, np.float64) - exact).max()), math.inf)

    def compiled(version: Version) -> harness.Contender:
        return harness.compile_and_check(
            version.name,
            version.stage,
            lambda: (version.make(sizes), version.inputs(inputs)),
            compare,
            version.options,
        )

    measured = harness.measure(list(map(compiled, versions)), run.protocol)
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
    most = int(ranking.candidate_counts(sizes).max())
    return {"most": most, "largest": largest, **measured}


BENCHMARK = Benchmark(
    "ranking",
    POINTS,
    measure_point,
    shrink=lambda point: dataclasses.replace(point, case=small(point.case)),
    times_matmul=False,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
