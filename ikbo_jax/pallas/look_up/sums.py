"""Sums of candidates' rows by user, as a Mosaic GPU kernel for Hopper.

    sums[u] = sum of values[b] over the candidates b of user u

A CTA owns neighbouring users and a chunk of columns. CTAs share users and candidates evenly: in
the list of all candidates by user, in which each user's end is an entry as well, a CTA owns the
users whose first entry lies in its equal part. So candidate p of the order of users is entry
p + user[p], and all threads of the CTA search for its part.

The CTA's candidates, in the order of users, are divided evenly among its lanes: a lane is the
threads, one for each vector of the chunk, that add up the same candidates. So a lane's candidates
may begin or end within a user. A thread

  1. adds up its candidates; where the user changes, it stores the sum of the user before,
  2. adds the sums of later lanes to that of its last user, by a segmented scan in shared memory,
  3. stores zeros for users without candidates.

Where the CTA has one user, step 2 adds up all lanes, and step 3 is left out.

A user with so many candidates that they are all entries of other CTAs' parts is *long*: these CTAs,
which own no user, divide its columns among themselves, or the candidates of many bytes, and

  4. add up what they have. Another launch adds up the sums of divided candidates.

Each number is added in f32, in an order that the sizes and the index decide, and rounded once.

The kernel is limited by memory: each row is read once. Candidates are put into the order of users
by a launch of its own, unless they are sorted. Where rows are short, a CTA reads the index instead,
and lists the candidates of some users; the candidates may be divided into parts, each with CTAs of
its own, whose sums in f32 XLA adds up.

Synchronisations: `Threads.commit` in the search or the lists, in step 2, before step 3 and
in step 4. CTAs do not wait for each other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import mosaic, per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import LANES, Threads, same
from ikbo_jax.pallas.hopper.row_vectors import Rows, Words
from ikbo_jax.pallas.look_up import parts
from ikbo_jax.pallas.look_up.listing import Listed, list_users
from ikbo_jax.pallas.look_up.parts import Operands, Own, Part, Shape
from ikbo_jax.pallas.worklist import counted_order, scan
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.problems.look_up import STREAMED_BYTES, SegmentSumConfig, vector_words

#: Vectors of a row that a CTA adds up at a time for a long user: 32 bytes, which a load of device
#: memory has.
LONG_COLUMNS = 2
#: Lanes whose sums a thread adds up at a time where all lanes have one user.
_FAN_IN = 8


class _Outputs(NamedTuple):
    """Holds what the launch fills; without `shares`, CTAs divide a long user's columns."""

    sums: Any  # [parts * U, width]
    shares: Any = None  # [slices, width] f32: sums of a CTA's share of a long user's candidates
    user: Any = None  # [slices] int32: the long user, at the first of its CTAs
    helpers: Any = None  # [slices] int32: the number of its CTAs there; 0 elsewhere


class _Sums(NamedTuple):
    """Holds a thread's sums while it walks along its lane's candidates.

    `open` is the sum of the last user so far; `head` that of the user that the lane began with, if
    an earlier lane has that user, too; `is_head` is 1 while that is the last user.
    """

    user: Any
    open: tuple[Any, ...]
    head: tuple[Any, ...]
    is_head: Any


def _sum(ctx: WarpgroupContext) -> None:
    """Runs one warpgroup of the CTA."""
    shape = ctx.shape
    threads = Threads(ctx.config.warpgroups, ctx.consumer)
    if shape.listed_users != 1:
        scan.clear(threads, ctx.shared.has_any)
        scan.clear(threads, ctx.shared.linked)
    chunk, piece = lax.rem(ctx.worker, shape.chunks), lax.div(ctx.worker, shape.chunks)
    number, piece = lax.div(piece, shape.slices), lax.rem(piece, shape.slices)
    listed = list_users(ctx, threads, piece, number) if shape.listed_users else None
    part = _part(ctx, threads, chunk * shape.columns, number * shape.users, listed)
    own = parts.find_own(part, piece)
    if ctx.outputs.shares is not None:
        _describe(part, chunk, piece, own.first, 0)

    def sum_own() -> None:
        pl.when(own.begin < own.after)(lambda: _join(part, *_walk(part, own)))
        threads.commit()
        _store_zeros(part, own)

    if shape.listed_users == 1:
        _sum_user(part, own, own.first, ctx.outputs.sums)
    elif shape.listed_users:
        sum_own()
    else:
        lax.cond(own.is_filled, lambda: _sum_long(part, own.first - 1, chunk, piece), sum_own)


