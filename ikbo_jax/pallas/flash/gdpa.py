"""Generalised dot-product attention, forward: makes the list of tiles, then launches a kernel."""

from __future__ import annotations

from typing import Any

import jax

from ikbo_jax.pallas.flash import attention, gdpa_forward, short_gdpa
from ikbo_jax.pallas.worklist.lists import Offsets, TileList
from ikbo_jax.pallas.worklist.tiles import query_tiles
from ikbo_jax.problems import GdpaConfig, ShortGdpaConfig
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Arrays, Settings, out_shape


def gdpa_kernel(
    arrays: Arrays,
    settings: Settings,
    *,
    return_residuals: bool,
    config: GdpaConfig | ShortGdpaConfig,
    num_sms: int,
) -> tuple[jax.Array, jax.Array | None]:
    """`reference.gdpa.materialised` by a kernel; a softmax takes the attention kernel.

    A `ShortGdpaConfig` selects the kernel for short sequences, which computes a softmax, too.

    Args:
      arrays: bf16 or f16.
      settings: either all heads have a softmax or none.
      return_residuals: whether lse is computed; only with a softmax.
      config: a legal configuration (`illegal_reason`).
      num_sms: streaming multiprocessors of the device.

    Returns:
      out, and lse [rows, N] in f32, the natural logarithm of a softmax's denominator, or None. Rows
      without keys have 0 and -inf.
    """
    activation: dict[str, Any] = {"activations": settings.activations, "approx": settings.approx}
    options: dict[str, Any] = {
        "out_rows": out_shape(arrays, settings)[0],
        "scale": settings.scale,
        "output_scale": settings.output_scale,
        "num_sms": num_sms,
    }
    if isinstance(config, ShortGdpaConfig):
        options |= activation | {"config": config, "return_residuals": return_residuals}
        tiles = _tiles_of_short(arrays, settings, config)
        return short_gdpa.short_gdpa(*arrays[:3], tiles, **options)
    query, key, value = arrays[:3]
    listed = query_tiles(Offsets.of(arrays, settings), size=TILE_ROWS)
    if SOFTMAX in settings.activations:
        options |= {"config": config.for_softmax, "return_residuals": return_residuals}
        return attention.jagged_attention_kernel(query, key, value, listed, **options)
    options |= activation | {"config": config}
    return gdpa_forward.gdpa_forward(query, key, value, listed, **options), None


def _tiles_of_short(
    arrays: Arrays, settings: Settings, config: ShortGdpaConfig
) -> TileList | Offsets:
    offsets = Offsets.of(arrays, settings)
    if config.finds_tiles and arrays.q_to_kv is None:
        return offsets
    # In the order of memory, rows that tiles of neighbouring sequences load, too, are in L2.
    return query_tiles(offsets, size=config.tile_rows, unit=config.block_kv)
