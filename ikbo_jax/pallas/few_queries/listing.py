"""Candidates of an index that is not sorted, which a CTA's consumers find for its bundles of items.

The two consumers read the whole index, each of their 256 threads a share of it (`_Share`), and
write the numbers of a user's candidates to shared memory. They are in the order of threads, which
is the same in every CTA, so that the CTAs of a user's slots list different candidates. All loads of
the index are in flight at once, while the first block of keys is on its way. The consumers then
gather the queries of an item, and store results to the rows of its candidates. The items of a
bundle have the same candidates, and differ in their query heads: one listing serves all of them.

XLA would sort the index, gather queries and results, and invert the order, in six kernels of 1 to
2 us each.

Synchronisations, besides those of the kernel:
  1. A named barrier between finding candidates and writing their numbers: how many each warp found.
     It also says that both consumers have stored the results of the bundle before, and so read its
     list.
  2. `listed`, consumers -> producer: the number of candidates. The producer reads it before it
     sends the bundle's first item; the consumers list again only after its last one, whose
     descriptor says so.
  3. A named barrier at the end of `find`: the list is complete.
  4. A named barrier in `load_queries`: the queries are.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from ikbo_jax.pallas.hopper import mosaic, stores, turns, warps
from ikbo_jax.problems.few_queries import LISTED, LISTING_WARPS
from ikbo_jax.problems.hopper import (
    BLOCK_K,
    NUM_CONSUMERS,
    WARPGROUP_SIZE,
    WGMMA_M,
    column_blocks,
)

#: The named barrier at which the consumers wait for each other; `consumer` uses the next one.
BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS + 1
#: Elements of 16 bytes.
_VECTOR = 8
#: Candidates of an index of which one load takes the users, 16 bytes, and threads that load.
_PART, _THREADS = 4, LISTING_WARPS * warps.LANES
_SCALAR = plgpu.Layout.WG_SPLAT(())


def find(ctx: Any, user: Any, rank: Any) -> None:
    """Lists a user's candidates from number `rank` on, and tells the producer how many it has.

    Both consumers call it. `listing` then has up to `shape.listed` candidates, and behind them the
    number of the user's candidates that each warp found.
    """
    listing, index = ctx.shared.listing, ctx.operands.cand_to_user
    if ctx.interpret:
        _synchronise(ctx)
        pl.when(ctx.consumer == 0)(lambda: _find_at_once(ctx, user, rank))
    else:
        _find(ctx, index, listing, user, rank)
    plgpu.barrier_arrive(ctx.shared.listed.at[0])
    _synchronise(ctx)


def _find_at_once(ctx: Any, user: Any, rank: Any) -> None:
    listing, shape = ctx.shared.listing, ctx.shape
    users = jnp.clip(ctx.operands.cand_to_user[...], 0, shape.users - 1)
    is_found = users == user
    place = jnp.cumsum(is_found, dtype=jnp.int32) - 1 - rank
    number = jnp.arange(shape.batch, dtype=jnp.int32)

    @pl.loop(0, shape.listed)
    def _(i: Any) -> None:
        listing[i] = jnp.sum(jnp.where(is_found & (place == i), number, 0), dtype=jnp.int32)

    for warp in range(LISTING_WARPS):
        listing[LISTED + warp] = jnp.sum(is_found, dtype=jnp.int32) if warp == 0 else jnp.int32(0)


def _find(ctx: Any, index: Any, listing: Any, user: Any, rank: Any) -> None:
    shape = ctx.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR))
    def search(_: Any, index: ir.Value, listing: ir.Value, *scalars: Any) -> None:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        consumer, user, rank = (s.registers.item() for s in scalars)
        thread = arith.addi(
            arith.muli(consumer, mgpu.c(WARPGROUP_SIZE, i32)), stores.thread_number()
        )
        warp = arith.divui(thread, mgpu.c(warps.LANES, i32))
        share = _Share(shape.batch, thread)
        words = share.find(index, user, shape.users)
        count = mgpu.c(0, i32)
        for word in words:
            count = arith.addi(count, warps.ones(word))
        before, total = warps.sums(count)
        at = arith.addi(warp, mgpu.c(LISTED, i32))
        _store_shared(listing, at, total, arith.cmpi(predicates.eq, warps.lane(), mgpu.c(0, i32)))
        mgpu.utils.inline_ptx(
            f"barrier.sync {BARRIER}, {turns.CONSUMER_THREADS};",
            has_side_effects=True,
            convergent=True,
        )
        before = arith.subi(before, rank)
        for number in range(LISTING_WARPS - 1):
            of_warp = _load_shared(listing, mgpu.c(LISTED + number, i32))
            is_before = arith.cmpi(predicates.sgt, warp, mgpu.c(number, i32))
            before = arith.addi(before, arith.select(is_before, of_warp, mgpu.c(0, i32)))
        for number, word in enumerate(words):
            before = share.write(listing, number, word, before, shape.listed)

    search(index, listing, ctx.consumer, user, rank)


class _Share:
    """The candidates that one thread compares with a user: parts of four, and at most one more.

    Element 4 * i + j is candidate j of the thread's part i, and element 4 * `loads` the one of the
    last candidates that fill no part. Bit e % 32 of word e / 32 is set if element e is the user's.
    """

    def __init__(self, batch: int, thread: ir.Value) -> None:
        self._parts, self._rest = divmod(batch, _PART)
        self._loads = pl.cdiv(self._parts, _THREADS)
        self._thread = thread

    def find(self, index: ir.Value, user: ir.Value, users: int) -> list[ir.Value]:
        """The words of the thread's elements."""
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        others: list[ir.Value] = []
        is_inside: list[ir.Value | None] = []
        # All loads are issued before the first one is waited for.
        for i in range(self._loads):
            part = arith.addi(self._thread, mgpu.c(i * _THREADS, i32))
            is_part = None
            if (i + 1) * _THREADS > self._parts:
                is_part = arith.cmpi(predicates.slt, part, mgpu.c(self._parts, i32))
                part = arith.minsi(part, mgpu.c(self._parts - 1, i32))
            first = arith.muli(part, mgpu.c(_PART, i32))
            others += mgpu.utils.inline_ptx(
                "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
                mgpu.utils.getelementptr(mgpu.utils.memref_ptr(index), [first], i32),
                result_types=[i32] * _PART,
                has_side_effects=True,
            )
            is_inside += [is_part] * _PART
        if self._rest:
            is_inside.append(arith.cmpi(predicates.slt, self._thread, mgpu.c(self._rest, i32)))
            number = arith.minsi(self._thread, mgpu.c(self._rest - 1, i32))
            number = arith.addi(number, mgpu.c(self._parts * _PART, i32))
            others.append(warps.load(index, number))
        # Users out of range count as the first or the last one.
        zero, last = mgpu.c(0, i32), mgpu.c(users - 1, i32)
        low = arith.select(arith.cmpi(predicates.eq, user, zero), mgpu.c(-(2**31), i32), user)
        high = arith.select(arith.cmpi(predicates.eq, user, last), mgpu.c(2**31 - 1, i32), user)
        span = arith.subi(high, low)
        words = [zero] * pl.cdiv(len(others), warps.LANES)
        for element, (other, is_part) in enumerate(zip(others, is_inside, strict=True)):
            number, bit = divmod(element, warps.LANES)
            is_found = arith.cmpi(predicates.ule, arith.subi(other, low), span)
            if is_part is not None:
                is_found = arith.andi(is_found, is_part)
            found = arith.select(is_found, mgpu.c(1 << bit if bit < 31 else -(2**31), i32), zero)
            words[number] = arith.ori(words[number], found)
        return words

    def write(
        self, listing: ir.Value, number: int, word: ir.Value, at: ir.Value, most: int
    ) -> ir.Value:
        """Lists the candidates of word `number` from place `at` on, up to place `most`.

        Returns the place of the next word's first candidate; no smaller one if that is past `most`.
        The warp loops until no lane has a candidate left: mostly once or twice.
        """
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        zero, one = mgpu.c(0, i32), mgpu.c(1, i32)
        loop = scf.WhileOp([i32, i32], [word, at])
        block = loop.before.blocks.append(i32, i32)
        with ir.InsertionPoint(block):
            word, at = block.arguments
            is_left = arith.andi(
                arith.cmpi(predicates.ne, word, zero),
                arith.cmpi(predicates.slt, at, mgpu.c(most, i32)),
            )
            lanes = warps.ballot(is_left)
            scf.condition(arith.cmpi(predicates.ne, lanes, zero), [word, at])
        block = loop.after.blocks.append(i32, i32)
        with ir.InsertionPoint(block):
            word, at = block.arguments
            is_found = arith.cmpi(predicates.ne, word, zero)
            # Unsigned: candidates before the first one that is wanted have large numbers.
            is_wanted = arith.cmpi(predicates.ult, at, mgpu.c(most, i32))
            element = arith.addi(warps.lowest_bit(word), mgpu.c(number * warps.LANES, i32))
            _store_shared(listing, at, self._candidate(element), arith.andi(is_found, is_wanted))
            at = arith.addi(at, arith.extui(i32, is_found))
            scf.yield_([arith.andi(word, arith.subi(word, one)), at])
        return loop.results[1]

    def _candidate(self, element: ir.Value) -> ir.Value:
        i32 = ir.IntegerType.get_signless(32)
        part = arith.divui(element, mgpu.c(_PART, i32))
        part = arith.addi(arith.muli(part, mgpu.c(_THREADS, i32)), self._thread)
        first = arith.muli(part, mgpu.c(_PART, i32))
        candidate = arith.addi(first, arith.remui(element, mgpu.c(_PART, i32)))
        if not self._rest:
            return candidate
        is_of_part = arith.cmpi(arith.CmpIPredicate.slt, element, mgpu.c(self._loads * _PART, i32))
        number = arith.addi(self._thread, mgpu.c(self._parts * _PART, i32))
        return arith.select(is_of_part, candidate, number)


