"""The producer warp of the attention kernel: which passes there are, and their operands by TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_role import Role
from ikbo_jax.tuning.configs import ATTENTION_TILE_ROWS, NUM_CONSUMERS, WGMMA_M


class _Sent(NamedTuple):
    """How far the producer has come."""

    items: Any
    steps: Any  # blocks of keys; and of values, between items


def _locate(role: Role, tile: Any) -> tuple[Any, Any]:
    """(first row in work order, head): tiles of one head and one user stand next to one another."""
    shape, chunk = role.shape, role.config.chunk
    group, rest = lax.div(tile, chunk * shape.q_heads), lax.rem(tile, chunk * shape.q_heads)
    size = jnp.minimum(chunk, shape.row_tiles - group * chunk)
    head, within = lax.div(rest, size), lax.rem(rest, size)
    return (group * chunk + within) * ATTENTION_TILE_ROWS, head


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
    """Brings a block of one user's keys or values into a stage."""
    config, shape = role.config, role.shape
    for i in range(shape.column_blocks):
        plgpu.copy_gmem_to_smem(
            source.at[
                user,
                pl.ds(block * config.block_kv, config.block_kv),
                lax.div(head, shape.q_heads // shape.kv_heads),
                role.columns(i),
            ],
            tiles.at[i],
            ready,
        )


def _send_item(
    role: Role, sent: _Sent, words: tuple[Any, ...], first_rows: tuple[Any, Any], user: Any
) -> _Sent:
    """Describes a pass and brings everything that it reads; words[0] is its number of blocks."""
    shared = role.shared
    blocks, _, head, *_ = words
    slot = role.slot(sent.items)
    plgpu.barrier_wait(shared.q_free.at[slot])
    for i, word in enumerate(words):
        shared.items[slot, i] = word
    plgpu.barrier_arrive(shared.item_ready.at[slot])
    for consumer in range(NUM_CONSUMERS):
        row = jnp.minimum(first_rows[consumer], role.shape.rows - 1)
        for i in range(role.shape.column_blocks):
            plgpu.copy_gmem_to_smem(
                role.operands.query.at[pl.ds(row, WGMMA_M), head, role.columns(i)],
                shared.query[1].at[slot, consumer, i],
                shared.q_ready.at[slot],
            )

    def load_key(block: Any) -> None:
        stage = role.k_stage(sent.steps + block)
        plgpu.barrier_wait(shared.k_free.at[stage])
        tiles, ready = shared.key[1].at[stage], shared.k_ready.at[stage]
        _load_block(role, role.operands.key, tiles, ready, user, head, block)

    def load_value(block: Any) -> None:
        stage = role.v_stage(sent.steps + block)
        plgpu.barrier_wait(shared.v_free.at[stage])
        tiles, ready = shared.value[1].at[stage], shared.v_ready.at[stage]
        _load_block(role, role.operands.value, tiles, ready, user, head, block)

    load_key(jnp.int32(0))

    @pl.loop(1, blocks)
    def load_rest(block: Any) -> None:
        load_key(block)
        load_value(block - 1)

    load_value(blocks - 1)
    return _Sent(sent.items + 1, sent.steps + blocks)


def _send_end(role: Role, sent: _Sent) -> _Sent:
    """Says that no pass follows."""
    slot = role.slot(sent.items)
    plgpu.barrier_wait(role.shared.q_free.at[slot])
    role.shared.items[slot, 0] = jnp.int32(0)
    plgpu.barrier_arrive(role.shared.item_ready.at[slot])
    return sent._replace(items=sent.items + 1)


def _send_tile(role: Role, sent: _Sent, i: Any) -> _Sent:
    """All passes of this CTA's `i`-th tile."""
    shape = role.shape
    first, head = _locate(role, role.worker + i * shape.workers)
    stop = jnp.minimum(first + ATTENTION_TILE_ROWS, shape.rows)
    starts = [first + consumer * WGMMA_M for consumer in range(NUM_CONSUMERS)]
    first_rows = tuple(_first_row(role, start) for start in starts)
    flag = 1 + lax.div(i, shape.tiles_per_flag)

    def one(carry: tuple[Any, _Sent]) -> tuple[Any, _Sent]:
        row, sent = carry
        user, run_end = _run_at(role, lax.div(row, shape.q_len), shape.batch)
        row_end = jnp.minimum(run_end * shape.q_len, stop)
        length = jnp.int32(shape.kv_len)
        if role.operands.lengths is not None:
            length = jnp.clip(role.operands.lengths[user], 0, shape.kv_len)
        blocks = jnp.maximum(1, pl.cdiv(length, role.config.block_kv))
        ranges = []
        for start, first_row in zip(starts, first_rows, strict=True):
            begin, end = (jnp.clip(x - start, 0, WGMMA_M) for x in (row, row_end))
            ranges += [first_row, begin, end]
        words = (blocks, length, head, flag, *ranges)
        return row_end, _send_item(role, sent, words, first_rows, user)

    return lax.while_loop(lambda carry: carry[0] < stop, one, (first, sent))[1]


def _send_tiles(role: Role, sent: _Sent, begin: Any, end: Any) -> _Sent:
    return lax.fori_loop(begin, end, lambda i, sent: _send_tile(role, sent, i), sent)


def produce(role: Role) -> None:
    """The producer warp."""
    shape, shared = role.shape, role.shared
    count = role.tile_count
    sent = _send_end(role, _send_tiles(role, _Sent(jnp.int32(0), jnp.int32(0)), 0, count))
    plgpu.barrier_wait(shared.flags_ready.at[0])

    def flag(i: Any) -> Any:
        return (shared.flags[0, i] | shared.flags[1, i]) != 0

    @pl.when(flag(0))
    def _() -> None:
        def redo(group: Any, sent: _Sent) -> _Sent:
            begin = group * shape.tiles_per_flag
            end = jnp.minimum(begin + shape.tiles_per_flag, count)
            end = jnp.where(flag(1 + group), end, begin)
            return _send_tiles(role, sent, begin, end)

        groups = pl.cdiv(count, shape.tiles_per_flag)
        _send_end(role, lax.fori_loop(0, groups, redo, sent))

    # No arrival may outlive its barrier.
    rings = ((shared.k_free, role.config.k_stages), (shared.v_free, role.config.v_stages))
    for free, stages in (*rings, (shared.q_free, role.config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_wait(free.at[stage])
