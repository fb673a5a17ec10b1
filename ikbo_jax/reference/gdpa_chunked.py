"""Generalised dot-product attention by XLA, a few tiles at a time.

For the definition see `gdpa`. Sequences are cut into tiles (see `jagged`). A step takes a few tiles
of queries (or of keys), and loops over the tiles of keys (or of queries) that share their key-value
sequence; so scores and copies of rows exist for one step at a time. Rows of short sequences of
queries that see the same keys share tiles. Only the device knows the lengths of these loops, so
they have no reverse mode, and `gdpa_chunked_vjp` is written by hand.

Source: the chunked softmax follows Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.reference import jagged
from ikbo_jax.reference.activations import SOFTMAX, elementwise
from ikbo_jax.reference.attention import Softmax, directed, normalise, scaled, soft_capped
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences, out_shape

#: Largest number of scores of one step of the XLA path: 64 MiB in f32, and as much for weights.
MAX_SCORES = 2**24
#: Largest number of elements of queries, keys or values that one step reads.
MAX_ELEMENTS = 2**24
#: Largest tiles of queries and of keys, rows; shorter sequences get shorter tiles.
MAX_Q_ROWS = 256
MAX_KV_ROWS = 512
#: Smallest tiles, rows: the width of a tensor core's tile.
MIN_ROWS = 16
#: Largest tiles, rows, and largest number of tiles of a step, if sizes are unknown while tracing.
UNKNOWN_ROWS, UNKNOWN_TILES = 64, 16
#: Largest number of tiles of one sequence for which the loop over them is unrolled.
MAX_UNROLLED = 4


class Blocking(NamedTuple):
    """Sizes of the XLA path's steps: rows of tiles of queries and of keys, and tiles of a step.

    A step has `q_tiles` and loops over tiles of keys, or `kv_tiles` and loops over tiles of
    queries.
    """

    q_rows: int
    kv_rows: int
    q_tiles: int
    kv_tiles: int


def blocking(arrays: Arrays, settings: Settings) -> Blocking:
    """Chooses sizes of steps that bound memory and waste little on short sequences."""
    (q_len, q_heads, width), (total_kv, kv_heads, _) = arrays.query.shape, arrays.key.shape
    batch, batch_kv = num_sequences(arrays), arrays.cu_seqlens_kv.shape[0] - 1
    mean_q = q_len if settings.broadcast_q else _mean(q_len, batch)
    mean_kv = _mean(total_kv, batch_kv)
    q_rows = _tile_rows(mean_q, settings.max_seqlen_q, MAX_Q_ROWS)
    kv_rows = _tile_rows(mean_kv, settings.max_seqlen_kv, MAX_KV_ROWS)
    elements = max(q_rows * q_heads, kv_rows * kv_heads) * width
    most = max(min(MAX_SCORES // (q_heads * q_rows * kv_rows), MAX_ELEMENTS // elements), 1)
    longest_q, longest_kv = _longest(arrays, settings)
    q_tiles = jagged.most_tiles(batch, out_shape(arrays, settings)[0], q_rows, longest_q)
    kv_tiles = jagged.most_tiles(batch_kv, total_kv, kv_rows, longest_kv)
    per_step = (
        max(min(most, tiles if isinstance(tiles, int) else UNKNOWN_TILES), 1)
        for tiles in (q_tiles, kv_tiles)
    )
    return Blocking(q_rows, kv_rows, *per_step)


def _longest(arrays: Arrays, settings: Settings) -> tuple[int | None, int | None]:
    """Bounds the lengths of query and of key sequences; None where tracing knows no bound."""
    q = arrays.query.shape[0] if settings.broadcast_q else settings.max_seqlen_q
    return q, settings.max_seqlen_kv


def _mean(total: int, sequences: int) -> Any:
    """Rounds up the mean rows of a sequence; None if a size is unknown while tracing."""
    is_known = isinstance(total, int) and isinstance(sequences, int)
    return -(-total // max(sequences, 1)) if is_known else None


def _tile_rows(mean: int, longest: int | None, most: int) -> int:
    rows = UNKNOWN_ROWS
    if isinstance(mean, int):
        rows = min(max(1 << (mean - 1).bit_length(), MIN_ROWS), most)
    return rows if longest is None else min(rows, max(longest, 1))


class Tilings(NamedTuple):
    """All tiles of queries and of keys.

    Attributes:
      q: the tiles of queries.
      kv: the tiles of keys.
      most_q: the largest number of tiles of one query sequence; None if unknown while tracing.
      most_kv: the largest number of tiles of one key sequence; None if unknown while tracing.
      visible: the keys that the queries see; None: all keys of their sequences.
    """

    q: jagged.Tiling
    kv: jagged.Tiling
    most_q: int | None
    most_kv: int | None
    visible: Visible | None = None


def make_tilings(arrays: Arrays, settings: Settings, blocks: Blocking | None) -> Tilings:
    """Cuts all sequences into tiles."""
    query, key, _, cu_q, cu_kv, q_to_kv, intervals, *_ = arrays
    blocks = blocks or blocking(arrays, settings)
    batch, batch_kv = num_sequences(arrays), cu_kv.shape[0] - 1
    kv_of = None if q_to_kv is None else jnp.clip(q_to_kv, 0, batch_kv - 1)
    if settings.broadcast_q:
        number = jnp.zeros_like(cu_kv, shape=batch) + jnp.arange(batch, dtype=jnp.int32)
        length = jnp.full_like(number, query.shape[0])
        sequences = jagged.Sequences(jnp.zeros_like(number), number * length, length, kv_of)
    else:
        assert cu_q is not None
        start, length = jagged.bounds(cu_q, query.shape[0], settings.max_seqlen_q)
        sequences = jagged.Sequences(start, start, length, kv_of)
    longest = _longest(arrays, settings)
    most = jagged.most_tiles(batch, out_shape(arrays, settings)[0], blocks.q_rows, longest[0])
    q = jagged.tile(sequences, batch_kv, blocks.q_rows, blocks.q_tiles, most)
    start, length = jagged.bounds(cu_kv, key.shape[0], settings.max_seqlen_kv)
    most = jagged.most_tiles(batch_kv, key.shape[0], blocks.kv_rows, longest[1])
    sequences = jagged.Sequences(start, start, length, None)
    kv = jagged.tile(sequences, batch_kv, blocks.kv_rows, blocks.kv_tiles, most)
    most_q, most_kv = (
        x if x is None else -(-x // t.size) for x, t in zip(longest, (q, kv), strict=True)
    )
    visible = None if intervals is None else Visible.of(intervals, q)
    return Tilings(q, kv, most_q, most_kv, visible)


def chunked(
    arrays: Arrays, settings: Settings, blocks: Blocking | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Attends with a few tiles of queries at a time, each to one tile of its keys after another.

    `blocks` are the sizes of the steps; None means the result of `blocking`.

    Returns:
      out in the query's dtype (for its shape see `out_shape`); and lse [rows of out, N] f32, the
      natural logarithm of the softmax's denominator (0 for other heads), or None if no head has a
      softmax. Sums are f32; weights are rounded to the values' dtype for the product with them. f32
      products follow `jax.default_matmul_precision`.
    """
    arrays, settings, order = by_keys(arrays, settings)
    tilings = make_tilings(arrays, settings, blocks)
    kv_heads = arrays.key.shape[1]
    shape = out_shape(arrays, settings)
    has_softmax = SOFTMAX in settings.activations
    out = jnp.zeros_like(arrays.query, shape=shape)
    lse = jnp.zeros_like(arrays.query, jnp.float32, shape[:2]) if has_softmax else None

    def step(carry: tuple, tiles: jagged.Tiles) -> tuple[tuple, None]:
        out, lse = carry
        q = fold(jagged.gather(arrays.query, tiles, tilings.q.size), kv_heads)
        first, number = key_tiles(tilings, tiles)

        def add_tile(index: jax.Array, state: Softmax) -> Softmax:
            kv_tiles = jagged.tile_at(tilings.kv, first, number, index)
            keys, values = (
                jagged.gather(x, kv_tiles, tilings.kv.size) for x in (arrays.key, arrays.value)
            )
            mask = pair_mask(tilings, tiles, kv_tiles)
            products = product("gkqh,gksh->gkqs", q, keys)
            weights, state = _weights(products, mask, settings, state)
            products = product("gkqs,gksh->gkqh", fold(weights, kv_heads), values)
            return state._replace(weighted=state.weighted + unfold(products, shape[1]))

        start = Softmax.of_none(unfold(q, shape[1]))
        state = for_tiles(number, tilings.most_kv, add_tile, start)
        result, tile_lse = _normalise(state, settings)
        result = result * jnp.float32(settings.output_scale)
        if tile_lse is not None:
            lse = jagged.scatter(lse, tiles, tile_lse)
        return (jagged.scatter(out, tiles, result), lse), None

    (out, lse), _ = jax.lax.scan(step, (out, lse), jagged.steps(tilings.q))
    if order is None:
        return out, lse
    place = jagged.inverse(order)
    return out[place], None if lse is None else lse[place]


