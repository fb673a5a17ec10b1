"""Which keys the queries of the XLA path see, and which tiles their rows need."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.reference import jagged


class Visible(NamedTuple):
    """The keys that queries see, counted from the first key of their sequence.

    Attributes:
      intervals: [rows of out, 4] int32, see `gdpa.Arrays`.
      begin: [tiles of queries] int32, the first key that a row of the tile sees.
      end: likewise, one past the last key; 0 where the rows see nothing.
      kv: likewise, the key-value sequence of the tile.
    """

    intervals: jax.Array
    begin: jax.Array
    end: jax.Array
    kv: jax.Array

    @classmethod
    def of(cls, intervals: jax.Array, tiling: jagged.Tiling) -> Visible:
        """Bounds the keys of every tile of queries."""
        tiles = tiling.tiles
        return cls(intervals, *_bounds(_of_rows(intervals, tiles, tiling.size)), tiles.kv)

    def key_tiles(
        self, q: jagged.Tiles, q_tiling: jagged.Tiling, kv_tiling: jagged.Tiling
    ) -> tuple[jax.Array, jax.Array]:
        """Finds (first, number) of the tiles of keys that rows of each tile of queries may see."""
        first, number = jagged.tile_range(q, kv_tiling)
        begin, end = _bounds(_of_rows(self.intervals, q, q_tiling.size))
        skipped = begin // kv_tiling.size
        stop = jnp.minimum(number, -(-end // kv_tiling.size))
        return first + skipped, jnp.maximum(stop - skipped, 0)

    def query_tiles(self, kv: jagged.Tiles, q_tiling: jagged.Tiling) -> tuple[jax.Array, jax.Array]:
        """Finds (first, number) of the tiles of queries whose rows may see each tile of keys."""
        begin, end, kv_of = (x[:, None] for x in (kv.begin, kv.begin + kv.rows, kv.kv))
        sees = (self.kv[None] == kv_of) & (self.begin[None] < end) & (self.end[None] > begin)
        sees &= begin < end
        number = jnp.arange(self.kv.shape[0], dtype=jnp.int32)[None]
        first = jnp.min(jnp.where(sees, number, self.kv.shape[0]), axis=1)
        stop = jnp.max(jnp.where(sees, number + 1, 0), axis=1)
        return first, jnp.maximum(stop - first, 0)

    def mask(self, q: jagged.Tiles, kv: jagged.Tiles, q_size: int, kv_size: int) -> jax.Array:
        """Makes the mask of queries and the keys they see: [tiles, 1, q_size, kv_size] bool."""
        ends = _of_rows(self.intervals, q, q_size)[..., None]
        key = kv.begin[:, None] + jnp.arange(kv_size, dtype=jnp.int32)[None]
        is_in = (key[:, None, None] >= ends[:, :, 0]) & (key[:, None, None] < ends[:, :, 1])
        return jnp.any(is_in, axis=1, keepdims=True)


def _of_rows(intervals: jax.Array, tiles: jagged.Tiles, size: int) -> jax.Array:
    """Gathers rows' intervals: [tiles, 2 intervals, 2 ends, size]; empty past the end."""
    written = tiles._replace(source=tiles.target)
    found = jagged.gather(intervals[:, None], written, size)[:, 0]
    return jnp.moveaxis(found.reshape(found.shape[0], size, 2, 2), 1, 3)


def _bounds(ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the first key in any interval, and one past the last key: [tiles]; (0, 0) of none."""
    begin, end = ends[:, :, 0], ends[:, :, 1]
    end = jnp.max(jnp.where(begin < end, end, 0), axis=(1, 2))
    return jnp.min(jnp.where(begin < ends[:, :, 1], begin, end[:, None, None]), axis=(1, 2)), end
