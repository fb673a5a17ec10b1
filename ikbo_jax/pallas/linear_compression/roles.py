"""The producer warp and the consumer warpgroups of linear compression; see `linear_compression`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import fragment, mma, mosaic
from ikbo_jax.pallas.linear_compression.tiles import (
    BLOCK_N,
    CompressionContext,
    Operands,
    Phase,
    Tile,
    locate,
)
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_K, WGMMA_M
from ikbo_jax.problems.linear_compression import STAGING_SLOTS

#: A tile loads its fragment this many k steps before its end.
FRAGMENT_AHEAD = 3


# Tiles of a worker


def _static_tiles(
    ctx: CompressionContext, phase: Phase, body: Callable[[Tile, Any], Any], *, of_user: bool
) -> None:
    """Calls `body(tile, step)`, which returns the next step, for this worker's tiles of a phase."""
    tiles = ctx.shape.tiles
    count, tile_of = (
        (tiles.user_count, tiles.user_tile) if of_user else (tiles.cand_count, tiles.cand_tile)
    )

    def one(i: Any, step: Any) -> Any:
        return body(locate(phase, tile_of(ctx.worker, i)), step)

    lax.fori_loop(0, count(ctx.worker), one, jnp.int32(0))


def _claimed_tiles(
    phase: Phase,
    next_ticket: Callable[[Any], Any],
    body: Callable[[Tile, Any, Callable[[], Any]], tuple[Any, Any]],
) -> None:
    """Calls `body(tile, step, take_next)` for this CTA's tickets, until a ticket names no tile.

    `take_next()` is the next ticket; `body` returns it and the next step.
    """

    def one(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        i, ticket, step = carry
        take_next = functools.partial(next_ticket, i + 1)
        return i + 1, *body(locate(phase, ticket), step, take_next)

    first = (jnp.int32(0), next_ticket(jnp.int32(0)), jnp.int32(0))
    lax.while_loop(lambda carry: carry[1] < phase.tiles, one, first)


# Producer


def _load(ctx: CompressionContext, phase: Phase, operands: Operands, tile: Tile, step: Any) -> Any:
    """Loads one tile's operands through the ring; returns the next step."""
    shared = ctx.shared
    (_, weight), (_, embedding) = shared.weight, shared.embedding

    def load_step(i: Any, step: Any) -> Any:
        stage = shared.stages.slot(step)
        shared.stages.await_free(step)
        ready = shared.stages.ready.at[stage]
        k = i * BLOCK_K
        plgpu.copy_gmem_to_smem(
            operands.weight.at[
                pl.ds(tile.m_tile * phase.block_m, phase.block_m),
                pl.ds(phase.k_offset + k, BLOCK_K),
            ],
            weight.at[stage, : phase.block_m],
            ready,
            collective_axes="cluster" if phase.cluster > 1 else None,
        )
        for consumer in range(NUM_CONSUMERS):
            columns = pl.ds(tile.n_tile * BLOCK_N + consumer * WGMMA_M, WGMMA_M)
            plgpu.copy_gmem_to_smem(
                operands.embedding.at[tile.row, pl.ds(k, BLOCK_K), columns],
                embedding.at[stage, consumer],
                ready,
            )
        return step + 1

    return lax.fori_loop(0, phase.k_steps, load_step, step)


def produce(ctx: CompressionContext) -> None:
    """The producer warp."""
    (user_phase, cand_phase), (user, cand), claims = ctx.shape.phases, ctx.operands, ctx.claims

    if claims is not None and user_phase is not None:
        user_ctx = ctx.in_claimed_phase()

        def take(i: Any) -> Any:
            ticket = mosaic.next_ticket(claims.counter, i, interpret=ctx.interpret)
            claims.tickets.send_words(i, (ticket,))
            return ticket

        def load_claimed(tile: Tile, step: Any, take_next: Callable[[], Any]) -> tuple[Any, Any]:
            step = _load(user_ctx, user_phase, user, tile, step)
            return take_next(), step

        _claimed_tiles(user_phase, take, load_claimed)
    elif user_phase is not None:
        _static_tiles(
            ctx, user_phase, functools.partial(_load, ctx, user_phase, user), of_user=True
        )
    if cand_phase is not None:
        _static_tiles(
            ctx, cand_phase, functools.partial(_load, ctx, cand_phase, cand), of_user=False
        )
    ctx.shared.stages.drain()
    if claims is not None:
        user_ctx.shared.stages.drain()


# Consumers


def _multiply(
    ctx: CompressionContext,
    phase: Phase,
    step: Any,
    jobs: Sequence[Callable[[], None]],
    load_coarser: Callable[[], fragment.Fragment] | None,
    columns: int,
) -> tuple[jax.Array, fragment.Fragment | None]:
    """(accumulator [64, block_m] f32 of one tile, e.T @ w.T; coarser fragment to be added to it).

    After each of the first k steps one of `jobs` is called, while that step's WGMMAs are in flight.
    Only the first `columns` compressed rows are multiplied; the rest of the tile is zero.
    """
    shared, last = ctx.shared, phase.k_steps - 1
    (weight, _), (embedding, _) = shared.weight, shared.embedding
    # The last k step ends after the last WGMMA instruction that multiplies more than padding.
    last_k = pl.cdiv(phase.k - last * BLOCK_K, WGMMA_K) * WGMMA_K

    def k_step(i: Any, acc: Any, *, is_first: bool = False, k: int = BLOCK_K) -> Any:
        stage = shared.stages.slot(step + i)
        shared.stages.await_ready(step + i)
        acc = mma.wgmma(
            acc,
            embedding.at[stage, ctx.consumer],
            weight.at[stage, :columns],
            overwrite=is_first,
            k=k,
            interpret=ctx.interpret,
        )
        # Waits for the WGMMAs of the previous k step, and frees their stage before any other work.
        plgpu.wgmma_wait(1)
        if not is_first:
            shared.stages.release(step + i - 1)
        return acc

    def all_k_steps(acc: Any) -> tuple[jax.Array, fragment.Fragment | None]:
        unrolled = min(max(len(jobs), 1), phase.k_steps)
        for i in range(unrolled):
            acc = k_step(i, acc, is_first=i == 0, k=last_k if i == last else BLOCK_K)
            if i < len(jobs):
                jobs[i]()
        ahead = FRAGMENT_AHEAD if load_coarser else 1
        early = max(unrolled, phase.k_steps - ahead)
        acc = mma.accumulate(unrolled, early, k_step, acc, interpret=ctx.interpret)
        # Registers do not hold both the remaining chunks of the previous tile and a fragment.
        is_late = unrolled < len(jobs)
        coarser = load_coarser() if load_coarser and not is_late else None
        for i in range(early, phase.k_steps):
            acc = k_step(i, acc, k=last_k if i == last else BLOCK_K)
        plgpu.wgmma_wait(0)
        shared.stages.release(step + last)
        for job in jobs[unrolled:]:
            job()
        if load_coarser and is_late:
            coarser = load_coarser()
        return mma.after_wait(acc, interpret=ctx.interpret), coarser

    acc, coarser = mma.with_accumulator(all_k_steps, columns, interpret=ctx.interpret)
    return mma.pad(acc, phase.block_m), coarser


def _add(
    ctx: CompressionContext,
    phase: Phase,
    tile: Tile,
    acc: jax.Array,
    coarser: fragment.Fragment | None,
) -> jax.Array:
    """Adds the coarser level's fragment to a finished tile."""
    if coarser is None:
        return acc
    # Rows past the batch need no sum. But the branch is there for ptxas, which without it unpacks
    # the fragment among the last WGMMAs, and waits for the fragment's loads there.
    return lax.cond(
        tile.row < phase.batch,
        lambda: fragment.add(acc, coarser, interpret=ctx.interpret),
        lambda: acc,
    )


def _user_of(operands: Operands, row: Any) -> Any:
    """The coarser level's row, clamped: an index out of range never reads outside the array."""
    row = jnp.minimum(row, operands.index.shape[0] - 1)
    return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)


