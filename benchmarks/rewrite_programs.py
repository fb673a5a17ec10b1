"""Benchmark of `ikbo.rewrite` on `examples/ranking_models.py`, in three sizes each.

    python -m benchmarks.rewrite_programs --jobs 14 --budget-s 540 --out FILE

Each program is compared with the original in float32, and timed on the device by turns.
`--points "* 3"` are the models that are also written by hand, in a real size. If the original does
not fit into memory, it scores a part of the candidates, and its time is multiplied.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Point
from benchmarks.records import Record, listed, provider_of
from examples.ranking_models import BY_HAND, MODELS, SIZES, SMALL, Program
from ikbo_jax.cases import case, error_rule
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.ops.explain import explain
from ikbo_jax.rewrite import rewrite

Array = jax.Array
#: Bar of the original's time over the rewritten program's.
BAR = 0.98
#: Bars where a form by hand is timed: time of rewritten over by hand at most, speed-up over the
#: original at least.
BY_HAND_BAR, ORIGINAL_BAR = 1.1, 1.0


def gradient(scores: Callable[..., Array]) -> Callable[..., Any]:
    """Makes a function that returns scores, and gradients of weights and features."""

    def run(leaves: Any, request: Any, i: Array) -> Any:
        def loss(leaves: Any, request: Any) -> tuple[Array, Array]:
            found = scores(leaves, request, i)
            return jnp.logaddexp(found.astype(jnp.float32), 0.0).mean(), found

        grads, found = jax.grad(loss, (0, 1), has_aux=True)(leaves, request)
        return found, grads

    return run


#: The functions that are compiled of a program's scores, by the names of providers.
FORMS: dict[str, Callable[..., Any]] = {"original": lambda x: x, "rewritten": rewrite}
DIRECTIONS: dict[str, Callable[..., Any]] = {"forward": lambda x: x, "gradient": gradient}


def _on_host(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _check(plain: list[Any], found: list[Any], truth: list[Any]) -> Check:
    """Compares outputs with the original's in float32; `plain` are those of the original.

    Without the results in float32, `truth` is `plain`: a few roundings are allowed.
    """
    checks = []
    for first, x, oracle in zip(plain, found, truth, strict=True):
        x = x[: len(first)]  # the original may score a part
        wide, eps = oracle.astype(np.float32), float(jnp.finfo(x.dtype).eps)
        arrays = [y.astype(np.float32).ravel() for y in (first - wide, x - wide, wide)]
        # The largest error is often of one candidate, on the other side of a relu's corner.
        for order, slack in ((2, 1), (np.inf, 4))[plain is truth :]:
            of_plain, error, size = (float(np.linalg.norm(y, order)) for y in arrays)
            # A gradient of few elements may be exact in the original by chance: one more rounding.
            bound = error_rule.bound(of_plain, size, x.dtype, 1024) + eps * size
            checks.append(Check(error, 8 * eps * size if plain is truth else slack * bound))
    return case.nearest(checks)


def _on_draws(program: Program, record: Record, runs: Sequence[Callable[..., Any]]) -> Check:
    """Compares a gradient on four more draws of the arguments; returns the middle check.

    Candidates at a relu's corner make most of the error of a bias, where the original or the form
    rounds to the other side: 1.15 of BST's bound, and at most 0.53 on the other draws (H200, f32).
    """
    checks = [Check(record["error"], record["bound"])]
    for seed in range(1, 5):
        args = program.arguments(seed)
        exact = *case.widened(args[:2]), args[2]
        outputs = [run(*x) for run, x in zip(runs, (args, args, exact), strict=True)]
        checks.append(_check(*map(_on_host, outputs)))
    return sorted(checks, key=lambda x: x.error / max(x.bound, 1e-30))[2]


def _bytes_of_calls(text: str) -> int:
    """Adds up operands and results of the library calls and kernels that XLA counts as nothing.

    A multiplication by cuBLAS is one; its last result is a workspace.
    """
    shapes = dict(re.findall(r"%?([\w.-]+) = (\(.*?\) |\S+ )[\w-]+\(", text))
    total = 0
    for result, names in re.findall(r" = (\(.*?\) |\S+ )custom-call\((.*?)\), custom_call", text):
        arrays = [
            result.partition(", s8[")[0],
            *(shapes.get(x.strip(" %"), "") for x in names.split(",")),
        ]
        for bits, sizes in re.findall(r"[a-z](\d*)\[([\d,]*)\]", " ".join(arrays)):
            total += int(bits or 8) // 8 * math.prod(int(x) for x in sizes.split(",") if x)
    return total


def points(options: argparse.Namespace) -> list[Point]:
    """Lists the points, those of small sizes and of bfloat16 first."""
    every = [
        Point(f"{model} {size} {dtype}", direction, Program(model, size, dtype), direction)
        for dtype in ("bfloat16", "float32")
        for size in range(SIZES)
        for direction in DIRECTIONS
        for model in MODELS
    ]
    real = [Program(model, SIZES, "bfloat16") for model in BY_HAND]
    return every + [Point(f"{x.model} {SIZES} {x.dtype}", "forward", x) for x in real]


def shrink(point: Point) -> Point:
    """Makes the sizes small enough for a CPU."""
    return dataclasses.replace(point, case=dataclasses.replace(point.case, size=SMALL))


def _part(program: Program, args: Any) -> Any:
    """Returns the arrays of the users and candidates of a call of the original."""
    leaves, features, index = args
    *features, index = (x[: x.shape[0] // program.parts] for x in (*features, index))
    return leaves, features, index


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks the forms of a program, and times them by turns; nothing where the original runs."""
    program, of = point.case, DIRECTIONS[point.direction]
    scores = program.scores
    (report,) = explain(rewrite(scores), *program.shapes).notes
    if " raised " in report.reason:
        raise RuntimeError(report.reason)
    told = ("changed", "reason", "flops_saved", "bytes_saved")
    entry = {name: getattr(report, name) for name in told} | {"providers": []}
    # A program that is no faster on a GPU may still have a faster derivative.
    if not report.changed and not (of is gradient and "derivative" in report.reason):
        return entry
    args = program.arguments()
    part = _part(program, args)
    forms = {name: form(scores) for name, form in FORMS.items()}
    if program.has_form_by_hand and point.direction == "forward":
        forms["by-hand"] = program.by_hand
    exact, oracle = None, None
    if not run.options.quick:
        wide = *case.widened(part[:2]), part[2]
        untuned = error_rule.UNTUNED if jax.default_backend() == "gpu" else None
        with jax.default_matmul_precision("highest"):
            oracle, _ = harness.compiled_of(jax.jit(of(scores)), *wide, options=untuned)
        exact = _on_host(oracle(*wide))
    plain: list[np.ndarray] = []

    def compare(out: Any) -> Check:
        found = _on_host(out)
        plain.extend(() if plain else found)  # the first form is the original
        return _check(plain, found, exact or plain)

    def made_of(name: str, form: Callable[..., Any]) -> harness.Contender:
        given, parts = (part, program.parts) if name == "original" else (args, 1)
        made = harness.compile_and_check(name, "", lambda: (of(form), given), compare)
        if made.compiled is None:
            raise RuntimeError(str(made.record))
        counts = made.compiled.cost_analysis() or {}
        made.record["flops"] = parts * counts.get("flops", 0)
        nbytes = counts.get("bytes accessed", 0) + _bytes_of_calls(made.compiled.as_text())
        made.record["bytes"] = parts * nbytes
        return made

    contenders = [made_of(name, form) for name, form in forms.items()]
    original, found = contenders[:2]
    if oracle and of is gradient and not found.record["ok"]:
        check = _on_draws(program, found.record, (original.compiled, found.compiled, oracle))
        found.record |= {**check._asdict(), "ok": check.ok}
    measured = harness.measure(contenders, dataclasses.replace(run.protocol, short_ms=math.inf))
    original = measured["providers"][0]
    if "ms" in original:
        original["ms"] = [x * program.parts for x in original["ms"]]
        original["median_ms"] *= program.parts
    return entry | measured


