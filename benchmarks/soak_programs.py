"""The programs of `soak`: ops and gradients with small, mixed sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from benchmarks.production_providers import attend
from ikbo_jax.ops.linear_compression import Term


class Program(NamedTuple):
    """A function of arrays: the op's result, with "gradient" also all gradients."""

    name: str
    fn: Callable[..., Any]
    arrays: tuple[jax.Array, ...]


class AttentionSizes(NamedTuple):
    """Sizes as in `AttentionProblem`; `is_ragged`: an unsorted index, and lengths from 0 to S."""

    batch: int
    users: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    is_ragged: bool = False
    dtype: str = "bfloat16"


class CompressionSizes(NamedTuple):
    """Sizes of a linear compression, coarsest level first."""

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    m: int
    n: int
    is_ragged: bool = False
    dtype: str = "bfloat16"


class GdpaSizes(NamedTuple):
    """Lengths of the sequences of `ikbo_jax.gdpa`; one number of queries: broadcast queries."""

    queries: tuple[int, ...] | int
    keys: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    activation: str
    q_to_kv: tuple[int, ...] | None = None
    dtype: str = "bfloat16"


Sizes = AttentionSizes | CompressionSizes | GdpaSizes

#: Op, direction and sizes. Each op has sizes with several waves of tiles, with one tile, and with
#: an unsorted index, users without candidates, and lengths of 0.
FORWARD, GRADIENT, MIXED = "forward", "gradient", (130, 0, 600, 64, 1)
PROGRAMS: tuple[tuple[str, str, Sizes], ...] = (
    ("attention", FORWARD, AttentionSizes(1024, 16, 16, 512, 4, 4, 128)),
    ("attention", FORWARD, AttentionSizes(4, 2, 24, 40, 1, 1, 64)),
    ("attention", FORWARD, AttentionSizes(200, 40, 33, 77, 4, 2, 96, True, "float16")),
    ("attention", FORWARD, AttentionSizes(64, 90, 40, 300, 2, 2, 256, True)),
    ("attention", GRADIENT, AttentionSizes(512, 16, 24, 384, 4, 4, 64)),
    ("attention", GRADIENT, AttentionSizes(3, 2, 24, 40, 1, 1, 128)),
    ("attention", GRADIENT, AttentionSizes(150, 40, 33, 130, 4, 2, 128, True)),
    ("attention", GRADIENT, AttentionSizes(64, 90, 40, 300, 2, 1, 192, True, "float16")),
    ("attention", GRADIENT, AttentionSizes(64, 2, 64, 129, 2, 2, 256)),
    ("few queries", FORWARD, AttentionSizes(2048, 32, 1, 1024, 2, 2, 128)),
    ("few queries", FORWARD, AttentionSizes(1, 1, 1, 5, 1, 1, 64)),
    ("few queries", FORWARD, AttentionSizes(300, 90, 1, 333, 4, 4, 64, True, "float16")),
    ("few queries", FORWARD, AttentionSizes(8, 1, 2, 8192, 2, 2, 128)),
    ("few queries", GRADIENT, AttentionSizes(700, 90, 1, 200, 2, 2, 128, True)),
    ("few queries", GRADIENT, AttentionSizes(64, 1, 2, 1000, 1, 1, 64)),
    ("linear compression", FORWARD, CompressionSizes((9, 512), (300, 200), 130, 256)),
    ("linear compression", FORWARD, CompressionSizes((1, 1), (16, 24), 8, 64)),
    ("linear compression", FORWARD, CompressionSizes((70, 90), (65, 33), 433, 40, True, "float16")),
    ("linear compression", FORWARD, CompressionSizes((3, 20, 150), (64, 40, 70), 64, 128, True)),
    ("linear compression", GRADIENT, CompressionSizes((9, 512), (300, 200), 130, 256)),
    ("linear compression", GRADIENT, CompressionSizes((1, 1), (16, 24), 8, 64)),
    ("linear compression", GRADIENT, CompressionSizes((70, 90), (65, 33), 433, 40, True)),
    ("linear compression", GRADIENT, CompressionSizes((3, 20, 150), (64, 40, 70), 64, 128, True)),
    ("gdpa", FORWARD, GdpaSizes(MIXED * 16, MIXED * 16, 4, 4, 128, "gelu")),
    ("gdpa", FORWARD, GdpaSizes((5,), (9,), 1, 1, 64, "silu")),
    ("gdpa", FORWARD, GdpaSizes((70, 0, 5, 130), (40, 0, 129), 2, 1, 96, "softmax", (2, 0, 1, 2))),
    ("gdpa", FORWARD, GdpaSizes(16, (300, 0, 7, 129) * 8, 2, 2, 128, "gelu_tanh", dtype="float16")),
    ("gdpa", GRADIENT, GdpaSizes(MIXED * 8, MIXED * 8, 4, 4, 128, "gelu")),
    ("gdpa", GRADIENT, GdpaSizes((5,), (9,), 1, 1, 64, "silu")),
    ("gdpa", GRADIENT, GdpaSizes((70, 0, 5, 130), (40, 0, 129), 2, 1, 64, "softmax", (2, 0, 1, 2))),
    ("gdpa", GRADIENT, GdpaSizes(16, (300, 0, 7, 129) * 4, 2, 2, 128, "relu")),
    ("gdpa", GRADIENT, GdpaSizes((200, 65), (64, 64), 2, 2, 96, "gelu_tanh", dtype="float16")),
)


