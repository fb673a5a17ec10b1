"""Gathers the queries of candidates that a CTA has listed, by the warps beside the producer's.

Their lanes copy parts of 16 bytes to query slots, ahead of the consumers by as many items as there
are query slots.

Synchronisations in addition to `listing`:
  1. `query.free[s]`   consumers -> gathering warps (and producer): the slot's queries were read.
  2. `query.ready[s]`  gathering warps -> consumers: a lane's copies are complete, after a fence
  that makes them visible to WGMMA.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.few_queries import listing
from ikbo_jax.pallas.hopper import inline, mosaic, stores, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.few_queries import GATHERING_WARPS
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_M, column_blocks

#: Elements of 16 bytes, and parts of 16 bytes of a row of a block of queries.
_VECTOR, _BLOCK_VECTORS = 8, BLOCK_K // 8
#: Rows that the warps copy at once, and how often in one iteration of the loop over rows.
_STEP_ROWS, _UNROLLED = GATHERING_WARPS * warps.LANES // _BLOCK_VECTORS, 3
#: A lane's copies are complete, and the tensor core sees them.
_FINISH = "cp.async.wait_all; fence.proxy.async.shared::cta;"


def gather(ctx: Any) -> None:
    """Fills the query slots of all items of the CTA, with zeros past an item's rows and past H."""
    query = ctx.shared.query

    def one_listing(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, rank, index = carry
        found = listing.await_found(ctx, i, rank)

        def one_item(member: Any, index: Any) -> Any:
            query.await_reuse(index)
            load = _load_one_by_one if ctx.interpret else _load
            load(ctx, found.rows, ctx.place(i, member).head, query.matrix(index))
            _arrive(ctx, index)
            return index + 1

        if ctx.shape.bundle == 1:
            index = one_item(jnp.int32(0), index)
        else:
            index = lax.fori_loop(0, found.items, one_item, index)
        return found.following, found.next_rank, index

    count, zero = ctx.count(), jnp.int32(0)
    _, rank = ctx.listed_place(ctx.place(zero).slot)
    index = lax.while_loop(lambda carry: carry[0] < count, one_listing, (zero, rank, zero))[-1]
    # The end has a slot, too, for which consumers wait: they release it only after these warps have
    # seen the release before.
    query.await_reuse(index)
    _arrive(ctx, index)
    query.drain_uses(index + 1)


def _arrive(ctx: Any, index: Any) -> None:
    """Reports a filled query slot, once for each warp; under interpretation, one thread reports."""
    for _ in range(GATHERING_WARPS if ctx.interpret else 1):
        plgpu.barrier_arrive(ctx.shared.query.ready_at(index))


def _load_one_by_one(ctx: Any, rows: Any, head: Any, tiles: Any) -> None:
    """Copies queries as `_load` does, under interpretation."""
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

    plgpu.commit_smem()


def _load(ctx: Any, rows: Any, head: Any, tiles: Any) -> None:
    """Copies an item's queries, of `rows` rows from `head` on, to its slot, and waits for them."""
    height = ctx.tiles * WGMMA_M

    @pl.loop(jnp.int32(0), jnp.int32(pl.cdiv(height, _UNROLLED * _STEP_ROWS)))
    def _(step: Any) -> None:
        @inline.code(
            *(ctx.operands.query, ctx.shared.listing, mosaic.operand(tiles), step, rows, head)
        )
        def _(query: Any, table: Any, tiles: Any, step: Integer, rows: Any, head: Any) -> None:
            # The producer's warp is the warpgroup's first one.
            thread = stores.thread_number() - warps.LANES
            first = thread // _BLOCK_VECTORS + step * (_UNROLLED * _STEP_ROWS)
            vector = thread % _BLOCK_VECTORS
            places = [first + i * _STEP_ROWS for i in range(_UNROLLED)]
            sources = [_source(ctx, query, table, place, rows, head, vector) for place in places]
            for place, source in zip(places, sources, strict=True):
                _copy_row(ctx, source, tiles, place, vector, place < height)

    @inline.code()
    def _() -> None:
        inline.issue(_FINISH)


def _source(
    ctx: Any,
    query: ir.Value,
    table: ir.Value,
    place: Integer,
    rows: Integer,
    head: Integer,
    vector: Integer,
) -> tuple[ir.Value, Integer]:
    """Finds (address of a lane's 16 bytes of row `place` in block 0, bytes to copy: 16, or 0)."""
    shape = ctx.shape
    heads_rows = inline.i32(shape.head_rows)
    tile, tile_row = place // WGMMA_M, place % WGMMA_M
    member, row = tile_row // heads_rows, tile_row % heads_rows
    row = row + tile * heads_rows
    is_wanted = (row < rows) & (member < shape.group)
    zero = inline.i32(0)
    row, member = (is_wanted.select(x, zero) for x in (row, member))
    # Without rows, the list may have nothing that is a candidate.
    row = is_wanted.select(listing.listed_row(table, row, shape.q_len), zero)
    terms = [
        (row, shape.q_heads * shape.head_dim),
        (head + member, shape.head_dim),
        (vector, _VECTOR),
    ]
    size = is_wanted.select(16, zero)
    return stores.device_address(query, terms, 2), size


def _copy_row(
    ctx: Any,
    source: tuple[ir.Value, Integer],
    tiles: ir.Value,
    place: Integer,
    vector: Integer,
    is_row: ir.Value,
) -> None:
    """Begins to copy this lane's 16 bytes of each column block of a row."""
    address, size = source
    blocks, height = column_blocks(ctx.shape.head_dim), WGMMA_M
    tile, tile_row = place // height, place % height
    swizzled = vector ^ tile_row % _BLOCK_VECTORS
    offset = inline.i32(0) + tile * (blocks * height * mosaic.SWIZZLE)
    target = inline.address(tiles, offset + tile_row * mosaic.SWIZZLE + swizzled * 16, 8)
    for block in range(blocks):
        at, wanted = address, size
        left = (ctx.shape.head_dim - block * BLOCK_K) // _VECTOR
        from_begin = block * BLOCK_K * 2
        if left < _BLOCK_VECTORS:
            is_inside = vector < left
            wanted = is_inside.select(size, 0)
            # Past the row's end, column block 0's bytes are inside of the queries.
            i64, byte = (ir.IntegerType.get_signless(x) for x in (64, 8))
            further = is_inside.select(mgpu.c(from_begin, i64), 0)
            at, from_begin = mgpu.utils.getelementptr(address, [further], byte), 0
        inline.issue(
            f"cp.async.cg.shared.global [$0 + {block * height * mosaic.SWIZZLE}], "
            f"[$1 + {from_begin}], 16, $2;",
            target,
            at,
            wanted,
            predicate=is_row,
        )
