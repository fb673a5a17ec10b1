"""The gradient of `gdpa` by XLA, a few tiles at a time."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.reference import gdpa_chunked, jagged
from ikbo_jax.reference.activations import SOFTMAX, elementwise
from ikbo_jax.reference.attention import Softmax, directed, soft_cap_slope, soft_capped
from ikbo_jax.reference.gdpa import Arrays, Settings, out_shape


def chunked_vjp(
    arrays: Arrays,
    settings: Settings,
    d_out: jax.Array,
    blocks: gdpa_chunked.Blocking | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pulls a cotangent of `out` back to query, key and value.

    With S the scores, A = act(S) and dA = d_out · valueᵀ: dS = dA ∘ act'(S), and of a softmax
    A ∘ (dA − rowsum(A ∘ dA)), both times the slope of a cap; with scales a and b of scores and
    output, d_query = a · b · dS · key, d_key = a · b · dSᵀ · query and d_value = b · Aᵀ · d_out.
    The scales multiply f32 sums, so small scales cost dS no precision in f16. S is recomputed
    twice: once in steps of tiles of queries, and once in steps of tiles of keys, each with all
    tiles of queries that share it. So each sum is computed in one place and in one order. The steps
    of tiles of queries compute S of a softmax before, too, for the sums over its keys.

    Args (the others are as for `chunked`):
      d_out: cotangent of out.
      dtype: dtype of the gradients of key and value; None means the inputs'.

    Returns:
      Gradients of query, key and value in their shapes and dtypes, each summed in f32 and rounded
      once.
    """
    arrays, settings, order = gdpa_chunked.by_keys(arrays, settings)
    if order is not None:
        d_out = d_out[order]
    tilings = gdpa_chunked.make_tilings(arrays, settings, blocks)
    query, key, value = arrays[:3]
    if arrays.q_to_kv is not None:  # several sequences of queries may share a sequence of keys
        tilings = tilings._replace(most_q=None)
    steps = _GradientSteps(arrays, settings, d_out, tilings)
    shape = out_shape(arrays, settings)
    d_dtype = jnp.float32 if settings.broadcast_q else query.dtype
    carry: Any = (jnp.zeros_like(query, d_dtype, shape), None)
    if steps.has_softmax:
        carry = (carry[0], jnp.zeros_like(query, jnp.float32, (*shape[:2], 3)))
    (d_query, row_sums), _ = jax.lax.scan(steps.for_queries, carry, jagged.steps(tilings.q))
    if settings.broadcast_q:
        d_query = jnp.sum(d_query.reshape(-1, *query.shape), axis=0).astype(query.dtype)
    for_keys = functools.partial(steps.for_keys, row_sums)
    start = (jnp.zeros_like(key, dtype), jnp.zeros_like(value, dtype))
    (d_key, d_value), _ = jax.lax.scan(for_keys, start, jagged.steps(tilings.kv))
    if order is not None:
        d_query = d_query[jagged.inverse(order)]
    return d_query, d_key, d_value