def await_total(ctx: Any) -> Any:
    """The number of candidates of the user that the consumers listed last."""
    plgpu.barrier_wait(ctx.shared.listed.at[0])
    total = ctx.shared.listing[LISTED]
    for warp in range(1, LISTING_WARPS):
        total = total + ctx.shared.listing[LISTED + warp]
    return total


def load_queries(ctx: Any, item: Any, index: Any) -> None:
    """Both consumers gather the queries of an item's candidates into its slot.

    Rows past the item's rows, and columns past H, are zeros.
    """
    tiles = ctx.shared.query.matrix(index)
    if ctx.interpret:
        pl.when(ctx.consumer == 0)(lambda: _gather_one_by_one(ctx, item, tiles))
    else:
        _gather(ctx, item, tiles)
    plgpu.commit_smem()
    _synchronise(ctx)


def _gather_one_by_one(ctx: Any, item: Any, tiles: Any) -> None:
    shape, query = ctx.shape, ctx.operands.query
    for block in range(column_blocks(shape.head_dim)):
        width = min(BLOCK_K, shape.head_dim - block * BLOCK_K)
        for tile in range(ctx.tiles):
            tiles[tile, block] = jnp.zeros((WGMMA_M, BLOCK_K), tiles.dtype)

        @pl.loop(0, item.rows)
        def _(row: Any, block: int = block, width: int = width) -> None:
            candidate = ctx.shared.listing[row // shape.q_len]
            source = candidate * shape.q_len + row % shape.q_len
            for member in range(shape.group):
                target = member * shape.head_rows + row % shape.head_rows
                columns = pl.ds(block * BLOCK_K, width)
                values = query[source, item.head + member, columns]
                tiles[row // shape.head_rows, block, target, :width] = values


def _gather(ctx: Any, item: Any, tiles: Any) -> None:
    shape, height = ctx.shape, WGMMA_M
    _, heads, width = ctx.operands.query.shape
    blocks = column_blocks(width)
    vectors = BLOCK_K // _VECTOR  # of a row of a block
    threads = NUM_CONSUMERS * WARPGROUP_SIZE

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(mosaic.operand_transforms(tiles.dtype)),
            _SCALAR,
            _SCALAR,
            _SCALAR,
        )
    )
    def copy(_: Any, query: ir.Value, listing: ir.Value, tiles: ir.Value, *scalars: Any) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        i = arith.CmpIPredicate
        consumer, count, head = (s.registers.item() for s in scalars)
        thread = arith.addi(
            arith.muli(consumer, mgpu.c(WARPGROUP_SIZE, i32)), stores.thread_number()
        )
        vector = arith.remui(thread, mgpu.c(vectors, i32))
        first = arith.divui(thread, mgpu.c(vectors, i32))
        copies = []
        # All rows of a thread are loaded before the first one is stored.
        for step in range(ctx.tiles * height * vectors // threads):
            tile, begin = divmod(step * threads // vectors, height)
            tile_row = arith.addi(first, mgpu.c(begin, i32))
            member = arith.divui(tile_row, mgpu.c(shape.head_rows, i32))
            row = arith.remui(tile_row, mgpu.c(shape.head_rows, i32))
            row = arith.addi(row, mgpu.c(tile * shape.head_rows, i32))
            source = listed_row(listing, row, shape.q_len)
            is_row = arith.andi(
                arith.cmpi(i.slt, row, count),
                arith.cmpi(i.slt, member, mgpu.c(shape.group, i32)),
            )
            swizzled = arith.xori(vector, arith.remui(tile_row, mgpu.c(vectors, i32)))
            offset = arith.addi(
                arith.muli(tile_row, mgpu.c(mosaic.SWIZZLE, i32)),
                arith.muli(swizzled, mgpu.c(16, i32)),
            )
            for block in range(blocks):
                column = arith.addi(
                    arith.muli(vector, mgpu.c(_VECTOR, i32)), mgpu.c(block * BLOCK_K, i32)
                )
                is_inside = arith.cmpi(i.slt, column, mgpu.c(width, i32))
                terms = [(source, heads * width), (arith.addi(head, member), width), (column, 1)]
                words = mgpu.utils.inline_ptx(
                    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
                    "mov.b32 $2, 0; mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
                    stores.device_address(query, terms, 2),
                    arith.extui(i32, arith.andi(is_row, is_inside)),
                    result_types=[i32] * 4,
                    has_side_effects=True,
                )
                at = (tile * blocks + block) * height * mosaic.SWIZZLE
                copies.append((arith.addi(offset, mgpu.c(at, i32)), words))
        for offset, words in copies:
            mgpu.utils.inline_ptx(
                "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
                mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tiles), [offset], byte),
                *words,
                has_side_effects=True,
            )

    copy(ctx.operands.query, ctx.shared.listing, tiles, ctx.consumer, item.rows, item.head)


def listed_row(listing: ir.Value, row: ir.Value, q_len: int) -> ir.Value:
    """The row of the query, or of a result, that is row `row` of the item."""
    i32 = ir.IntegerType.get_signless(32)
    candidate = _load_shared(listing, arith.divui(row, mgpu.c(q_len, i32)))
    return arith.addi(
        arith.muli(candidate, mgpu.c(q_len, i32)), arith.remui(row, mgpu.c(q_len, i32))
    )


def _synchronise(ctx: Any) -> None:
    """The consumers wait for each other."""
    mosaic.named_barrier("sync", jnp.int32(BARRIER), turns.CONSUMER_THREADS)


def _shared_address(ref: ir.Value, index: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], i32)


def _load_shared(ref: ir.Value, index: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    address = _shared_address(ref, index)
    return mgpu.utils.inline_ptx(
        "ld.shared.b32 $0, [$1];", address, result_types=i32, has_side_effects=True
    )


def _store_shared(ref: ir.Value, index: ir.Value, value: ir.Value, is_wanted: ir.Value) -> None:
    mgpu.utils.inline_ptx(
        "st.shared.b32 [$0], $1;",
        _shared_address(ref, index),
        value,
        predicate=is_wanted,
        has_side_effects=True,
    )
