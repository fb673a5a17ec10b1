"""Benchmark of `ikbo.rewrite` on the ranking models of `rewrite_zoo`, in three sizes each.

    python -m benchmarks.rewrite_programs --jobs 14 --budget-s 540 --out FILE

Threads of one process compile all programs, so that XLA chooses GEMMs on a device that does nothing
else; then each program is compared with the original in float32, and timed on the device by turns.
`"* 3 *"` are the models that are also written by hand, in a real size. If the original does not fit
into memory, it scores a part of the candidates, and its time is multiplied.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Point
from benchmarks.records import Record, provider_of
from benchmarks.rewrite_zoo import BY_HAND, MODELS, SIZES, SMALL, Program
from ikbo_jax._timing import device_time, interleaved_ms
from ikbo_jax.cases import error_rule
from ikbo_jax.ops.explain import explain
from ikbo_jax.rewrite import rewrite

Array = jax.Array
#: Bar of the original's time over the rewritten program's.
BAR = 0.98
#: Bars where a form by hand is timed: time of rewritten over by hand at most, speed-up over the
#: original at least.
BY_HAND_BAR, ORIGINAL_BAR = 1.1, 1.0
#: Share of the budget after which no further program is compiled before the timing.
COMPILING = 0.6


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


class Compiled:
    """A point's original and rewritten form, and the original in float32, which threads compile.

    Nothing is compiled where the original runs.
    """

    def __init__(self, point: Point, pool: concurrent.futures.Executor, *, exact: bool) -> None:
        self.program, shapes = point.case, point.case.shapes
        scores, of = self.program.scores, DIRECTIONS[point.direction]
        (self.report,) = explain(rewrite(scores), *shapes).notes
        if " raised " in self.report.reason:
            raise RuntimeError(self.report.reason)
        # A program that is no faster on a GPU may still have a faster derivative.
        is_differentiated = of is gradient and "derivative" in self.report.reason
        self.runs = self.report.changed or is_differentiated
        self.oracle: Any = None
        self.futures: dict[str, concurrent.futures.Future] = {}
        if not self.runs:
            return
        forms = {name: form(scores) for name, form in FORMS.items()}
        if self.program.has_form_by_hand and point.direction == "forward":
            forms["by-hand"] = self.program.by_hand
        part = self._part(shapes)
        for name, form in forms.items():
            lowered = jax.jit(of(form)).lower(*(part if name == "original" else shapes))
            self.futures[name] = pool.submit(lowered.compile)
        if exact:
            untuned = dict(error_rule.UNTUNED) if jax.default_backend() == "gpu" else None
            wide = jax.tree.map(lambda x: x.update(dtype=jnp.float32), part[:2])
            with jax.default_matmul_precision("highest"):
                lowered = jax.jit(of(scores)).lower(*wide, part[2])
            self.oracle = self.futures["oracle"] = pool.submit(lowered.compile, untuned)

    def measured(self, protocol: harness.Protocol) -> dict[str, Any]:
        """Checks both forms, and times them by turns; returns fields of the results file."""
        told = ("changed", "reason", "flops_saved", "bytes_saved")
        entry = {name: getattr(self.report, name) for name in told} | {"providers": []}
        if not self.runs:
            return entry
        args = self.program.arguments()
        part = self._part(args)
        programs = {name: x.result() for name, x in self.futures.items() if name != "oracle"}
        thunks = {
            name: functools.partial(fn, *(part if name == "original" else args))
            for name, fn in programs.items()
        }
        results = {name: _on_host(thunk()) for name, thunk in thunks.items()}
        truth = results["original"]
        if self.oracle is not None:
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), part[:2])
            truth = _on_host(self.oracle.result()(*wide, part[2]))
        times = _times(thunks, protocol)
        for name, fn in programs.items():
            exact = name == "rewritten" and self.oracle is not None
            faults = _faults(results["original"], results[name], truth, exact=exact)
            counts, parts = fn.cost_analysis() or {}, self.program.parts
            scale = parts if name == "original" else 1
            ms = [x * scale for x in times[name]]
            record = {"name": name, "ms": ms, "median_ms": statistics.median(ms)}
            record |= {"flops": scale * counts.get("flops", 0)}
            nbytes = counts.get("bytes accessed", 0) + _bytes_of_calls(fn.as_text())
            record |= {"bytes": scale * nbytes}
            entry["providers"].append(record | {"ok": not faults, "faults": faults})
        return entry

    def _part(self, args: Any) -> Any:
        """Returns the arrays, or their shapes, of the users and candidates of a call."""
        if self.program.parts == 1:
            return args
        leaves, features, index = args

        def first(x: Any) -> Any:
            rows = x.shape[0] // self.program.parts
            return x[:rows] if isinstance(x, Array) else x.update(shape=(rows, *x.shape[1:]))

        return leaves, [*map(first, features)], first(index)


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


def _times(thunks: Any, protocol: harness.Protocol) -> dict[str, list[float]]:
    """Times programs by turns, on a GPU by its clock; longer if the rewritten one seems slower."""
    times = interleaved_ms(thunks, window_s=protocol.window_s / 4, rounds=1)
    if jax.default_backend() != "gpu":
        return times
    number = max(3, min(50, int(30 / min(x[0] for x in times.values()))))
    found: dict[str, list[float]] = {name: [] for name in thunks}
    for turn in range(3 * protocol.rounds):
        medians = [statistics.median(x) if x else 0.0 for x in found.values()]
        if turn >= protocol.rounds and medians[0] > 1.02 * medians[1]:
            break
        for name, thunk in thunks.items():
            time = device_time.measure(thunk.func, *thunk.args, calls=number)
            if time is not None:
                found[name].append(time.ms)
    return found


def _on_host(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _faults(plain: list[Any], found: list[Any], truth: list[Any], *, exact: bool) -> list[str]:
    """Lists outputs that break the error rule, and those that are 0; NaN breaks it, too.

    `exact`: and those without any error, since another program ran.
    """
    faults = []
    for first, x, oracle in zip(plain, found, truth, strict=True):
        x = x[: len(first)]  # the original may score a part
        wide, name = oracle.astype(np.float32), f"{x.dtype}{list(x.shape)}"
        of_plain, error = (np.abs(y.astype(np.float32) - wide).max() for y in (first, x))
        largest, eps = np.abs(wide).max(), float(jnp.finfo(x.dtype).eps)
        # A gradient of few elements may be exact in the original by chance: one more rounding.
        bound = error_rule.bound(of_plain, largest, x.dtype, 1024) + eps * largest
        bound = bound if plain is not truth else 8 * eps * largest
        if not error <= bound:
            faults.append(f"{name}: error {error:.3g}, bound {bound:.3g}")
        if largest and not np.any(x):
            faults.append(f"{name} is 0")
        if exact and largest and error == 0 and x.size > 16:
            faults.append(f"{name}: the error is exactly 0")
    return faults


def points(options: argparse.Namespace) -> list[Point]:
    """Lists the points that match a pattern, those of small sizes and of bfloat16 first."""
    every = [
        Point(f"{model} {size} {dtype}", direction, Program(model, size, dtype), direction)
        for dtype in ("bfloat16", "float32")
        for size in range(SIZES)
        for direction in DIRECTIONS
        for model in MODELS
    ]
    real = [Program(model, SIZES, "bfloat16") for model in BY_HAND]
    every += [Point(f"{x.model} {SIZES} {x.dtype}", "forward", x) for x in real]
    found = (x for name in options.points or ["*"] for x in every if fnmatch(x.name, name))
    return list(dict.fromkeys(found))


def shrink(point: Point) -> Point:
    """Makes the sizes small enough for a CPU."""
    return dataclasses.replace(point, case=dataclasses.replace(point.case, size=SMALL))


def prepare(run: harness.Run) -> dict[Point, Compiled]:
    """Compiles as many points as fit into a share of the budget."""
    until = (1 - COMPILING) * run.options.budget_s
    pool = concurrent.futures.ThreadPoolExecutor(run.options.jobs)
    found: dict[Point, Compiled] = {}
    on_gpu = jax.default_backend() == "gpu"
    for point in points(run.options):
        point = point if on_gpu else shrink(point)
        if run.left_s < until:
            break
        try:
            found[point] = Compiled(point, pool, exact=not run.options.quick)
        except Exception as error:
            print(f"FAILED: {point.name}: {error}", flush=True)
        print(f"{run.left_s:.0f} s left, lowered: {point.name}", flush=True)
    futures = [x for compiled in found.values() for x in compiled.futures.values()]
    left = None if math.isinf(until) else max(0.0, run.left_s - until)
    done, late = concurrent.futures.wait(futures, left)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(done)} programs compiled, {len(late)} late", flush=True)
    return {p: x for p, x in found.items() if late.isdisjoint(x.futures.values())}


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks and times a point, which another run compiles if there was no time for it."""
    if point not in run.prepared:
        raise TimeoutError("not compiled in time, or its rewriting raised")
    return run.prepared.pop(point).measured(run.protocol)


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


