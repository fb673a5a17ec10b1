"""The producer warp and the consumer warpgroups of linear compression: see `linear_compression`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import accumulator, fragment, mosaic
from ikbo_jax.pallas.linear_compression_tiles import (
    BLOCK_N,
    Claims,
    Operands,
    Phase,
    Role,
    Tile,
    locate,
)
from ikbo_jax.tuning.configs import BLOCK_K, NUM_CONSUMERS, STAGING_SLOTS, WGMMA_M

#: k steps before the end of a tile at which its fragment is asked for.
FRAGMENT_AHEAD = 3


# Tiles of a worker


def _static_tiles(
    role: Role, phase: Phase, body: Callable[[Tile, Any], Any], *, of_user: bool
) -> None:
    """Runs `body(tile, step)` for this worker's tiles of a phase; it returns the next step."""
    tiles = role.tiles
    count, tile_of = (
        (tiles.user_count, tiles.user_tile) if of_user else (tiles.cand_count, tiles.cand_tile)
    )

    def one(i: Any, step: Any) -> Any:
        return body(locate(phase, tile_of(role.worker, i)), step)

    lax.fori_loop(0, count(role.worker), one, jnp.int32(0))


def _claimed_tiles(
    phase: Phase,
    next_ticket: Callable[[Any], Any],
    body: Callable[[Tile, Any, Callable[[], Any]], tuple[Any, Any]],
) -> None:
    """Runs `body(tile, step, take_next)` for this CTA's tickets, until one names no tile.

    `body` returns the next ticket, which `take_next` gives, and the next step.
    """

    def one(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        i, ticket, step = carry
        take_next = functools.partial(next_ticket, i + 1)
        return i + 1, *body(locate(phase, ticket), step, take_next)

    first = (jnp.int32(0), next_ticket(jnp.int32(0)), jnp.int32(0))
    lax.while_loop(lambda carry: carry[1] < phase.tiles, one, first)


# Producer


def _load(role: Role, phase: Phase, operands: Operands, tile: Tile, step: Any) -> Any:
    """Brings one tile's operands into the ring; `step` counts the stages used so far."""
    shared = role.shared
    (_, weight), (_, embedding) = shared.weight, shared.embedding

    def load_step(i: Any, step: Any) -> Any:
        stage = role.stage(step)

        plgpu.barrier_wait(shared.stage_free.at[stage])
        ready = shared.stage_ready.at[stage]
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


def _drain(role: Role) -> None:
    """Waits until every stage is free, so that no arrival outlives its barrier."""
    for stage in range(role.config.num_stages):
        plgpu.barrier_wait(role.shared.stage_free.at[stage])


def produce(
    role: Role,
    phases: tuple[Phase | None, Phase | None],
    operands: tuple[Any, Any],
    claims: Claims | None,
) -> None:
    """The producer warp."""
    (user_phase, cand_phase), (user, cand) = phases, operands

    if claims is not None and user_phase is not None:
        user_role = role.in_claimed_phase(claims)

        def take(i: Any) -> Any:
            ticket = mosaic.next_ticket(claims.tickets, i, interpret=role.interpret)
            slot = lax.rem(i, claims.taken.shape[0])
            claims.taken[slot] = ticket
            plgpu.barrier_arrive(claims.taken_ready.at[slot])
            return ticket

        def load_claimed(tile: Tile, step: Any, take_next: Callable[[], Any]) -> tuple[Any, Any]:
            step = _load(user_role, user_phase, user, tile, step)
            return take_next(), step

        _claimed_tiles(user_phase, take, load_claimed)
    elif user_phase is not None:
        _static_tiles(
            role, user_phase, functools.partial(_load, role, user_phase, user), of_user=True
        )
    if cand_phase is not None:
        _static_tiles(
            role, cand_phase, functools.partial(_load, role, cand_phase, cand), of_user=False
        )
    _drain(role)
    if claims is not None:
        _drain(user_role)


# Consumers


def _multiply(
    role: Role,
    phase: Phase,
    step: Any,
    jobs: Sequence[Callable[[], None]],
    load_above: Callable[[], fragment.Fragment] | None,
    columns: int,
) -> tuple[jax.Array, fragment.Fragment | None]:
    """The accumulator [64, block_m] f32 of one tile, e.T @ w.T, and the fragment to be added to it.

    `jobs` run one after each of the first k steps, while that step's WGMMAs are in flight.
    Only the first `columns` compressed rows are multiplied; the rest of the tile is zero.
    """
    shared, last = role.shared, phase.k_steps - 1
    (weight, _), (embedding, _) = shared.weight, shared.embedding
    # Whole instructions only, but none that would multiply nothing but padding.
    last_k = pl.cdiv(phase.k - last * BLOCK_K, accumulator.WGMMA_K) * accumulator.WGMMA_K

    def k_step(i: Any, acc: Any, *, is_first: bool = False, k: int = BLOCK_K) -> Any:
        stage = role.stage(step + i)
        plgpu.barrier_wait(shared.stage_ready.at[stage])
        acc = accumulator.wgmma(
            acc,
            embedding.at[stage, role.consumer],
            weight.at[stage, :columns],
            overwrite=is_first,
            k=k,
            interpret=role.interpret,
        )
        # The step before this one has been read; its stage goes back before any other work.
        plgpu.wgmma_wait(1)
        if not is_first:
            plgpu.barrier_arrive(shared.stage_free.at[role.stage(step + i - 1)])
        return acc

    def run(acc: Any) -> tuple[jax.Array, fragment.Fragment | None]:
        unrolled = min(max(len(jobs), 1), phase.k_steps)
        for i in range(unrolled):
            acc = k_step(i, acc, is_first=i == 0, k=last_k if i == last else BLOCK_K)
            if i < len(jobs):
                jobs[i]()
        ahead = FRAGMENT_AHEAD if load_above else 1
        early = max(unrolled, phase.k_steps - ahead)
        acc = accumulator.accumulate(unrolled, early, k_step, acc, interpret=role.interpret)
        # The chunks of the last tile and a fragment do not fit the registers together.
        is_late = unrolled < len(jobs)
        above = load_above() if load_above and not is_late else None
        for i in range(early, phase.k_steps):
            acc = k_step(i, acc, k=last_k if i == last else BLOCK_K)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.stage_free.at[role.stage(step + last)])
        for job in jobs[unrolled:]:
            job()
        if load_above and is_late:
            above = load_above()
        return accumulator.accumulated(acc, columns, interpret=role.interpret), above

    acc, above = accumulator.with_accumulator(run, columns, interpret=role.interpret)
    if columns < phase.block_m:
        padding = jnp.zeros((WGMMA_M, phase.block_m - columns), jnp.float32)
        acc = jnp.concatenate([acc, plgpu.layout_cast(padding, plgpu.Layout.WGMMA)], axis=1)
    return acc, above