def by_keys(arrays: Arrays, settings: Settings) -> tuple[Arrays, Settings, jax.Array | None]:
    """Joins short sequences of queries that see the same keys: sorts rows by these keys.

    Candidates have one row each. Their tiles would have one row, and each would copy a user's keys.

    Returns:
      The arguments with one sequence of queries for each sequence of keys, and the numbers of the
      rows in their new order; or the given ones and None.
    """
    query, batch, batch_kv = arrays.query, num_sequences(arrays), arrays.cu_seqlens_kv.shape[0] - 1
    rows, joined_rows = (_mean(query.shape[0], n) for n in (batch, batch_kv))
    is_known = isinstance(rows, int) and isinstance(joined_rows, int)
    is_short = is_known and rows < min(MIN_ROWS, joined_rows)
    if arrays.q_to_kv is None or arrays.cu_seqlens_q is None or not is_short:
        return arrays, settings, None
    start, length = jagged.bounds(arrays.cu_seqlens_q, query.shape[0], settings.max_seqlen_q)
    sequence, place = jagged.places(start, length, query.shape[0])
    # Rows of no sequence are sorted behind all others.
    kv = jnp.where(place < 0, batch_kv, jnp.clip(arrays.q_to_kv[sequence], 0, batch_kv - 1))
    order = jnp.argsort(kv, stable=True)
    joined = arrays._replace(
        query=query[order],
        cu_seqlens_q=jagged.search_right(kv[order], jnp.arange(-1, batch_kv, dtype=jnp.int32)),
        q_to_kv=None,
        intervals=None if arrays.intervals is None else arrays.intervals[order],
    )
    return joined, settings._replace(max_seqlen_q=None), order


