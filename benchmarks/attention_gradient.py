"""Benchmark of attention's gradient, beside cuDNN's on queries grouped by hand, copies and XLA.

    python -m benchmarks.attention_gradient --out benchmarks/results/attention_gradient-h200.json

Times the gradients of query, key and value for a given cotangent; what the forward pass leaves for
them is computed before. Useful FLOPs count five products. The sweep "given" times forward and
backward together, on sizes with few queries or few keys. Every version is compared with the XLA
path in float32.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import attention, harness
from benchmarks.harness import Benchmark, Point
from benchmarks.production import alternative, measure_versions
from benchmarks.production_draws import AttentionShape
from benchmarks.production_providers import contenders
from benchmarks.records import Record, of_ours, provider_of

DEFAULT = dataclasses.replace(attention.DEFAULT, kv_len=2048)
#: Bars of our fraction of the matmul, by S.
FRACTION_BARS = {512: 0.45, 1024: 0.55, 2048: 0.62, 4096: 0.66, 8192: 0.68}
#: Bars of our speed relative to cuDNN's on grouped queries: in "s", and in "given" relative to the
#: best alternative.
CUDNN_BAR, GIVEN_BAR = 1.15, 1.0
#: Points by sweep: what differs from the default by label. "given" has lists of B, U, T, heads, S
#: and H instead.
SWEEPS: dict[str, Any] = {
    "s": {f"S={s}": {"kv_len": s} for s in FRACTION_BARS},
    "h": {f"H={h}": {"head_dim": h} for h in (64, 96, 192, 256)},
    "index": {
        "float16": {"dtype": "float16"},
        "odd counts": {"index": "ragged"},
        "unsorted": {"index": "unsorted"},
        "lengths 1..S": {"has_lengths": True},
        "8:2 heads": {"batch": 512, "users": 8, "q_heads": 8},
        "1:1": {"batch": 256, "users": 256},
    },
    "given": (
        (1024, 15, 32, 2, 1024, 128),
        (2048, 2048, 8, 4, 256, 64),
        (4096, 512, 1, 4, 512, 64),
        (10_000, 1, 1, 8, 1024, 64),
    ),
}


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    if sweep == "given":
        for batch, users, queries, heads, keys, width in SWEEPS[sweep]:
            sizes = batch, users, queries, keys, heads, heads, width
            shape = AttentionShape(*sizes, "bfloat16", "even", has_lengths=False)
            yield Point(sweep, shape.label, shape, "both")
        return
    for label, changed in SWEEPS[sweep].items():
        yield Point(sweep, label, dataclasses.replace(DEFAULT, **changed), "backward")


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks all versions at a point, and times them interleaved; with "quick", the first two."""
    flops = harness.ATTENTION_WORK[point.direction] * point.case.flops
    return measure_versions(contenders(point.case), point, run, flops, quick=2)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figures of this library at a point, each next to its bar."""
    sweep, found = point["sweep"], []
    if sweep == "s" and (bar := FRACTION_BARS.get(point["problem"]["kv_len"])) is not None:
        found.append(f"fraction {ours['fraction']:.3f}, bar {bar}")
    best = alternative(point) if sweep == "given" else provider_of(point, "grouped-cudnn")
    if best is not None:
        bar = {"given": GIVEN_BAR, "s": CUDNN_BAR}.get(sweep)
        words = "" if bar is None else f", bar {bar}"
        found.append(f"{best['median_ms'] / ours['median_ms']:.2f} x {best['name']}{words}")
    return "; ".join(found)


SELECTED, shrink = harness.of_sweeps(points), attention.shrink
BENCHMARK = Benchmark("attention_gradient", tuple(SWEEPS), SELECTED, shrink, measure_point, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
