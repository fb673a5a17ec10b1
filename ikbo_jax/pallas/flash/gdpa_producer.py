"""The producer warp of the GDPA forward kernel: describes items, and loads operands by TMA."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.flash.gdpa_context import GdpaContext, Item
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.rings import Ring
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.problems.gdpa import ITEM_WORDS
from ikbo_jax.problems.hopper import WGMMA_M


class _Progress(NamedTuple):
    """Counts of what the producer has sent."""

    items: Any
    steps: Any  # blocks of keys; between items, as many blocks of values
    is_kept: Any  # 1: the next item reuses the last item's blocks


def _describe(ctx: GdpaContext, progress: _Progress, words: tuple[Any, ...], tile: Any) -> None:
    """Waits for the next query slot, and sends the descriptor of its item.

    `words` are those of `Item` and of `GdpaContext.destination`.
    """
    items = ctx.shared.items
    if not ctx.shape.has_mask:
        items.send_words(progress.items, words, after=ctx.shared.query)
        return
    ctx.shared.query.await_free(progress.items)
    mosaic.copy_words(
        *(ctx.operands.words, tile * ctx.operands.words.shape[1] + lists.TILE_WORDS),
        *(items.words, items.slot(progress.items) * items.words.shape[1] + ITEM_WORDS),
        items.words.shape[1] - ITEM_WORDS,
    )
    items.send_words(progress.items, words)


def _keeps(ctx: GdpaContext, tile: Any, end: Any, blocks: Any) -> Any:
    """Returns 1 if the next tile, before `end`, has the same keys, and the rings hold the keys."""
    if ctx.config.run == 1:
        return jnp.int32(0)
    words = ctx.operands.words
    next_item = jnp.minimum(tile + 1, end - 1)
    is_same = (tile + 1 < end) & (blocks <= min(ctx.config.k_stages, ctx.config.v_stages))
    for word in (lists.KV_START, lists.KV_LENGTH):
        is_same = is_same & (words[next_item, word] == words[tile, word])
    return is_same.astype(jnp.int32)


def _send_item(ctx: GdpaContext, head: Any, end: Any, tile: Any, progress: _Progress) -> _Progress:
    """Sends the descriptor of one head of a tile, whose run ends at tile `end`; loads operands."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    kv_head = lax.div(head, shape.q_heads // shape.kv_heads)
    source, target, rows, first_key, length = (
        operands.words[tile, word] for word in range(lists.TILE_WORDS)
    )
    if shape.has_gaps:  # read once: a block's copy would wait for them
        skip_from, skipped = (
            operands.words[tile, lists.TILE_WORDS + i] for i in (lists.SKIP_FROM, lists.SKIPPED)
        )
    block_kv = ctx.config.block_kv
    blocks = lax.div(length + (block_kv - 1), block_kv)
    is_resident = progress.is_kept
    item = Item(blocks, length, head, is_resident)
    _describe(ctx, progress, (*item, head, target, rows), tile)
    ctx.load_queries(progress.items, lambda consumer: source + consumer * WGMMA_M, head)

    def send(source: Any, ring: Ring, block: Any) -> None:
        step = progress.steps + block
        ring.await_free(step)
        tiles, ready = ring.copied(step), ring.ready_at(step)

        def load() -> None:  # the block may reach past the sequence's end
            first_row = first_key + block * block_kv
            if shape.has_gaps:
                first_row += jnp.where(block >= skip_from, skipped, 0)
            ctx.load(source, (pl.ds(first_row, block_kv), kv_head), tiles, ready)

        if ctx.config.run == 1:
            load()
            return
        pl.when(is_resident == 0)(load)

        @pl.when(is_resident != 0)
        def _() -> None:  # no copy arrives for a resident block, so the producer does
            for _ in range(tiles.shape[0]):
                plgpu.barrier_arrive(ready)

    send_key = functools.partial(send, operands.key, shared.key)
    send_value = functools.partial(send, operands.value, shared.value)
    send_key(jnp.int32(0))

    @pl.loop(1, blocks)
    def send_rest(block: Any) -> None:
        send_key(block)
        send_value(block - 1)

    send_value(blocks - 1)
    is_kept = _keeps(ctx, tile, end, blocks)
    return _Progress(progress.items + 1, ctx.step_after(progress.steps, blocks, is_kept), is_kept)


def _send_run(
    ctx: GdpaContext, number_of: Callable[[Any], Any], i: Any, progress: _Progress
) -> _Progress:
    """Sends run number_of(i): one head of consecutive tiles."""
    run, heads, tiles = ctx.config.run, ctx.shape.q_heads, ctx.operands.counts[0]
    number = number_of(i)
    begin, head = lax.div(number, heads) * run, lax.rem(number, heads)
    end = jnp.minimum(begin + run, tiles)
    return lax.fori_loop(begin, end, functools.partial(_send_item, ctx, head, end), progress)


def _send_taken_runs(ctx: GdpaContext, runs: Any, progress: _Progress) -> _Progress:
    """Sends the CTA's run, then runs that it takes by the counter after it has sent one."""

    def send(carry: tuple[Any, Any, _Progress]) -> tuple[Any, Any, _Progress]:
        i, number, progress = carry
        progress = _send_run(ctx, lambda taken: taken, number, progress)
        return i + 1, ctx.shape.workers + ctx.take(i, runs), progress

    start = (jnp.int32(0), ctx.worker, progress)
    return lax.while_loop(lambda carry: carry[1] < runs, send, start)[2]


def produce(ctx: GdpaContext) -> None:
    """Sends all items of the CTA, as the producer warp."""
    config = ctx.config
    zero = jnp.int32(0)
    progress = _Progress(zero, zero, zero)
    runs = lax.div(ctx.operands.counts[0] + (config.run - 1), config.run)
    items = runs * ctx.shape.q_heads
    if config.tickets:
        progress = _send_taken_runs(ctx, items, progress)
    else:
        send = functools.partial(_send_run, ctx, ctx.work_item)
        progress = lax.fori_loop(0, ctx.work_items(items), send, progress)
    _describe(ctx, progress, (zero,) * 7, zero)
    ctx.drain()
