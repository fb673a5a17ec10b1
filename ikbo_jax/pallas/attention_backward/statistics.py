"""A small kernel for what every query row of attention's gradient needs: lse, and delta.

    delta = sum(d_out * out) - d_lse

XLA computes delta at a third of an H100's bandwidth, and takes four kernels to put the results
where the backward kernel reads them. Here four threads add up a row, and store its two numbers at
the row's target, which they compute from the numbers of the row's user: a CTA is 32 rows.

If candidates are in any order, or query heads share a key head, the same threads also copy the
row's query and cotangent to where the next launches read them, side by side with the other rows of
the user and key head.

Of small problems, each CTA also numbers all users' rows (`numbering`), in shared memory. If
candidates are in any order, it counts the candidates of the same user before each of its own, and
stores its share of the order, by which the last launch stores d_query. Of more CTAs than run at
once, the numbers come from device memory.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math

from ikbo_jax.pallas.hopper import inline, per_thread, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.row_products import (
    CTA_ROWS,
    ROW_THREADS,
    VECTOR,
    loaded_row,
    row_sum,
)
from ikbo_jax.pallas.worklist import numbering
from ikbo_jax.pallas.worklist.numbering import USER_WORDS
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.reference.attention import HUGE_LSE, LSE_ERROR

#: Most candidates and users whose rows each CTA numbers, and most CTAs, which all run at once: with
#: 51 registers for a thread (of heads of 128 columns), 9 on each of 132 SMs. Where candidates are
#: in any order, a thread holds a query, too: 78 registers, 6 CTAs; of more CTAs, some number the
#: rows after others have ended, which takes less time than another launch. The users of a CTA take
#: 18 KiB of shared memory.
MOST_CANDIDATES, MOST_USERS, MOST_CTAS = 4096, 1024, 8 * 132
#: Most candidates of a CTA whose places it computes, where candidates are in any order. For each of
#: them, every thread compares some users with the candidate's.
MOST_RANKED = 10


class Inputs(NamedTuple):
    """Device memory; a row is a query of a query head, in the order of the candidates."""

    out: Any  # [rows, H]
    d_out: Any  # [rows, H]
    lse: Any  # [rows] f32
    d_lse: Any  # [rows] f32, or None for zeros
    query: Any  # [rows, H]; None unless rows are packed


class Packed(NamedTuple):
    """Device memory that the next launches read: rows of a key head, a user's side by side."""

    query: Any  # [B * T * N / K, K, H]
    d_out: Any  # likewise


class Operands(NamedTuple):
    """Device memory that the launch reads."""

    inputs: Inputs
    index: Any  # [B] int32: the user of a candidate
    position: Any  # [B] int32: places of candidates in user order; None if that is their order, or
    # the launch numbers rows
    lengths: Any  # [U] int32, or None
    users: Any  # [U, USER_WORDS] int32, see `worklist.rows.Rows`; None: the launch numbers rows
    poison: Any  # [1] int32, the bits of 0 or NaN, which is added to every number; None: nothing is


