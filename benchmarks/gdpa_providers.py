"""The implementations of generalised dot-product attention that the benchmark compares."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Arrays, Settings

#: Names of the results of each direction, in order.
RESULTS = {
    "forward": ("out",),
    "backward": ("d_query", "d_key", "d_value"),
    "both": ("out", "d_query", "d_key", "d_value"),
}
#: Largest number of query-key pairs per head for the XLA path: full sequences of 1024.
MAX_XLA_PAIRS = 1152 * 1024**2
#: Rows of random numbers that are drawn at once, since a GPU needs counters of eight times their
#: size.
PART_ROWS = 2**16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A problem. Scores are scaled by 1 / √H, results by 1 for softmax and 1 / kv_len otherwise.

    Attributes:
      batch: number of sequences of queries and of keys.
      q_len: queries of the longest sequence.
      kv_len: keys of the longest sequence.
      heads: number of query heads and of key heads.
      head_dim: H, head width.
      dtype: dtype of all arrays.
      activation: activation of all heads.
      approx: name of an approximation, or None.
      lengths: "full" (q_len and kv_len for all sequences) or "half" (uniform in 1..kv_len, the same
        for queries and keys).
      broadcast_q: whether all sequences have the same queries.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    activation: str = "gelu_tanh"
    approx: str | None = "tanh"
    lengths: str = "full"
    broadcast_q: bool = False

    @property
    def settings(self) -> Settings:
        output_scale = 1.0 if self.activation == SOFTMAX else 1 / self.kv_len
        names = (self.activation,) * self.heads
        return Settings(
            names, self.approx, self.head_dim**-0.5, output_scale, broadcast_q=self.broadcast_q
        )

    def with_softmax(self) -> Sizes:
        """The same sizes with softmax as activation."""
        return dataclasses.replace(self, activation=SOFTMAX, approx=None)


class Inputs(NamedTuple):
    """Arrays of `ikbo_jax.gdpa`, and a cotangent of its result."""

    arrays: Arrays
    d_out: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    part = (min(shape[0], PART_ROWS), *shape[1:])
    keys = jax.random.split(key, -(-shape[0] // part[0]))
    parts = jax.lax.map(lambda k: jax.random.normal(k, part, jnp.dtype(dtype)), keys)
    return parts.reshape(-1, *shape[1:])[: shape[0]]


def make_inputs(sizes: Sizes, seed: int = 0) -> Inputs:
    """Random inputs on the device."""
    q_lens, kv_lens = (np.full(sizes.batch, x) for x in (sizes.q_len, sizes.kv_len))
    if sizes.lengths == "half":
        q_lens = kv_lens = np.random.default_rng(seed).integers(1, sizes.kv_len + 1, sizes.batch)
    cu_q, cu_kv = (
        jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32) for lens in (q_lens, kv_lens)
    )
    out_rows, kv_rows = int(q_lens.sum()), int(kv_lens.sum())
    q_rows = sizes.q_len if sizes.broadcast_q else out_rows
    query, key, value, d_out = (
        _normal(k, (rows, sizes.heads, sizes.head_dim), sizes.dtype)
        for k, rows in zip(
            jax.random.split(jax.random.key(seed), 4),
            (q_rows, kv_rows, kv_rows, out_rows),
            strict=True,
        )
    )
    return Inputs(Arrays(query, key, value, None if sizes.broadcast_q else cu_q, cu_kv), d_out)


def count_pairs(inputs: Inputs) -> int:
    """Number of pairs of a query and a key of the same sequence."""
    arrays = inputs.arrays
    kv_lens = np.diff(np.asarray(arrays.cu_seqlens_kv, np.int64))
    if arrays.cu_seqlens_q is None:
        return arrays.query.shape[0] * int(kv_lens.sum())
    return int(np.dot(np.diff(np.asarray(arrays.cu_seqlens_q, np.int64)), kv_lens))


#: Takes the arrays; returns the result [rows, N, H].
Op = Callable[[Arrays], jax.Array]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of the op.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      make: takes sizes and inputs; returns the op. Raises NotImplementedError with the reason if
        the provider cannot run here.
      is_softmax: whether it computes softmax for every activation.
      directions: the directions that it supports.
    """

    name: str
    stage: str
    make: Callable[[Sizes, Inputs], Op]
    is_softmax: bool = False
    directions: Sequence[str] = tuple(RESULTS)

    def sizes(self, sizes: Sizes) -> Sizes:
        """The sizes that the provider computes for a point with `sizes`."""
        return sizes.with_softmax() if self.is_softmax else sizes

    def prepare(
        self, sizes: Sizes, inputs: Inputs, direction: str
    ) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple]:
        """A function that computes `RESULTS[direction]`, and its arguments on the device."""
        if direction not in self.directions:
            raise NotImplementedError(f"has no {direction} direction")
        op = self.make(sizes, inputs)

        def vjp(arrays: Arrays) -> tuple[jax.Array, Callable[[jax.Array], tuple]]:
            out, pull = jax.vjp(lambda *x: op(Arrays(*x, *arrays[3:])), *arrays[:3])
            return out, pull

        def both(inputs: Inputs) -> tuple[jax.Array, ...]:
            out, pull = vjp(inputs.arrays)
            return (out, *pull(inputs.d_out))

        if direction == "forward":
            return lambda arrays: (op(arrays),), (inputs.arrays,)
        if direction == "both":
            return both, (inputs,)
        # The residuals of the forward pass are computed before the timing. They contain copies of
        # the inputs, which would not fit in memory for all providers: replace them by the inputs.
        _, pull = jax.jit(vjp)(inputs.arrays)
        deduplicate = functools.partial(_equal_array, jax.tree.leaves(inputs.arrays))
        pull = jax.tree.map(deduplicate, pull)
        return lambda pull, d_out: pull(d_out), (pull, inputs.d_out)