def describe(point: Record) -> str:
    """Formats a point's times, what the report and XLA say is saved, and what is suspicious."""
    runs = "" if point["changed"] else f"original runs: {point['reason'] or 'nothing gained'}; "
    if not point["providers"]:
        return runs[:-2]
    old, new = point["providers"][:2]
    found = (
        f"{speed_up(point):.3f}: {old['median_ms']:.4f} -> {new['median_ms']:.4f} ms; {runs}report "
        f"saves {point['bytes_saved'] / 1e6:.2f} MB, XLA {(old['bytes'] - new['bytes']) / 1e6:.2f} "
        f"of {old['bytes'] / 1e6:.2f}"
    )
    found = "; ".join(filter(None, (found, bars(point))))
    return found + "".join(
        f"; SUSPICIOUS {x['name']} {y}" for x in point["providers"] for y in x["faults"]
    )


def summary(points: Sequence[Record]) -> str:
    """Formats geometric mean and least speed-up of each dtype and direction."""
    lines, kinds = [], [f"{p['problem']['dtype']} {p['direction']}" for p in points]
    for kind in dict.fromkeys(kinds):
        found = sorted(speed_up(p) for p, x in zip(points, kinds, strict=True) if x == kind)
        mean, slow = statistics.geometric_mean(found), sum(x < BAR for x in found)
        words = f"geometric mean {mean:.3f}, least {found[0]:.3f}, {slow} below {BAR}"
        lines.append(f"{kind}: {len(found)} programs, {words}")
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("points", nargs="*", help="patterns such as 'dlrm 1 *'; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="threads that compile")


BENCHMARK = harness.Benchmark(
    "rewrite_programs",
    (),
    points,
    shrink,
    measure_point,
    bars,
    describe,
    add_options=_add_options,
    prepare=prepare,
    times_matmul=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a program failed, was suspicious or was left out."""
    results = BENCHMARK.run(BENCHMARK.parse(argv))
    status = harness.print_results(results, summary(results["points"]))
    return 1 if results["left_out"] else status


if __name__ == "__main__":
    sys.exit(main())
