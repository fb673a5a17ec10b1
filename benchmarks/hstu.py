"""Benchmark of a stack of HSTU layers over jagged histories, forward and training step.

    python -m benchmarks.hstu --out benchmarks/results/hstu-h100.json

Layers are Meta's: [u, a, u · norm(a)] is projected, u alone has a SiLU before. Other libraries'
attention pads the sequences, inside the timing. cuDNN has no SiLU: its softmax is another function.
Every version is compared with the XLA path in float32. Useful FLOPs of a training step are three
times those of the forward pass.
"""

from __future__ import annotations

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
from benchmarks.production import measure_versions
from benchmarks.production_draws import normal
from benchmarks.production_providers import TOLERANCE, Contender, cudnn, padding
from benchmarks.records import OUR_NAME, Record, of_ours
from ikbo_jax.layers import hstu_layer

#: Bars of the default shape: speed relative to cuDNN's softmax, and fraction of the matmul.
BARS = {"forward": (1.7, 0.70), "both": (1.8, 0.60)}
#: FLOPs by direction, relative to the forward pass.
WORK = {"forward": 1.0, "both": 3.0}
#: Most bytes of the scores that plain XLA holds at once.
MAX_SCORES = 24 * 2**30
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes; lengths are uniform in shortest..longest. By default, there are 100,072 tokens."""

    batch: int = 32
    layers: int = 5
    shortest: int = 2048
    longest: int = 4096
    width: int = 512
    heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def lengths(self) -> np.ndarray:
        return np.random.default_rng(0).integers(self.shortest, self.longest + 1, self.batch)

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def weights(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of a layer's projections, to u, v, q and k and back."""
        return (self.width, 4 * self.inner), (3 * self.inner, self.width)

    def flops(self, direction: str) -> float:
        """Counts the products of visible pairs, and of the layers' projections."""
        lengths = self.lengths.astype(np.float64)
        attention = 4 * np.sum(lengths * (lengths + 1) / 2) * self.inner
        dense = 2 * self.rows * sum(map(math.prod, self.weights))
        return float(self.layers * (attention + dense) * WORK[direction])

    def plain(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Makes the function of `args` and of offsets in plain jnp, from that of one attention."""

        def norm(x: jax.Array) -> jax.Array:
            return jax.nn.standardize(x.astype(jnp.float32), epsilon=EPS).astype(x.dtype)

        def run(x: jax.Array, w_in: jax.Array, w_out: jax.Array, cu: jax.Array) -> jax.Array:
            for layer in range(self.layers):
                u, v, q, k = jnp.split(norm(x) @ w_in[layer], 4, axis=1)
                heads = (y.reshape(len(x), self.heads, self.head_dim) for y in (q, k, v))
                u, a = jax.nn.silu(u), attend(*heads, cu).reshape(len(x), -1)
                x = x + jnp.concatenate((u, a, u * norm(a)), axis=1) @ w_out[layer]
            return x

        return run

    def fused(self, recompute: tuple[str, ...]) -> Callable[..., jax.Array]:
        """Makes the same function of this library's layers."""

        def run(x: jax.Array, w_in: jax.Array, w_out: jax.Array, cu: jax.Array) -> jax.Array:
            for layer in range(self.layers):
                x = hstu_layer(
                    {"uvqk_weight": w_in[layer], "output_weight": w_out[layer]},
                    *(x, cu),
                    num_heads=self.heads,
                    max_seqlen=self.longest,
                    approx="tanh",
                    eps=EPS,
                    recompute=recompute,
                )
            return x

        return run

    def jagged(self, implementation: str | None) -> Callable[..., jax.Array]:
        """Makes the attention of `plain` by `gdpa`."""
        return lambda *args: ikbo.gdpa(
            *(*args, args[-1]),
            activation="silu",
            approx="tanh",
            scale=self.head_dim**-0.5,
            output_scale=1 / self.longest,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            mask=ikbo.masks.causal(),
            implementation=implementation,
        )

    def padded(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Makes the attention of `plain` from one of sequences that are padded to one length."""

        def run(*args: jax.Array) -> jax.Array:
            *qkv, cu = args
            pad, unpad = padding(cu, len(args[0]), self.longest)
            return unpad(attend(*map(pad, qkv), scale=self.head_dim**-0.5))

        return run


def stacked(
    name: str, stage: str, fn: Callable[..., jax.Array], shape: Any, cu: jax.Array, **options: Any
) -> Contender:
    """Makes a contender of rows, the weights of all layers, and offsets; draws the first two."""
    weights = (
        normal(i, (shape.layers, *sizes), shape.dtype) * sizes[0] ** -0.5
        for i, sizes in enumerate(shape.weights)
    )
    args = normal(2, (shape.rows, shape.width), shape.dtype), *weights
    # Rounding errors of layers add up.
    tolerance = 4 * TOLERANCE
    return Contender(name, stage, fn, args, (cu,), gradient_tolerance=tolerance, **options)


def _masked(query: Any, key: Any, value: Any, *, scale: float) -> jax.Array:
    scores = jnp.einsum("bind,bjnd->bnij", query, key, preferred_element_type=jnp.float32)
    weights = jnp.tril(jax.nn.silu(scores * jnp.float32(scale))) / jnp.float32(key.shape[1])
    return jnp.einsum("bnij,bjnd->bind", weights.astype(value.dtype), value)


def contenders(shape: Shape, direction: str) -> list[Callable[[], Contender]]:
    """Returns makers of this library's layer, which is first, the XLA path, and the others."""
    cu = jnp.asarray(np.cumsum([0, *shape.lengths]), jnp.int32)
    held = shape.layers if direction == "both" else 1
    scores = 4 * held * shape.batch * shape.heads * shape.longest**2

    def made(name: str, stage: str, fn: Any, **options: Any) -> Contender:
        return stacked(name, stage, fn, shape, cu, **options)

    def masked() -> Contender:
        if scores > MAX_SCORES:
            raise NotImplementedError(f"its scores take {scores / 2**30:.0f} GiB")
        return made("masked", "masked scores, padded, in XLA", shape.plain(shape.padded(_masked)))

    def cudnn_softmax() -> Contender:
        attend = functools.partial(cudnn(), is_causal=True)
        fn = shape.plain(shape.padded(attend))
        return made("cudnn-softmax", "cuDNN, padded", fn, other="a softmax")

    every, by_xla = ("norm", "projection"), shape.plain(shape.jagged("xla"))
    found = [
        lambda: made(OUR_NAME, "hstu_layer", shape.fused(())),
        lambda: made("xla", "gdpa by implementation='xla'", by_xla, is_xla=True),
        masked,
        lambda: made("ikbo-gdpa", "gdpa, and XLA around it", shape.plain(shape.jagged(None))),
        cudnn_softmax,
    ]
    if direction == "both":
        found.append(lambda: made("ikbo-recompute", f"recompute={every}", shape.fused(every)))
    return found


#: The bars' shape; other widths; other numbers of tokens: 10k, 28k and 198k.
SWEEPS = {
    "default": [Shape()],
    "widths": [Shape(width=256, heads=2), Shape(width=1024, heads=8)],
    "tokens": [Shape(batch=batch) for batch in (3, 10, 64)],
}


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    for shape in SWEEPS[sweep]:
        for direction in WORK:
            label = f"{shape.width} wide, {shape.rows // 1000}k tokens, {direction}"
            yield Point(sweep, label, shape, direction)


def shrink(point: Point) -> Point:
    """Makes the point's sizes small enough for a CPU."""
    sizes = {"batch": 2, "layers": 1, "shortest": 3, "longest": 9, "width": 16}
    return point.with_case(**sizes, heads=2, head_dim=8)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks all versions at a point, and times them interleaved; with "quick", the first three."""
    makers, flops = contenders(point.case, point.direction), point.case.flops(point.direction)
    return measure_versions(makers, point, run, flops, quick=3)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the speed of this library's layer relative to the others, and the bars."""
    others = [p for p in point["providers"] if p is not ours and "median_ms" in p]
    ratios = [f"{p['median_ms'] / ours['median_ms']:.2f} x {p['name']}" for p in others]
    ratio, fraction = BARS[point["direction"]]
    if point["sweep"] == "default":
        ratios.append(f"bars {ratio} x cudnn-softmax, {fraction} of the matmul")
    return ", ".join(ratios)


OF_SWEEPS = harness.of_sweeps(points)
BENCHMARK = Benchmark("hstu", tuple(SWEEPS), OF_SWEEPS, shrink, measure_point, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
