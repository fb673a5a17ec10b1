"""The producer warp of the GDPA forward kernel: which tiles there are, their operands by TMA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import gdpa_tiles
from ikbo_jax.pallas.gdpa_role import Item, Place, Role
from ikbo_jax.tuning.configs import NUM_CONSUMERS, WGMMA_M


class _Sent(NamedTuple):
    """How far the producer has come."""

    items: Any
    steps: Any  # blocks of keys; and of values, between items
    is_kept: Any  # 1: the item that follows meets the blocks of the last one


def _load_block(role: Role, source: Any, tiles: Any, ready: Any, first_row: Any, head: Any) -> None:
    """Brings a block of keys or values into a stage; rows past the sequence's end come along."""
    for i in range(role.shape.column_blocks):
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(first_row, role.config.block_kv), head, role.columns(i)],
            tiles.at[i],
            ready,
        )


def _load_queries(role: Role, slot: Any, source: Any, head: Any) -> None:
    for consumer in range(NUM_CONSUMERS):
        row = jnp.minimum(source + consumer * WGMMA_M, role.shape.q_rows - 1)
        for i in range(role.shape.column_blocks):
            plgpu.copy_gmem_to_smem(
                role.operands.query.at[pl.ds(row, WGMMA_M), head, role.columns(i)],
                role.shared.query[1].at[slot, consumer, i],
                role.shared.q_ready.at[slot],
            )


def _describe(role: Role, sent: _Sent, item: Item, place: Place) -> Any:
    """Waits for the next slot of queries and describes what is to come there; returns the slot."""
    slot, item_slot = role.slot(sent.items), role.item_slot(sent.items)
    plgpu.barrier_wait(role.shared.q_free.at[slot])
    for i, word in enumerate((*item, *place)):
        role.shared.items[item_slot, i] = word
    plgpu.barrier_arrive(role.shared.item_ready.at[item_slot])
    return slot


def _keeps(role: Role, tile: Any, end: Any, blocks: Any) -> Any:
    """1 if the keys of `tile` are those of the next one before `end`, and all fit the rings."""
    if role.config.run == 1:
        return jnp.int32(0)
    words = role.operands.words
    following = jnp.minimum(tile + 1, end - 1)
    is_same = (tile + 1 < end) & (blocks <= min(role.config.k_stages, role.config.v_stages))
    for word in (gdpa_tiles.OTHER, gdpa_tiles.OTHERS):
        is_same = is_same & (words[following, word] == words[tile, word])
    return is_same.astype(jnp.int32)


def _send_item(role: Role, head: Any, end: Any, tile: Any, sent: _Sent) -> _Sent:
    """Describes one head of a tile, in a run up to tile `end`; brings what it reads."""
    shape, shared, operands = role.shape, role.shared, role.operands
    kv_head = lax.div(head, shape.q_heads // shape.kv_heads)
    source, target, rows, first_key, length = (
        operands.words[tile, word] for word in range(gdpa_tiles.TILE_WORDS)
    )
    block_kv = role.config.block_kv
    blocks = lax.div(length + (block_kv - 1), block_kv)
    is_here = sent.is_kept
    slot = _describe(role, sent, Item(blocks, length, head, is_here), Place(head, target, rows))
    _load_queries(role, slot, source, head)

    def send(source: Any, tiles: Any, ready: Any, block: Any) -> None:
        def load() -> None:
            _load_block(role, source, tiles, ready, first_key + block * block_kv, kv_head)

        if role.config.run == 1:
            load()
            return
        pl.when(is_here == 0)(load)

        @pl.when(is_here != 0)
        def _() -> None:  # everyone has read it, and may again
            for _ in range(shape.column_blocks):
                plgpu.barrier_arrive(ready)

    def send_key(block: Any) -> None:
        stage = role.k_stage(sent.steps + block)
        plgpu.barrier_wait(shared.k_free.at[stage])
        send(operands.key, shared.key[1].at[stage], shared.k_ready.at[stage], block)

    def send_value(block: Any) -> None:
        stage = role.v_stage(sent.steps + block)
        plgpu.barrier_wait(shared.v_free.at[stage])
        send(operands.value, shared.value[1].at[stage], shared.v_ready.at[stage], block)

    send_key(jnp.int32(0))

    @pl.loop(1, blocks)
    def send_rest(block: Any) -> None:
        send_key(block)
        send_value(block - 1)

    send_value(blocks - 1)
    is_kept = _keeps(role, tile, end, blocks)
    return _Sent(sent.items + 1, role.step_after(sent.steps, blocks, is_kept), is_kept)


def _send_run(role: Role, i: Any, sent: _Sent) -> _Sent:
    """This CTA's `i`-th run: some neighbouring tiles, of one head."""
    run, heads, tiles = role.config.run, role.shape.q_heads, role.operands.counts[0]
    number = role.turn(i)
    begin, head = lax.div(number, heads) * run, lax.rem(number, heads)
    end = jnp.minimum(begin + run, tiles)
    return lax.fori_loop(begin, end, functools.partial(_send_item, role, head, end), sent)


def produce(role: Role) -> None:
    """The producer warp."""
    shared, config = role.shared, role.config
    zero = jnp.int32(0)
    runs = lax.div(role.operands.counts[0] + (config.run - 1), config.run)
    count = role.share(runs * role.shape.q_heads)
    sent = _Sent(zero, zero, zero)
    sent = lax.fori_loop(0, count, functools.partial(_send_run, role), sent)
    _describe(role, sent, Item(zero, zero, zero, zero), Place(zero, zero, zero))
    # No arrival may outlive its barrier.
    rings = ((shared.k_free, config.k_stages), (shared.v_free, config.v_stages))
    for free, stages in (*rings, (shared.q_free, config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_wait(free.at[stage])
