"""The list of tiles of jagged queries, computed by one small Mosaic GPU kernel.

`tile_list.query_tiles` describes the list.  XLA computes it in 6 to 14 kernels of about 2 us each,
as long as a launch on short sequences takes.  Here a CTA of four warps does all of it for 32
segments.  All CTAs compute the offsets' running maxima, and all segments' sort keys and numbers of
tiles, since that takes less time than a second launch:

  1. A thread takes the maximum of its part of the offsets.
  2. It takes the running maxima of its part, from the maximum of all parts before.
  3. If sequences share keys by an index, it merges neighbours of the same keys into the first one.
  4. It computes sort keys and numbers of tiles of some segments.
  5. A lane of each warp has one of the CTA's segments, and a warp a quarter of all segments.  It
     counts the tiles that precede the segment's, which gives the position of its tiles.
  6. The lanes of the segment write its tiles.

A *segment* is the rows between two neighbouring offsets, with the rows before the first offset and
after the last one as segments without keys.  If the lengths are bounded, the rows past the bound
are a second part of each segment, whose tiles are the last of all.

Synchronisations: `commit_smem` between the parts, within the CTA.  CTAs do not wait for each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from ikbo_jax.pallas.flash import tile_list
from ikbo_jax.pallas.flash.merged_segments import kv_number, merge
from ikbo_jax.pallas.flash.tile_list import TILE_WORDS, TileList
from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

LANES, PARTS = 32, WARPGROUP_SIZE // 32
#: Most segments: comparing all pairs of more takes longer than XLA's sort.
MOST_SEGMENTS = 8192
#: The same for sequences that are merged, for which two arrays more must fit shared memory.
MOST_MERGED = 4096
#: Segments that one turn of the loop compares, so that their loads overlap.
UNROLL = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      sequences: number of sequences of queries.
      q_rows: rows of the queries' array, or of each sequence if they are broadcast.
      kv_rows: rows of the keys' array.
      max_seqlen_q: longest sequence of queries, or None.
      max_seqlen_kv: longest sequence of keys, or None.
      size: largest number of rows of a tile.
      unit: keys of a block: segments with equally many blocks stay in order.
      is_broadcast: whether all sequences have the same queries.
      is_merged: whether neighbours that share keys are one segment.
    """

    sequences: int
    q_rows: int
    kv_rows: int
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    size: int
    unit: int
    is_broadcast: bool
    is_merged: bool

    @property
    def segments(self) -> int:
        return self.sequences if self.is_broadcast else self.sequences + 2

    @property
    def most(self) -> int:
        """Tiles of any offsets."""
        if self.is_broadcast:
            return max(self.sequences * pl.cdiv(self.q_rows, self.size), 1)
        parts = self.segments * (1 if self.max_seqlen_q is None else 2)
        nonempty = min(parts, self.q_rows)
        return max(nonempty + (self.q_rows - nonempty) // self.size, 1)


class Operands(NamedTuple):
    """Device memory."""

    cu_seqlens_q: Any  # [batch + 1] int32, or None
    cu_seqlens_kv: Any  # [batch_kv + 1] int32
    q_to_kv: Any  # [batch] int32, or None


class Outputs(NamedTuple):
    """Device memory that a launch fills: the fields of a `TileList`."""

    words: Any
    counts: Any


class Shared(NamedTuple):
    """Shared memory; a few words more than there are segments, for the last turn of a loop."""

    parts: Any  # [3 * 128] int32
    q_offsets: Any  # [segments + 1] int32: running maxima
    kv_offsets: Any  # [batch_kv + 1] int32: likewise
    keys: Any  # [segments] int32: sort keys
    tiles: Any  # [segments] int32: numbers of tiles
    rest: Any  # [segments] int32: tiles of the second parts
    kv_numbers: Any = None  # [segments] int32: sequences of keys; only for merged segments
    lengths: Any = None  # [segments] int32: rows of merged segments


class _Segment(NamedTuple):
    """Segments, one for each thread."""

    start: jax.Array
    length: jax.Array
    rest: jax.Array  # rows past the bound
    rest_start: jax.Array
    kv_start: jax.Array
    kv_length: jax.Array


def _write_tiles(words: Any, size: int, rows: tuple[jax.Array, ...], *, interpret: bool) -> None:
    """Writes the tiles `part`, `part` + PARTS, ... of a segment, for each thread.

    `rows` are (part, position of the segment's first tile, first row read, first row written, rows,
    first key, keys).
    """
    if interpret:

        @pl.loop(0, WARPGROUP_SIZE)
        def _(i: Any) -> None:
            part, first, source, target, length, *keys = (x[i] for x in rows)

            @pl.loop(0, pl.cdiv(length, size))
            def _(t: Any) -> None:
                @pl.when(lax.rem(t, PARTS) == part)
                def _() -> None:
                    done = t * size
                    left = jnp.minimum(length - done, size)
                    for w, word in enumerate((source + done, target + done, left, *keys)):
                        words[first + t, w] = word

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(per_thread.LAYOUT,) * len(rows)))
    def write(_: Any, words: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        i32 = ir.IntegerType.get_signless(32)
        part, first, source, target, length, *keys = map(per_thread.scalar, arrays)
        size_ = mgpu.c(size, i32)
        tiles = arith.divsi(arith.addi(length, mgpu.c(size - 1, i32)), size_)
        for_op: Any = scf.ForOp
        loop = for_op(part, tiles, mgpu.c(PARTS, i32))
        with ir.InsertionPoint(loop.body):
            done = arith.muli(loop.induction_variable, size_)
            left = arith.minsi(arith.subi(length, done), size_)
            row = arith.addi(first, loop.induction_variable)
            offset = arith.muli(row, mgpu.c(TILE_WORDS, i32))
            address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(words), [offset], i32)
            values = (arith.addi(source, done), arith.addi(target, done), left, *keys)
            for w, value in enumerate(values):
                text = f"st.global.b32 [$0 + {4 * w}], $1;"
                mgpu.utils.inline_ptx(text, address, value, has_side_effects=True)
            scf.yield_([])

    write(words, *rows)


