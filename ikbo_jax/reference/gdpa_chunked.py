"""Generalised dot-product attention in XLA, a few tiles at a time, and its gradient.

For the definition see `gdpa`. Sequences are cut into tiles (see `jagged`). A step takes some tiles
of one side, which meet, one after another, the tiles of the other side that they share a key-value
sequence with; so the scores of one step exist at a time, and copies of its rows. How often they
meet is known on the device only: the loops that depend on it have no reverse mode, and the
gradient is written out.

Source: the chunked softmax is that of Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.reference import jagged
from ikbo_jax.reference.activations import SOFTMAX, elementwise
from ikbo_jax.reference.attention import directed, finite_offset, scaled, weights_again
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences, out_shape

#: Scores of one step of the XLA path, at most: 64 MiB in f32, and as much again for the weights.
MAX_SCORES = 2**24
#: Elements of queries, keys or values that one step reads, at most.
MAX_ELEMENTS = 2**24
#: Rows of a tile, at most, of queries and of keys; shorter sequences get shorter tiles.
MAX_Q_ROWS = 256
MAX_KV_ROWS = 512
#: Rows of a tile, at least: the width of a tensor core's tile.
MIN_ROWS = 16


class Blocking(NamedTuple):
    """How the XLA path cuts its work up.

    Attributes:
      q_rows: rows of a tile of queries.
      kv_rows: rows of a tile of keys.
      q_tiles: tiles of queries of one step, where each meets one tile of keys after another.
      kv_tiles: tiles of keys of one step, where each meets one tile of queries after another.
    """

    q_rows: int
    kv_rows: int
    q_tiles: int
    kv_tiles: int


def blocking(arrays: Arrays, settings: Settings) -> Blocking:
    """A blocking that wastes little on short sequences, in bounded memory."""
    (q_len, q_heads, width), (total_kv, kv_heads, _) = arrays.query.shape, arrays.key.shape
    batch, batch_kv = num_sequences(arrays), arrays.cu_seqlens_kv.shape[0] - 1
    mean_q = q_len if settings.broadcast_q else -(-q_len // max(batch, 1))
    mean_kv = -(-total_kv // max(batch_kv, 1))
    q_rows = _tile_rows(mean_q, settings.max_seqlen_q, MAX_Q_ROWS)
    kv_rows = _tile_rows(mean_kv, settings.max_seqlen_kv, MAX_KV_ROWS)
    elements = max(q_rows * q_heads, kv_rows * kv_heads) * width
    most = max(min(MAX_SCORES // (q_heads * q_rows * kv_rows), MAX_ELEMENTS // elements), 1)
    q_tiles = jagged.most_tiles(batch, out_shape(arrays, settings)[0], q_rows, None)
    kv_tiles = jagged.most_tiles(batch_kv, total_kv, kv_rows, None)
    return Blocking(q_rows, kv_rows, *(max(min(most, tiles), 1) for tiles in (q_tiles, kv_tiles)))


def _tile_rows(mean: int, longest: int | None, most: int) -> int:
    rows = min(max(1 << (mean - 1).bit_length(), MIN_ROWS), most)
    return rows if longest is None else min(rows, max(longest, 1))


class _Cut(NamedTuple):
    """All tiles of queries and of keys."""

    q: jagged.Tiling
    kv: jagged.Tiling


def _cut(arrays: Arrays, settings: Settings, blocks: Blocking | None) -> _Cut:
    query, key, _, cu_q, cu_kv, q_to_kv = arrays
    blocks = blocks or blocking(arrays, settings)
    batch, batch_kv = num_sequences(arrays), cu_kv.shape[0] - 1
    number = jnp.zeros_like(cu_kv, shape=batch) + jnp.arange(batch, dtype=jnp.int32)
    kv_of = number if q_to_kv is None else jnp.clip(q_to_kv, 0, batch_kv - 1)
    if settings.broadcast_q:
        length = jnp.full_like(number, query.shape[0])
        sequences = jagged.Sequences(jnp.zeros_like(number), number * length, length, kv_of)
    else:
        assert cu_q is not None
        start, length = jagged.bounds(cu_q, query.shape[0], settings.max_seqlen_q)
        sequences = jagged.Sequences(start, start, length, kv_of)
    longest = query.shape[0] if settings.broadcast_q else settings.max_seqlen_q
    most = jagged.most_tiles(batch, out_shape(arrays, settings)[0], blocks.q_rows, longest)
    q = jagged.tile(sequences, batch_kv, blocks.q_rows, blocks.q_tiles, most)
    start, length = jagged.bounds(cu_kv, key.shape[0], settings.max_seqlen_kv)
    kv_number = jnp.zeros_like(start) + jnp.arange(batch_kv, dtype=jnp.int32)
    most = jagged.most_tiles(batch_kv, key.shape[0], blocks.kv_rows, settings.max_seqlen_kv)
    kv = jagged.tile(
        jagged.Sequences(start, start, length, kv_number),
        batch_kv,
        blocks.kv_rows,
        blocks.kv_tiles,
        most,
    )
    return _Cut(q, kv)


def chunked(
    arrays: Arrays, settings: Settings, blocks: Blocking | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Attends from a few tiles of queries at a time to one tile of keys of each after another.

    Returns:
      out in the query's dtype, for its shape see `out_shape`; and lse [rows of out, N] f32, the
      natural logarithm of the softmax's denominator (0 for other heads), or None if no head has a
      softmax. Sums are f32; weights are rounded to the values' dtype for the product with them. f32
      products follow `jax.default_matmul_precision`.
    """
    cut = _cut(arrays, settings, blocks)
    kv_heads = arrays.key.shape[1]
    shape = out_shape(arrays, settings)
    has_softmax = SOFTMAX in settings.activations
    out = jnp.zeros_like(arrays.query, shape=shape)
    lse = jnp.zeros_like(arrays.query, jnp.float32, shape[:2]) if has_softmax else None

    def step(carry: tuple, tiles: jagged.Tiles) -> tuple[tuple, None]:
        out, lse = carry
        q = _fold(jagged.gather(arrays.query, tiles, cut.q.size), kv_heads)
        first, number = jagged.partners(tiles, cut.kv)

        def meet(index: jax.Array, state: _Softmax) -> _Softmax:
            others = jagged.partner(cut.kv, first, number, index)
            keys, values = (
                jagged.gather(x, others, cut.kv.size) for x in (arrays.key, arrays.value)
            )
            seen = _seen(cut, tiles, others)
            products = _product("gkqh,gksh->gkqs", q, keys)
            weights, state = _weights(products, seen, settings, state)
            products = _product("gkqs,gksh->gkqh", _fold(weights, kv_heads), values)
            return state._replace(out=state.out + _unfold(products, shape[1]))

        zeros = jnp.zeros_like(_unfold(q, shape[1]), jnp.float32)
        start = _Softmax(zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)
        state = jax.lax.fori_loop(0, jnp.max(number), meet, start)
        result, tile_lse = _normalise(state, settings)
        result = result * jnp.float32(settings.output_scale)
        if tile_lse is not None:
            lse = jagged.scatter(lse, tiles, tile_lse)
        return (jagged.scatter(out, tiles, result), lse), None

    (out, lse), _ = jax.lax.scan(step, (out, lse), jagged.steps(cut.q))
    return out, lse


