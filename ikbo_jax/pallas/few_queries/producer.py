"""The producer warp: finds the items of its CTA, and loads their operands by TMA."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import listing, ranges, rows
from ikbo_jax.pallas.few_queries.context import ALONE, BY_COLUMNS, BY_KEYS, BY_ROWS, Context, Place
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.rings import Ring
from ikbo_jax.problems.few_queries import SWIZZLE_ROWS
from ikbo_jax.problems.hopper import column_blocks


class _Progress(NamedTuple):
    """Counts of what the producer has sent."""

    items: Any
    steps: Any  # blocks of keys, and of values


class _Rows(NamedTuple):
    """The rows of an item."""

    user: Any
    count: Any
    target: Any  # the first row in the outputs; if candidates are listed, the split's first row
    is_void: Any  # whether keys are not needed
    length: Any  # of the user


def _load_queries(ctx: Context, item: Any, first: Any, head: Any) -> None:
    shape, query = ctx.shape, ctx.shared.query
    tiles, ready = query.copied(item), query.ready_at(item)
    for tile in range(ctx.tiles):
        row = jnp.minimum(first + tile * shape.head_rows, shape.rows - 1)
        for member in range(shape.group):
            begin = member * shape.head_rows
            for i in range(column_blocks(shape.head_dim)):
                columns = mosaic.block_columns(i, shape.head_dim, ctx.worker)
                source = ctx.operands.query.at[pl.ds(row, shape.head_rows), head + member, columns]
                target = tiles.at[tile, i]
                if shape.group > 1:
                    target = target.at[pl.ds(begin, shape.head_rows)]
                plgpu.copy_gmem_to_smem(source, target, ready)


def _load_block(
    ctx: Context,
    source: Any,
    ring: Ring,
    step: Any,
    place: tuple[Any, ...],
    left: Any = None,
) -> None:
    """Loads the block at `place`, (user, number of the block, key head), into a stage.

    A block that the `left` keys from it on do not fill is loaded in parts, to read fewer bytes.
    Consumers mask the rest.
    """
    user, block, head = place
    size, parts = ctx.config.block_kv, ctx.block_parts
    ring.await_reuse(step)
    tiles, ready = ring.copied(step), ring.ready_at(step)
    first_key = block * size
    if page := ctx.shape.page:
        number = lax.div(first_key, page)
        user = ctx.operands.pages[user * (ctx.shape.kv_len // page) + number]
        user = jnp.clip(user, 0, source.shape[0] - 1)  # the user's page
        first_key = first_key - number * page

    def load(begin: int, end: int) -> None:
        keys = pl.ds(first_key + begin, end - begin)
        for i in range(tiles.shape[0]):
            columns = mosaic.block_columns(i, source.shape[-1], ctx.worker)
            target = tiles.at[i] if end - begin == size else tiles.at[i, pl.ds(begin, end - begin)]
            plgpu.copy_gmem_to_smem(source.at[user, keys, head, columns], target, ready)

    def skip(count: int) -> None:
        _skip(ready, count * tiles.shape[0])

    def load_whole() -> None:
        load(0, size)
        skip(parts - 1)

    def load_parts() -> None:
        height = size // parts
        load(0, height)
        for begin in range(height, size - height, height):
            pl.when(begin < left)(functools.partial(load, begin, begin + height))
            pl.when(begin >= left)(functools.partial(skip, 1))
        skip(1)  # all parts are loaded as one block

    if left is None or parts == 1:
        load_whole()
        return
    is_whole = left > size - size // parts
    pl.when(is_whole)(load_whole)
    pl.when(~is_whole)(load_parts)


def _load_first_block(ctx: Context, place: Place) -> Any:
    """Loads the first block of this CTA's keys and values, while its rows are searched.

    Returns the user whose block is loaded, or -1. A slot without rows loads a block in vain.
    """

    def load(user: Any) -> Any:
        first = (user, place.split * ctx.split_blocks, place.kv_head)
        _load_block(ctx, ctx.operands.key, ctx.shared.key, jnp.int32(0), first)
        if not ctx.own_stages:  # own tokens come first among values
            _load_block(ctx, ctx.operands.value, ctx.shared.value, jnp.int32(0), first)
        return user

    if ctx.shape.table is None:
        return load(rows.user_of_slot(ctx, place.slot)[1])
    is_first = place.slot < ctx.shape.users
    return lax.cond(is_first, functools.partial(load, place.slot), lambda: jnp.int32(-1))


def _send(
    ctx: Context, progress: _Progress, extent: rows.Extent, place: Place, loaded: Any
) -> tuple[Any, _Progress]:
    """Sends the first rows of `extent` that have one user; returns the next row.

    If the rows have another user than `loaded`, an item without rows takes the loaded blocks.
    """
    shared = ctx.shared
    first = extent.first
    # Queries are on their way while the index is read.
    shared.query.await_reuse(progress.items)
    _load_queries(ctx, progress.items, first, place.head)
    user, end = rows.run_of(ctx, extent)
    is_loaded = loaded >= 0
    is_void = is_loaded & ((first >= extent.end) | (user != loaded))
    user = jnp.where(is_void, loaded, user)
    end = jnp.where(is_void, first, end)
    target = place.split * ctx.shape.rows + first
    length = extent.length
    if ctx.operands.lengths is not None:
        is_known = user == extent.user
        length = lax.cond(is_known, lambda: extent.length, lambda: rows.length_of(ctx, user))
    rest = _Rows(user, end - first, target, is_void, length)
    return end, _send_rows(ctx, progress, rest, place, is_loaded.astype(jnp.int32))


def _send_rows(
    ctx: Context,
    progress: _Progress,
    sent: _Rows,
    place: Place,
    loaded: Any,
    further: tuple[Any, ...] = (),
) -> _Progress:
    """Sends an item, and loads its keys and values after its `loaded` first blocks.

    An item takes its loaded blocks even if it is void. `further`: the last words of its descriptor.
    """
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    user, count, target, is_void, length = sent
    size, first_block = ctx.config.block_kv, place.split * ctx.split_blocks
    most: Any = ctx.split_blocks
    seen = None
    if ctx.has_ranges:
        seen = ranges.bounds(ctx, place, target, count, length)
        # A block that is already in the rings is the item's first one, whether rows see it or not.
        skipped = jnp.clip(lax.div(seen.first, size) - first_block, 0, most)
        skipped = jnp.where(loaded > 0, 0, skipped)
        first_block, most, length = first_block + skipped, most - skipped, seen.end
    keys = jnp.maximum(length - first_block * size, 0)
    keys = jnp.where(is_void, 0, keys)
    blocks = jnp.clip(pl.cdiv(keys, size), loaded, most)
    sharing = jnp.int32(ALONE)
    if ctx.config.shares_keys(shape.head_dim):
        sharing = jnp.where(blocks > 1, BY_KEYS, ALONE)
    if ctx.shares_columns:
        sharing = jnp.int32(BY_COLUMNS)
    elif ctx.tiles > 1:
        sharing = jnp.where(count > shape.head_rows, BY_ROWS, sharing)
    words = (blocks, keys, place.head, target, count, sharing, *further)
    if seen is not None:
        first_key = first_block * size
        whole_from = lax.div(jnp.maximum(seen.all_from - first_key, 0) + (size - 1), size)
        whole_to = lax.div(jnp.maximum(seen.all_to - first_key, 0), size)
        words = (*words, *(() if further else (-1, 0)), first_key, whole_from, whole_to)
    shared.items.send_words(progress.items, words)

    def load(source: Any, ring: Ring, step: Any, block: Any) -> None:
        where = (user, first_block + block, place.kv_head)
        # Consumers zero values past the keys only if keys may end within a block.
        left = keys - block * size if ctx.ends_in_block or not ctx.own_stages else None
        _load_block(ctx, source, ring, step + block, where, left)

    first_value = ctx.value_step(progress.items, progress.steps)
    load_key = functools.partial(load, operands.key, shared.key, progress.steps)
    load_value = functools.partial(load, operands.value, shared.value, first_value)
    load_own = functools.partial(_load_own, ctx, progress, sent, place.kv_head)
    if ctx.own_stages:
        # A part of consumer 1 may begin with block 1. Consumers free no own tokens before they have
        # the keys of their first block.
        pl.when((loaded == 0) & (blocks > 0))(functools.partial(load_key, jnp.int32(0)))
        pl.when(blocks > 1)(functools.partial(load_key, jnp.int32(1)))
        load_own()

        @pl.loop(0, blocks)
        def _(block: Any) -> None:
            load_value(block)
            pl.when(block + 2 < blocks)(functools.partial(load_key, block + 2))

    else:
        if shape.own:
            load_own()

        @pl.loop(loaded, blocks + 1)
        def _(block: Any) -> None:
            pl.when(block < blocks)(functools.partial(load_key, block))
            pl.when(block > loaded)(lambda: load_value(block - 1))

    return _Progress(progress.items + 1, progress.steps + blocks)


def _load_own(ctx: Context, progress: _Progress, sent: _Rows, kv_head: Any) -> None:
    """Loads own keys and values of an item.

    A stage whose rows have no candidate, and those of a further split of keys, stay as they were.
    """
    shape, ring, own = ctx.shape, ctx.own_ring, ctx.shape.own
    first_step = ctx.own_step(progress.items, progress.steps)
    size, q_len = own.columns, jnp.int32(shape.q_len)
    parts = ctx.config.block_parts
    pieces = parts * own.stages // 2
    pieces = pieces if size % (SWIZZLE_ROWS * pieces) == 0 else 1
    height = size // pieces

    @pl.loop(0, own.groups)
    def _(group: Any) -> None:
        begin = group * shape.head_rows
        candidate = lax.div(sent.target + begin, q_len)
        left = lax.div(sent.target + (sent.count - 1), q_len) + 1 - candidate
        left = jnp.where((sent.count > begin) & (sent.target < shape.rows), left, 0)
        for i, source in enumerate((ctx.operands.self_key, ctx.operands.self_value)):
            step = first_step + group * own.stages + i * (own.stages - 1)
            if i < own.stages:
                ring.await_reuse(step)
            tiles, ready = ring.copied(step), ring.ready_at(step)
            for piece in range(pieces):
                rows = pl.ds(candidate + piece * height, height)
                at = tiles.at[:, pl.ds(piece * height + i * (2 - own.stages) * size, height)]
                load = functools.partial(ctx.load, source, (rows, kv_head), at, ready)
                pl.when(left > piece * height)(load)
                pl.when(left <= piece * height)(functools.partial(_skip, ready, tiles.shape[0]))
            if i >= 2 - own.stages:
                further = parts - pieces * (3 - own.stages)
                _skip(ready, further * tiles.shape[0])


def _skip(ready: Any, count: int) -> None:
    """Arrives at a barrier instead of `count` loads."""
    for _ in range(count):
        plgpu.barrier_arrive(ready)


def _load_more_blocks(ctx: Context, place: Place) -> Any:
    """Loads more of the first blocks while candidates are listed; counts those in the rings."""
    user = ctx.listed_place(place.slot)[0]
    keys = rows.length_of(ctx, user) - place.split * (ctx.split_blocks * ctx.config.block_kv)
    blocks = jnp.clip(pl.cdiv(keys, ctx.config.block_kv), 1, ctx.split_blocks)
    loaded = jnp.minimum(blocks, min(ctx.config.k_stages, ctx.config.v_stages))

    @pl.loop(1, loaded)
    def _(block: Any) -> None:
        where = (user, place.split * ctx.split_blocks + block, place.kv_head)
        left = keys - block * ctx.config.block_kv
        _load_block(ctx, ctx.operands.key, ctx.shared.key, block, where, left)
        _load_block(ctx, ctx.operands.value, ctx.shared.value, block, where, left)

    return loaded


def _send_listed(ctx: Context, count: Any, progress: _Progress) -> _Progress:
    """Sends the CTA's items, `count` bundles, whose candidates the consumers list.

    Every listing is followed by an item, even without rows; the bundle's last item says what is
    listed next.
    """
    shape = ctx.shape

    def one_listing(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, rank, loaded, progress = carry
        place = ctx.place(i)
        user, _ = ctx.listed_place(place.slot)
        length = rows.length_of(ctx, user)  # loaded while the candidates are listed
        found, items, following, next_user, next_rank = listing.await_found(ctx, i, rank)
        next_user = jnp.where(following < count, next_user, -1)
        target = place.split * shape.rows
        item = _Rows(user, found, target, found == 0, length)

        def one_item(member: Any, progress: _Progress) -> _Progress:
            further = (jnp.where(member == items - 1, next_user, -1), next_rank)
            before = jnp.where(member == 0, loaded, 0)
            ctx.shared.query.await_reuse(progress.items)
            return _send_rows(ctx, progress, item, ctx.place(i, member), before, further)

        if shape.bundle == 1:
            progress = one_item(jnp.int32(0), progress)
        else:
            progress = lax.fori_loop(0, items, one_item, progress)
        return following, next_rank, jnp.int32(0), progress

    first = ctx.place(jnp.int32(0))
    _, rank = ctx.listed_place(first.slot)
    start = (jnp.int32(0), rank, _load_more_blocks(ctx, first), progress)
    return lax.while_loop(lambda carry: carry[0] < count, one_listing, start)[-1]


def produce(ctx: Context) -> None:
    """Sends all items of the CTA, as the producer warp."""
    shape, shared = ctx.shape, ctx.shared

    def one_item(
        place: Place, extent: rows.Extent, carry: tuple[Any, _Progress]
    ) -> tuple[Any, _Progress]:
        def one_run(carry: tuple[Any, Any, _Progress]) -> tuple[Any, Any, _Progress]:
            first, loaded, progress = carry
            first, progress = _send(ctx, progress, extent._replace(first=first), place, loaded)
            return first, jnp.int32(-1), progress

        _, loaded, progress = lax.while_loop(
            lambda carry: (carry[0] < extent.end) | (carry[1] >= 0), one_run, (extent.first, *carry)
        )
        return loaded, progress

    def one_bundle(i: Any, carry: tuple[Any, _Progress]) -> tuple[Any, _Progress]:
        extent = rows.extent_of(ctx, ctx.place(i, 0).slot)
        if shape.bundle == 1:
            return one_item(ctx.place(i, 0), extent, carry)
        return lax.fori_loop(
            0, shape.bundle, lambda j, carry: one_item(ctx.place(i, j), extent, carry), carry
        )

    count = ctx.count()
    loaded = _load_first_block(ctx, ctx.place(jnp.int32(0)))
    start = (loaded, _Progress(jnp.int32(0), jnp.int32(0)))
    if shape.table:
        plgpu.barrier_wait(shared.tabled.at[0])
    if shape.listed:
        progress = _send_listed(ctx, count, start[1])
    else:
        _, progress = lax.fori_loop(0, count, one_bundle, start)
    items, steps = progress
    shared.query.await_reuse(items)
    shared.items.send_words(items, (jnp.int32(-1),))
    shared.key.drain_uses(steps)
    shared.value.drain_uses(steps + items * ctx.own_stages if ctx.own_stages else steps)
    if shared.own is not None:
        shared.own.drain_uses(items * shape.own.number)
    shared.query.drain_uses(items + 1)
