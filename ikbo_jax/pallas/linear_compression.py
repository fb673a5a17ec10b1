"""Linear compression as one persistent, warp-specialised Mosaic GPU kernel for Hopper.

    out[b] = w_cand @ e_cand[b] + w_user @ e_user[cand_to_user[b]]

*user* stands for the level above and *candidate* for the finer level; a multi-level problem runs
this kernel once per level, and the last two levels share a launch where the configuration says so.

The product is computed transposed, out[b].T = e[b].T @ w.T, so that the compressed rows M become
the n of a WGMMA, which moves in steps of 8: for M = 433, 440 rows are multiplied instead of 512.

Warpgroups: 0 and 1 multiply, each 64 of a tile's 128 embedding columns by `block_m` compressed
rows; one warp of the third feeds them through a ring of shared memory stages, which runs on across
tiles. A finished tile stays in registers, rounded, and leaves in chunks during the
first k steps of the next one. The CTAs of a cluster work on neighbouring rows of the batch and
share their weight tiles through multicast.

The user result never becomes an array [U, M, N]: consumers write it to device memory as *fragments*
(see `fragment`), and a candidate tile asks for its user's fragment a few k steps before its end and
adds it in f32 before the one rounding.  User tiles have half as many compressed rows as candidate
tiles: they spread over twice as many CTAs and are done before the first candidate tile needs them.

Synchronisations:
  1. `stage_ready[s]`      producer -> consumers: TMA has filled stage s.
  2. `stage_free[s]`       consumers (of all CTAs of the cluster) -> producer: the WGMMAs of both
                           warpgroups have read stage s, or none has used it yet.
  3. `users_ready`         (single launch) device-wide counter of finished user tiles, never reset
                           within a launch; waited on once, in a consumer's first candidate tile.
  4. `claims`              (single launch) tickets for user tiles: a device-wide counter, and a ring
                           in shared memory that hands them from producer to consumers.
  5. `user_stage_free[s]`  (single launch) `stage_free` of the user phase, in which the CTAs of a
                           cluster work on tiles of their own.
  6. Staging buffers: `commit_smem` before a TMA store, `wait_smem_to_gmem` before the next write.

Forward progress of a single launch: a CTA takes the next user tile from the ticket counter until
none is left, and only then goes on to its candidate tiles.  So when a CTA waits for user results,
every user tile has been claimed by a CTA that runs and waits for nothing before it has finished it.
One resident cluster is enough, whatever else holds the SMs.  With user tiles owned by CTAs instead,
two such kernels, each partly resident, could wait for owners that the other keeps off the chip.

Source: the idea is Meta's IKBO ("linear compression embedding"); no code is shared with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import accumulator, fragment, mosaic, schedule
from ikbo_jax.tuning.configs import (
    BLOCK_K,
    NUM_CONSUMERS,
    STAGING_SLOTS,
    WGMMA_M,
    LinearCompressionConfig,
)

#: Embedding columns of a CTA tile.
BLOCK_N = NUM_CONSUMERS * WGMMA_M
#: Registers a thread of a consumer / the producer warpgroup holds: 2 x 240 + 24 <= 3 x 168.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
#: k steps before the end of a tile at which its fragment is asked for.
FRAGMENT_AHEAD = 3
#: Bytes to which weight rows are aligned.  TMA needs 16; with 128 a row of a tile is one L2 line,
#: not parts of two: 0.328 against 0.359 ms for the candidate product of the default shape (H200).
WEIGHT_ALIGNMENT = 128


@dataclasses.dataclass(frozen=True)
class _Phase:
    """Static description of the tiles of one level."""

    batch: int
    k: int
    m: int
    n: int
    block_m: int
    k_offset: int  # of this level's columns in the weight operand
    from_fragments: bool  # adds the fragments of the level above
    cluster: int

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.k, BLOCK_K)

    @property
    def m_tiles(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def last_block_m(self) -> int:
        """Compressed rows of the last M tile, in whole steps of a WGMMA's n."""
        return pl.cdiv(self.m - (self.m_tiles - 1) * self.block_m, 8) * 8

    @property
    def n_tiles(self) -> int:
        return pl.cdiv(self.n, BLOCK_N)

    @property
    def tiles(self) -> int:
        """Tiles that clusters compute, each of them `cluster` rows of the batch."""
        return pl.cdiv(self.batch, self.cluster) * self.n_tiles * self.m_tiles

    @property
    def cost(self) -> int:
        """Time of a tile, in arbitrary units."""
        return self.k_steps * self.block_m