def _equal_array(arrays: Sequence[jax.Array], array: jax.Array) -> jax.Array:
    """The first of `arrays` that equals `array`; `array` if none does."""
    alike = (x for x in arrays if (x.shape, x.dtype) == (array.shape, array.dtype))
    return next((x for x in alike if bool(jnp.array_equal(x, array))), array)


def _gdpa(sizes: Sizes, inputs: Inputs, implementation: str) -> Op:
    if implementation == "xla" and (pairs := count_pairs(inputs)) > MAX_XLA_PAIRS:
        raise NotImplementedError(
            f"too long: {pairs / 1e9:.2f}e9 pairs of a query and a key, more than "
            f"{MAX_XLA_PAIRS / 1e9:.2f}e9"
        )
    settings = sizes.settings

    def op(arrays: Arrays) -> jax.Array:
        return ikbo_jax.gdpa(
            *arrays[:5],
            activation=sizes.activation,
            approx=sizes.approx,
            scale=settings.scale,
            output_scale=settings.output_scale,
            broadcast_q=sizes.broadcast_q,
            max_seqlen_q=sizes.q_len,
            max_seqlen_kv=sizes.kv_len,
            implementation=implementation,
        )

    return op


def _dense(sizes: Sizes, attend: Callable[..., jax.Array]) -> Op:
    """The op by `attend` on query [batch, T, N, H], key and value [batch, S, N, H]."""
    if sizes.lengths != "full":
        raise NotImplementedError("needs equal lengths")

    def op(arrays: Arrays) -> jax.Array:
        query, key, value = arrays[:3]
        q_shape, kv_shape = (
            (sizes.batch, length, sizes.heads, sizes.head_dim)
            for length in (sizes.q_len, sizes.kv_len)
        )
        dense = (
            jnp.broadcast_to(query, q_shape) if sizes.broadcast_q else query.reshape(q_shape),
            key.reshape(kv_shape),
            value.reshape(kv_shape),
        )
        return attend(*dense).reshape(-1, sizes.heads, sizes.head_dim)

    return op


def _cudnn(sizes: Sizes, inputs: Inputs) -> Op:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"cuDNN needs a GPU, but this is a {jax.default_backend()}")
    return _dense(sizes, functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))


def _tokamax(sizes: Sizes, inputs: Inputs) -> Op:
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"its kernel needs a GPU, not a {jax.default_backend()}")
    import tokamax

    attend = functools.partial(tokamax.dot_product_attention, implementation="mosaic")
    return _dense(sizes, attend)


def _attention(sizes: Sizes, inputs: Inputs) -> Op:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        index = jnp.arange(sizes.batch, dtype=jnp.int32)
        return ikbo_jax.attention(query, key, value, index, indices_are_sorted=True)

    return _dense(sizes, attend)


OURS = Provider(
    "ikbo",
    "ikbo_jax.gdpa (implementation='mosaic_gpu')",
    functools.partial(_gdpa, implementation="mosaic_gpu"),
)
XLA = Provider(
    "xla", "chunked, in XLA (implementation='xla')", functools.partial(_gdpa, implementation="xla")
)
CUDNN = Provider("cudnn-softmax", "softmax attention by cuDNN", _cudnn, is_softmax=True)
TOKAMAX = Provider("tokamax-softmax", "softmax attention by tokamax", _tokamax, is_softmax=True)
ATTENTION = Provider(
    "ikbo-attention",
    "ikbo_jax.attention, every candidate its own user",
    _attention,
    is_softmax=True,
    directions=("forward",),
)
ALL = (CUDNN, TOKAMAX, XLA, OURS)
