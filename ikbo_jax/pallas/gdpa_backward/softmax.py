"""Weights and gradients of scores of a softmax, from the forward pass's lse.

    P = exp(scale * S - lse),  dS = P * (dA - delta),  delta = sum(d_out * out) / output_scale

Statistics of queries arrive with their block in the kernel for keys, along the columns of scores;
in the kernel for queries with the tile, along the rows.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.cap import capped, through_cap
from ikbo_jax.pallas.gdpa_backward.context import BackwardContext
from ikbo_jax.pallas.hopper import row_products, stores
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.hopper import TILE_ROWS, WGMMA_M
from ikbo_jax.reference.attention import weight_exponents

LSE, DELTA = range(2)
#: Rows of no query at the end of the statistics: a tile that begins with any query ends inside.
ABSENT_ROWS = TILE_ROWS
#: (lse, delta) of a warpgroup's 64 queries in the kernel for queries; None in the one for keys.
RowStatistics = tuple[jax.Array, jax.Array] | None


def receive_rows(ctx: BackwardContext) -> RowStatistics:
    """Loads the statistics of a tile's queries, whose copy has arrived, and frees their memory."""
    if not ctx.shape.has_softmax or ctx.shape.is_for_keys:
        return None
    first = ctx.consumer * WGMMA_M
    vectors = (ctx.statistics(0, number).at[pl.ds(first, WGMMA_M)] for number in (LSE, DELTA))
    lse, delta = (_load(vector, stores.ROW_LAYOUT) for vector in vectors)
    plgpu.commit_smem()  # TMA will write where these threads have read
    plgpu.barrier_arrive(ctx.shared.statistics_free.at[0])
    return lse, delta


def weights_and_slopes(
    ctx: BackwardContext, rows: RowStatistics, scores: jax.Array, begin: int, step: Any
) -> tuple[jax.Array, jax.Array]:
    """Weights of the raw scores of a block's columns from `begin` on, at most 1; and slopes.

    Slopes are weights times the slope of the cap: without a cap, the same array.
    """
    spec = ctx.shape.activation
    scores = capped(spec.cap, scores)
    factor = jnp.float32(spec.scale * math.log2(math.e))
    exponents = scores * factor - _statistic(ctx, rows, LSE, scores.shape, begin, step)
    weights = jnp.exp2(jnp.minimum(exponents, jnp.float32(0)))
    return weights, through_cap(spec.cap, scores, weights)


def d_scores(
    ctx: BackwardContext, rows: RowStatistics, d_weights: jax.Array, slope: jax.Array, step: Any
) -> jax.Array:
    """Gradients of a block's scores; in the kernel for queries, 0 for keys past the end.

    Zeroed keys have weights there, and 0 times an infinite gradient is NaN.
    """
    found = slope * (d_weights - _statistic(ctx, rows, DELTA, slope.shape, 0, step))
    if ctx.shape.is_for_keys:
        return found
    streamed = ctx.shared.streamed
    return Visible(found.shape[1], streamed.words[streamed.slot(step), 0]).keep(found)


def _statistic(
    ctx: BackwardContext,
    rows: RowStatistics,
    number: int,
    shape: tuple[int, ...],
    begin: int,
    step: Any,
) -> jax.Array:
    """A statistic of every score's query."""
    if rows is not None:
        return lax.broadcast_in_dim(rows[number], shape, (0,))
    vector = ctx.statistics(ctx.shared.streamed.slot(step), number).at[pl.ds(begin, shape[1])]
    return lax.broadcast_in_dim(_load(vector, plgpu.Layout.WGMMA.reduce(0)), shape, (1,))


def _load(vector: Any, layout: Any) -> jax.Array:
    """Loads f32 numbers, of which `vector` may hold the bits."""
    loaded: jax.Array = plgpu.load(vector, layout=layout)
    if loaded.dtype == jnp.float32:
        return loaded
    return lax.bitcast_convert_type(loaded, jnp.float32)


def statistics_of(
    blocks: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    output_scale: float,
    block: int,
) -> jax.Array:
    """Computes what a softmax's gradient needs of every query: lse in powers of 2, and delta.

    `blocks`, of `lists.Works`, have the first query of each block, and the number of queries from
    there on, which may exceed `block`. `out` and `d_out` are [rows, N, H], `lse` [rows, N] f32.

    Returns:
      [N, 2, statistics rows] int32, the bits of f32. A sequence begins with a whole block, so TMA
      copies begin at whole 64 bytes (`attention_backward.rows.with_statistics` says why). Rows of
      no query have an infinite lse, hence weights 0, and a delta of 0.
    """
    # With an output_scale of 0 all gradients are 0, for every delta.
    delta = row_products.sums(d_out, out) * jnp.float32(1 / output_scale if output_scale else 0)
    delta = jnp.where(lse == -jnp.inf, 0.0, delta)
    both = jnp.stack((weight_exponents(lse), delta))
    position = jnp.arange(block, dtype=jnp.int32)[None]
    is_query = (position < blocks[:, 1:2]).reshape(-1)
    row = jnp.where(is_query, (position + blocks[:, :1]).reshape(-1), 0)
    absent = jnp.asarray([jnp.inf, 0.0], jnp.float32)[:, None, None]
    values = jnp.where(is_query[None, :, None], jnp.take(both, row, axis=1, mode="clip"), absent)
    padding = jnp.broadcast_to(absent, (2, ABSENT_ROWS, lse.shape[1]))
    values = jnp.moveaxis(jnp.concatenate([values, padding], axis=1), 2, 0)
    return jax.lax.bitcast_convert_type(values, jnp.int32)
