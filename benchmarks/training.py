"""Benchmark of training: steps of the ranking network and of a network of generalised attention.

    python -m benchmarks.training --out benchmarks/results/training-h200.json

A step computes the loss, the gradients of all parameters and an update by Adam, with donated
buffers; parameters are float32 and rounded to bfloat16 in every step. The versions of the ranking
network are the versions that `benchmarks.ranking` compares. The first step of every version is
checked: the loss against a float32 oracle, the norm of the gradient against the first version's.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import harness, ranking
from benchmarks import training_networks as networks
from benchmarks.harness import Benchmark, Point
from benchmarks.ranking import Version
from benchmarks.records import OUR_NAME, Record, faster, fastest, listed, provider_of

#: Candidates of a user, and queries of a candidate, in "ratio", the most telling first.
RATIOS, QUERIES = (8, 1, 70), (16, 1, 64)
#: Bars: milliseconds of the step at the default point, and speed-ups over XLA by hand and over the
#: copies there; over XLA by hand in "users"; over the better of the other two versions in "gdpa".
MS_BAR, BY_HAND_BAR, COPIES_BAR, USERS_BAR, GDPA_BAR = 13.5, 2.0, 5.0, 1.6, 1.3
#: Largest relative error of the first loss, and largest relative difference of gradient norms.
LOSS_TOLERANCE, NORM_TOLERANCE = 0.01, 0.05


def _of_gdpa(name: str, stage: str, attention: Callable[[], Any], **options: Any) -> Version:
    def make(sizes: networks.Sizes) -> networks.Network:
        return functools.partial(networks.network, attention(), sizes)

    return Version(name, stage, make, **options)


OF_RANKING = ranking.ALL[::-1]
CUDNN = "softmax attention by cuDNN over padded sequences"
OF_GDPA = (
    _of_gdpa("xla", "products over padded sequences, in XLA", lambda: networks.xla),
    _of_gdpa(OUR_NAME, "ikbo_jax.gdpa on jagged rows", lambda: networks.ours),
    _of_gdpa("cudnn-softmax", CUDNN, networks.softmax, is_other=True),
)


_changed = functools.partial(dataclasses.replace, ranking.DEFAULT)
#: Sizes by sweep and label, the most telling first: a version's step compiles in 5 to 25 s.
SWEEPS: dict[str, dict[str, Any]] = {
    "default": {f"B={ranking.DEFAULT.candidates}": ranking.DEFAULT},
    "users": {"B=2048 U=256 T=16": _changed(candidates=2048, users=256, queries=16)},
    "gdpa": {f"B=1152 max={n}": networks.Sizes(max_length=n) for n in (256, 512)},
    "ratio": {
        f"{ratio}:1 T={queries}": sizes
        for queries, ratio in itertools.product(QUERIES, RATIOS)
        if (sizes := _changed(users=round(ranking.DEFAULT.candidates / ratio), queries=queries))
        != ranking.DEFAULT
    },
}
POINTS = [Point(sweep, label, case) for sweep, of in SWEEPS.items() for label, case in of.items()]


def shrink(point: Point) -> Point:
    """Makes the point's sizes small enough for a CPU."""
    if point.sweep == "gdpa":
        small: Any = networks.Sizes(12, 24, 32, 2, 16, 4, 1, "float32")
    else:
        queries = max(1, point.case.queries // 16)
        small = dataclasses.replace(ranking.small(point.case), queries=queries)
    return dataclasses.replace(point, case=small)


def _compile(version: Version, sizes: Any, task: networks.Task) -> harness.Contender:
    """Compiles a version's step, or records why not."""
    record: dict[str, Any] = {"name": version.name, "stage": version.stage}
    try:
        step = networks.step_of(version.make(sizes), sizes.dtype)
        args = jax.eval_shape(networks.start, task.params), task.inputs, task.labels
        step = jax.jit(step, donate_argnums=0)
        # The gradient of attention in `jax.nn`, and optax' count of steps, mix dtypes.
        with jax.numpy_dtype_promotion("standard"):
            compiled, figures = harness.compiled_of(step, *args)
    except Exception as error:
        return harness.Contender(record | harness.why_not_run(version.name, error))
    if "total_bytes" in figures:
        figures["peak_bytes"] = figures.pop("total_bytes")
    return harness.Contender(record | figures, compiled=compiled)


def _run_first(contender: harness.Contender, task: networks.Task) -> None:
    """Records the first loss and gradient norm; then a call of `thunk` runs the next step."""
    state = networks.start(task.params)
    try:
        state, (loss, norm) = contender.compiled(state, task.inputs, task.labels)
        contender.record.update(loss=float(loss), norm=float(norm))
    except Exception as error:
        contender.record.update(harness.why_not_run(contender.record["name"], error))

    def step() -> Any:
        nonlocal state
        state, out = contender.compiled(state, task.inputs, task.labels)
        return out

    contender.thunk = step


def _check(versions: Sequence[Version], found: Sequence[Any], expected: float) -> None:
    """Records the larger error of loss and gradient norm, relative to its bound.

    Norms are compared with the norm of the first version that ran.
    """
    ran = [(v, c.record) for v, c in zip(versions, found, strict=True) if "loss" in c.record]
    norms = [record["norm"] for version, record in ran if not version.is_other]
    for version, record in ran:
        if version.is_other:
            record |= {"error": 0.0, "bound": 1.0, "ok": math.isfinite(record["loss"])}
            record["note"] = "another function: softmax"
            continue
        error = max(
            abs(record["loss"] / expected - 1) / LOSS_TOLERANCE,
            abs(record["norm"] / norms[0] - 1) / NORM_TOLERANCE,
        )
        # Written so that NaN is wrong, too.
        record |= {"error": error, "bound": 1.0, "ok": bool(error <= 1.0)}


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks the first step of every version, and times further ones interleaved."""
    # Sweeps omit the tuned copies, which take longer to compile than to time.
    versions = [
        version
        for version in (OF_GDPA if point.sweep == "gdpa" else OF_RANKING)
        if point.sweep == "default" or version.name != ranking.TUNED.name
    ]
    task = networks.task_of(point.case)
    compile_one = functools.partial(_compile, sizes=point.case, task=task)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        contenders = list(pool.map(compile_one, versions))
    for contender in contenders:
        if contender.compiled is not None:
            _run_first(contender, task)
    _check(versions, contenders, task.expected)
    measured = harness.measure(contenders, run.protocol)
    samples = point.case.batch if point.sweep == "gdpa" else point.case.candidates
    for contender in contenders:
        if (ms := contender.record.get("median_ms")) is not None:
            contender.record["samples_per_s"] = samples * 1e3 / ms
    return {"samples": samples, "expected_loss": task.expected, **measured}


def bars(point: Record, all_points: Sequence[Record], name: str) -> str:
    """Formats the figures of this library's version at a point, each next to its bar."""
    ours = provider_of(point, name)
    is_gdpa = point["sweep"] == "gdpa"
    if ours is None or name != (OUR_NAME if is_gdpa else ranking.OURS.name):
        return ""
    if is_gdpa:
        other = fastest(p for p in point["providers"] if p != ours)
        return faster(ours, other, "the better of the others", GDPA_BAR)
    found = []
    hand, copies = (provider_of(point, p.name) for p in (ranking.BY_HAND, ranking.COPIES))
    hand_bar = {"default": BY_HAND_BAR, "users": USERS_BAR}.get(point["sweep"])
    if point["sweep"] == "default":
        found.append(f"{ours['median_ms']:.2f} ms, bar {MS_BAR}")
    if hand is not None and hand_bar is not None:
        share = ours.get("peak_bytes", math.nan) / hand.get("peak_bytes", math.nan)
        found.append(faster(ours, hand, "XLA by hand", hand_bar))
        found.append(f"{share:.2f} of its memory, bar 1")
    if point["sweep"] == "default":
        found.append(faster(ours, copies, "the copies", COPIES_BAR))
    return listed(*found)


BENCHMARK = Benchmark("training", POINTS, measure_point, bars, shrink=shrink, times_matmul=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
