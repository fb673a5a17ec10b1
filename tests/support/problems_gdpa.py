"""Shapes, seeded inputs and oracles of generalised dot-product attention."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import problems

import ikbo_jax as ikbo
from ikbo_jax.reference import gdpa, gdpa_chunked
from ikbo_jax.reference.activations import ACTIVATIONS as ACTIVATIONS
from ikbo_jax.reference.gdpa import Arrays, Settings, out_shape

SCALE, OUTPUT_SCALE = 0.3, 0.7
#: What a mask shows: takes a sequence's number, queries and keys; returns [queries, keys] bool.
Rule = Callable[[int, int, int], np.ndarray]


class Shape(NamedTuple):
    """Lengths of sequences, heads, head width; rows before the first and past the last sequence.

    Attributes:
      q_lens: lengths of the query sequences; one number T: broadcast queries.
      kv_lens: lengths of the key-value sequences.
      q_heads: N.
      kv_heads: K.
      head_dim: H.
      q_to_kv: the index, or None.
      before: rows before the first sequence.
      after: rows past the last one.
    """

    q_lens: tuple[int, ...] | int
    kv_lens: tuple[int, ...]
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    q_to_kv: tuple[int, ...] | None = None
    before: int = 0
    after: int = 0

    @property
    def is_broadcast_q(self) -> bool:
        return isinstance(self.q_lens, int)


#: One name for every branch of shapes.
SHAPES = {
    "self": Shape((5, 1, 9, 3), (5, 1, 9, 3)),
    "self_empty_and_padded": Shape((0, 7, 0, 1, 0), (4, 0, 0, 1, 6), before=2, after=5),
    "one_row": Shape((1,), (1,), 1, 1, 1),
    "grouped_heads": Shape((6, 11), (20, 3), 6, 2),
    "pffn": Shape((40, 25), (8, 8), 2, 2),
    "indexed": Shape((3, 8, 0, 5, 2), (9, 4, 0, 6), 2, 1, 8, (3, 0, 0, 3, 2), after=3),
    "pma": Shape(4, (19, 0, 1, 33), after=2),
    "pma_indexed": Shape(3, (7, 12), 4, 2, 8, (1, 1, 0, 1, 1)),
}


def offsets(lengths: tuple[int, ...], before: int = 0) -> jax.Array:
    """[batch + 1] int32 offsets of sequences of these lengths."""
    return jax.device_put(np.asarray(before + np.cumsum((0, *lengths)), np.int32))


def make_arrays(shape: Shape, dtype: Any = "bfloat16", seed: int = 0) -> Arrays:
    """Random normal inputs; rows of no sequence are NaN."""
    rng = np.random.default_rng(seed)
    around = shape.before + shape.after

    def array(rows: int, heads: int, lengths: tuple[int, ...] | None) -> jax.Array:
        values = np.array(problems.random_array(rng, (rows, heads, shape.head_dim), dtype))
        if lengths is not None:
            values[: shape.before] = np.nan
            values[shape.before + sum(lengths) :] = np.nan
        return jax.device_put(values)

    kv_rows = sum(shape.kv_lens) + around
    if isinstance(shape.q_lens, int):
        query, cu_q = array(shape.q_lens, shape.q_heads, None), None
    else:
        query = array(sum(shape.q_lens) + around, shape.q_heads, shape.q_lens)
        cu_q = offsets(shape.q_lens, shape.before)
    return Arrays(
        query,
        array(kv_rows, shape.kv_heads, shape.kv_lens),
        array(kv_rows, shape.kv_heads, shape.kv_lens),
        cu_q,
        offsets(shape.kv_lens, shape.before),
        None if shape.q_to_kv is None else jax.device_put(np.asarray(shape.q_to_kv, np.int32)),
    )


def value_and_gradients(run: Callable[[Arrays], jax.Array], arrays: Arrays, d_out: Any) -> tuple:
    """Out and the gradients of query, key and value."""
    others: Any = arrays[3:]
    out, pull_back = jax.vjp(lambda *x: run(Arrays(*x, *others)), *arrays[:3])
    return out, pull_back(d_out.astype(out.dtype))


def make_settings(
    shape: Shape, activation: str | tuple[str, ...] = "gelu", **rest: Any
) -> Settings:
    names = activation if isinstance(activation, tuple) else (activation,) * shape.q_heads
    rest = {"scale": SCALE, "output_scale": OUTPUT_SCALE, **rest}
    return Settings(names, broadcast_q=shape.is_broadcast_q, **rest)


def settings_of(arrays: Arrays, activations: tuple[str, ...], **rest: Any) -> Settings:
    """Settings of arrays whose shape is not at hand."""
    rest = {"scale": SCALE, "output_scale": OUTPUT_SCALE, **rest}
    return Settings(activations, broadcast_q=arrays.cu_seqlens_q is None, **rest)


def attend(arrays: Arrays, **options: Any) -> jax.Array:
    """`gdpa` of arrays, with the scales of this module."""
    scales = {"scale": SCALE, "output_scale": OUTPUT_SCALE}
    broadcast_q = arrays.cu_seqlens_q is None
    options = {"q_to_kv": arrays.q_to_kv, "broadcast_q": broadcast_q, **scales, **options}
    return ikbo.gdpa(*arrays[:5], **options)


def cotangent(arrays: Arrays, settings: Settings, seed: int = 1) -> jax.Array:
    """A random cotangent of out; it is not 0 in rows of no sequence."""
    rows, heads, width = arrays.query.shape
    if settings.broadcast_q:
        index = arrays.cu_seqlens_kv[1:] if arrays.q_to_kv is None else arrays.q_to_kv
        rows *= index.shape[0]
    rng = np.random.default_rng(seed)
    return problems.random_array(rng, (rows, heads, width), arrays.query.dtype)


def residuals(arrays: Arrays, settings: Settings) -> tuple[jax.Array | None, jax.Array | None]:
    """What the gradient of a softmax needs of the forward pass, by XLA."""
    if "softmax" not in settings.activations:
        return None, None
    return gdpa_chunked.chunked(arrays, settings)


def numpy_activation(name: str, x: np.ndarray) -> np.ndarray:
    """An activation in f64, from its definition; softmax over the last axis."""
    if name == "softmax":
        powers = np.exp(x - np.max(x, axis=-1, keepdims=True, initial=-np.inf))
        return powers / np.sum(powers, axis=-1, keepdims=True)
    cubic = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return {
        "identity": lambda: x,
        "relu": lambda: np.where(x > 0, x, 0),
        "leaky_relu": lambda: np.where(x > 0, x, 0.01 * x),
        "relu_squared": lambda: np.where(x > 0, x, 0) ** 2,
        "gelu": lambda: x * (1 + np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * (1 + np.tanh(cubic)) / 2,
        "silu": lambda: x / (1 + np.exp(-np.maximum(x, -700))),
        "hardswish": lambda: x * np.minimum(np.maximum(x + 3, 0), 6) / 6,
    }[name]()


def numpy_slope(name: str, x: np.ndarray) -> np.ndarray:
    """The derivative of an activation other than softmax, by differences in f64."""
    step = 1e-6
    return (numpy_activation(name, x + step) - numpy_activation(name, x - step)) / (2 * step)


def sequences(arrays: Arrays, settings: Settings) -> Iterator[tuple[Any, ...]]:
    """Every query sequence's rows of the queries, of the keys and of out; offsets are in order.

    And in f64 its keys and values, of which each query head has its own, and scores [N, i, j], with
    the settings' cap.
    """
    query, key, value = (np.asarray(x).astype(np.float64) for x in arrays[:3])
    cu_kv = np.asarray(arrays.cu_seqlens_kv)
    cu_q, index = (None if x is None else np.asarray(x) for x in (arrays[3], arrays[5]))
    length, heads = len(query), query.shape[1] // key.shape[1]

    def rows_of(cu: np.ndarray, number: int, longest: int | None) -> slice:
        rows = int(cu[number + 1] - cu[number])
        return slice(cu[number], cu[number] + min(rows, rows if longest is None else longest))

    for number, kv in enumerate(range(len(cu_kv) - 1) if index is None else index):
        of_keys = rows_of(cu_kv, kv, settings.max_seqlen_kv)
        if cu_q is None:
            rows, of_out = slice(None), slice(number * length, (number + 1) * length)
        else:
            rows = of_out = rows_of(cu_q, number, settings.max_seqlen_q)
        keys, values = (np.repeat(x[of_keys], heads, axis=1) for x in (key, value))
        scores = settings.scale * np.einsum("inh,jnh->nij", query[rows], keys)
        if settings.logit_cap:
            scores = settings.logit_cap * np.tanh(scores / settings.logit_cap)
        yield rows, of_keys, of_out, keys, values, scores


def score_slope(settings: Settings, scores: np.ndarray) -> np.ndarray:
    """The derivative of scores by the products of queries and keys."""
    cap = settings.logit_cap
    return settings.scale * (1 - (scores / cap) ** 2 if cap else np.ones_like(scores))


def _weighted(arrays: Arrays, settings: Settings, rule: Rule | None) -> Iterator[tuple[Any, ...]]:
    """`sequences`, with the pairs that each may see and the weights [N, i, j]."""
    for number, found in enumerate(sequences(arrays, settings)):
        scores = found[-1]
        shape = scores.shape[1:]
        seen = np.ones(shape, bool) if rule is None else rule(number, *shape)
        weights = np.zeros_like(scores)
        for head, name in enumerate(settings.activations):
            some = seen.any(axis=1) if name == "softmax" else slice(None)
            x = np.where(seen, scores[head], -np.inf) if name == "softmax" else scores[head]
            weights[head][some] = numpy_activation(name, x[some])
        yield *found, seen, np.where(seen, weights, 0)


def numpy_oracle(arrays: Arrays, settings: Settings, rule: Rule | None = None) -> np.ndarray:
    """Out in f64: a loop over sequences, which takes offsets that are in order."""
    out = np.zeros(out_shape(arrays, settings))
    for _, _, of_out, _, values, _, _, weights in _weighted(arrays, settings, rule):
        out[of_out] = settings.output_scale * np.einsum("nij,jnh->inh", weights, values)
    return out


def numpy_lse(arrays: Arrays, settings: Settings, rule: Rule | None = None) -> np.ndarray:
    """The logarithm of the sum of a row's powers, [rows, N], as `numpy_oracle` has out."""
    lse = np.zeros(out_shape(arrays, settings)[:2])
    for _, _, of_out, _, _, scores, seen, _ in _weighted(arrays, settings, rule):
        lse[of_out] = np.logaddexp.reduce(np.where(seen, scores, -np.inf), axis=2).T
    return lse


