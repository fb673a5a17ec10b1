"""Benchmark of the whole ranking network: materialised, hand-optimised, co-designed, rewritten.

    python -m benchmarks.ranking --out benchmarks/results/ranking-h200.json

Every version scores the same request with the same parameters and is checked against the
materialised network in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import children, harness
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
#: Seconds after which a process that measures a peak is ended.
PEAK_SECONDS = 300
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
BY_NAME = {provider.name: provider for provider in (*ALL, SERVED)}


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


def device_peaks(sizes: Sizes, providers: Sequence[Provider]) -> dict[str, int | None]:
    """Measures the peak bytes of the device's allocator for each provider, in other processes.

    Call this before the current process allocates device memory. XLA tries GEMM algorithms and
    needs more memory for them than the network, so the first process of a provider compiles, and a
    second one, which loads the program from the cache, measures. The allocator preallocates: if it
    grew instead, it would count up to 128 MiB of unused memory in every piece.
    """
    peaks: dict[str, int | None] = {}
    given = json.dumps(dataclasses.asdict(sizes))
    with tempfile.TemporaryDirectory() as cache:
        environment = children.environment(
            {
                "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
                "JAX_COMPILATION_CACHE_DIR": cache,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        )
        for provider in providers:
            command = children.command("benchmarks.ranking", "--peak-of", provider.name, given)
            peaks[provider.name], reason = None, ""
            try:
                for _ in range(2):
                    done = subprocess.run(
                        command,
                        cwd=children.ROOT,
                        env=environment,
                        timeout=PEAK_SECONDS,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                peaks[provider.name] = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                reason = f": {error} {str(error.stderr)[-500:]}"
            print(f"peak of {provider.name}: {peaks[provider.name]}{reason}", flush=True)
    return peaks


def peak_of(name: str, sizes: Sizes) -> int | None:
    """Runs a provider once; returns the device's peak bytes, None if it does not report them.

    Without a GPU, the sizes shrink.
    """
    if jax.default_backend() != "gpu":
        sizes = small(sizes)
    # The inputs come from the host, so that computing them does not affect the peak. Zeros need as
    # much memory as other values.
    params, request = jax.eval_shape(lambda: inputs_of(sizes))
    params, request = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (params, request))
    counts = ranking.candidate_counts(sizes)
    index = np.repeat(np.arange(sizes.users, dtype=np.int32), counts)
    inputs = jax.device_put((params, request._replace(cand_to_user=index)))
    fn = BY_NAME[name].make(max_candidates_per_user(sizes))
    jax.block_until_ready(jax.jit(fn)(*inputs))
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else int(peak)


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
        for field in ("peak_bytes", "total_bytes"):
            if ours.get(field) and copies.get(field):
                share = ours[field] / copies[field]
                found.append(f"{share:.2f} of their memory, bar {MEMORY_BAR}")
                break
    if hand is not None:
        faster = hand["median_ms"] / ours["median_ms"]
        found.append(f"{faster:.2f} x XLA by hand, bar {BY_HAND_BAR}")
    return "; ".join(found)


def _measure(point: Point, run: harness.Run) -> dict[str, Any]:
    # Sweeps omit the tuned copies, which take longer to compile than to time.
    providers = [p for p in ALL if point.sweep == "default" or p is not TUNED]
    providers += [SERVED] if point.sweep == "candidates" else []
    measured = measure_point(point, providers, run.protocol)
    for record in measured["providers"]:
        if point.sweep == "default" and run.prepared.get(record["name"]) is not None:
            record["peak_bytes"] = run.prepared[record["name"]]
    return measured


def _measure_peaks(run: harness.Run) -> dict[str, int | None]:
    todo = BENCHMARK.points(run.options)
    sizes = next((point.case for point in todo if point.sweep == "default"), None)
    return device_peaks(sizes, ALL) if run.options.peaks and sizes is not None else {}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peaks", action="store_true", help="also measure peak memory")


BENCHMARK = Benchmark(
    "ranking",
    SWEEPS,
    lambda o: (point for sweep in o.sweep for point in points(sweep)),
    lambda point: dataclasses.replace(point, case=small(point.case)),
    _measure,
    bars,
    describe_all,
    _add_options,
    _measure_peaks,
    times_matmul=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a provider failed or was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--peak-of"]:  # A process of `device_peaks`.
        _, name, sizes = argv
        print(json.dumps(peak_of(name, Sizes(**json.loads(sizes)))))
        return 0
    return BENCHMARK.main(argv)


if __name__ == "__main__":
    sys.exit(main())