def _fragment_at(
    ctx: CompressionContext, phase: Phase, memory: fragment.Fragment, row: Any, tile: Tile
) -> fragment.Fragment:
    """The part of a row's fragments that belongs to a tile of `phase`."""
    upper, lower = (plane.at[row, tile.n_tile, ctx.consumer] for plane in memory)
    columns = (tile.m_tile * phase.block_m, phase.block_m)
    return fragment.columns_of(fragment.Fragment(upper, lower), *columns, interpret=ctx.interpret)


def _load_fragment(
    ctx: CompressionContext, phase: Phase, memory: fragment.Fragment
) -> fragment.Fragment:
    return fragment.load(memory, phase.block_m, interpret=ctx.interpret)


def _compute_fragment(
    ctx: CompressionContext,
    phase: Phase,
    operands: Operands,
    fragments_out: fragment.Fragment,
    tile: Tile,
    step: Any,
    after_multiply: Callable[[], Any],
) -> tuple[Any, Any]:
    """Computes one tile of a level that a finer level looks up, and stores it as a fragment.

    Returns the result of `after_multiply`, which is called once the tile's stages are read, and the
    next step.
    """
    load_coarser = None
    if phase.from_fragments:
        user = _user_of(operands, tile.row)
        memory = _fragment_at(ctx, phase, operands.fragments_in, user, tile)
        load_coarser = functools.partial(_load_fragment, ctx, phase, memory)
    acc, coarser = _multiply(ctx, phase, step, [], load_coarser, phase.block_m)
    outcome = after_multiply()
    acc = _add(ctx, phase, tile, acc, coarser)

    @pl.when(tile.row < phase.batch)
    def _() -> None:
        target = _fragment_at(ctx, phase, fragments_out, tile.row, tile)
        fragment.store(target, acc, interpret=ctx.interpret)

    return outcome, step + phase.k_steps


