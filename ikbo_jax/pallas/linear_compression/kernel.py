"""Linear compression as one persistent, warp-specialised Mosaic GPU kernel for Hopper.

    out[b] = w_cand @ e_cand[b] + w_user @ e_user[cand_to_user[b]]

Here *user* means the coarser of two levels and *candidate* the finer level.  A problem with several
levels launches this kernel once per level; `single_launch` lets the last two levels share a launch.

The kernel computes the transposed product, out[b].T = e[b].T @ w.T.  So the compressed rows M are
the n of a WGMMA, a multiple of 8: for M = 433, it multiplies 440 rows instead of 512.

Warpgroups 0 and 1 are the consumers; each multiplies 64 of a tile's 128 embedding columns by
`block_m` compressed rows.  One warp of warpgroup 2, the producer, loads operands through a ring of
stages that continues across tiles.  A finished tile stays in registers, rounded, and is stored in
chunks during the first k steps of the next tile.  The CTAs of a cluster compute tiles of
consecutive rows of the batch, and share their weights through multicast.

Consumers write the user result to device memory as *fragments* (`hopper.fragment`).  A candidate
tile loads its user's fragment a few k steps before its end, and adds it in f32 before the one
rounding.  Where users are few, a user tile has half as many compressed rows as a candidate tile:
user tiles then spread over twice as many CTAs, and finish before a candidate tile needs them.

Where N is small, tiles span candidates (`packed`).

Synchronisations:
  1. `stages.ready[s]`     producer -> consumers: TMA has filled stage s.
  2. `stages.free[s]`      consumers (of all CTAs of the cluster) -> producer: the WGMMAs of both
                           warpgroups have read stage s, or stage s is unused so far.
  3. `users_ready`         (single launch) device-wide counter of finished user tiles, never reset
                           within a launch; a consumer waits once, in its first candidate tile,
                           for the fragments of all CTAs and of both warpgroups.
  4. `claims`              (single launch) tickets for user tiles: a device-wide counter, and a ring
                           in shared memory that passes them from producer to consumers.
  5. `user_stage_free[s]`  (single launch) `stages.free` of the user phase, in which each CTA of a
                           cluster computes different tiles.
  6. Staging buffers: `commit_smem` before a TMA store, `wait_smem_to_gmem` before the next write.

Forward progress of a single launch: a CTA takes user tiles from the ticket counter until none is
left, and only then starts its candidate tiles.  So when a CTA waits for user results, resident CTAs
have claimed all user tiles, and finish them without a wait for another CTA.  If user tiles were
assigned to CTAs statically, two such kernels, each partly resident, could wait forever for CTAs
that the other kernel keeps off the chip.

Source: the idea is Meta's IKBO ("linear compression embedding").  No code is shared.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import fragment, mosaic, schedule
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.linear_compression.packed import PackedColumns
from ikbo_jax.pallas.linear_compression.resident import resident_compression
from ikbo_jax.pallas.linear_compression.roles import consume, produce
from ikbo_jax.pallas.linear_compression.tiles import (
    BLOCK_N,
    Claims,
    Columns,
    CompressionContext,
    Operands,
    PackedPhase,
    Phase,
    Shape,
)
from ikbo_jax.problems import (
    LinearCompressionConfig,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.problems.packed_compression import (
    PAD_FROM_FLOPS,
    TMA_ALIGNMENT,
    WEIGHT_ALIGNMENT,
    WHOLE_TILES_PER_SM,
)

#: The static description and the operands of one level of a launch.
_Level = tuple[Phase | None, Operands | None]


def _launch(
    user: _Level,
    cand: _Level,
    *,
    config: LinearCompressionConfig | PackedCompressionConfig,
    num_sms: int,
) -> Any:
    """Launches the kernel once; returns the output, or without `cand` the users' fragments."""
    (user_phase, user_operands), (cand_phase, cand_operands) = user, cand
    phases, operands = (user_phase, cand_phase), (user_operands, cand_operands)
    dtype = jax.tree.leaves(operands)[0].dtype
    with_claims, columns = None not in phases, Columns
    if isinstance(config, PackedCompressionConfig):
        n = next(phase.n for phase in phases if phase)
        columns, shared = PackedColumns, config.shared(with_claims=with_claims, n=n)
    else:
        shared = config.shared(with_claims=with_claims)
    output = fragments = None
    if cand_phase is not None:
        output = jax.ShapeDtypeStruct((cand_phase.batch, cand_phase.m, cand_phase.n), dtype)
    if user_phase is not None:
        rows = pl.cdiv(user_phase.m, config.block_m) * config.block_m
        fragments = columns.fragment_types(user_phase, rows)
    tiles = schedule.make_schedule(
        # CTAs claim user tiles; the schedule only needs how many of them a worker will compute.
        pl.cdiv(user_phase.tiles * user_phase.cluster, config.cluster) if user_phase else 0,
        cand_phase.tiles if cand_phase else 0,
        user_phase.cost / cand_phase.cost if user_phase and cand_phase else 1.0,
        num_sms // config.cluster,
    )

    def context(shared: Any, operands: Any, outputs: Any) -> CompressionContext:
        claims = None
        if with_claims:
            user, cand = operands
            operands = user, cand._replace(fragments_in=outputs[1])
            counter, users_ready = (mosaic.device_counter() for _ in range(2))
            claims = Claims(counter, shared.tickets, users_ready)
        shape = Shape(tiles, phases)
        return CompressionContext(
            shape, config, shared, operands, outputs, columns=columns, claims=claims
        )

    outputs = launch(
        Roles(context, produce, consume),
        operands,
        (output, fragments),
        shared,
        dtype=dtype,
        name="ikbo_linear_compression",
        workers=tiles.num_workers,
        cluster=config.cluster,
    )
    return outputs[0] if cand_phase is not None else fragment.Fragment(*outputs)


