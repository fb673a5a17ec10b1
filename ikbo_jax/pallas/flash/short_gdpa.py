"""Generalised dot-product attention on short sequences, as a kernel with several CTAs an SM.

    out[i] = output_scale * sum_j act(scale * query[i] @ key[j]) * value[j]

over the keys j of query i's sequence, for each head; act may be a softmax.  For a sequence of a few
dozen rows, latencies take longer than the work: loads, two products, an activation, and the store,
one after another.  So only loads are pipelined inside of a CTA.  Instead, a CTA is one warpgroup
with little shared memory, and an SM holds several CTAs, which work on different sequences.

A launch before lists tiles of at most `ShortGdpaConfig.tile_rows` query rows of one sequence
(`worklist.tiles`); or each CTA finds its tiles by itself (`found_tiles`).  An *item* is one head of
one tile.  Of n CTAs, CTA w takes the items w, 2n - 1 - w, 2n + w, ...  A *step* is an item's block
of keys: the CTA zeroes the block's rows of the next sequence, issues the loads of the next step,
multiplies, activates, and multiplies.  After an item's last step it stages the result in the item's
query slot, and stores it: by TMA if the tile has 64 rows, else by threads.

Zeroed keys have scores 0, and act(0) = 0; a softmax masks their scores.  Zeroed values keep another
sequence's NaN away.  The softmax keeps a running maximum, and is exact for every input.

Synchronisations, all within the warpgroup; S is `ShortGdpaConfig.slots`:
  1. `query.ready[s]`  the queries of an item with number s modulo S have arrived.
  2. `key.ready[s]`, `value.ready[s]`  the block of a step with number s modulo S has arrived.
  3. `commit_smem` at a step's beginning: all warps have finished the last step, and TMA has read
     the staged result, so the slots may be loaded again.
  4. `commit_smem` before a step's second product: all warps have read the queries, so that a warp
     may stage its rows of the result in their place.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import weights as gdpa_weights
from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.flash import gdpa_context, softmax
from ikbo_jax.pallas.flash.context import Operands, Outputs
from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles, schedule, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.pallas.worklist import found_tiles, lists
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.segments import SegmentContext
from ikbo_jax.pallas.worklist.segments import Shape as Segments
from ikbo_jax.problems.hopper import WGMMA_M
from ikbo_jax.problems.short_gdpa import Batch, ShortGdpaConfig
from ikbo_jax.reference.gdpa import Settings


@dataclasses.dataclass(frozen=True)
class Shape(gdpa_context.Shape):
    """Static description of a launch; `segments`: None if tiles are listed, not found."""

    segments: Segments | None = None


class Item(NamedTuple):
    """One head of a tile."""

    source: Any  # first row of the queries
    target: Any  # first row of the result
    rows: Any
    first_key: Any
    length: Any  # number of keys
    head: Any


class Context(WarpgroupContext):
    """The context of the CTA's warpgroup."""

    @property
    def segments(self) -> SegmentContext:
        """Context in which the CTA finds its tiles."""
        found, outputs = self.shared.found, self.outputs
        return SegmentContext(self.shape.segments, None, found, self.operands, outputs, self.worker)


class _Next(NamedTuple):
    """The block to load next; an item past the CTA's last has no rows."""

    item: Item
    index: Any  # the item's number
    block: Any
    step: Any


def _item(ctx: Context, count: Any, i: Any) -> Item:
    """Returns this CTA's `i`-th item; from `count` on, the last item."""
    shape, words = ctx.shape, ctx.operands.words
    number = schedule.back_and_forth(ctx.worker, shape.workers, jnp.minimum(i, count - 1))
    tile, head = lax.div(number, shape.q_heads), lax.rem(number, shape.q_heads)
    if words is None:
        found = found_tiles.tile(ctx.segments, tile)
    else:
        found = tuple(words[tile, word] for word in range(lists.TILE_WORDS))
    source, target, rows, first_key, length = found
    # An empty sequence may begin past the end.
    first_key = jnp.minimum(first_key, ctx.operands.key.shape[0] - 1)
    return Item(source, target, rows, first_key, length, head)


def _blocks(ctx: Context, item: Item) -> Any:
    """Returns the number of an item's blocks; an item without keys has a block without keys."""
    return jnp.maximum(lax.div(item.length + (ctx.config.block_kv - 1), ctx.config.block_kv), 1)


