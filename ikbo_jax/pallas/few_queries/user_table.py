"""Makes a table of every user's candidates in shared memory, for a sorted index.

The consumers read the whole index while the first block of keys is loaded. In the table the
producer finds an item's rows without a load of device memory: a search takes two or three dependent
ones, 1 to 4 us.

The table has each user's first candidate, end of candidates, and number of keys, and the user of
each further row slot (`rows`), in 16 bits each. If the index is not sorted, the producer searches
the index.

Synchronisations in addition to the kernel's:
  1. A named barrier between zeroing and writing users' candidates.
  2. `tabled`, consumers -> producer: the table is complete and does not change again.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.few_queries import listing
from ikbo_jax.pallas.hopper import inline, turns, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.worklist.search import clamped, user_at
from ikbo_jax.problems.few_queries import LISTING_WARPS

#: The lower half of a word.
_LOW = 0xFFFF
#: A loop over the parts in which a user begins is faster than code for every part with fewer users
#: than `_USERS_OF_PART` times a thread's parts, less `_USERS_OF_LOOP`.
_USERS_OF_PART, _USERS_OF_LOOP = 34, 110


def fill(ctx: Any) -> None:
    """Makes the table, and tells the producer; both consumers call it."""
    if ctx.interpret:
        pl.when(ctx.consumer == 0)(lambda: _fill_at_once(ctx))
    else:
        _fill(ctx)
    plgpu.barrier_arrive(ctx.shared.tabled.at[0])


def is_sorted(ctx: Any) -> Any:
    """Whether the index is sorted, and so the complete table is right."""
    words, first = ctx.shared.table, ctx.shape.table.faults
    faults = words[first]
    for warp in range(1, LISTING_WARPS):
        faults = faults + words[first + warp]
    return faults == 0


def candidates(ctx: Any, user: Any) -> tuple[Any, Any]:
    """Reads (first candidate, end) of a user."""
    word = ctx.shared.table[user]
    return word & _LOW, lax.shift_right_logical(word, 16)


def length(ctx: Any, user: Any) -> Any:
    """Reads the number of keys of a user, if users have lengths."""
    return _half(ctx, ctx.shape.table.lengths, user)


def user_of_slot(ctx: Any, slot: Any) -> Any:
    """Reads the user of a row slot."""
    table = ctx.shape.table
    if not table.extra:
        return slot
    extra = jnp.maximum(slot - table.users, 0)
    return jnp.where(slot < table.users, slot, _half(ctx, table.owners, extra))


def packed_slot(ctx: Any, wanted: Any) -> tuple[Any, Any]:
    """Finds further slot number `wanted` of those with rows: (the row slot, whether there is one).

    CTAs take slots by turns. With empty ones among them, some CTAs had three items, others one:
    27.6 instead of 21.4 us (B = 5120, U = 32, T = 1, S = 1024, N = 4, H = 64, an H200).
    """
    number = (_packed_at_once if ctx.interpret else _packed)(ctx, wanted)
    return ctx.shape.users + jnp.maximum(number, 0), number >= 0


def _packed_at_once(ctx: Any, wanted: Any) -> Any:
    shape, table = ctx.shape, ctx.shape.table
    words, numbers = ctx.shared.table[...], jnp.arange(table.extra, dtype=jnp.int32)
    halves = words[table.owners + numbers // 2] >> 16 * (numbers % 2) & _LOW
    begin, end = (x * shape.q_len for x in (words[halves] & _LOW, words[halves] >> 16 & _LOW))
    first = begin + (1 + numbers - begin // shape.item_rows) * shape.item_rows
    is_filled = first < end
    is_it = is_filled & (jnp.cumsum(is_filled, dtype=jnp.int32) - 1 == wanted)
    return jnp.max(jnp.where(is_it, numbers, -1))


def _packed(ctx: Any, wanted: Any) -> Any:
    """Finds further slot number `wanted` of those with rows, as a warp; -1: there is none."""
    shape, table = ctx.shape, ctx.shape.table

    @inline.code(ctx.shared.table, wanted, returns=inline.INTEGER)
    def found(words: ir.Value, wanted: Integer) -> Integer:
        lane, found = warps.lane(), inline.i32(-1)
        lower = inline.compute_word("mov.u32 $0, %lanemask_lt;")
        filled = []
        for first in range(0, table.extra, warps.LANES):
            number = lane + first
            place = number.at_most(table.extra - 1)
            halves = warps.load_shared(words, place // 2 + table.owners)
            owner = (halves >> place % 2 * 16) & _LOW
            of_user = warps.load_shared(words, owner)
            begin, end = (of_user & _LOW) * shape.q_len, (of_user >> 16) * shape.q_len
            row = begin + (place + 1 - begin // shape.item_rows) * shape.item_rows
            filled.append((first, (row < end) & (number < table.extra)))
        for first, is_filled in filled:
            lanes = warps.ballot(is_filled)
            it = warps.ballot(is_filled & warps.ones(lanes & lower).equals(wanted))
            found = it.differs(0).select(warps.lowest_bit(it) + first, found)
            wanted = wanted - warps.ones(lanes)
        return found

    return found


def _half(ctx: Any, first: int, number: Any) -> Any:
    """Reads number `number` of the 16-bit numbers from word `first` on."""
    word = ctx.shared.table[first + lax.div(number, 2)]
    return lax.shift_right_logical(word, 16 * lax.rem(number, 2)) & _LOW


def _fill_at_once(ctx: Any) -> None:
    shape, words, table = ctx.shape, ctx.shared.table, ctx.shape.table
    users = jnp.clip(ctx.operands.cand_to_user[...], 0, shape.users - 1)
    for warp in range(LISTING_WARPS):
        words[table.faults + warp] = jnp.int32(0)
    words[table.faults] = jnp.sum(users[1:] < users[:-1], dtype=jnp.int32)

    def put_two(first: int, i: Any, number: Callable[[Any], Any], count: int) -> None:
        low, high = number(2 * i), number(jnp.minimum(2 * i + 1, count - 1))
        words[first + i] = low | lax.shift_left(high, 16)

    def keys_of(user: Any) -> Any:
        return jnp.clip(ctx.operands.lengths[user], 0, shape.kv_len)

    def owner(extra: Any) -> Any:
        row = (extra + 1) * shape.item_rows - 1
        return jnp.clip(ctx.operands.cand_to_user[row // shape.q_len], 0, shape.users - 1)

    @pl.loop(0, shape.users)
    def _(user: Any) -> None:
        begin, end = (jnp.sum(found, dtype=jnp.int32) for found in (users < user, users <= user))
        words[user] = begin | lax.shift_left(end, 16)

    if ctx.operands.lengths is not None:
        pl.loop(0, table.owners - table.lengths)(
            lambda i: put_two(table.lengths, i, keys_of, table.users)
        )
    pl.loop(0, table.faults - table.owners)(lambda i: put_two(table.owners, i, owner, table.extra))


def _fill(ctx: Any) -> None:
    """Writes a thread's share of the table; issues all loads before it waits for the first."""
    shape, operands, table = ctx.shape, ctx.operands, ctx.shape.table
    batch, users = shape.batch, shape.users
    lengths = () if operands.lengths is None else (operands.lengths,)

    @inline.code(operands.cand_to_user, ctx.shared.table, ctx.consumer, *lengths)
    def _(index: ir.Value, words: ir.Value, consumer: Integer, lengths: Any = None) -> None:
        thread = listing.thread_of(consumer)
        changes = _Changes(index, thread, batch, users)
        owners = []
        for number, is_slot in _strided(thread, table.extra):
            last = ((number + 1) * shape.item_rows - 1) // shape.q_len
            owners.append((number, is_slot, user_at(index, last, batch, users)))
        keys = []
        for user, is_user in _strided(thread, users if lengths is not None else 0):
            of_user = warps.load(lengths, user.at_most(users - 1))
            keys.append((user, is_user, of_user))
        last_user = user_at(index, inline.i32(batch - 1), batch, users)

        def put(first: int, at: Integer, value: ir.Value, is_wanted: ir.Value) -> None:
            """Stores a 16-bit number at place `at` from word `first` on."""
            warps.store_shared(words, at + 2 * first, value, is_wanted, bits=16)

        zero, two = inline.i32(0), inline.i32(2)
        for at, is_word in _strided(thread, users):  # users without candidates
            warps.store_shared(words, at, zero, is_word)
        inline.issue(f"barrier.sync {listing.BARRIER}, {turns.CONSUMER_THREADS};", convergent=True)
        fault = changes.put(put)
        put(0, last_user * two + 1, inline.i32(batch), thread.equals(zero))
        for number, is_slot, user in owners:
            put(table.owners, number, user, is_slot)
        for user, is_user, of_user in keys:
            put(table.lengths, user, of_user.at_most(shape.kv_len).at_least(zero), is_user)
        is_first, warp = warps.lane().equals(zero), thread // warps.LANES
        faults = warps.ones(warps.ballot(fault))
        warps.store_shared(words, warp + table.faults, faults, is_first)


