"""Packs query rows and their statistics for the gradient, and unpacks d_query (`worklist.rows`)."""

from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.attention_backward import statistics as statistics_launch
from ikbo_jax.pallas.attention_backward.context import Shape
from ikbo_jax.pallas.attention_backward.statistics import Inputs, Packed
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist.numbering import Sizes
from ikbo_jax.pallas.worklist.rows import Rows, by_xla, described, make_rows
from ikbo_jax.problems.attention_backward import BLOCK_KV
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.attention import weight_exponents


def pack(array: jax.Array, order: jax.Array | None, kv_heads: int) -> jax.Array:
    """Reshapes [B, T, N, H] to rows [B * T * N / K, K, H]."""
    batch, q_len, q_heads, width = array.shape
    if order is not None:
        array = array[order]
    if q_heads != kv_heads:
        array = array.reshape(batch, q_len, kv_heads, -1, width).swapaxes(2, 3)
    return array.reshape(-1, kv_heads, width)


def _nan_unless(is_valid: jax.Array | None, array: jax.Array) -> jax.Array:
    return array if is_valid is None else jnp.where(is_valid, array, jnp.nan)


def with_statistics(
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
    inputs: Inputs,
    sizes: Sizes,
    *,
    kv_heads: int,
    count: int,
    keeps_delta: bool = False,
) -> tuple[Rows, jax.Array, Packed, jax.Array | None]:
    """Returns rows, [K, 2, count + 128] f32 of lse in powers of 2 and delta, packed operands, and,
    if `keeps_delta`, delta of each query, f32.

    Statistics are at the rows' targets; numbers at rows of no query are arbitrary. Targets of a
    user begin with a block, so TMA copies blocks that begin at whole 64 bytes and end inside of the
    array: a copy that began at an array's last value ended with an illegal instruction on an H200.

    With P = exp(scores - lse), the gradient of a score is P * (d_out @ value.T - delta), where
    delta = sum(d_out * out) - d_lse. Rows without keys get an lse of infinity, hence P = 0. `count`
    is the number of rows of the kernel's `d_query`. Under interpretation, XLA computes all of it.
    """
    if mosaic.is_interpreted():
        found = by_xla(cand_to_user, lengths, sizes)
        packed = Packed(*(pack(x, found.order, kv_heads) for x in (inputs.query, inputs.d_out)))
        delta = delta_by_xla(inputs) if keeps_delta else None
        return found, statistics_by_xla(inputs, found, sizes, kv_heads, count), packed, delta
    in_place = None
    if not sizes.is_packed:
        in_place = Packed(*(pack(x, None, kv_heads) for x in (inputs.query, inputs.d_out)))
        inputs = inputs._replace(query=None)
    rows: Rows | None = None
    if not statistics_launch.numbers_rows(sizes, kv_heads):
        rows = make_rows(cand_to_user, lengths, sizes)
    position, users, poison = (rows.position, rows.users, rows.poison) if rows else (None,) * 3
    width = inputs.out.shape[-1]
    operands = statistics_launch.Operands(
        Inputs(*(None if x is None else x.reshape(-1, *([width] * (x.ndim == 4))) for x in inputs)),
        *(cand_to_user, position, lengths, users, poison),
    )
    results = statistics_launch.statistics_kernel(
        operands, sizes, kv_heads=kv_heads, count=count + TILE_ROWS, keeps_delta=keeps_delta
    )
    if rows is None:
        rows = described(cand_to_user, results.rows)
    return rows, results.statistics, in_place or results.packed, results.delta


def delta_by_xla(inputs: Inputs) -> jax.Array:
    """Computes the last result of `with_statistics` by XLA."""
    out, d_out, lse, d_lse, _ = inputs
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse
    return jnp.where(lse == -jnp.inf, 0.0, delta)


def statistics_by_xla(
    inputs: Inputs, rows: Rows, sizes: Sizes, kv_heads: int, count: int
) -> jax.Array:
    """Computes the second result of `with_statistics` by XLA."""
    both = jnp.stack((weight_exponents(inputs.lse), delta_by_xla(inputs)))
    both = jnp.moveaxis(both.reshape(2, sizes.batch, sizes.q_len, kv_heads, sizes.group), 3, 0)
    # NaN enters the operands of the scatter: to select in its result would take another kernel.
    absent, both = (
        _nan_unless(rows.is_valid, x) for x in (jnp.asarray([jnp.inf, 0.0], jnp.float32), both)
    )
    found = jnp.broadcast_to(absent[None, :, None], (kv_heads, 2, count + TILE_ROWS))
    return found.at[:, :, rows.targets(sizes)].set(both, unique_indices=True)


def unpack_d_query(sums: jax.Array, rows: Rows, shape: Shape, dtype: jnp.dtype) -> jax.Array:
    """Adds a key head's planes of `d_query`, of which some are arbitrary; returns [B, T, N, H]."""
    planes, _, width = sums.shape
    tiles, sizes = planes // shape.kv_heads, shape.sizes
    parts = sums.reshape(tiles, shape.kv_heads, -1, width)[:, :, rows.targets(sizes)]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    kv_tiles = -(-rows.users[:, 3] // BLOCK_KV)
    # One plane holds the sum of all tiles.
    exists = tile[:, None] < kv_tiles[rows.user][None]
    parts = jnp.where(exists[:, None, :, None, None, None], parts, 0.0)
    total = (jnp.sum(parts, axis=0) * jnp.float32(shape.scale)).astype(dtype)
    total = _nan_unless(rows.is_valid, total)
    return jnp.moveaxis(total, 0, 2).reshape(sizes.batch, sizes.q_len, -1, width)


def gradient_type(shape: Shape, own_dtype: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Declares a launch's gradient of keys or values, in `dtype` or f32.

    Threads store f32, to rows of all parts; TMA stores `own_dtype`, and drops rows past S.
    """
    if dtype == own_dtype and shape.sizes.splits == 1:
        return jax.ShapeDtypeStruct(shape.keys, own_dtype)
    users, kv_len, *widths = shape.keys
    return jax.ShapeDtypeStruct((users * shape.sizes.splits * kv_len, *widths), jnp.float32)


def add_parts(sums: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
    """Adds a user's parts, which a launch filled, to a gradient [U, keys, K, H]."""
    users, splits = shape.sizes.users, shape.sizes.splits
    if splits > 1:
        sums = jnp.sum(sums.reshape(users, splits, *shape.keys[1:]), axis=1)
    return sums.reshape(shape.keys).astype(dtype)
