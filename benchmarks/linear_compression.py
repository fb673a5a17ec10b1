"""Benchmark of linear compression: every stage and baseline, and sweeps over sizes.

    python -m benchmarks.linear_compression --out benchmarks/results/linear_compression-h200.json
    python -m benchmarks.linear_compression --direction backward --out FILE.json

Every figure counts useful FLOPs only: no padding, no copies. "default" runs in every dtype with all
versions; other sweeps run in the first dtype, with XLA only. Backward, the gradients of both
weights and both embeddings for a given cotangent are timed, without the forward pass, beside XLA's
and beside XLA written by hand. They need twice the useful FLOPs of the result.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, production, timing
from benchmarks.harness import Benchmark, Point
from benchmarks.production import cotangent
from benchmarks.production_draws import draw
from benchmarks.production_providers import Contender
from benchmarks.records import (
    OUR_NAME,
    Record,
    fastest,
    is_forward,
    listed,
    of_fraction,
    of_ours,
    ours_at,
    provider_of,
)
from ikbo_jax._timing import device_time
from ikbo_jax.cases import linear_compression_backward as backward
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.cases.linear_compression import ALIGNED_K, Case
from ikbo_jax.problems import LinearCompressionBackwardProblem, LinearCompressionProblem
from ikbo_jax.tuning import table

DEFAULT = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")


def _requests(*ratios: int) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{ratio}:1", {"batches": (-(-1024 // ratio), 1024)}) for ratio in ratios)


#: Points by sweep: the label, and what differs from the default.
SWEEPS: dict[str, Sequence[tuple[str, dict[str, Any]]]] = {
    "default": [(dtype, {"dtype": dtype}) for dtype in ("bfloat16", "float16")],
    "m": [(f"M={m}", {"m": m}) for m in (128, 256, 512, 1024)],
    "k": [(f"K_cand={k}", {"ks": (1178, k)}) for k in (256, 1024, 2048)],
    "n": [(f"N={n}", {"n": n}) for n in (128, 256, 512)],
    "batch": [(f"B={b}", {"batches": (-(-b // 70), b)}) for b in (256, 512, 1024, 2048, 4096)],
    "ratio": [*_requests(1, 2, 10, 70, 1000), ("10000 of one user", {"batches": (1, 10_000)})],
    "index": [("unsorted", {})],
}
GRADIENT_SWEEPS: dict[str, Sequence[tuple[str, dict[str, Any]]]] = {
    "ratio": [*_requests(1, 8, 70, 1024)],
    "batch": [(f"B={b}", {"batches": (-(-b // 70), b)}) for b in (256, 4096)],
    "dtype": [("float16", {"dtype": "float16"})],
}
#: Backward points of "drawn".
NUM_DRAWN = 20
#: Bar of our fraction at the default point.
DEFAULT_BAR = 0.82
#: Bars of our fraction in sweeps relative to the default point: in general, and for B=256.
SWEEP_BAR, SMALL_BATCH_BAR = 0.92, 0.85
#: Bar of our time relative to the XLA path in the sweeps over M, K and N; an upper bound.
NO_CLIFF_BAR = 1.02
#: Bars of the gradient: of our fraction in "ratio"; of our time relative to XLA by hand, an upper
#: bound.
GRADIENT_BAR, BY_HAND_BAR = 0.55, 1.0


def _points() -> Iterator[Point]:
    for sweep, changes in SWEEPS.items():
        index = "unsorted" if sweep == "index" else "ragged"
        for label, sizes in changes:
            yield Point(sweep, label, Case(dataclasses.replace(DEFAULT, **sizes), index))

    def gradient(sweep: str, label: str, problem: LinearCompressionProblem, index: str) -> Point:
        case = backward.Case(LinearCompressionBackwardProblem.of(problem), index)
        return Point(sweep, label, case, "backward")

    for sweep, changes in GRADIENT_SWEEPS.items():
        for label, sizes in changes:
            yield gradient(sweep, label, dataclasses.replace(DEFAULT, **sizes), "unsorted")
    rng = np.random.default_rng(4)
    for _ in range(NUM_DRAWN):
        shape = draw("linear_compression", rng)
        yield gradient("drawn", shape.label, shape.problem, shape.index)


# Versions: functions of weights, embeddings and index, each coarsest level first.

#: Versions by name, each with its description; this library's is the first, and the XLA path next.
Versions = Mapping[str, tuple[str, Callable[..., jax.Array]]]


OURS = "ikbo_jax.linear_compression", Case.contender("automatic")
XLA = "2 decomposed (implementation='xla')", Case.contender("decomposed")


def stages(problem: LinearCompressionProblem) -> Versions:
    """Lists every stage and every baseline."""
    words = "1 materialised, with its copies"
    copies, aligned = map(Case.contender, ("materialised", "materialised-aligned"))
    found = {
        OUR_NAME: OURS,
        "xla": XLA,
        "materialised": (words, copies),
        "materialised-aligned": (f"{words}, K a multiple of {ALIGNED_K}", aligned),
    }
    for name, stage, is_single in (
        ("fused", "3 fused: broadcast in the epilogue", False),
        ("single-launch", "4 single launch", True),
    ):
        if (config := Case(problem).config(single_launch=is_single)) is not None:
            found[name] = stage, Case.contender("fused", config)
    return found


def _sum_scattered(cotangent: jax.Array, index: jax.Array, users: int) -> jax.Array:
    return jax.ops.segment_sum(cotangent.astype(jnp.float32), index, users)


def _sum_multiplied(cotangent: jax.Array, index: jax.Array, users: int) -> jax.Array:
    """Sums by a one-hot matrix, which spreads a candidate's NaN to all users."""
    is_of_user = jnp.arange(users, dtype=jnp.int32)[:, None] == index[None]
    one_hot = is_of_user.astype(cotangent.dtype)
    return jnp.einsum("ub,bmn->umn", one_hot, cotangent, preferred_element_type=jnp.float32)