def _add(
    role: Role, phase: Phase, tile: Tile, acc: jax.Array, above: fragment.Fragment | None
) -> jax.Array:
    """Adds the level above to a finished tile."""
    if above is None:
        return acc
    # Rows past the batch need no sum; but the branch is there for ptxas, which without it unpacks
    # the fragment among the last WGMMAs, and waits for its loads there.
    return lax.cond(
        tile.row < phase.batch,
        lambda: fragment.add(acc, above, interpret=role.interpret),
        lambda: acc,
    )


def _user_of(operands: Operands, row: Any) -> Any:
    """The row of the level above, clamped: an index out of range never reads outside."""
    row = jnp.minimum(row, operands.index.shape[0] - 1)
    return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)


def _fragment_at(
    role: Role, phase: Phase, memory: fragment.Fragment, row: Any, tile: Tile
) -> fragment.Fragment:
    """The part of a row's fragments that belongs to a tile of `phase`."""
    upper, lower = (plane.at[row, tile.n_tile, role.consumer] for plane in memory)
    columns = (tile.m_tile * phase.block_m, phase.block_m)
    return fragment.columns_of(fragment.Fragment(upper, lower), *columns, interpret=role.interpret)


def _load_fragment(role: Role, phase: Phase, memory: fragment.Fragment) -> fragment.Fragment:
    return fragment.load(memory, phase.block_m, interpret=role.interpret)


def _compute_fragment(
    role: Role,
    phase: Phase,
    operands: Operands,
    fragments_out: fragment.Fragment,
    tile: Tile,
    step: Any,
    when_multiplied: Callable[[], Any],
) -> tuple[Any, Any]:
    """One tile of a level that others look up.

    Returns what `when_multiplied` gives, which runs once the tile's stages are read, and the stages
    used so far.
    """
    load_above = None
    if phase.from_fragments:
        user = _user_of(operands, tile.row)
        memory = _fragment_at(role, phase, operands.fragments_in, user, tile)
        load_above = functools.partial(_load_fragment, role, phase, memory)
    acc, above = _multiply(role, phase, step, [], load_above, phase.block_m)
    outcome = when_multiplied()
    acc = _add(role, phase, tile, acc, above)

    @pl.when(tile.row < phase.batch)
    def _() -> None:
        target = _fragment_at(role, phase, fragments_out, tile.row, tile)
        fragment.store(target, acc, interpret=role.interpret)

    return outcome, step + phase.k_steps


def _store_chunk(
    role: Role,
    phase: Phase,
    output: Any,
    chunk: int,
    values: jax.Array,
    tile: Tile,
    is_valid: Any,
) -> None:
    """Sends `epilogue_rows` compressed rows of a finished tile to the output."""
    rows = role.config.epilogue_rows
    registers_view, copy_view = (
        view.at[role.consumer, chunk % STAGING_SLOTS] for view in role.shared.staging
    )

    if phase.batch % phase.cluster:
        # TMA alone would drop rows past the batch, but not of a batch of one: Mosaic GPU leaves
        # axes of size one out of its descriptors, and all of their indices mean the same row.
        is_valid &= tile.row < phase.batch

    @pl.when(is_valid)
    def _() -> None:
        # All but the newest copy have read their staging buffer, so this one is free.
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
                pl.ds(tile.n_tile * BLOCK_N + role.consumer * WGMMA_M, WGMMA_M),
            ],
        )


