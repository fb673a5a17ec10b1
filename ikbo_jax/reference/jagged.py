"""Sequences that lie one after another in one array, cut into tiles of a few rows.

A tile is some rows of one sequence. Every tile has a key-value sequence: its own, or, for tiles of
queries, the one that its sequence attends to. Tiles are listed by that sequence, so that all that
meets in a product lies in two ranges of two lists. How many tiles there are is known on the device
only; the lists are as long as any offsets can need, and the rest of them is empty.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sequences(NamedTuple):
    """Where sequences lie: [batch] int32 each.

    Attributes:
      source: first row in the array that is read.
      target: first row in the array that is written; the same, unless all of them read one.
      length: rows.
      kv: the key-value sequence, always one that exists.
    """

    source: jax.Array
    target: jax.Array
    length: jax.Array
    kv: jax.Array


class Tiles(NamedTuple):
    """Tiles, sorted by their key-value sequence: [tiles] int32 each; empty ones have 0 rows.

    Attributes:
      source: first row in the array that is read.
      target: first row in the array that is written.
      rows: rows, at most `Tiling.size`.
      kv: the key-value sequence.
    """

    source: jax.Array
    target: jax.Array
    rows: jax.Array
    kv: jax.Array


class Tiling(NamedTuple):
    """All tiles of a set of sequences.

    Attributes:
      tiles: the list; its length is a multiple of `per_step`.
      first: [batch_kv + 1] int32; tiles of key-value sequence s are first[s] to first[s + 1] - 1.
      size: rows of a full tile.
      per_step: tiles that are worked on at once.
    """

    tiles: Tiles
    first: jax.Array
    size: int
    per_step: int


def bounds(
    cu_seqlens: jax.Array, total: int, max_seqlen: int | None
) -> tuple[jax.Array, jax.Array]:
    """First rows and lengths of sequences, whatever the offsets hold, inside [0, total).

    Offsets are clamped to the array and never fall; what a sequence has beyond `max_seqlen` is cut
    off.
    """
    offsets = jax.lax.cummax(jnp.clip(cu_seqlens, 0, total))
    length = offsets[1:] - offsets[:-1]
    if max_seqlen is not None:
        length = jnp.minimum(length, max_seqlen)
    return offsets[:-1], length


def most_tiles(batch: int, total: int, size: int, max_seqlen: int | None) -> int:
    """The most tiles that any offsets can need: every sequence's last one may hold one row."""
    if not (isinstance(batch, int) and isinstance(total, int)):  # symbolic: a bound without min
        whole = total // size if max_seqlen is None else batch * (max_seqlen // size)
        return batch + whole
    served = min(batch, total)
    most = served + (total - served) // size
    return most if max_seqlen is None else min(most, batch * -(-max_seqlen // size))


def tile(sequences: Sequences, batch_kv: int, size: int, per_step: int, most: int) -> Tiling:
    """Cuts `sequences` into tiles of at most `size` rows, of which there are `most` at most."""
    order = jnp.argsort(sequences.kv, stable=True)
    source, target, length, kv = (array[order] for array in sequences)
    tiles_of = -(-length // size)
    end = jnp.cumsum(tiles_of)
    all_steps = -(-most // per_step)
    count = (max(all_steps, 1) if isinstance(most, int) else all_steps) * per_step
    number = jnp.arange(count, dtype=jnp.int32)
    if isinstance(kv.size, int):
        found = jnp.searchsorted(end, number, side="right").astype(jnp.int32)
    else:  # symbolic: the search unrolls the logarithm of a size that it must know
        found = jnp.sum(end[None] <= number[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.clip(found, 0, kv.size - 1)
    start = (number - (end - tiles_of)[sequence]) * size
    rows = jnp.clip(length[sequence] - start, 0, size)
    counts = jnp.zeros_like(kv, shape=batch_kv + 1).at[kv + 1].add(tiles_of)
    tiles = Tiles(source[sequence] + start, target[sequence] + start, rows, kv[sequence])
    return Tiling(tiles, jnp.cumsum(counts), size, per_step)


def steps(tiling: Tiling) -> Tiles:
    """The tiles as [steps, per_step]."""
    tiles: Tiles = jax.tree.map(lambda x: x.reshape(-1, tiling.per_step), tiling.tiles)
    return tiles


def partners(tiles: Tiles, others: Tiling) -> tuple[jax.Array, jax.Array]:
    """First and number of those tiles of `others` that have the key-value sequence of `tiles`.

    An empty tile has none.
    """
    first, end = others.first[tiles.kv], others.first[tiles.kv + 1]
    return first, jnp.where(tiles.rows > 0, end - first, 0)


def partner(others: Tiling, first: jax.Array, number: jax.Array, step: jax.Array) -> Tiles:
    """Partner `step` of every tile, of 0 rows where there are no more; see `partners`."""
    index = jnp.minimum(first + step, others.tiles.rows.size - 1)
    found = jax.tree.map(lambda x: x[index], others.tiles)
    return found._replace(rows=jnp.where(step < number, found.rows, 0))


def exists(tiles: Tiles, size: int) -> jax.Array:
    """Which rows of the tiles there are: [tiles, size] bool."""
    return jnp.arange(size, dtype=jnp.int32)[None] < tiles.rows[:, None]


def gather(array: jax.Array, tiles: Tiles, size: int) -> jax.Array:
    """Rows of `array` [rows, heads, ...] as [tiles, heads, size, ...]; zeros past the end."""
    is_there = exists(tiles, size)
    index = tiles.source[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    rows = jnp.take(array, jnp.where(is_there, index, 0), axis=0, mode="clip")
    shape = (*is_there.shape, *[1] * (array.ndim - 1))
    return jnp.swapaxes(jnp.where(is_there.reshape(shape), rows, 0), 1, 2)


def scatter(array: jax.Array, tiles: Tiles, update: jax.Array) -> jax.Array:
    """`array` [rows, heads, ...] with those rows of [tiles, heads, size, ...] that there are."""
    size = update.shape[2]
    number = jnp.arange(tiles.rows.size * size, dtype=jnp.int32).reshape(-1, size)
    row = tiles.target[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    # Rows past the end are dropped; each has a number of its own, so that all are different.
    row = jnp.where(exists(tiles, size), row, array.shape[0] + number)
    rows = jnp.swapaxes(update, 1, 2).astype(array.dtype)
    return array.at[row].set(rows, mode="drop", unique_indices=True)
