"""Benchmark of several devices: the ops, the ranking network and its training step on 1, 2, … GPUs.

    python -m benchmarks.scaling --out benchmarks/results/scaling-h200.json

Every point runs the same program on one device and on several, interleaved in one process. Strong
scaling divides one request, weak scaling gives every device a request of that size. On more than
two devices the network also divides a large request. The ops run under plain `jit` with candidates
divided and users replicated, with Auto and with Explicit mesh axes. The network and its training
step run under `shard_map`, with users beside their candidates. The results of several devices are
compared with the result of one, and the compiled program is searched for collectives. Without a GPU
all sizes shrink, and the figures only show that the benchmark runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from benchmarks import harness, records
from benchmarks.scaling_programs import PROGRAMS, Program, mesh_of
from ikbo_jax._timing import interleaved_ms

#: Candidates and users of a request; for the network on more than two devices also a large one.
REQUEST, LARGE_REQUEST = (2048, 32), (8192, 117)
SMALL_REQUEST, SMALL_LARGE_REQUEST = (64, 4), (128, 9)
SWEEPS = tuple(PROGRAMS)
#: Bars: the part of one device's time that two may take, the speed-up of eight for a large request,
#: and the weak scaling's efficiency on two and on eight.
STRONG_BARS = {"linear_compression": 0.54, "attention": 0.54, "network": 0.54, "training": 0.58}
LARGE_BARS = {"network": 6.8, "training": 6.0}
WEAK_BARS = {2: 0.95, 8: 0.93}
#: Largest difference of results on several devices, relative to the largest result: a few roundings
#: of bfloat16, since a part has another order of sums where its configuration is another one.
TOLERANCE = 2.0**-6


@dataclasses.dataclass(frozen=True)
class Point:
    """A workload, how it scales ("strong", "weak" or "large"), and on how many devices.

    "large" is strong scaling of a large request.
    """

    sweep: str
    mode: str
    devices: int

    @property
    def label(self) -> str:
        return f"{self.mode} {self.devices}"

    def request(self, *, small: bool) -> tuple[int, int]:
        """The numbers of candidates and users that all devices have together."""
        candidates, users = self.request_of_one(small=small)
        requests = self.devices if self.mode == "weak" else 1
        return candidates * requests, users * requests

    def request_of_one(self, *, small: bool) -> tuple[int, int]:
        """The numbers of candidates and users on the one device that is compared with."""
        if self.mode == "large":
            return SMALL_LARGE_REQUEST if small else LARGE_REQUEST
        return SMALL_REQUEST if small else REQUEST


def points(sweep: str, devices: int) -> Iterator[Point]:
    """Yields a workload's points on 2, 4, … devices."""
    numbers = [2**n for n in range(1, devices.bit_length())]
    for mode in ("strong", "weak"):
        yield from (Point(sweep, mode, number) for number in numbers)
    if sweep in LARGE_BARS:
        yield from (Point(sweep, "large", number) for number in numbers if number > 2)


KINDS = {"explicit": AxisType.Explicit}  # the others have Auto axes
#: Compiler options by provider. XLA begins a sum of gradients as soon as they are there, while
#: kernels run; a kernel that has a CTA on every SM then waits for those SMs that NCCL holds, and
#: NCCL for the slower device. XLA copies the gradients into one array before their sum and out of
#: it afterwards; without that pass one launch of NCCL sums them where they are.
OPTIONS: dict[str, dict[str, Any]] = {
    "sums in turn": {"xla_gpu_disable_async_collectives": "ALLREDUCE"},
    "sums in turn, in place": {
        "xla_gpu_disable_async_collectives": "ALLREDUCE",
        "xla_disable_hlo_passes": "all-reduce-contiguous",
    },
}


def providers_of(sweep: str) -> Sequence[str]:
    """Ways to run on several devices; `shard_map` is the same on all kinds of mesh axes."""
    if sweep in ("linear_compression", "attention"):
        return ("auto", "explicit")
    return ("auto", *OPTIONS) if sweep == "training" else ("auto",)


# An asynchronous collective's type holds the tuple of its operands before its results.
_OPERANDS = r"\((?:[^()]|\([^()]*\))*\), "
_COLLECTIVE = re.compile(
    rf" = (?:\({_OPERANDS})?(?P<shapes>\(.*?\)|\S+) (?P<name>all-gather|all-reduce|all-to-all"
    r"|collective-permute|reduce-scatter)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<bits>[a-z]+(\d+))\[(?P<sizes>[\d,]*)\]")


def traffic(program: str) -> dict[str, dict[str, int]]:
    """Number of collectives and bytes of their results, by name, in a compiled program's text."""
    found: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(program):
        entry = found.setdefault(match["name"], {"count": 0, "bytes": 0})
        entry["count"] += 1
        for shape in _SHAPE.finditer(match["shapes"]):
            size = math.prod(int(size) for size in shape["sizes"].split(",") if size)
            entry["bytes"] += size * max(1, int(shape[2]) // 8)
    return found


def _compiled(programs: Mapping[str, Program]) -> dict[str, Any]:
    """Compiles programs at once; each is lowered once, however many options it has."""
    lowered = {
        id(program): jax.jit(program.fn).lower(*program.args) for program in programs.values()
    }

    def compiled(name: str) -> Any:
        return lowered[id(programs[name])].compile(compiler_options=OPTIONS.get(name))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(compiled, programs), strict=True))