def _load(ctx: Context, following: _Next) -> None:
    """Loads a step's operands; queries with the item's first block."""
    shape, shared, operands, config = ctx.shape, ctx.shared, ctx.operands, ctx.config
    item = following.item

    @pl.when(following.block == 0)
    def _() -> None:
        slot = shared.query.slot(following.index)
        row = jnp.minimum(item.source, operands.query.shape[0] - 1)
        for i in range(shared.query.tiles[1].shape[1]):
            columns = mosaic.block_columns(i, shape.head_dim, ctx.worker)
            source = operands.query.at[pl.ds(row, config.tile_rows), item.head, columns]
            target = shared.query.tiles[1].at[slot, i]
            if config.tile_rows < WGMMA_M:
                target = target.at[pl.ds(0, config.tile_rows)]
            plgpu.copy_gmem_to_smem(source, target, shared.query.ready.at[slot])

    row = item.first_key + following.block * config.block_kv
    kv_head = lax.div(item.head, shape.q_heads // shape.kv_heads)
    index = (pl.ds(row, config.block_kv), kv_head)
    for ring, source in ((shared.key, operands.key), (shared.value, operands.value)):
        ctx.load(source, index, ring.copied(following.step), ring.ready_at(following.step))


def _advance(ctx: Context, count: Any, following: _Next) -> _Next:
    is_last = following.block + 1 == _blocks(ctx, following.item)
    index = following.index + is_last.astype(jnp.int32)
    item = _item(ctx, count, index)
    block = jnp.where(is_last, 0, following.block + 1)
    return _Next(item, index, block, following.step + 1)


def _zero_hidden(ctx: Context, tiles: Any, visible: Visible) -> None:
    """Zeroes a block's rows that are not visible; a `commit_smem` must follow."""

    @pl.when(visible.is_partial)
    def _() -> None:
        operand_tiles.zero_rows(tiles, jnp.maximum(visible.end, 0))


def _add_values(
    ctx: Context, acc: jax.Array, weights: jax.Array, block: Any, step: Any
) -> jax.Array:
    """Adds the weights times the values at `step` to `acc`."""
    acc = mma.add_product(
        acc, weights, ctx.shared.value.matrix(step), ctx.staging(), is_defined=block > 0
    )
    mma.wait(0)
    return mma.after_wait(acc)


def _step(
    ctx: Context, count: Any, item: Item, index: Any, block: Any, carry: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Attends to a block of keys of item `index`; the carry is (step, next load, state)."""
    shape, shared = ctx.shape, ctx.shared
    step, following, state = carry
    visible = Visible.in_block(item.length, block, ctx.config.block_kv)
    pl.when(block == 0)(functools.partial(shared.query.await_ready, index))
    shared.key.await_ready(step)
    if shape.log2_scale is None:
        _zero_hidden(ctx, shared.key.matrix(step), visible)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    pl.when(following.index < count)(functools.partial(_load, ctx, following))
    scores = mma.product(shared.query.matrix(index), shared.key.matrix(step), shape.head_dim)
    following = _advance(ctx, count, following)
    shared.value.await_ready(step)
    _zero_hidden(ctx, shared.value.matrix(step), visible)
    mma.wait(0)
    plgpu.commit_smem()
    scores = mma.after_wait(scores)
    dtype = ctx.outputs.out.dtype
    if shape.log2_scale is not None:
        scores = visible.keep(scores, softmax.masked_score(shape.log2_scale))
        state, p = softmax.running_step(state, scores, shape.log2_scale)
        state = state._replace(acc=_add_values(ctx, state.acc, p.astype(dtype), block, step))
    else:
        spec = shape.activation
        raw = gdpa_weights.compute_weights(spec, item.head, scores)
        state = _add_values(ctx, state, gdpa_weights.round_weights(raw, dtype), block, step)
    return step + 1, following, state


def _store(ctx: Context, item: Item, index: Any, out: jax.Array) -> None:
    """Stores an item's rows of the result; zeros if the item has no keys."""
    out = jnp.where(item.length > 0, out, jnp.zeros((), out.dtype))
    slot = ctx.shared.query.slot(index)
    staged = tuple(view.at[slot] for view in ctx.shared.query.tiles)
    operand_tiles.stage_rows(staged[0], out, reads_late=True)
    plgpu.commit_smem()
    stores.store_staged(
        ctx,
        [staged],
        [ctx.outputs.out],
        (item.target, item.head),
        (0 * item.rows, item.rows),
        is_full=item.rows == WGMMA_M,
        is_partial=item.rows < WGMMA_M,
    )


def _finish(ctx: Context, item: Item, index: Any, state: Any) -> None:
    """Scales an item's sums, and stores results and, if the launch returns it, lse."""
    shape, dtype = ctx.shape, ctx.outputs.out.dtype
    if shape.log2_scale is None:
        out = gdpa_weights.scale_result(shape.activation, item.head, state)
        _store(ctx, item, index, out.astype(dtype))
        return
    row_sum = jnp.sum(state.sums, axis=1)
    inverse = softmax.inverse_sums(row_sum, shape.activation.output_scale)
    out = state.acc * lax.broadcast_in_dim(inverse, state.acc.shape, (0,))
    _store(ctx, item, index, out.astype(dtype))
    if ctx.outputs.lse is not None:
        lse = jnp.log(row_sum) + state.extreme * jnp.float32(shape.log2_scale * softmax.LN_2)
        lse = jnp.where((item.length > 0) & (row_sum != 0), lse, -jnp.inf)
        stores.store_rows(ctx.outputs.lse, lse, item.target, item.head, 0 * item.rows, item.rows)


def _zero_gaps(ctx: Context, found: found_tiles.Found) -> None:
    """Stores the results of rows of no sequence, as of an item without keys."""
    shape, zero = ctx.shape, jnp.int32(0)

    def store(target: Any, rows: Any, head: Any) -> None:
        item = Item(zero, target, rows, zero, zero, head)
        state: Any = mma.zeros(shape.head_dim, jnp.float32)
        if shape.log2_scale is not None:
            state = softmax.running_start(shape.head_dim, shape.log2_scale)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        _finish(ctx, item, zero, state)

    found_tiles.for_each_gap(ctx.segments, found, shape.workers, shape.q_heads, store)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def consume(ctx: Context) -> None:
    """Computes all items of the CTA, and the CTA's rows of no sequence."""
    shape = ctx.shape
    found = None if shape.segments is None else found_tiles.find(ctx.segments)
    items = (ctx.operands.counts[1] if found is None else found.tiles) * shape.q_heads
    count = schedule.back_and_forth_share(ctx.worker, shape.workers, items)

    def start() -> Any:
        if shape.log2_scale is not None:
            return softmax.running_start(shape.head_dim, shape.log2_scale)
        return mma.undefined(shape.head_dim)

    def one_item(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        item = _item(ctx, count, index)
        step = functools.partial(_step, ctx, count, item, index)
        *progress, state = lax.fori_loop(0, _blocks(ctx, item), step, (*carry, start()))
        _finish(ctx, item, index, state)
        return tuple(progress)

    @pl.when(count > 0)
    def _() -> None:
        zero = jnp.int32(0)
        following = _Next(_item(ctx, count, zero), zero, zero, zero)
        for _ in range(ctx.config.slots - 1):  # steps, and items, are loaded ahead
            pl.when(following.index < count)(functools.partial(_load, ctx, following))
            following = _advance(ctx, count, following)
        lax.fori_loop(0, count, one_item, (zero, following))
        # Stores must be complete when the CTA ends.
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    if found is not None:
        _zero_gaps(ctx, found)


def short_gdpa(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tiles: lists.TileList | Offsets,
    settings: Settings,
    *,
    out_rows: int,
    return_residuals: bool,
    config: ShortGdpaConfig,
    num_sms: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends from every tile of queries to the keys and values of its sequence.

    Arguments and results are as for `gdpa.gdpa_kernel`; `tiles` have `config.tile_rows` rows, or
    are what each CTA finds its tiles from. `settings.activations` may be one for all
    heads.
    """
    _, q_heads, head_dim = query.shape
    segments = batch = None
    if isinstance(tiles, Offsets):
        segments = Segments.of(tiles, config.tile_rows, config.block_kv, warpgroups=1)
        most = segments.most
        batch = Batch(segments.sequences, segments.is_broadcast, tiles.max_seqlen_q)
        of_tiles = {"cu_seqlens_q": tiles.cu_seqlens_q, "cu_seqlens_kv": tiles.cu_seqlens_kv}
    else:
        most, of_tiles = tiles.words.shape[0], tiles._asdict()
    workers = min(num_sms * config.ctas, most * q_heads)
    activation = ActivationSpec.of(settings, query.dtype)
    shape = Shape(q_heads, key.shape[1], head_dim, activation, workers, segments=segments)
    out, *lse = launch(
        Roles(functools.partial(Context, shape, config), None, consume),
        Operands(query, key, value, **of_tiles),
        Outputs.of(out_rows, query, has_lse=return_residuals and shape.log2_scale is not None),
        config.shared(head_dim, batch),
        dtype=query.dtype,
        name="ikbo_short_gdpa",
        workers=workers,
    )
    return out, lse[0] if lse else None