def _aligned(weights: Sequence[jax.Array], alignment: int) -> list[tuple[jax.Array, int]]:
    """Returns (aligned operand, first column of the weight in it) for each weight.

    One copy pads all weights to `alignment` bytes, unless all are aligned (`ops.padded_weight`).
    """
    multiple = alignment // weights[0].dtype.itemsize
    if not any(w.shape[1] % multiple for w in weights):
        return [(w, 0) for w in weights]
    padded = [jnp.pad(w, ((0, 0), (0, -w.shape[1] % multiple))) for w in weights]
    packed = jnp.concatenate(padded, axis=1) if len(padded) > 1 else padded[0]
    ends = itertools.accumulate(w.shape[1] for w in padded)
    return [(packed, end - w.shape[1]) for w, end in zip(padded, ends, strict=True)]


def _halved(phase: Phase, num_sms: int) -> Phase:
    """Makes tiles smaller where a level that a finer level looks up has few."""
    tiles = phase.rows * phase.n_tiles * phase.m_tiles
    if tiles >= WHOLE_TILES_PER_SM * num_sms:
        return phase
    if isinstance(phase, PackedPhase):
        # A CTA alone loads its tile's embeddings, so a narrow tile takes less time. So does a tile
        # of few compressed rows, if no CTA gets two tiles.
        phase = dataclasses.replace(phase, block_n=min(phase.block_n, BLOCK_N))
        step = 16 * phase.parts
        block_ms = (rows for rows in range(step, phase.block_m, step) if phase.block_m % rows == 0)
        is_spread = lambda rows: phase.rows * pl.cdiv(phase.m, rows) <= num_sms  # noqa: E731
        return dataclasses.replace(phase, block_m=next(filter(is_spread, block_ms), phase.block_m))
    # Halves must be whole fragments.
    if phase.block_m % 32:
        return phase
    return dataclasses.replace(phase, block_m=phase.block_m // 2)


def linear_compression_kernel(
    weights: tuple[jax.Array, ...],
    embeddings: tuple[jax.Array, ...],
    parents: tuple[jax.Array | None, ...],
    *,
    config: LinearCompressionConfig | PackedCompressionConfig | ResidentCompressionConfig,
    num_sms: int,
) -> jax.Array:
    """Compresses levels, coarsest first: [B_last, M, N], accumulated in f32 and rounded once.

    Args:
      weights: [M, K_l] each, bf16 or f16; or with more columns, which are finite.
      embeddings: [B_l, K_l, N] each, the same dtype; N a multiple of 8.
      parents: None for the first level, then [B_l] int32 into the batch of the level before.
      config: legal; its class selects the columns of a tile, or the kernel of `resident`.
    """
    if isinstance(config, ResidentCompressionConfig):
        return resident_compression(weights, embeddings, parents, config=config, num_sms=num_sms)
    launch_levels = functools.partial(_launch, config=config, num_sms=num_sms)
    last = len(weights) - 1
    is_shared = config.single_launch and last > 0
    make_phase: Any = Phase
    alignment = WEIGHT_ALIGNMENT
    if isinstance(config, PackedCompressionConfig):
        make_phase = functools.partial(PackedPhase, block_n=config.block_n)
        flops = sum(2 * w.shape[0] * e.size for w, e in zip(weights, embeddings, strict=True))
        alignment = TMA_ALIGNMENT if flops < PAD_FROM_FLOPS else WEIGHT_ALIGNMENT
    aligned = _aligned(weights, alignment)

    def level(i: int, fragments: Any) -> _Level:
        batch, k, n = embeddings[i].shape
        weight, k_offset = aligned[i]
        phase = make_phase(
            batch=batch,
            k=k,
            m=weight.shape[0],
            n=n,
            block_m=config.block_m,
            k_offset=k_offset,
            from_fragments=i > 0,
            # A CTA claims user tiles by itself, independent of the other CTAs of its cluster.
            cluster=1 if is_shared and i == last - 1 else config.cluster,
        )
        if i < last:
            phase = _halved(phase, num_sms)
        return phase, Operands(weight, embeddings[i], parents[i], fragments)

    fragments = None
    for i in range(last - 1 if is_shared else last):
        fragments = launch_levels(level(i, fragments), (None, None))
    if is_shared:
        return launch_levels(level(last - 1, fragments), level(last, None))
    return launch_levels((None, None), level(last, fragments))
