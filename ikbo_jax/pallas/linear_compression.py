"""Linear compression as one persistent, warp-specialised Mosaic GPU kernel for Hopper.

    out[b] = w_cand @ e_cand[b] + w_user @ e_user[cand_to_user[b]]

*user* stands for the level above and *candidate* for the finer level; a multi-level problem runs this
kernel once per level, and the last two levels share a launch where the configuration says so.

The product is computed transposed, out[b].T = e[b].T @ w.T, so that the compressed rows M become the n
of a WGMMA, which moves in steps of 8: M = 433 is padded to 448 instead of 512.

Warpgroups: 0 and 1 multiply, each 64 of a tile's 128 embedding columns by `block_m` compressed rows;
2 feeds them through a ring of shared memory stages, which runs on across tiles and phases.

The user result never becomes an array [U, M, N]: consumers write it to device memory as *fragments*, in
the order of accumulator registers, and a candidate tile asks for its user's fragment a few k steps before
its end and adds it in f32 before the one rounding.  User tiles have half as many compressed rows as
candidate tiles: they spread over twice as many CTAs and are done before the first candidate tile needs them.

Synchronisations:
  1. `stage_ready[s]`      producer -> consumers: TMA has filled stage s.
  2. `stage_consumed[s]`   consumers -> producer: both warpgroups' WGMMAs have read stage s.
  3. `users_ready`         (single launch) device-wide counter of finished user fragments, never reset
                           within a launch; waited on once, in a consumer's first candidate tile.
  4. SMEM -> device stores of the output are ordered by `commit_smem` before and `wait_smem_to_gmem`
     before a staging buffer is written again.

Forward progress: CTAs are dispatched in order of their linear index, and user tiles belong to the
lowest ones, which finish them before they wait for anything.  A CTA that waits therefore only waits
for CTAs that were dispatched before it and need nothing from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import mosaic
from ikbo_jax.tuning.configs import (
    BLOCK_K,
    NUM_CONSUMERS,
    STAGING_SLOTS,
    WGMMA_M,
    LinearCompressionConfig,
)

#: Embedding columns of a CTA tile.
BLOCK_N = NUM_CONSUMERS * WGMMA_M
#: Registers a thread of a consumer / producer warpgroup holds: 2 x 240 + 24 <= 3 x 168.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
#: k steps before the end of a tile at which its fragment is asked for.
FRAGMENT_AHEAD = 3
#: Bytes to which weight rows are aligned.  TMA needs 16; with 128 a row of a tile is one L2 line, not
#: parts of two: 0.328 against 0.359 ms for the candidate product of the default shape (H200).
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
    cluster: int  # CTAs that share weight tiles, each with a row of the batch of its own

    @property
    def k_steps(self) -> int:
        return pl.cdiv(self.k, BLOCK_K)

    @property
    def last_block_m(self) -> int:
        """Compressed rows of the last M tile, in whole steps of a WGMMA's n."""
        return -(-(self.m - (self.m_tiles - 1) * self.block_m) // 8) * 8

    @property
    def m_tiles(self) -> int:
        return pl.cdiv(self.m, self.block_m)

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
    fragments_in: Any  # mosaic.Fragment of [U, n_tiles, 2, ...]


class _Tile(NamedTuple):
    row: Any  # of the batch
    n_tile: Any
    m_tile: Any


class _Shared(NamedTuple):
    """Shared memory and barriers."""

    weight: Any  # [stages, block_m, 64]
    embedding: Any  # [stages, 2, 64, 64]
    staging: Any  # [2, STAGING_SLOTS, epilogue_rows, 64]
    stage_ready: Any
    stage_consumed: Any


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Which tiles a CTA computes: user tiles on the lowest CTAs, candidate tiles handed out from the top.

    The first `full_waves` waves of candidate tiles go to all CTAs, later ones only to those at or above
    `rest_from`, which computed one user tile fewer.
    """

    num_ctas: int
    user_tiles: int
    cand_tiles: int
    full_waves: int
    rest_from: int

    def user_count(self, cta: Any) -> Any:
        return jnp.maximum(0, (self.user_tiles - cta + self.num_ctas - 1) // self.num_ctas)

    def user_tile(self, cta: Any, i: Any) -> Any:
        return i * self.num_ctas + cta

    def cand_count(self, cta: Any) -> Any:
        rank = self.num_ctas - 1 - cta
        full = jnp.clip(
            (self.cand_tiles - rank + self.num_ctas - 1) // self.num_ctas, 0, self.full_waves
        )
        width = self.num_ctas - self.rest_from
        left = self.cand_tiles - self.full_waves * self.num_ctas - rank
        rest = jnp.where(cta >= self.rest_from, jnp.maximum(0, (left + width - 1) // width), 0)
        return full + rest

    def cand_tile(self, cta: Any, i: Any) -> Any:
        rank = self.num_ctas - 1 - cta
        width = self.num_ctas - self.rest_from
        rest = self.full_waves * self.num_ctas + (i - self.full_waves) * width
        return jnp.where(i < self.full_waves, i * self.num_ctas, rest) + rank


def _schedule(user: _Phase | None, cand: _Phase | None, num_sms: int) -> _Schedule:
    """Chooses the waves so that the CTA that finishes last finishes earliest."""
    user_tiles = user.tiles if user else 0
    cand_tiles = cand.tiles if cand else 0
    user_cost = user.cost / cand.cost if user and cand else 1.0  # in candidate tiles
    num_ctas = max(1, min(num_sms, user_tiles + cand_tiles))
    each, extra = divmod(user_tiles, num_ctas)
    all_waves = pl.cdiv(cand_tiles, num_ctas)
    best = (math.inf, all_waves)
    for waves in range(max(0, all_waves - 8), all_waves + 1):
        left = max(0, cand_tiles - waves * num_ctas)
        last_of_rest = waves + pl.cdiv(left, num_ctas - extra)
        last_of_users = waves if extra else 0
        end = max(each * user_cost + last_of_rest, (each + 1) * user_cost + last_of_users)
        best = min(best, (end, waves))
    return _Schedule(num_ctas, user_tiles, cand_tiles, best[1], extra)


def _locate(phase: _Phase, tile: Any) -> _Tile:
    """M tiles run fastest, so that the embedding tile they share is read once from device memory."""
    rest, m_tile = lax.div(tile, phase.m_tiles), lax.rem(tile, phase.m_tiles)
    row, n_tile = lax.div(rest, phase.n_tiles), lax.rem(rest, phase.n_tiles)
    if phase.cluster > 1:  # the last row may lie past the batch: TMA reads zeros and drops stores
        row = row * phase.cluster + lax.axis_index("cluster")
    return _Tile(row, n_tile, m_tile)


def _load(
    phase: _Phase,
    operands: _Operands,
    shared: _Shared,
    tile: _Tile,
    step: Any,
    *,
    config: LinearCompressionConfig,
) -> Any:
    """Producer: brings one tile's operands into the ring; `step` counts the stages used so far."""

    def load_step(i: Any, step: Any) -> Any:
        stage = lax.rem(step, config.num_stages)

        @pl.when(step >= config.num_stages)
        def _() -> None:
            plgpu.barrier_wait(shared.stage_consumed.at[stage])

        ready = shared.stage_ready.at[stage]
        k = i * BLOCK_K
        plgpu.copy_gmem_to_smem(
            operands.weight.at[
                pl.ds(tile.m_tile * phase.block_m, phase.block_m),
                pl.ds(phase.k_offset + k, BLOCK_K),
            ],
            shared.weight.at[stage, : phase.block_m],
            ready,
            collective_axes="cluster" if phase.cluster > 1 else None,
        )
        for consumer in range(NUM_CONSUMERS):
            columns = pl.ds(tile.n_tile * BLOCK_N + consumer * WGMMA_M, WGMMA_M)
            plgpu.copy_gmem_to_smem(
                operands.embedding.at[tile.row, pl.ds(k, BLOCK_K), columns],
                shared.embedding.at[stage, consumer],
                ready,
            )
        return step + 1

    return lax.fori_loop(0, phase.k_steps, load_step, step)


def _drain(shared: _Shared, steps: Any, *, config: LinearCompressionConfig) -> None:
    """Producer: waits until the last stages are consumed, so that no arrival outlives it."""
    for i in range(config.num_stages):
        step = steps - config.num_stages + i

        @pl.when(step >= 0)
        def _(step: Any = step) -> None:
            plgpu.barrier_wait(shared.stage_consumed.at[lax.rem(step, config.num_stages)])


def _multiply(
    phase: _Phase,
    shared: _Shared,
    consumer: Any,
    step: Any,
    jobs: list[Any],
    load_fragment: Any,
    columns: int,
    *,
    config: LinearCompressionConfig,
    interpret: bool,
) -> tuple[jax.Array, mosaic.Fragment | None]:
    """Consumer: the accumulator [64, block_m] f32 of one tile, e.T @ w.T, and its fragment.

    `jobs` run one after each of the first k steps, while that step's WGMMAs are in flight.
    Only the first `columns` compressed rows are multiplied; the rest of the tile is zero.
    """
    last = phase.k_steps - 1
    # Whole instructions only, but none that would multiply nothing but padding.
    last_k = phase.k - last * BLOCK_K
    last_k += -last_k % mosaic.WGMMA_K

    def k_step(i: Any, acc: Any) -> Any:
        stage = lax.rem(step + i, config.num_stages)
        plgpu.barrier_wait(shared.stage_ready.at[stage])
        acc = mosaic.wgmma(
            acc,
            shared.embedding.at[stage, consumer],
            shared.weight.at[stage, :columns],
            overwrite=isinstance(i, int) and i == 0,
            k=last_k if isinstance(i, int) and i == last else BLOCK_K,
            interpret=interpret,
        )
        # The step before this one has been read; its stage goes back before any other work.
        plgpu.wgmma_wait(1)
        if not (isinstance(i, int) and i == 0):
            plgpu.barrier_arrive(shared.stage_consumed.at[lax.rem(step + i - 1, config.num_stages)])
        return acc

    def run(acc: Any) -> jax.Array:
        unrolled = min(max(len(jobs), 1), phase.k_steps)
        for i in range(unrolled):
            acc = k_step(i, acc)
            if i < len(jobs):
                jobs[i]()
        early = max(unrolled, last - FRAGMENT_AHEAD + 1) if load_fragment else max(unrolled, last)
        acc = mosaic.accumulate(unrolled, early, k_step, acc, interpret=interpret)
        fragment = load_fragment() if load_fragment else None
        for i in range(early, phase.k_steps):
            acc = k_step(i, acc)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.stage_consumed.at[lax.rem(step + last, config.num_stages)])
        for job in jobs[unrolled:]:
            job()
        return mosaic.accumulated(acc, columns, interpret=interpret), fragment

    acc, fragment = mosaic.with_accumulator(run, columns, interpret=interpret)
    if columns < phase.block_m:
        padding = jnp.zeros((WGMMA_M, phase.block_m - columns), jnp.float32)
        acc = jnp.concatenate([acc, plgpu.layout_cast(padding, plgpu.Layout.WGMMA)], axis=1)
    return acc, fragment


