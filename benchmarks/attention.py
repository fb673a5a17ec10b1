"""Broadcast attention: the baselines, the XLA path, the kernel, and the sweeps over sizes.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json

Every figure counts useful FLOPs only: no padding, no copies, no keys past a user's length. Off a
GPU all sizes shrink, and the figures say no more than that the benchmark runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, plots
from benchmarks.attention_providers import (
    ALL,
    COPIES,
    GROUPED_CUDNN,
    GROUPED_TOKAMAX,
    OURS,
    WORDS,
    XLA,
    Inputs,
    Provider,
    oracle,
)
from benchmarks.harness import provider_of
from ikbo_jax.tuning import table
from ikbo_jax.tuning.configs import AttentionProblem

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
#: Bars: our fraction of the matmul by S; from the same S's grouped cuDNN; from the copies.
FRACTION_BARS = {512: 0.81, 1024: 0.86, 2048: 0.93, 4096: 0.96, 16384: 1.0}
SHORT_BAR, SHORT_S = 1.3, 384
COPIES_BAR, COPIES_S = 5.5, 1024
#: Bars of points that are held to our fraction at another point of the same S: the default's.
RELATIVE_BARS = {
    "float16": 0.96,
    "10:1": 0.90,
    "70:1": 0.97,
    "8:2 heads": 0.97,
    "odd counts": 0.97,
    "lengths S/2..S": 0.90,
    "unsorted": 0.94,
}
NARROW_BAR = 0.75
#: Candidates whose output is compared with the oracle.
CHECKED = 6


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes: which sweep it belongs to, its label there, and how the users look.

    Attributes:
      sweep: one of `SWEEPS`.
      label: what it is called there.
      problem: the sizes.
      index: "even" (sorted, the same number of candidates for each user, but for the last),
        "ragged" (sorted, random numbers) or "unsorted" ("even", shuffled).
      lengths: "full", or "half": uniform in S/2..S.
    """

    sweep: str
    label: str
    problem: AttentionProblem
    index: str = "even"
    lengths: str = "full"