def _running_maxima(ctx: WarpgroupContext, source: Any, target: Any, total: int, at: int) -> None:
    """target[at + i] = the largest of 0 and source[: i + 1], limited to [0, total]."""
    count, thread = source.shape[0], per_thread.number()
    each = pl.cdiv(count, WARPGROUP_SIZE)
    parts = ctx.shared.parts

    def offset(i: Any) -> tuple[jax.Array, jax.Array]:
        index = thread * each + i
        value = per_thread.gather(
            source, jnp.minimum(index, count - 1), "global", interpret=ctx.interpret
        )
        return index, jnp.clip(value, 0, total)  # past the end, the last one again

    def larger(i: Any, most: jax.Array) -> jax.Array:
        return jnp.maximum(most, offset(i)[1])

    most = lax.fori_loop(0, each, larger, per_thread.same(0))
    per_thread.scatter(parts, thread, most, thread >= 0, interpret=ctx.interpret)
    plgpu.commit_smem()

    def before(turn: Any, most: jax.Array) -> jax.Array:
        for i in range(UNROLL):
            number = turn * UNROLL + i
            most = jnp.where(thread > number, jnp.maximum(most, parts[number]), most)
        return most

    most = lax.fori_loop(0, WARPGROUP_SIZE // UNROLL, before, per_thread.same(0))

    def keep(i: Any, most: jax.Array) -> jax.Array:
        index, value = offset(i)
        most = jnp.maximum(most, value)
        per_thread.scatter(target, index + at, most, index < count, interpret=ctx.interpret)
        return most

    lax.fori_loop(0, each, keep, most)
    plgpu.commit_smem()


def _segment(ctx: WarpgroupContext, index: jax.Array) -> _Segment:
    """The segments with these numbers; empty ones past the last."""
    shape, shared, zero = ctx.shape, ctx.shared, per_thread.same(0)
    exists, index = index < shape.segments, jnp.minimum(index, shape.segments - 1)

    def at(ref: Any, i: jax.Array) -> jax.Array:
        return per_thread.gather(ref, i, "shared", interpret=ctx.interpret)

    if shape.is_broadcast:
        start, number, has_keys = index * shape.q_rows, index, exists
        length, rest, rest_start = per_thread.same(shape.q_rows), zero, zero
    else:
        start, end = at(shared.q_offsets, index), at(shared.q_offsets, index + 1)
        length, rest = end - start, zero
        has_keys = exists & (index > 0) & (index <= shape.sequences)
        number = jnp.clip(index - 1, 0, shape.sequences - 1)
        if shape.max_seqlen_q is not None:
            whole = length
            limit = jnp.where(has_keys, shape.max_seqlen_q, shape.q_rows)
            length = jnp.minimum(whole, limit)
            rest = jnp.where(exists, whole - length, 0)
        rest_start = end - rest
    if shape.is_merged:
        number = at(shared.kv_numbers, index)
        length = jnp.where(has_keys, at(shared.lengths, index), length)
    elif ctx.operands.q_to_kv is not None:
        number = kv_number(ctx, number)
    kv_start = at(shared.kv_offsets, number)
    kv_length = at(shared.kv_offsets, number + 1) - kv_start
    if shape.max_seqlen_kv is not None:
        kv_length = jnp.minimum(kv_length, shape.max_seqlen_kv)
    kv_length = jnp.where(has_keys, kv_length, 0)
    length = jnp.where(exists, length, 0)
    kv_start = jnp.where(has_keys, kv_start, 0)
    return _Segment(start, length, rest, rest_start, kv_start, kv_length)


def _list_segments(ctx: WarpgroupContext) -> None:
    """Sort keys and numbers of tiles of all segments, in shared memory."""
    shape, shared, thread = ctx.shape, ctx.shared, per_thread.number()
    count = shared.keys.shape[0]

    @pl.loop(0, pl.cdiv(count, WARPGROUP_SIZE))
    def _(turn: Any) -> None:
        index = turn * WARPGROUP_SIZE + thread
        segment, is_wanted = _segment(ctx, index), index < count
        key = _key(shape, segment, index)
        tiles = lax.div(segment.length + (shape.size - 1), per_thread.same(shape.size))
        stored = [(shared.keys, key), (shared.tiles, tiles)]
        if shared.rest is not None:
            rest = lax.div(segment.rest + (shape.size - 1), per_thread.same(shape.size))
            stored.append((shared.rest, rest))
        for ref, values in stored:
            per_thread.scatter(ref, index, values, is_wanted, interpret=ctx.interpret)

    plgpu.commit_smem()


def _key(shape: Shape, segment: _Segment, index: jax.Array) -> jax.Array:
    """A number that is larger for segments with more blocks, or before; positive with keys.

    Numbers of blocks that exceed the range count as equal: the order only affects speed.
    """
    blocks = lax.div(segment.kv_length + (shape.unit - 1), per_thread.same(shape.unit))
    most = (2**31 - 1) // (2 * shape.segments) - 1
    return jnp.minimum(blocks, most) * (2 * shape.segments) - index


def _positions(ctx: WarpgroupContext, index: jax.Array, part: jax.Array) -> list[jax.Array]:
    """For a thread's segment: tiles before it, tiles with keys, and tiles before its second part.

    A thread counts a quarter of the segments; the sums of all four are exchanged.
    """
    shape, shared, thread = ctx.shape, ctx.shared, per_thread.number()
    own = per_thread.gather(
        shared.keys, jnp.minimum(index, shape.segments - 1), "shared", interpret=ctx.interpret
    )
    each = shared.keys.shape[0] // PARTS

    def count(turn: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first, keyed, every = sums
        for i in range(UNROLL):
            j = part * each + (turn * UNROLL + i)
            key, tiles = (
                per_thread.gather(ref, j, "shared", interpret=ctx.interpret)
                for ref in (shared.keys, shared.tiles)
            )
            first = first + jnp.where(key > own, tiles, 0)
            keyed = keyed + jnp.where(key > 0, tiles, 0)
            every = every + tiles
            if shared.rest is not None:
                rest = per_thread.gather(shared.rest, j, "shared", interpret=ctx.interpret)
                every = every + jnp.where(j < index, rest, 0)
        return first, keyed, every

    sums = lax.fori_loop(0, each // UNROLL, count, (per_thread.same(0),) * 3)
    for i, values in enumerate(sums):
        where = thread + i * WARPGROUP_SIZE
        per_thread.scatter(shared.parts, where, values, thread >= 0, interpret=ctx.interpret)
    plgpu.commit_smem()
    totals = []
    for i in range(len(sums)):
        lane = thread - part * LANES + i * WARPGROUP_SIZE
        quarters = [
            per_thread.gather(shared.parts, lane + p * LANES, "shared", interpret=ctx.interpret)
            for p in range(PARTS)
        ]
        totals.append(quarters[0] + quarters[1] + quarters[2] + quarters[3])
    return totals


def _list_tiles(ctx: WarpgroupContext) -> None:
    """The CTA's warpgroup."""
    shape, shared, operands, thread = ctx.shape, ctx.shared, ctx.operands, per_thread.number()
    if not shape.is_broadcast:
        ends = jnp.where(thread == 0, 0, shape.q_rows)
        where = jnp.where(thread == 0, 0, shape.segments)
        per_thread.scatter(shared.q_offsets, where, ends, thread < 2, interpret=ctx.interpret)
        _running_maxima(ctx, operands.cu_seqlens_q, shared.q_offsets, shape.q_rows, 1)
    _running_maxima(ctx, operands.cu_seqlens_kv, shared.kv_offsets, shape.kv_rows, 0)
    if shape.is_merged:
        merge(ctx)
    _list_segments(ctx)
    part = lax.div(thread, per_thread.same(LANES))
    index = ctx.worker * LANES + (thread - part * LANES)
    first, keyed, every = _positions(ctx, index, part)
    segment, words = _segment(ctx, index), ctx.outputs.words
    source = per_thread.same(0) if shape.is_broadcast else segment.start
    keys = (segment.kv_start, segment.kv_length)
    rows = (part, first, source, segment.start, segment.length, *keys)
    _write_tiles(words, shape.size, rows, interpret=ctx.interpret)
    if shared.rest is not None:
        begin = segment.rest_start
        rows = (part, every, begin, begin, segment.rest, per_thread.same(0), per_thread.same(0))
        _write_tiles(words, shape.size, rows, interpret=ctx.interpret)
        last = lax.div(segment.rest + (shape.size - 1), per_thread.same(shape.size))
        every = every + last
    is_writer = (index == shape.segments - 1) & (part == 0)
    for i, total in enumerate((keyed, every)):
        per_thread.scatter(
            ctx.outputs.counts,
            per_thread.same(i),
            total,
            is_writer,
            space="global",
            interpret=ctx.interpret,
        )


# Host side


def query_tiles(
    cu_seqlens_q: jax.Array | None,
    cu_seqlens_kv: jax.Array,
    q_to_kv: jax.Array | None,
    *,
    q_rows: int,
    kv_rows: int,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    size: int,
    unit: int = 1,
    interpret: Any = False,
) -> TileList:
    """The list of `tile_list.query_tiles`, whose entries past the last tile are arbitrary.

    XLA computes the list of more than `MOST_SEGMENTS` segments, or of more than `MOST_MERGED` if
    sequences share keys by an index.

    Args:
      cu_seqlens_q: as for `tile_list.query_tiles`, like the arguments that follow.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.
    """
    index = cu_seqlens_kv if q_to_kv is None else q_to_kv
    sequences = index.shape[0] - (q_to_kv is None)
    is_broadcast = cu_seqlens_q is None
    bounds = (q_rows, kv_rows, max_seqlen_q, max_seqlen_kv)
    is_merged = q_to_kv is not None and not is_broadcast
    shape = Shape(sequences, *bounds, size, unit, is_broadcast, is_merged)
    most = MOST_MERGED if is_merged else MOST_SEGMENTS
    if max(shape.segments, cu_seqlens_kv.shape[0]) > most:
        return tile_list.query_tiles(
            cu_seqlens_q,
            cu_seqlens_kv,
            q_to_kv,
            q_rows=q_rows,
            kv_rows=kv_rows,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            size=size,
            unit=unit,
        )
    step = PARTS * UNROLL
    words = memory.Words((pl.cdiv(shape.segments, step) * step,))
    has_rest = max_seqlen_q is not None and not is_broadcast
    shared = Shared(
        parts=memory.Words((3 * WARPGROUP_SIZE,)),
        q_offsets=None if is_broadcast else memory.Words((shape.segments + 1,)),
        kv_offsets=memory.Words((cu_seqlens_kv.shape[0],)),
        keys=words,
        tiles=words,
        rest=words if has_rest else None,
        kv_numbers=words if is_merged else None,
        lengths=words if is_merged else None,
    )
    outputs = Outputs(
        jax.ShapeDtypeStruct((shape.most, TILE_WORDS), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    results = launch(
        Roles(lambda *arguments: WarpgroupContext(shape, None, *arguments), None, _list_tiles),
        Operands(cu_seqlens_q, cu_seqlens_kv, q_to_kv),
        outputs,
        shared,
        dtype=jnp.int32,
        name="ikbo_tile_list",
        workers=pl.cdiv(shape.segments, LANES),
        interpret=interpret,
    )
    return TileList(*results)
