"""Generalised dot-product attention as one persistent, warp-specialised Mosaic GPU kernel.

    out[i] = output_scale * sum_j act(scale * query[i] @ key[j]) * value[j]

over the keys j of query i's sequence, for each head.  Before the launch, XLA lists tiles of at most
128 query rows of one sequence (`tiles`).  An *item* is one head of one tile: one pass over its
sequence's keys.  A *run* is one head of `GdpaConfig.run` consecutive tiles: the work item that CTAs
take from the schedule.  Of n CTAs, CTA w takes the runs w, 2n - 1 - w, 2n + w, ..., back and forth
along the list, whose tiles are sorted by falling work; or run w, and then whichever is next by a
counter (`GdpaConfig.tickets`).  Within a run, blocks stay in their stages
for the next item with the same keys, if the rings hold all of them: the producer then arrives on
their barriers without a copy.

Warpgroups: 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.
The producer describes each item in shared memory, and loads its queries, and its sequence's keys
and values through two rings of blocks that continue across items.  In a step, a consumer issues the
product that gives the next block's scores, then the product of this block's weights and values, and
activates the next block's scores while the second product is in flight (`gdpa_weights`).  The last
step of an item issues the first scores of the next item.

A block may reach past its sequence's end, into the next sequence.  Consumer 0 zeroes such rows in
shared memory; since act(0) = 0, no scores are masked.  Query rows past the end of a tile are
computed but not stored.  If all 64 rows of consumer 1 are past the end, consumer 1 may skip the
computation, but no synchronisation (`GdpaConfig.skip_empty`).  Tiles without keys come last in the
list; their results are zeroed after all other work.

Synchronisations:
  1. `items.ready[s]`            producer -> consumers: slot s describes an item (or the end); it is
                                 free when the query slot of an item at least three later is.
  2. `query.ready[s]`, `.free`   query slot s; free once the queries are read, and TMA has read the
                                 output that was staged in their place.
  3. `key.ready[s]`, `.free`     stage s of the ring of key blocks.
  4. `value.ready[s]`, `.free`   stage s of the ring of value blocks.
  5. Named barriers: the consumers take turns at issuing products, so that one consumer's activation
     overlaps the other's products.  Consumer 0 has the first turn at every block, so consumer 1
     sees the rows that consumer 0 zeroed.

Source: the idea is Meta's GDPA.  Pipelining within a warpgroup, and turns (ping-pong scheduling),
follow Shah et al., "FlashAttention-3", 2024.  No code is shared.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.flash import gdpa_consumer, gdpa_producer
from ikbo_jax.pallas.flash.gdpa_context import GdpaContext, Operands, Shape
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.problems import GdpaConfig

# Host side


def gdpa_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tiles: lists.TileList,
    *,
    out_rows: int,
    activations: tuple[str, ...],
    approx: str | None,
    scale: float,
    output_scale: float,
    config: GdpaConfig,
    num_sms: int,
    interpret: Any = False,
) -> jax.Array:
    """Attends from every tile of queries to the keys and values of its sequence.

    Returns out [out_rows, N, H]. Arguments are as for `flash.gdpa.gdpa_kernel`; `tiles` have
    `TILE_ROWS` rows, and every row of the result has one. `activations` may be one for all heads.
    """
    q_rows, q_heads, head_dim = query.shape
    workers = min(num_sms, tiles.words.shape[0] * q_heads)
    has_f32_range = query.dtype == jnp.bfloat16
    activation = ActivationSpec(activations, approx, scale, output_scale, has_f32_range)
    shape = Shape(q_rows, q_heads, key.shape[1], head_dim, activation, workers)
    operands = Operands(query, key, value, *tiles)
    out = jax.ShapeDtypeStruct((out_rows, q_heads, head_dim), query.dtype)
    (result,) = launch(
        Roles(
            functools.partial(GdpaContext, shape, config),
            gdpa_producer.produce,
            gdpa_consumer.consume,
        ),
        operands,
        out,
        config.shared(head_dim),
        dtype=query.dtype,
        name="ikbo_gdpa_forward",
        workers=workers,
        has_counter=config.tickets,
        interpret=interpret,
    )
    return result
