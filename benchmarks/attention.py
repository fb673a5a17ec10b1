"""Benchmark of broadcast attention: the kernel, the XLA path and baselines, in sweeps over sizes.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json

Every figure counts useful FLOPs only: no padding, no copies, no keys past a user's length. Without
a GPU all sizes shrink, and the figures only show that the benchmark runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks import harness, plots
from benchmarks.attention_providers import (
    ALL,
    COPIES,
    GROUPED_CUDNN,
    GROUPED_TOKAMAX,
    LABELS,
    OURS,
    XLA,
)
from benchmarks.harness import Point, Provider
from benchmarks.records import Record, ours_at, points_of, provider_of
from ikbo_jax.cases.attention import Case, Inputs
from ikbo_jax.problems import AttentionProblem

DEFAULT = AttentionProblem(
    batch=2048,
    users=32,
    q_len=64,
    kv_len=4096,
    q_heads=2,
    kv_heads=2,
    head_dim=128,
    dtype="bfloat16",
)
SWEEPS = ("s", "dtype", "ratio", "t", "h", "heads", "index")
SWEEP_S = (128, 256, 384, 512, 1024, 2048, 4096, 16384)
#: Bars of our fraction of the matmul, by S.
FRACTION_BARS = {512: 0.81, 1024: 0.86, 2048: 0.93, 4096: 0.96, 16384: 1.0}
#: Bar of our speed-up over cuDNN with grouped queries, for S of at most SHORT_S.
SHORT_BAR, SHORT_S = 1.3, 384
#: Bar of our speed-up over cuDNN with copies, for S of at least COPIES_S.
COPIES_BAR, COPIES_S = 5.5, 1024
#: Bars of our fraction at a point over our fraction in the sweep over S at the same S, by label.
RELATIVE_BARS = {
    "float16": 0.96,
    "10:1": 0.90,
    "70:1": 0.97,
    "8:2 heads": 0.97,
    "odd counts": 0.97,
    "lengths S/2..S": 0.90,
    "unsorted": 0.94,
}
#: Bar of our fraction at H = 64.
NARROW_BAR = 0.75
#: Number of candidates whose output is compared with the oracle.
NUM_CHECKED = 6


def points(sweep: str, dtype: str = "bfloat16") -> Iterator[Point]:
    """Yields the points of a sweep; each differs from the default in a few sizes."""
    base = dataclasses.replace(DEFAULT, dtype=dtype)

    def at(label: str, index: str = "even", lengths: str = "full", **sizes: Any) -> Point:
        return Point(sweep, label, Case(dataclasses.replace(base, **sizes), index, lengths))

    if sweep == "s":
        yield from (at(f"S={s}", kv_len=s) for s in SWEEP_S)
    elif sweep == "dtype":
        yield from (at(name, dtype=name) for name in ("bfloat16", "float16"))
    elif sweep == "ratio":
        yield from (at(f"{ratio}:1", users=-(-base.batch // ratio)) for ratio in (1, 10, 64))
        yield at("70:1", batch=70 * 30, users=30)
        yield at("1000:1", batch=2000, users=2)
        yield at("one user", users=1)
    elif sweep == "t":
        for t in (1, 16, 32, 64, 128, 256):
            yield at(f"T={t}", q_len=t)
    elif sweep == "h":
        for h in (64, 96, 128, 192, 256):
            yield at(f"H={h}", head_dim=h)
    elif sweep == "heads":
        yield at("8:2 heads", batch=base.batch // 4, users=base.users // 4, q_heads=8)
    elif sweep == "index":
        yield at("odd counts", index="ragged", batch=base.batch + 1)
        yield at("lengths S/2..S", lengths="half")
        yield at("unsorted", index="unsorted")
        yield at("unsorted S=1024", index="unsorted", kv_len=1024)
    else:
        raise ValueError(f"unknown sweep {sweep!r}; known: {', '.join(SWEEPS)}")


def shrink(point: Point) -> Point:
    """The point with sizes small enough for a CPU."""
    p = point.problem
    return point.resized(
        batch=max(1, p.batch // 64),
        users=max(1, p.users // 16),
        q_len=max(1, p.q_len // 16),
        kv_len=max(1, p.kv_len // 64),
        head_dim=max(1, p.head_dim // 8),
    )


def useful_flops(problem: AttentionProblem, inputs: Inputs) -> int:
    """Two FLOPs per multiply-add of both products, over valid keys."""
    if inputs.lengths is None:
        return problem.useful_flops
    keys = np.asarray(inputs.lengths)[np.asarray(inputs.cand_to_user)].sum()
    return int(4 * problem.q_len * problem.q_heads * problem.head_dim * keys)


def measure_point(
    point: Point, providers: Sequence[Provider], protocol: harness.Protocol
) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved with the reference matmul."""
    problem, case = point.problem, point.case
    inputs = case.inputs()
    rows = harness.sample(problem.batch, NUM_CHECKED)
    truth = case.expected(inputs, rows)
    contenders = harness.contenders_of(providers, case, inputs, rows, *truth)
    return {
        **point.entry(),
        **harness.measure(contenders, useful_flops(problem, inputs), protocol),
    }


