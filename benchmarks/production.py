"""Benchmark of drawn workloads that nobody tuned for, beside what a user has without this library.

    python -m benchmarks.production --out benchmarks/results/production-h200.json

Workloads come from `production_draws`, forward and, for training, forward with all gradients. Every
contender is compared with the XLA path in float32. A point's *roofline* is the least time that the
device needs: the largest of useful FLOPs at the measured matmul, bytes read and written once at the
measured copy, and an empty kernel. Short calls are timed on the device, with all kernels, memsets
and copies (`harness.Protocol.short_ms`): cuDNN clears memory before its kernels.

`--jobs` processes compile and check points; afterwards one process at a time on each GPU times
them. The processes are dealt to all GPUs in turn, and a point is timed on one GPU. They
give the memory of arrays back (`children.GIVING_BACK`): as they kept it, 14 did not fit into an
H100's 80 GB. Alternatives that cannot be the best are left out, and the results file says why
(`production_programs`). With `--budget-s`, points are compiled while the rest of the time suffices
to time them; the results file names the points that are missing, and `--left` measures these in
another run. The sweeps take turns, so that each has points, and a process takes both directions of
a workload, whose GEMMs are partly the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import children, harness, production_bounds, production_programs, timing
from benchmarks.harness import Point
from benchmarks.production_draws import DRAWS, SWEEPS, Shape, shapes, shrink
from benchmarks.production_programs import Program
from benchmarks.records import OP_COLUMNS, OUR_NAME, Record, format_table, points_of, provider_of
from ikbo_jax._timing import device_time

#: Useful FLOPs of the forward pass with all gradients, relative to the forward pass: gradients
#: take five products for its two (for linear compression four for two). They read and write every
#: array of the forward pass and its gradient once.
PRODUCTS = dict.fromkeys(DRAWS, harness.ATTENTION_WORK["both"]) | {"linear_compression": 3.0}
#: A point is taken for short, before it is compiled, if the peak rates of a Hopper GPU need less
#: than this share of `device_time.SHORT_MS` for it.
SHORT_SHARE = 1 / 6
#: Seconds that are kept for the timing of each point that is compiled, of a short and of another
#: one, and most seconds of a point's compilation until a process has compiled one.
SHORT_TIMING_S, TIMING_S, COMPILING_S = 1.5, 4.5, 30.0
#: Bytes of the array whose copy measures the bandwidth. The others' arrays are in memory, too, and
#: several copies are under way at once.
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


def points(sweeps: Sequence[str], number: int, seed: int) -> list[Point]:
    """`number` points of every sweep; the sweeps take turns, in the order of `SWEEPS`."""
    drawn = []
    for sweep in [sweep for sweep in SWEEPS if sweep in sweeps]:
        op, direction = sweep.split()
        of_op = shapes(op, number, seed)
        drawn.append([Point(sweep, shape.label, shape, direction) for shape in of_op])
    return list(itertools.chain.from_iterable(zip(*drawn, strict=True)))


def work(point: Point) -> tuple[float, float]:
    """Useful FLOPs and bytes of a point."""
    if point.direction == "forward":
        return point.case.flops, point.case.num_bytes
    return point.case.flops * PRODUCTS[point.case.op], 2.0 * point.case.num_bytes


def timing_s(point: Point) -> float:
    """Seconds that a point's timing takes, by its work."""
    flops, num_bytes = work(point)
    rates = production_bounds.HOPPER
    ms = 1e3 * max(flops / rates.flops, num_bytes / rates.num_bytes)
    return SHORT_TIMING_S if ms < device_time.SHORT_MS * SHORT_SHARE else TIMING_S


class Ceilings(NamedTuple):
    """What the device reaches: TB/s of a copy, and milliseconds of an empty kernel."""

    copy_tb_per_s: float
    empty_ms: float


def device() -> str:
    """The GPU that this process times on, as `CUDA_VISIBLE_DEVICES` names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0")


def devices() -> list[str]:
    """The names of all GPUs of the run."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(n) for n in range(jax.device_count())]


def ceilings(folder: pathlib.Path) -> Ceilings:
    """Of the run with this folder: measured by the first process that asks, read by the others.

    To be called while no other process uses the device.
    """
    path = folder / f"ceilings-{device()}.json"
    if path.exists():
        return Ceilings(**json.loads(path.read_text()))
    size = COPY_BYTES if jax.default_backend() == "gpu" else 2**20
    nothing = jnp.zeros((), jnp.float32)
    add = jax.jit(lambda x: x + 1).lower(nothing).compile()
    empty = device_time.measure(add, nothing)
    empty_ms = 0.0 if empty is None else empty.ms
    found = Ceilings(timing.copy_ceiling(size)["tb_per_s"], empty_ms)
    path.write_text(json.dumps(found._asdict()))
    return found


