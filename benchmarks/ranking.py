"""Benchmark of the whole ranking network: materialised, hand-optimised, co-designed, rewritten.

    python -m benchmarks.ranking --out benchmarks/results/ranking-h200.json

Every version scores the same request with the same parameters and is checked against the
materialised network in float32. Without a GPU all sizes shrink, and the figures only show that the
benchmark runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import children, harness, profiles
from benchmarks.harness import Contender
from benchmarks.records import Record, mib, provider_of, text_table
from ikbo_jax._timing import interleaved_ms
from ikbo_jax.cases import ranking as cases
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
    """One version of the network.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      make: takes the largest number of candidates of one user; returns a function of parameters
        and request.
      prepare: makes its parameters of the network's, which is not timed; None: they are the same.
      options: XLA's options for its program.
    """

    name: str
    stage: str
    make: Callable[[int], Callable[..., jax.Array]]
    prepare: Callable[[Any], Any] | None = None
    options: dict[str, Any] | None = None

    def inputs(self, inputs: tuple[Any, ranking.Request]) -> tuple[Any, ranking.Request]:
        """Its parameters, and the request."""
        if self.prepare is None:
            return inputs
        return jax.block_until_ready(jax.jit(self.prepare)(inputs[0])), inputs[1]


COPIES = Provider("materialised", "users copied to candidates", lambda most: ranking.materialised)
TUNED = Provider(
    "materialised-tuned",
    "users copied to candidates, K aligned, cuDNN",
    lambda most: functools.partial(ranking.materialised, tuned=True),
)
BY_HAND = Provider(
    "hand-optimised",
    "decomposed and folded by hand in XLA, cuDNN",
    lambda most: functools.partial(ranking.hand_optimised, most=most),
)
OURS = Provider("co-designed", "ikbo_jax's layers", lambda most: ranking.co_designed)
REWRITTEN = Provider(
    "rewritten", "ikbo_jax.rewrite of the copies", lambda most: rewrite(ranking.materialised)
)
#: The model that a user of cuDNN has.
REWRITTEN_TUNED = Provider(
    "rewritten-tuned",
    "ikbo_jax.rewrite of the tuned copies",
    lambda most: rewrite(functools.partial(ranking.materialised, tuned=True)),
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


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes: the sweep it belongs to, its label in the sweep, and the sizes."""

    sweep: str
    label: str
    sizes: Sizes


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""

    def at(label: str, candidates: int, users: int) -> Point:
        sizes = dataclasses.replace(DEFAULT, candidates=candidates, users=users)
        return Point(sweep, label, sizes)

    if sweep == "default":
        yield Point(sweep, f"B={DEFAULT.candidates}", DEFAULT)
    elif sweep == "ratio":
        for ratio in RATIOS:
            yield at(f"{ratio}:1", DEFAULT.candidates, max(1, round(DEFAULT.candidates / ratio)))
    elif sweep == "candidates":
        for candidates in CANDIDATES:
            yield at(f"B={candidates}", candidates, max(1, round(candidates / RATIO)))
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point with sizes small enough for a CPU, and the same number of candidates per user."""
    sizes = point.sizes
    candidates = max(1, sizes.candidates // 16)
    users = max(1, round(candidates * sizes.users / sizes.candidates))
    small = dataclasses.replace(
        ranking.SMALL, candidates=candidates, users=users, layers=1, history=64, cand_tokens=55
    )
    return dataclasses.replace(point, sizes=dataclasses.replace(small, user_tokens=35))


def inputs_of(sizes: Sizes) -> tuple[Any, ranking.Request]:
    """Seeded parameters and a request, on the device."""
    return ranking.init(sizes), ranking.make_request(sizes)


def max_candidates_per_user(sizes: Sizes) -> int:
    """The largest number of candidates of one user."""
    return int(ranking.candidate_counts(sizes).max())


def _compile_and_check(
    provider: Provider, sizes: Sizes, inputs: Any, exact: np.ndarray
) -> Contender:
    """Compiles a provider and computes its error; records a failure instead of raising it."""
    record: dict[str, Any] = {"name": provider.name, "stage": provider.stage}
    try:
        inputs = provider.inputs(inputs)
        start = time.monotonic()
        lowered = jax.jit(provider.make(max_candidates_per_user(sizes))).lower(*inputs)
        traced = time.monotonic()
        compiled = lowered.compile(provider.options)
        record |= {"trace_s": traced - start, "compile_s": time.monotonic() - traced}
        out = np.asarray(compiled(*inputs), np.float64)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:300]}"
        # Running out of memory is a valid result: copies for many candidates may not fit.
        kind = "skipped" if "RESOURCE_EXHAUSTED" in text else "failure"
        return Contender(record | {kind: text})
    memory = compiled.memory_analysis()
    if memory is not None:
        temp, result = int(memory.temp_size_in_bytes), int(memory.output_size_in_bytes)
        record |= {
            "temp_bytes": temp,
            "total_bytes": temp + result + int(memory.argument_size_in_bytes),
        }
    record["error"] = float(np.abs(out - exact).max())
    return Contender(record, functools.partial(compiled, *inputs))


def measure_point(
    point: Point, providers: Sequence[Provider], *, window_s: float, rounds: int
) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved."""
    sizes, inputs = point.sizes, inputs_of(point.sizes)
    exact = np.asarray(cases.oracle(*inputs), np.float64)
    contenders = [_compile_and_check(provider, sizes, inputs, exact) for provider in providers]
    runnable = {c.record["name"]: c for c in contenders if "error" in c.record}
    # The materialised network's error defines the tolerance; if it did not run, the error of the
    # first provider that ran.
    names = [name for name in (COPIES.name, TUNED.name, *runnable) if name in runnable]
    largest = float(np.abs(exact).max())
    thunks = {name: contender.thunk for name, contender in runnable.items()}
    samples = interleaved_ms(thunks, window_s=window_s, rounds=rounds)
    for name, contender in runnable.items():
        median = statistics.median(samples[name])
        bound = cases.tolerance(sizes, runnable[names[0]].record["error"], largest)
        contender.record |= {
            "ms": samples[name],
            "median_ms": median,
            "us_per_candidate": median * 1e3 / sizes.candidates,
            "bound": bound,
            "ok": contender.record["error"] <= bound,
        }
    return {
        "sweep": point.sweep,
        "label": point.label,
        "problem": dataclasses.asdict(sizes),
        "most": max_candidates_per_user(sizes),
        "largest": largest,
        "providers": [contender.record for contender in contenders],
    }