def for_tiles(
    number: jax.Array, most: int | None, body: Callable[[Any, Any], Any], start: Any
) -> Any:
    """Returns the last state of `body(index, state)`, for indices below the largest `number`.

    `most` is a bound of `number` that is known while tracing, or None. With a small one the loop is
    unrolled: a GPU's host waits for the device before every turn of a loop whose length only the
    device knows. `body` must not change the state where index is not below `number`.
    """
    if most is None or most > MAX_UNROLLED:
        return jax.lax.fori_loop(0, jnp.max(number), body, start)
    state = start
    for index in range(most):
        state = body(jnp.int32(index), state)
    return state


def fold(array: jax.Array, kv_heads: int) -> jax.Array:
    """Joins query heads with one key head: [tiles, N, rows, X] to [tiles, K, rows · N / K, X]."""
    return array.reshape(array.shape[0], kv_heads, -1, array.shape[-1])


def unfold(array: jax.Array, q_heads: int) -> jax.Array:
    """Inverts `fold`."""
    return array.reshape(array.shape[0], q_heads, -1, array.shape[-1])


def product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Casts `a` to the dtype of `b`, then computes einsum(a, b) in f32."""
    return jnp.einsum(axes, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def key_tiles(tilings: Tilings, q: jagged.Tiles) -> tuple[jax.Array, jax.Array]:
    """Finds (first, number) of the tiles of keys that the rows of each tile of queries may see."""
    if tilings.visible is not None:
        return tilings.visible.key_tiles(q, tilings.q, tilings.kv)
    return jagged.tile_range(q, tilings.kv)


def query_tiles(tilings: Tilings, kv: jagged.Tiles) -> tuple[jax.Array, jax.Array]:
    """Finds (first, number) of the tiles of queries whose rows may see each tile of keys."""
    if tilings.visible is not None:
        return tilings.visible.query_tiles(kv, tilings.q)
    return jagged.tile_range(kv, tilings.q)


def pair_mask(tilings: Tilings, q: jagged.Tiles, kv: jagged.Tiles) -> jax.Array:
    """Makes the mask of visible pairs of existing rows: [tiles, 1, q_rows, kv_rows] bool."""
    is_query, is_key = jagged.row_mask(q, tilings.q.size), jagged.row_mask(kv, tilings.kv.size)
    mask = is_query[:, None, :, None] & is_key[:, None, None, :]
    if tilings.visible is not None:
        mask &= tilings.visible.mask(q, kv, tilings.q.size, tilings.kv.size)
    return mask


def heads_by_activation(settings: Settings) -> list[tuple[str, slice]]:
    """Groups consecutive heads with the same activation, which are computed together."""
    groups, start = [], 0
    for name, heads in itertools.groupby(settings.activations):
        end = start + len(list(heads))
        groups.append((name, slice(start, end)))
        start = end
    return groups


def join(parts: list[jax.Array]) -> jax.Array:
    """Concatenates the parts of `heads_by_activation`."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _is_softmax(settings: Settings) -> jax.Array:
    """Makes a mask of the heads with a softmax: [1, N, 1] bool."""
    return jnp.asarray([name == SOFTMAX for name in settings.activations])[None, :, None]