def _store_chunk(
    ctx: CompressionContext,
    phase: Phase,
    output: Any,
    chunk: int,
    values: jax.Array,
    tile: Tile,
    is_valid: Any,
) -> None:
    """Stores `epilogue_rows` compressed rows of a finished tile."""
    rows = ctx.config.epilogue_rows
    registers_view, copy_view = (
        view.at[ctx.consumer, chunk % STAGING_SLOTS] for view in ctx.shared.staging
    )

    if phase.batch % phase.cluster:
        # TMA drops rows past the batch, but not past a batch of one: Mosaic GPU leaves axes of size
        # one out of its descriptors, so that all their indices mean the same row.
        is_valid &= tile.row < phase.batch

    @pl.when(is_valid)
    def _() -> None:
        # All copies but the newest have read their staging buffers, so this buffer is free.
        plgpu.wait_smem_to_gmem(STAGING_SLOTS - 1, wait_read_only=True)
        registers_view.transpose((1, 0))[...] = lax.slice(
            values, (0, chunk * rows), (WGMMA_M, (chunk + 1) * rows)
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            copy_view,
            output.at[
                tile.row,
                pl.ds(tile.m_tile * phase.block_m + chunk * rows, rows),
                pl.ds(tile.n_tile * BLOCK_N + ctx.consumer * WGMMA_M, WGMMA_M),
            ],
        )


