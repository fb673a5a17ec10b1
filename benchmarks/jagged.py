"""Attention of jagged sequences over themselves, by this library, by XLA and by other libraries."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from benchmarks.harness import ATTENTION_WORK
from benchmarks.production_draws import normal
from benchmarks.production_providers import TOLERANCE, Contender, padding
from ikbo_jax.cases.gdpa import offsets_of
from ikbo_jax.layers import hstu_layer
from ikbo_jax.masks import Rows

#: Most bytes of the scores that plain XLA holds at once.
MAX_SCORES = 24 * 2**30
#: FLOPs of dense layers by direction, relative to the forward pass.
DENSE_WORK = {"forward": 1.0, "both": 3.0}
EPS = 1e-6
#: Takes query, key and value, and the offsets of the sequences.
Attend = Callable[..., jax.Array]


class Jagged:
    """Sequences of rows; `mask` tells which rows of its sequence a row attends to.

    A subclass has sizes, lengths and arguments. By default, the attention is all that is computed.
    """

    batch: int
    heads: int
    head_dim: int
    longest: int
    dtype: str
    activation: str
    gradient_tolerance: ClassVar[float]
    lengths: np.ndarray
    #: Arrays by direction that are as large as the scores of a call.
    held = {"forward": 1, "backward": 3, "both": 1}

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def mask(self) -> ikbo.masks.Mask:
        return ikbo.masks.causal()

    @property
    def is_causal(self) -> bool:
        return True

    @functools.cached_property
    def intervals(self) -> np.ndarray:
        """[rows, 4] int32: begins and ends of the keys that a row sees."""
        position = np.concatenate([np.arange(n) for n in self.lengths])
        sequence = np.repeat(np.arange(self.batch), self.lengths)
        arrays = position, self.lengths[sequence], sequence
        return np.asarray(self.mask.intervals(Rows(*(jnp.asarray(x, jnp.int32) for x in arrays))))

    @property
    def attention_flops(self) -> float:
        """Useful FLOPs of the products of visible pairs, in the forward pass."""
        begin, end = self.intervals[:, ::2], self.intervals[:, 1::2]
        pairs = float(np.maximum(end - begin, 0).astype(np.int64).sum())
        return 4 * pairs * self.heads * self.head_dim

    def network(self, attend: Attend) -> Callable[..., jax.Array]:
        """Makes the function of `args` and of offsets, from the function of one attention."""
        return attend

    def args(self) -> tuple[jax.Array, ...]:
        shape = self.rows, self.heads, self.head_dim
        return tuple(normal(i, shape, self.dtype) for i in range(3))

    def contender(
        self, name: str, stage: str, fn: Callable[..., jax.Array], **options: Any
    ) -> Contender:
        offsets = jnp.asarray(offsets_of(self.lengths))
        tolerance = self.gradient_tolerance
        args = self.args(), (offsets,)
        return Contender(name, stage, fn, *args, gradient_tolerance=tolerance, **options)

    def jagged(self, implementation: str | None = None, **options: Any) -> Attend:
        """Makes the attention by `gdpa`, with further `options`."""
        return lambda *args: ikbo.gdpa(
            *(*args, args[-1]),
            activation=self.activation,
            scale=self.head_dim**-0.5,
            output_scale=1.0 if self.activation == "softmax" else 1 / self.longest,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            mask=self.mask,
            implementation=implementation,
            **options,
        )

    def padded(self, attend: Callable[..., jax.Array]) -> Attend:
        """Makes the attention from one of padded sequences, and of a mask unless it is causal."""

        def run(*args: jax.Array) -> jax.Array:
            *qkv, offsets = args
            pad, unpad = padding(offsets, self.rows, self.longest)
            mask = None
            if not self.is_causal:
                seen = pad(jnp.asarray(self.intervals))[..., None]
                column = jnp.arange(self.longest, dtype=jnp.int32)[None, None, None]
                mask = (seen[:, :, ::2] <= column) & (column < seen[:, :, 1::2])
                # A row of the padding sees itself.
                mask = mask.any(axis=2)[:, None] | jnp.eye(self.longest, dtype=bool)[None, None]
            return unpad(attend(*map(pad, qkv), mask=mask, scale=self.head_dim**-0.5))

        return run

    def by_scores(self, direction: str, logit_cap: float | None = None) -> Attend:
        """Makes the attention by padded scores in XLA; raises if they would take too much."""
        size = 4 * self.held[direction] * self.batch * self.heads * self.longest**2
        if size > MAX_SCORES:
            raise NotImplementedError(f"its scores take {size / 2**30:.0f} GiB")

        def attend(*qkv: jax.Array, scale: float, mask: jax.Array | None) -> jax.Array:
            query, key, value = qkv
            key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
            scores = jnp.einsum("bind,bjnd->bnij", query, key, preferred_element_type=jnp.float32)
            scores = scores * jnp.float32(scale)
            scores = scores if logit_cap is None else logit_cap * jnp.tanh(scores / logit_cap)
            mask = jnp.tri(self.longest, dtype=bool) if mask is None else mask
            if self.activation == "softmax":
                weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
            else:
                weights = jnp.where(mask, jax.nn.silu(scores), 0) / jnp.float32(self.longest)
            return jnp.einsum("bnij,bjnd->bind", weights.astype(value.dtype), value)

        return self.padded(attend)


class Stack(Jagged):
    """Layers of attention between projections of shapes `weights`, to query, key and value, back.

    Rounding errors of layers add up.
    """

    layers: int
    width: int
    weights: tuple[tuple[int, int], tuple[int, int]]
    gradient_tolerance: ClassVar[float] = 4 * TOLERANCE
    #: FLOPs of attention by direction, relative to the forward pass.
    work: ClassVar[dict[str, float]] = ATTENTION_WORK

    def flops(self, direction: str) -> float:
        """Counts the products of visible pairs, and of the layers' projections."""
        dense = 2 * self.rows * sum(map(math.prod, self.weights)) * DENSE_WORK[direction]
        return float(self.layers * (self.attention_flops * self.work[direction] + dense))

    def args(self) -> tuple[jax.Array, ...]:
        weights = (
            normal(i, (self.layers, *sizes), self.dtype) * sizes[0] ** -0.5
            for i, sizes in enumerate(self.weights)
        )
        return normal(2, (self.rows, self.width), self.dtype), *weights


