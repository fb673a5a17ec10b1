"""Benchmark of the attention layers of Phoenix, xAI's published ranker, at its sizes.

    python -m benchmarks.phoenix --out benchmarks/results/phoenix/h100.json

A user's history attends causally to itself; a candidate attends to the history and to itself. A
tanh caps the scores. There are no feed-forward nets. The attention of other libraries takes padded
sequences, and its time includes the padding. cuDNN has no cap, so it computes another function.
Every version is compared with masked scores in float32.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.hstu import stacked
from benchmarks.production import measure_versions
from benchmarks.production_providers import Contender, cudnn, padding
from benchmarks.records import OUR_NAME, Record, of_ours

#: Bar of our speed relative to the best alternative.
BAR = 2.0
#: FLOPs of dense layers by direction, relative to the forward pass.
DENSE_WORK = {"forward": 1.0, "both": 3.0}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes; the lengths of histories are uniform between the two of `history`."""

    batch: int = 8
    layers: int = 8
    candidates: int = 64
    q_heads: int = 20
    kv_heads: int = 4
    history: tuple[int, int] = (126, 1022)
    head_dim: int = 128
    width: int = 1280
    logit_cap: float = 30.0
    dtype: str = "bfloat16"

    @functools.cached_property
    def histories(self) -> np.ndarray:
        return np.random.default_rng(3).integers(self.history[0], self.history[1] + 1, self.batch)

    @property
    def rows(self) -> int:
        return int(self.histories.sum()) + self.batch * self.candidates

    @property
    def weights(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of a layer's projections, to query, key and value and back."""
        heads = self.q_heads + 2 * self.kv_heads
        return (self.width, heads * self.head_dim), (self.q_heads * self.head_dim, self.width)

    def flops(self, direction: str) -> float:
        """Counts the products of visible pairs, and of the layers' projections."""
        seen = self.histories.astype(np.float64) + 1
        pairs = np.sum(seen * (seen - 1) / 2 + self.candidates * seen)
        found = 4 * pairs * self.q_heads * self.head_dim * harness.ATTENTION_WORK[direction]
        dense = 2 * self.rows * sum(map(math.prod, self.weights)) * DENSE_WORK[direction]
        return float(self.layers * (found + dense))

    def network(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Makes the function of `args` and of offsets, from the function of one attention."""
        ends = [self.q_heads, self.q_heads + self.kv_heads]

        def run(x: jax.Array, w_in: jax.Array, w_out: jax.Array, cu: jax.Array) -> jax.Array:
            for layer in range(self.layers):
                norm = jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)
                heads = norm @ w_in[layer]
                qkv = jnp.split(heads.reshape(len(x), -1, self.head_dim), ends, axis=1)
                x = x + attend(*qkv, cu).reshape(len(x), -1) @ w_out[layer]
            return x

        return run


def _jagged(shape: Shape, logit_cap: float | None, *args: jax.Array) -> jax.Array:
    longest = shape.history[1] + shape.candidates
    return ikbo.gdpa(
        *(*args, args[-1]),
        activation="softmax",
        scale=shape.head_dim**-0.5,
        logit_cap=logit_cap,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        mask=ikbo.masks.hstu(jnp.full(shape.batch, shape.candidates, jnp.int32)),
    )


def _padded(shape: Shape, attend: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    *qkv, cu = args
    longest = shape.history[1] + shape.candidates
    pad, unpad = padding(cu, len(args[0]), longest)
    length = (cu[1:] - cu[:-1])[:, None, None, None]
    place = jnp.arange(longest, dtype=jnp.int32)
    row, column = place[None, None, :, None], place[None, None, None]
    mask = (column < row) & (column < length - shape.candidates) | (column == row)
    return unpad(attend(*map(pad, qkv), mask=mask, scale=shape.head_dim**-0.5))


def _capped(cap: float, query: Any, key: Any, value: Any, *, mask: Any, scale: float) -> jax.Array:
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bind,bjnd->bnij", query, key, preferred_element_type=jnp.float32)
    scores = cap * jnp.tanh(scores * jnp.float32(scale) / cap)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("bnij,bjnd->bind", weights, value)


def contenders(shape: Shape) -> list[Callable[[], Contender]]:
    """Returns makers of this library, masked scores, this library without a cap, and cuDNN."""
    cu = jnp.asarray(np.cumsum([0, *(shape.histories + shape.candidates)]), jnp.int32)
    jagged, padded = (functools.partial(attend, shape) for attend in (_jagged, _padded))

    def made(name: str, stage: str, attend: Callable[..., Any], option: Any) -> Contender:
        fn = shape.network(functools.partial(attend, option))
        other = "no cap" if name.endswith("no-cap") else ""
        return stacked(name, stage, fn, shape, cu, is_xla=name == "xla", other=other)

    def of_cudnn() -> Contender:
        return made("cudnn-no-cap", "cuDNN", padded, cudnn())

    masked = functools.partial(_capped, shape.logit_cap)
    return [
        lambda: made(OUR_NAME, "ikbo_jax.gdpa", jagged, shape.logit_cap),
        lambda: made("xla", "masked scores", padded, masked),
        lambda: made("ikbo-no-cap", "ikbo_jax.gdpa", jagged, None),
        of_cudnn,
    ]


SWEEPS = {"one": Shape(batch=32, layers=1), "all": Shape()}


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    for direction in DENSE_WORK:
        yield Point(sweep, direction, SWEEPS[sweep], direction)


def shrink(point: Point) -> Point:
    """Makes the point's sizes small enough for a CPU."""
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "width": 16}
    lengths = {"history": (3, 9), "candidates": 3}
    return point.with_case(batch=2, layers=min(2, point.case.layers), **lengths, **heads)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks all versions at a point, and times them interleaved; with "quick", the first two."""
    flops = point.case.flops(point.direction)
    return measure_versions(contenders(point.case), point, run, flops, quick=2)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the speed of this library relative to the best alternative."""
    timed = [p for p in point["providers"] if "median_ms" in p]
    others = [p for p in timed if not p["name"].startswith(OUR_NAME)]
    if not others:
        return ""
    best = min(others, key=lambda p: float(p["median_ms"]))
    return f"{best['median_ms'] / ours['median_ms']:.2f} x {best['name']}, bar {BAR}"


OF_SWEEPS = harness.of_sweeps(points)
BENCHMARK = Benchmark("phoenix", tuple(SWEEPS), OF_SWEEPS, shrink, measure_point, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
