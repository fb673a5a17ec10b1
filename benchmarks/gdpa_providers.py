"""The implementations of generalised dot-product attention that the benchmark compares."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

import ikbo_jax
from benchmarks import yardsticks
from ikbo_jax.cases.gdpa import Case, uniform_lengths
from ikbo_jax.cases.gdpa_oracle import RESULTS, Inputs
from ikbo_jax.problems import GdpaProblem
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Arrays

#: Largest number of query-key pairs per head for the XLA path: full sequences of 1024.
MAX_XLA_PAIRS = 1152 * 1024**2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A problem, as in results files.

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
    def case(self) -> Case:
        q_rows, kv_rows = self.batch * self.q_len, self.batch * self.kv_len
        if self.lengths == "half":
            q_rows = kv_rows = int(uniform_lengths(self.batch, self.kv_len).sum())
        problem = GdpaProblem(
            *(self.batch, self.batch, q_rows, kv_rows, self.heads, self.heads, self.head_dim),
            *(self.dtype, (self.activation,), self.approx, self.broadcast_q),
            *(self.q_len, self.kv_len),
        )
        return Case(problem, "uniform" if self.lengths == "half" else "spread")

    def with_softmax(self) -> Sizes:
        """The same sizes with softmax as activation."""
        return dataclasses.replace(self, activation=SOFTMAX, approx=None)


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
            out, pull = jax.vjp(lambda *x: op(Arrays._make((*x, *arrays[3:]))), *arrays[:3])
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


def _gdpa(sizes: Sizes, inputs: Inputs, contender: str) -> Op:
    case = sizes.case
    if contender == "decomposed" and case.pairs > MAX_XLA_PAIRS:
        raise NotImplementedError(
            f"too long: {case.pairs / 1e9:.2f}e9 pairs of a query and a key, more than "
            f"{MAX_XLA_PAIRS / 1e9:.2f}e9"
        )
    op = case.contender(contender)
    return lambda arrays: op(*arrays)


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


def _yardstick(sizes: Sizes, inputs: Inputs, make: Callable[[], Callable[..., jax.Array]]) -> Op:
    return _dense(sizes, make())


def _attention(sizes: Sizes, inputs: Inputs) -> Op:
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        index = jnp.arange(sizes.batch, dtype=jnp.int32)
        out = ikbo_jax.attention(query, key, value, index, indices_are_sorted=True)
        assert isinstance(out, jax.Array)
        return out

    return _dense(sizes, attend)


def _padded(sizes: Sizes, inputs: Inputs, implementation: Literal["xla", "cudnn"]) -> Op:
    """Softmax attention over sequences padded to the longest one; the time includes the padding."""
    if sizes.lengths != "half":
        raise NotImplementedError("needs lengths that differ")
    if implementation == "cudnn":
        yardsticks.cudnn()  # raises NotImplementedError without a GPU

    def op(arrays: Arrays) -> jax.Array:
        offsets = arrays.cu_seqlens_kv
        lengths = offsets[1:] - offsets[:-1]
        pad, unpad = yardsticks.padding(offsets, arrays.key.shape[0], sizes.kv_len)
        with jax.numpy_dtype_promotion("standard"):
            out: jax.Array = jax.nn.dot_product_attention(
                *map(pad, arrays[:3]),
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                implementation=implementation,
            )
        return unpad(out)

    return op


OURS = Provider(
    "ikbo",
    "ikbo_jax.gdpa (implementation='mosaic_gpu')",
    functools.partial(_gdpa, contender="fused"),
)
XLA = Provider(
    "xla",
    "chunked, in XLA (implementation='xla')",
    functools.partial(_gdpa, contender="decomposed"),
)
CUDNN = Provider(
    "cudnn-softmax",
    "softmax attention by cuDNN",
    functools.partial(_yardstick, make=yardsticks.cudnn),
    is_softmax=True,
)
TOKAMAX = Provider(
    "tokamax-softmax",
    "softmax attention by tokamax",
    functools.partial(_yardstick, make=yardsticks.tokamax),
    is_softmax=True,
)
ATTENTION = Provider(
    "ikbo-attention",
    "ikbo_jax.attention, every candidate its own user",
    _attention,
    is_softmax=True,
)
PADDED = Provider(
    "cudnn-softmax-padded",
    "softmax attention by cuDNN over padded sequences",
    functools.partial(_padded, implementation="cudnn"),
    is_softmax=True,
)
ALL = (CUDNN, TOKAMAX, XLA, OURS)
