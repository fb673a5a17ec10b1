"""The producer warp and the consumer warpgroups of linear compression; see `kernel`."""

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
    CompressionContext,
    Operands,
    Phase,
    Tile,
    locate,
)
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_K

#: The fragments of a tile, one for each accumulator.
Fragments = tuple[fragment.Fragment, ...]
#: A tile loads its fragment this many k steps before its end.
FRAGMENT_AHEAD = 3


def _static_tiles(
    ctx: CompressionContext, phase: Phase, body: Callable[[Tile, Any], Any], *, of_user: bool
) -> None:
    """Calls `body(tile, step)` for this worker's tiles of a phase; it returns the next step."""
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
    """Calls body(tile, step, take_next), which returns (ticket, step), until no tile is left."""

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

    def load_step(i: Any, step: Any) -> Any:
        stage = shared.stages.slot(step)
        shared.stages.await_free(step)
        ready = shared.stages.ready.at[stage]
        k = i * BLOCK_K
        for part, target in enumerate(ctx.columns_of(phase).weight_parts(stage)):
            begin = tile.m_tile * phase.block_m + part * phase.consumer_rows
            plgpu.copy_gmem_to_smem(
                operands.weight.at[
                    pl.ds(begin, phase.consumer_rows), pl.ds(phase.k_offset + k, BLOCK_K)
                ],
                target,
                ready,
                collective_axes="cluster" if phase.cluster > 1 else None,
            )
        ctx.columns_of(phase).load(operands.embedding, tile, k, stage)
        return step + 1

    return lax.fori_loop(0, phase.k_steps, load_step, step)


def produce(ctx: CompressionContext) -> None:
    """Loads the operands of all tiles of the CTA, as the producer warp."""
    (user_phase, cand_phase), (user, cand), claims = ctx.shape.phases, ctx.operands, ctx.claims

    if claims is not None and user_phase is not None:
        user_ctx = ctx.in_claimed_phase()

        def take(i: Any) -> Any:
            ticket = mosaic.next_ticket(claims.counter, i)
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
    load_coarser: Callable[[], Fragments] | None,
    columns: int,
) -> tuple[tuple[jax.Array, ...], Fragments | None]:
    """Multiplies a tile; returns accumulators [64, rows] f32, and coarser fragments to be added.

    Calls one of `jobs` after each of the first k steps, while the step's WGMMAs are in flight.
    Compressed rows past the first `columns` are zero.
    """
    shared, last = ctx.shared, phase.k_steps - 1
    # The last k step ends after the last WGMMA instruction that multiplies more than padding.
    last_k = pl.cdiv(phase.k - last * BLOCK_K, WGMMA_K) * WGMMA_K

    def k_step(i: Any, accs: Any, *, is_first: bool = False, k: int = BLOCK_K) -> Any:
        stage = shared.stages.slot(step + i)
        shared.stages.await_ready(step + i)
        accs = ctx.columns_of(phase).multiply(accs, stage, columns, overwrite=is_first, k=k)
        # Waits for the WGMMAs of the previous k step, and frees their stage before any other work.
        plgpu.wgmma_wait(phase.accumulators)
        if not is_first:
            shared.stages.release(step + i - 1)
        return accs

    def all_k_steps(accs: Any) -> tuple[tuple[jax.Array, ...], Fragments | None]:
        unrolled = min(max(len(jobs), 1), phase.k_steps)
        # Registers do not hold both the remaining chunks of the previous tile and a fragment.
        is_late = unrolled < len(jobs)
        is_early = is_late and phase.holds_fragments_early
        coarser = None
        for i in range(unrolled):
            accs = k_step(i, accs, is_first=i == 0, k=last_k if i == last else BLOCK_K)
            if load_coarser and is_early and i == 0:
                coarser = load_coarser()
            if i < len(jobs):
                jobs[i]()
        ahead = FRAGMENT_AHEAD if load_coarser else 1
        early = max(unrolled, phase.k_steps - ahead)
        accs = mma.accumulate(unrolled, early, k_step, accs)
        if load_coarser and not is_late:
            coarser = load_coarser()
        for i in range(early, phase.k_steps):
            accs = k_step(i, accs, k=last_k if i == last else BLOCK_K)
        plgpu.wgmma_wait(0)
        shared.stages.release(step + last)
        for job in jobs[unrolled:]:
            job()
        if load_coarser and is_late and not is_early:
            coarser = load_coarser()
        return tuple(map(mma.after_wait, accs)), coarser

    accs, coarser = ctx.columns_of(phase).with_accumulators(all_k_steps, columns)
    return tuple(mma.pad(acc, phase.consumer_rows) for acc in accs), coarser