def measure(
    point: Point, protocol: harness.Protocol, times: Callable[..., Any] = interleaved_ms
) -> dict[str, Any]:
    """Times one device and several, interleaved; returns the point's entry."""
    small = jax.default_backend() != "gpu"
    make = PROGRAMS[point.sweep]
    of_one, request = point.request_of_one(small=small), point.request(small=small)
    programs = {"one device": make(mesh_of(1, AxisType.Auto), of_one, small=small)}
    on_axes: dict[AxisType, Program] = {}
    for name in providers_of(point.sweep):
        kind = KINDS.get(name, AxisType.Auto)
        if kind not in on_axes:
            on_axes[kind] = make(mesh_of(point.devices, kind), request, small=small)
        programs[name] = on_axes[kind]
    whole: dict[str, Program] = {}
    if point.mode == "weak" and point.sweep != "training":
        whole["whole"] = make(mesh_of(1, AxisType.Auto), request, small=small)
    compiled = _compiled(programs | whole)
    providers, thunks = [], {}
    expected: np.ndarray | None = None
    for name, program in whole.items():
        expected = program.compare(compiled[name](*program.args))
    # A larger request's training step is not repeated on one device: its gradients differ only by
    # what the strong point compares.
    is_compared = point.mode != "weak" or expected is not None
    for name, program in programs.items():
        found = program.compare(compiled[name](*program.args))
        if expected is None and is_compared:
            expected = found
        record: dict[str, Any] = {
            "name": name,
            "devices": 1 if name == "one device" else point.devices,
        }
        if name != "one device":
            if expected is not None:
                error = float(np.abs(found - expected).max() / np.abs(expected).max())
                record |= {"error": error, "bound": TOLERANCE, "ok": error <= TOLERANCE}
            record["collectives"] = traffic(compiled[name].as_text() or "")
        providers.append(record)
        thunks[name] = lambda name=name, args=program.args: compiled[name](*args)
    samples = times(thunks, window_s=protocol.window_s, rounds=protocol.rounds)
    one = statistics.median(samples["one device"])
    for record in providers:
        median = statistics.median(samples[record["name"]])
        record |= {"ms": samples[record["name"]], "median_ms": median, "of_one": median / one}
    return {**dataclasses.asdict(point), "label": point.label, "providers": providers}


def describe(point: Mapping[str, Any]) -> str:
    """The figures of a point as short text."""
    one, *others = point["providers"]
    parts = [f"1 device {one['median_ms']:.3f} ms"]
    for p in others:
        bound = f" (bar {bar(point)})" if bar(point) else ""
        moved = ", ".join(
            f"{entry['count']} {name} {entry['bytes'] / 2**20:.1f} MiB"
            for name, entry in p["collectives"].items()
        )
        figure = f"{p['of_one']:.3f} of it"
        if point["mode"] == "weak":
            figure = f"efficiency {1 / p['of_one']:.3f}"
        parts.append(
            f"{p['name']} {p['median_ms']:.3f} ms, {figure}{bound}; {moved or 'no collectives'}"
            + ("" if p.get("ok", True) else "; WRONG RESULT")
        )
    return " | ".join(parts)


def bar(point: Mapping[str, Any]) -> str:
    """The bar of a point as text; empty if it has none."""
    mode, sweep, devices = point["mode"], point["sweep"], point["devices"]
    if mode == "weak":
        return f"efficiency {WEAK_BARS[devices]}" if devices in WEAK_BARS else ""
    if mode == "large":
        return f"{LARGE_BARS[sweep]}×" if devices == 8 else ""
    return f"{STRONG_BARS[sweep]} of one" if devices == 2 else ""


def run(
    sweeps: Sequence[str],
    *,
    out: pathlib.Path,
    labels: Sequence[str] | None = None,
    times: Callable[..., Any] = interleaved_ms,
    **options: Any,
) -> dict[str, Any]:
    """Measures workloads on 2, 4, … devices beside one; of several processes, on all devices.

    Args:
      sweeps: names of workloads.
      out: the results file.
      labels: only the points with these labels.
      times: times programs by turns, as `interleaved_ms` does.
      **options: further fields of `harness.Run`.
    """
    devices = jax.device_count()
    if devices < 2:
        raise ValueError(f"benchmarks.scaling needs at least 2 devices, but there is {devices}")
    bench = harness.Run("scaling", out, **options)
    several = {"processes": jax.process_count()} if jax.process_count() > 1 else {}
    bench.results |= {"devices": devices, **several}
    todo = [
        point
        for sweep in sweeps
        for point in points(sweep, devices)
        if (labels is None or point.label in labels) and (not several or point.devices == devices)
    ]

    def measured(point: Point) -> dict[str, Any]:
        return measure(point, bench.protocol, times) | several

    return bench.measure(todo, measured, lambda point: point, describe)


def parser(name: str, sweeps: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the options of `run`."""
    found = harness.parser(name, sweeps)
    found.add_argument(
        "--points", nargs="+", metavar="LABEL", help="only these points, such as 'strong 4'"
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a result is wrong."""
    args = parser("scaling", SWEEPS).parse_args(argv)
    try:
        results = run(args.sweep, labels=args.points, **harness.options(args))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if records.all_correct(results) else 1


if __name__ == "__main__":
    sys.exit(main())