def points(sweep: str, dtype: str = "bfloat16") -> Iterator[Point]:
    """The points of a sweep; they differ from the default in few sizes each."""
    base = dataclasses.replace(DEFAULT, dtype=dtype)

    def at(label: str, index: str = "even", lengths: str = "full", **sizes: Any) -> Point:
        return Point(sweep, label, dataclasses.replace(base, **sizes), index, lengths)

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
    """The point in a size that a CPU can take."""
    p = point.problem
    small = dataclasses.replace(
        p,
        batch=max(1, p.batch // 64),
        users=max(1, p.users // 16),
        q_len=max(1, p.q_len // 16),
        kv_len=max(1, p.kv_len // 64),
        head_dim=max(1, p.head_dim // 8),
    )
    return dataclasses.replace(point, problem=small)


def make_inputs(point: Point, seed: int = 0) -> Inputs:
    """Random inputs, made on the device."""
    p, dtype = point.problem, jnp.dtype(point.problem.dtype)
    keys = jax.random.split(jax.random.key(seed), 3)
    user_shape = (p.users, p.kv_len, p.kv_heads, p.head_dim)
    shapes = ((p.batch, p.q_len, p.q_heads, p.head_dim), user_shape, user_shape)
    arrays = [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]
    rng = np.random.default_rng(seed)
    if point.index == "ragged":
        index = np.sort(rng.integers(0, p.users, p.batch))
    else:
        index = np.minimum(np.arange(p.batch) // -(-p.batch // p.users), p.users - 1)
    if point.index == "unsorted":
        index = rng.permutation(index)
    lengths = None
    if point.lengths == "half":
        drawn = rng.integers(-(-p.kv_len // 2), p.kv_len + 1, p.users)
        lengths = jnp.asarray(drawn, jnp.int32)
    is_sorted = point.index != "unsorted"
    return Inputs(*arrays, jnp.asarray(index, jnp.int32), lengths, is_sorted)


def useful_flops(problem: AttentionProblem, inputs: Inputs) -> int:
    """Multiply-adds times two of both products, over keys that exist."""
    if inputs.lengths is None:
        return problem.useful_flops
    seen = np.asarray(inputs.lengths)[np.asarray(inputs.cand_to_user)].sum()
    return int(4 * problem.q_len * problem.q_heads * problem.head_dim * seen)


def measure_point(
    point: Point, providers: Sequence[Provider], protocol: harness.Protocol
) -> dict[str, Any]:
    """Checks and times the providers at a point, by turns with the matmul that normalises."""
    problem, inputs = point.problem, make_inputs(point)
    drawn = np.random.default_rng(0).integers(0, problem.batch, CHECKED - 2).tolist()
    rows = sorted({0, problem.batch - 1, *drawn})
    exact, bound = oracle(inputs, rows)

    def enter(provider: Provider) -> harness.Contender:
        def prepare() -> tuple:
            return *provider.prepare(inputs), lambda out: provider.finish(out, inputs)

        return harness.enter(provider.name, provider.stage, prepare, rows, exact, bound)

    contenders = [enter(provider) for provider in providers]
    choice = table.lookup(problem)
    return {
        "sweep": point.sweep,
        "label": point.label,
        "index": point.index,
        "lengths": point.lengths,
        "problem": dataclasses.asdict(problem),
        "table": {
            "config": None if choice.config is None else dataclasses.asdict(choice.config),
            "note": choice.reason,
        },
        **harness.measure(contenders, useful_flops(problem, inputs), protocol),
    }


def bars(point: Mapping[str, Any], all_points: Sequence[Mapping[str, Any]]) -> str:
    """What `ikbo` reached at a point of a results file, beside the bars it is held to."""
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
    least = RELATIVE_BARS.get(point["label"].split(" S=")[0])
    reference = _even_point(problem["kv_len"], all_points)
    if least is not None and reference is not None:
        relative = ours["fraction"] / reference["fraction"]
        found.append(f"{relative:.3f} of the default's fraction, bar {least}")
    return "; ".join(found)


def _even_point(kv_len: int, all_points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Our figures in the sweep over S at `kv_len`, if it was measured."""
    same = (p for p in all_points if p["sweep"] == "s" and p["problem"]["kv_len"] == kv_len)
    found = (provider_of(point, OURS.name) for point in same)
    return next((record for record in found if record is not None), None)


def draw(results: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the fraction of the matmul over S, a curve for every provider."""
    measured = [point for point in results["points"] if point["sweep"] == "s"]
    with plots.saved(path, size=(8, 4.5)) as (figure, (axis,)):
        for provider in reversed(ALL):
            records = [provider_of(point, provider.name) for point in measured]
            if any(record is not None for record in records):
                fractions = [float("nan") if r is None else r["fraction"] for r in records]
                axis.plot(range(len(measured)), fractions, marker="o", label=WORDS[provider.name])
        axis.set_xticks(range(len(measured)), [p["problem"]["kv_len"] for p in measured])
        axis.set_xlabel(f"S, keys of a user; {results['environment']['device']}")
        axis.set_ylabel("fraction of the sustained matmul")
        axis.set_ylim(bottom=0)
        plots.legend_below(figure, axis, 2)


def providers_of(sweep: str, quick: bool) -> Sequence[Provider]:
    """All providers over S, where the bars name them; few elsewhere."""
    if quick:
        return (XLA, OURS)
    return ALL if sweep == "s" else (GROUPED_CUDNN, GROUPED_TOKAMAX, XLA, OURS)


def run(
    sweeps: Sequence[str],
    dtype: str = "bfloat16",
    *,
    out: pathlib.Path,
    quick: bool = False,
    cupti: bool = False,
    budget_s: float = float("inf"),
) -> dict[str, Any]:
    """Measures sweeps and writes the results file after every point.

    Args:
      sweeps: of `SWEEPS`.
      dtype: of every sweep but "dtype".
      out: the results file.
      quick: short windows and few providers: to see that it runs.
      cupti: times kernels alone as well.
      budget_s: starts no point after so many seconds; the file lists those left out.
    """
    start = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    protocol = harness.Protocol.here(quick=quick, cupti=cupti)
    results = harness.new_results("attention", protocol)

    def measure(point: Point) -> dict[str, Any]:
        return measure_point(point, providers_of(point.sweep, quick), protocol)

    every = [point for sweep in sweeps for point in points(sweep, dtype)]
    todo = every if on_gpu else [shrink(point) for point in every]
    harness.run_points(results, todo, measure, out=out, start=start, budget_s=budget_s)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = harness.parser("attention", SWEEPS)
    parser.add_argument("--plot", type=pathlib.Path, help="draws the sweep over S to this SVG file")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args(argv)
    results = run(
        args.sweep,
        args.dtype,
        out=args.out,
        quick=args.quick,
        cupti=args.cupti,
        budget_s=args.budget_s,
    )
    if args.plot is not None:
        draw(results, args.plot)
    return harness.print_results(results, bars)


if __name__ == "__main__":
    sys.exit(main())
