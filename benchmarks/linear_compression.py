"""Benchmark of linear compression: every stage and baseline, and sweeps over sizes.

    python -m benchmarks.linear_compression --out benchmarks/results/linear_compression-h200.json

Every figure counts useful FLOPs only: no padding, no copies. Without a GPU all sizes shrink, and
the figures only show that the benchmark runs.
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

from benchmarks import harness, timing, torch_baseline
from benchmarks.harness import provider_of
from benchmarks.linear_compression_providers import OURS, XLA, Provider, all_providers
from ikbo_jax.cases.linear_compression import Case
from ikbo_jax.problems import LinearCompressionProblem
from ikbo_jax.tuning import table

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


@dataclasses.dataclass(frozen=True)
class Point:
    """One set of sizes.

    Attributes:
      sweep: one of `SWEEPS`.
      label: name of the point in its sweep.
      problem: the sizes.
      index: index of the case.
    """

    sweep: str
    label: str
    problem: LinearCompressionProblem
    index: str = "ragged"

    @property
    def case(self) -> Case:
        return Case(self.problem, self.index)


def points(sweep: str, dtype: str = "bfloat16") -> Iterator[Point]:
    """Yields the points of a sweep; most differ from the default in one size."""
    base = dataclasses.replace(DEFAULT, dtype=dtype)
    k_user, k_cand = base.ks
    candidates = base.batches[-1]

    def at(label: str, index: str = "ragged", **sizes: Any) -> Point:
        return Point(sweep, label, dataclasses.replace(base, **sizes), index)

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
    small = LinearCompressionProblem(
        tuple(max(1, b // 16) for b in p.batches),
        tuple(k // 16 for k in p.ks),
        p.m // 8,
        p.n // 8,
        p.dtype,
    )
    return dataclasses.replace(point, problem=small)


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
    batch = problem.batches[-1]
    rows = sorted(
        {0, batch - 1, *np.random.default_rng(0).integers(0, batch, NUM_CHECKED - 2).tolist()}
    )
    exact, bound = case.expected(inputs, rows)

    def compiled(provider: Provider) -> harness.Contender:
        def prepare() -> tuple:
            return provider.fn, provider.prepare(inputs), lambda out: out

        return harness.compile_and_check(provider.name, provider.stage, prepare, rows, exact, bound)

    contenders = [compiled(provider) for provider in providers]
    if torch:
        for record, thunk in torch_baseline.contenders(inputs.arguments, rows, exact, bound):
            contenders.append(harness.Contender(record, thunk))
    choice = table.lookup(problem)
    itemsize = jnp.dtype(problem.dtype).itemsize
    return {
        "sweep": point.sweep,
        "label": point.label,
        "index": point.index,
        "problem": dataclasses.asdict(problem),
        "user_result_bytes": problem.batches[0] * problem.m * problem.n * itemsize,
        "table": {
            "config": None if choice.config is None else dataclasses.asdict(choice.config),
            "note": choice.reason,
        },
        **harness.measure(contenders, problem.useful_flops, protocol),
    }


def bar(point: Mapping[str, Any], all_points: Sequence[Mapping[str, Any]]) -> str:
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
    defaults = [
        provider_of(p, "ikbo")
        for p in all_points
        if p["sweep"] == "default" and p["problem"]["dtype"] == dtype
    ]
    if not defaults or defaults[0] is None:
        return f"fraction {ours['fraction']:.3f}"
    relative = ours["fraction"] / defaults[0]["fraction"]
    sweep_bar = SMALL_BATCH_BAR if point["label"] == "B=256" else SWEEP_BAR
    return f"{relative:.3f} of the default's fraction, bar {sweep_bar}"


def run(
    sweeps: Sequence[str],
    dtypes: Sequence[str],
    *,
    out: pathlib.Path,
    quick: bool = False,
    cupti: bool = False,
    budget_s: float = float("inf"),
) -> dict[str, Any]:
    """Measures sweeps and writes the results file after every point.

    Args:
      sweeps: names from `SWEEPS`. "default" runs in every dtype with all providers, and with XLA's
        other formulations in the first dtype. Other sweeps run in the first dtype, with XLA only.
        Sizes that two sweeps share are timed once.
      dtypes: names of dtypes.
      out: the results file.
      quick: short windows and few providers, to see that the benchmark runs.
      cupti: whether to time kernels without launch overhead, too.
      budget_s: seconds after which no further point is started; the file lists the rest.

    Returns:
      The content of the results file.
    """
    start = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    protocol = harness.Protocol.for_device(quick=quick, cupti=cupti)
    copy = timing.copy_ceiling(
        timing.COPY_BYTES if on_gpu else 2**22, window_s=protocol.window_s, rounds=protocol.rounds
    )
    results = harness.new_results("linear_compression", protocol, copy=copy)
    known: dict[tuple[LinearCompressionProblem, str], dict[str, Any]] = {}

    def measure(point: Point) -> dict[str, Any]:
        key = (point.problem, point.index)
        if key in known:
            return _as_in_sweep(known[key], point)
        is_full = point.sweep == "default" and not quick
        providers = [XLA, OURS]
        if is_full:
            providers = all_providers(point.problem, point.problem.dtype == dtypes[0])
        known[key] = measure_point(point, providers, protocol, torch=is_full and on_gpu)
        return known[key]

    todo = [
        point if on_gpu else shrink(point)
        for sweep in sweeps
        for dtype in (dtypes if sweep == "default" else dtypes[:1])
        for point in points(sweep, dtype)
    ]
    harness.run_points(results, todo, measure, out=out, start=start, budget_s=budget_s)
    return results


def _as_in_sweep(measured: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """The entry of an earlier point with the same sizes, as a point of another sweep."""
    providers = [p for p in measured["providers"] if p["name"] in (XLA.name, OURS.name)]
    return {**measured, "sweep": point.sweep, "label": point.label, "providers": providers}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a provider failed or was wrong."""
    parser = harness.parser("linear_compression", SWEEPS)
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"))
    args = parser.parse_args(argv)
    results = run(
        args.sweep,
        args.dtype or ("bfloat16", "float16"),
        out=args.out,
        quick=args.quick,
        cupti=args.cupti,
        budget_s=args.budget_s,
    )
    return harness.print_results(results, bar)


if __name__ == "__main__":
    sys.exit(main())