class _Operands(NamedTuple):
    """Device memory of one phase; `index` and `fragments_in` are None at the coarsest level."""

    weight: Any  # [M, columns], shared by the levels of a launch
    embedding: Any  # [B, K, N]
    index: Any  # [B] int32, rows of the level above
    fragments_in: Any  # fragment.Fragment of [U, n_tiles, 2, ...]


class _Tile(NamedTuple):
    row: Any  # of the batch
    n_tile: Any
    m_tile: Any


class _Shared(NamedTuple):
    """Shared memory and barriers; a tile is (view for WGMMA, view for TMA): `mosaic.tile_views`."""

    weight: tuple[Any, Any]  # [stages, block_m, 64]
    embedding: tuple[Any, Any]  # [stages, 2, 64, 64]
    staging: tuple[Any, Any]  # [2, STAGING_SLOTS, epilogue_rows, 64]
    stage_ready: Any
    stage_free: Any


class _Claims(NamedTuple):
    """How the CTAs of a single launch share out its user tiles; None anywhere else."""

    tickets: Any  # device-wide counter
    taken: Any  # shared memory [slots] int32: tickets of this CTA, on their way to its consumers
    taken_ready: Any
    stage_free: Any
    users_ready: Any  # device-wide counter


class _Role(NamedTuple):
    """What every function of a warpgroup needs; `consumer` is 0 or 1, unused by the producer."""

    config: LinearCompressionConfig
    tiles: schedule.TileSchedule
    shared: _Shared
    worker: Any  # CTA or cluster, as counted by `tiles`
    consumer: Any
    interpret: bool

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.num_stages)

    def in_claimed_phase(self, claims: _Claims) -> _Role:
        """The same with the ring of the user phase, whose stages the CTA frees alone."""
        return self._replace(shared=self.shared._replace(stage_free=claims.stage_free))


def _locate(phase: _Phase, tile: Any) -> _Tile:
    """M tiles run fastest, so that the embedding tile they share comes from device memory once."""
    rest, m_tile = lax.div(tile, phase.m_tiles), lax.rem(tile, phase.m_tiles)
    row, n_tile = lax.div(rest, phase.n_tiles), lax.rem(rest, phase.n_tiles)
    if phase.cluster > 1:  # the last row may lie past the batch: TMA reads zeros and drops stores
        row = row * phase.cluster + lax.axis_index("cluster")
    return _Tile(row, n_tile, m_tile)


# Producer


def _load(role: _Role, phase: _Phase, operands: _Operands, tile: _Tile, step: Any) -> Any:
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


def _drain(role: _Role) -> None:
    """Waits until every stage is free, so that no arrival outlives its barrier."""
    for stage in range(role.config.num_stages):
        plgpu.barrier_wait(role.shared.stage_free.at[stage])


# Consumers


def _multiply(
    role: _Role,
    phase: _Phase,
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
    role: _Role, phase: _Phase, tile: _Tile, acc: jax.Array, above: fragment.Fragment | None
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


def _user_of(operands: _Operands, row: Any) -> Any:
    """The row of the level above, clamped: an index out of range never reads outside."""
    row = jnp.minimum(row, operands.index.shape[0] - 1)
    return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)


