"""Benchmark of drawn workloads that nobody tuned for, beside what a user has without this library.

    python -m benchmarks.production --jobs 12 --out benchmarks/results/production-h200.json

Workloads come from `production_draws`, forward and, for training, forward with all gradients. Every
contender is compared with the XLA path in float32. A point's *roofline* is the least time that the
device needs: the largest of useful FLOPs at the measured matmul, bytes read and written once at the
measured copy, and an empty kernel. Short calls are timed on the device, with all kernels, memsets
and copies (`harness.Protocol.short_ms`): cuDNN clears memory before its kernels.

The sweeps take turns, so that a run that ends early has points of each; the results file names the
missing points, which `--points` measures in another run. Most of the time goes to GEMMs that XLA
times for alternatives far from the best: see `checked`.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import harness, timing
from benchmarks.harness import Point
from benchmarks.production_draws import SWEEPS, CompressionShape, normal, shapes
from benchmarks.production_providers import TOLERANCE, Contender, contenders
from benchmarks.records import OUR_NAME, Record, fastest, provider_of
from ikbo_jax._timing import device_time
from ikbo_jax._timing.programs import UNTIMED_ON_GPU
from ikbo_jax.cases import case, error_rule
from ikbo_jax.cases.error_rule import Check

#: Beyond this ratio, tuned GEMMs would not make an alternative the best.
FAR = 8.0
#: Most calls of a rough timing, and seconds after which no further one is started.
CALLS, CALLS_S = 5, 0.3
#: Compiler options of a program whose GEMMs need not be the fastest. Without the files of XLA's
#: choices, which processes share: no other program may take these GEMMs for the fastest.
UNTIMED = {**UNTIMED_ON_GPU, "xla_gpu_per_fusion_autotune_cache_dir": ""}
_compare = jax.jit(error_rule.compare)
#: Largest time relative to the best alternative.
SLOWEST_BAR = 1.03
#: Number of points in the table of the slowest ones.
WORST = 10
#: Bars of the geometric means: fraction of the roofline (None: no bar), speed relative to the best
#: alternative.
MEAN_BARS = {
    "attention": (0.62, 1.6),
    "linear_compression": (0.70, 2.0),
    "gdpa": (0.62, 2.5),
    "few_queries": (None, 1.3),
}


def points(options: argparse.Namespace) -> list[Point]:
    """Draws the points of a run; the sweeps take turns."""
    drawn = []
    for sweep in [sweep for sweep in SWEEPS if sweep in options.sweep]:
        op, direction = sweep.split()
        of_op = shapes(op, options.number, options.seed)
        drawn.append([Point(sweep, shape.label, shape, direction) for shape in of_op])
    return list(itertools.chain.from_iterable(zip(*drawn, strict=True)))


def work(point: Point) -> tuple[float, float]:
    """Counts the useful FLOPs and the bytes of a point.

    Gradients of attention take five products for its two, of linear compression four for two. With
    the forward pass, they read and write each of its arrays, and the array's gradient, once.
    """
    if point.direction == "forward":
        return point.case.flops, point.case.num_bytes
    is_compression = isinstance(point.case, CompressionShape)
    factor = 3.0 if is_compression else harness.ATTENTION_WORK["both"]
    return point.case.flops * factor, 2.0 * point.case.num_bytes


# Contenders, compiled and checked


def cotangent(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws the cotangent of a result."""
    return normal(9, shape, dtype)