def measure_point(
    point: Point, programs: Sequence[Program], protocol: harness.Protocol, found_ceilings: Ceilings
) -> dict[str, Any]:
    """Times the contenders of a point interleaved with the reference matmul."""
    found = production_programs.ready(point.case, point.direction, programs)
    kept = found if production_bounds.peaks() is None else production_programs.leave_out_slow(found)
    flops, num_bytes = work(point)
    measured = harness.measure(kept, protocol, flops)
    measured["providers"] = [contender.record for contender in found]
    compute_ms = flops / measured["matmul_tflops"] / 1e9
    copy_ms = num_bytes / found_ceilings.copy_tb_per_s / 1e9
    roofline = max(compute_ms, copy_ms, found_ceilings.empty_ms)
    for record in measured["providers"]:
        if "median_ms" in record:
            record["tflops"] = timing.tflops(flops, record["median_ms"])
            record["fraction"] = roofline / record["median_ms"]
    return {
        "sweep": point.sweep,
        "label": point.label,
        "problem": dataclasses.asdict(point.case),
        "bytes": num_bytes,
        "roofline_ms": roofline,
        **measured,
    }


def _todo(args: argparse.Namespace) -> list[Point]:
    """The points of a run: all, or those that an earlier run left out."""
    todo = points(args.sweep, args.number, args.seed)
    if args.left is None:
        return todo
    left = set(timing.read_results(args.left)["left_out"])
    return [p for p in todo if p.name in left]


def workloads(todo: Sequence[Point]) -> list[list[int]]:
    """Positions of the points of each workload, in the order of its first point."""
    found: dict[Shape, list[int]] = {}
    for position, point in enumerate(todo):
        found.setdefault(point.case, []).append(position)
    return list(found.values())


class Budget:
    """Decides whether another point can be compiled, so that every compiled point is timed.

    Args:
      folder: where all processes leave a file for each point that they began to compile, with the
        name of their GPU, which times it.
      end: Unix time at which the timing must end.
    """

    def __init__(self, folder: pathlib.Path, end: float) -> None:
        self._folder, self._end = folder, end
        self._longest_s = 0.0

    def has_time(self, point: Point | None = None) -> bool:
        """Whether this point (None: a short one) can be compiled, and all be timed afterwards."""
        # A file's name ends with the seconds that its point's timing takes.
        files = self._folder.glob(f"begun-{device()}-*")
        begun = sum(float(path.name.rsplit("-", 1)[1]) for path in files)
        compiling_s = self._longest_s or COMPILING_S
        own = SHORT_TIMING_S if point is None else timing_s(point)
        return time.time() + compiling_s + begun + own < self._end

    def compiled(self, point: Point, number: int) -> list[Program]:
        """The programs of a point."""
        begin = time.time()
        (self._folder / f"begun-{device()}-{number}-{timing_s(point)}").touch()
        rates = production_bounds.peaks()
        found = production_programs.compiled(point.case, point.direction, rates)
        seconds = time.time() - begin
        self._longest_s = max(self._longest_s, seconds)
        ran = (p.record for p in found if "compile_s" in p.record)
        parts = ", ".join(f"{record['name']} {record['compile_s']:.0f}" for record in ran)
        print(f"compiled in {seconds:.0f} s ({parts}): {point.name}", flush=True)
        return found


