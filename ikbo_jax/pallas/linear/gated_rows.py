"""The rows that `gated_linear` multiplies, and their gradient: one pass over memory.

    rows = [u, a, u · norm(a)], or u · norm(a) alone

A warp computes a row at a time. Each of its threads has one or two vectors of 8 numbers of `u`, `a`
and every part of the rows' cotangent, and loads all of them before it uses one. So statistics cost
no second read, where XLA takes four passes. A thread adds up the gradients of norm scale and norm
bias over its rows; XLA adds the warps' sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import LANES, WARPS, same
from ikbo_jax.pallas.hopper.row_vectors import Rows, Words
from ikbo_jax.reference.norm_linear import Gate, GatedRows

#: Numbers and words of a vector of 16 bytes.
VECTOR, WORDS = 8, 4
#: CTAs of a warpgroup for each SM. Without norm scale, four run at once: threads of 127 registers.
CTAS_PER_SM = 8

#: A thread's numbers of a row, f32, those of each vector side by side.
Numbers = list[jax.Array]


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
    columns: int
    gate: Gate
    workers: int


class _Row(NamedTuple):
    """A warp's row, and this thread's number in the warp."""

    ctx: WarpgroupContext
    number: jax.Array
    lane: jax.Array

    def vectors(self, part: int = 0, width: int = VECTOR) -> list[jax.Array]:
        """Numbers this thread's vectors in a part of a row, in vectors of `width` numbers."""
        begin, columns = part * self.ctx.shape.columns // width, self.ctx.shape.columns
        firsts = range(begin, begin + columns // width, LANES * VECTOR // width)
        each = VECTOR // width
        return [self.lane * each + (first + i) for first in firsts for i in range(each)]

    def load(self, ref: Any, part: int = 0) -> list[Words]:
        """Issues loads of this thread's vectors of a part of the row."""
        number = jnp.minimum(self.number, self.ctx.shape.rows - 1)
        places = [(number, v) for v in self.vectors(part)]
        return Rows(ref, WORDS, self.ctx.interpret).load(places)

    def load_factors(self, ref: Any) -> Numbers | None:
        """Loads this thread's numbers of [1, C] f32."""
        if ref is None:
            return None
        view = Rows(ref, WORDS, self.ctx.interpret)
        loaded = view.load([(same(0), v) for v in self.vectors(width=WORDS)])
        return [x for words in loaded for x in view.floats(words)]

    def means(self, *numbers: Numbers) -> list[jax.Array]:
        """Computes the means over the row of several numbers of its columns."""
        totals = [sum(xs[1:], start=xs[0]) for xs in numbers]
        totals = per_thread.warp_sums(totals, interpret=self.ctx.interpret)
        return [x * jnp.float32(1 / self.ctx.shape.columns) for x in totals]

    def store(self, ref: Any, words: list[Words], part: int = 0) -> None:
        """Stores this thread's vectors of a part of the row."""
        is_row = self.number < self.ctx.shape.rows
        for v, of_vector in zip(self.vectors(part), words, strict=True):
            Rows(ref, WORDS, self.ctx.interpret).store(self.number, v, of_vector, is_row)


def _times(a: Numbers, b: Numbers | None) -> Numbers:
    return a if b is None else [x * y for x, y in zip(a, b, strict=True)]


def _plus(a: Numbers, b: Numbers | None) -> Numbers:
    return a if b is None else [x + y for x, y in zip(a, b, strict=True)]


def _compute(ctx: WarpgroupContext, row: _Row, sums: tuple[Any, Any]) -> tuple[Any, Any]:
    """Computes one row; returns the sums of the gradients of scale and bias."""
    operands, outputs, gate = ctx.operands, ctx.outputs, ctx.shape.gate
    view = Rows(operands.a, WORDS, ctx.interpret)

    def rounded(numbers: Numbers) -> list[Words]:
        return [view.rounded(numbers[i : i + VECTOR]) for i in range(0, len(numbers), VECTOR)]

    words = [row.load(operands.u), row.load(operands.a)]
    words += [row.load(operands.d_rows, part) for part in range(3 if gate.concat else 1)]
    scale, bias = map(row.load_factors, operands[3:])
    u, a, *d_parts = ([x for of_vector in xs for x in view.floats(of_vector)] for xs in words)
    if gate.norm.kind == "layer":
        (mean,) = row.means(a)
        a = [x - mean for x in a]
    (variance,) = row.means(_times(a, a))
    factor = lax.rsqrt(variance + jnp.float32(gate.norm.eps))
    normed = [x * factor for x in a]
    scaled = _plus(_times(normed, scale), bias)
    d_scaled = _times(d_parts[-1], u)
    d_normed = _times(d_scaled, scale)
    d_mean, slope = row.means(d_normed, _times(d_normed, normed))
    if gate.norm.kind == "layer":
        d_normed = [x - d_mean for x in d_normed]
    d_a = [(x - slope * y) * factor for x, y in zip(d_normed, normed, strict=True)]
    d_u, parts = _times(d_parts[-1], scaled), [rounded(_times(u, scaled))]
    if gate.concat:
        d_u, d_a, parts = _plus(d_u, d_parts[0]), _plus(d_a, d_parts[1]), [*words[:2], *parts]
    row.store(outputs.d_u, rounded(d_u))
    row.store(outputs.d_a, rounded(d_a))
    for part, of_part in enumerate(parts):
        row.store(outputs.rows, of_part, part)
    is_row = row.number < ctx.shape.rows
    d_scaled = [jnp.where(is_row, x, jnp.zeros_like(x)) for x in d_scaled]
    d_scale, d_bias = sums
    d_scale = None if d_scale is None else _plus(d_scale, _times(d_scaled, normed))
    return d_scale, None if d_bias is None else _plus(d_bias, d_scaled)


def _consume(ctx: WarpgroupContext) -> None:
    """Computes the rows of a CTA's warps."""
    shape, kept = ctx.shape, (ctx.outputs.d_scale, ctx.outputs.d_bias)
    thread = per_thread.number()
    warp, lane = lax.div(thread, same(LANES)), lax.rem(thread, same(LANES))

    def compute(turn: Any, sums: Any) -> Any:
        number = warp + (turn * shape.workers + ctx.worker) * WARPS
        return _compute(ctx, _Row(ctx, number, lane), sums)

    zeros = [same(0).astype(jnp.float32)] * (shape.columns // LANES)
    sums = tuple(None if ref is None else zeros for ref in kept)
    sums = lax.fori_loop(0, pl.cdiv(shape.rows, shape.workers * WARPS), compute, sums)
    for ref, numbers in zip(kept, sums, strict=True):
        if ref is not None:
            view = Rows(ref, VECTOR, ctx.interpret)
            for i, v in enumerate(_Row(ctx, warp, lane).vectors()):
                words = view.rounded(numbers[VECTOR * i : VECTOR * (i + 1)])
                view.store(warp + ctx.worker * WARPS, v, words, lane >= 0)


def gated_rows_kernel(
    u: jax.Array,
    a: jax.Array,
    norm_scale: jax.Array | None,
    norm_bias: jax.Array | None,
    d_rows: jax.Array,
    *,
    gate: Gate,
    num_sms: int,
    interpret: Any = False,
) -> GatedRows:
    """Computes `reference.gated_rows_vjp`: d_u, d_a and rows rounded, d_scale and d_bias f32.

    Takes u and a [rows, C] in bf16 or f16, C 256 or 512; scale and bias [C] or None; the cotangent
    of the rows; and a gate without dropout, of one group.
    """
    rows, columns = a.shape
    workers = min(CTAS_PER_SM * num_sms, pl.cdiv(rows, WARPS))
    like, wide = (jax.ShapeDtypeStruct(x.shape, a.dtype) for x in (a, d_rows))
    of_warps = jax.ShapeDtypeStruct((workers * WARPS, columns), jnp.float32)
    vectors = norm_scale, norm_bias
    found: GatedRows = launch_threads(
        _consume,
        Shape(rows, columns, gate, workers),
        Operands(u, a, d_rows, *(None if x is None else x[None].astype("f4") for x in vectors)),
        GatedRows(like, like, wide, *(None if x is None else of_warps for x in vectors)),
        Shared(),
        name="ikbo_gated_rows",
        workers=workers,
        interpret=interpret,
    )
    d_scale, d_bias = (None if x is None else jnp.sum(x, axis=0) for x in found[3:])
    return found._replace(d_scale=d_scale, d_bias=d_bias)
