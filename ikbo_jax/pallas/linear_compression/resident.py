"""Linear compression by CTAs of one warpgroup that keep their weights: small M and K.

    out[b] = w_cand @ e_cand[b] + w_user @ e_user[cand_to_user[b]]

Where M and K are small, a tile's products take less time than the latency of its loads. Several
CTAs share an SM, so that one CTA computes while others wait. A CTA

  - loads its weights into shared memory once, by itself: no launch pads their rows for TMA;
  - issues the loads of all k steps of a tile at once, `num_stages` tiles ahead;
  - multiplies the columns of a tile (see `packed`) by one part of the compressed rows after
  another;
  - stores a candidate of 16 or 32 columns, which is contiguous memory, by one copy.

Each level is a launch. A level that a finer level looks up stores fragments; if its K is long,
every CTA sums a split of K, and the finer level adds the fragments of all splits.

Synchronisations:
  1. `ready[stage, k step]`  TMA has filled the slot.
  2. The warpgroup's barrier after a tile's last product, before the slot is loaded again.
  3. Staging buffers: `commit_smem` before a store, `wait_smem_to_gmem` before the next write.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import fragment, granules, inline, mma, mosaic, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.linear_compression.resident_tiles import (
    Operands,
    Phase,
    Place,
    Source,
    load_fragments,
    load_one_user,
    load_tile,
    load_weights,
    look_up,
    place_of,
    sources_of,
)
from ikbo_jax.problems import LinearCompressionProblem, ResidentCompressionConfig
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_M
from ikbo_jax.problems.packed_compression import GRANULE, STAGING_SLOTS
from ikbo_jax.problems.resident_compression import early_splits, is_contiguous


def _multiply(
    ctx: WarpgroupContext, part: Any, stage: Any, *, of_user: bool = False
) -> tuple[jax.Array, ...]:
    """Multiplies a part of a tile, or the only user's part; returns [64, block_m] f32 each."""
    phase, layout = ctx.shape, ctx.shape.layout
    weight, _ = ctx.shared.weight
    of_accumulator = WGMMA_M // phase.width
    # If a row of the batch is one block, the user's columns are the same in all accumulators.
    is_repeated = of_user and phase.blocks_of_row == 1
    accumulators = 1 if is_repeated else layout.accumulators

    def k_step(step: Any, accs: tuple[Any, ...], source: Source, is_first: bool) -> Any:
        first = part * sum(layout.k_blocks) + source.first_block
        first += step * source.depth // BLOCK_K
        tiles = source.tiles.at[stage * source.steps + step]
        return tuple(
            mma.wgmma_blocks(
                acc,
                tiles if is_repeated else tiles.at[pl.ds(i * of_accumulator, of_accumulator)],
                weight.at[pl.ds(first, pl.cdiv(source.depth, BLOCK_K))],
                overwrite=is_first,
                k=source.depth,
                block_bytes=layout.block_m * mosaic.SWIZZLE,
            )
            for i, acc in enumerate(accs)
        )

    def all_steps(accs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        for i, source in enumerate(sources_of(ctx, of_user=of_user)):
            begin = 0
            if i == 0:
                accs, begin = k_step(0, accs, source, True), 1
            step = functools.partial(k_step, source=source, is_first=False)
            # A loop: unrolled, the descriptors of all steps would occupy registers.
            accs = mma.accumulate(begin, source.steps, step, accs)
        plgpu.wgmma_wait(0)
        sums = tuple(map(mma.after_wait, accs))
        return sums * layout.accumulators if is_repeated else sums

    return mma.with_row_blocks(all_steps, accumulators, phase.width, layout.block_m)


def _sums(
    ctx: WarpgroupContext, place: Place, users: Any, part: Any, stage: Any
) -> tuple[jax.Array, ...]:
    """Computes a part of a tile, and adds the coarser level's part."""
    coarser, layout = ctx.shape.coarser, ctx.shape.layout
    if coarser is None:
        return _multiply(ctx, part, stage)
    begin = place.group * layout.rows + part * layout.block_m
    # Their latency passes with the product's. Registers do not hold many.
    early = [
        load_fragments(ctx, users, split, begin)
        for split in range(min(coarser.layout.splits, early_splits(layout)))
    ]
    accs = _multiply(ctx, part, stage)

    def add(accs: tuple[jax.Array, ...], parts: tuple[fragment.Fragment, ...]) -> Any:
        return tuple(fragment.add(acc, x) for acc, x in zip(accs, parts, strict=True))

    def add_all() -> tuple[jax.Array, ...]:
        total = functools.reduce(add, early, accs)
        for split in range(len(early), coarser.layout.splits):
            total = add(total, load_fragments(ctx, users, split, begin))
        return total

    return lax.cond(place.split == 0, add_all, lambda: accs)


def _stage(ctx: WarpgroupContext, number: Any, accs: tuple[jax.Array, ...]) -> Any:
    """Writes a part to a staging buffer for TMA; returns the buffer."""
    of_accumulator = WGMMA_M // ctx.shape.width
    staging = ctx.shared.staging.at[lax.rem(number, STAGING_SLOTS)]
    # All stores but the newest have read their staging buffers, so this buffer is free.
    plgpu.wait_smem_to_gmem(STAGING_SLOTS - 1, wait_read_only=True)
    for i, acc in enumerate(accs):
        granules.stage_transposed(
            staging.at[pl.ds(i * of_accumulator, of_accumulator)],
            acc.astype(ctx.operands.embedding.dtype),
            is_swizzled=not is_contiguous(ctx.shape.n),
        )
    plgpu.commit_smem()
    return staging


def _store(ctx: WarpgroupContext, place: Place, staging: Any, tile: Any, part: Any) -> None:
    """Stores a part of a tile; rows past the batch and past M are dropped."""
    phase, layout = ctx.shape, ctx.shape.layout
    output, _ = ctx.outputs
    first = phase.first_block(place, tile)
    begin = place.group * layout.rows + part * layout.block_m
    if is_contiguous(phase.n) and not ctx.interpret:
        _store_contiguous(output, staging, first, begin)
        return
    phase.store(staging, output, first, pl.ds(begin, layout.block_m))


def _store_contiguous(output: Any, staging: Any, first: Any, begin: Any) -> None:
    """Copies staging[i, j] to output[first + i, begin + j] within M, one bulk copy for each i."""
    batch, m, n = output.shape
    blocks, height, _ = staging.shape

    @inline.code(output, staging, first, begin)
    def copy(output: ir.Value, staging: ir.Value, first: Integer, begin: Integer) -> None:
        thread = stores.thread_number()
        row = first + thread
        exists = (thread < blocks) & (row < batch)
        target = stores.device_address(output, [(row, m * n), (begin, n)], 2)
        source = inline.address(staging, thread * (height * n * 2), 8)
        rows = (m - begin).at_most(height)
        exists = exists & (inline.i32(0) < rows)
        inline.issue(
            "{ .reg .u64 target; cvta.to.global.u64 target, $0; "
            "@$3 cp.async.bulk.global.shared::cta.bulk_group [target], [$1], $2; "
            "cp.async.bulk.commit_group; }",
            target,
            source,
            rows * (n * 2),
            exists,
        )


def _consume(ctx: WarpgroupContext) -> None:
    """Computes all tiles of the CTA."""
    phase: Phase = ctx.shape
    layout = phase.layout
    output, fragments_out = ctx.outputs
    place = place_of(ctx)
    for i in range(layout.stages):
        first = place.begin + i
        pl.when(first < place.end)(functools.partial(load_tile, ctx, place, first))
    if layout.has_one_user:
        load_one_user(ctx, place)
    load_weights(ctx, place)
    of_user = _multiply(ctx, 0, 0, of_user=True) if layout.has_one_user else None

    def load_again(tile: Any) -> None:
        ahead = tile + layout.stages
        pl.when(ahead < place.end)(functools.partial(load_tile, ctx, place, ahead))

    def compute(tile: Any, users: Any, part: Any) -> None:
        number = tile - place.begin
        accs = _sums(ctx, place, users, part, lax.rem(number, layout.stages))
        if of_user is not None:
            accs = tuple(acc + x for acc, x in zip(accs, of_user, strict=True))
        staging = None
        if output is not None:
            staging = _stage(ctx, number * layout.parts + part, accs)
        else:
            plgpu.commit_smem()  # all warps have multiplied
        pl.when(part == layout.parts - 1)(functools.partial(load_again, tile))
        if output is not None:
            _store(ctx, place, staging, tile, part)
        else:
            first = place.split * phase.granules + tile * (layout.block_n // GRANULE)
            begin = place.group * layout.rows + part * layout.block_m
            for i, acc in enumerate(accs):
                granules.store(fragments_out, acc, first + i * granules.GRANULES, begin)

    def one(tile: Any, users: Any) -> Any:
        tile = mosaic.opaque(tile)
        users_ahead = look_up(ctx, place, tile + 1)
        stage = lax.rem(tile - place.begin, layout.stages)
        for source in sources_of(ctx, of_user=False):
            source.await_ready(stage)
        pl.loop(0, layout.parts)(functools.partial(compute, tile, users))
        return users_ahead

    lax.fori_loop(place.begin, place.end, one, look_up(ctx, place, place.begin))
    if output is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _launch(phase: Phase, operands: Operands, *, is_last: bool, columns: int) -> Any:
    """Launches a level; returns the last level's output, or fragments of `columns` rows of M."""
    layout, dtype = phase.layout, operands.embedding.dtype
    output = fragments = None
    if is_last:
        output = jax.ShapeDtypeStruct((phase.batch, phase.m, phase.n), dtype)
    else:
        fragments = granules.types(columns, layout.splits * phase.granules)
    outputs = launch(
        Roles(functools.partial(WarpgroupContext, phase, layout), None, _consume),
        operands,
        (output, fragments),
        layout.shared(phase.n, stores=is_last),
        dtype=dtype,
        name="ikbo_linear_compression",
        workers=phase.workers * layout.shares,
    )
    return outputs[0] if is_last else fragment.Fragment(*outputs)


def resident_compression(
    weights: tuple[jax.Array, ...],
    embeddings: tuple[jax.Array, ...],
    parents: tuple[jax.Array | None, ...],
    *,
    config: ResidentCompressionConfig,
    num_sms: int,
) -> jax.Array:
    """Compresses levels, coarsest first; see `kernel.linear_compression_kernel`."""
    batches, ks = zip(*(x.shape[:2] for x in embeddings), strict=True)
    m, n = weights[0].shape[0], embeddings[0].shape[2]
    problem = LinearCompressionProblem(batches, ks, m, n, weights[0].dtype.name)
    layouts = {i: config.layout(problem, i) for i in config.levels(problem)}
    # A level reads whole parts of its own.
    columns = max(layout.groups * layout.rows for layout in layouts.values())
    phase: Phase | None = None
    result: Any = None
    for i, layout in layouts.items():
        tiles = layout.tiles(batches[i], n)
        most = tiles if layout.by_threads else max(1, num_sms * layout.ctas // layout.shares)
        users = batches[i - 1] if i else 0
        phase = Phase(batches[i], ks[i], m, n, layout, phase, users, min(tiles, most))
        of_users = (weights[i - 1], embeddings[i - 1]) if layout.gathered else None
        operands = Operands(weights[i], embeddings[i], of_users, parents[i], result)
        is_last = i == len(weights) - 1
        result = _launch(phase, operands, is_last=is_last, columns=columns)
    return result
