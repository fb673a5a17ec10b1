"""The gradient of the rows that `gated_linear` multiplies, and these rows: one pass over memory.

    rows = [u, a, u · norm(a)], or u · norm(a) alone

A warp computes a row at a time. Each of its threads has some vectors of 8 numbers of `u`, `a` and
every part of the rows' cotangent, and loads all of them before it uses one. So statistics cost no
second read, where XLA takes four passes (see `reference.norm_linear`). A thread adds up the
gradients of norm scale and norm bias over its rows; XLA adds the warps' sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import LANES, WARPS, same
from ikbo_jax.pallas.hopper.row_vectors import Rows, Words
from ikbo_jax.problems.gated_linear import GatedRowsConfig
from ikbo_jax.reference.norm_linear import Gate, GatedRows

#: Numbers of a vector of 16 bits, 16 bytes.
VECTOR = 8
#: A thread's numbers of a row, f32: a list for each of its vectors.
Numbers = list[list[jax.Array]]


class Operands(NamedTuple):
    """Device memory that the launch reads; `scale` and `bias` are [1, C] f32, or None."""

    u: Any  # [rows, C]
    a: Any  # [rows, C]
    d_rows: Any  # [rows, parts * C]
    scale: Any
    bias: Any


class Shared(NamedTuple):
    """Shared memory: none."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch."""

    rows: int
    padded: int
    columns: int
    gate: Gate
    workers: int

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.columns // VECTOR

    @property
    def turns(self) -> int:
        """Rows of a warp."""
        return pl.cdiv(self.padded, self.workers * WARPS)


class _Row(NamedTuple):
    """A warp's row: its number and this thread's vectors in it."""

    number: jax.Array
    vectors: list[jax.Array]
    is_vector: list[jax.Array]


def _load(ref: Any, row: _Row, part: int, shape: Shape, interpret: bool) -> list[Words]:
    """Issues loads of this thread's vectors of a part of a row."""
    number, last = jnp.minimum(row.number, shape.rows - 1), shape.vectors - 1
    places = [(number, jnp.minimum(v, last) + part * shape.vectors) for v in row.vectors]
    return Rows(ref, 4, interpret).load(places)


def _load_factors(ref: Any, row: _Row, shape: Shape, interpret: bool) -> Numbers | None:
    """Loads this thread's numbers of a vector [1, C] f32."""
    if ref is None:
        return None
    view, found = Rows(ref, 4, interpret), []
    for v in row.vectors:
        first = 2 * jnp.minimum(v, shape.vectors - 1)
        halves = view.load([(same(0), first + i) for i in range(2)])
        found.append([x for words in halves for x in view.floats(words)])
    return found


def _mean(row: _Row, numbers: Sequence[Numbers], shape: Shape, interpret: bool) -> list[jax.Array]:
    """Computes the means over the row of several numbers of its columns."""
    totals = []
    for vectors in numbers:
        total = same(0).astype(jnp.float32)
        for xs, is_vector in zip(vectors, row.is_vector, strict=True):
            of_vector = sum(xs[1:], start=xs[0])
            total += jnp.where(is_vector, of_vector, jnp.zeros_like(total))
        totals.append(total)
    found = per_thread.warp_sums(totals, interpret=interpret)
    return [x * jnp.float32(1 / shape.columns) for x in found]