def _add(
    phase: _Phase,
    tile: _Tile,
    acc: jax.Array,
    fragment: mosaic.Fragment | None,
    *,
    interpret: bool,
) -> jax.Array:
    """Consumer: adds the level above to a finished tile."""
    if fragment is None:
        return acc
    # Rows past the batch need no sum; but the branch is there for ptxas, which without it unpacks
    # the fragment among the last WGMMAs, and waits for its loads there.
    return lax.cond(
        tile.row < phase.batch,
        lambda: mosaic.add_fragment(acc, fragment, interpret=interpret),
        lambda: acc,
    )


def _user_of(operands: _Operands, row: Any) -> Any:
    """The row of the level above, clamped: an index out of range never reads outside."""
    row = jnp.minimum(row, operands.index.shape[0] - 1)
    return jnp.clip(operands.index[row], 0, operands.fragments_in.upper.shape[0] - 1)


def _fragment_at(
    memory: mosaic.Fragment, row: Any, tile: _Tile, phase: _Phase, consumer: Any, *, interpret: bool
) -> mosaic.Fragment:
    """The part of a row's fragments that belongs to a tile of `phase`."""
    planes = (plane.at[row, tile.n_tile, consumer] for plane in memory)
    columns = (tile.m_tile * phase.block_m, phase.block_m)
    return mosaic.fragment_columns(mosaic.Fragment(*planes), *columns, interpret=interpret)


