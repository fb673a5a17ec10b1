"""The rows that `gated_linear` multiplies, and their gradient: one pass over memory.

    rows = [u, a, u · norm(a)], or u · norm(a) alone

A warp computes a row at a time. Each of its threads has some vectors of 8 numbers of `u`, `a` and
every part of the rows' cotangent, and loads all of them before it uses one. So statistics cost no
second read, where XLA takes four passes. A thread adds up the gradients of norm scale and norm bias
over its rows; XLA adds the warps' sums.
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
from ikbo_jax.problems.gated_linear import GatedRowsConfig
from ikbo_jax.reference.norm_linear import Gate, GatedRows

#: Numbers and words of a vector of 16 bytes.
VECTOR, WORDS = 8, 4

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
    """Static description of a launch; `vectors` of a row."""

    rows: int
    vectors: int
    gate: Gate
    workers: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """A warp's row: its number, this thread's vectors in it, and whether there are such vectors."""

    shape: Shape
    number: jax.Array
    vectors: list[jax.Array]
    is_vector: list[jax.Array]
    interpret: bool

    def load(self, ref: Any, part: int = 0) -> list[Words]:
        """Issues loads of this thread's vectors of a part of the row."""
        number, last = jnp.minimum(self.number, self.shape.rows - 1), self.shape.vectors - 1
        first = part * self.shape.vectors
        places = [(number, jnp.minimum(v, last) + first) for v in self.vectors]
        return Rows(ref, WORDS, self.interpret).load(places)

    def load_factors(self, ref: Any) -> Numbers | None:
        """Loads this thread's numbers of [1, C] f32."""
        if ref is None:
            return None
        view, last = Rows(ref, WORDS, self.interpret), self.shape.vectors - 1
        places = [
            (same(0), 2 * jnp.minimum(v, last) + half) for v in self.vectors for half in (0, 1)
        ]
        return [x for words in view.load(places) for x in view.floats(words)]

    def means(self, *numbers: Numbers) -> list[jax.Array]:
        """Computes the means over the row of several numbers of its columns."""
        totals = []
        for xs in numbers:
            total = same(0).astype(jnp.float32)
            for i, is_vector in enumerate(self.is_vector):
                of_vector = sum(xs[VECTOR * i + 1 : VECTOR * (i + 1)], start=xs[VECTOR * i])
                total += jnp.where(is_vector, of_vector, jnp.zeros_like(total))
            totals.append(total)
        share = jnp.float32(1 / (VECTOR * self.shape.vectors))
        return [x * share for x in per_thread.warp_sums(totals, interpret=self.interpret)]

    def store(self, ref: Any, words: list[Words], part: int = 0) -> None:
        """Stores this thread's vectors of a part of the row."""
        view, is_row = Rows(ref, WORDS, self.interpret), self.number < self.shape.rows
        for v, is_vector, of_vector in zip(self.vectors, self.is_vector, words, strict=True):
            place = v + part * self.shape.vectors
            view.store(self.number, place, of_vector, is_vector & is_row)


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
    vectors = [lane + first for first in range(0, shape.vectors, LANES)]
    is_vector = [v < shape.vectors for v in vectors]

    def compute(turn: Any, sums: Any) -> Any:
        number = warp + (turn * shape.workers + ctx.worker) * WARPS
        return _compute(ctx, _Row(shape, number, vectors, is_vector, ctx.interpret), sums)

    zeros = [same(0).astype(jnp.float32)] * (VECTOR * len(vectors))
    sums = tuple(None if ref is None else zeros for ref in kept)
    sums = lax.fori_loop(0, pl.cdiv(shape.rows, shape.workers * WARPS), compute, sums)
    for ref, numbers in zip(kept, sums, strict=True):
        if ref is not None:
            view = Rows(ref, VECTOR, ctx.interpret)
            for i, (v, is_wanted) in enumerate(zip(vectors, is_vector, strict=True)):
                words = view.rounded(numbers[VECTOR * i : VECTOR * (i + 1)])
                view.store(warp + ctx.worker * WARPS, v, words, is_wanted)


def gated_rows_kernel(
    u: jax.Array,
    a: jax.Array,
    norm_scale: jax.Array | None,
    norm_bias: jax.Array | None,
    d_rows: jax.Array,
    *,
    gate: Gate,
    config: GatedRowsConfig,
    num_sms: int,
    interpret: Any = False,
) -> GatedRows:
    """Computes `reference.gated_rows_vjp`: d_u, d_a and rows rounded, d_scale and d_bias f32.

    Args:
      u, a: [rows, C], bf16 or f16; C a multiple of 8, see `why_no_gradient`.
      norm_scale, norm_bias: [C], or None.
      d_rows: [rows, 3 C], or [rows, C] unless the gate concatenates; cotangent of the rows.
      gate: without dropout, with one group.
    """
    rows, columns = a.shape
    workers = min(config.ctas_per_sm * num_sms, pl.cdiv(rows, WARPS))
    like, wide = (jax.ShapeDtypeStruct(x.shape, a.dtype) for x in (a, d_rows))
    of_warps = jax.ShapeDtypeStruct((workers * WARPS, columns), jnp.float32)
    vectors = norm_scale, norm_bias
    found: GatedRows = launch_threads(
        _consume,
        Shape(rows, columns // VECTOR, gate, workers),
        Operands(u, a, d_rows, *(None if x is None else x[None].astype("f4") for x in vectors)),
        GatedRows(like, like, wide, *(None if x is None else of_warps for x in vectors)),
        Shared(),
        name="ikbo_gated_rows",
        workers=workers,
        interpret=interpret,
    )
    d_scale, d_bias = (None if x is None else jnp.sum(x, axis=0) for x in found[3:])
    return found._replace(d_scale=d_scale, d_bias=d_bias)