def in_direction(contender: Contender, direction: str) -> tuple[Callable[..., Any], tuple]:
    """Returns a function that computes a tuple of results, and its arguments.

    "forward": the result of `contender`. "backward": its gradients for a given cotangent; what the
    forward pass leaves for them is among the arguments. "both": the result, then the gradients.
    """
    inputs = *contender.args, *contender.integers
    if direction == "forward":
        return lambda *inputs: (contender.fn(*inputs),), inputs
    out = jnp.zeros_like(jax.eval_shape(contender.fn, *inputs))
    # The same cotangent for all contenders, in the layout of each.
    finished, pull = jax.vjp(contender.finish, out)
    (d_out,) = pull(cotangent(finished.shape, finished.dtype))
    number = len(contender.args)

    def vjp(*inputs: Any) -> tuple[Any, Callable[..., Any]]:
        integers = inputs[number:]
        return jax.vjp(lambda *args: contender.fn(*args, *integers), *inputs[:number])

    def with_gradients(d_out: Any, *inputs: Any) -> Any:
        out, pull = vjp(*inputs)
        return (out, *pull(d_out))

    if direction == "both":
        return with_gradients, (d_out, *inputs)

    # What the forward pass leaves contains copies of the inputs, which would not fit in memory for
    # all contenders: replace them by the inputs.
    def original(array: jax.Array) -> jax.Array:
        arrays = jax.tree.leaves(inputs)
        alike = (x for x in arrays if (x.shape, x.dtype) == (array.shape, array.dtype))
        return next((x for x in alike if bool(jnp.array_equal(x, array))), array)

    gradient = jax.tree.map(original, jax.jit(lambda *inputs: vjp(*inputs)[1])(*inputs))
    return lambda gradient, d_out: gradient(d_out), (gradient, d_out)


def exact_results(contender: Contender, direction: str) -> list[jax.Array]:
    """Computes the results in float32, for the same inputs and the same cotangent."""
    # For "backward", the forward pass must run in float32, too.
    is_backward = direction == "backward"
    fn, args = in_direction(contender, "both" if is_backward else direction)
    options = UNTIMED if jax.default_backend() == "gpu" else None
    with jax.default_matmul_precision("highest"):
        found = jax.jit(fn, compiler_options=options)(*case.widened(args))
    return list(found[is_backward:])


def compare(
    contender: Contender, direction: str, expected: Sequence[jax.Array], results: Sequence[Any]
) -> Check:
    """Finds the error with the largest ratio to its bound, and this bound."""
    if contender.other:
        return Check(0.0, 1.0)
    outputs, gradients = ([], results) if direction == "backward" else (results[:1], results[1:])
    found = [(contender.finish(out), TOLERANCE) for out in outputs]
    if gradients:
        finished = contender.finish_gradients(tuple(gradients))
        found += [(gradient, contender.gradient_tolerance) for gradient in finished]
    checks = []
    for (actual, tolerance), truth in zip(found, expected, strict=True):
        # On the device: NumPy takes seconds of processor time for a gradient of 100 million values.
        error, largest = map(float, _compare(actual, truth))
        checks.append(Check(error, tolerance * largest))
    return case.nearest(checks)


def checked(
    makers: Sequence[Callable[[], Contender]],
    direction: str,
    far: float = math.inf,
    compared: Callable[[Contender, Sequence[Any]], Check] | None = None,
) -> list[harness.Contender]:
    """Compiles contenders, and checks their results by `compared`.

    By default, they are compared with the XLA path in float32, which the second maker makes. An
    alternative whose GEMMs are not tuned is kept if it takes more than `far` times as long as the
    fastest one; infinity: all are tuned.
    """
    exact = [] if compared else exact_results(makers[1](), direction)

    def by_xla(contender: Contender, results: Sequence[Any]) -> Check:
        return compare(contender, direction, exact, results)

    def check(contender: Contender, options: Any = None) -> harness.Contender:
        found = harness.compile_and_check(
            contender.name,
            contender.stage,
            lambda: in_direction(contender, direction),
            functools.partial(compared or by_xla, contender),
            options,
            why_not_run,
        )
        if contender.other:
            found.record["note"] = f"another function: {contender.other}"
        return found

    found: dict[int, harness.Contender] = {}
    fastest: list[float] = []
    # The XLA path comes last: it is seldom the best, and its GEMMs are many.
    for number in (0, *range(2, len(makers)), 1)[: len(makers)]:
        try:
            contender = makers[number]()
        except Exception as failure:
            name = makers[number].__name__.replace("_", "-")
            record = {"name": name, "stage": "-"} | why_not_run(name, failure)
            found[number] = harness.Contender(record)
            continue
        if contender.is_xla and fastest:
            found[number] = check(contender, UNTIMED)
            ms = rough_ms(found[number].thunk) if "error" in found[number].record else 0.0
            if ms > far * min(fastest):
                words = f"GEMMs not tuned: {ms:.3g} ms beside {min(fastest):.3g} ms of another"
                found[number].record["note"] = words
                continue
        found[number] = check(contender)
        if far < math.inf and number and found[number].record.get("ok"):
            fastest.append(rough_ms(found[number].thunk))
    return [found[number] for number in range(len(makers))]


