"""The producer warp of the attention kernel: finds the passes, and loads their operands by TMA."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.flash.attention_context import COMMON_ITEM_WORDS, AttentionContext, Item
from ikbo_jax.pallas.hopper import mosaic, schedule
from ikbo_jax.pallas.hopper.rings import Ring
from ikbo_jax.pallas.worklist import lists, search
from ikbo_jax.problems.attention import FLAG_WORDS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M, column_blocks

#: Consecutive tiles of one head in the schedule, which find their user's keys in L2.
CHUNK = 32


class _Share(NamedTuple):
    """The CTA's `count` tiles: from `first` on by `stride`, or back and forth in a list."""

    row_tiles: Any  # tiles of a head
    first: Any
    stride: Any
    count: Any


class _Pass(NamedTuple):
    """A pass to be sent; rows are numbered in work order."""

    tile: Any  # the tile's number within this CTA; from `_Share.count` on, the pass does not exist
    first: Any  # the tile's rows are [first, stop)
    stop: Any
    head: Any
    begin: Any  # the pass's rows are [begin, end)
    end: Any
    user: Any  # with a list of tiles, row of the first key; with pages, place of the first in them
    length: Any  # number of keys
    source: Any = None  # with a list of tiles, first row of the queries


class _Progress(NamedTuple):
    """Counts of what the producer has sent."""

    items: Any  # passes, and ends of sequences of passes
    steps: Any  # blocks of keys; between items, as many blocks of values
    is_kept: Any  # `Item.is_kept` of the last item


def _share(ctx: AttentionContext) -> _Share:
    shape, operands = ctx.shape, ctx.operands
    if operands.counts is not None:
        row_tiles = operands.counts[1]
        tiles = row_tiles * shape.q_heads
        count = schedule.back_and_forth_share(ctx.worker, shape.workers, tiles)
        # The consumers expect a pass: a CTA without tiles gets one pass without rows.
        return _Share(row_tiles, ctx.worker, 1, jnp.maximum(count, 1))
    row_tiles = jnp.int32(shape.row_tiles)
    if operands.cut_counts is not None:
        row_tiles = operands.cut_counts[operands.cut_counts.shape[0] - 1]
    tiles = row_tiles * shape.q_heads
    each, extra = lax.div(tiles, shape.workers), lax.rem(tiles, shape.workers)
    count = each + (ctx.worker < extra).astype(jnp.int32)
    if ctx.config.reuse:  # consecutive tiles, which share their users' keys
        first = ctx.worker * each + jnp.minimum(ctx.worker, extra)
        return _Share(row_tiles, first, 1, count)
    return _Share(row_tiles, ctx.worker, shape.workers, count)


def _tile(ctx: AttentionContext, share: _Share, i: Any) -> tuple[Any, Any, Any]:
    """Returns (first row, end of rows, head) of this CTA's `i`-th tile; from `count` on, any's."""
    shape, chunk, cuts = ctx.shape, CHUNK, ctx.operands.cuts
    tile = jnp.minimum(share.first + i * share.stride, share.row_tiles * shape.q_heads - 1)
    if ctx.config.reuse:
        head, row_tile = lax.div(tile, share.row_tiles), lax.rem(tile, share.row_tiles)
    else:
        group, rest = lax.div(tile, chunk * shape.q_heads), lax.rem(tile, chunk * shape.q_heads)
        size = jnp.minimum(chunk, share.row_tiles - group * chunk)
        head, row_tile = lax.div(rest, size), group * chunk + lax.rem(rest, size)
    if cuts is not None:
        return cuts[row_tile] * WGMMA_M, cuts[row_tile + 1] * WGMMA_M, head
    first = row_tile * TILE_ROWS
    return first, jnp.minimum(first + TILE_ROWS, shape.rows), head


def _user_at(ctx: AttentionContext, position: Any) -> Any:
    """Loads the clamped user of the candidate at `position` in work order."""
    operands, last = ctx.operands, ctx.shape.batch - 1
    candidate = jnp.minimum(position, last)
    if operands.order is not None:
        candidate = jnp.clip(operands.order[candidate], 0, last)
    return jnp.clip(operands.cand_to_user[candidate], 0, ctx.shape.users - 1)