def profile(point: Point, provider: Provider) -> profiles.Shares:
    """The time of each kernel in a provider's run at a point."""
    inputs = provider.inputs(inputs_of(point.sizes))
    lowered = jax.jit(provider.make(max_candidates_per_user(point.sizes))).lower(*inputs)
    is_on_gpu = jax.default_backend() == "gpu"
    compiled = lowered.compile(profiles.WITHOUT_GRAPHS if is_on_gpu else None)
    return profiles.shares(functools.partial(compiled, *inputs), compiled.as_text() or "")


def device_peaks(point: Point, providers: Sequence[Provider]) -> dict[str, int | None]:
    """Peak bytes of the device's allocator for every provider, each in a separate process.

    Call this before the current process allocates device memory, since it would leave none to the
    others. XLA tries GEMM algorithms on the device and needs more memory for them than the network,
    so the first process of a provider compiles, and a second one, which loads the compiled program
    from the cache, measures. The allocator preallocates the device's memory: if it grew instead,
    it would count up to 128 MiB of unused memory in every piece, here 80 MiB of 838.
    """
    peaks: dict[str, int | None] = {}
    sizes = json.dumps(dataclasses.asdict(point.sizes))
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
            command = children.command("benchmarks.ranking", "--peak-of", provider.name, sizes)
            peaks[provider.name], reason = None, ""
            try:
                for _ in range(2):
                    done = subprocess.run(
                        command,
                        cwd=children.ROOT,
                        env=environment,
                        capture_output=True,
                        text=True,
                        timeout=PEAK_SECONDS,
                        check=True,
                    )
                peaks[provider.name] = json.loads(done.stdout.splitlines()[-1])
            except subprocess.TimeoutExpired as error:
                reason = f": {error}"
            except subprocess.CalledProcessError as error:
                reason = f": {error.stderr[-500:]}"
            print(f"peak of {provider.name}: {peaks[provider.name]}{reason}", flush=True)
    return peaks