def why_not_run(name: str, failure: Exception) -> dict[str, str]:
    """Explains why a contender did not run; alternatives may refuse some sizes, as cuDNN does."""
    if name == "xla" or name.startswith(OUR_NAME):
        return harness.why_not_run(name, failure)
    return {"skipped": f"{type(failure).__name__}: {failure!s:.200}"}


def rough_ms(thunk: Callable[[], Any]) -> float:
    """Times the fastest of a few calls in ms."""
    begin, times = time.perf_counter(), list[float]()
    while not times or len(times) < CALLS and time.perf_counter() - begin < CALLS_S:
        start = time.perf_counter()
        jax.block_until_ready(thunk())
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


# Measuring


def measure_versions(
    makers: Sequence[Callable[[], Contender]],
    point: Point,
    run: harness.Run,
    flops: float,
    *,
    compared: Callable[[Contender, Sequence[Any]], Check] | None = None,
    short_ms: float = 0.0,
) -> dict[str, Any]:
    """Checks versions, and times them by turns; with the option "quick", the first three."""
    chosen = makers[:3] if run.options.quick else makers
    found = checked(chosen, point.direction, compared=compared)
    return harness.measure(found, dataclasses.replace(run.protocol, short_ms=short_ms), flops)


def ceilings(run: harness.Run) -> tuple[float, float]:
    """Measures the TB/s of a copy, and the milliseconds of an empty kernel."""
    nothing = jnp.zeros((), jnp.float32)
    empty = device_time.measure(jax.jit(lambda x: x + 1).lower(nothing).compile(), nothing)
    copy = timing.copy_ceiling(run.protocol.window_s, run.protocol.rounds)
    return copy["tb_per_s"], 0.0 if empty is None else empty.ms


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks the contenders of a point, and times them interleaved with the reference matmul."""
    found = checked(contenders(point.case), point.direction, FAR)
    if not run.protocol.rounds:
        return {}
    flops, num_bytes = work(point)
    protocol = dataclasses.replace(run.protocol, short_ms=device_time.SHORT_MS)
    measured = harness.measure(found, protocol, flops)
    compute_ms = flops / measured["matmul_tflops"] / 1e9
    copy_tb_per_s, empty_ms = run.prepared
    roofline = max(compute_ms, num_bytes / copy_tb_per_s / 1e9, empty_ms)
    for record in measured["providers"]:
        if "median_ms" in record:
            record["fraction"] = roofline / record["median_ms"]
    return {"bytes": num_bytes, "roofline_ms": roofline, **measured}


# What a run found: speed relative to the alternatives


def alternative(point: Record) -> Record | None:
    """Finds the fastest contender besides this library; None if none could run."""
    return fastest(p for p in point["providers"] if p["name"] != OUR_NAME)


def compared(points: Sequence[Record]) -> list[tuple[float, Record]]:
    """Lists points with this library's speed relative to the best alternative, slowest first."""
    found = []
    for point in points:
        ours, other = provider_of(point, OUR_NAME), alternative(point)
        if ours is not None and other is not None:
            found.append((float(other["median_ms"]) / float(ours["median_ms"]), point))
    return sorted(found, key=lambda pair: pair[0])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=80, help="points of every sweep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")


def _summary(results: Record) -> str:
    # Imported here because the tables' module imports this one.
    from benchmarks import tables_networks

    return "\n".join(tables_networks.production(results).values())


BENCHMARK = harness.Benchmark(
    "production",
    points,
    measure_point,
    sweeps=SWEEPS,
    add_options=_add_options,
    prepare=ceilings,
    summary=_summary,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
