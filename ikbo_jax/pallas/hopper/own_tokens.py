"""A candidate's own token: one more key and value that only the candidate's queries see.

TMA loads the own keys and values of a tile's candidates, which lie side by side, into stages: of a
ring of their own, whose tokens a softmax ends with, or of the ring of values, whose tokens it
begins with. A product of queries and own keys has a row's score in its candidate's column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic, operand_tiles, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.hopper import WGMMA_M, OwnStages


def in_order(tokens: jax.Array | None, order: jax.Array | None) -> jax.Array | None:
    """Reshapes tokens [B, 1, K, H] to [B, K, H], those of candidate order[i] at place i."""
    if tokens is None or order is None:
        return None if tokens is None else jnp.squeeze(tokens, 1)
    return tokens.at[order, 0].get(mode="clip")


class Places(NamedTuple):
    """Places of the candidates of a tile's 64 rows: (begin + row % head_rows) // q_len."""

    begin: Any
    q_len: int
    head_rows: int = WGMMA_M

    def interpreted(self) -> jax.Array:
        row = lax.rem(jnp.arange(WGMMA_M, dtype=jnp.int32), jnp.int32(self.head_rows))
        return lax.div(self.begin + row, jnp.int32(self.q_len))

    def of(self, begin: Integer, row: Integer) -> Integer:
        """Computes the place of a row's candidate in inline code."""
        return (begin + row % self.head_rows) // self.q_len


def scores(products: jax.Array, places: Places) -> jax.Array:
    """Selects each row's score, [64] f32, from products [64, places] of queries and own keys."""
    if mosaic.is_interpreted():
        return jnp.take_along_axis(products, places.interpreted()[:, None], axis=1)[:, 0]

    @inline.code(products, places.begin, returns=jax.ShapeDtypeStruct((WGMMA_M,), jnp.float32))
    def selected(products: mgpu.FragmentedArray, begin: Integer) -> mgpu.FragmentedArray:
        thread, found = stores.thread_number(), []
        of_tile = thread - thread % stores.ROW_THREADS
        for half in (0, 1):
            place = places.of(begin, stores.thread_row(thread, half))
            # Threads of a row have the same place, two of every eight columns each.
            left = [
                arith.select(_has_bit(place, 1), *(vector.extract(pair, [], [i]) for i in (1, 0)))
                for pair in products.registers.flat[half::2]
            ]
            bit = 8
            while len(left) > 1:
                right, is_right = left[1::2], _has_bit(place, bit)
                right += left[2 * len(right) :]
                left = [arith.select(is_right, y, x) for x, y in zip(left[::2], right, strict=True)]
                bit *= 2
            owner = place // 2 % stores.ROW_THREADS
            word = inline.issue_word(
                "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
                inline.word(left[0]),
                of_tile + owner,
                convergent=True,
            )
            found.append(mgpu.utils.bitcast(word, ir.F32Type.get()))
        return stores.row_array(found)

    return selected


def _has_bit(x: Integer, bit: int) -> Integer:
    return (x & bit).differs(0)


def values(tiles: Any, own: OwnStages, places: Places, columns: int) -> jax.Array:
    """Reads each row's own value, [64, columns] f32, from the operand tiles of a stage."""
    first = own.columns * (2 - own.stages)
    if mosaic.is_interpreted():
        rows = jnp.moveaxis(tiles[...], 0, 1)
        rows = rows.reshape(rows.shape[0], -1)[:, :columns].astype(jnp.float32)
        found = jnp.take(rows, first + places.interpreted(), axis=0)
    else:
        found = _read(tiles, first, places, columns).astype(jnp.float32)
    plgpu.commit_smem()  # TMA writes the stage only after these reads
    return found


def _read(tiles: Any, first: int, places: Places, columns: int) -> jax.Array:
    rows = jax.ShapeDtypeStruct((WGMMA_M, columns), tiles.dtype)

    @inline.code(mosaic.operand(tiles), places.begin, returns=rows)
    def read(tiles: ir.Value, begin: Integer) -> mgpu.FragmentedArray:
        return operand_tiles.read_matrices(
            tiles, stores.thread_number(), columns, lambda row: places.of(begin, row) + first
        )

    return read