def _compute_fragments(
    phase: _Phase,
    operands: _Operands,
    shared: _Shared,
    fragments_out: Any,
    tile: _Tile,
    consumer: Any,
    step: Any,
    *,
    config: LinearCompressionConfig,
    interpret: bool,
) -> Any:
    """Consumer: one tile of a level that others look up."""
    at = functools.partial(
        _fragment_at, tile=tile, phase=phase, consumer=consumer, interpret=interpret
    )
    load_fragment = None
    if phase.from_fragments:

        def load_fragment() -> mosaic.Fragment:
            above = at(operands.fragments_in, _user_of(operands, tile.row))
            return mosaic.load_fragment(above, phase.block_m, interpret=interpret)

    acc, fragment = _multiply(
        phase,
        shared,
        consumer,
        step,
        [],
        load_fragment,
        phase.block_m,
        config=config,
        interpret=interpret,
    )
    acc = _add(phase, tile, acc, fragment, interpret=interpret)

    @pl.when(tile.row < phase.batch)
    def _() -> None:
        mosaic.store_fragment(at(fragments_out, tile.row), acc, interpret=interpret)

    return step + phase.k_steps


def _store_chunk(
    chunk: int,
    values: jax.Array,
    valid: Any,
    output: Any,
    shared: _Shared,
    store_view: Any,
    phase: _Phase,
    tile: _Tile,
    consumer: Any,
    *,
    config: LinearCompressionConfig,
) -> None:
    """Sends `epilogue_rows` compressed rows of a finished tile to the output."""
    rows = config.epilogue_rows
    slot = chunk % STAGING_SLOTS

    @pl.when(valid)
    def _() -> None:
        # All but the newest copy have read their staging buffer, so this slot is free.
        plgpu.wait_smem_to_gmem(STAGING_SLOTS - 1, wait_read_only=True)
        store_view.at[consumer, slot].transpose((1, 0))[...] = lax.slice(
            values, (0, chunk * rows), (WGMMA_M, (chunk + 1) * rows)
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            shared.staging.at[consumer, slot],
            output.at[
                tile.row,
                pl.ds(tile.m_tile * phase.block_m + chunk * rows, rows),
                pl.ds(tile.n_tile * BLOCK_N + consumer * WGMMA_M, WGMMA_M),
            ],
        )


