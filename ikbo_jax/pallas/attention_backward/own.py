"""A launch that adds the own tokens of candidates, one of each, to attention's gradient.

    P  = exp(scale * query @ self_key - lse),   dS = P * (d_out @ self_value - delta)
    d_query += scale * dS * self_key,   d_self_key = scale * sum(dS * query),
    d_self_value = sum(P * d_out),   delta = sum(d_out * out) - d_lse

`out` and `lse` are of all keys, so the other launches need no own tokens; one computes delta. Some
neighbouring threads add up the products of a row, and take the rows of a candidate and key head one
after another: all arrays are read once. XLA reads queries and cotangents twice, by six kernels.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import math as mlir_math

from ikbo_jax.pallas.attention_backward import parts, statistics
from ikbo_jax.pallas.attention_backward.parts import UNROLL, VECTOR
from ikbo_jax.pallas.hopper import inline, per_thread, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.row_vectors import unpacked
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE


class Operands(NamedTuple):
    """Device memory; a row is a query of a query head, a pair a candidate and a key head."""

    query: Any  # [rows, H]; the next two likewise
    d_out: Any
    d_query: Any  # without own tokens
    lse: Any  # [rows] f32
    delta: Any  # likewise
    key: Any  # [pairs, H]
    value: Any  # likewise


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch; a row has `row_threads` threads, a power of 2."""

    pairs: int
    q_len: int
    kv_heads: int
    group: int
    head_dim: int
    scale: float

    @property
    def row_threads(self) -> int:
        return self.head_dim // VECTOR & -(self.head_dim // VECTOR)

    @property
    def vectors(self) -> int:
        return self.head_dim // VECTOR // self.row_threads


