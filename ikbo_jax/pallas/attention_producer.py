"""The producer warp of the attention kernel: which passes there are, and their operands by TMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import gdpa_tiles, mosaic, schedule
from ikbo_jax.pallas.attention_role import COMMON_ITEM_WORDS, FLAG_WORDS, Item, Role
from ikbo_jax.tuning.configs import ATTENTION_TILE_ROWS, NUM_CONSUMERS, WGMMA_M


class _Share(NamedTuple):
    """The tiles of this CTA: `count` of them, the first one and every `stride`-th after it."""

    row_tiles: Any  # of a head
    first: Any
    stride: Any  # 1 with a list of tiles, which CTAs share forth and back
    count: Any


class _Pass(NamedTuple):
    """A pass that is yet to be sent; rows are numbered in work order."""

    tile: Any  # which one of this CTA's; `_Share.count` or more: there is no such pass
    first: Any  # row of the tile,
    stop: Any  # and past its last
    head: Any
    begin: Any  # row of the pass,
    end: Any  # and past its last
    user: Any  # or, with a list of tiles, row of the first key
    length: Any  # keys
    source: Any = None  # with a list of tiles, first row of the queries


class _Sent(NamedTuple):
    """How far the producer has come."""

    items: Any
    steps: Any  # blocks of keys; and of values, between items
    is_kept: Any  # of the last item


def _share(role: Role) -> _Share:
    shape, operands = role.shape, role.operands
    if operands.counts is not None:
        row_tiles = operands.counts[1]
        tiles = row_tiles * shape.q_heads
        count = schedule.back_and_forth_share(role.worker, shape.workers, tiles)
        # The consumers take it that there is a pass: a CTA without tiles has one without rows.
        return _Share(row_tiles, role.worker, 1, jnp.maximum(count, 1))
    row_tiles = jnp.int32(shape.row_tiles)
    if operands.cut_counts is not None:
        row_tiles = operands.cut_counts[operands.cut_counts.shape[0] - 1]
    tiles = row_tiles * shape.q_heads
    each, extra = lax.div(tiles, shape.workers), lax.rem(tiles, shape.workers)
    count = each + (role.worker < extra).astype(jnp.int32)
    if role.config.reuse:  # neighbours, which have a user's keys in common
        first = role.worker * each + jnp.minimum(role.worker, extra)
        return _Share(row_tiles, first, 1, count)
    return _Share(row_tiles, role.worker, shape.workers, count)


def _tile(role: Role, share: _Share, i: Any) -> tuple[Any, Any, Any]:
    """(first row, row past the last, head) of this CTA's `i`-th tile, or of some tile if it has
    none: tiles of one head and one user stand next to one another."""
    shape, chunk, cuts = role.shape, role.config.chunk, role.operands.cuts
    tile = jnp.minimum(share.first + i * share.stride, share.row_tiles * shape.q_heads - 1)
    if role.config.reuse:
        head, row_tile = lax.div(tile, share.row_tiles), lax.rem(tile, share.row_tiles)
    else:
        group, rest = lax.div(tile, chunk * shape.q_heads), lax.rem(tile, chunk * shape.q_heads)
        size = jnp.minimum(chunk, share.row_tiles - group * chunk)
        head, row_tile = lax.div(rest, size), group * chunk + lax.rem(rest, size)
    if cuts is not None:
        return cuts[row_tile] * WGMMA_M, cuts[row_tile + 1] * WGMMA_M, head
    first = row_tile * ATTENTION_TILE_ROWS
    return first, jnp.minimum(first + ATTENTION_TILE_ROWS, shape.rows), head


def _user_at(role: Role, position: Any) -> Any:
    """The user of the candidate at a position of the work order, clamped."""
    operands, last = role.operands, role.shape.batch - 1
    candidate = jnp.minimum(position, last)
    if operands.order is not None:
        candidate = jnp.clip(operands.order[candidate], 0, last)
    return jnp.clip(operands.cand_to_user[candidate], 0, role.shape.users - 1)


def _run_at(role: Role, position: Any, stop: Any) -> tuple[Any, Any]:
    """(user, position past the last of the run that begins here), looking no further than a tile
    needs, or `stop`."""
    user = _user_at(role, position)
    if role.operands.run_ends is not None:
        return user, role.operands.run_ends[position]
    end, is_same = position + 1, True
    for ahead in range(1, (ATTENTION_TILE_ROWS - 2) // role.shape.q_len + 2):
        is_next = (position + ahead < stop) & (_user_at(role, position + ahead) == user)
        is_same = is_same & is_next
        end = end + is_same.astype(jnp.int32)
    return user, end


def _first_row(role: Role, row: Any) -> Any:
    """Where a consumer's 64 rows stand in device memory, from where they stand in work order."""
    order, q_len, last = role.operands.order, role.shape.q_len, role.shape.batch - 1
    if order is None:
        return row
    position = jnp.minimum(lax.div(row, q_len), last)
    return jnp.clip(order[position], 0, last) * q_len + lax.rem(row, q_len)