def _measure_share(args: argparse.Namespace, share: int) -> None:
    """Measures the workloads that no other process has claimed; on a GPU, one process times.

    Programs are compiled before any process times, because XLA times GEMM algorithms then.
    """
    folder = pathlib.Path(args.scratch)
    children.share(folder)
    todo = _todo(args)
    if jax.default_backend() != "gpu":
        todo = [dataclasses.replace(point, case=shrink(point.case)) for point in todo]
    end = args.begin + args.budget_s
    protocol = harness.Protocol.for_device(quick=args.quick)
    protocol = dataclasses.replace(protocol, short_ms=device_time.SHORT_MS)
    timing.matmul_thunk(protocol.matmul_size)  # compiled beside the others, not while one times
    programs = _compiled_share(todo, folder, Budget(folder, end))
    (folder / f"compiled-{share}").touch()
    while len(list(folder.glob("compiled-*"))) < args.jobs:
        time.sleep(0.1)
    for n, of_point in programs.items():
        with open(folder / f"device-{device()}", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if time.time() > end:
                return
            try:
                record = measure_point(todo[n], of_point, protocol, ceilings(folder))
            except Exception as failure:  # others' programs may hold the memory that it needs
                _report(todo[n], failure)
                continue
        timing.write_results(folder / f"point-{n}.json", {"point": record})
        print(f"{todo[n].name}: {bars(record)}", flush=True)


def _report(point: Point, failure: Exception) -> None:
    print(f"{point.label}: {type(failure).__name__}: {failure!s:.300}", file=sys.stderr)


def _compiled_share(
    todo: Sequence[Point], folder: pathlib.Path, budget: Budget
) -> dict[int, list[Program]]:
    """Programs of this process's points, by the point's position, while there is time."""
    programs: dict[int, list[Program]] = {}
    positions = workloads(todo)
    for claim in children.claims(folder, len(positions), go_on=budget.has_time):
        for n in positions[claim]:
            if not budget.has_time(todo[n]):
                break
            try:
                programs[n] = budget.compiled(todo[n], n)
            except Exception as failure:  # of the XLA path in float32, with which all are compared
                _report(todo[n], failure)
    return programs


def _measure_all(args: argparse.Namespace, results: dict[str, Any]) -> bool:
    """Measures the points in `args.jobs` processes, and writes the results file as they come.

    Args:
      args: the parsed options.
      results: the content of the results file; its "points" are in the order of the draws, its
        "left_out" has the names of the others.

    Returns:
      Whether all processes succeeded.
    """
    todo = _todo(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        shared = [*args.argv, "--scratch", scratch, "--begin", str(time.time())]
        processes = []
        for n, gpu in zip(range(args.jobs), itertools.cycle(devices()), strict=False):
            extra = {**children.GIVING_BACK, "CUDA_VISIBLE_DEVICES": gpu}
            options = [*shared, "--share", str(n)]
            processes += children.start("benchmarks.production", [options], extra)
        with children.ending(processes):
            is_running = True
            while is_running:
                is_running = any(process.poll() is None for process in processes)
                for share, process in enumerate(processes):
                    if process.poll():  # the others must not wait for it
                        (folder / f"compiled-{share}").touch()
                paths = [folder / f"point-{n}.json" for n in range(len(todo))]
                done = [path.exists() for path in paths]
                if not is_running or sum(done) > len(results["points"]):
                    found = itertools.compress(paths, done)
                    results["points"] = [timing.read_results(path)["point"] for path in found]
                    missing = itertools.compress(todo, (not is_done for is_done in done))
                    results["left_out"] = [p.name for p in missing]
                    timing.write_results(args.out, results)
                time.sleep(0.1)
    failed = sum(process.returncode != 0 for process in processes)
    if failed:
        print(f"{failed} of {len(processes)} processes failed", file=sys.stderr)
    return not failed


# What a run found: speed relative to the alternatives


def alternative(point: Record) -> Record | None:
    """The fastest contender besides this library; None if none could run."""
    timed = [p for p in point["providers"] if p["name"] != OUR_NAME and "median_ms" in p]
    return min(timed, key=lambda p: float(p["median_ms"]), default=None)


def alternative_name(point: Record) -> str:
    """Name of the fastest contender besides this library; "-" if none could run."""
    other = alternative(point)
    return "-" if other is None else str(other["name"])


def speedup(point: Record) -> float | None:
    """Time of the best alternative relative to this library's; None if either is missing."""
    ours, other = provider_of(point, OUR_NAME), alternative(point)
    if ours is None or other is None:
        return None
    return float(other["median_ms"]) / float(ours["median_ms"])


def bars(point: Record, all_points: Sequence[Record] = (), name: str = OUR_NAME) -> str:
    """The best alternative of a point, and this library's speed relative to it."""
    del all_points
    if (ratio := speedup(point)) is None or name != OUR_NAME:
        return ""
    slow = f", bar {1 / SLOWEST_BAR:.2f}" if ratio < 1 / SLOWEST_BAR else ""
    return f"{ratio:.2f} x {alternative_name(point)}{slow}"


class Means(NamedTuple):
    """A sweep in short.

    Attributes:
      sweep: its name.
      compared: points with an alternative, and this library's speed relative to the best one, the
        slowest first.
      fraction: geometric mean of this library's fractions of the roofline.
      speedup: geometric mean of its speeds relative to the best alternative.
      slower: number of points below `SLOWEST_BAR`.
      bars: of `fraction` and `speedup`.
    """

    sweep: str
    compared: list[tuple[float, Record]]
    fraction: float
    speedup: float
    slower: int
    bars: tuple[float | None, float]


def compared(points: Sequence[Record]) -> list[tuple[float, Record]]:
    """Points with an alternative, and this library's speed relative to it, the slowest first."""
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
    """Geometric means of every sweep, points that lose, and the ten worst, as text."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if points are missing, or this library failed or was wrong."""
    parser = harness.parser("production", SWEEPS)
    parser.add_argument("--number", type=int, default=80, help="points of every sweep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument(
        "--left", type=pathlib.Path, help="only the points that this results file names as left out"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    args = children.parsed(parser, argv)
    if args.share is not None:
        _measure_share(args, args.share)
        return 0
    # This process uses the device only to name it, and leaves its memory to the others.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    results = harness.Run("production", args).results
    is_whole = _measure_all(args, results)
    status = harness.print_results(results, format_table(results, OP_COLUMNS, bars))
    print(summary(results))
    if left_out := results["left_out"]:
        print(f"{len(left_out)} points are missing; the results file names them", file=sys.stderr)
    return 1 if left_out or not is_whole else status


if __name__ == "__main__":
    sys.exit(main())