def add_own_tokens(
    d_query: jax.Array,
    query: jax.Array,
    self_key: jax.Array,
    self_value: jax.Array,
    *statistics: jax.Array,
    scale: float,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds own tokens to `d_query` [B, T, N, H]; returns it, and the gradients of `self_key` and
    `self_value` [B, 1, K, H] in `dtype`. `statistics`: lse, d_out and delta.
    """
    (batch, q_len, q_heads, width), kv_heads = query.shape, self_key.shape[2]
    shape = Shape(batch * kv_heads, q_len, kv_heads, q_heads // kv_heads, width, scale)
    lse, d_out, delta = statistics
    arrays = Operands(query, d_out, d_query, lse, delta, self_key, self_value)
    flat = (x.reshape(-1, *([width] * (x.ndim == 4))) for x in arrays)
    operands = Operands(*flat)
    of_token = jax.ShapeDtypeStruct(operands.key.shape, dtype or self_key.dtype)
    results = launch_threads(
        _add,
        shape,
        operands,
        (jax.typeof(operands.d_query), of_token, of_token),
        memory.shared(),
        name="ikbo_attention_backward_own",
        workers=pl.cdiv(shape.pairs * shape.row_threads, WARPGROUP_SIZE),
    )
    d_query, *of_tokens = results
    return d_query.reshape(query.shape), *(x.reshape(self_key.shape) for x in of_tokens)


def _add(ctx: WarpgroupContext) -> None:
    shape = ctx.shape
    number = ctx.worker * WARPGROUP_SIZE + per_thread.number()
    pair, part = per_thread.divided(number, shape.row_threads)
    is_pair, pair = (pair < shape.pairs).astype(jnp.int32), jnp.minimum(pair, shape.pairs - 1)
    candidate, kv_head = per_thread.divided(pair, shape.kv_heads)
    first = candidate * (shape.q_len * shape.kv_heads) + kv_head  # in units of `group` rows
    refs, tree = jax.tree.flatten((ctx.operands, ctx.outputs))
    numbers = part, is_pair, pair, first

    @inline.code(*refs, *numbers)
    def _(*arguments: Any) -> None:
        operands, outputs = jax.tree.unflatten(tree, arguments[: len(refs)])
        part, is_pair, pair, first = map(per_thread.scalar, arguments[len(refs) :])
        threads = _RowThreads(shape, operands, ctx.operands.query.dtype, part, is_pair)
        tokens = [threads.load(x, pair) for x in (operands.key, operands.value)]
        rows, half = shape.q_len * shape.group, len(tokens[0])
        unroll = math.gcd(rows, UNROLL) if shape.vectors == 1 else 1
        make_loop: Any = scf.ForOp
        zeros = [inline.f32(0.0)] * (2 * half)
        loop = make_loop(inline.i32(0), inline.i32(rows), inline.i32(unroll), zeros)
        with ir.InsertionPoint(loop.body):
            sums, begin = [*loop.inner_iter_args], Integer(loop.induction_variable)
            at = [threads.row(first, begin + i) for i in range(unroll)]
            # The loads of all rows come first.
            loaded = [[threads.load(x, row) for x in operands[:3]] for row in at]
            for row, (query, d_out, d_query) in zip(at, loaded, strict=True):
                weight, d_score = threads.weight(row, query, d_out, *tokens)
                threads.store(outputs[0], row, _sums(d_score, tokens[0], d_query))
                of_key = _sums(d_score, query, sums[:half])
                sums = of_key + _sums(weight, d_out, sums[half:])
            scf.yield_(sums)
        threads.store(outputs[1], pair, [*loop.results][:half])
        threads.store(outputs[2], pair, [*loop.results][half:])


def _sums(factor: ir.Value, x: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
    return [mlir_math.fma(factor, *both) for both in zip(x, sums, strict=True)]


class _RowThreads(NamedTuple):
    """The neighbouring threads that have a row, in inline code; rows of them are f32 numbers."""

    shape: Shape
    operands: Operands
    dtype: Any
    part: Integer  # the thread's number among them
    is_pair: Integer  # whether it stores

    def row(self, first: Integer, number: Integer) -> Integer:
        """Returns row `number` of a pair whose first row is `first` * group."""
        kv_heads, group = inline.i32(self.shape.kv_heads), inline.i32(self.shape.group)
        return (first + number // group * kv_heads) * group + number % group

    def _terms(self, row: ir.Value, i: int) -> list[tuple[ir.Value, int]]:
        column = self.part + i * self.shape.row_threads
        return [(row, self.shape.head_dim), (column, VECTOR)]

    def load(self, array: ir.Value, row: ir.Value) -> list[ir.Value]:
        words: list[ir.Value] = []
        for i in range(self.shape.vectors):
            address = stores.device_address(array, self._terms(row, i), 2)
            words += per_thread.load_words(address, VECTOR // 2, is_early=True)
        return [x for word in words for x in unpacked(word, self.dtype)]

    def store(self, array: ir.Value, row: ir.Value, values: list[ir.Value]) -> None:
        for i in range(self.shape.vectors):
            vector = values[i * VECTOR : (i + 1) * VECTOR]
            parts.store(array, self._terms(row, i), vector, self.is_pair)

    def weight(self, row: ir.Value, *arrays: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Computes P and scale * dS of a row from its query, d_out, own key and own value."""
        query, d_out, key, value = arrays
        score, d_weight = map(self._sum, (query, d_out), (key, value))
        delta = statistics.load_number(self.operands.delta, row)
        lse = statistics.lse_exponent(statistics.load_number(self.operands.lse, row))
        score = arith.mulf(score, inline.f32(self.shape.scale * math.log2(math.e)))
        ptx, f32 = "ex2.approx.ftz.f32 $0, $1;", ir.F32Type.get()
        # At most 1: of a huge logit, lse is lowered by more than its rounding.
        exponent = arith.minimumf(arith.subf(score, lse), inline.f32(0.0))
        weight = mgpu.utils.inline_ptx(ptx, exponent, result_types=f32)
        d_score = arith.mulf(weight, arith.subf(d_weight, delta))
        return weight, arith.mulf(d_score, inline.f32(self.shape.scale))

    def _sum(self, x: list[ir.Value], y: list[ir.Value]) -> ir.Value:
        """Adds the products of a row's elements, in all of its threads."""
        total = inline.f32(0.0)
        for a, b in zip(x, y, strict=True):
            total = mlir_math.fma(a, b, total)
        for step in range(self.shape.row_threads.bit_length() - 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, 1 << step))
        return total
