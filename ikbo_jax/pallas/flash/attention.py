"""Broadcast attention as one persistent, warp-specialised Mosaic GPU kernel for Hopper.

    out[b] = softmax(scale * query[b] @ key[u(b)].T) @ value[u(b)],  u(b) = cand_to_user[b]

The query rows of all candidates, in work order, are cut into tiles of 128 rows of one head.  A tile
takes one *pass* for each run of consecutive candidates with the same user.  A pass attends with all
rows of the tile to that user's keys, and stores only the rows of its run.  An *item* is the
descriptor of a pass, which the producer writes and both consumers read.

A softmax on jagged sequences (generalised attention) takes the same kernel.  A launch before lists
its tiles (`worklist.tiles`): a tile is some rows of one sequence, and takes one pass.  A block of
keys may reach into the next sequences; scores of such keys are masked, as scores of padding are.

Warpgroups 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.
The producer describes each pass in shared memory, and loads its queries, and its user's keys and
values through two rings of blocks that continue across passes.  In a step, a consumer issues the
product that gives the next block's scores, then the product of this block's weights and values, and
computes the next block's weights while the second product is in flight.  The last step of a pass
issues the first scores of the next pass.

The softmax keeps the row maximum of the *first* block for the whole pass.  Scores far above the
first maximum could overflow, or leave the range of f16, and where scores are huge, rounding costs
the first maximum its weight of 1.  The consumers therefore flag a pass whose row sums reach
`softmax.SUM_LIMITS`, are below `softmax.SUM_MINIMUM` or are NaN.  After its last pass, a CTA
computes its flagged tiles again with the running maximum, subtracted before scores are scaled: this
is exact for every input.  The second computation also zeroes values past the user's length, which
have weight 0 but may be NaN.

Synchronisations:
  1. `items.ready[s]`            producer -> consumers: slot s describes a pass (or the end).
  2. `query.ready[s]`, `.free`   query slot s; free once the queries are read, and TMA has read the
                                 output that was staged in their place.
  3. `key.ready[s]`, `.free`     stage s of the ring of key blocks.
  4. `value.ready[s]`, `.free`   stage s of the ring of value blocks. The producer waits for `.free`
     from the second use of a slot or stage on.
  5. `flags_ready[0]`            consumers -> producer: the flags of both are final.
  6. Named barriers: the consumers take turns at issuing products, so that one consumer's softmax
     overlaps the other's products.  They wait for each other when their flags are final, and after
     consumer 0 has zeroed rows of a stage.

Sources: the idea is Meta's IKBO.  Pipelining within a warpgroup, and turns (ping-pong scheduling),
follow Shah et al., "FlashAttention-3", 2024.  No code is shared.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations.cap import scale_and_cap
from ikbo_jax.pallas.flash import attention_consumer, attention_producer
from ikbo_jax.pallas.flash.attention_context import AttentionContext, Shape
from ikbo_jax.pallas.flash.context import Operands, Outputs
from ikbo_jax.pallas.hopper import own_tokens, warps
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.worklist import lists, work_order
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.tiles import query_tiles
from ikbo_jax.problems import AttentionConfig
from ikbo_jax.problems.hopper import TILE_ROWS, WGMMA_M
from ikbo_jax.reference.activations import SOFTMAX
from ikbo_jax.reference.gdpa import Settings


def attention_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    key_value_seq_lengths: jax.Array | None,
    *,
    scale: float,
    order: jax.Array | None,
    return_residuals: bool,
    config: AttentionConfig,
    num_sms: int,
    logit_cap: float | None = None,
    targets: jax.Array | None = None,
    self_key: jax.Array | None = None,
    self_value: jax.Array | None = None,
    page_table: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes `ops.attention` for bf16 and f16; returns out and, with `return_residuals`, lse.

    Args (the others are as for `ops.attention`; the configuration is legal):
      order: None, or [B] int32, a permutation: the order in which candidates are processed, with
        those of one user side by side; T must be a multiple of 64.
      targets: None, or [B] int32, a permutation: candidate i's results are stored as candidate
        targets[i]'s results. `order` must be None then.
      self_key: None, or [B, 1, K, H], a further key of each candidate; `self_value` likewise.
      page_table: as for `ops.attention`; `block_kv` divides the pages.
    """
    batch, q_len, q_heads, head_dim = query.shape
    users, kv_len, kv_heads, _ = key.shape
    if page_table is not None:
        users, most = page_table.shape
        kv_len *= most
    if order is not None and q_len % WGMMA_M:
        raise ValueError(f"an order needs T to be a multiple of {WGMMA_M}, but T={q_len}")
    if scale == 0:  # every score is 0, as with queries of zeros
        query, scale = jnp.zeros_like(query), 1.0
    index = cand_to_user if order is None else cand_to_user.at[order].get(mode="clip")
    of_work = targets if order is None else order
    operands = Operands(
        query.reshape(batch * q_len, q_heads, head_dim),
        key,
        value,
        order=order,
        targets=targets,
        self_key=own_tokens.in_order(self_key, of_work),
        self_value=own_tokens.in_order(self_value, of_work),
        pages=None if page_table is None else page_table.reshape(-1),
    )
    if config.one_user and users > 1 and q_len:
        tiles = _tiles_by_user((batch, q_len, users, kv_len), index, key_value_seq_lengths)
        operands = operands._replace(words=tiles.words, counts=tiles.counts)
        if page_table is None:
            key, value = (x.reshape(-1, kv_heads, head_dim) for x in (key, value))
            operands = operands._replace(key=key, value=value)
        users, kv_len = 1, users * kv_len
    else:
        operands = operands._replace(cand_to_user=cand_to_user, lengths=key_value_seq_lengths)
        warpgroup_tiles = pl.cdiv(batch * q_len, WGMMA_M)
        # Beyond MAX_CUT tiles, every CTA has so many that long and short ones average out.
        is_cut = config.balance and q_len % TILE_ROWS == WGMMA_M and users > 1
        if is_cut and 1 < warpgroup_tiles <= work_order.MAX_CUT:
            cuts, counts = work_order.cuts(jnp.clip(index, 0, users - 1), q_len // WGMMA_M)
            operands = operands._replace(cuts=cuts, cut_counts=counts)
        # A tile has more candidates than a warp has lanes, or heads are wider than 192 columns: the
        # producer has no registers to read them (64 bytes are spilled at H = 256).
        is_searched = TILE_ROWS // max(q_len, 1) + 2 <= warps.LANES and head_dim <= 192
        if q_len and q_len < WGMMA_M and not is_searched and users > 1:
            run_ends = work_order.run_ends(jnp.clip(cand_to_user, 0, users - 1))
            operands = operands._replace(run_ends=run_ends)
    out, lse = _launch(
        operands,
        (batch, q_len, users, kv_len),
        Settings((SOFTMAX,), scale=scale, logit_cap=logit_cap),
        name="ikbo_attention",
        return_residuals=return_residuals,
        config=config,
        num_sms=num_sms,
    )
    return out.reshape(query.shape), None if lse is None else lse.reshape(query.shape[:-1])


def _tiles_by_user(
    sizes: tuple[int, int, int, int], sequences: jax.Array, lengths: jax.Array | None
) -> lists.TileList:
    """Lists tiles that are cut where users end; `sequences` are the users in work order.

    `sizes`: candidates, queries of each, users, keys of each.
    Candidates are sequences of queries, users sequences of keys. If users have lengths, every other
    sequence of keys is what follows a user's keys.
    """
    batch, q_len, users, kv_len = sizes
    # By NumPy, so that they are constants: XLA's kernels for them, and one for a clamped index that
    # `query_tiles` clamps anyway, took 3.5 us before each launch on an H100.
    ends: Any = np.arange(users + 1, dtype=np.int32) * np.int32(kv_len)
    if lengths is not None:
        own = ends[:-1] + jnp.clip(lengths, 0, kv_len)
        ends = jnp.append(jnp.stack([ends[:-1], own], axis=1).reshape(-1), ends[-1:])
        sequences = 2 * jnp.clip(sequences, 0, users - 1)
    starts = np.arange(batch + 1, dtype=np.int32) * np.int32(q_len)
    offsets = Offsets(
        jnp.asarray(starts), jnp.asarray(ends), sequences, batch * q_len, users * kv_len
    )
    return query_tiles(offsets, size=TILE_ROWS)


def jagged_attention_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tiles: lists.TileList,
    settings: Settings,
    *,
    out_rows: int,
    return_residuals: bool,
    config: AttentionConfig,
    num_sms: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends from every tile of queries to the keys and values of its sequence, by a softmax.

    Arguments and results are as for `flash.gdpa.gdpa_kernel`; `tiles` have `TILE_ROWS` rows, and
    every row of the result has one. `config.reuse` is off; `balance` and `early_scores` have no
    effect.
    """
    assert not config.reuse
    return _launch(
        Operands(query, key, value, words=tiles.words, counts=tiles.counts),
        # Each row may belong to a different sequence, so q_len is 1.
        (out_rows, 1, 1, key.shape[0]),
        settings,
        name="ikbo_gdpa_softmax",
        return_residuals=return_residuals,
        config=config,
        num_sms=num_sms,
    )


def _launch(
    operands: Operands,
    sizes: tuple[int, int, int, int],
    settings: Settings,
    *,
    name: str,
    return_residuals: bool,
    config: AttentionConfig,
    num_sms: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the kernel; returns out [rows, N, H], and lse [rows, N] or None.

    `sizes`: candidates, queries of each, users, keys of each; of listed tiles, keys are rows of one
    user.
    """
    query, (batch, q_len, users, kv_len) = operands.query, sizes
    _, q_heads, head_dim = query.shape
    row_tiles = most_row_tiles = pl.cdiv(batch * q_len, TILE_ROWS)
    if operands.words is not None:
        row_tiles = most_row_tiles = operands.words.shape[0]
    elif operands.cuts is not None:
        most_row_tiles = operands.cut_counts.shape[0]
    scale, cap = scale_and_cap(settings.scale, settings.logit_cap)
    shape = Shape(
        batch=batch,
        q_len=q_len,
        q_heads=q_heads,
        kv_heads=operands.key.shape[-2],
        kv_len=kv_len,
        users=users,
        head_dim=head_dim,
        log2_scale=scale * math.log2(math.e),
        workers=min(num_sms, row_tiles * q_heads),
        most_tiles=most_row_tiles * q_heads,
        output_scale=settings.output_scale,
        cap=cap,
    )
    out, *lse = launch(
        Roles(
            functools.partial(AttentionContext, shape, config),
            attention_producer.produce,
            attention_consumer.consume,
        ),
        operands,
        Outputs.of(shape.rows, query, has_lse=return_residuals),
        config.shared(head_dim, loads_own=operands.self_key is not None),
        dtype=query.dtype,
        name=name,
        workers=shape.workers,
    )
    return out, lse[0] if lse else None