def _strided(thread: Integer, count: int) -> list[tuple[Integer, Integer]]:
    """Returns this thread's numbers of `count`, each with whether it is below `count`."""
    numbers = [thread + first for first in range(0, count, listing.THREADS)]
    return [(number, number < count) for number in numbers]


class _Changes:
    """A thread's share of the index, and the candidates that begin a user.

    If users are few, a loop loads the parts in which a user begins again: code for every part would
    run once, and its instructions have to be fetched.
    """

    def __init__(self, index: ir.Value, thread: Integer, batch: int, users: int) -> None:
        self._index, self._thread, self._users = index, thread, users
        is_lowest = warps.lane().equals(0)
        # All loads are issued before the first one is waited for. The lane below has the candidate
        # before a part, but for the lowest lane.
        loaded = [
            (first, part, self._before(first, is_lowest), is_part)
            for first, part, is_part in listing.loaded_parts(index, thread, batch)
        ]
        always = thread.equals(thread)
        self._parts = [
            (
                first,
                part,
                is_lowest.select(raw, warps.from_below(part[-1])),
                always if is_part is None else is_part,
            )
            for first, part, raw, is_part in loaded
        ]

    def put(self, put: Callable[..., None]) -> Integer:
        """Puts where users begin and end; returns whether the index is not sorted."""
        whole = [part for part in self._parts if len(part[1]) == listing.PART]
        has_few = self._users < _USERS_OF_PART * len(whole) - _USERS_OF_LOOP
        fault = inline.i32(0)
        for part in self._parts:
            if not (has_few and len(part[1]) == listing.PART):
                fault = fault | self._put_users(put, *part)
        if has_few:
            fault = self._put_changed(put, whole, fault)
        return fault.differs(0)

    def _put_changed(
        self, put: Callable[..., None], parts: list[tuple[Any, ...]], fault: Integer
    ) -> Integer:
        """Puts the users of parts in which a user begins; returns `fault`, or 1 if in disorder."""
        zero = changed = inline.i32(0)
        for number, (_, users, before, is_part) in enumerate(parts):
            differences = zero
            for user, other in zip(users, [before, *users[:-1]], strict=True):
                differences = differences | (user ^ other)
            has_new = differences.differs(zero) & is_part
            changed = changed | has_new.select(1 << number, zero)

        def one_part(word: Integer, fault: Integer) -> list[Integer]:
            has_part = word.differs(zero)
            chosen = has_part.select(warps.lowest_bit(word), zero)
            part = chosen * listing.THREADS + self._thread
            first = has_part.select(part, zero) * listing.PART
            users, before = listing.load_part(self._index, first), self._before(first, has_part)
            fault = fault | self._put_users(put, first, users, before, has_part)
            return [word & (word - 1), fault]

        return listing.while_any(one_part, changed, fault)[1]

    def _put_users(
        self,
        put: Callable[..., None],
        first: Integer,
        users: list[Integer],
        before: Integer,
        is_wanted: ir.Value,
    ) -> Integer:
        """Puts where users begin and end from candidate `first` on; returns 1 if in disorder."""
        two, fault = inline.i32(2), first.differs(first)
        before = clamped(before, self._users)
        for i, word in enumerate(users):
            user, candidate = clamped(word, self._users), first + i
            is_new = user.differs(before) & is_wanted
            put(0, user * two, candidate, is_new)
            put(0, before * two + 1, candidate, is_new)
            is_less = (user < before) & is_wanted
            fault, before = fault | is_less, user
        return fault.extended()

    def _before(self, candidate: Integer, is_wanted: ir.Value) -> Integer:
        """Loads the user of the candidate before, or of candidate 0; 0 if not wanted."""
        return warps.load(self._index, (candidate - 1).at_least(0), is_wanted)