def _compute_candidates(
    phase: _Phase,
    schedule: _Schedule,
    operands: _Operands,
    shared: _Shared,
    store_view: Any,
    users_ready: Any,
    output: Any,
    cta: Any,
    consumer: Any,
    step: Any,
    *,
    config: LinearCompressionConfig,
    interpret: bool,
) -> None:
    """Consumer: all candidate tiles of this CTA.

    The epilogue is deferred: a finished tile stays in registers, rounded, and leaves in chunks
    during the first k steps of the next one.
    """
    count = schedule.cand_count(cta)
    chunks = range(phase.block_m // config.epilogue_rows)
    store = functools.partial(
        _store_chunk,
        output=output,
        shared=shared,
        store_view=store_view,
        phase=phase,
        consumer=consumer,
        config=config,
    )

    def tile_of(i: Any) -> _Tile:
        return _locate(phase, schedule.cand_tile(cta, i))

    def user_of_tile(i: Any) -> Any:
        return _user_of(operands, tile_of(i).row)

    def compute(i: Any, carry: Any) -> Any:
        user, finished = carry
        tile, previous = tile_of(i), tile_of(i - 1)
        jobs = [functools.partial(store, c, finished, i > 0, tile=previous) for c in chunks]
        load_fragment = None
        if phase.from_fragments:
            above = _fragment_at(
                operands.fragments_in, user, tile, phase, consumer, interpret=interpret
            )
            # Read one tile ahead: used at once, the index costs its whole latency.
            user = user_of_tile(i + 1)

            def load_fragment() -> mosaic.Fragment:
                if users_ready is not None:
                    pl.when(i == 0)(wait_for_users)
                return mosaic.load_fragment(above, phase.block_m, interpret=interpret)

        multiply = functools.partial(
            _multiply,
            phase,
            shared,
            consumer,
            step + i * phase.k_steps,
            jobs,
            load_fragment,
            config=config,
            interpret=interpret,
        )
        if phase.m_tiles == 1 or phase.last_block_m == phase.block_m:
            acc, fragment = multiply(phase.last_block_m)
        else:  # M = 433 in tiles of 224: 440 rows are multiplied, not 448
            acc, fragment = lax.cond(
                tile.m_tile == phase.m_tiles - 1,
                lambda: multiply(phase.last_block_m),
                lambda: multiply(phase.block_m),
            )
        acc = _add(phase, tile, acc, fragment, interpret=interpret)
        return user, acc.astype(output.dtype)

    def wait_for_users() -> None:
        plgpu.semaphore_wait(
            users_ready,
            schedule.user_tiles * phase.cluster * NUM_CONSUMERS,
            decrement=False,
            memory_scope="gpu",
        )

    nothing = plgpu.layout_cast(
        jnp.zeros((WGMMA_M, phase.block_m), output.dtype), plgpu.Layout.WGMMA
    )
    first_user = user_of_tile(jnp.int32(0)) if phase.from_fragments else jnp.int32(0)
    _, finished = lax.fori_loop(0, count, compute, (first_user, nothing))
    for c in chunks:
        store(c, finished, count > 0, tile=tile_of(count - 1))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _kernel(
    *refs: Any,
    user_phase: _Phase | None,
    cand_phase: _Phase | None,
    schedule: _Schedule,
    config: LinearCompressionConfig,
    interpret: bool,
) -> None:
    """Role dispatch; the operand order is that of `_launch`."""
    refs = list(refs)
    take = lambda wanted: refs.pop(0) if wanted else None
    take_fragments = lambda wanted: mosaic.Fragment(take(True), take(True)) if wanted else None
    user = cand = None
    if user_phase is not None:
        looks_up = user_phase.from_fragments
        user = _Operands(take(True), take(True), take(looks_up), take_fragments(looks_up))
    if cand_phase is not None:
        looks_up = cand_phase.from_fragments
        above = looks_up and user_phase is None
        cand = _Operands(take(True), take(True), take(looks_up), take_fragments(above))
    output = take(cand_phase is not None)
    fragments_out = take_fragments(user_phase is not None)
    if cand is not None and fragments_out is not None:
        cand = cand._replace(fragments_in=fragments_out)
    weight, embedding, staging, stage_ready, stage_consumed = refs
    # One counter for the whole device.  The interpreter has none; it runs CTAs one after another,
    # so that a single CTA has finished the user phase before it looks anything up.
    users_ready = None
    if user is not None and cand is not None and not interpret:
        users_ready = pl.get_global(plgpu.SemaphoreType.REGULAR)

    views = functools.partial(mosaic.tile_views, interpret=interpret)
    weight_mma, weight_tma = views(weight)
    embedding_mma, embedding_tma = views(embedding)
    staging_mma, staging_tma = views(staging)
    consumer_shared = _Shared(weight_mma, embedding_mma, staging_tma, stage_ready, stage_consumed)
    producer_shared = consumer_shared._replace(weight=weight_tma, embedding=embedding_tma)
    cta = lax.axis_index("cta")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _() -> None:
            @pl.when(lax.axis_index("warp") == 0)
            def _() -> None:
                load = functools.partial(_load, config=config)
                step = jnp.int32(0)
                if user is not None:

                    def load_user(i: Any, step: Any) -> Any:
                        tile = _locate(user_phase, schedule.user_tile(cta, i))
                        return load(user_phase, user, producer_shared, tile, step)

                    step = lax.fori_loop(0, schedule.user_count(cta), load_user, step)
                if cand is not None:

                    def load_cand(i: Any, step: Any) -> Any:
                        tile = _locate(cand_phase, schedule.cand_tile(cta, i))
                        return load(cand_phase, cand, producer_shared, tile, step)

                    step = lax.fori_loop(0, schedule.cand_count(cta), load_cand, step)
                _drain(producer_shared, step, config=config)

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        step = jnp.int32(0)
        if user is not None:

            def compute_user(i: Any, step: Any) -> Any:
                tile = _locate(user_phase, schedule.user_tile(cta, i))
                step = _compute_fragments(
                    user_phase,
                    user,
                    consumer_shared,
                    fragments_out,
                    tile,
                    warpgroup,
                    step,
                    config=config,
                    interpret=interpret,
                )
                if users_ready is not None:
                    mosaic.release_to_device(interpret=interpret)
                    plgpu.semaphore_signal(users_ready, memory_scope="gpu")
                return step

            step = lax.fori_loop(0, schedule.user_count(cta), compute_user, step)
        if cand is not None:
            _compute_candidates(
                cand_phase,
                schedule,
                cand,
                consumer_shared,
                staging_mma,
                users_ready,
                output,
                cta,
                warpgroup,
                step,
                config=config,
                interpret=interpret,
            )


def scratch_types(dtype: Any, config: LinearCompressionConfig, *, interpret: bool) -> list[Any]:
    """Shared memory and barriers, in the order in which `_kernel` takes them."""
    tile = functools.partial(mosaic.operand_tile, dtype=dtype, interpret=interpret)
    consumed = plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=config.num_stages)
    if config.cluster > 1:  # a stage is free once the consumers of every CTA have read it
        consumed = plgpu.ClusterBarrier(
            collective_axes=("cluster",),
            num_arrivals=NUM_CONSUMERS,
            num_barriers=config.num_stages,
        )
    return [
        tile((config.num_stages, config.block_m, BLOCK_K)),
        tile((config.num_stages, NUM_CONSUMERS, BLOCK_K, WGMMA_M)),
        tile((NUM_CONSUMERS, STAGING_SLOTS, config.epilogue_rows, WGMMA_M)),
        plgpu.Barrier(num_arrivals=1 + NUM_CONSUMERS, num_barriers=config.num_stages),
        consumed,
    ]