def _compute_candidates(
    ctx: CompressionContext,
    phase: Phase,
    operands: Operands,
    output: Any,
    wait_for_users: Callable[[], None] | None,
) -> None:
    """Computes this CTA's candidate tiles; stores each during the next tile's first k steps."""
    count = ctx.shape.tiles.cand_count(ctx.worker)
    chunks = range(phase.block_m // ctx.config.epilogue_rows)
    store = functools.partial(_store_chunk, ctx, phase, output)

    def tile_of(i: Any) -> Tile:
        return locate(phase, ctx.shape.tiles.cand_tile(ctx.worker, i))

    def compute(i: Any, finished: jax.Array) -> jax.Array:
        i = mosaic.opaque(i, interpret=ctx.interpret)
        tile, previous = tile_of(i), tile_of(i - 1)
        users: list[Any] = []

        def first_job() -> None:
            store(0, finished, previous, i > 0)
            if phase.from_fragments:
                # Early, so that the k steps hide the latency of the index.
                users.append(_user_of(operands, tile.row))

        jobs = [first_job]
        jobs += [functools.partial(store, c, finished, previous, i > 0) for c in chunks[1:]]

        def load_coarser() -> fragment.Fragment:
            if wait_for_users is not None:
                pl.when(i == 0)(wait_for_users)
            memory = _fragment_at(ctx, phase, operands.fragments_in, users[-1], tile)
            return _load_fragment(ctx, phase, memory)

        multiply = functools.partial(
            _multiply,
            ctx,
            phase,
            mosaic.opaque(i * phase.k_steps, interpret=ctx.interpret),
            jobs,
            load_coarser if phase.from_fragments else None,
        )
        if phase.m_tiles == 1:
            acc, coarser = multiply(phase.last_block_m)
        elif phase.last_block_m == phase.block_m or not ctx.config.trim:
            acc, coarser = multiply(phase.block_m)
        else:  # M = 433 in tiles of 224: 440 rows are multiplied, not 448
            acc, coarser = lax.cond(
                tile.m_tile == phase.m_tiles - 1,
                lambda: multiply(phase.last_block_m),
                lambda: multiply(phase.block_m),
            )
        acc = _add(ctx, phase, tile, acc, coarser)
        return acc.astype(output.dtype)

    finished = lax.fori_loop(0, count, compute, mma.zeros(phase.block_m, output.dtype))
    for c in chunks:
        store(c, finished, tile_of(count - 1), count > 0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def consume(ctx: CompressionContext) -> None:
    """A consumer warpgroup."""
    (user_phase, cand_phase), (user, cand), claims = ctx.shape.phases, ctx.operands, ctx.claims
    output, fragments = ctx.outputs
    wait_for_users = None
    if claims is not None and user_phase is not None:
        user_ctx = ctx.in_claimed_phase()

        def receive(i: Any) -> Any:
            claims.tickets.await_ready(i)
            ticket = claims.tickets.words[claims.tickets.slot(i), 0]
            # The user phase reads no more stages: candidate operands load while it ends.
            pl.when(ticket >= user_phase.tiles)(ctx.shared.stages.release_all)
            return ticket

        def compute(tile: Tile, step: Any, take_next: Callable[[], Any]) -> tuple[Any, Any]:
            ticket, step = _compute_fragment(
                user_ctx, user_phase, user, fragments, tile, step, take_next
            )
            mosaic.signal(claims.users_ready, interpret=ctx.interpret)
            return ticket, step

        def wait_for_users() -> None:
            arrivals = user_phase.tiles * NUM_CONSUMERS
            mosaic.wait(claims.users_ready, arrivals, interpret=ctx.interpret)

        user_ctx.shared.stages.release_all()
        _claimed_tiles(user_phase, receive, compute)
    else:
        ctx.shared.stages.release_all()
    if claims is None and user_phase is not None:

        def compute_static(tile: Tile, step: Any) -> Any:
            rest = (fragments, tile, step, lambda: None)
            return _compute_fragment(ctx, user_phase, user, *rest)[1]

        _static_tiles(ctx, user_phase, compute_static, of_user=True)
    if cand_phase is not None:
        _compute_candidates(ctx, cand_phase, cand, output, wait_for_users)