def _add(
    ctx: CompressionContext,
    phase: Phase,
    tile: Tile,
    accs: tuple[jax.Array, ...],
    coarser: Fragments | None,
) -> tuple[jax.Array, ...]:
    """Adds the coarser level's fragments to a finished tile."""
    if coarser is None:
        return accs
    # The branch is for ptxas: without the branch, ptxas unpacks the fragment among the last WGMMAs,
    # and waits for the fragment's loads there.
    return lax.cond(
        tile.row < phase.rows,
        lambda: tuple(fragment.add(acc, part) for acc, part in zip(accs, coarser, strict=True)),
        lambda: accs,
    )


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

    Returns (the result of `after_multiply`, which is called when the tile's stages are read; next
    step).
    """
    load_coarser = None
    if phase.from_fragments:
        users = ctx.columns_of(phase).look_up(operands, tile)
        load_coarser = functools.partial(
            ctx.columns_of(phase).load_fragments, operands.fragments_in, users, tile
        )
    accs, coarser = _multiply(ctx, phase, step, [], load_coarser, phase.consumer_rows)
    outcome = after_multiply()
    accs = _add(ctx, phase, tile, accs, coarser)
    ctx.columns_of(phase).store_fragments(fragments_out, tile, accs)
    return outcome, step + phase.k_steps


def _compute_candidates(
    ctx: CompressionContext,
    phase: Phase,
    operands: Operands,
    output: Any,
    wait_for_users: Callable[[], None] | None,
) -> None:
    """Computes this CTA's candidate tiles; stores each during the next tile's first k steps."""
    count = ctx.shape.tiles.cand_count(ctx.worker)
    chunks = range(phase.accumulators * phase.consumer_rows // ctx.config.epilogue_rows)
    store = functools.partial(ctx.columns_of(phase).store_chunk, output)

    def tile_of(i: Any) -> Tile:
        return locate(phase, ctx.shape.tiles.cand_tile(ctx.worker, i))

    def look_up_ahead(i: Any, ahead: int) -> Any:
        if not (phase.from_fragments and ctx.columns.looks_up_ahead):
            return None
        return ctx.columns_of(phase).look_up(operands, tile_of(i + ahead))

    def compute(i: Any, carry: tuple[tuple[jax.Array, ...], Any]) -> tuple[Any, Any]:
        finished, users_ahead = carry
        i = mosaic.opaque(i)
        tile, previous = tile_of(i), tile_of(i - 1)
        users = [] if users_ahead is None else [users_ahead]
        users_ahead = look_up_ahead(i, 1)

        def first_job() -> None:
            store(0, finished, previous, i > 0)
            if phase.from_fragments and not ctx.columns.looks_up_ahead:
                # Early, so that the k steps hide the latency of the index.
                users.append(ctx.columns_of(phase).look_up(operands, tile))

        jobs = [first_job]
        jobs += [functools.partial(store, c, finished, previous, i > 0) for c in chunks[1:]]

        def load_coarser() -> Fragments:
            if wait_for_users is not None:
                pl.when(i == 0)(wait_for_users)
            memory = operands.fragments_in
            return ctx.columns_of(phase).load_fragments(memory, users[-1], tile)

        multiply = functools.partial(
            _multiply,
            ctx,
            phase,
            mosaic.opaque(i * phase.k_steps),
            jobs,
            load_coarser if phase.from_fragments else None,
        )
        if phase.m_tiles == 1:
            accs, coarser = multiply(phase.last_consumer_rows)
        elif phase.last_consumer_rows == phase.consumer_rows or not ctx.config.trim:
            accs, coarser = multiply(phase.consumer_rows)
        else:  # M = 433 in tiles of 224: 440 rows are multiplied, not 448
            accs, coarser = lax.cond(
                tile.m_tile == phase.m_tiles - 1,
                lambda: multiply(phase.last_consumer_rows),
                lambda: multiply(phase.consumer_rows),
            )
        accs = _add(ctx, phase, tile, accs, coarser)
        return tuple(acc.astype(output.dtype) for acc in accs), users_ahead

    nothing = tuple(mma.zeros(phase.consumer_rows, output.dtype) for _ in range(phase.accumulators))
    finished, _ = lax.fori_loop(0, count, compute, (nothing, look_up_ahead(0, 0)))
    for c in chunks:
        store(c, finished, tile_of(count - 1), count > 0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def consume(ctx: CompressionContext) -> None:
    """Computes all tiles of the CTA, as a consumer warpgroup."""
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
            mosaic.signal(claims.users_ready)
            return ticket, step

        def wait_for_users() -> None:
            arrivals = user_phase.tiles * NUM_CONSUMERS
            mosaic.wait(claims.users_ready, arrivals)

        user_ctx.shared.stages.release_all()
        _claimed_tiles(user_phase, receive, compute)
    else:
        ctx.shared.stages.release_all()
        if user_phase is not None:

            def compute_static(tile: Tile, step: Any) -> Any:
                rest = (fragments, tile, step, lambda: None)
                return _compute_fragment(ctx, user_phase, user, *rest)[1]

            _static_tiles(ctx, user_phase, compute_static, of_user=True)
    if cand_phase is not None:
        _compute_candidates(ctx, cand_phase, cand, output, wait_for_users)