def speed_up(point: Record) -> float:
    """Computes how many times as long as the rewritten program the original takes."""
    if not point["providers"]:
        return 1.0
    original, rewritten = (record["median_ms"] for record in point["providers"][:2])
    return float(original / rewritten)


def bars(point: Record, all_points: Any = (), name: str = "rewritten") -> str:
    """Formats the ratios of a model that is also written by hand, each with its bar."""
    hand, rewritten = (provider_of(point, form) for form in ("by-hand", "rewritten"))
    if hand is None or rewritten is None or name != "rewritten":
        return ""
    return (
        f"{rewritten['median_ms'] / hand['median_ms']:.3f} of by hand, bar {BY_HAND_BAR}; "
        f"{speed_up(point):.2f} x the original, bar {ORIGINAL_BAR}"
    )


def figures(point: Record, all_points: Any, name: str) -> str:
    """Formats what the report and XLA say is saved, and the bars."""
    if name != "rewritten":
        return ""
    old, new = point["providers"][:2]
    runs = "" if point["changed"] else f"the original runs: {point['reason']}"
    saved = (
        f"report saves {point['bytes_saved'] / 1e6:.2f} MB, "
        f"XLA {(old['bytes'] - new['bytes']) / 1e6:.2f} of {old['bytes'] / 1e6:.2f}"
    )
    return listed(runs, saved, bars(point))


def summary(points: Sequence[Record]) -> str:
    """Formats geometric mean and least speed-up of each dtype and direction."""
    lines, kinds = [], [f"{p['problem']['dtype']} {p['direction']}" for p in points]
    for kind in dict.fromkeys(kinds):
        found = sorted(speed_up(p) for p, x in zip(points, kinds, strict=True) if x == kind)
        mean, slow = statistics.geometric_mean(found), sum(x < BAR for x in found)
        words = f"geometric mean {mean:.3f}, least {found[0]:.3f}, {slow} below {BAR}"
        lines.append(f"{kind}: {len(found)} programs, {words}")
    return "\n".join(lines)


BENCHMARK = harness.Benchmark(
    "rewrite_programs",
    points,
    measure_point,
    figures,
    shrink=shrink,
    summary=lambda results: summary(results["points"]),
    times_matmul=False,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