class Outputs(NamedTuple):
    """Device memory that the launch fills."""

    statistics: Any  # [K, 2, count] f32: lse in powers of 2 and delta, at the targets
    rows: Any  # `numbering.Outputs`; None if the launch does not number rows
    packed: Any  # `Packed`; None if the caller's arrays have that order
    delta: Any  # [rows] f32, likewise for another launch; None if it is not wanted


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch."""

    sizes: numbering.Sizes
    kv_heads: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.sizes.group

    @property
    def rows(self) -> int:
        return self.sizes.rows * self.kv_heads

    @property
    def workers(self) -> int:
        return pl.cdiv(self.rows, CTA_ROWS)

    @property
    def ranked(self) -> int:
        """Candidates whose rows a CTA has, at most; 0 if candidates are in user order."""
        if self.sizes.is_sorted:
            return 0
        return (CTA_ROWS - 2) // (self.heads * self.sizes.q_len) + 2


def numbers_rows(sizes: numbering.Sizes, kv_heads: int) -> bool:
    """Whether each CTA numbers the rows, instead of a launch before."""
    shape = Shape(sizes, kv_heads)
    is_small = sizes.batch <= MOST_CANDIDATES and sizes.users <= MOST_USERS
    return is_small and shape.workers <= MOST_CTAS and shape.ranked <= MOST_RANKED


def statistics_kernel(
    operands: Operands,
    sizes: numbering.Sizes,
    *,
    kv_heads: int,
    count: int,
    keeps_delta: bool = False,
) -> Outputs:
    """[K, 2, count] f32: lse in powers of 2 and delta, at the targets; undefined elsewhere.

    Without `operands.users`, also what describes users, parts, tiles and the order of unsorted
    candidates. With `operands.inputs.query`, also packed rows; with `keeps_delta`, delta by row.
    """
    shape, query = Shape(sizes, kv_heads), operands.inputs.query
    rows, packed, shared = None, None, memory.shared()
    if operands.users is None:
        rows = numbering.outputs(sizes, has_order=shape.ranked > 0)
        shared = numbering.shared(sizes, ranked=shape.ranked)
    if query is not None:
        packed = jax.ShapeDtypeStruct((sizes.rows, kv_heads, query.shape[-1]), query.dtype)
    declared = Outputs(
        jax.ShapeDtypeStruct((kv_heads, 2, count), jnp.float32),
        rows,
        packed and Packed(packed, packed),
        jax.typeof(operands.inputs.lse) if keeps_delta else None,
    )
    return launch_threads(
        _store,
        shape,
        operands,
        declared,
        shared,
        name="ikbo_attention_backward_statistics",
        workers=shape.workers,
    )


class _Rows(NamedTuple):
    """Rows, one for four neighbouring threads."""

    number: jax.Array
    is_row: jax.Array
    kv_head: jax.Array
    target: jax.Array
    poison: jax.Array  # bits of a number that is added to the statistics
    packed: jax.Array  # number among the rows of its key head


def _rows(ctx: WarpgroupContext) -> _Rows:
    """Computes the rows of this CTA from their users' numbers."""
    shape, sizes, operands = ctx.shape, ctx.shape.sizes, ctx.operands
    of_launch = numbering.Operands(operands.index, operands.lengths)
    threads = numbering.THREADS
    numbers = ctx.replace(shape=sizes, operands=of_launch, outputs=ctx.outputs.rows)
    thread, zero = per_thread.number(), per_thread.same(0)
    row = ctx.worker * CTA_ROWS + lax.div(thread, per_thread.same(ROW_THREADS))
    is_row = row < shape.rows
    row = jnp.minimum(row, shape.rows - 1)
    query, head = per_thread.divided(row, shape.heads)
    candidate, q = per_thread.divided(query, sizes.q_len)
    kv_head, in_group = per_thread.divided(head, sizes.group)
    (user,) = numbering.users_of(numbers, [candidate])
    if operands.users is None:
        numbering.number_and_describe(numbers)
        first_of: Any = functools.partial(threads.read, ctx.shared.first_rows)
        target_of: Any = functools.partial(threads.read, ctx.shared.first_targets)
        poison = ctx.shared.poison if sizes.is_sorted else None
        space = "shared"
    else:
        read = functools.partial(threads.read, operands.users, space="global")
        first_of, target_of = (
            lambda user: read(user * USER_WORDS),
            lambda user: read(user * USER_WORDS + 2),
        )
        poison, space = operands.poison, "global"
    added = zero
    if poison is not None:
        added = threads.read(poison, zero, space)
        # If the promised order is wrong, the user to whom launches give the row: the last one whose
        # first row is not after this one. By the index, some of the rows that they read would get
        # no statistics, instead of NaN.
        rows_before, is_order_wrong = candidate * sizes.per_candidate, poison[0] != 0
        found = count_at_most(
            lambda x: first_of(x + 1),
            *(sizes.users - 1, rows_before, per_thread.same(0), is_order_wrong),
        )
        user = jnp.where(is_order_wrong, found, user)
    first_row, first_target = first_of(user), target_of(user)
    first, _ = per_thread.divided(first_row, sizes.per_candidate)
    place = candidate
    if operands.position is not None:
        place = threads.read(operands.position, candidate, "global")
    elif shape.ranked:
        place = first + _rank(numbers, candidate, shape)
        part = lax.rem(thread, per_thread.same(ROW_THREADS))
        is_first = is_row & (q == 0) & (head == 0) & (part == 0)
        threads.write(numbers.outputs.position, candidate, place, is_first)
        threads.write(numbers.outputs.order, place, candidate, is_first)
    in_candidate = q * sizes.group + in_group
    in_user = (place - first) * sizes.per_candidate + in_candidate
    packed = place * sizes.per_candidate + in_candidate
    return _Rows(row, is_row, kv_head, first_target + in_user, added, packed)