def _by_hand(total: Callable[[jax.Array, jax.Array, int], jax.Array]) -> Callable[..., jax.Array]:
    """Makes the gradient that was fastest on an H200: batched products, and transposed copies."""

    def d_embedding(weight: jax.Array, d_result: jax.Array) -> jax.Array:
        weights = jnp.broadcast_to(weight.T, (d_result.shape[0], *weight.T.shape))
        dimensions = (((2,), (1,)), ((0,), (0,)))
        return jax.lax.dot_general(weights, d_result, dimensions)

    def d_weight(d_result: jax.Array, embedding: jax.Array) -> jax.Array:
        lhs, rhs = (jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1) for x in (d_result, embedding))
        dimensions = (((1,), (1,)), ((), ()))
        product = jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32)
        return product.astype(embedding.dtype)

    def gradient(inputs: Any, cotangent: jax.Array) -> Any:
        (w_user, w_cand), (e_user, e_cand), (_, index) = inputs
        of_users = total(cotangent, index, e_user.shape[0]).astype(cotangent.dtype)
        d_weights = d_weight(of_users, e_user), d_weight(cotangent, e_cand)
        return d_weights, (d_embedding(w_user, of_users), d_embedding(w_cand, cotangent)), None

    op = jax.custom_vjp(XLA[1])
    op.defvjp(lambda *inputs: (XLA[1](*inputs), inputs), gradient)
    return op


GRADIENTS: Versions = {
    OUR_NAME: OURS,
    "xla": ("implementation='xla'", XLA[1]),
    "by-hand": ("XLA by hand, sums scattered", _by_hand(_sum_scattered)),
    "by-hand-one-hot": ("XLA by hand, sums by a one-hot product", _by_hand(_sum_multiplied)),
}
BY_HAND = ("by-hand", "by-hand-one-hot")


def measure_versions(point: Point, versions: Versions, run: harness.Run) -> dict[str, Any]:
    """Checks versions at a point, and times them interleaved with the reference matmul.

    Short gradients are timed on the device.
    """
    problem, case, short_ms = point.problem, point.case, 0.0
    inputs = case.inputs()
    weights, embeddings, parents = inputs[:3]
    if point.direction == "backward":
        inputs = inputs._replace(cotangent=cotangent(inputs.cotangent.shape, problem.dtype))
        short_ms = device_time.SHORT_MS

    def compare(_: Contender, results: Sequence[Any]) -> Check:
        return case.check(results if point.direction == "backward" else results[0], inputs)

    makers = [
        functools.partial(Contender, name, *version, (weights, embeddings), (parents,))
        for name, version in versions.items()
    ]
    options: Any = {"compared": compare, "short_ms": short_ms}
    return production.measure_versions(makers, point, run, case.useful_flops, **options)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Measures all versions at default points and of gradients, else two."""
    problem = point.problem
    if point.direction == "backward":
        return measure_versions(point, GRADIENTS, run)
    versions = stages(problem) if point.sweep == "default" else {OUR_NAME: OURS, "xla": XLA}
    choice = table.lookup(problem)
    config = None if choice.config is None else dataclasses.asdict(choice.config)
    itemsize = jnp.dtype(problem.dtype).itemsize
    return {
        "table": {"config": config, "note": choice.reason},
        "user_result_bytes": problem.batches[0] * problem.m * problem.n * itemsize,
        **measure_versions(point, versions, run),
    }


def best_by_hand(point: Record) -> Record | None:
    """Finds the figures of the fastest gradient by hand at a point of a results file."""
    return fastest(p for p in point["providers"] if p["name"] in BY_HAND)


@of_ours
def gradient_bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figures of `ikbo` at a point, next to their bars."""
    if (by_hand := best_by_hand(point)) is None:
        return ""
    relative = ours["median_ms"] / by_hand["median_ms"]
    found = f"{relative:.3f} of the time by hand, bar {BY_HAND_BAR:.2f}"
    return listed(of_fraction(ours, GRADIENT_BAR if point["sweep"] == "ratio" else None), found)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figure of `ikbo` at a point, next to its bar."""
    if not is_forward(point):
        return gradient_bars(point)
    xla = provider_of(point, "xla")
    if point["sweep"] == "default":
        return of_fraction(ours, DEFAULT_BAR)
    if point["sweep"] in ("m", "k", "n"):
        if xla is None:
            return ""
        return f"{ours['median_ms'] / xla['median_ms']:.3f} of XLA's time, bar {NO_CLIFF_BAR}"
    dtype = point["problem"]["dtype"]
    default = ours_at(
        p for p in all_points if p["sweep"] == "default" and p["problem"]["dtype"] == dtype
    )
    if default is None:
        return f"fraction {ours['fraction']:.3f}"
    relative = ours["fraction"] / default["fraction"]
    sweep_bar = SMALL_BATCH_BAR if point["label"] == "B=256" else SWEEP_BAR
    return f"{relative:.3f} of the default's fraction, bar {sweep_bar}"


BENCHMARK = Benchmark(
    "linear_compression",
    [*_points()],
    measure_point,
    bars,
    prepare=lambda run: run.results.update(
        copy=timing.copy_ceiling(run.protocol.window_s, run.protocol.rounds)
    ),
    directions=["forward"],
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
