"""Benchmark of drawn workloads that nobody tuned for, beside what a user has without this library.

    python -m benchmarks.production --jobs 12 --out benchmarks/results/production-h200.json

Workloads come from `production_draws`, forward and, for training, forward with all gradients. Every
contender is compared with the XLA path in float32. A point's *roofline* is the least time that the
device needs: the largest of useful FLOPs at the measured matmul, bytes read and written once at the
measured copy, and an empty kernel. Short calls are timed on the device, with all kernels, memsets
and copies (`harness.Protocol.short_ms`): cuDNN clears memory before its kernels.

The sweeps take turns, so that a run that ends early has points of each; the results file names the
missing points, and `--left` measures these in another run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import harness, timing
from benchmarks.harness import Point
from benchmarks.production_draws import DRAWS, SWEEPS, shapes, shrink
from benchmarks.production_programs import FAR, checked
from benchmarks.production_providers import contenders
from benchmarks.records import OUR_NAME, Record, format_table, points_of, provider_of
from ikbo_jax._timing import device_time

#: Useful FLOPs of the forward pass with all gradients, relative to the forward pass: gradients
#: take five products for its two (for linear compression four for two). They read and write every
#: array of the forward pass and its gradient once.
PRODUCTS = dict.fromkeys(DRAWS, harness.ATTENTION_WORK["both"]) | {"linear_compression": 3.0}
#: Bytes of the array whose copy measures the bandwidth.
COPY_BYTES = 2**30
#: Largest time relative to the best alternative.
SLOWEST_BAR = 1.03
#: Points that are named as the worst.
WORST = 10
#: Bars of the geometric means: fraction of the roofline (None: no bar), speed relative to the best
#: alternative.
MEAN_BARS = {
    "attention": (0.62, 1.6),
    "linear_compression": (0.70, 2.0),
    "gdpa": (0.62, 2.5),
    "few_queries": (None, 1.3),
}


def points(options: argparse.Namespace) -> list[Point]:
    """Draws the points of a run, or those that an earlier run left out; the sweeps take turns."""
    drawn = []
    for sweep in [sweep for sweep in SWEEPS if sweep in options.sweep]:
        op, direction = sweep.split()
        of_op = shapes(op, options.number, options.seed)
        drawn.append([Point(sweep, shape.label, shape, direction) for shape in of_op])
    found = list(itertools.chain.from_iterable(zip(*drawn, strict=True)))
    if options.left is None:
        return found
    left = set(timing.read_results(options.left)["left_out"])
    return [point for point in found if point.name in left]


def work(point: Point) -> tuple[float, float]:
    """Counts the useful FLOPs and the bytes of a point."""
    if point.direction == "forward":
        return point.case.flops, point.case.num_bytes
    return point.case.flops * PRODUCTS[point.case.op], 2.0 * point.case.num_bytes


class Ceilings(NamedTuple):
    """What the device reaches: TB/s of a copy, and milliseconds of an empty kernel."""

    copy_tb_per_s: float
    empty_ms: float


def ceilings(run: harness.Run) -> Ceilings:
    """Measures the ceilings of the device."""
    size = COPY_BYTES if jax.default_backend() == "gpu" else 2**20
    window_s, rounds = run.protocol.window_s, run.protocol.rounds
    nothing = jnp.zeros((), jnp.float32)
    empty = device_time.measure(jax.jit(lambda x: x + 1).lower(nothing).compile(), nothing)
    copy = timing.copy_ceiling(size, window_s=window_s, rounds=rounds)
    return Ceilings(copy["tb_per_s"], 0.0 if empty is None else empty.ms)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks the contenders of a point, and times them interleaved with the reference matmul."""
    found = checked(contenders(point.case), point.direction, FAR)
    if not run.protocol.rounds:
        return {}
    flops, num_bytes = work(point)
    protocol = dataclasses.replace(run.protocol, short_ms=device_time.SHORT_MS)
    measured = harness.measure(found, protocol, flops)
    compute_ms = flops / measured["matmul_tflops"] / 1e9
    copy_ms = num_bytes / run.prepared.copy_tb_per_s / 1e9
    roofline = max(compute_ms, copy_ms, run.prepared.empty_ms)
    for record in measured["providers"]:
        if "median_ms" in record:
            record["fraction"] = roofline / record["median_ms"]
    return {"bytes": num_bytes, "roofline_ms": roofline, **measured}


