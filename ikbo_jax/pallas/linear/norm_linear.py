"""Normalises rows and multiplies them by the weights of groups of columns: one persistent kernel.

    out[g] = activation[g](norm(x) @ weights[g] + biases[g])

A CTA takes 128 rows, whose blocks of 64 columns fill a ring in shared memory, and multiplies them
by all weights, or by one of `parts` of them, in tiles of 128 columns of one group. Warpgroups 0 and
1 are the consumers, each of 64 rows. A consumer reads its rows once for their statistics, and
normalises all of their blocks where they lie, before the first tile. So rows are read once, and
rounded as the reference rounds them.

A finished tile stays in f32 registers; bias, activation and store follow in chunks during the first
k steps of the next tile. Tiles of every group are stored into the group's own array.

One warp of warpgroup 2 loads weights, another one rows.

Synchronisations:
  1. `weight.ready[s]`  producer -> consumers: TMA has filled slot s with a k step of weights.
  2. `weight.free[s]`   consumers -> producer: the WGMMAs of both consumers have read slot s.
  3. `rows.ready[s]`    the same for a block of rows: consumers write to it, as generic accesses,
     `rows.free[s]`     before WGMMA reads it (a proxy fence and a barrier of the warpgroup), and
                        free it after the last tile's WGMMAs.
  4. a warp's barrier   between the sums of its rows, whose first numbers all lanes of a row read,
                        and their normalisation.
  5. `staging`          `commit_smem` before a TMA store, `wait_smem_to_gmem` before the next write.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.values import activate
from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles
from ikbo_jax.pallas.hopper.launch import ItemContext, Roles, launch
from ikbo_jax.pallas.linear import row_statistics, rows
from ikbo_jax.problems import hopper
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.norm_linear import BLOCK_N, STATISTICS_WARPS, STORE_COLUMNS, NormLinearConfig
from ikbo_jax.reference.norm_linear import Norm

#: Columns that are activated after a k step.
CHUNK = 32
#: Column tiles before an item's end, from when on the next one's statistics are computed: rows are
#: to stay in the L2 cache until TMA loads them, and 128 rows take about as long as four tiles.
LATE_TILES = 8


class Operands(NamedTuple):
    """Device memory that the kernel reads; `scale`, `bias` and `biases` may be None."""

    x: Any  # [rows, F]
    scale: Any  # [k steps * 64] f32
    bias: Any  # [k steps * 64] f32
    weights: Any  # [F, columns] of every group
    biases: Any  # [column tiles * 128] f32


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch."""

    rows: int
    features: int
    columns: tuple[int, ...]
    activations: tuple[str, ...]
    norm: Norm
    parts: int

    @property
    def k_steps(self) -> int:
        return hopper.column_blocks(self.features)

    @property
    def first_tiles(self) -> tuple[int, ...]:
        """The number of every group's first column tile, and the number of all column tiles."""
        return tuple(itertools.accumulate((-(-c // BLOCK_N) for c in self.columns), initial=0))

    @property
    def items(self) -> int:
        return -(-self.rows // TILE_ROWS) * self.parts


class Item(NamedTuple):
    """128 rows from `row` on, for column tiles [begin, end)."""

    row: Any
    begin: Any
    end: Any


class Tile(NamedTuple):
    """A column tile of 128 rows from `row` on; `number` counts all groups' column tiles."""

    row: Any
    number: Any


@dataclasses.dataclass(frozen=True)
class NormLinearContext(ItemContext):
    """The context of a warpgroup; a *step* numbers the k steps of all its tiles."""

    def item(self, i: Any) -> Item:
        number, parts = self.number(i), self.shape.parts
        tiles, part = self.shape.first_tiles[-1], lax.rem(number, parts)
        begin, end = (lax.div(p * tiles, parts) for p in (part, part + 1))
        return Item(lax.div(number, parts) * TILE_ROWS, begin, end)

    def group(self, tile: Any) -> Any:
        """Finds the group of a column tile."""
        group = jnp.int32(0)
        for first in self.shape.first_tiles[1:-1]:
            group += (tile >= first).astype(jnp.int32)
        return group

    def with_group(self, tile: Any, body: Callable[[int, Any], None]) -> None:
        """Calls body(group, first column in the group) for a tile's group."""
        *firsts, end = self.shape.first_tiles
        if len(firsts) == 1:
            body(0, tile * BLOCK_N)
            return
        for group, (first, after) in enumerate(zip(firsts, (*firsts[1:], end), strict=True)):
            is_group = (tile >= first) & (tile < after)
            pl.when(is_group)(functools.partial(body, group, (tile - first) * BLOCK_N))


def load_weights(ctx: NormLinearContext) -> None:
    """Loads the weights of all tiles, as a warp of the producer."""
    ring, k_steps = ctx.shared.weight, ctx.shape.k_steps

    def load_tile(tile: Any, step: Any) -> Any:
        def load_step(k: Any, step: Any) -> Any:
            ring.await_reuse(step)
            target, ready = ring.copied(step), ring.ready_at(step)

            def load(group: int, column: Any) -> None:
                for i in range(BLOCK_N // BLOCK_K):
                    block = (pl.ds(k * BLOCK_K, BLOCK_K), pl.ds(column + i * BLOCK_K, BLOCK_K))
                    source = ctx.operands.weights[group].at[block]
                    plgpu.copy_gmem_to_smem(source, target.at[i], ready)

            ctx.with_group(tile, load)
            return step + 1

        return lax.fori_loop(0, k_steps, load_step, step)

    def load_item(_: Any, item: Item, step: Any) -> Any:
        return lax.fori_loop(item.begin, item.end, load_tile, step)

    ring.drain_uses(ctx.for_items(load_item, jnp.int32(0)))


def load_rows(ctx: NormLinearContext) -> None:
    """Loads the rows of all items, as a warp of the producer."""
    ring, k_steps = ctx.shared.rows, ctx.shape.k_steps

    def load_item(i: Any, item: Item, carry: Any) -> Any:
        def load_block(k: Any, block: Any) -> Any:
            ring.await_reuse(block)
            for consumer in range(NUM_CONSUMERS):
                part = pl.ds(item.row + consumer * WGMMA_M, WGMMA_M)
                source = ctx.operands.x.at[part, pl.ds(k * BLOCK_K, BLOCK_K)]
                plgpu.copy_gmem_to_smem(
                    source, ring.copied(block).at[consumer], ring.ready_at(block)
                )
            return block + 1

        lax.fori_loop(0, k_steps, load_block, i * k_steps)
        return carry

    ctx.for_items(load_item, jnp.int32(0))
    ring.drain_uses(ctx.count * k_steps)


def load_statistics(ctx: NormLinearContext) -> None:
    """Computes the statistics of all items' rows but the first one's, as other warps."""
    ring, target = ctx.shared.early, ctx.shared.statistics

    def compute_item(i: Any, item: Item, carry: Any) -> Any:
        @pl.when(i > 0)
        def _() -> None:
            ring.await_free(i - 1)
            options = ctx.shape.norm, STATISTICS_WARPS
            row_statistics.compute(ctx.operands.x, item.row, target, *options)
            for _ in range(STATISTICS_WARPS if ctx.interpret else 1):
                plgpu.barrier_arrive(ring.ready_at(i - 1))

        return carry

    ctx.for_items(compute_item, jnp.int32(0))
    ring.await_free(ctx.count - 1)


# Consumers


def _item_statistics(ctx: NormLinearContext, i: Any, first_block: Any) -> rows.Statistics:
    """Computes the statistics of the consumer's rows of item `i`, or takes the early ones."""
    if not ctx.config.is_early:
        return _statistics(ctx, first_block)

    def take() -> rows.Statistics:
        ctx.shared.early.await_ready(i - 1)
        return rows.load_statistics(ctx.shared.statistics, ctx.consumer, ctx.shape.norm.kind)

    return lax.cond(i > 0, take, lambda: _statistics(ctx, first_block))


def _rows_of(ctx: NormLinearContext, block: Any) -> Any:
    """Selects the consumer's rows of a block, as WGMMA sees them."""
    return ctx.shared.rows.matrix(block).at[ctx.consumer]


def _statistics(ctx: NormLinearContext, first: Any) -> rows.Statistics:
    """Computes the statistics of the consumer's rows, whose blocks are those from `first` on."""
    shape, ring = ctx.shape, ctx.shared.rows
    whole, rest = divmod(shape.features, BLOCK_K)

    def add(k: Any, sums: rows.Sums | None, columns: int = BLOCK_K) -> rows.Sums:
        ring.await_ready(first + k)
        tiles = _rows_of(ctx, first + k)
        return rows.add_sums(sums or rows.begin_sums(tiles, shape.norm.kind), tiles, columns)

    sums = add(0, None, BLOCK_K if whole else rest)
    sums = lax.fori_loop(1, max(whole, 1), add, sums)
    if whole and rest:
        sums = add(whole, sums, rest)
    # All lanes have read a row's first number before one of them normalises it in place.
    mosaic.synchronise_warp()
    return rows.statistics(sums, shape.features, shape.norm.eps)


def _multiply(
    ctx: NormLinearContext,
    step: Any,
    first_block: Any,
    is_last: Any,
    jobs: list[Callable[[], None]],
) -> jax.Array:
    """Multiplies a tile: [64, 128] f32; frees the rows if `is_last` of their tiles.

    Calls one of `jobs` after each of the first k steps, while WGMMAs are in flight.
    """
    k_steps = ctx.shape.k_steps

    def release(k: Any) -> None:
        ctx.shared.weight.release(step + k)
        pl.when(is_last)(functools.partial(ctx.shared.rows.release, first_block + k))

    def k_step(k: Any, acc: Any, *, is_first: bool = False) -> Any:
        ctx.shared.weight.await_ready(step + k)
        left, right = _rows_of(ctx, first_block + k), ctx.shared.weight.matrix(step + k)
        acc = mma.add_tile_product(acc, left, right)
        if not is_first:
            mma.wait(1)
            release(k - 1)
        return acc

    def all_k_steps(acc: Any) -> jax.Array:
        unrolled = min(len(jobs), k_steps)
        for k in range(unrolled):
            acc = k_step(k, acc, is_first=k == 0)
            jobs[k]()
        acc = mma.accumulate(unrolled, k_steps, k_step, acc)
        mma.wait(0)
        release(k_steps - 1)
        for job in jobs[unrolled:]:
            job()
        return mma.after_wait(acc)

    blocks = BLOCK_N // BLOCK_K
    return mma.with_block_accumulators(all_k_steps, blocks)


def _store_jobs(
    ctx: NormLinearContext, finished: jax.Array, tile: Tile, is_valid: Any
) -> list[Callable[[], None]]:
    """Lists what adds biases to a finished tile, activates and stores it, chunk by chunk."""
    dtype = ctx.operands.x.dtype
    group = ctx.group(tile.number)
    rounded: list[jax.Array] = []

    def projected(begin: int, width: int) -> jax.Array:
        values = lax.slice(finished, (0, begin), (WGMMA_M, begin + width))
        if ctx.operands.biases is not None:
            first, biases = tile.number * BLOCK_N + begin, ctx.operands.biases
            values += rows.of_columns(biases, first, width)
        return values

    def store(begin: int, values: jax.Array, outputs: tuple[Any, ...]) -> None:
        registers_view, copy_view = (view.at[ctx.consumer] for view in ctx.shared.staging)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        operand_tiles.stage_rows(registers_view, values, reads_late=True)
        plgpu.commit_smem()

        def copy(group: int, column: Any) -> None:
            if outputs[group] is not None:
                part = pl.ds(tile.row + ctx.consumer * WGMMA_M, WGMMA_M)
                target = outputs[group].at[part, pl.ds(column + begin, STORE_COLUMNS)]
                plgpu.copy_smem_to_gmem(copy_view.at[0], target)

        ctx.with_group(tile.number, copy)

    def job(begin: int) -> None:
        names, values = ctx.shape.activations, projected(begin, CHUNK)
        activated = activate(names, None, group, values)
        rounded.append(activated.astype(dtype))
        if (begin + CHUNK) % STORE_COLUMNS:
            return
        values, first = jnp.concatenate(rounded, axis=1), begin + CHUNK - STORE_COLUMNS
        rounded.clear()
        out, projection = ctx.outputs
        pl.when(is_valid)(functools.partial(store, first, values, out))
        if is_kept := [group == g for g, x in enumerate(projection) if x is not None]:

            @pl.when(is_valid & functools.reduce(jnp.logical_or, is_kept))
            def _() -> None:
                store(first, projected(first, STORE_COLUMNS).astype(dtype), projection)

    return [functools.partial(job, begin) for begin in range(0, BLOCK_N, CHUNK)]


def consume(ctx: NormLinearContext) -> None:
    """Computes all tiles of the CTA, as a consumer warpgroup."""
    ctx = ctx.as_consumer()
    k_steps, operands = ctx.shape.k_steps, ctx.operands

    def compute_item(i: Any, item: Item, carry: Any) -> Any:
        first_block = i * k_steps
        of_rows = _item_statistics(ctx, i, first_block)
        late = jnp.maximum(item.begin, item.end - LATE_TILES)

        @pl.loop(0, k_steps)
        def _(k: Any) -> None:
            if ctx.config.is_early:  # the first item's blocks were awaited
                pl.when(i > 0)(functools.partial(ctx.shared.rows.await_ready, first_block + k))
            tiles, factors = _rows_of(ctx, first_block + k), (operands.scale, operands.bias)
            rows.normalise(tiles, of_rows, factors, k)

        # Once: a fence and a barrier for each block, between WGMMAs of the first tile, take longer.
        plgpu.commit_smem()

        def compute(number: Any, carry: Any) -> Any:
            finished, previous, step = carry

            if ctx.config.is_early:
                pl.when(number == late)(functools.partial(ctx.shared.early.release, i))
            jobs = _store_jobs(ctx, finished, previous, step > 0)
            is_last = number == item.end - 1
            acc = _multiply(ctx, step, first_block, is_last, jobs)
            return acc, Tile(item.row, number), step + k_steps

        return lax.fori_loop(item.begin, item.end, compute, carry)

    nothing = mma.zeros(BLOCK_N, jnp.float32), Tile(jnp.int32(0), jnp.int32(0)), jnp.int32(0)
    finished, last, step = ctx.for_items(compute_item, nothing)
    for job in _store_jobs(ctx, finished, last, step > 0):
        job()
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def norm_linear_kernel(
    x: jax.Array,
    norm_scale: jax.Array | None,
    norm_bias: jax.Array | None,
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array | None, ...],
    *,
    norm: Norm,
    activations: tuple[str, ...],
    has_projection: bool = False,
    config: NormLinearConfig,
    num_sms: int,
) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """Computes `norm_linear`, in the layouts of the weights: [rows, *weights[g].shape[1:]] each.

    Args:
      x: [rows, F], bf16 or f16.
      weights: [F, N, H] or [F, columns] each, the same dtype; `biases` likewise.
      has_projection: whether to return groups before their activation, too; None for "identity".
      config: legal.
    """
    count, features = x.shape
    flat = tuple(w.reshape(features, -1) for w in weights)
    columns = tuple(w.shape[1] for w in flat)
    shape = Shape(count, features, columns, activations, norm, config.parts)

    scale, bias = (None if y is None else rows.padded(y, BLOCK_K) for y in (norm_scale, norm_bias))
    of_columns = None
    if any(b is not None for b in biases):
        of_columns = jnp.concatenate(
            [
                rows.padded(jnp.zeros((c,)) if b is None else b, BLOCK_N)
                for b, c in zip(biases, columns, strict=True)
            ]
        )
    out = [jax.ShapeDtypeStruct((count, c), x.dtype) for c in columns]
    is_kept = (has_projection and name != "identity" for name in activations)
    outputs = out, [like if kept else None for like, kept in zip(out, is_kept, strict=True)]
    context = functools.partial(NormLinearContext, shape, config)
    roles = Roles(context, load_weights, consume, ((load_rows, 1),))
    if config.is_early:
        assist = (*roles.assist, (load_statistics, STATISTICS_WARPS))
        roles = dataclasses.replace(roles, assist=assist, registers=(224, 56))
    found = launch(
        roles,
        Operands(x, scale, bias, flat, of_columns),
        outputs,
        config.shared(),
        dtype=x.dtype,
        name="ikbo_norm_linear",
        workers=min(num_sms, shape.items),
    )
    found = jax.tree.unflatten(jax.tree.structure(outputs), found)
    shapes = [(count, *w.shape[1:]) for w in weights]
    groups, projection = (
        tuple(x if x is None else x.reshape(shape) for x, shape in zip(xs, shapes, strict=True))
        for xs in found
    )
    return groups, projection if has_projection else None