class _GradientSteps(NamedTuple):
    """The bodies of the loops in `chunked_vjp`, as methods, and the arrays that they read."""

    arrays: Arrays
    settings: Settings
    d_out: jax.Array
    tilings: gdpa_chunked.Tilings

    @property
    def has_softmax(self) -> bool:
        return SOFTMAX in self.settings.activations

    def rows_of(self, tiles: jagged.Tiles, sums: jax.Array | None) -> _Rows:
        """Gathers tiles of queries with their cotangents, and a softmax's sums, if any."""
        # Cotangents and sums are read where the results were written.
        written = tiles._replace(source=tiles.target)
        size, kv_heads = self.tilings.q.size, self.arrays.key.shape[1]
        found = None
        if sums is not None:
            sums = jagged.gather(sums, written, size)
            found = Softmax(sums[..., 0], sums[..., 1], sums[..., 2:])
        return _Rows(
            gdpa_chunked.fold(jagged.gather(self.arrays.query, tiles, size), kv_heads),
            gdpa_chunked.fold(jagged.gather(self.d_out, written, size), kv_heads),
            found,
        )

    def keys_of(self, tiles: jagged.Tiles) -> tuple[jax.Array, jax.Array]:
        """Gathers tiles of keys and values."""
        size = self.tilings.kv.size
        _, key, value = self.arrays[:3]
        return jagged.gather(key, tiles, size), jagged.gather(value, tiles, size)

    def for_queries(self, carry: Any, tiles: jagged.Tiles) -> tuple[tuple, None]:
        """Adds to d_query for some tiles of queries; stores a softmax's sums over keys."""
        settings, tilings, heads = self.settings, self.tilings, self.arrays.query.shape[1]
        d_query, row_sums = carry
        rows = self.rows_of(tiles, None)
        first, number = gdpa_chunked.key_tiles(tilings, tiles)

        def keys_at(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            kv_tiles = jagged.tile_at(tilings.kv, first, number, index)
            return *self.keys_of(kv_tiles), gdpa_chunked.pair_mask(tilings, tiles, kv_tiles)

        def add_sums(index: jax.Array, state: Softmax) -> Softmax:
            keys, values, mask = keys_at(index)
            products, d_weights = _products(rows, keys, values, settings)
            products, scale = soft_capped(products, settings.scale, settings.logit_cap)
            masked = jnp.where(mask, directed(products, scale), -jnp.inf)
            return state.plus_gradients(masked, d_weights, scale)

        if self.has_softmax:
            start = Softmax.of_none(gdpa_chunked.unfold(rows.query, heads)[..., :1])
            state = gdpa_chunked.for_tiles(number, tilings.most_kv, add_sums, start)
            rows = rows._replace(softmax=state)
            sums = jnp.stack((*state[:2], state.weighted[..., 0]), axis=-1)
            row_sums = jagged.scatter(row_sums, tiles, sums)

        def add_tile(index: jax.Array, d_q: jax.Array) -> jax.Array:
            keys, values, mask = keys_at(index)
            _, d_scores = _pull_back(rows, keys, values, mask, settings)
            return d_q + gdpa_chunked.product("gkqs,gksh->gkqh", d_scores, keys)

        zeros = jnp.zeros_like(rows.query, jnp.float32)
        d_q = gdpa_chunked.for_tiles(number, tilings.most_kv, add_tile, zeros)
        d_q = gdpa_chunked.unfold(d_q, heads) * jnp.float32(settings.scale * settings.output_scale)
        return (jagged.scatter(d_query, tiles, d_q), row_sums), None

    def for_keys(
        self, row_sums: jax.Array | None, carry: tuple, tiles: jagged.Tiles
    ) -> tuple[tuple, None]:
        """Adds to the gradients of keys and values of some tiles of keys."""
        settings, tilings = self.settings, self.tilings
        d_key, d_value = carry
        keys, values = self.keys_of(tiles)
        first, number = gdpa_chunked.query_tiles(tilings, tiles)

        def add_tile(index: jax.Array, sums: tuple) -> tuple:
            q_tiles = jagged.tile_at(tilings.q, first, number, index)
            rows = self.rows_of(q_tiles, row_sums)
            mask = gdpa_chunked.pair_mask(tilings, q_tiles, tiles)
            weights, d_scores = _pull_back(rows, keys, values, mask, settings)
            d_k = gdpa_chunked.product("gkqs,gkqh->gksh", d_scores, rows.query)
            d_v = gdpa_chunked.product("gkqs,gkqh->gksh", weights, rows.d_out)
            return sums[0] + d_k, sums[1] + d_v

        zeros = jnp.zeros_like(keys, jnp.float32)
        d_k, d_v = gdpa_chunked.for_tiles(number, tilings.most_q, add_tile, (zeros, zeros))
        d_k = d_k * jnp.float32(settings.scale * settings.output_scale)
        d_v = d_v * jnp.float32(settings.output_scale)
        return (jagged.scatter(d_key, tiles, d_k), jagged.scatter(d_value, tiles, d_v)), None


class _Rows(NamedTuple):
    """Rows of queries and of d_out [tiles, K, rows · N / K, H], with sums [tiles, N, rows]."""

    query: jax.Array
    d_out: jax.Array
    softmax: Softmax | None


def _products(
    rows: _Rows, keys: jax.Array, values: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Multiplies queries and keys, and d_out and values: [tiles, N, rows, keys] each."""

    def products(rows: jax.Array, keys: jax.Array) -> jax.Array:
        return gdpa_chunked.unfold(
            gdpa_chunked.product("gkqh,gksh->gkqs", rows, keys), len(settings.activations)
        )

    return products(rows.query, keys), products(rows.d_out, values)


def _pull_back(
    rows: _Rows, keys: jax.Array, values: jax.Array, mask: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Computes weights, and gradients of scores divided by both scales, folded."""
    products, d_weights = _products(rows, keys, values, settings)
    products, scale = soft_capped(products, settings.scale, settings.logit_cap)
    scores = products * jnp.float32(scale)
    weights, d_scores = [], []
    for name, heads in gdpa_chunked.heads_by_activation(settings):
        s, d_w = scores[:, heads], d_weights[:, heads]
        if name == SOFTMAX:
            assert rows.softmax is not None
            masked = jnp.where(mask, directed(products[:, heads], scale), -jnp.inf)
            state = Softmax(*(x[:, heads] for x in rows.softmax))
            weight, d_score = state.pull_back(masked, d_w, scale)
            weights.append(weight)
            d_scores.append(d_score)
        else:
            activation = elementwise(name, settings.approx)
            weights.append(activation.value(s))
            d_scores.append(activation.slope(s) * d_w)
    slope = soft_cap_slope(products, settings.logit_cap)
    results = gdpa_chunked.join(weights), gdpa_chunked.join(d_scores) * slope
    folded = tuple(gdpa_chunked.fold(jnp.where(mask, x, 0.0), keys.shape[1]) for x in results)
    return folded[0], folded[1]