def _part(
    ctx: WarpgroupContext, threads: Threads, first: Any, first_row: Any, listed: Listed | None
) -> Part:
    """Makes a thread's part of the vectors from number `first` on."""
    shape = ctx.shape
    lane, column = per_thread.divided(threads.number(), shape.columns)
    vector = first + column
    is_used = (lane < threads.count // shape.columns) & (vector < shape.vectors)
    vector = jnp.minimum(vector, shape.vectors - 1)
    return Part(ctx, threads, lane, vector, is_used, column == 0, first_row, listed)


def _sum_long(part: Part, user: Any, chunk: Any, piece: Any) -> None:
    """Adds up the CTA's share of a long user (step 4)."""
    ctx, shape, threads = part.ctx, part.ctx.shape, part.threads
    threads.commit()  # the search before is read
    begin, after = parts.places_of(part, user)
    # The CTAs whose parts the user fills; where an index is not sorted, anything may be found.
    each = jnp.int32(shape.each)
    first, end = lax.div(begin + user + each, each), lax.div(after + user, each)
    helper, helpers = jnp.maximum(piece - first, 0), jnp.maximum(end - first, 1)
    if ctx.outputs.shares is not None:
        _describe(part, chunk, piece, user, jnp.where(helper == 0, helpers, 0))
        each = lax.div(after - begin + (helpers - 1), helpers)
        first = jnp.minimum(begin + helper * each, after)
        share = Own(user, user + 1, first, jnp.minimum(first + each, after))
        _sum_user(part, share, piece, ctx.outputs.shares)
        return
    narrow = dataclasses.replace(shape, chunks=pl.cdiv(shape.vectors, LONG_COLUMNS))
    narrow = narrow if narrow.columns < shape.columns else shape
    narrow_ctx, end = ctx.replace(shape=narrow), (chunk + 1) * shape.columns
    steps = pl.cdiv(shape.columns, narrow.columns)

    @pl.loop(0, lax.div(steps - 1 - helper + helpers, helpers))
    def _(turn: Any) -> None:
        first = chunk * shape.columns + (helper + turn * helpers) * narrow.columns
        own = _part(narrow_ctx, threads, first, part.first_row, None)
        own = own._replace(is_used=own.is_used & (own.vector < end))
        _sum_user(own, Own(user, user + 1, begin, after), user, ctx.outputs.sums)
        threads.commit()


def _describe(part: Part, chunk: Any, piece: Any, user: Any, helpers: Any) -> None:
    """Stores the long user whose CTAs begin with this one, and their number."""
    is_first = (part.threads.number() == 0) & (same(0) + chunk == 0)
    for ref, number in ((part.ctx.outputs.user, user), (part.ctx.outputs.helpers, helpers)):
        part.threads.write(ref, same(0) + piece, same(0) + number, is_first)


def _add_shares(ctx: WarpgroupContext) -> None:
    """Runs a CTA that adds up the shares of a long user, if their first one has its number."""
    chunk, piece = lax.rem(ctx.worker, ctx.shape.chunks), lax.div(ctx.worker, ctx.shape.chunks)
    helpers, user = ctx.operands.helpers[piece], ctx.operands.user[piece]
    part = _part(ctx, Threads(1, 0), chunk * ctx.shape.columns, 0, None)
    own = Own(user, user + 1, piece, jnp.minimum(piece + helpers, ctx.shape.batch))
    pl.when(helpers > 0)(lambda: _sum_user(part, own, user, ctx.operands.sums))


def _sum_user(part: Part, own: Own, row: Any, target: Any) -> None:
    """Stores the sum of all lanes' candidates, which are one user's, to a row of `target`."""
    threads, numbers, lanes = part.threads, _walk(part, own, is_one_user=True)[0].open, part.lanes
    # Otherwise, a loop around this function has 140 addresses and conditions in registers.
    zero = mosaic.opaque(jnp.int32(0))
    part = part._replace(lane=part.lane + zero)
    while lanes > 1:
        _publish(part, numbers)
        threads.commit()
        summed, lanes = lanes, pl.cdiv(lanes, _FAN_IN)
        for distance in range(lanes, summed, lanes):
            *_, others = _of_lane(part, distance, summed)
            numbers = tuple(x + y for x, y in zip(numbers, others, strict=True))
        if lanes > 1:
            threads.commit()
    _store(part, same(0) + row, numbers, part.is_used & (part.lane == 0), target)


def _publish(part: Part, numbers: tuple[Any, ...]) -> Any:
    """Stores the thread's numbers for others; returns the places of the warpgroup's threads."""
    first = part.threads.warpgroup * WARPGROUP_SIZE if part.threads.warpgroups > 1 else 0
    places = pl.ds(first, WARPGROUP_SIZE)
    for i, x in enumerate(numbers):
        part.ctx.shared.sums[i, places] = x
    return places


def _of_lane(part: Part, distance: Any, lanes: int) -> tuple[Any, Any, list[jax.Array]]:
    """Finds the lane `distance` further: whether `lanes` have it, its thread, numbers or zeros."""
    is_lane = part.lane + distance < lanes
    further = jnp.where(is_lane, same(0) + distance * part.ctx.shape.columns, same(0))
    other, sums = part.threads.number() + further, part.ctx.shared.sums
    numbers = [part.threads.read(sums.at[i], other) for i in range(part.ctx.shape.numbers)]
    return is_lane, other, [jnp.where(is_lane, x, _no_sum()) for x in numbers]


def _store_zeros(part: Part, own: Own) -> None:
    """Stores zeros for users without candidates (step 3)."""
    nothing = (_no_sum(),) * part.ctx.shape.numbers

    @pl.loop(0, lax.div(own.end - own.first + (part.lanes - 1), jnp.int32(part.lanes)))
    def _(turn: Any) -> None:
        number = part.lane + turn * part.lanes
        is_own = part.is_used & (number < own.end - own.first)
        number = jnp.where(is_own, number, same(0))
        has_any = part.threads.read(part.ctx.shared.has_any, number)
        _store(part, number + own.first, nothing, is_own & (has_any == 0))


def _walk(part: Part, own: Own, *, is_one_user: bool = False) -> tuple[_Sums, Any]:
    """Adds up the lane's candidates (step 1); also returns whether the lane has any.

    `is_one_user`: all candidates of `own` are the first user's, which need not be loaded.
    """
    shape, unroll = part.ctx.shape, part.ctx.config.unroll
    each = lax.div(own.after - own.begin + (part.lanes - 1), jnp.int32(part.lanes))
    first = jnp.minimum(part.lane * each + own.begin, own.after)
    end = jnp.minimum(first + each, own.after)
    nothing = (_no_sum(),) * shape.numbers
    is_later = first > own.begin
    user = same(0) if is_one_user else jnp.where(is_later, part.user(first - 1), same(-1))
    sums = _Sums(user, nothing, nothing, same(1))

    def places(turn: Any) -> list[jax.Array]:
        return [first + (turn * unroll + i) for i in range(unroll)]

    values = Rows(part.ctx.operands.values, shape.words)

    def step(turn: Any, carry: tuple[_Sums, list[jax.Array]]) -> Any:
        sums, candidates = carry
        loaded = values.load([(x, part.vector) for x in candidates])
        users = [None if is_one_user else part.user(x) for x in places(turn)]
        # On their way while this turn's are added.
        following = [part.candidate(x) for x in places(turn + 1)]
        for place, user, words in zip(places(turn), users, loaded, strict=True):
            is_own = part.is_used & (place < end)
            sums = _add(part, own, sums, user, words, is_own)
        return sums, following

    turns = lax.div(each + (unroll - 1), jnp.int32(unroll))
    sums, _ = lax.fori_loop(0, turns, step, (sums, [part.candidate(x) for x in places(0)]))
    return sums, part.is_used & (first < end)


def _add(
    part: Part, own: Own, sums: _Sums, user: jax.Array | None, words: Words, is_own: jax.Array
) -> _Sums:
    """Adds a candidate's vector; stores the sum of the user before, if that is complete.

    `user` is None where all candidates have the same user.
    """
    values = Rows(part.ctx.operands.values, part.ctx.shape.words)
    words = tuple(jnp.where(is_own, x, jnp.zeros_like(x)) for x in words)
    if user is not None:
        is_new = is_own & (user != sums.user)
        # A branch: most candidates have the user of the one before, and the sum's end takes half of
        # all instructions.
        sums = lax.cond(
            per_thread.any_of_warp(is_new),
            lambda: _end_user(part, own, sums, user, is_new),
            lambda: sums,
        )
    added = zip(sums.open, values.floats(words), strict=True)
    return sums._replace(open=tuple(x + y for x, y in added))


def _end_user(part: Part, own: Own, sums: _Sums, user: jax.Array, is_new: jax.Array) -> _Sums:
    """Begins the sum of a new user, in the threads that have one."""
    number = user - own.first
    is_known = is_new & part.is_first & (number >= 0) & (number < own.end - own.first)
    part.threads.keep(part.ctx.shared.has_any, number, same(1), is_known)
    is_head = is_new & (sums.is_head == 1)
    _store(part, sums.user, sums.open, is_new & (sums.is_head == 0))
    return _Sums(
        jnp.where(is_new, user, sums.user),
        tuple(jnp.where(is_new, _no_sum(), x) for x in sums.open),
        tuple(jnp.where(is_head, x, y) for x, y in zip(sums.open, sums.head, strict=True)),
        jnp.where(is_new, same(0), sums.is_head),
    )


def _join(part: Part, sums: _Sums, is_wanted: jax.Array) -> None:
    """Adds sums of later lanes to the last user's, and stores that (step 2).

    `head` of each lane becomes the sum that it and later lanes add to a user of an earlier lane: a
    lane of one user alone is linked to the next lane.
    """
    shared, threads = part.ctx.shared, part.threads
    is_linked = is_wanted & (sums.is_head == 1)
    heads = tuple(jnp.where(is_linked, x, y) for x, y in zip(sums.open, sums.head, strict=True))

    def publish(step: Any, heads: tuple[Any, ...], link: Any) -> None:
        shared.links[_publish(part, heads)] = link
        threads.add(shared.linked, same(0) + step, same(1), (link == 1) & part.is_first)
        threads.commit()

    def join(carry: Any) -> Any:
        step, heads, link = carry
        is_lane, other, later = _of_lane(part, jnp.left_shift(1, step), part.lanes)
        later_link = jnp.where(is_lane, threads.read(shared.links, other), same(0))
        heads = tuple(jnp.where(link == 1, x + y, x) for x, y in zip(heads, later, strict=True))
        link = link * later_link
        threads.commit()  # all have read
        publish(step + 1, heads, link)
        return step + 1, heads, link

    link = is_linked.astype(jnp.int32)
    publish(0, heads, link)
    # Most often, no lane is linked after one or two steps.
    lax.while_loop(lambda x: shared.linked[x[0]] > 0, join, (jnp.int32(0), heads, link))
    *_, later = _of_lane(part, 1, part.lanes)
    total = [x + y for x, y in zip(sums.open, later, strict=True)]
    _store(part, sums.user, total, is_wanted & (sums.is_head == 0))


def _store(part: Part, row: Any, sums: Sequence[Any], is_wanted: Any, target: Any = None) -> None:
    """Stores sums to a row of the CTA's part of `target`; None: of the result."""
    target = part.ctx.outputs.sums if target is None else target
    words = part.ctx.shape.numbers * jnp.dtype(target.dtype).itemsize // 4
    rows = Rows(target, words)
    rows.store(jnp.maximum(row, 0) + part.first_row, part.vector, rows.rounded(sums), is_wanted)


def _no_sum() -> jax.Array:
    return same(0).astype(jnp.float32)


def segment_sum_kernel(
    values: jax.Array,
    cand_to_user: jax.Array,
    users: int,
    *,
    config: SegmentSumConfig,
    is_sorted: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """Sums rows over the candidates of each user: [U, width], zeros for a user without candidates.

    Sums are f32, in the same order in every run, and rounded once to `dtype`; None: the values'.
    `values` [B, width] are bf16, f16 or f32, B at least 1; XLA converts rows that are no whole
    words of 32 bits to f32 first. `cand_to_user` [B] int32 is clamped to [0, users).
    """
    batch, width = values.shape
    user, order = cand_to_user, None
    if not is_sorted and not config.users and users > 1:
        found_order = counted_order.ordered(None, cand_to_user, users)
        user, order = found_order.user, found_order.order
    result = stored = jnp.dtype(dtype or values.dtype)
    words = vector_words(width, values.dtype.itemsize)
    if not words:
        values, words, stored = values.astype(jnp.float32), vector_words(width, 4), jnp.float32
    numbers = words * 4 // values.dtype.itemsize
    vectors = width // numbers
    chunks, slices = config.divide(batch, users, vectors)
    shape = Shape(batch, users, vectors, words, numbers, chunks, slices, config.users, config.parts)
    threads = config.warpgroups * WARPGROUP_SIZE
    if config.parts > 1:
        stored = jnp.float32
    list_words = memory.Words((pl.cdiv(shape.most_listed, threads) * threads,))
    is_sorting = config.users > 1
    counts = scan.padded(Threads(config.warpgroups, 0), config.users * threads // LANES)
    array = jax.ShapeDtypeStruct
    outputs = _Outputs(array((config.parts * users, width), stored))
    # Adding up the shares takes 1.6 us.
    if not config.users and values.nbytes >= STREAMED_BYTES:
        of_cta = array((slices,), jnp.int32)
        outputs = _Outputs(outputs.sums, array((slices, width), jnp.float32), of_cta, of_cta)
    found: _Outputs = launch_threads(
        _sum,
        shape,
        Operands(values, user, order),
        outputs,
        memory.shared(
            sums=memory.Floats((numbers, threads)),
            links=memory.Words((threads,)),
            # Counts the linked lanes before each step that joins sums.
            linked=memory.Words((threads.bit_length() + 1,)),
            # Of the searches, or of the list.
            totals=memory.Words((3 * parts.LEVELS * threads // LANES + 1,)),
            has_any=memory.Words((shape.most_users,)),  # 1 for a user with candidates
            listed=list_words if config.users else None,
            by_user=list_words if is_sorting else None,  # the list, and begins of its users:
            counts=memory.Words((counts,)) if is_sorting else None,
        ),
        name="ikbo_segment_sum",
        workers=chunks * slices * config.parts,
        warpgroups=config.warpgroups,
        config=config,
    )
    sums: jax.Array = found.sums if found.shares is None else _with_shares(found)
    if config.parts > 1:
        sums = sums.reshape(config.parts, users, width).sum(axis=0)
    return sums.astype(result)


def _with_shares(found: _Outputs) -> jax.Array:
    """Adds those of long users to the sums, whose memory it reuses."""
    (slices, width), config = found.shares.shape, SegmentSumConfig(32, 1, 8)
    words, sums = vector_words(width, 4), jax.new_ref(found.sums)
    chunks, _ = config.divide(slices, 1, width // words)
    launch_threads(
        _add_shares,
        Shape(slices, found.sums.shape[0], width // words, words, words, chunks, slices),
        Operands(found.shares, found.user, None, found.helpers, sums),
        (),
        memory.shared(sums=memory.Floats((words, WARPGROUP_SIZE))),
        name="ikbo_segment_sum_shares",
        workers=chunks * slices,
        config=config,
    )
    return jax.freeze(sums)