def _run_from(ctx: AttentionContext, position: Any, stop: Any) -> tuple[Any, Any]:
    """Finds (user, end) of the run of candidates from `position` on, within `stop` and a tile."""
    shape, operands = ctx.shape, ctx.operands
    if shape.users == 1:
        return jnp.int32(0), stop
    user = _user_at(ctx, position)
    if operands.run_ends is not None:
        return user, operands.run_ends[position]
    most = TILE_ROWS // shape.q_len + 2
    if shape.q_len < WGMMA_M:
        last = jnp.minimum(position + most, stop)
        index = operands.cand_to_user
        return user, search.end_of_run(index, position, last, most, shape.users)
    end, is_same = position + 1, True
    for ahead in range(1, (TILE_ROWS - 2) // ctx.shape.q_len + 2):
        is_next = (position + ahead < stop) & (_user_at(ctx, position + ahead) == user)
        is_same = is_same & is_next
        end = end + is_same.astype(jnp.int32)
    return user, end


def _first_row(ctx: AttentionContext, row: Any) -> Any:
    """Returns the place in device memory of row `row` in work order, a consumer's first row."""
    order, q_len, last = ctx.operands.order, ctx.shape.q_len, ctx.shape.batch - 1
    if order is None:
        return row
    position = jnp.minimum(lax.div(row, q_len), last)
    return jnp.clip(order[position], 0, last) * q_len + lax.rem(row, q_len)


def _load_block(
    ctx: AttentionContext, source: Any, ring: Ring, step: Any, user: Any, head: Any, block: Any
) -> None:
    """Loads a block of one user's keys or values into the stage of `step`; see `_Pass.user`."""
    config, shape = ctx.config, ctx.shape
    ring.await_reuse(step)
    first = block * config.block_kv
    rows: tuple[Any, ...] = (user, pl.ds(first, config.block_kv))
    if ctx.operands.words is not None:  # may reach into the next sequence's rows
        rows = (pl.ds(user + first, config.block_kv),)
    if ctx.page:
        blocks = ctx.page // config.block_kv
        number = lax.div(block, blocks)
        begin = (block - number * blocks) * config.block_kv
        page = jnp.clip(ctx.operands.pages[user + number], 0, source.shape[0] - 1)
        rows = (page, pl.ds(begin, config.block_kv))
    kv_head = lax.div(head, shape.q_heads // shape.kv_heads)
    ctx.load(source, (*rows, kv_head), ring.copied(step), ring.ready_at(step))
    if ctx.own and ring is ctx.shared.value:  # a stage of own tokens has two parts
        for _ in range(column_blocks(shape.head_dim)):
            plgpu.barrier_arrive(ring.ready_at(step))


def _load_own(ctx: AttentionContext, step: Any, head: Any, first_row: Any) -> None:
    """Loads own keys and values of a tile's candidates into stages of values from `step` on."""
    shape, operands, ring, own = ctx.shape, ctx.operands, ctx.shared.value, ctx.own
    first = lax.div(first_row, jnp.int32(shape.q_len))
    kv_head = lax.div(head, shape.q_heads // shape.kv_heads)
    for i, source in enumerate((operands.self_key, operands.self_value)):
        if i < own.stages:
            ring.await_reuse(step + i)
        at = step + i * (own.stages - 1)
        tiles = ring.copied(at).at[:, pl.ds(i * (2 - own.stages) * own.columns, own.columns)]
        ctx.load(source, (pl.ds(first, own.columns), kv_head), tiles, ring.ready_at(at))
        for _ in range(column_blocks(shape.head_dim) * (own.stages - 1)):
            plgpu.barrier_arrive(ring.ready_at(at))


def _pass(ctx: AttentionContext, tile: Any, extent: tuple[Any, Any, Any], begin: Any) -> _Pass:
    """Makes the pass from row `begin` on of a tile; `extent` is the result of `_tile`."""
    shape = ctx.shape
    first, stop, head = extent
    user, run_end = _run_from(ctx, lax.div(begin, shape.q_len), shape.batch)
    end = jnp.minimum(run_end * shape.q_len, stop)
    if ctx.operands.cuts is not None:
        end = stop  # with cuts, a tile has one user
    length = jnp.int32(shape.kv_len)
    if ctx.operands.lengths is not None:
        length = jnp.clip(ctx.operands.lengths[user], 0, shape.kv_len)
    if ctx.page:
        user = user * (shape.kv_len // ctx.page)
    return _Pass(tile, first, stop, head, begin, end, user, length)


def _listed_pass(ctx: AttentionContext, share: _Share, i: Any) -> _Pass:
    """Makes the pass of this CTA's `i`-th listed tile; past the last, one without rows and keys."""
    shape = ctx.shape
    number = schedule.back_and_forth(share.first, shape.workers, i)
    tiles = share.row_tiles * shape.q_heads
    exists, number = number < tiles, jnp.clip(number, 0, jnp.maximum(tiles - 1, 0))
    tile, head = lax.div(number, shape.q_heads), lax.rem(number, shape.q_heads)
    source, target, rows, first_key, length = (
        ctx.operands.words[tile, word] for word in range(lists.TILE_WORDS)
    )
    end = target + jnp.where(exists, rows, 0)
    length = jnp.where(exists, length, 0)
    first_key = jnp.minimum(first_key, shape.kv_len - 1)  # an empty sequence may begin past the end
    if ctx.page:
        first_key = lax.div(first_key, ctx.page)
    return _Pass(i, target, end, head, target, end, first_key, length, source)


def _first_pass(ctx: AttentionContext, share: _Share, i: Any) -> _Pass:
    """Makes the first pass of this CTA's `i`-th tile."""
    if ctx.operands.words is not None:
        return _listed_pass(ctx, share, i)
    extent = _tile(ctx, share, i)
    return _pass(ctx, i, extent, extent[0])


def _save(ctx: AttentionContext, current: _Pass) -> Any:
    """Keeps a pass in shared memory, since the producer lacks registers; returns its tile.

    Every lane writes and reads all words, so all lanes must have read the last pass.
    """
    mosaic.synchronise_warp()
    for i, word in enumerate(word for word in current[1:] if word is not None):
        ctx.shared.items.words[ctx.config.q_slots, i] = word
    mosaic.synchronise_warp()
    return current.tile


def _saved(ctx: AttentionContext, tile: Any) -> _Pass:
    """Reads the pass of `tile` that `_save` kept."""
    count = len(_Pass._fields) - (1 if ctx.operands.words is not None else 2)
    return _Pass(tile, *(ctx.shared.items.words[ctx.config.q_slots, i] for i in range(count)))


def _send_item(
    ctx: AttentionContext,
    progress: _Progress,
    current: _Pass,
    is_kept: Any,
    meanwhile: Callable[[], Any],
) -> tuple[_Progress, Any]:
    """Sends the descriptor of a pass, and loads its operands that are not resident.

    Calls `meanwhile` after the first block of keys, and returns its result, too.
    """
    blocks = jnp.maximum(1, pl.cdiv(current.length, ctx.config.block_kv))
    flag, no_row = 1 + lax.div(current.tile, ctx.shape.tiles_per_flag), (jnp.int32(0),) * 3
    item = Item(blocks, current.length, current.head, flag, progress.is_kept, is_kept, *no_row)
    shared, ranges = ctx.shared, []
    for start in (current.first + consumer * WGMMA_M for consumer in range(NUM_CONSUMERS)):
        begin, end = (jnp.clip(x - start, 0, WGMMA_M) for x in (current.begin, current.end))
        ranges += [_first_row(ctx, start), begin, end]
    words = (*item[:COMMON_ITEM_WORDS], *ranges)
    shared.query.await_reuse(progress.items)

    def first_row(consumer: int) -> Any:
        if current.source is None or ctx.operands.order is not None:
            return ranges[3 * consumer]
        return current.source + consumer * WGMMA_M

    ctx.load_queries(progress.items, first_row, item.head)

    def load(source: Any, ring: Ring, first_step: Any, block: Any) -> None:
        _load_block(ctx, source, ring, first_step + block, current.user, item.head, block)

    value_step = ctx.value_step(progress.items, progress.steps)
    load_key = functools.partial(load, ctx.operands.key, shared.key, progress.steps)
    load_value = functools.partial(load, ctx.operands.value, shared.value, value_step)

    def load_rest() -> None:
        if ctx.own:
            own_step = value_step - ctx.own.number
            _load_own(ctx, own_step, item.head, current.first)

        @pl.loop(1, item.blocks)
        def _(block: Any) -> None:
            load_key(block)
            load_value(block - 1)

        load_value(item.blocks - 1)

    ctx.unless(item.is_resident, lambda: load_key(jnp.int32(0)))
    # After the loads, for which the consumers wait longer. They have freed all keys of the pass
    # before when they wait for this descriptor.
    shared.items.send_words(progress.items, words)
    has_registers = column_blocks(ctx.shape.head_dim) <= 2  # called there, H = 256 spills 48 bytes
    result = meanwhile() if has_registers else None
    ctx.unless(item.is_resident, load_rest)
    if not has_registers:
        result = meanwhile()
    return _Progress(progress.items + 1, ctx.step_after(item, progress.steps), item.is_kept), result


def _send_end(ctx: AttentionContext, progress: _Progress) -> _Progress:
    """Sends the descriptor that ends a sequence of passes."""
    ctx.shared.query.await_reuse(progress.items)
    ctx.shared.items.send_words(progress.items, (jnp.int32(0),))
    return progress._replace(items=progress.items + 1)


def _send_passes(
    ctx: AttentionContext,
    share: _Share,
    progress: _Progress,
    select: Callable[[Any], Any],
    reuse: bool,
) -> _Progress:
    """Sends the passes of all tiles that `select(i)` numbers from the `i`-th on, and the end."""

    def after(current: _Pass) -> _Pass:
        if ctx.operands.words is not None:  # a tile is one pass
            return _first_pass(ctx, share, select(current.tile + 1))
        is_within = current.end < current.stop
        tile = lax.cond(is_within, lambda: current.tile, lambda: select(current.tile + 1))
        first, stop, head = _tile(ctx, share, tile)
        begin = jnp.where(is_within, current.end, first)
        return _pass(ctx, tile, (first, stop, head), begin)

    def one_pass(carry: tuple[Any, _Progress]) -> tuple[Any, _Progress]:
        tile, progress = carry
        current, is_kept = _saved(ctx, tile), jnp.int32(0)
        if reuse:
            tile = _save(ctx, after(current))
            following, group = _saved(ctx, tile), ctx.shape.q_heads // ctx.shape.kv_heads
            is_same = current.user == following.user
            is_same &= lax.div(current.head, group) == lax.div(following.head, group)
            is_kept = (is_same & (tile < share.count)).astype(jnp.int32)
        meanwhile = (lambda: tile) if reuse else (lambda: _save(ctx, after(current)))
        progress, tile = _send_item(ctx, progress, current, is_kept, meanwhile)
        return tile, progress

    tile = select(jnp.int32(0))
    _save(ctx, _first_pass(ctx, share, tile))
    progress = lax.while_loop(lambda carry: carry[0] < share.count, one_pass, (tile, progress))[1]
    return _send_end(ctx, progress)


def produce(ctx: AttentionContext) -> None:
    """Sends all passes of the CTA, and the flagged tiles again, as the producer warp."""
    shape, shared = ctx.shape, ctx.shared
    share = _share(ctx)
    nothing = _Progress(jnp.int32(0), jnp.int32(0), jnp.int32(0))
    progress = _send_passes(ctx, share, nothing, lambda tile: tile, ctx.config.reuse)
    plgpu.barrier_wait(shared.flags_ready.at[0])

    def flag(i: Any) -> Any:
        return (shared.flags[0, i] | shared.flags[1, i]) != 0

    def flagged(tile: Any) -> Any:
        def is_good(tile: Any) -> Any:
            # `&` evaluates both operands: the bound keeps the index valid past the last tile.
            word = jnp.minimum(lax.div(tile, shape.tiles_per_flag), FLAG_WORDS - 2)
            return (tile < share.count) & ~flag(1 + word)

        return lax.while_loop(is_good, lambda tile: tile + 1, tile)

    items, steps, _ = lax.cond(
        flag(0),
        lambda: _send_passes(ctx.replace(ends=1), share, progress, flagged, False),
        lambda: progress,
    )
    shared.key.drain_uses(steps)
    if ctx.own:  # each sequence of passes has an end
        steps = steps + (items - jnp.where(flag(0), 2, 1)) * ctx.own.number
    shared.value.drain_uses(steps)
    shared.query.drain_uses(items)
