"""Cuts the sequences of one array into tiles of a few rows.

A tile is some rows of one sequence. Each tile has a key-value sequence: a tile of keys belongs to
it, and a tile of queries attends to it. Lists of tiles are sorted by key-value sequence, so the
tiles that are multiplied with a tile are a range of the other list. Only the device knows the
number of tiles; the lists are long enough for any offsets, and end with empty tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sequences(NamedTuple):
    """Positions of sequences: [batch] int32 each.

    `target`, the first row that is written, differs from `source` for broadcast queries; the
    key-value sequence `kv` must exist. If it is None, it is each sequence's own number.
    """

    source: jax.Array
    target: jax.Array
    length: jax.Array
    kv: jax.Array | None


class Tiles(NamedTuple):
    """Tiles, sorted by their key-value sequence `kv`: [tiles] int32 each; empty ones have 0 rows.

    `source` and `target` are the first rows that are read and written, `begin` counts from the
    first row of the sequence.
    """

    source: jax.Array
    target: jax.Array
    rows: jax.Array
    kv: jax.Array
    begin: jax.Array


class Tiling(NamedTuple):
    """All tiles of a set of sequences.

    Attributes:
      tiles: the list; its length is a multiple of `per_step`.
      first: [batch_kv + 1] int32; tiles of key-value sequence s are first[s] to first[s + 1] - 1.
      size: rows of a full tile.
      per_step: tiles that one step computes.
    """

    tiles: Tiles
    first: jax.Array
    size: int
    per_step: int


def bounds(
    cu_seqlens: jax.Array, total: int, max_seqlen: int | None
) -> tuple[jax.Array, jax.Array]:
    """Computes first rows and lengths of sequences, inside [0, total) for any offsets.

    Offsets are clamped to the array and replaced by their running maximum; sequences are truncated
    to `max_seqlen`.
    """
    offsets = jax.lax.cummax(jnp.clip(cu_seqlens, 0, total))
    length = offsets[1:] - offsets[:-1]
    if max_seqlen is not None:
        length = jnp.minimum(length, max_seqlen)
    return offsets[:-1], length


def places(start: jax.Array, length: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Finds every row's sequence, and its place there; -1 if the row is in no sequence.

    `start` and `length` are those that `bounds` returns, of an array of `rows`.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    # Of sequences that start at one row, the last one alone can have rows.
    sequence = jnp.maximum(search_right(start, row) - 1, 0)
    place = row - start[sequence]
    return sequence, jnp.where((place >= 0) & (place < length[sequence]), place, -1)


def inverse(order: jax.Array) -> jax.Array:
    """Inverts a permutation: `x[order][inverse(order)]` is x."""
    number = jnp.arange(order.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(number).at[order].set(number, unique_indices=True)


def most_tiles(batch: int, total: int, size: int, max_seqlen: int | None = None) -> int:
    """Bounds the tiles of any offsets: each sequence's last tile may have one row."""
    if not (isinstance(batch, int) and isinstance(total, int)):  # symbolic: a bound without min
        whole = total // size if max_seqlen is None else batch * (max_seqlen // size)
        return batch + whole
    nonempty = min(batch, total)
    most = nonempty + (total - nonempty) // size
    return most if max_seqlen is None else min(most, batch * -(-max_seqlen // size))


def tile(sequences: Sequences, batch_kv: int, size: int, per_step: int, most: int) -> Tiling:
    """Cuts `sequences` into at most `most` tiles of at most `size` rows."""
    if sequences.kv is not None:
        order = jnp.argsort(sequences.kv, stable=True)
        sequences = jax.tree.map(lambda x: x[order], sequences)
    source, target, length, kv = sequences
    tiles_of = -(-length // size)
    end = jnp.cumsum(tiles_of)
    all_steps = -(-most // per_step)
    count = (max(all_steps, 1) if isinstance(most, int) else all_steps) * per_step
    number = jnp.arange(count, dtype=jnp.int32)
    sequence = jnp.clip(search_right(end, number), 0, length.size - 1)
    start = (number - (end - tiles_of)[sequence]) * size
    rows = jnp.clip(length[sequence] - start, 0, size)
    if kv is None:
        of_tiles, first = sequence, jnp.concatenate([jnp.zeros_like(end, shape=1), end])
    else:
        counts = jnp.zeros_like(kv, shape=batch_kv + 1).at[kv + 1].add(tiles_of)
        of_tiles, first = kv[sequence], jnp.cumsum(counts)
    tiles = Tiles(source[sequence] + start, target[sequence] + start, rows, of_tiles, start)
    return Tiling(tiles, first, size, per_step)


def steps(tiling: Tiling) -> Tiles:
    """Reshapes the tiles to [steps, per_step]."""
    return jax.tree.map(lambda x: x.reshape(-1, tiling.per_step), tiling.tiles)


def tile_range(tiles: Tiles, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """Finds (first, number, 0 if empty) of the tiles that share each tile's key-value sequence."""
    first, end = tiling.first[tiles.kv], tiling.first[tiles.kv + 1]
    return first, jnp.where(tiles.rows > 0, end - first, 0)


def tile_at(tiling: Tiling, first: jax.Array, number: jax.Array, step: jax.Array) -> Tiles:
    """Takes tile number `step` of each `tile_range`; an empty tile past the range's end."""
    index = jnp.minimum(first + step, tiling.tiles.rows.size - 1)
    found = jax.tree.map(lambda x: x[index], tiling.tiles)
    return found._replace(rows=jnp.where(step < number, found.rows, 0))


def row_mask(tiles: Tiles, size: int) -> jax.Array:
    """Makes the mask of the tiles' existing rows: [tiles, size] bool."""
    return jnp.arange(size, dtype=jnp.int32)[None] < tiles.rows[:, None]


def gather(array: jax.Array, tiles: Tiles, size: int) -> jax.Array:
    """Gathers rows [rows, heads, ...] to [tiles, heads, size, ...]; zeros past the end."""
    mask = row_mask(tiles, size)
    index = tiles.source[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    rows = jnp.take(array, jnp.where(mask, index, 0), axis=0, mode="clip")
    shape = (*mask.shape, *[1] * (array.ndim - 1))
    return jnp.swapaxes(jnp.where(mask.reshape(shape), rows, 0), 1, 2)


def scatter(array: jax.Array, tiles: Tiles, update: jax.Array) -> jax.Array:
    """Writes existing rows of `update` [tiles, heads, size, ...] to `array` [rows, heads, ...]."""
    size = update.shape[2]
    number = jnp.arange(tiles.rows.size * size, dtype=jnp.int32).reshape(-1, size)
    row = tiles.target[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    # Rows past the end are dropped; each gets a different index, so that all indices are unique.
    row = jnp.where(row_mask(tiles, size), row, array.shape[0] + number)
    rows = jnp.swapaxes(update, 1, 2).astype(array.dtype)
    return array.at[row].set(rows, mode="drop", unique_indices=True)


def search_right(ends: jax.Array, numbers: jax.Array) -> jax.Array:
    """Computes `jnp.searchsorted(ends, numbers, side="right")`, int32, by an unrolled search.

    By default, `jnp.searchsorted` is a loop of log2(size) steps, each a kernel on a GPU; and jax
    0.12 does not lower it inside of `ops.sharded.device_p`.
    """
    if not isinstance(ends.size, int):  # symbolic: the steps of the search cannot be unrolled
        return jnp.sum(ends[None] <= numbers[:, None], axis=1, dtype=jnp.int32)
    found = jnp.zeros_like(numbers, jnp.int32)
    for bit in reversed(range(ends.size.bit_length())):
        further = found + (1 << bit)
        is_below = ends[jnp.minimum(further, ends.size) - 1] <= numbers
        found = jnp.where((further <= ends.size) & is_below, further, found)
    return found