def numpy_gradients(
    arrays: Arrays, settings: Settings, d_out: Any, rule: Rule | None = None, *, dtype: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of <d_out, out> by query, key and value, as `numpy_oracle` has out.

    With `dtype`, those of a kernel that multiplies d_out by the rounded result, as flash attention
    does, for the means of rows: of weights of 0 and 1, they have errors where all gradients are 0.
    """
    rounded = None if dtype is None else numpy_oracle(arrays, settings, rule).astype(dtype)
    query, key, _, d_out = (np.asarray(x).astype(np.float64) for x in (*arrays[:3], d_out))
    d_query, d_key, d_value = (np.zeros(x.shape) for x in arrays[:3])
    heads = query.shape[1] // key.shape[1]

    def of_key_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), key.shape[1], heads, key.shape[2]).sum(2)

    for rows, of_keys, of_out, keys, values, scores, seen, weights in _weighted(
        arrays, settings, rule
    ):
        upstream = settings.output_scale * d_out[of_out]
        d_scores = np.einsum("inh,jnh->nij", upstream, values)
        for head, name in enumerate(settings.activations):
            if name == "softmax":
                mean = np.sum(weights[head] * d_scores[head], axis=-1, keepdims=True)
                if rounded is not None:
                    out = rounded[of_out, head].astype(np.float64)
                    mean = np.sum(d_out[of_out, head] * out, axis=-1, keepdims=True)
                d_scores[head] = weights[head] * (d_scores[head] - mean)
            else:
                d_scores[head] *= numpy_slope(name, scores[head])
        d_scores = score_slope(settings, scores) * np.where(seen, d_scores, 0)
        d_query[rows] += np.einsum("nij,jnh->inh", d_scores, keys)
        d_key[of_keys] += of_key_heads(np.einsum("nij,inh->jnh", d_scores, query[rows]))
        d_value[of_keys] += of_key_heads(np.einsum("nij,inh->jnh", weights, upstream))
    return d_query, d_key, d_value


def exactly(
    arrays: Arrays, settings: Settings, d_out: Any, rule: Rule | None = None
) -> tuple[np.ndarray, tuple]:
    """Out, and the gradients of query, key and value, in f64."""
    gradients = numpy_gradients(arrays, settings, d_out, rule)
    return numpy_oracle(arrays, settings, rule), gradients


#: What plain jnp makes of arrays in their own dtype, compiled.
materialised = jax.jit(gdpa.materialised, static_argnums=1)