def programs(implementation: str | None) -> Iterator[Program]:
    """Yields the programs, each with seeded arrays on the device."""
    for number, (op, direction, sizes) in enumerate(PROGRAMS):
        rng = np.random.default_rng(number)
        if isinstance(sizes, AttentionSizes):
            fn, shapes = _attention(sizes, rng)
        elif isinstance(sizes, CompressionSizes):
            fn, shapes = _compression(sizes, rng)
        else:
            fn, shapes = _gdpa(sizes)
        fn = functools.partial(fn, implementation=implementation)
        arrays = tuple(_normal(rng, shape, sizes.dtype) for shape in shapes)
        if isinstance(sizes, CompressionSizes):
            scales = [jnp.dtype(sizes.dtype).type(k**-0.5) for k in sizes.ks]
            weights = [x * scale for x, scale in zip(arrays, scales, strict=False)]
            arrays = (*weights, *arrays[len(weights) :])
        if direction == GRADIENT:
            out = jax.eval_shape(fn, *arrays)
            arrays = (_normal(rng, out.shape, str(out.dtype)), *arrays)
            fn = functools.partial(_with_gradients, fn)
        text = " ".join(x if len(x) < 30 else f"{x[:26]}...)" for x in map(str, sizes))
        yield Program(f"{op} {direction} {text}", fn, arrays)


def _with_gradients(fn: Callable[..., jax.Array], d_out: jax.Array, *arrays: jax.Array) -> Any:
    out, pull_back = jax.vjp(fn, *arrays)
    return out, pull_back(d_out)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.device_put(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


def _index(rng: np.random.Generator, size: int, values: int, is_ragged: bool) -> jax.Array:
    """[size] int32 below `values`: sorted; or unsorted, with values that do not occur."""
    if not is_ragged:
        return jax.device_put((np.arange(size) * values // size).astype(np.int32))
    chosen = rng.choice(values, max(1, values // 2), replace=False)
    return jax.device_put(rng.choice(chosen, size).astype(np.int32))


#: A function of arrays and `implementation`, and the shapes of the arrays.
Made = tuple[Callable[..., jax.Array], tuple[tuple[int, ...], ...]]


def _attention(sizes: AttentionSizes, rng: np.random.Generator) -> Made:
    s = sizes
    index, lengths = _index(rng, s.batch, s.users, s.is_ragged), None
    if s.is_ragged:
        drawn = rng.integers(0, s.kv_len + 1, s.users)
        drawn[:: max(1, s.users // 3)] = 0
        lengths = jax.device_put(drawn.astype(np.int32))
    fn = functools.partial(attend, index=index, lengths=lengths, indices_are_sorted=not s.is_ragged)
    keys = (s.users, s.kv_len, s.kv_heads, s.head_dim)
    return fn, ((s.batch, s.q_len, s.q_heads, s.head_dim), keys, keys)


def _compression(sizes: CompressionSizes, rng: np.random.Generator) -> Made:
    s, levels = sizes, len(sizes.ks)
    parents: list[jax.Array | None] = [None]
    for coarse, batch in zip(s.batches[:-1], s.batches[1:], strict=True):
        parents.append(_index(rng, batch, coarse, s.is_ragged))

    def fn(*arrays: jax.Array, implementation: str | None) -> jax.Array:
        terms = map(Term, arrays[:levels], arrays[levels:], parents)
        return ikbo_jax.multilevel_linear_compression([*terms], implementation=implementation)

    embeddings = ((batch, k, s.n) for batch, k in zip(s.batches, s.ks, strict=True))
    return fn, (*((s.m, k) for k in s.ks), *embeddings)


def _gdpa(sizes: GdpaSizes) -> Made:
    s = sizes

    def offsets(lengths: tuple[int, ...]) -> jax.Array:
        return jax.device_put(np.cumsum((0, *lengths)).astype(np.int32))

    cu_q, rows = (
        (None, s.queries) if isinstance(s.queries, int) else (offsets(s.queries), sum(s.queries))
    )
    cu_kv = offsets(s.keys)
    index = None if s.q_to_kv is None else jax.device_put(np.asarray(s.q_to_kv, np.int32))

    def fn(query: Any, key: Any, value: Any, *, implementation: str | None) -> jax.Array:
        return ikbo_jax.gdpa(
            *(query, key, value, cu_q, cu_kv),
            activation=s.activation,
            scale=s.head_dim**-0.5,
            output_scale=1.0 if s.activation == "softmax" else 1 / max(s.keys),
            q_to_kv=index,
            broadcast_q=cu_q is None,
            implementation=implementation,
        )

    keys = (sum(s.keys), s.kv_heads, s.head_dim)
    return fn, ((rows, s.q_heads, s.head_dim), keys, keys)
