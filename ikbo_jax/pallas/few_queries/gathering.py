"""The queries of candidates that a CTA has listed, which its consumers gather.

All 256 threads load parts of 16 bytes, and store them to query slots. Several items of a bundle
have the same candidates: their queries are gathered at once, as far as there are query slots, in
one wait for device memory.

Synchronisations, by named barriers of the consumers:
  1. Both have read the queries of earlier items, whose slots are filled again. If a listing comes
     just before, its barrier says so already.
  2. The queries are complete.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.few_queries import listing
from ikbo_jax.pallas.hopper import mosaic, stores
from ikbo_jax.problems.hopper import BLOCK_K, WARPGROUP_SIZE, WGMMA_M, column_blocks

#: Elements of 16 bytes, and parts of 16 bytes of a row of a block of queries.
_VECTOR, _BLOCK_VECTORS = 8, BLOCK_K // 8
_SCALAR = plgpu.Layout.WG_SPLAT(())


def load_queries(ctx: Any, item: Any, index: Any) -> None:
    """Both consumers gather the queries of an item's candidates into its slot.

    And of the items that follow with the same candidates, as many as the item says. Rows past the
    item's rows, and columns past H, are zeros.
    """

    @pl.when(item.gathered > 0)
    def _() -> None:
        if ctx.shape.bundle > ctx.gathered:
            listing.synchronise(ctx)
        tiles = [ctx.shared.query.matrix(index + i) for i in range(ctx.gathered)]
        if ctx.interpret:
            pl.when(ctx.consumer == 0)(lambda: _gather_one_by_one(ctx, item, tiles))
        else:
            _gather(ctx, item, tiles)
        plgpu.commit_smem()
        listing.synchronise(ctx)


def _gather_one_by_one(ctx: Any, item: Any, tiles: list[Any]) -> None:
    for i, of_item in enumerate(tiles):
        head = item.head + i * ctx.shape.group
        gather = functools.partial(_gather_item, ctx, item.rows, head, of_item)
        pl.when(i < item.gathered)(gather)


def _gather_item(ctx: Any, rows: Any, head: Any, tiles: Any) -> None:
    shape, query = ctx.shape, ctx.operands.query
    for block in range(column_blocks(shape.head_dim)):
        width = min(BLOCK_K, shape.head_dim - block * BLOCK_K)
        for tile in range(ctx.tiles):
            tiles[tile, block] = jnp.zeros((WGMMA_M, BLOCK_K), tiles.dtype)

        @pl.loop(0, rows)
        def _(row: Any, block: int = block, width: int = width) -> None:
            candidate = ctx.shared.listing[row // shape.q_len]
            source = candidate * shape.q_len + row % shape.q_len
            for member in range(shape.group):
                target = member * shape.head_rows + row % shape.head_rows
                columns = pl.ds(block * BLOCK_K, width)
                values = query[source, head + member, columns]
                tiles[row // shape.head_rows, block, target, :width] = values


def _gather(ctx: Any, item: Any, tiles: list[Any]) -> None:
    shape = ctx.shape
    of_tiles = plgpu.RefType(mosaic.operand_transforms(tiles[0].dtype))

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(), plgpu.RefType()),
            *(_SCALAR,) * 4,
            *(of_tiles,) * len(tiles),
        )
    )
    def copy(_: Any, query: ir.Value, table: ir.Value, *rest: Any) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        consumer, count, head, gathered = (s.registers.item() for s in rest[:4])
        thread = arith.addi(
            arith.muli(consumer, mgpu.c(WARPGROUP_SIZE, i32)), stores.thread_number()
        )
        places = _places(ctx, table, thread, count)
        copies = []
        # All rows of a thread are loaded before the first one is stored.
        for i, of_item in enumerate(rest[4:]):
            is_item = arith.cmpi(arith.CmpIPredicate.slt, mgpu.c(i, i32), gathered)
            first_head = arith.addi(head, mgpu.c(i * shape.group, i32))
            for place in places:
                words = _load_vector(query, place, first_head, is_item)
                copies.append((of_item, place.offset, words, is_item))
        for of_item, offset, words, is_item in copies:
            mgpu.utils.inline_ptx(
                "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
                mgpu.utils.getelementptr(mgpu.utils.memref_ptr(of_item), [offset], byte),
                *words,
                predicate=is_item,
                has_side_effects=True,
            )

    scalars = (ctx.consumer, item.rows, item.head, item.gathered)
    copy(ctx.operands.query, ctx.shared.listing, *scalars, *tiles)


class _Place(NamedTuple):
    """16 bytes of an item's queries."""

    row: ir.Value  # of the queries
    member: ir.Value  # the head's number in its group
    column: ir.Value
    is_wanted: ir.Value
    offset: ir.Value  # bytes from the item's tiles on


def _places(ctx: Any, table: ir.Value, thread: ir.Value, count: ir.Value) -> list[_Place]:
    """What a thread gathers of an item with `count` rows."""
    i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
    shape, height = ctx.shape, WGMMA_M
    blocks = column_blocks(shape.head_dim)
    vectors = mgpu.c(_BLOCK_VECTORS, i32)
    vector, first = arith.remui(thread, vectors), arith.divui(thread, vectors)
    places = []
    for step in range(ctx.tiles * height * _BLOCK_VECTORS // listing.THREADS):
        tile, begin = divmod(step * listing.THREADS // _BLOCK_VECTORS, height)
        tile_row = arith.addi(first, mgpu.c(begin, i32))
        member = arith.divui(tile_row, mgpu.c(shape.head_rows, i32))
        row = arith.remui(tile_row, mgpu.c(shape.head_rows, i32))
        row = arith.addi(row, mgpu.c(tile * shape.head_rows, i32))
        source = listing.listed_row(table, row, shape.q_len)
        is_row = arith.andi(
            arith.cmpi(predicates.slt, row, count),
            arith.cmpi(predicates.slt, member, mgpu.c(shape.group, i32)),
        )
        swizzled = arith.xori(vector, arith.remui(tile_row, vectors))
        offset = arith.addi(
            arith.muli(tile_row, mgpu.c(mosaic.SWIZZLE, i32)),
            arith.muli(swizzled, mgpu.c(16, i32)),
        )
        for block in range(blocks):
            column = arith.addi(
                arith.muli(vector, mgpu.c(_VECTOR, i32)), mgpu.c(block * BLOCK_K, i32)
            )
            is_inside = arith.cmpi(predicates.slt, column, mgpu.c(shape.head_dim, i32))
            at = (tile * blocks + block) * height * mosaic.SWIZZLE
            at = arith.addi(offset, mgpu.c(at, i32))
            places.append(_Place(source, member, column, arith.andi(is_row, is_inside), at))
    return places


def _load_vector(
    query: ir.Value, place: _Place, head: ir.Value, is_item: ir.Value
) -> list[ir.Value]:
    """16 bytes of the queries of a group of heads from `head` on; zeros if they are not wanted."""
    i32 = ir.IntegerType.get_signless(32)
    _, heads, width = ir.MemRefType(query.type).shape
    terms = [
        (place.row, heads * width),
        (arith.addi(head, place.member), width),
        (place.column, 1),
    ]
    words = mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "mov.b32 $2, 0; mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        stores.device_address(query, terms, 2),
        arith.extui(i32, arith.andi(place.is_wanted, is_item)),
        result_types=[i32] * 4,
        has_side_effects=True,
    )
    return list(words)
