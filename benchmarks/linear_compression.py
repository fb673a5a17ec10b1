"""Benchmark of linear compression: every stage and baseline, and sweeps over sizes.

    python -m benchmarks.linear_compression --out benchmarks/results/linear_compression-h200.json

Every figure counts useful FLOPs only: no padding, no copies. Without a GPU all sizes shrink, and
the figures only show that the benchmark runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import harness, timing, torch_baseline
from benchmarks.harness import Point, Provider
from benchmarks.linear_compression_providers import OURS, XLA, all_providers
from benchmarks.records import Record, ours_at, provider_of
from ikbo_jax.cases.linear_compression import Case
from ikbo_jax.problems import LinearCompressionProblem

DEFAULT = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
SWEEPS = ("default", "m", "k", "n", "batch", "ratio", "index")
#: Bar of our fraction at the default point.
DEFAULT_BAR = 0.82
#: Bars of our fraction in sweeps relative to the default point: in general, and for B=256.
SWEEP_BAR, SMALL_BATCH_BAR = 0.92, 0.85
#: Bar of our time relative to the XLA path in the sweeps over M, K and N; an upper bound.
NO_CLIFF_BAR = 1.02
#: Number of candidates whose output is compared with the oracle.
NUM_CHECKED = 8


def points(sweep: str, dtype: str = "bfloat16") -> Iterator[Point]:
    """Yields the points of a sweep; most differ from the default in one size."""
    base = dataclasses.replace(DEFAULT, dtype=dtype)
    k_user, k_cand = base.ks
    candidates = base.batches[-1]

    def at(label: str, index: str = "ragged", **sizes: Any) -> Point:
        return Point(sweep, label, Case(dataclasses.replace(base, **sizes), index))

    if sweep == "default":
        yield at(dtype)
    elif sweep == "m":
        yield from (at(f"M={m}", m=m) for m in (128, 256, 512, 1024))
    elif sweep == "k":
        yield from (at(f"K_cand={k}", ks=(k_user, k)) for k in (256, 1024, 2048))
    elif sweep == "n":
        yield from (at(f"N={n}", n=n) for n in (128, 256, 512))
    elif sweep == "batch":
        for b in (256, 512, 1024, 2048, 4096):
            yield at(f"B={b}", batches=(-(-b // 70), b))
    elif sweep == "ratio":
        for ratio in (1, 2, 10, 70, 1000):
            yield at(f"{ratio}:1", batches=(-(-candidates // ratio), candidates))
        yield at("10000 of one user", batches=(1, 10_000))
    elif sweep == "index":
        yield at("unsorted", index="unsorted")
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point with sizes small enough for a CPU."""
    p = point.problem
    return point.resized(
        batches=tuple(max(1, b // 16) for b in p.batches),
        ks=tuple(k // 16 for k in p.ks),
        m=p.m // 8,
        n=p.n // 8,
    )


def measure_point(
    point: Point,
    providers: Sequence[Provider],
    protocol: harness.Protocol,
    *,
    torch: bool = False,
) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved with the reference matmul."""
    problem, case = point.problem, point.case
    inputs = case.inputs()
    rows = harness.sample(problem.batches[-1], NUM_CHECKED)
    truth = case.expected(inputs, rows)
    contenders = harness.contenders_of(providers, case, inputs, rows, *truth)
    if torch:
        for record, thunk in torch_baseline.contenders(inputs.arguments, rows, *truth):
            contenders.append(harness.Contender(record, thunk))
    itemsize = jnp.dtype(problem.dtype).itemsize
    return {
        **point.entry(),
        "user_result_bytes": problem.batches[0] * problem.m * problem.n * itemsize,
        **harness.measure(contenders, problem.useful_flops, protocol),
    }


def bar(point: Record, all_points: Sequence[Record]) -> str:
    """Text with the figure of `ikbo` at a point of a results file, next to its bar."""
    ours, xla = provider_of(point, "ikbo"), provider_of(point, "xla")
    if ours is None:
        return ""
    if point["sweep"] == "default":
        return f"fraction {ours['fraction']:.3f}, bar {DEFAULT_BAR}"
    if point["sweep"] in ("m", "k", "n"):
        if xla is None:
            return ""
        return f"{ours['median_ms'] / xla['median_ms']:.3f} of XLA's time, bar {NO_CLIFF_BAR}"
    dtype = point["problem"]["dtype"]
    default = ours_at(
        p for p in all_points if p["sweep"] == "default" and p["problem"]["dtype"] == dtype
    )
    if default is None:
        return f"fraction {ours['fraction']:.3f}"
    relative = ours["fraction"] / default["fraction"]
    sweep_bar = SMALL_BATCH_BAR if point["label"] == "B=256" else SWEEP_BAR
    return f"{relative:.3f} of the default's fraction, bar {sweep_bar}"


def run(
    sweeps: Sequence[str], dtypes: Sequence[str], *, out: pathlib.Path, **options: Any
) -> dict[str, Any]:
    """Measures sweeps, as `attention.run` does.

    Args (the others are as for `attention.run`):
      sweeps: names from `SWEEPS`. "default" runs in every dtype with all providers, and with XLA's
        other formulations in the first dtype. Other sweeps run in the first dtype, with XLA only.
        Sizes that two sweeps share are timed once.
      dtypes: names of dtypes.
    """
    bench = harness.Run("linear_compression", out, **options)
    on_gpu, protocol = jax.default_backend() == "gpu", bench.protocol
    bench.results["copy"] = timing.copy_ceiling(
        timing.COPY_BYTES if on_gpu else 2**22, window_s=protocol.window_s, rounds=protocol.rounds
    )
    known: dict[Case, dict[str, Any]] = {}

    def measure(point: Point) -> dict[str, Any]:
        if point.case in known:
            return _as_in_sweep(known[point.case], point)
        is_full = point.sweep == "default" and not bench.quick
        providers = [XLA, OURS]
        if is_full:
            providers = all_providers(point.problem, point.problem.dtype == dtypes[0])
        known[point.case] = measure_point(point, providers, protocol, torch=is_full and on_gpu)
        return known[point.case]

    todo = [
        point
        for sweep in sweeps
        for dtype in (dtypes if sweep == "default" else dtypes[:1])
        for point in points(sweep, dtype)
    ]
    return bench.measure(todo, measure, shrink)


def _as_in_sweep(measured: Record, point: Point) -> dict[str, Any]:
    """The entry of an earlier point with the same sizes, as a point of another sweep."""
    providers = [p for p in measured["providers"] if p["name"] in (XLA.name, OURS.name)]
    return {**measured, "sweep": point.sweep, "label": point.label, "providers": providers}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = harness.op_parser("linear_compression", SWEEPS)
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"))
    args = parser.parse_args(argv)
    results = run(args.sweep, args.dtype or ("bfloat16", "float16"), **harness.options(args))
    return harness.print_results(results, bar)


if __name__ == "__main__":
    sys.exit(main())