def _weights(
    folded_products: jax.Array, mask: jax.Array, settings: Settings, state: Softmax
) -> tuple[jax.Array, Softmax]:
    """Computes one step's weights [tiles, N, rows, keys]; rescales the sums to its maxima."""
    products = unfold(folded_products, len(settings.activations))
    products, scale = soft_capped(products, settings.scale, settings.logit_cap)
    scores = products * jnp.float32(scale)
    exponentials = scores
    if SOFTMAX in settings.activations:
        masked = jnp.where(mask, directed(products, scale), -jnp.inf)
        found, exponentials = state.plus(masked, scale)
        is_softmax = _is_softmax(settings)[..., None]
        state = found._replace(weighted=jnp.where(is_softmax, found.weighted, state.weighted))
    parts = [
        exponentials[:, heads]
        if name == SOFTMAX
        else elementwise(name, settings.approx).value(scores[:, heads])
        for name, heads in heads_by_activation(settings)
    ]
    return jnp.where(mask, join(parts), 0.0), state


def _normalise(state: Softmax, settings: Settings) -> tuple[jax.Array, jax.Array | None]:
    """Computes the result, and lse if a head has a softmax, from the sums over all keys."""
    if SOFTMAX not in settings.activations:
        return state.weighted, None
    is_softmax = _is_softmax(settings)
    scale = 1.0 if settings.logit_cap else settings.scale
    out, lse = normalise(state.weighted, state.total, scaled(state.row_max, scale))
    return jnp.where(is_softmax[..., None], out, state.weighted), jnp.where(is_softmax, lse, 0.0)


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