def _launch(
    user_phase: _Phase | None,
    user: _Operands | None,
    cand_phase: _Phase | None,
    cand: _Operands | None,
    *,
    config: LinearCompressionConfig,
    num_sms: int,
    interpret: Any,
) -> Any:
    """One launch: the fragments of a level, the output, or both (returns output, else fragments)."""
    phase = cand_phase or user_phase
    operands = jax.tree.leaves((user, cand))
    dtype = (cand or user).embedding.dtype
    out_type = []
    if cand_phase is not None:
        out_type.append(jax.ShapeDtypeStruct((phase.batch, phase.m, phase.n), dtype))
    if user_phase is not None:
        rows = (user_phase.batch, user_phase.n_tiles, NUM_CONSUMERS)
        columns = pl.cdiv(user_phase.m, config.block_m) * config.block_m
        out_type += mosaic.fragment_types(columns, rows, interpret=bool(interpret))
    schedule = _schedule(user_phase, cand_phase, num_sms // config.cluster)
    cluster = {}
    if config.cluster > 1:
        cluster = {"cluster": (config.cluster,), "cluster_names": ("cluster",)}
    outputs = plgpu.kernel(
        functools.partial(
            _kernel,
            user_phase=user_phase,
            cand_phase=cand_phase,
            schedule=schedule,
            config=config,
            interpret=bool(interpret),
        ),
        out_type=tuple(out_type),
        scratch_types=scratch_types(dtype, config, interpret=bool(interpret)),
        grid=(schedule.num_ctas,),
        grid_names=("cta",),
        **cluster,
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="ikbo_linear_compression",
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )(*operands)
    return outputs[0] if cand_phase is not None else mosaic.Fragment(*outputs)


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
      config: a legal configuration.
      num_sms: streaming multiprocessors of the device.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      [B_last, M, N] in the inputs' dtype; accumulated in f32 over all levels, rounded once.
    """
    launch = functools.partial(_launch, config=config, num_sms=num_sms, interpret=interpret)
    last = len(weights) - 1
    together = config.single_launch and last > 0
    alone = range(last - 1 if together else last)

    def level(i: int, weight: jax.Array, offset: int, fragments: Any) -> tuple[_Phase, _Operands]:
        batch, k, n = embeddings[i].shape
        # Half tiles for levels that others look up, if the halves still are whole fragments.
        split = 2 if i < last and config.block_m % 32 == 0 else 1
        phase = _Phase(
            batch=batch,
            k=k,
            m=weight.shape[0],
            n=n,
            block_m=config.block_m // split,
            k_offset=offset,
            from_fragments=i > 0,
            cluster=config.cluster,
        )
        return phase, _Operands(weight, embeddings[i], parents[i], fragments)

    fragments = None
    for i in alone:
        weight, _ = _aligned([weights[i]])
        fragments = launch(*level(i, weight, 0, fragments), None, None)
    weight, offsets = _aligned(list(weights[len(alone) :]))
    user = level(last - 1, weight, offsets[0], fragments) if together else (None, None)
    cand = level(last, weight, offsets[-1], None if together else fragments)
    return launch(*user, *cand)