@dataclasses.dataclass(frozen=True)
class Hstu(Stack):
    """Sizes; lengths are uniform in shortest..longest. By default, there are 100,072 tokens."""

    batch: int = 32
    layers: int = 5
    shortest: int = 2048
    longest: int = 4096
    width: int = 512
    heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    activation: ClassVar[str] = "silu"  # type: ignore[misc]
    work: ClassVar[dict[str, float]] = DENSE_WORK
    directions: ClassVar[tuple[str, ...]] = tuple(DENSE_WORK)

    @property
    def label(self) -> str:
        return f"{self.width} wide, {self.rows // 1000}k tokens"

    @property
    def held(self) -> dict[str, int]:  # type: ignore[override]
        return {"forward": 1, "both": self.layers}

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        return np.random.default_rng(0).integers(self.shortest, self.longest + 1, self.batch)

    @property
    def weights(self) -> tuple[tuple[int, int], tuple[int, int]]:  # type: ignore[override]
        """Shapes of a layer's projections, to u, v, q and k and back."""
        inner = self.heads * self.head_dim
        return (self.width, 4 * inner), (3 * inner, self.width)

    def network(self, attend: Attend) -> Callable[..., jax.Array]:
        """Makes the layers in plain jnp."""

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


@dataclasses.dataclass(frozen=True)
class Masked(Jagged):
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
    gradient_tolerance: ClassVar[float] = 2 * TOLERANCE

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
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        rng = np.random.default_rng(0)
        if self.lengths_are == "log-normal":
            drawn = np.exp(rng.normal(size=self.batch)) * self.longest / 4
            return np.clip(drawn, 1, self.longest).astype(np.int64)
        least = 1 if self.lengths_are == "uniform" else self.longest
        return rng.integers(least, self.longest + 1, self.batch)

    @property
    def is_causal(self) -> bool:
        return not self.targets and self.window is None

    @property
    def mask(self) -> ikbo.masks.Mask:
        if not self.targets:
            return ikbo.masks.causal(self.window)
        targets = jnp.asarray(np.minimum(self.targets, self.lengths), jnp.int32)
        return ikbo.masks.hstu(targets, contextual=self.contextual, window=self.window)

    def flops(self, direction: str) -> float:
        """Counts the products of visible pairs."""
        return self.attention_flops * ATTENTION_WORK[direction]


@dataclasses.dataclass(frozen=True)
class Phoenix(Stack):
    """Sizes of Phoenix; the lengths of histories are uniform between the two of `history`.

    A candidate attends to the history and to itself, and a tanh caps the scores.
    """

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
    activation: ClassVar[str] = "softmax"  # type: ignore[misc]
    is_causal: ClassVar[bool] = False
    directions: ClassVar[tuple[str, ...]] = tuple(DENSE_WORK)

    @property
    def label(self) -> str:
        return f"{self.layers} layers, {self.batch} users"

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.q_heads

    @property
    def longest(self) -> int:  # type: ignore[override]
        return self.history[1] + self.candidates

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        low, high = self.history
        return np.random.default_rng(3).integers(low, high + 1, self.batch) + self.candidates

    @property
    def mask(self) -> ikbo.masks.Mask:
        return ikbo.masks.hstu(jnp.full(self.batch, self.candidates, jnp.int32))

    @property
    def weights(self) -> tuple[tuple[int, int], tuple[int, int]]:  # type: ignore[override]
        """Shapes of a layer's projections, to query, key and value and back."""
        heads = self.q_heads + 2 * self.kv_heads
        return (self.width, heads * self.head_dim), (self.q_heads * self.head_dim, self.width)

    def network(self, attend: Attend) -> Callable[..., jax.Array]:
        """Makes the layers in plain jnp."""
        ends = [self.q_heads, self.q_heads + self.kv_heads]

        def run(x: jax.Array, w_in: jax.Array, w_out: jax.Array, cu: jax.Array) -> jax.Array:
            for layer in range(self.layers):
                norm = jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)
                heads = norm @ w_in[layer]
                qkv = jnp.split(heads.reshape(len(x), -1, self.head_dim), ends, axis=1)
                x = x + attend(*qkv, cu).reshape(len(x), -1) @ w_out[layer]
            return x

        return run