def _rank(ctx: WarpgroupContext, candidate: jax.Array, shape: Shape) -> jax.Array:
    """Counts the candidates of the same user that come before each of this CTA's.

    Each thread compares some users with those of all of the CTA's candidates.
    """
    first = lax.div(ctx.worker * CTA_ROWS, shape.heads * shape.sizes.q_len)

    def users_of(candidates: list[jax.Array]) -> list[jax.Array]:
        last = shape.sizes.batch - 1
        return numbering.users_of(ctx, [jnp.minimum(x, last) for x in candidates])

    mine = [per_thread.same(0) + (first + i) for i in range(shape.ranked)]
    own = list(zip(mine, users_of(mine), strict=True))
    rounds, numbers_of = numbering.THREADS.rounds(shape.sizes.batch)

    def add(turn: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        numbers = numbers_of(turn)
        for number, user in zip(numbers, users_of(numbers), strict=True):
            is_before = ((user == of_own) & (number < x) for x, of_own in own)
            counts = (per_thread.select(x, 1, 0) for x in is_before)
            sums = tuple(x + y for x, y in zip(sums, counts, strict=True))
        return sums

    sums = lax.fori_loop(0, rounds, add, (per_thread.same(0),) * len(own))
    per_thread.sums_by_warp(sums, ctx.shared.ranks)
    plgpu.commit_smem()
    found = per_thread.same(0)
    for warp in range(per_thread.WARPS):
        place = (candidate - first) * per_thread.WARPS + warp
        found = found + numbering.THREADS.read(ctx.shared.ranks, place)
    return found


def _store(ctx: WarpgroupContext) -> None:
    """Stores the statistics of a CTA's rows, and packs the rows."""
    refs: list[Any]
    outputs = ctx.outputs._replace(rows=None)
    refs, tree = jax.tree.flatten((ctx.operands.inputs, outputs))
    rows = _rows(ctx)
    arrays = (rows.number, rows.is_row.astype(jnp.int32), *rows[2:])
    kv_heads = ctx.shape.kv_heads

    @inline.code(*refs, *arrays)
    def _(*arguments: Any) -> None:
        memory, numbers = arguments[: len(refs)], arguments[len(refs) :]
        found, (output, _, packed, of_rows) = jax.tree.unflatten(tree, memory)
        row, is_row, kv_head, target, poison, packed_row = map(per_thread.scalar, numbers)
        is_row = is_row.differs(0)
        width = ir.MemRefType(found.out.type).shape[1]
        part = Integer(mgpu.thread_idx()) % WARPGROUP_SIZE % ROW_THREADS
        load = functools.partial(load_number, row=row)
        out, d_out = (loaded_row(x, row, part, width) for x in (found.out, found.d_out))
        if packed is not None:
            query = loaded_row(found.query, row, part, width)
            place = [(packed_row, kv_heads * width), (kv_head, width)]
            for array, words in zip(packed, (query, d_out), strict=True):
                address = stores.device_address(array, [*place, (part, VECTOR)], 2)
                for i in range(0, len(words), 4):
                    offset = i // 4 * ROW_THREADS * VECTOR * 2
                    per_thread.store_words(address, words[i : i + 4], is_row, offset)
        delta = row_sum(out, d_out, ir.MemRefType(found.out.type).element_type)
        if found.d_lse is not None:
            delta = arith.subf(delta, load(found.d_lse))
        lse = load(found.lse)
        exponent = lse_exponent(lse)
        is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, lse, inline.f32(-math.inf))
        delta = arith.select(is_empty, inline.f32(0.0), delta)
        if ctx.shape.sizes.is_sorted:
            added = mgpu.utils.bitcast(poison, ir.F32Type.get())
            exponent, delta = arith.addf(exponent, added), arith.addf(delta, added)
        count = ir.MemRefType(output.type).shape[2]
        terms = [(kv_head, 2 * count), (target, 1)]
        is_first = part.equals(0) & is_row
        if of_rows is not None:
            address = stores.device_address(of_rows, [(row, 1)], 4)
            inline.issue("st.global.f32 [$0], $1;", address, delta, predicate=is_first)
        for number, value in enumerate((exponent, delta)):
            inline.issue(
                f"st.global.f32 [$0 + {number * count * 4}], $1;",
                stores.device_address(output, terms, 4),
                value,
                predicate=is_first,
            )


def load_number(array: ir.Value, row: ir.Value) -> ir.Value:
    """Loads array[row], f32."""
    address = stores.device_address(array, [(row, 1)], 4)
    return mgpu.utils.bitcast(per_thread.load_words(address, 1)[0], ir.F32Type.get())


def lse_exponent(lse: ir.Value) -> ir.Value:
    """Computes `reference.attention.weight_exponents`."""
    size = mlir_math.absf(lse)
    lowered = arith.subf(lse, arith.mulf(size, inline.f32(LSE_ERROR)))
    is_huge = arith.cmpf(arith.CmpFPredicate.OGE, size, inline.f32(HUGE_LSE))
    exponent = arith.mulf(arith.select(is_huge, lowered, lse), inline.f32(math.log2(math.e)))
    is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, lse, inline.f32(-math.inf))
    return arith.select(is_empty, inline.f32(math.inf), exponent)