# What a run found: speed relative to the alternatives


def alternative(point: Record) -> Record | None:
    """Finds the fastest contender besides this library; None if none could run."""
    timed = [p for p in point["providers"] if p["name"] != OUR_NAME and "median_ms" in p]
    return min(timed, key=lambda p: float(p["median_ms"]), default=None)


def alternative_name(point: Record) -> str:
    """Names the fastest contender besides this library; "-" if none could run."""
    other = alternative(point)
    return "-" if other is None else str(other["name"])


def speedup(point: Record) -> float | None:
    """Divides the best alternative's time by this library's; None if either is missing."""
    ours, other = provider_of(point, OUR_NAME), alternative(point)
    if ours is None or other is None:
        return None
    return float(other["median_ms"]) / float(ours["median_ms"])


def bars(point: Record, all_points: Sequence[Record] = (), name: str = OUR_NAME) -> str:
    """Formats the best alternative of a point, and this library's speed relative to it."""
    del all_points
    if (ratio := speedup(point)) is None or name != OUR_NAME:
        return ""
    slow = f", bar {1 / SLOWEST_BAR:.2f}" if ratio < 1 / SLOWEST_BAR else ""
    return f"{ratio:.2f} x {alternative_name(point)}{slow}"


class Means(NamedTuple):
    """Geometric means of a sweep: of fractions of the roofline and of speeds, with their bars.

    `compared` is the sweep's part of the function of this name; `slower` counts points below
    `SLOWEST_BAR`.
    """

    sweep: str
    compared: list[tuple[float, Record]]
    fraction: float
    speedup: float
    slower: int
    bars: tuple[float | None, float]


def compared(points: Sequence[Record]) -> list[tuple[float, Record]]:
    """Lists points with this library's speed relative to the best alternative, slowest first."""
    found = [(ratio, p) for p in points if (ratio := speedup(p)) is not None]
    return sorted(found, key=lambda pair: pair[0])


def means(results: Record) -> Iterator[Means]:
    """Yields every sweep that has points with an alternative."""
    for sweep in SWEEPS:
        found = compared(points_of(results, sweep))
        if not found:
            continue
        ours = [record for _, p in found if (record := provider_of(p, OUR_NAME)) is not None]
        yield Means(
            sweep,
            found,
            statistics.geometric_mean(float(record["fraction"]) for record in ours),
            statistics.geometric_mean(ratio for ratio, _ in found),
            sum(ratio < 1 / SLOWEST_BAR for ratio, _ in found),
            MEAN_BARS[sweep.split()[0]],
        )


def summary(results: Record) -> str:
    """Formats geometric means of every sweep, the number of points that lose, and the ten worst."""
    lines = []
    for sweep in means(results):
        lines.append(
            f"{sweep.sweep}: {len(sweep.compared)} points, {sweep.fraction:.2f} of the roofline "
            f"(bar {sweep.bars[0] or 'none'}), {sweep.speedup:.2f} x the best alternative "
            f"(bar {sweep.bars[1]}), {sweep.slower} slower (bar 0)"
        )
        for ratio, point in sweep.compared[:WORST]:
            lines.append(f"    {ratio:.2f} x {alternative_name(point)}: {point['label']}")
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=80, help="points of every sweep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    words = "only the points that this results file names as left out"
    parser.add_argument("--left", type=pathlib.Path, help=words)


BENCHMARK = harness.Benchmark(
    "production",
    SWEEPS,
    points,
    lambda point: dataclasses.replace(point, case=shrink(point.case)),
    measure_point,
    bars,
    describe=bars,
    add_options=_add_options,
    prepare=ceilings,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if points are missing or this library failed or erred."""
    results = BENCHMARK.run(BENCHMARK.parse(argv))
    table = format_table(results, bars)
    status = harness.print_results(results, f"{table}\n{summary(results)}")
    return 1 if results["left_out"] else status


if __name__ == "__main__":
    sys.exit(main())
