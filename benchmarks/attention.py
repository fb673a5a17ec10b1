"""Benchmark of broadcast attention: the kernel, the XLA path and baselines, in sweeps over sizes.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json

Every figure counts useful FLOPs only: no padding, no copies, no keys past a user's length.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, production_draws
from benchmarks.harness import Benchmark, Point
from benchmarks.production import checked
from benchmarks.production_draws import AttentionShape
from benchmarks.production_providers import Contender, contenders
from benchmarks.records import Record, of_ours, ours_at, provider_of
from ikbo_jax.cases import attention as case
from ikbo_jax.cases import error_rule
from ikbo_jax.cases.error_rule import Check


class LongLengths(AttentionShape):
    """Attention in which the users' histories have lengths in S/2..S."""

    @property
    def lengths(self) -> np.ndarray:
        drawn = np.random.default_rng(2).integers(-(-self.kv_len // 2), self.kv_len + 1, self.users)
        return drawn.astype(np.int32)


#: Sizes: B, U, T, S, N, K, H, dtype, index, whether users have lengths.
DEFAULT = AttentionShape(2048, 32, 64, 4096, 2, 2, 128, "bfloat16", "even", has_lengths=False)
LENGTHS = LongLengths(**dataclasses.asdict(DEFAULT) | {"has_lengths": True})
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
        ("lengths S/2..S", {}),
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


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    for label, changed in SWEEPS[sweep]:
        default = LENGTHS if label.startswith("lengths") else DEFAULT
        yield Point(sweep, label, dataclasses.replace(default, **changed))


def shrink(point: Point) -> Point:
    """Makes the point's sizes small enough for a CPU."""
    return dataclasses.replace(point, case=production_draws.shrink(point.case))


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks versions at a point, and times them interleaved with the reference matmul.

    The copies are timed in the sweep over S, whose bars need them; with "quick", this library's op
    and its XLA path alone.
    """
    ours, xla, grouped, _, copies = contenders(point.case, is_drawn=False)
    chosen = [ours, xla]
    if not run.options.quick:
        chosen += [grouped, *([copies] if point.sweep == "s" else [])]
    found = checked(chosen, "forward", compared=_check_of(point.case))
    return harness.measure(found, run.protocol, point.case.flops)


def _check_of(shape: AttentionShape) -> Callable[[Contender, Sequence[Any]], Check]:
    """Makes the check by the error rule; the oracle computes a candidate at a time."""

    @jax.jit
    def truth_of(inputs: case.Inputs) -> error_rule.Truth:
        def of_one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
            one = inputs._replace(
                query=inputs.query[row][None], cand_to_user=inputs.cand_to_user[row][None]
            )
            exact = case.oracle(one, jnp.arange(1))
            return exact[0], error_rule.largest_difference(case.materialised(*one), exact)

        exact, errors = jax.lax.map(of_one, jnp.arange(shape.batch, dtype=jnp.int32))
        return error_rule.Truth(exact, jnp.max(errors), jnp.max(jnp.abs(exact)))

    truth = truth_of(shape.inputs())

    def check(contender: Contender, results: Sequence[Any]) -> Check:
        out = contender.finish(results[0])
        error = float(error_rule.largest_difference(out, truth.oracle))
        return Check(error, truth.bound(out.dtype, shape.kv_len))

    return check


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figures of `ikbo` at a point, each next to its bar."""
    problem, found = point["problem"], []
    grouped, copies = (provider_of(point, name) for name in ("grouped-cudnn", "copies-cudnn"))
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


SELECTED = harness.of_sweeps(points)
BENCHMARK = Benchmark("attention", tuple(SWEEPS), SELECTED, shrink, measure_point, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
