"""Benchmark of broadcast attention: the kernel, the XLA path and baselines, in sweeps over sizes.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json

Every figure counts useful FLOPs only: no padding, no copies, no keys past a user's length.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import harness, yardsticks
from benchmarks.harness import Benchmark, Point, Provider
from benchmarks.records import OUR_NAME, Record, ours_at, provider_of
from ikbo_jax.cases.attention import Case, Inputs
from ikbo_jax.models.strategies import Fold, fold_by_user
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
#: Points by sweep: the label, and what differs from the default.
SWEEPS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "s": tuple((f"S={s}", {"kv_len": s}) for s in (128, 256, 384, 512, 1024, 2048, 4096, 16384)),
    "dtype": tuple((name, {"dtype": name}) for name in ("bfloat16", "float16")),
    "ratio": (
        ("1:1", {"users": 2048}),
        ("10:1", {"users": 205}),
        ("64:1", {"users": 32}),
        ("70:1", {"batch": 70 * 30, "users": 30}),
        ("1000:1", {"batch": 2000, "users": 2}),
        ("one user", {"users": 1}),
    ),
    "t": tuple((f"T={t}", {"q_len": t}) for t in (1, 16, 32, 64, 128, 256)),
    "h": tuple((f"H={h}", {"head_dim": h}) for h in (64, 96, 128, 192, 256)),
    "heads": (("8:2 heads", {"batch": 512, "users": 8, "q_heads": 8}),),
    "index": (
        ("odd counts", {"index": "ragged", "batch": 2049}),
        ("lengths S/2..S", {"lengths": "half"}),
        ("unsorted", {"index": "unsorted"}),
        ("unsorted S=1024", {"index": "unsorted", "kv_len": 1024}),
    ),
}
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
    """Yields the points of a sweep; `dtype` is the dtype of all sweeps but "dtype"."""
    default = Case(dataclasses.replace(DEFAULT, dtype=dtype), "even")
    for label, changed in SWEEPS[sweep]:
        of_case = {name: changed[name] for name in ("index", "lengths") if name in changed}
        sizes = {name: value for name, value in changed.items() if name not in of_case}
        yield Point(sweep, label, dataclasses.replace(default, **of_case)).resized(**sizes)


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


def _copies_cudnn(case: Case, inputs: Inputs) -> tuple[Callable, tuple]:
    yardsticks.cudnn()
    return case.contender("materialised-cudnn"), inputs


def _fold_of(inputs: Inputs) -> Fold:
    """The layout with a slot for each candidate of the user who has the most."""
    most = np.bincount(np.asarray(inputs.cand_to_user)).max()
    return fold_by_user(inputs.cand_to_user, inputs.key.shape[0], int(most))


def grouped(name: str, stage: str, library: yardsticks.Library) -> Provider:
    """Another library's attention over queries that were grouped by user before."""

    def prepare(case: Case, inputs: Inputs) -> tuple[Callable, tuple]:
        attend = library()

        def run(query: Any, key: Any, value: Any, lengths: Any) -> Any:
            return attend(query, key, value, key_value_seq_lengths=lengths)

        query = _fold_of(inputs).fold(inputs.query)
        return run, (query, inputs.key, inputs.value, inputs.lengths)

    return Provider(name, stage, prepare, lambda out, inputs: _fold_of(inputs).unfold(out))


OURS = Provider.of_case(OUR_NAME, "ikbo_jax.attention", "automatic")
XLA = Provider.of_case(
    "xla", "grouped by user and chunked, in XLA (implementation='xla')", "decomposed"
)
COPIES = Provider("copies-cudnn", "keys and values copied, then cuDNN", _copies_cudnn)
GROUPED_CUDNN = grouped("grouped-cudnn", "queries grouped by hand before, cuDNN", yardsticks.cudnn)
GROUPED_TOKAMAX = grouped(
    "grouped-tokamax", "queries grouped by hand before, tokamax", yardsticks.tokamax
)
ALL = (COPIES, GROUPED_CUDNN, GROUPED_TOKAMAX, XLA, OURS)


def providers_of(sweep: str, quick: bool) -> Sequence[Provider]:
    """All providers in the sweep over S, whose bars need them; fewer in other sweeps."""
    if quick:
        return (XLA, OURS)
    return ALL if sweep == "s" else ALL[1:]


def useful_flops(problem: AttentionProblem, inputs: Inputs) -> int:
    """Two FLOPs per multiply-add of both products, over valid keys."""
    if inputs.lengths is None:
        return problem.useful_flops
    keys = np.asarray(inputs.lengths)[np.asarray(inputs.cand_to_user)].sum()
    return int(4 * problem.q_len * problem.q_heads * problem.head_dim * keys)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved with the reference matmul."""
    case, inputs = point.case, point.case.inputs()
    rows = harness.sample(point.problem.batch, NUM_CHECKED)
    providers = providers_of(point.sweep, run.options.quick)
    truth = case.expected(inputs, rows)
    contenders = harness.contenders_of(providers, case, inputs, rows, truth)
    flops = useful_flops(point.problem, inputs)
    return {**point.entry(), **harness.measure(contenders, run.protocol, flops)}


def bars(point: Record, all_points: Sequence[Record], name: str = OUR_NAME) -> str:
    """Text with the figures of `ikbo` at a point of a results file, each next to its bar."""
    ours = provider_of(point, OUR_NAME)
    if ours is None or name != OUR_NAME:
        return ""
    problem, found = point["problem"], []
    grouped, copies = (provider_of(point, p.name) for p in (GROUPED_CUDNN, COPIES))
    if point["sweep"] == "s":
        kv_len = problem["kv_len"]
        if problem["dtype"] == "bfloat16" and kv_len in FRACTION_BARS:
            found.append(f"fraction {ours['fraction']:.3f}, bar {FRACTION_BARS[kv_len]}")
        for other, words, bar, has_bar in (
            (grouped, "grouped cuDNN", SHORT_BAR, kv_len <= SHORT_S),
            (copies, "the copies", COPIES_BAR, kv_len >= COPIES_S),
        ):
            if has_bar and other is not None:
                found.append(f"{other['median_ms'] / ours['median_ms']:.2f} x {words}, bar {bar}")
    elif point["sweep"] == "h" and problem["head_dim"] == 64:
        found.append(f"fraction {ours['fraction']:.3f}, bar {NARROW_BAR}")
    relative_bar = RELATIVE_BARS.get(point["label"].split(" S=")[0])
    reference = ours_at(
        p for p in all_points if p["sweep"] == "s" and p["problem"]["kv_len"] == problem["kv_len"]
    )
    if relative_bar is not None and reference is not None:
        relative = ours["fraction"] / reference["fraction"]
        found.append(f"{relative:.3f} of the default's fraction, bar {relative_bar}")
    return "; ".join(found)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the dtype of all arrays."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")


BENCHMARK = Benchmark(
    "attention",
    tuple(SWEEPS),
    lambda o: (point for sweep in o.sweep for point in points(sweep, o.dtype)),
    shrink,
    measure_point,
    bars,
    add_options=add_dtype,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
