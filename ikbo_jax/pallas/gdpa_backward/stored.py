"""Gradients of scores that the kernel for keys stores, and that the kernel for queries reads.

    d_query = scale * output_scale * dS @ key

With a mask, both kernels together compute five products then, not seven, and the activation once.

A tile of 128 keys has a *place*, and `(place + g) * N + h` numbers its gradients for block g of 64
queries and head h of N: two operand tiles, each with 64 keys by 64 queries, one of each consumer of
the kernel for keys. Blocks of which a consumer's keys see no row are neither stored nor read.
Columns are in the order in which threads hold them (`query_at`), so that no thread exchanges any.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from ikbo_jax.pallas.gdpa_backward import context
from ikbo_jax.pallas.gdpa_backward.context import BackwardContext
from ikbo_jax.pallas.hopper import inline, mma, mosaic, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.worklist.lists import STATISTICS_ROW, Offsets
from ikbo_jax.problems.hopper import TILE_ROWS, WGMMA_M

#: Word of a tile of keys: its place.
PLACE = 10


def _number(row: Any, sequence: Any) -> Any:
    """Numbers tiles of keys by their first row and their sequence; no two have the same number."""
    return lax.div(row, jnp.int32(TILE_ROWS)) + sequence


def with_places(
    tiles: jax.Array, is_seen: jax.Array, offsets: Offsets
) -> tuple[jax.Array, jax.Array]:
    """Adds tiles' places as their last word; also returns the places by `_number`.

    `is_seen`: [tiles, blocks], whether tiles of keys see blocks of queries.
    """
    number = jnp.arange(is_seen.shape[1], dtype=jnp.int32)[None]
    begin = jnp.min(jnp.where(is_seen, number, is_seen.shape[1]), axis=1)
    width = jnp.maximum(jnp.max(jnp.where(is_seen, number + 1, 0), axis=1) - begin, 0)
    # By comparing all pairs: XLA's sum, search and scatter take four kernels, and a copy of 5 us.
    index = jnp.arange(width.size, dtype=jnp.int32)
    is_before = index[None] < index[:, None]
    place = jnp.sum(jnp.where(is_before, width[None], 0), axis=1, dtype=jnp.int32) - begin
    size = offsets.kv_rows // TILE_ROWS + offsets.kv_sequences + 1
    # No two sequences of queries share keys, so the range of a tile's queries is its sequence.
    number = jnp.where(width > 0, _number(tiles[:, 1], tiles[:, 3]), size)
    is_tile = number[None] == jnp.arange(size, dtype=jnp.int32)[:, None]
    places = jnp.sum(jnp.where(is_tile, place[None], 0), axis=1, dtype=jnp.int32)
    return jnp.concatenate((tiles, place[:, None]), axis=1), places


def rows(
    ctx: BackwardContext, tile: Any, head: Any, index: Any, source: Any, block: Any, unseen: Any
) -> list[Any]:
    """Finds the first stored rows of a block of keys, for the queries of each consumer.

    `index` and `source` are number and first row of the keys' sequence, `block` one of its blocks
    of 64 keys. A consumer whose queries see no key, by `unseen`, gets the other one's rows.
    """
    number = _number(source, index) + lax.div(block, TILE_ROWS // WGMMA_M)
    first = lax.div(ctx.tile_word(tile, STATISTICS_ROW), WGMMA_M)
    is_alone = unseen[1] | (ctx.tile_word(tile, 2) <= WGMMA_M)
    groups = jnp.where(unseen[0], 1, 0), jnp.where(is_alone, 0, 1)
    before = lax.rem(block, TILE_ROWS // WGMMA_M) * WGMMA_M
    place = ctx.operands.masks.places[number] + first
    return [((place + x) * ctx.shape.heads + head) * TILE_ROWS + before for x in groups]


def store(ctx: BackwardContext, d_scores: jax.Array, item: Any, step: Any) -> None:
    """Stores a consumer's gradients of scores [64 keys, 64 queries] f32, rounded."""
    # Words that are read again occupy no register before.
    tile, step = (mosaic.opaque(x) for x in (item, step))
    streamed = ctx.shared.streamed
    block = lax.div(streamed.word(step, context.FIRST), WGMMA_M)
    place = ctx.shared.stationary.word(tile, context.PLACE) + block
    heads = ctx.shape.heads * ctx.shape.streamed_per_head
    consumer = mosaic.warpgroup_index()
    row = (place * heads + streamed.word(step, 1)) * TILE_ROWS + consumer * WGMMA_M
    output = ctx.outputs[-1]
    if ctx.interpret:
        output[pl.ds(row, WGMMA_M), 0] = d_scores.astype(output.dtype)
        return
    # The product has the same values in registers of its own: if these were stored, ptxas would
    # serialise all products (C7512). It makes one register of two equal instructions, so pairs are
    # stored in the reverse order.
    reversed_pairs = mma.round_early(d_scores, output.dtype)

    @inline.code(output, reversed_pairs, row)
    def _(output: ir.Value, values: Any, row: Integer) -> None:
        words = [inline.word(pair) for pair in values.registers.flat]
        thread = stores.late_thread_number()
        of_row = thread % stores.ROW_THREADS
        first = row + stores.thread_row(thread, 0)
        terms = [(first, WGMMA_M), (of_row * 8, 1)]
        address = stores.device_address(output, terms, 2)
        for half in (0, 1):  # rows that are eight rows apart
            for i in range(0, 8, 4):
                inline.issue(
                    f"st.global.v4.b32 [$0 + {16 * WGMMA_M * half + 16 * i}], {{$1, $2, $3, $4}};",
                    address,
                    *words[half::2][i : i + 4],
                )


def query_at(place: Integer) -> Integer:
    """Finds the query of a column of stored gradients, of 64, in inline code.

    A thread stores the pairs of columns that it holds, 2 t + 8 m of each 32 columns, at 8 t + 2 m.
    """
    pair = (place // 2 % 4) * 8 + (place // 8 % 4) * 2
    return place // 32 * 32 + pair + (1 - place % 2)


def add_product(ctx: BackwardContext, total: jax.Array, step: Any) -> jax.Array:
    """Issues `total` plus a consumer's stored gradients times a block of 64 keys."""
    consumer = mosaic.warpgroup_index()
    keys, d_scores = (ctx.shared.streamed.matrix(step).at[operand] for operand in (0, 1))
    if ctx.interpret:
        staging = ctx.staging(0)
        return mma.add_product(total, d_scores[consumer].T, keys, staging)
    tile = d_scores.at[consumer]
    return mma.add_tile_product(total, tile, keys, is_transposed=True)