def _load_block(
    role: Role, source: Any, tiles: Any, ready: Any, user: Any, head: Any, block: Any
) -> None:
    """Brings a block of one user's keys or values into a stage; `user` is that of a `_Pass`."""
    config, shape = role.config, role.shape
    for i in range(shape.column_blocks):
        first = block * config.block_kv
        rows: tuple[Any, ...] = (user, pl.ds(first, config.block_kv))
        if role.operands.words is not None:  # past the sequence's end, others' rows come along
            rows = (pl.ds(user + first, config.block_kv),)
        plgpu.copy_gmem_to_smem(
            source.at[
                *rows,
                lax.div(head, shape.q_heads // shape.kv_heads),
                role.columns(i),
            ],
            tiles.at[i],
            ready,
        )


def _pass(role: Role, tile: Any, where: tuple[Any, Any, Any], begin: Any) -> _Pass:
    """The pass that begins at row `begin` of a tile; `where` is what `_tile` says of it."""
    shape = role.shape
    first, stop, head = where
    user, run_end = _run_at(role, lax.div(begin, shape.q_len), shape.batch)
    end = jnp.minimum(run_end * shape.q_len, stop)
    if role.operands.cuts is not None:
        end = stop  # tiles end where runs do
    length = jnp.int32(shape.kv_len)
    if role.operands.lengths is not None:
        length = jnp.clip(role.operands.lengths[user], 0, shape.kv_len)
    return _Pass(tile, first, stop, head, begin, end, user, length)


def _listed_pass(role: Role, share: _Share, i: Any) -> _Pass:
    """The pass of this CTA's `i`-th tile of a list; if it has none, one without rows and keys."""
    shape = role.shape
    number = schedule.back_and_forth(share.first, shape.workers, i)
    tiles = share.row_tiles * shape.q_heads
    is_there, number = number < tiles, jnp.clip(number, 0, jnp.maximum(tiles - 1, 0))
    tile, head = lax.div(number, shape.q_heads), lax.rem(number, shape.q_heads)
    source, target, rows, first_key, length = (
        role.operands.words[tile, word] for word in range(gdpa_tiles.TILE_WORDS)
    )
    end = target + jnp.where(is_there, rows, 0)
    length = jnp.where(is_there, length, 0)
    first_key = jnp.minimum(first_key, shape.kv_len - 1)  # an empty sequence may begin past the end
    return _Pass(i, target, end, head, target, end, first_key, length, source)


def _first_pass(role: Role, share: _Share, i: Any) -> _Pass:
    """The first pass of this CTA's `i`-th tile."""
    if role.operands.words is not None:
        return _listed_pass(role, share, i)
    where = _tile(role, share, i)
    return _pass(role, i, where, where[0])


def _note(role: Role, this: _Pass) -> Any:
    """Keeps a pass in shared memory, for which the producer has no registers; returns its tile.

    Every lane writes and reads all words: none may write before the others have read the last pass.
    """
    mosaic.synchronise_warp(interpret=role.interpret)
    for i, word in enumerate(word for word in this[1:] if word is not None):
        role.shared.items[role.config.q_slots, i] = word
    mosaic.synchronise_warp(interpret=role.interpret)
    return this.tile


def _noted(role: Role, tile: Any) -> _Pass:
    count = len(_Pass._fields) - (1 if role.operands.words is not None else 2)
    return _Pass(tile, *(role.shared.items[role.config.q_slots, i] for i in range(count)))


def _describe(role: Role, sent: _Sent, this: _Pass, is_kept: Any) -> Item:
    """What both consumers read, the words of each being 0."""
    blocks = jnp.maximum(1, pl.cdiv(this.length, role.config.block_kv))
    flag, zero = 1 + lax.div(this.tile, role.shape.tiles_per_flag), jnp.int32(0)
    return Item(blocks, this.length, this.head, flag, sent.is_kept, is_kept, *(zero,) * 3)


def _has_keys_of(role: Role, a: _Pass, b: _Pass) -> Any:
    """Whether two passes read the same keys and values."""
    group = role.shape.q_heads // role.shape.kv_heads
    return (a.user == b.user) & (lax.div(a.head, group) == lax.div(b.head, group))


def _ranges(role: Role, this: _Pass) -> list[Any]:
    """For each consumer: first row in device memory, and which of its rows are the pass's."""
    words = []
    for consumer in range(NUM_CONSUMERS):
        start = this.first + consumer * WGMMA_M
        begin, end = (jnp.clip(x - start, 0, WGMMA_M) for x in (this.begin, this.end))
        words += [_first_row(role, start), begin, end]
    return words


def _send_item(
    role: Role, sent: _Sent, item: Item, this: _Pass, meanwhile: Callable[[], Any]
) -> tuple[_Sent, Any]:
    """Describes a pass and brings everything that it reads and is not there; also returns what
    `meanwhile` gives, which is called when the consumers have something to begin with."""
    shared, ranges, user = role.shared, _ranges(role, this), this.user
    slot = role.slot(sent.items)
    plgpu.barrier_wait(shared.q_free.at[slot])
    for i, word in enumerate((*item[:COMMON_ITEM_WORDS], *ranges)):
        shared.items[slot, i] = word
    plgpu.barrier_arrive(shared.item_ready.at[slot])
    for consumer in range(NUM_CONSUMERS):
        row = ranges[3 * consumer]
        if this.source is not None:
            row = this.source + consumer * WGMMA_M
        row = jnp.minimum(row, role.operands.query.shape[0] - 1)
        for i in range(role.shape.column_blocks):
            plgpu.copy_gmem_to_smem(
                role.operands.query.at[pl.ds(row, WGMMA_M), item.head, role.columns(i)],
                shared.query[1].at[slot, consumer, i],
                shared.q_ready.at[slot],
            )

    def load_key(block: Any) -> None:
        stage = role.k_stage(sent.steps + block)
        plgpu.barrier_wait(shared.k_free.at[stage])
        tiles, ready = shared.key[1].at[stage], shared.k_ready.at[stage]
        _load_block(role, role.operands.key, tiles, ready, user, item.head, block)

    def load_value(block: Any) -> None:
        stage = role.v_stage(sent.steps + block)
        plgpu.barrier_wait(shared.v_free.at[stage])
        tiles, ready = shared.value[1].at[stage], shared.v_ready.at[stage]
        _load_block(role, role.operands.value, tiles, ready, user, item.head, block)

    def load_rest() -> None:
        @pl.loop(1, item.blocks)
        def _(block: Any) -> None:
            load_key(block)
            load_value(block - 1)

        load_value(item.blocks - 1)

    role.unless(item.is_here, lambda: load_key(jnp.int32(0)))
    has_registers = role.shape.column_blocks <= 2  # in the middle, H = 256 spills 48 bytes
    result = meanwhile() if has_registers else None
    role.unless(item.is_here, load_rest)
    if not has_registers:
        result = meanwhile()
    return _Sent(sent.items + 1, role.step_after(item, sent.steps), item.is_kept), result


def _send_end(role: Role, sent: _Sent) -> _Sent:
    """Says that no pass follows."""
    slot = role.slot(sent.items)
    plgpu.barrier_wait(role.shared.q_free.at[slot])
    role.shared.items[slot, 0] = jnp.int32(0)
    plgpu.barrier_arrive(role.shared.item_ready.at[slot])
    return sent._replace(items=sent.items + 1)


def _send_passes(
    role: Role, share: _Share, sent: _Sent, select: Callable[[Any], Any], reuse: bool
) -> _Sent:
    """All passes of the tiles that `select` gives, which is the first wanted one from a tile on;
    and the end."""

    def after(this: _Pass) -> _Pass:
        if role.operands.words is not None:  # a tile is one pass
            return _first_pass(role, share, select(this.tile + 1))
        is_within = this.end < this.stop
        tile = lax.cond(is_within, lambda: this.tile, lambda: select(this.tile + 1))
        first, stop, head = _tile(role, share, tile)
        begin = jnp.where(is_within, this.end, first)
        return _pass(role, tile, (first, stop, head), begin)

    def one(carry: tuple[Any, _Sent]) -> tuple[Any, _Sent]:
        tile, sent = carry
        this, is_kept = _noted(role, tile), jnp.int32(0)
        if reuse:
            tile = _note(role, after(this))
            is_same = _has_keys_of(role, this, _noted(role, tile))
            is_kept = (is_same & (tile < share.count)).astype(jnp.int32)
        item = _describe(role, sent, this, is_kept)
        meanwhile = (lambda: tile) if reuse else (lambda: _note(role, after(this)))
        sent, tile = _send_item(role, sent, item, this, meanwhile)
        return tile, sent

    tile = select(jnp.int32(0))
    _note(role, _first_pass(role, share, tile))
    sent = lax.while_loop(lambda carry: carry[0] < share.count, one, (tile, sent))[1]
    return _send_end(role, sent)


def produce(role: Role) -> None:
    """The producer warp."""
    shape, shared = role.shape, role.shared
    share = _share(role)
    nothing = _Sent(jnp.int32(0), jnp.int32(0), jnp.int32(0))
    sent = _send_passes(role, share, nothing, lambda tile: tile, role.config.reuse)
    plgpu.barrier_wait(shared.flags_ready.at[0])

    def flag(i: Any) -> Any:
        return (shared.flags[0, i] | shared.flags[1, i]) != 0

    def flagged(tile: Any) -> Any:
        def is_good(tile: Any) -> Any:
            # One more word than there are flags is never read: `&` looks at both of its sides.
            word = jnp.minimum(lax.div(tile, shape.tiles_per_flag), FLAG_WORDS - 2)
            return (tile < share.count) & ~flag(1 + word)

        return lax.while_loop(is_good, lambda tile: tile + 1, tile)

    @pl.when(flag(0))
    def _() -> None:
        _send_passes(role, share, sent, flagged, False)

    # No arrival may outlive its barrier.
    rings = ((shared.k_free, role.config.k_stages), (shared.v_free, role.config.v_stages))
    for free, stages in (*rings, (shared.q_free, role.config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_wait(free.at[stage])