def _times(a: Numbers, b: Numbers) -> Numbers:
    return [[x * y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def _plus(a: Numbers, b: Numbers) -> Numbers:
    return [[x + y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def _each(a: Numbers, fn: Any) -> Numbers:
    return [[fn(x) for x in xs] for xs in a]


def _compute(ctx: WarpgroupContext, row: _Row, sums: tuple[Any, Any]) -> tuple[Any, Any]:
    """Computes one row; returns the sums of the gradients of scale and bias."""
    shape, operands, outputs, interpret = ctx.shape, ctx.operands, ctx.outputs, ctx.interpret
    gate, view = shape.gate, Rows(operands.a, 4, interpret)
    parts = range(3 if gate.concat else 1)
    u_words, a_words = (_load(ref, row, 0, shape, interpret) for ref in (operands.u, operands.a))
    d_parts = [_load(operands.d_rows, row, part, shape, interpret) for part in parts]
    scale, bias = (_load_factors(x, row, shape, interpret) for x in operands[3:])
    u, a, *d_numbers = (
        [list(view.floats(words)) for words in vectors] for vectors in (u_words, a_words, *d_parts)
    )
    if gate.norm.kind == "layer":
        (mean,) = _mean(row, [a], shape, interpret)
        a = _each(a, lambda x: x - mean)
    (variance,) = _mean(row, [_times(a, a)], shape, interpret)
    factor = lax.rsqrt(variance + jnp.float32(gate.norm.eps))
    normed = _each(a, lambda x: x * factor)
    scaled = normed if scale is None else _times(normed, scale)
    scaled = scaled if bias is None else _plus(scaled, bias)
    d_gated = d_numbers[-1]
    d_scaled = _times(d_gated, u)
    d_normed = d_scaled if scale is None else _times(d_scaled, scale)
    d_mean, slope = _mean(row, [d_normed, _times(d_normed, normed)], shape, interpret)
    if gate.norm.kind == "layer":
        d_normed = _each(d_normed, lambda x: x - d_mean)
    d_a = _plus(d_normed, _each(normed, lambda x: -slope * x))
    d_a, d_u = _each(d_a, lambda x: x * factor), _times(d_gated, scaled)
    if gate.concat:
        d_u, d_a = _plus(d_u, d_numbers[0]), _plus(d_a, d_numbers[1])
    gated = [view.rounded(xs) for xs in _times(u, scaled)]
    of_parts = [u_words, a_words, gated] if gate.concat else [gated]
    is_row = row.number < shape.rows
    for i, vector in enumerate(row.vectors):
        is_wanted = row.is_vector[i] & is_row
        for ref, numbers in ((outputs.d_u, d_u), (outputs.d_a, d_a)):
            Rows(ref, 4, interpret).store(
                row.number, vector, view.rounded(numbers[i]), is_wanted, streams=True
            )
        for part, words in enumerate(of_parts):
            filled = [jnp.where(is_row, x, jnp.zeros_like(x)) for x in words[i]]
            is_filled = row.is_vector[i] & (row.number < shape.padded)
            place = vector + part * shape.vectors
            Rows(outputs.rows, 4, interpret).store(row.number, place, tuple(filled), is_filled)
    d_scaled = [[jnp.where(is_row, x, jnp.zeros_like(x)) for x in xs] for xs in d_scaled]
    d_scale, d_bias = sums
    d_scale = None if d_scale is None else _plus(d_scale, _times(d_scaled, normed))
    return d_scale, None if d_bias is None else _plus(d_bias, d_scaled)


def _consume(ctx: WarpgroupContext) -> None:
    """Computes the rows of a CTA's warps."""
    shape, outputs = ctx.shape, ctx.outputs
    thread = per_thread.number()
    warp, lane = lax.div(thread, same(LANES)), lax.rem(thread, same(LANES))
    vectors = [lane + first for first in range(0, shape.vectors, LANES)]
    is_vector = [v < shape.vectors for v in vectors]

    def compute(turn: Any, sums: Any) -> Any:
        number = warp + (turn * shape.workers + ctx.worker) * WARPS
        return _compute(ctx, _Row(number, vectors, is_vector), sums)

    def nothing() -> Numbers:
        return [[same(0).astype(jnp.float32) for _ in range(VECTOR)] for _ in vectors]

    kept = outputs.d_scale, outputs.d_bias
    sums = lax.fori_loop(
        0, shape.turns, compute, tuple(None if x is None else nothing() for x in kept)
    )
    for ref, numbers in zip(kept, sums, strict=True):
        if ref is not None:
            view = Rows(ref, VECTOR, ctx.interpret)
            for xs, v, is_wanted in zip(numbers, vectors, is_vector, strict=True):
                view.store(warp + ctx.worker * WARPS, v, view.rounded(xs), is_wanted)


def gated_rows_kernel(
    u: jax.Array,
    a: jax.Array,
    norm_scale: jax.Array | None,
    norm_bias: jax.Array | None,
    d_rows: jax.Array,
    *,
    gate: Gate,
    padded: int,
    config: GatedRowsConfig,
    num_sms: int,
    interpret: Any = False,
) -> GatedRows:
    """Computes the gradients of u, a, norm scale and norm bias, and the multiplied rows.

    Args:
      u, a: [rows, C], bf16 or f16; C a multiple of 8, see `why_no_gradient`.
      norm_scale, norm_bias: [C], or None.
      d_rows: [rows, 3 C], or [rows, C] unless the gate concatenates; cotangent of the rows.
      gate: without dropout, with one group.
      padded: number of the result's `rows`, at least that of `u`: zeros are behind them.

    Returns:
      d_u, d_a and rows in the dtype of `u`; d_scale and d_bias [C] f32, or None.
    """
    rows, columns = a.shape
    workers = min(config.ctas_per_sm * num_sms, pl.cdiv(padded, WARPS))
    shape = Shape(rows, padded, columns, gate, workers)
    like, wide = (jax.ShapeDtypeStruct(x.shape, a.dtype) for x in (a, d_rows))
    sums = jax.ShapeDtypeStruct((workers * WARPS, columns), jnp.float32)
    vectors = norm_scale, norm_bias
    found: GatedRows = launch_threads(
        _consume,
        shape,
        Operands(u, a, d_rows, *(None if x is None else x[None].astype("f4") for x in vectors)),
        GatedRows(
            like,
            like,
            jax.ShapeDtypeStruct((padded, wide.shape[1]), a.dtype),
            *(None if x is None else sums for x in vectors),
        ),
        Shared(),
        name="ikbo_gated_rows",
        workers=workers,
        interpret=interpret,
    )
    d_scale, d_bias = (None if x is None else jnp.sum(x, axis=0) for x in found[3:])
    return found._replace(d_scale=d_scale, d_bias=d_bias)