def chunked_vjp(
    arrays: Arrays,
    settings: Settings,
    out: jax.Array | None,
    lse: jax.Array | None,
    d_out: jax.Array,
    blocks: Blocking | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pulls a cotangent of `out` back to query, key and value.

    With S the scores, A = act(S) and dA = d_out · valueᵀ: dS = dA ∘ act'(S), and of a softmax
    A ∘ (dA − rowsum(d_out ∘ out) / output_scale); d_query = scale · output_scale · dS · key,
    d_key = scale · output_scale · dSᵀ · query and d_value = output_scale · Aᵀ · d_out. The scales
    multiply f32 sums, so that small ones cost dS no precision in f16. S is computed again, twice:
    once for the tiles of queries, once for the tiles of keys, each of which meets those of all
    queries that share it. So every sum has one place and one order.

    Args:
      arrays: as for `chunked`.
      settings: likewise.
      out: what `chunked` returned; may be None where no head has a softmax.
      lse: what `chunked` returned.
      d_out: cotangent of out.
      blocks: how to cut the work; None takes `blocking`'s.

    Returns:
      Gradients of query, key and value in their shapes and dtypes, each summed in f32 and rounded
      once.
    """
    cut = _cut(arrays, settings, blocks)
    query, key, value = arrays[:3]
    kv_heads = key.shape[1]
    delta = None
    if out is not None and lse is not None:
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        # A product with an output_scale of 0 has no gradient, whatever delta is.
        delta = delta * jnp.float32(1 / settings.output_scale if settings.output_scale else 0)

    def rows_of(tiles: jagged.Tiles) -> _Rows:
        # What was written is read there.
        written = tiles._replace(source=tiles.target)
        size = cut.q.size
        return _Rows(
            _fold(jagged.gather(query, tiles, size), kv_heads),
            _fold(jagged.gather(d_out, written, size), kv_heads),
            None if lse is None else jagged.gather(lse, written, size),
            None if delta is None else jagged.gather(delta, written, size),
        )

    def keys_of(tiles: jagged.Tiles) -> tuple[jax.Array, jax.Array]:
        return jagged.gather(key, tiles, cut.kv.size), jagged.gather(value, tiles, cut.kv.size)

    def for_queries(d_query: jax.Array, tiles: jagged.Tiles) -> tuple[jax.Array, None]:
        rows = rows_of(tiles)
        first, number = jagged.partners(tiles, cut.kv)

        def meet(index: jax.Array, d_q: jax.Array) -> jax.Array:
            others = jagged.partner(cut.kv, first, number, index)
            keys, values = keys_of(others)
            _, d_scores = _pull_back(rows, keys, values, _seen(cut, tiles, others), settings)
            return d_q + _product("gkqs,gksh->gkqh", d_scores, keys)

        d_q = jax.lax.fori_loop(0, jnp.max(number), meet, jnp.zeros_like(rows.query, jnp.float32))
        d_q = _unfold(d_q, query.shape[1]) * jnp.float32(settings.scale * settings.output_scale)
        return jagged.scatter(d_query, tiles, d_q), None

    def for_keys(carry: tuple, tiles: jagged.Tiles) -> tuple[tuple, None]:
        d_key, d_value = carry
        keys, values = keys_of(tiles)
        first, number = jagged.partners(tiles, cut.q)

        def meet(index: jax.Array, sums: tuple) -> tuple:
            others = jagged.partner(cut.q, first, number, index)
            rows = rows_of(others)
            weights, d_scores = _pull_back(rows, keys, values, _seen(cut, others, tiles), settings)
            d_k = _product("gkqs,gkqh->gksh", d_scores, rows.query)
            d_v = _product("gkqs,gkqh->gksh", weights, rows.d_out)
            return sums[0] + d_k, sums[1] + d_v

        zeros = jnp.zeros_like(keys, jnp.float32)
        d_k, d_v = jax.lax.fori_loop(0, jnp.max(number), meet, (zeros, zeros))
        d_k = d_k * jnp.float32(settings.scale * settings.output_scale)
        d_v = d_v * jnp.float32(settings.output_scale)
        return (jagged.scatter(d_key, tiles, d_k), jagged.scatter(d_value, tiles, d_v)), None

    shape = out_shape(arrays, settings)
    d_dtype = jnp.float32 if settings.broadcast_q else query.dtype
    zeros = jnp.zeros_like(query, d_dtype, shape)
    d_query, _ = jax.lax.scan(for_queries, zeros, jagged.steps(cut.q))
    if settings.broadcast_q:
        d_query = jnp.sum(d_query.reshape(-1, *query.shape), axis=0).astype(query.dtype)
    start = (jnp.zeros_like(key), jnp.zeros_like(value))
    (d_key, d_value), _ = jax.lax.scan(for_keys, start, jagged.steps(cut.kv))
    return d_query, d_key, d_value


class _Softmax(NamedTuple):
    """Sums of one step: [tiles, N, rows] and, `out`, [tiles, N, rows, H]; f32.

    Heads without a softmax use `out` alone.
    """

    row_max: jax.Array
    total: jax.Array
    out: jax.Array


class _Rows(NamedTuple):
    """What the gradient needs of tiles of queries.

    [tiles, K, rows · N / K, H], and [tiles, N, rows] of lse and delta.
    """

    query: jax.Array
    d_out: jax.Array
    lse: jax.Array | None
    delta: jax.Array | None


def _fold(array: jax.Array, kv_heads: int) -> jax.Array:
    """[tiles, N, rows, X] as [tiles, K, rows · N / K, X]: what meets one key head together."""
    return array.reshape(array.shape[0], kv_heads, -1, array.shape[-1])


def _unfold(array: jax.Array, q_heads: int) -> jax.Array:
    """The inverse of `_fold`."""
    return array.reshape(array.shape[0], q_heads, -1, array.shape[-1])


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum in f32 of `a`, rounded to the dtype of `b`, and `b`."""
    return jnp.einsum(axes, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _seen(cut: _Cut, q: jagged.Tiles, kv: jagged.Tiles) -> jax.Array:
    """Which pairs of rows there are: [tiles, 1, q_rows, kv_rows] bool."""
    is_query, is_key = jagged.exists(q, cut.q.size), jagged.exists(kv, cut.kv.size)
    return is_query[:, None, :, None] & is_key[:, None, None, :]


def _runs(settings: Settings) -> list[tuple[str, slice]]:
    """Neighbouring heads of one activation, so that each run is computed at once."""
    runs, start = [], 0
    for name, heads in itertools.groupby(settings.activations):
        end = start + len(list(heads))
        runs.append((name, slice(start, end)))
        start = end
    return runs


def _join(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _is_softmax(settings: Settings) -> jax.Array:
    """[1, N, 1] bool."""
    return jnp.asarray([name == SOFTMAX for name in settings.activations])[None, :, None]


def _weights(
    folded_products: jax.Array, seen: jax.Array, settings: Settings, state: _Softmax
) -> tuple[jax.Array, _Softmax]:
    """Weights [tiles, N, rows, keys] of one step, and the sums before it, relative to them."""
    products = _unfold(folded_products, len(settings.activations))
    scores = products * jnp.float32(settings.scale)
    powers = scores
    if SOFTMAX in settings.activations:
        masked = jnp.where(seen, directed(products, settings.scale), -jnp.inf)
        row_max = jnp.maximum(state.row_max, jnp.max(masked, axis=-1))
        offset = finite_offset(row_max)
        powers = jnp.exp(scaled(masked - offset[..., None], settings.scale))
        shrink = jnp.exp(scaled(state.row_max - offset, settings.scale))
        total = state.total * shrink + jnp.sum(powers, axis=-1)
        shrink = jnp.where(_is_softmax(settings), shrink, 1.0)
        state = _Softmax(row_max, total, state.out * shrink[..., None])
    parts = [
        powers[:, heads]
        if name == SOFTMAX
        else elementwise(name, settings.approx).value(scores[:, heads])
        for name, heads in _runs(settings)
    ]
    return jnp.where(seen, _join(parts), 0.0), state


def _normalise(state: _Softmax, settings: Settings) -> tuple[jax.Array, jax.Array | None]:
    """The result and lse, if there is a softmax, from the sums over all keys."""
    if SOFTMAX not in settings.activations:
        return state.out, None
    is_softmax = _is_softmax(settings)
    is_empty = state.total == 0
    total = jnp.where(is_softmax & ~is_empty, state.total, 1.0)
    lse = scaled(state.row_max, settings.scale) + jnp.log(total)
    lse = jnp.where(is_empty, -jnp.inf, lse)
    out = jnp.where((is_softmax & is_empty)[..., None], 0.0, state.out / total[..., None])
    return out, jnp.where(is_softmax, lse, 0.0)


def _pull_back(
    rows: _Rows, keys: jax.Array, values: jax.Array, seen: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Weights, and gradients of the scores over scale and output_scale: [tiles, K, rows, keys]."""
    q_heads, kv_heads = len(settings.activations), keys.shape[1]
    products = _unfold(_product("gkqh,gksh->gkqs", rows.query, keys), q_heads)
    scores = products * jnp.float32(settings.scale)
    d_weights = _unfold(_product("gkqh,gksh->gkqs", rows.d_out, values), q_heads)
    weights, d_scores = [], []
    for name, heads in _runs(settings):
        s, d_w = scores[:, heads], d_weights[:, heads]
        if name == SOFTMAX:
            assert rows.lse is not None
            assert rows.delta is not None
            masked = jnp.where(seen, directed(products[:, heads], settings.scale), -jnp.inf)
            power = weights_again(masked, rows.lse[:, heads], settings.scale)
            weights.append(power)
            d_scores.append(power * (d_w - rows.delta[:, heads][..., None]))
        else:
            activation = elementwise(name, settings.approx)
            weights.append(activation.value(s))
            d_scores.append(activation.slope(s) * d_w)
    results = (jnp.where(seen, _join(parts), 0.0) for parts in (weights, d_scores))
    folded = tuple(_fold(x, kv_heads) for x in results)
    return folded[0], folded[1]