def peak_of(name: str, sizes: Sizes) -> int | None:
    """Runs a provider once; returns the device's peak bytes, None if it does not report them.

    Without a GPU, the sizes shrink.
    """
    if jax.default_backend() != "gpu":
        sizes = shrink(Point("default", "", sizes)).sizes
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


def bars(point: Record, name: str) -> str:
    """Text with the figures of a provider at the default point, each next to its bar."""
    if point["sweep"] != "default" or name not in (OURS.name, REWRITTEN.name):
        return ""
    ours, copies, hand, rewritten = (
        provider_of(point, p.name) for p in (OURS, COPIES, BY_HAND, REWRITTEN)
    )
    found = []
    if ours is None:
        return ""
    if name == REWRITTEN.name:
        if rewritten is None:
            return ""
        share = rewritten["median_ms"] / ours["median_ms"]
        return f"{share:.3f} of the layers' time, bar {REWRITE_BAR}"
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


def format_table(results: Record) -> str:
    """The results as plain text."""

    def figures(p: Record) -> str:
        memory = f"{mib(p, 'temp_bytes', 1):>10}{mib(p, 'total_bytes', 1):>11}"
        return f"{p['median_ms']:>9.3f}{p['us_per_candidate']:>10.3f}{memory}"

    header = f"{'ms':>9}{'us/cand.':>10}{'temp MiB':>10}{'total MiB':>11}"
    return text_table(results, (20, 20), header, figures, bars)


def run(
    sweeps: Sequence[str],
    *,
    out: pathlib.Path,
    peaks: bool = False,
    profiled: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Measures sweeps, as `attention.run` does.

    Args (the others are as for `attention.run`):
      sweeps: names from `SWEEPS`.
      peaks: whether to measure the peak memory of the device at the default point, too.
      profiled: names of the providers to profile: the time of each kernel is printed and recorded.
      **options: `quick` and `budget_s` of `harness.Run`.
    """
    bench = harness.Run("ranking", out, **options)
    todo = [point for sweep in sweeps for point in points(sweep)]
    found_peaks = device_peaks(todo[0], ALL) if peaks and todo[0].sweep == "default" else {}
    window_s, rounds = bench.protocol.window_s, bench.protocol.rounds
    del bench.results["protocol"]["matmul_size"]  # This benchmark times no matmul.

    def measure(point: Point) -> dict[str, Any]:
        # Sweeps omit the tuned copies, which take longer to compile than to time.
        providers = [p for p in ALL if point.sweep == "default" or p is not TUNED]
        providers += [SERVED] if point.sweep == "candidates" else []
        measured = measure_point(point, providers, window_s=window_s, rounds=rounds)
        for record in measured["providers"]:
            if point.sweep == "default" and found_peaks.get(record["name"]) is not None:
                record["peak_bytes"] = found_peaks[record["name"]]
            if record["name"] in profiled and "median_ms" in record:
                shares = profile(point, BY_NAME[record["name"]])
                record["ms_by_part"] = shares.by_part
                print(f"{point.sweep} {point.label}, {record['name']}:\n{shares}")
        return measured

    def describe(point: Record) -> str:
        times = (f"{p['name']} {p.get('median_ms', math.nan):.3f}" for p in point["providers"])
        return ", ".join(times) + " ms"

    return bench.measure(todo, measure, shrink, describe)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--peak-of"]:  # A process of `device_peaks`.
        _, name, sizes = argv
        print(json.dumps(peak_of(name, Sizes(**json.loads(sizes)))))
        return 0
    parser = harness.parser("ranking", SWEEPS)
    parser.add_argument("--peaks", action="store_true", help="also measure peak memory")
    parser.add_argument(
        "--profile",
        nargs="+",
        choices=BY_NAME,
        metavar="NAME",
        default=(),
        help="providers to profile; prints the time of each kernel",
    )
    args = parser.parse_args(argv)
    options = {"peaks": args.peaks, "profiled": args.profile}
    results = run(args.sweep, **options, **harness.options(args))
    return harness.print_lines(results, format_table(results))


if __name__ == "__main__":
    sys.exit(main())
