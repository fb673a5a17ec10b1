"""Benchmark of linear compression's gradient, beside XLA's and beside XLA written by hand.

    python -m benchmarks.linear_compression_gradient --out FILE.json

Times the gradients of both weights and both embeddings for a given cotangent, without the forward
pass. The gradients need twice the useful FLOPs of the result.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.linear_compression import DEFAULT, shrink
from benchmarks.production_draws import DRAWS
from benchmarks.records import Record, of_ours, provider_of
from ikbo_jax._timing import device_time
from ikbo_jax.cases.linear_compression import Inputs
from ikbo_jax.cases.linear_compression_backward import Case
from ikbo_jax.ops.linear_compression import linear_compression
from ikbo_jax.problems import LinearCompressionBackwardProblem

#: Bar of our fraction at the default sizes; of our time relative to XLA by hand, an upper bound.
FRACTION_BAR, BY_HAND_BAR = 0.55, 1.0
#: Points of "drawn".
NUM_DRAWN = 20

#: Gradients of the weights and of the embeddings, coarsest level first.
Gradients = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
Gradient = Callable[[Inputs, jax.Array], Gradients]


def _at(candidates: int, ratio: int, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"batches": (-(-candidates // ratio), candidates), "dtype": dtype}


#: Points by sweep: what differs from the default by label.
SWEEPS: dict[str, dict[str, dict[str, Any]]] = {
    "ratio": {f"{ratio}:1": _at(1024, ratio) for ratio in (1, 8, 70, 1024)},
    "batch": {f"B={batch}": _at(batch, 70) for batch in (256, 4096)},
    "dtype": {"float16": _at(1024, 70, "float16")},
    "drawn": {},
}


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    default = LinearCompressionBackwardProblem.of(DEFAULT)
    for label, sizes in SWEEPS[sweep].items():
        yield Point(sweep, label, Case(default, "unsorted")).resized(**sizes)
    rng = np.random.default_rng(4)
    for _ in range(NUM_DRAWN if sweep == "drawn" else 0):
        s = DRAWS["linear_compression"](rng)
        drawn = (s.users, s.batch), (s.k_user, s.k_cand), s.m, s.n, s.dtype
        yield Point(sweep, s.label, Case(LinearCompressionBackwardProblem(*drawn), s.index))


# Providers


def _by_op(implementation: str | None) -> Gradient:
    def gradient(inputs: Inputs, cotangent: jax.Array) -> Gradients:
        def op(weights: Any, embeddings: Any) -> jax.Array:
            arguments = Inputs(weights, embeddings, inputs.parents).arguments
            return linear_compression(*arguments, implementation=implementation)

        found: Gradients = jax.vjp(op, *inputs[:2])[1](cotangent)
        return found

    return gradient


def _sum_scattered(cotangent: jax.Array, index: jax.Array, users: int) -> jax.Array:
    return jax.ops.segment_sum(cotangent.astype(jnp.float32), index, users)


def _sum_multiplied(cotangent: jax.Array, index: jax.Array, users: int) -> jax.Array:
    """Sums by a one-hot matrix, which spreads a candidate's NaN to all users."""
    is_of_user = jnp.arange(users, dtype=jnp.int32)[:, None] == index[None]
    return jnp.einsum(
        "ub,bmn->umn",
        is_of_user.astype(cotangent.dtype),
        cotangent,
        preferred_element_type=jnp.float32,
    )


def _by_hand(total: Callable[[jax.Array, jax.Array, int], jax.Array]) -> Gradient:
    """Makes the form that was fastest on an H200: batched products, and transposed copies."""

    def d_embedding(weight: jax.Array, d_result: jax.Array) -> jax.Array:
        weights = jnp.broadcast_to(weight.T, (d_result.shape[0], *weight.T.shape))
        dimensions = (((2,), (1,)), ((0,), (0,)))
        return jax.lax.dot_general(weights, d_result, dimensions)

    def d_weight(d_result: jax.Array, embedding: jax.Array) -> jax.Array:
        lhs, rhs = (jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1) for x in (d_result, embedding))
        dimensions = (((1,), (1,)), ((), ()))
        product = jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32)
        return product.astype(embedding.dtype)

    def gradient(inputs: Inputs, cotangent: jax.Array) -> Gradients:
        (w_user, w_cand), (e_user, e_cand), (_, index) = inputs
        assert index is not None
        of_users = total(cotangent, index, e_user.shape[0]).astype(cotangent.dtype)
        d_weights = d_weight(of_users, e_user), d_weight(cotangent, e_cand)
        return d_weights, (d_embedding(w_user, of_users), d_embedding(w_cand, cotangent))

    return gradient


#: Name, description and gradient of every provider; ours is the last.
PROVIDERS: tuple[tuple[str, str, Gradient], ...] = (
    ("xla", "implementation='xla'", _by_op("xla")),
    ("by-hand", "XLA by hand, sums scattered", _by_hand(_sum_scattered)),
    ("by-hand-one-hot", "XLA by hand, sums by a one-hot product", _by_hand(_sum_multiplied)),
    ("ikbo", "ikbo_jax.linear_compression", _by_op(None)),
)
BY_HAND = ("by-hand", "by-hand-one-hot")


def measure_point(
    point: Point, providers: Sequence[tuple[str, str, Gradient]], protocol: harness.Protocol
) -> dict[str, Any]:
    """Checks the providers at a point, and times them interleaved with the reference matmul."""
    *inputs, cotangent = arrays = point.case.inputs()

    def compiled(name: str, stage: str, gradient: Gradient) -> harness.Contender:
        def prepare() -> tuple[Gradient, tuple]:
            return gradient, (Inputs(*inputs), cotangent)

        compare = functools.partial(point.case.check, inputs=arrays)
        return harness.compile_and_check(name, stage, prepare, compare)

    contenders = [compiled(*provider) for provider in providers]
    return harness.measure(contenders, protocol, point.case.useful_flops)


def best_by_hand(point: Record) -> Record | None:
    """Finds the figures of the fastest gradient by hand at a point of a results file."""
    found = [record for name in BY_HAND if (record := provider_of(point, name)) is not None]
    return min(found, key=lambda record: float(record["median_ms"]), default=None)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the figures of `ikbo` at a point, next to their bars."""
    if (by_hand := best_by_hand(point)) is None:
        return ""
    relative = ours["median_ms"] / by_hand["median_ms"]
    found = f"{relative:.3f} of the time by hand, bar {BY_HAND_BAR:.2f}"
    if point["sweep"] == "ratio":
        found = f"fraction {ours['fraction']:.3f}, bar {FRACTION_BAR:.2f}; {found}"
    return found


def _measure(point: Point, run: harness.Run) -> dict[str, Any]:
    """Times short points on the device; with "quick", one provider by hand alone beside ours."""
    protocol = dataclasses.replace(run.protocol, short_ms=device_time.SHORT_MS)
    return measure_point(point, PROVIDERS[-2:] if run.options.quick else PROVIDERS, protocol)


NAME, SELECTED = "linear_compression_gradient", harness.of_sweeps(points)
BENCHMARK = Benchmark(NAME, tuple(SWEEPS), SELECTED, shrink, _measure, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
