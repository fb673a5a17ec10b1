"""Benchmark of broadcast attention: the kernel, the XLA path and baselines, in sweeps over sizes.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json
    python -m benchmarks.attention --direction backward --out FILE.json

Every figure counts useful FLOPs only: no padding, no copies, no keys past a user's length.
Backward, the gradients of query, key and value for a given cotangent are timed, and five products
count; what the forward pass leaves for them is computed before. Gradients are compared with the XLA
path in float32. `benchmarks.production` draws further sizes, and times both directions together.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.production import measure_versions
from benchmarks.production_draws import AttentionShape
from benchmarks.production_providers import Contender, contenders
from benchmarks.records import (
    Record,
    faster,
    is_forward,
    listed,
    of_fraction,
    of_ours,
    ours_at,
    provider_of,
)
from ikbo_jax.cases.error_rule import Check

#: Sizes: B, U, T, S, N, K, H, dtype, index, whether users have lengths.
DEFAULT = AttentionShape(2048, 32, 64, 4096, 2, 2, 128, "bfloat16", "even", has_lengths=False)
DEFAULTS = {"forward": DEFAULT, "backward": dataclasses.replace(DEFAULT, kv_len=2048)}
#: Bars of the gradient's fraction of the matmul, by S.
GRADIENT_BARS = {512: 0.45, 1024: 0.55, 2048: 0.62, 4096: 0.66, 8192: 0.68}
#: Points by direction and sweep: the label, and what differs from the default.
SWEEPS: dict[str, dict[str, Sequence[tuple[str, dict[str, Any]]]]] = {}
SWEEPS["forward"] = {
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
        ("lengths S/2..S", {"has_lengths": True, "shortest": DEFAULT.kv_len // 2}),
        ("unsorted", {"index": "unsorted"}),
        ("unsorted S=1024", {"index": "unsorted", "kv_len": 1024}),
    ),
}
SWEEPS["backward"] = {
    "s": [(f"S={s}", {"kv_len": s}) for s in GRADIENT_BARS],
    "h": [(f"H={h}", {"head_dim": h}) for h in (64, 96, 192, 256)],
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
#: Bar of the gradient's speed relative to cuDNN's on grouped queries in "s".
CUDNN_BAR = 1.15


POINTS = [
    Point(sweep, label, dataclasses.replace(DEFAULTS[direction], **changed), direction)
    for direction, sweeps in SWEEPS.items()
    for sweep, changes in sweeps.items()
    for label, changed in changes
]


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks versions at a point, and times them interleaved with the reference matmul.

    The copies are timed in the sweep over S, whose bars need them.
    """
    flops = harness.ATTENTION_WORK[point.direction] * point.case.flops
    if point.direction != "forward":
        return measure_versions(contenders(point.case), point, run, flops)
    ours, xla, grouped, _, copies = contenders(point.case, is_drawn=False)
    chosen = [ours, xla, grouped, *([copies] if point.sweep == "s" else [])]
    inputs = point.case.inputs()

    def check(contender: Contender, results: Sequence[Any]) -> Check:
        return point.case.check(contender.finish(results[0]), inputs)

    return measure_versions(chosen, point, run, flops, compared=check)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figures of `ikbo` at a point, each next to its bar."""
    problem, sweep = point["problem"], point["sweep"]
    grouped, copies = (provider_of(point, name) for name in ("grouped-cudnn", "copies-cudnn"))
    found: list[str] = []
    if not is_forward(point):
        fraction_bar = GRADIENT_BARS.get(problem["kv_len"]) if sweep == "s" else None
        speed_bar = CUDNN_BAR if sweep == "s" else None
        speed = faster(ours, grouped, "grouped-cudnn", speed_bar)
        return listed(of_fraction(ours, fraction_bar), speed)
    kv_len, is_narrow = problem["kv_len"], sweep == "h" and problem["head_dim"] == 64
    if sweep == "s":
        bar = FRACTION_BARS.get(kv_len) if problem["dtype"] == "bfloat16" else None
        found = [of_fraction(ours, bar)]
        if kv_len <= SHORT_S:
            found.append(faster(ours, grouped, "grouped cuDNN", SHORT_BAR))
        if kv_len >= COPIES_S:
            found.append(faster(ours, copies, "the copies", COPIES_BAR))
    elif is_narrow:
        found = [of_fraction(ours, NARROW_BAR)]
    relative_bar = RELATIVE_BARS.get(point["label"].split(" S=")[0])
    of_s = (p for p in all_points if p["sweep"] == "s" and is_forward(p))
    reference = ours_at(p for p in of_s if p["problem"]["kv_len"] == kv_len)
    if relative_bar is not None and reference is not None:
        relative = ours["fraction"] / reference["fraction"]
        found.append(f"{relative:.3f} of the default's fraction, bar {relative_bar}")
    return listed(*found)


BENCHMARK = Benchmark("attention", POINTS, measure_point, bars, directions=["forward"])

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
