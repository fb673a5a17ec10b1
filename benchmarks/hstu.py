"""Benchmark of HSTU: a stack of layers over jagged histories, and masked attention alone.

    python -m benchmarks.hstu --out benchmarks/results/hstu/h100.json

Layers are Meta's: [u, a, u · norm(a)] is projected, u alone has a SiLU before. Other libraries'
attention pads the sequences, inside the timing. cuDNN has no SiLU: its softmax is another function.
Every version is compared with the XLA path in float32. Useful FLOPs of a training step are three
times those of the forward pass. Useful FLOPs of masked attention count the keys that each query
sees, and its times are those on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.production import checked, measure_versions
from benchmarks.production_draws import normal
from benchmarks.production_providers import TOLERANCE, Contender, cudnn, padding
from benchmarks.records import OUR_NAME, Record, of_ours
from ikbo_jax.layers import hstu_layer
from ikbo_jax.masks import Rows

#: Bars of the default shape: speed relative to cuDNN's softmax, and fraction of the matmul.
BARS = {"forward": (1.7, 0.70), "both": (1.8, 0.60)}
#: Bars of attention with a causal mask: fraction of the matmul by the length of the sequences, and
#: with a softmax speed relative to cuDNN.
LENGTHS = (1024, 2048, 4096, 8192)
FRACTION_BARS = {
    "forward": dict(zip(LENGTHS, (0.62, 0.74, 0.82, 0.86), strict=True)),
    "backward": dict(zip(LENGTHS, (0.46, 0.56, 0.64, 0.68), strict=True)),
}
CUDNN_BARS = {"forward": 1.1, "backward": 1.0}
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
    directions: ClassVar[tuple[str, ...]] = tuple(WORK)

    @property
    def label(self) -> str:
        return f"{self.width} wide, {self.rows // 1000}k tokens"

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


def _masked(
    query: Any, key: Any, value: Any, *, scale: float, mask: Any = None, activation: str = "silu"
) -> jax.Array:
    scores = jnp.einsum("bind,bjnd->bnij", query, key, preferred_element_type=jnp.float32)
    scores, longest = scores * jnp.float32(scale), key.shape[1]
    mask = jnp.tri(longest, dtype=bool) if mask is None else mask
    if activation == "softmax":
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    else:
        weights = jnp.where(mask, jax.nn.silu(scores), 0) / jnp.float32(longest)
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


@dataclasses.dataclass(frozen=True)
class Masked:
    """Sizes of one attention with a mask: `causal`, or with targets `hstu`.

    The longest sequence has `longest` rows. Lengths are "equal", "uniform" in 1..longest, or
    "log-normal" with a sigma of 1, cut off at `longest`.
    """

    batch: int
    longest: int
    lengths_are: str = "equal"
    heads: int = 4
    head_dim: int = 128
    activation: str = "silu"
    targets: int = 0
    contextual: int = 0
    window: int | None = None
    dtype: str = "bfloat16"
    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")

    @property
    def label(self) -> str:
        words = [
            self.activation,
            f"{self.batch} x {self.longest}",
            f"{self.heads} x {self.head_dim}",
        ]
        words += [self.lengths_are] if self.lengths_are != "equal" else []
        words += [f"{self.targets} targets"] if self.targets else []
        words += [f"window {self.window}"] if self.window else []
        return ", ".join(words)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        if self.lengths_are == "log-normal":
            drawn = np.exp(rng.normal(size=self.batch)) * self.longest / 4
            return np.clip(drawn, 1, self.longest).astype(np.int64)
        least = 1 if self.lengths_are == "uniform" else self.longest
        return rng.integers(least, self.longest + 1, self.batch)

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def is_causal(self) -> bool:
        return not self.targets and self.window is None

    @property
    def mask(self) -> ikbo.masks.Mask:
        if not self.targets:
            return ikbo.masks.causal(self.window)
        targets = jnp.asarray(np.minimum(self.targets, self.lengths), jnp.int32)
        return ikbo.masks.hstu(targets, contextual=self.contextual, window=self.window)

    @functools.cached_property
    def intervals(self) -> np.ndarray:
        """[rows, 4]: begins and ends of the keys that a row sees."""
        position = np.concatenate([np.arange(n) for n in self.lengths])
        sequence = np.repeat(np.arange(self.batch), self.lengths)
        arrays = position, self.lengths[sequence], sequence
        return np.asarray(self.mask.intervals(Rows(*(jnp.asarray(x, jnp.int32) for x in arrays))))

    def flops(self, direction: str) -> float:
        """Counts the products of visible pairs."""
        begin, end = self.intervals[:, ::2], self.intervals[:, 1::2]
        pairs = float(np.maximum(end - begin, 0).astype(np.int64).sum())
        return 4 * pairs * self.heads * self.head_dim * harness.ATTENTION_WORK[direction]


def masked_contenders(shape: Masked, direction: str) -> list[Callable[[], Contender]]:
    """Returns makers of this library, which is first, the XLA path, and the others."""
    cu = jnp.asarray(np.cumsum([0, *shape.lengths]), jnp.int32)
    qkv = [normal(i, (shape.rows, shape.heads, shape.head_dim), shape.dtype) for i in range(3)]
    scale, is_softmax = shape.head_dim**-0.5, shape.activation == "softmax"

    def made(name: str, stage: str, fn: Any, **options: Any) -> Contender:
        return Contender(name, stage, fn, tuple(qkv), (cu,), gradient_tolerance=2.0**-5, **options)

    def op(implementation: str | None) -> Callable[..., jax.Array]:
        is_exact = is_softmax or direction != "forward"
        return lambda *args: ikbo.gdpa(
            *(*args, args[-1]),
            activation=shape.activation,
            approx=None if is_exact else "tanh",
            scale=scale,
            output_scale=1.0 if is_softmax else 1 / shape.longest,
            max_seqlen_q=shape.longest,
            max_seqlen_kv=shape.longest,
            mask=shape.mask,
            implementation=implementation,
        )

    def padded(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(*args: jax.Array) -> jax.Array:
            dense = shape.batch, shape.longest
            pad = lambda x: x.reshape(*dense, *x.shape[1:])  # noqa: E731
            unpad = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
            if shape.lengths_are != "equal":
                pad, unpad = padding(args[-1], shape.rows, shape.longest)
            mask = None
            if not shape.is_causal:
                begin, end = (jnp.asarray(shape.intervals)[:, i::2, None] for i in (0, 1))
                column = jnp.arange(shape.longest, dtype=jnp.int32)[None, None]
                seen = ((begin <= column) & (column < end)).any(axis=1)
                mask = pad(seen.astype(shape.dtype))[:, None] > 0
            return unpad(attend(*map(pad, args[:3]), scale=scale, mask=mask))

        return run

    def masked() -> Contender:
        held = (3 if direction != "forward" else 1) * shape.batch * shape.heads
        if (scores := 4 * held * shape.longest**2) > MAX_SCORES:
            raise NotImplementedError(f"its scores take {scores / 2**30:.0f} GiB")
        attend = functools.partial(_masked, activation=shape.activation)
        return made("masked", "masked scores, padded, in XLA", padded(attend))

    def cudnn_softmax() -> Contender:
        attend = functools.partial(cudnn(), is_causal=shape.is_causal)
        other = "" if is_softmax else "a softmax"
        return made("cudnn-softmax", "cuDNN, padded", padded(attend), other=other)

    return [
        lambda: made(OUR_NAME, "gdpa", op(None)),
        lambda: made("xla", "gdpa by implementation='xla'", op("xla"), is_xla=True),
        masked,
        cudnn_softmax,
    ]


def _drawn(number: int) -> Iterator[Masked]:
    """Draws jagged shapes of up to 65,536 rows, half of them with targets."""
    rng = np.random.default_rng(7)
    for i in range(number):
        longest = int(np.exp(rng.uniform(np.log(64), np.log(8192))))
        shape = Masked(
            max(1, 65_536 // longest),
            longest,
            str(rng.choice(["equal", "uniform", "log-normal"])),
            int(rng.choice([2, 4, 8])),
            int(rng.choice([64, 128])),
            ("silu", "softmax")[i % 2],
        )
        if i % 4 >= 2:
            shape = dataclasses.replace(
                shape,
                targets=min(64, longest // 2),
                contextual=int(rng.integers(0, 5)),
                window=256 if i % 8 >= 6 else None,
            )
        yield shape


def _causal(activation: str, **changes: Any) -> list[Masked]:
    shapes = (Masked(65_536 // s, s, activation=activation) for s in LENGTHS)
    return [dataclasses.replace(shape, **changes) for shape in shapes]


#: Layers: the bars' shape; other widths; other numbers of tokens: 10k, 28k and 198k.
SWEEPS: dict[str, Sequence[Shape | Masked]] = {
    "default": [Shape()],
    "widths": [Shape(width=256, heads=2), Shape(width=1024, heads=8)],
    "tokens": [Shape(batch=batch) for batch in (3, 10, 64)],
    "causal": _causal("silu"),
    "softmax": _causal("softmax"),
    "narrow": _causal("silu", head_dim=64, heads=8)[::2],
    "jagged": [Masked(64, 2048, "uniform"), Masked(64, 4096, "log-normal")],
    "mixes": _causal("silu", targets=64, contextual=4, window=256)[::2],
    "drawn": list(_drawn(40)),
}


def points(sweep: str) -> Iterator[Point]:
    """Yields the points of a sweep."""
    for shape in SWEEPS[sweep]:
        for direction in shape.directions:
            yield Point(sweep, f"{shape.label}, {direction}", shape, direction)


def shrink(point: Point) -> Point:
    """Makes the point's sizes small enough for a CPU."""
    if isinstance(point.case, Masked):
        targets = min(2, point.case.targets)
        return point.with_case(batch=2, longest=9, heads=2, head_dim=8, targets=targets)
    sizes = {"batch": 2, "layers": 1, "shortest": 3, "longest": 9, "width": 16}
    return point.with_case(**sizes, heads=2, head_dim=8)


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks all versions at a point, and times them interleaved; with "quick", the first three."""
    flops = point.case.flops(point.direction)
    if not isinstance(point.case, Masked):
        makers = contenders(point.case, point.direction)
        return measure_versions(makers, point, run, flops, quick=3)
    makers = masked_contenders(point.case, point.direction)[: 3 if run.options.quick else None]
    on_device = dataclasses.replace(run.protocol, short_ms=math.inf)
    return harness.measure(checked(makers, point.direction), on_device, flops)


@of_ours
def bars(point: Record, ours: Record, all_points: Sequence[Record]) -> str:
    """Formats the speed relative to the others, and the bars."""
    others = [p for p in point["providers"] if p is not ours and "median_ms" in p]
    ratios = [f"{p['median_ms'] / ours['median_ms']:.2f} x {p['name']}" for p in others]
    sweep, direction = point["sweep"], point["direction"]
    if sweep == "default":
        ratio, fraction = BARS[direction]
        ratios.append(f"bars {ratio} x cudnn-softmax, {fraction} of the matmul")
    if sweep == "causal":
        bar = FRACTION_BARS[direction][point["problem"]["longest"]]
        ratios.append(f"fraction {ours['fraction']:.3f}, bar {bar}")
    if sweep == "softmax":
        ratios.append(f"bar {CUDNN_BARS[direction]} x cudnn-softmax")
    return ", ".join(ratios)


OF_SWEEPS = harness.of_sweeps(points)
BENCHMARK = Benchmark("hstu", tuple(SWEEPS), OF_SWEEPS, shrink, measure_point, bars)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