def _fragment_at(
    role: _Role, phase: _Phase, memory: fragment.Fragment, row: Any, tile: _Tile
) -> fragment.Fragment:
    """The part of a row's fragments that belongs to a tile of `phase`."""
    upper, lower = (plane.at[row, tile.n_tile, role.consumer] for plane in memory)
    columns = (tile.m_tile * phase.block_m, phase.block_m)
    return fragment.columns_of(fragment.Fragment(upper, lower), *columns, interpret=role.interpret)


def _load_fragment(role: _Role, phase: _Phase, memory: fragment.Fragment) -> fragment.Fragment:
    return fragment.load(memory, phase.block_m, interpret=role.interpret)


def _compute_fragment(
    role: _Role,
    phase: _Phase,
    operands: _Operands,
    fragments_out: fragment.Fragment,
    tile: _Tile,
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
    role: _Role,
    phase: _Phase,
    output: Any,
    chunk: int,
    values: jax.Array,
    tile: _Tile,
    is_valid: Any,
) -> None:
    """Sends `epilogue_rows` compressed rows of a finished tile to the output."""
    rows = role.config.epilogue_rows
    registers_view, copy_view = (
        view.at[role.consumer, chunk % STAGING_SLOTS] for view in role.shared.staging
    )

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
    role: _Role,
    phase: _Phase,
    operands: _Operands,
    output: Any,
    wait_for_users: Callable[[], None] | None,
) -> None:
    """All candidate tiles of this CTA; each is stored during the first k steps of the next one."""
    count = role.tiles.cand_count(role.worker)
    chunks = range(phase.block_m // role.config.epilogue_rows)
    store = functools.partial(_store_chunk, role, phase, output)

    def tile_of(i: Any) -> _Tile:
        return _locate(phase, role.tiles.cand_tile(role.worker, i))

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


# Host side


class _Level(NamedTuple):
    phase: _Phase
    operands: _Operands


def _free_all(role: _Role) -> None:
    """Consumer: says that it reads no stage, once all of them have been read or before any is."""
    for stage in range(role.config.num_stages):
        plgpu.barrier_arrive(role.shared.stage_free.at[stage])


def _static_tiles(
    role: _Role, phase: _Phase, body: Callable[[_Tile, Any], Any], *, of_user: bool
) -> None:
    """Runs `body(tile, step)` for this worker's tiles of a phase; it returns the next step."""
    tiles = role.tiles
    count, tile_of = (
        (tiles.user_count, tiles.user_tile) if of_user else (tiles.cand_count, tiles.cand_tile)
    )

    def one(i: Any, step: Any) -> Any:
        return body(_locate(phase, tile_of(role.worker, i)), step)

    lax.fori_loop(0, count(role.worker), one, jnp.int32(0))


def _claimed_tiles(
    phase: _Phase,
    next_ticket: Callable[[Any], Any],
    body: Callable[[_Tile, Any, Callable[[], Any]], tuple[Any, Any]],
) -> None:
    """Runs `body(tile, step, take_next)` for this CTA's tickets, until one names no tile.

    `body` returns the next ticket, which `take_next` gives, and the next step.
    """

    def one(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        i, ticket, step = carry
        take_next = functools.partial(next_ticket, i + 1)
        return i + 1, *body(_locate(phase, ticket), step, take_next)

    first = (jnp.int32(0), next_ticket(jnp.int32(0)), jnp.int32(0))
    lax.while_loop(lambda carry: carry[1] < phase.tiles, one, first)


def _produce(
    role: _Role,
    phases: tuple[_Phase | None, _Phase | None],
    operands: tuple[Any, Any],
    claims: _Claims | None,
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

        def load_claimed(tile: _Tile, step: Any, take_next: Callable[[], Any]) -> tuple[Any, Any]:
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


def _consume(
    role: _Role,
    phases: tuple[_Phase | None, _Phase | None],
    operands: tuple[Any, Any],
    outputs: tuple[Any, Any],
    claims: _Claims | None,
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

        def compute(tile: _Tile, step: Any, take_next: Callable[[], Any]) -> tuple[Any, Any]:
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

        def compute_own(tile: _Tile, step: Any) -> Any:
            rest = (fragments, tile, step, lambda: None)
            return _compute_fragment(role, user_phase, user, *rest)[1]

        _static_tiles(role, user_phase, compute_own, of_user=True)
    if cand_phase is not None:
        _compute_candidates(role, cand_phase, cand, output, wait_for_users)


def _kernel(
    *refs: Any,
    tree: Any,
    phases: tuple[_Phase | None, _Phase | None],
    tiles: schedule.TileSchedule,
    config: LinearCompressionConfig,
    interpret: bool,
) -> None:
    """Role dispatch."""
    (user, cand), outputs, scratch = jax.tree.unflatten(tree, refs)
    weight, embedding, staging, stage_ready, stage_free, *for_claims = scratch
    views = functools.partial(mosaic.tile_views, interpret=interpret)
    shared = _Shared(views(weight), views(embedding), views(staging), stage_ready, stage_free)
    claims = None
    if for_claims:
        cand = cand._replace(fragments_in=outputs[1])
        tickets, users_ready = (mosaic.device_counter(interpret=interpret) for _ in range(2))
        taken, taken_ready, user_stage_free = for_claims
        claims = _Claims(tickets, taken, taken_ready, user_stage_free, users_ready)
    warpgroup = lax.axis_index("warpgroup")
    role = _Role(config, tiles, shared, lax.axis_index("worker"), warpgroup, interpret)

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce = functools.partial(_produce, role, phases, (user, cand), claims)
        mosaic.on_one_warp(produce, interpret=interpret)

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        _consume(role, phases, (user, cand), outputs, claims)


def scratch_types(
    dtype: Any, config: LinearCompressionConfig, *, with_claims: bool, interpret: bool
) -> tuple[Any, ...]:
    """Shared memory and barriers, in the order in which `_kernel` takes them."""
    stages = config.num_stages
    tile = functools.partial(mosaic.operand_tile, dtype=dtype, interpret=interpret)
    free_in_cta = plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages)
    free: Any = free_in_cta
    if config.cluster > 1:
        free = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=NUM_CONSUMERS, num_barriers=stages
        )
    types = (
        tile((stages, config.block_m, BLOCK_K)),
        tile((stages, NUM_CONSUMERS, BLOCK_K, WGMMA_M)),
        tile((NUM_CONSUMERS, STAGING_SLOTS, config.epilogue_rows, WGMMA_M)),
        plgpu.Barrier(num_arrivals=1 + NUM_CONSUMERS, num_barriers=stages),
        free,
    )
    if not with_claims:
        return types
    # The producer is at most `stages` tiles ahead, each of which uses a stage or more.
    slots = stages + 2
    taken = (plgpu.SMEM((slots,), jnp.int32), plgpu.Barrier(num_barriers=slots))
    return (*types, *taken, free_in_cta)


def _launch(
    user: _Level | None,
    cand: _Level | None,
    *,
    config: LinearCompressionConfig,
    num_sms: int,
    interpret: Any,
) -> Any:
    """One launch: the fragments of a level, or the output (with or without a level's fragments)."""
    is_interpreted = bool(interpret)
    phases = (user.phase if user else None, cand.phase if cand else None)
    user_phase, cand_phase = phases
    operands = (user.operands if user else None, cand.operands if cand else None)
    dtype = jax.tree.leaves(operands)[0].dtype
    output = fragments = None
    if cand_phase is not None:
        output = jax.ShapeDtypeStruct((cand_phase.batch, cand_phase.m, cand_phase.n), dtype)
    if user_phase is not None:
        rows = (user_phase.batch, user_phase.n_tiles, NUM_CONSUMERS)
        columns = pl.cdiv(user_phase.m, config.block_m) * config.block_m
        fragments = fragment.types(columns, rows, interpret=is_interpreted)
    scratch = scratch_types(dtype, config, with_claims=None not in phases, interpret=is_interpreted)
    tiles = schedule.make_schedule(
        # Claimed tiles are those of CTAs; here, only how many of them a worker computes counts.
        pl.cdiv(user_phase.tiles * user_phase.cluster, config.cluster) if user_phase else 0,
        cand_phase.tiles if cand_phase else 0,
        user_phase.cost / cand_phase.cost if user_phase and cand_phase else 1.0,
        num_sms // config.cluster,
    )
    cluster: dict[str, Any] = {}
    if config.cluster > 1:
        cluster = {"cluster": (config.cluster,), "cluster_names": ("cluster",)}
    outputs = plgpu.kernel(
        functools.partial(
            _kernel,
            tree=jax.tree.structure((operands, (output, fragments), (0,) * len(scratch))),
            phases=phases,
            tiles=tiles,
            config=config,
            interpret=is_interpreted,
        ),
        out_type=tuple(jax.tree.leaves((output, fragments))),
        scratch_types=scratch,
        grid=(tiles.num_workers,),
        grid_names=("worker",),
        **cluster,
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="ikbo_linear_compression",
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )(*jax.tree.leaves(operands))
    return outputs[0] if cand_phase is not None else fragment.Fragment(*outputs)


def _aligned(weights: list[jax.Array]) -> tuple[jax.Array, list[int]]:
    """Weights of a launch as one operand that TMA reads well, and where each one's columns begin.

    Rows are padded to `WEIGHT_ALIGNMENT`, in one pass over all weights; the zeros meet zeros.
    """
    multiple = WEIGHT_ALIGNMENT // weights[0].dtype.itemsize
    padded = [
        jnp.pad(w, ((0, 0), (0, -w.shape[1] % multiple))) if w.shape[1] % multiple else w
        for w in weights
    ]
    offsets = [sum(w.shape[1] for w in padded[:i]) for i in range(len(padded))]
    return jnp.concatenate(padded, axis=1) if len(padded) > 1 else padded[0], offsets


def linear_compression_kernel(
    weights: tuple[jax.Array, ...],
    embeddings: tuple[jax.Array, ...],
    parents: tuple[jax.Array | None, ...],
    *,
    config: LinearCompressionConfig,
    num_sms: int,
    interpret: Any = False,
) -> jax.Array:
    """Linear compression of levels given from coarsest to finest.

    Args:
      weights: [M, K_l] each, bf16 or f16.
      embeddings: [B_l, K_l, N] each, the same dtype; N a multiple of 8.
      parents: None for the first level, then [B_l] int32 into the batch of the level before.
      config: a legal configuration (`tuning.configs.illegal_reason`).
      num_sms: streaming multiprocessors of the device.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU; that needs `cluster=1`, and
        `num_sms=1` for a single launch.

    Returns:
      [B_last, M, N] in the inputs' dtype; accumulated in f32 over all levels, rounded once.
    """
    launch = functools.partial(_launch, config=config, num_sms=num_sms, interpret=interpret)
    last = len(weights) - 1
    together = config.single_launch and last > 0

    def level(i: int, weight: jax.Array, k_offset: int, fragments: Any) -> _Level:
        batch, k, n = embeddings[i].shape
        # Half tiles for levels that others look up, if the halves still are whole fragments.
        split = 2 if i < last and config.block_m % 32 == 0 else 1
        phase = _Phase(
            batch=batch,
            k=k,
            m=weight.shape[0],
            n=n,
            block_m=config.block_m // split,
            k_offset=k_offset,
            from_fragments=i > 0,
            # Claimed tiles are a CTA's own, whatever the other CTA of its cluster does meanwhile.
            cluster=1 if together and i == last - 1 else config.cluster,
        )
        return _Level(phase, _Operands(weight, embeddings[i], parents[i], fragments))

    fragments = None
    alone = last - 1 if together else last
    for i in range(alone):
        weight, _ = _aligned([weights[i]])
        fragments = launch(level(i, weight, 0, fragments), None)
    weight, offsets = _aligned(list(weights[alone:]))
    user = level(last - 1, weight, offsets[0], fragments) if together else None
    return launch(user, level(last, weight, offsets[-1], None if together else fragments))
