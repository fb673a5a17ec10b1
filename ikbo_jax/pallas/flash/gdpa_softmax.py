"""The softmax of the GDPA forward kernel with masks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.flash import gdpa_masked, softmax
from ikbo_jax.pallas.hopper import inline, mma, mosaic, stores, turns
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WARPGROUP_SIZE, WGMMA_M

VARIANT, _, SUMS = os.environ.get("IKBO_SOFTMAX", "lazy_rows").partition("_")
#: Powers of 2 by which a row's maximum grows before its sums are rescaled.
LIMIT = 8.0
#: Scaled maxima from which on weights are exact only if maxima are subtracted before scaling.
GIANT = 2.0**14
VOTE_BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS
SUM_LIMIT = 2.0**15


class Statistics(NamedTuple):
    """Of the blocks before: what weights are relative to, and their sums, by row.

    Attributes:
      extreme: [64] f32, an unscaled score.
      sums: [64, 8] f32, whose row sums are sums of weights.
    """

    extreme: jax.Array
    sums: jax.Array


Finish = Callable[[jax.Array], tuple[jax.Array, jax.Array, Statistics]]


def weigh(
    ctx: Any, index: Any, block: Any, scores: jax.Array, before: Any, step: Any
) -> Finish:
    """Computes the weights of a block; the result takes the accumulator without them."""
    dtype, c = ctx.outputs.out.dtype, ctx.shape.log2_scale
    if VARIANT == "lazy" or not before:
        scores = gdpa_masked.keep_visible(ctx, index, block, scores, softmax.masked_score(c))
    if not before:
        extreme = softmax.row_extreme(scores, c)
        p = softmax.exact_exponentials(scores, softmax.finite(extreme, c), c)
        found = Statistics(extreme, summed(ctx, p))
        return lambda acc: (p.astype(dtype), acc, found)
    if VARIANT == "quick":
        return _quick(ctx, index, block, scores, before, step)
    larger = softmax.further(c)(before.extreme, softmax.row_extreme(scores, c))
    base = softmax.finite(before.extreme, c)
    maximum, growth = (x * jnp.float32(c) for x in (base, larger - before.extreme))
    is_far = (growth > jnp.float32(LIMIT)) | (jnp.abs(maximum) >= jnp.float32(GIANT))
    grown = any_of_warp(is_far, interpret=ctx.interpret)

    def exact() -> Any:
        base = softmax.finite(larger, c)
        return scores - lax.broadcast_in_dim(base, scores.shape, (0,)), base, larger, 0 * maximum

    scores, base, extreme, maximum = lax.cond(
        grown, exact, lambda: (scores, base, before.extreme, maximum)
    )
    p = softmax.exponentials(scores, maximum, c)
    part = summed(ctx, p)

    def finish(acc: jax.Array) -> tuple[jax.Array, jax.Array, Statistics]:
        acc = mma.after_wait(acc, interpret=ctx.interpret)

        def rescaled(acc: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
            shrink = jnp.exp2((before.extreme - base) * jnp.float32(c))
            sums = sums * (shrink if sums.ndim == 1 else lax.broadcast_in_dim(shrink, sums.shape, (0,)))
            return acc * lax.broadcast_in_dim(shrink, acc.shape, (0,)), sums

        acc, sums = lax.cond(grown, rescaled, lambda *x: x, acc, before.sums)
        return p.astype(dtype), acc, Statistics(extreme, sums + part)

    return finish


def summed(ctx, p):
    if SUMS == "rows":
        return jnp.sum(p, axis=1)
    part = softmax.partial_sums(p)
    if SUMS == "anchor":
        part = anchored(part, interpret=ctx.interpret)
    return part


def anchored(part, *, interpret):
    if interpret:
        return part

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=mma.accumulator_type(8))
    def pin(_, part):
        values = [vector.extract(x, [], [i]) for x in part.registers.flat for i in (0, 1)]
        total = arith.addf(arith.addf(*values[:2]), arith.addf(*values[2:]))
        inline.issue("{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p nanosleep.u32 1; }", total)
        return part

    return pin(part)


def _quick(ctx, index, block, scores, before, step):
    dtype, c = ctx.outputs.out.dtype, ctx.shape.log2_scale
    fill = softmax.masked_score(c)
    is_cut = gdpa_masked.may_begin(ctx, index, block)
    word = mosaic.opaque(is_cut.astype(jnp.int32), interpret=ctx.interpret)

    def cut(scores):
        scores = gdpa_masked.keep_visible(ctx, index, block, scores, fill)
        return scores, softmax.further(c)(before.extreme, softmax.row_extreme(scores, c))

    scores, extreme = lax.cond(word != 0, cut, lambda x: (x, before.extreme), scores)
    base = softmax.finite(extreme, c)
    maximum = base * jnp.float32(c)
    p = softmax.exponentials(scores, maximum, c)
    part = softmax.partial_sums(p)
    is_giant = lax.broadcast_in_dim(jnp.abs(maximum), part.shape, (0,)) >= GIANT
    part = jnp.where(is_giant, jnp.inf, part)
    rows = ctx.destination(index).rows - ctx.consumer * WGMMA_M
    is_bad = any_thread(ctx, part, rows)

    def finish(acc):
        acc = mma.after_wait(acc, interpret=ctx.interpret)

        def rescaled(acc, sums):
            shrink = jnp.exp2((before.extreme - base) * jnp.float32(c))
            return tuple(x * lax.broadcast_in_dim(shrink, x.shape, (0,)) for x in (acc, sums))

        acc, sums = lax.cond(word != 0, rescaled, lambda *x: x, acc, before.sums)

        def again(p, acc, extreme, sums, part):
            scores = ctx.product(index, step)
            mma.wait(0, interpret=ctx.interpret)
            scores = mma.after_wait(scores, interpret=ctx.interpret)
            scores = gdpa_masked.keep_visible(ctx, index, block, scores, fill)
            found, p = softmax.running_step(softmax.Running(extreme, 0 * sums, acc), scores, c)
            shrink = jnp.exp2((extreme - softmax.finite(found.extreme, c)) * jnp.float32(c))
            sums = sums * lax.broadcast_in_dim(shrink, sums.shape, (0,))
            return p, found.acc, found.extreme, sums, found.sums

        p_, acc, extreme_, sums, part_ = lax.fori_loop(
            0, is_bad.astype(jnp.int32), lambda i, x: again(*x), (p, acc, extreme, sums, part)
        )
        ctx.shared.key.release(step)
        return p_.astype(dtype), acc, Statistics(extreme_, sums + part_)

    return finish


def any_thread(ctx, part, rows):
    if ctx.interpret:
        row = jnp.arange(WGMMA_M)
        return ~jnp.all((jnp.sum(part, axis=1) < SUM_LIMIT) | (row >= rows))

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, scalar, scalar), return_type=_SCALAR)
    def vote(_, part, rows, consumer):
        thread = stores.late_thread_number()
        rows, consumer = (x.registers.item() for x in (rows, consumer))
        all_good = None
        for half in (0, 1):
            pair = part.registers.flat[half]
            total = arith.addf(*(vector.extract(pair, [], [i]) for i in (0, 1)))
            good = arith.cmpf(arith.CmpFPredicate.OLT, total, inline.f32(SUM_LIMIT))
            row = stores.thread_row(thread, half)
            good = arith.ori(good, arith.cmpi(arith.CmpIPredicate.sge, row, rows))
            all_good = good if all_good is None else arith.andi(all_good, good)
        found = inline.issue_word(
            "{ .reg .pred p; setp.eq.b32 p, $1, 0; "
            f"barrier.red.or.pred p, $2, {WARPGROUP_SIZE}, p; selp.b32 $0, 1, 0, p; }}",
            arith.extui(ir.IntegerType.get_signless(32), all_good),
            arith.addi(consumer, inline.i32(VOTE_BARRIER)),
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(part, rows, ctx.consumer) != 0


def normalised(
    ctx: Any, acc: jax.Array, statistics: Statistics, first_row: Any, head: Any, rows: Any
) -> jax.Array:
    """Divides an item's sums by its denominators, whose logarithms it stores."""
    row_sum = statistics.sums
    row_sum = row_sum if row_sum.ndim == 1 else jnp.sum(row_sum, axis=1)
    if ctx.outputs.lse is not None:
        unit = jnp.float32(ctx.shape.log2_scale * softmax.LN_2)
        lse = jnp.log(row_sum) + statistics.extreme * unit
        lse = jnp.where(row_sum != 0, lse, -jnp.inf)
        store_lse(ctx, lse, first_row, head, rows)
    inverse = softmax.inverse_sums(row_sum, ctx.shape.activation.output_scale)
    return acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))


def store_lse(ctx: Any, lse: jax.Array, first_row: Any, head: Any, rows: Any) -> None:
    """Stores [64] f32 for the first `rows` of the consumer's rows."""
    staging = ctx.shared.row_values.at[ctx.consumer] if ctx.interpret else None
    stores.store_rows(
        *(ctx.outputs.lse, lse, first_row, head, 0 * rows, rows, staging), interpret=ctx.interpret
    )


_SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))


def any_of_warp(values: jax.Array, *, interpret: bool) -> jax.Array:
    if interpret:
        return jnp.any(values)

    @plgpu.inline_mgpu(arg_types=(stores.ROW_LAYOUT,), return_type=_SCALAR)
    def vote(_: Any, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        first, second = (vector.extract(x, [], [0]) for x in values.registers.flat)
        found = inline.issue_word(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.b32 $0, 1, 0, p; }",
            arith.ori(first, second),
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(values.astype(jnp.int32)) != 0
