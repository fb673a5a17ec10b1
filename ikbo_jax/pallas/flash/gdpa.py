"""Generalised dot-product attention as one persistent, warp-specialised Mosaic GPU kernel.

    out[i] = output_scale * sum_j act(scale * query[i] @ key[j]) * value[j]

over the keys j of query i's sequence, for each head.  A softmax without a mask takes the kernel of
`attention`, and short sequences the kernel of `short_gdpa`.

Before the launch, `worklist.tiles` lists tiles of at most 128 query rows of one sequence.  An
*item* is one head of one tile: one pass over its sequence's keys.  A *run* is one head of
`GdpaConfig.run` consecutive tiles: the work item that CTAs take from the schedule.  Of n CTAs, CTA
w takes the runs w, 2n - 1 - w, 2n + w, ..., back and forth along the list, whose tiles are sorted
by falling work; or run w, and then the next run by a counter (`GdpaConfig.tickets`).  Within a run,
blocks stay in their stages for the next item with the same keys, if the rings hold all of them: the
producer then arrives on their barriers without a copy.

Warpgroups, rings and the pipeline of a step are as in `attention`, with an activation in place of
the softmax.  A block may reach past its sequence's end, into the next sequence.  Consumer 0
zeroes such rows in shared memory; since act(0) = 0, no scores are masked.  Query rows past the end
of a tile are computed but not stored.  If all 64 rows of consumer 1 are past the end, consumer 1
may skip the computation, but no synchronisation (`GdpaConfig.skip_empty`).  With a mask, so may a
consumer after the last block that its rows see.  Tiles without keys come last in the list; their
results are zeroed after all other work.

Synchronisations are as in `attention`, without flags.  The slot of a descriptor is free when the
query slot of an item at least three later is.  Consumer 0 has the first turn at every block, so
consumer 1 sees the rows that consumer 0 zeroed.

Source: the idea is Meta's GDPA.  No code is shared.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.flash import attention, gdpa_consumer, gdpa_masked, gdpa_producer, short_gdpa
from ikbo_jax.pallas.flash.context import Operands, Outputs
from ikbo_jax.pallas.flash.gdpa_context import GdpaContext, Shape
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.worklist.lists import Offsets, TileList, has_long_tiles
from ikbo_jax.pallas.worklist.masked import masked_tiles
from ikbo_jax.pallas.worklist.tiles import query_tiles
from ikbo_jax.problems import GdpaConfig, ShortGdpaConfig
from ikbo_jax.problems.gdpa import group_rows
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
    """Computes `reference.gdpa.materialised` by the kernel that `config` and the activation select.

    Arrays are bf16 or f16, either all heads have a softmax or none, and the configuration is legal.
    Returns out and, with `return_residuals`, lse [rows, N] f32; rows without keys have 0 and -inf.
    """
    options: dict[str, Any] = {
        "out_rows": out_shape(arrays, settings)[0],
        "return_residuals": return_residuals,
        "num_sms": num_sms,
    }
    if SOFTMAX in settings.activations and settings.scale == 0:
        # Every score is 0, as with queries of zeros.
        arrays = arrays._replace(query=jnp.zeros_like(arrays.query))
        settings = settings._replace(scale=1.0)
    query, key, value = arrays[:3]
    offsets = Offsets.of(arrays, settings)
    if isinstance(config, ShortGdpaConfig):
        tiles: TileList | Offsets = offsets
        if not config.finds_tiles or arrays.q_to_kv is not None:
            # In the order of memory: L2 has rows that tiles of neighbouring sequences load, too.
            tiles = query_tiles(offsets, size=config.tile_rows, unit=config.block_kv)
        return short_gdpa.short_gdpa(query, key, value, tiles, settings, config=config, **options)
    rows, heads, head_dim = key.shape
    fit = group_rows(rows, heads * head_dim)
    # Fixed shares are even only if all tiles are sorted by falling work.
    keys_per_group = fit if config.tickets and fit < rows else None
    if settings.rule is not None:
        listed = masked_tiles(
            offsets, size=TILE_ROWS, unit=config.block_kv, keys_per_group=keys_per_group
        )
    else:
        listed = query_tiles(offsets, size=TILE_ROWS)
        if arrays.intervals is not None:
            listed, options["seen"] = gdpa_masked.mask_tiles(
                listed, arrays.intervals, config.block_kv, keys_per_group
            )
        elif SOFTMAX in settings.activations:
            options["config"] = config.for_softmax
            return attention.jagged_attention_kernel(query, key, value, listed, settings, **options)
    return gdpa_forward(query, key, value, listed, settings, config=config, **options)


def gdpa_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tiles: TileList,
    settings: Settings,
    *,
    out_rows: int,
    config: GdpaConfig,
    num_sms: int,
    seen: jax.Array | None = None,
    return_residuals: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends from every tile of queries to the keys and values of its sequence.

    Arguments and results are as for `gdpa_kernel`; `tiles` have `TILE_ROWS` rows, and every row of
    the result has one. With a mask, which a softmax needs, tiles and `settings.rule`
    are of `worklist.masked`, or tiles and `seen` are of `gdpa_masked.mask_tiles`; `config` has
    run=1 and no half_blocks.
    """
    _, q_heads, head_dim = query.shape
    workers, rule = min(num_sms, tiles.words.shape[0] * q_heads), settings.rule
    activation = ActivationSpec.of(settings, query.dtype)
    has_mask = rule is not None or seen is not None
    if has_mask and not has_long_tiles(rule):  # its tiles do not say what a consumer sees
        config = dataclasses.replace(config, skip_empty=False)
    shape = Shape(q_heads, key.shape[1], head_dim, activation, workers, has_mask, rule)
    operands = Operands(query, key, value, **tiles._asdict(), seen=seen)
    out, *lse = launch(
        Roles(
            functools.partial(GdpaContext, shape, config),
            gdpa_producer.produce,
            gdpa_consumer.consume,
        ),
        operands,
        Outputs.of(out_rows, query, has_lse=return_residuals and shape.log2_scale is not None),
        config.shared(head_dim, has_mask),
        dtype=query.dtype,
        name="ikbo_gdpa_forward",
        workers=workers,
        has_counter=config.tickets,
    )
    return out, lse[0] if lse else None
