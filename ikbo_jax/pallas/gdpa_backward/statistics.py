"""Statistics of a softmax's queries for the gradient of generalised attention, by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.attention import weight_exponents

#: Rows of no query at the end of the statistics: a tile that begins with any query ends inside.
ABSENT_ROWS = TILE_ROWS


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

    With P = exp(scores - lse), the gradient of a score is P * (d_out @ value.T - delta), where
    delta = sum(d_out * out) / output_scale.

    Args:
      blocks: [blocks, 2] int32, the first query of each block in the result, which is arbitrary if
        there is none, and the number of queries from there on; it may exceed `block`.
      out: [rows, N, H], the result.
      lse: [rows, N] f32.
      d_out: [rows, N, H], cotangent of the result.
      output_scale: of the result.
      block: rows of a block of queries, a multiple of 16.

    Returns:
      [N, 2, statistics rows] int32, the bits of f32. A sequence begins with a whole block, so TMA
      copies begin at whole 64 bytes (`attention_backward.rows.with_statistics` says why), and no
      block has rows of two sequences. Rows of no query, also those at the end, have an infinite
      lse, hence weights 0, and a delta of 0.
    """
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # With an output_scale of 0 all gradients are 0, for every delta.
    delta = delta * jnp.float32(1 / output_scale if output_scale else 0)
    delta = jnp.where(lse == -jnp.inf, 0.0, delta)
    both = jnp.stack((weight_exponents(lse), delta))
    position = jnp.arange(block, dtype=jnp.int32)[None]
    is_query = (position < blocks[:, 1:]).reshape(-1)
    row = jnp.where(is_query, (position + blocks[:, :1]).reshape(-1), 0)
    absent = jnp.asarray([jnp.inf, 0.0], jnp.float32)[:, None, None]
    values = jnp.where(is_query[None, :, None], jnp.take(both, row, axis=1, mode="clip"), absent)
    padding = jnp.broadcast_to(absent, (2, ABSENT_ROWS, lse.shape[1]))
    values = jnp.moveaxis(jnp.concatenate([values, padding], axis=1), 2, 0)
    return jax.lax.bitcast_convert_type(values, jnp.int32)