def bars(point: Record, all_points: Sequence[Record]) -> str:
    """Text with the figures of `ikbo` at a point of a results file, each next to its bar."""
    ours = provider_of(point, OURS.name)
    if ours is None:
        return ""
    problem, found = point["problem"], []
    grouped, copies = (provider_of(point, p.name) for p in (GROUPED_CUDNN, COPIES))
    if point["sweep"] == "s":
        kv_len = problem["kv_len"]
        if problem["dtype"] == "bfloat16" and kv_len in FRACTION_BARS:
            found.append(f"fraction {ours['fraction']:.3f}, bar {FRACTION_BARS[kv_len]}")
        if kv_len <= SHORT_S and grouped is not None:
            speedup = grouped["median_ms"] / ours["median_ms"]
            found.append(f"{speedup:.2f} x grouped cuDNN, bar {SHORT_BAR}")
        if kv_len >= COPIES_S and copies is not None:
            speedup = copies["median_ms"] / ours["median_ms"]
            found.append(f"{speedup:.2f} x the copies, bar {COPIES_BAR}")
    elif point["sweep"] == "h" and problem["head_dim"] == 64:
        found.append(f"fraction {ours['fraction']:.3f}, bar {NARROW_BAR}")
    bar = RELATIVE_BARS.get(point["label"].split(" S=")[0])
    same = (p for p in all_points if p["sweep"] == "s" and _kv_len(p) == problem["kv_len"])
    reference = ours_at(same)
    if bar is not None and reference is not None:
        relative = ours["fraction"] / reference["fraction"]
        found.append(f"{relative:.3f} of the default's fraction, bar {bar}")
    return "; ".join(found)


def _kv_len(point: Record) -> Any:
    return point["problem"]["kv_len"]


def draw(results: Record, path: pathlib.Path) -> None:
    """Plots the fraction of the matmul over S, with a curve for every provider."""
    measured = points_of(results, "s")
    with plots.saved(path, size=(8, 4.5)) as (figure, (axis,)):
        for provider in reversed(ALL):
            records = [provider_of(point, provider.name) for point in measured]
            if any(record is not None for record in records):
                plots.curve(axis, records, itemgetter("fraction"), label=LABELS[provider.name])
        axis.set_xticks(range(len(measured)), map(_kv_len, measured))
        axis.set_xlabel(f"S, keys of a user; {results['environment']['device']}")
        axis.set_ylabel("fraction of the sustained matmul")
        axis.set_ylim(bottom=0)
        plots.legend_below(figure, axis, 2)


def providers_of(sweep: str, quick: bool) -> Sequence[Provider]:
    """All providers in the sweep over S, whose bars need them; fewer in other sweeps."""
    if quick:
        return (XLA, OURS)
    return ALL if sweep == "s" else (GROUPED_CUDNN, GROUPED_TOKAMAX, XLA, OURS)


def run(
    sweeps: Sequence[str], dtype: str = "bfloat16", *, out: pathlib.Path, **options: Any
) -> dict[str, Any]:
    """Measures sweeps and writes the results file after every point.

    Args:
      sweeps: names from `SWEEPS`.
      dtype: dtype of every sweep except "dtype".
      out: the results file.
      **options: `quick`, `cupti` and `budget_s` of `harness.Run`.

    Returns:
      The content of the results file.
    """
    bench = harness.Run("attention", out, **options)

    def measure(point: Point) -> dict[str, Any]:
        return measure_point(point, providers_of(point.sweep, bench.quick), bench.protocol)

    todo = [point for sweep in sweeps for point in points(sweep, dtype)]
    return bench.measure(todo, measure, shrink)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = harness.op_parser("attention", SWEEPS)
    parser.add_argument("--plot", type=pathlib.Path, help="SVG file for a plot of the sweep over S")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args(argv)
    results = run(args.sweep, args.dtype, **harness.options(args))
    if args.plot is not None:
        draw(results, args.plot)
    return harness.print_results(results, bars)


if __name__ == "__main__":
    sys.exit(main())