def _compute_candidates(
    role: Role,
    phase: Phase,
    operands: Operands,
    output: Any,
    wait_for_users: Callable[[], None] | None,
) -> None:
    """All candidate tiles of this CTA; each is stored during the first k steps of the next one."""
    count = role.tiles.cand_count(role.worker)
    chunks = range(phase.block_m // role.config.epilogue_rows)
    store = functools.partial(_store_chunk, role, phase, output)

    def tile_of(i: Any) -> Tile:
        return locate(phase, role.tiles.cand_tile(role.worker, i))

    def compute(i: Any, finished: jax.Array) -> jax.Array:
        i = mosaic.opaque(i, interpret=role.interpret)
        tile, previous = tile_of(i), tile_of(i - 1)
        users: list[Any] = []

        def first_job() -> None:
            store(0, finished, previous, i > 0)
            if phase.from_fragments:
                # Long before it is needed: used at once, the index costs its whole latency.
                users.append(_user_of(operands, tile.row))

        jobs = [first_job]
        jobs += [functools.partial(store, c, finished, previous, i > 0) for c in chunks[1:]]

        def load_above() -> fragment.Fragment:
            if wait_for_users is not None:
                pl.when(i == 0)(wait_for_users)
            memory = _fragment_at(role, phase, operands.fragments_in, users[-1], tile)
            return _load_fragment(role, phase, memory)

        multiply = functools.partial(
            _multiply,
            role,
            phase,
            mosaic.opaque(i * phase.k_steps, interpret=role.interpret),
            jobs,
            load_above if phase.from_fragments else None,
        )
        if phase.m_tiles == 1:
            acc, above = multiply(phase.last_block_m)
        elif phase.last_block_m == phase.block_m or not role.config.trim:
            acc, above = multiply(phase.block_m)
        else:  # M = 433 in tiles of 224: 440 rows are multiplied, not 448
            acc, above = lax.cond(
                tile.m_tile == phase.m_tiles - 1,
                lambda: multiply(phase.last_block_m),
                lambda: multiply(phase.block_m),
            )
        acc = _add(role, phase, tile, acc, above)
        return acc.astype(output.dtype)

    nothing = jnp.zeros((WGMMA_M, phase.block_m), output.dtype)
    nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
    finished = lax.fori_loop(0, count, compute, nothing)
    for c in chunks:
        store(c, finished, tile_of(count - 1), count > 0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _free_all(role: Role) -> None:
    """Consumer: says that it reads no stage, once all of them have been read or before any is."""
    for stage in range(role.config.num_stages):
        plgpu.barrier_arrive(role.shared.stage_free.at[stage])


def consume(
    role: Role,
    phases: tuple[Phase | None, Phase | None],
    operands: tuple[Any, Any],
    outputs: tuple[Any, Any],
    claims: Claims | None,
) -> None:
    """A consumer warpgroup."""
    (user_phase, cand_phase), (user, cand), (output, fragments) = phases, operands, outputs
    wait_for_users = None
    if claims is not None and user_phase is not None:
        user_role = role.in_claimed_phase(claims)

        def taken(i: Any) -> Any:
            slot = lax.rem(i, claims.taken.shape[0])
            plgpu.barrier_wait(claims.taken_ready.at[slot])
            ticket = claims.taken[slot]
            # The user phase reads no stage any more: its last tile leaves while others come in.
            pl.when(ticket >= user_phase.tiles)(lambda: _free_all(role))
            return ticket

        def compute(tile: Tile, step: Any, take_next: Callable[[], Any]) -> tuple[Any, Any]:
            ticket, step = _compute_fragment(
                user_role, user_phase, user, fragments, tile, step, take_next
            )
            mosaic.signal(claims.users_ready, interpret=role.interpret)
            return ticket, step

        def wait_for_users() -> None:
            arrivals = user_phase.tiles * NUM_CONSUMERS
            mosaic.wait(claims.users_ready, arrivals, interpret=role.interpret)

        _free_all(user_role)
        _claimed_tiles(user_phase, taken, compute)
    else:
        _free_all(role)
    if claims is None and user_phase is not None:

        def compute_own(tile: Tile, step: Any) -> Any:
            rest = (fragments, tile, step, lambda: None)
            return _compute_fragment(role, user_phase, user, *rest)[1]

        _static_tiles(role, user_phase, compute_own, of_user=True)
    if cand_phase is not None:
        _compute_candidates(role, cand_phase, cand, output, wait_for_users)
