"""Which candidates every user has: a table in shared memory that a CTA's consumers make at first.

The consumers read the whole index, all loads in flight at once, while the first block of keys is on
its way; in the table the producer then finds the rows of an item without a load of device memory.
A search takes two or three loads that depend on one another, for every item: of 4,836 candidates of
27 users, with 45 MB of other operands, 4 us of an H100 for a CTA's first item, and 1 to 2 us for
each of the others.

The table has, for each user, its first candidate, the end of its candidates, and its number of
keys; and for each of the other row slots (`rows`), its user. All have 16 bits, so that 4,096 users
take 24 KB. It is right for a sorted index only.
The consumers compare each candidate's user with the one before; if one is larger, the producer
searches the index as without a table.

Synchronisations, besides those of the kernel:
  1. A named barrier between zeroing candidates of users, and writing those that are found.
  2. `tabled`, consumers -> producer: the table is complete. It does not change again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.few_queries import listing
from ikbo_jax.pallas.flash.runs import SCALAR, clamped, user_at
from ikbo_jax.pallas.hopper import turns, warps
from ikbo_jax.problems.few_queries import LISTING_WARPS

#: The lower half of a word.
_LOW = 0xFFFF


def fill(ctx: Any) -> None:
    """Both consumers make the table, and tell the producer."""
    if ctx.interpret:
        pl.when(ctx.consumer == 0)(lambda: _fill_at_once(ctx))
    else:
        _fill(ctx)
    plgpu.barrier_arrive(ctx.shared.tabled.at[0])


def is_sorted(ctx: Any) -> Any:
    """Whether the table is right; once it is complete."""
    words, first = ctx.shared.table, ctx.shape.table.faults
    faults = words[first]
    for warp in range(1, LISTING_WARPS):
        faults = faults + words[first + warp]
    return faults == 0


def candidates(ctx: Any, user: Any) -> tuple[Any, Any]:
    """(first candidate, end) of a user."""
    word = ctx.shared.table[user]
    return word & _LOW, lax.shift_right_logical(word, 16)


def length(ctx: Any, user: Any) -> Any:
    """Number of keys of a user, if users have lengths."""
    return _half(ctx, ctx.shape.table.lengths, user)


def user_of_slot(ctx: Any, slot: Any) -> Any:
    """The user of a row slot."""
    table = ctx.shape.table
    if not table.extra:
        return slot
    extra = jnp.maximum(slot - table.users, 0)
    return jnp.where(slot < table.users, slot, _half(ctx, table.owners, extra))


def _half(ctx: Any, first: int, number: Any) -> Any:
    """Number `number` of those that begin with word `first`, two in a word."""
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
    shape, operands = ctx.shape, ctx.operands
    lengths = () if operands.lengths is None else (operands.lengths,)
    refs = (plgpu.RefType(),) * (2 + len(lengths))

    @plgpu.inline_mgpu(arg_types=(*refs, SCALAR))
    def write(_: Any, index: ir.Value, words: ir.Value, *rest: Any) -> None:
        thread = listing.thread_of(rest[-1].registers.item())
        _write(shape, thread, words, index, rest[0] if lengths else None)

    write(operands.cand_to_user, ctx.shared.table, *lengths, ctx.consumer)


def _write(shape: Any, thread: ir.Value, words: ir.Value, index: ir.Value, lengths: Any) -> None:
    """A thread's share of the table. All loads are issued before the first one is waited for."""
    i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
    table, batch, users = shape.table, shape.batch, shape.users
    neighbours = _neighbours(index, thread, batch, users)
    owners = []
    for number, is_slot in _strided(thread, table.extra):
        row = arith.muli(arith.addi(number, mgpu.c(1, i32)), mgpu.c(shape.item_rows, i32))
        last = arith.divui(arith.subi(row, mgpu.c(1, i32)), mgpu.c(shape.q_len, i32))
        owners.append((number, is_slot, user_at(index, last, batch, users)))
    keys = []
    if lengths is not None:
        for user, is_user in _strided(thread, users):
            of_user = warps.load(lengths, arith.minsi(user, mgpu.c(users - 1, i32)))
            keys.append((user, is_user, of_user))
    last_user = user_at(index, mgpu.c(batch - 1, i32), batch, users)

    def put(first: int, at: ir.Value, value: ir.Value, is_wanted: ir.Value) -> None:
        """Half `at` from word `first` on becomes `value`."""
        at = arith.addi(at, mgpu.c(2 * first, i32))
        warps.store_shared(words, at, value, is_wanted, bits=16)

    zero, two = mgpu.c(0, i32), mgpu.c(2, i32)
    for at, is_word in _strided(thread, users):  # users without candidates
        warps.store_shared(words, at, zero, is_word)
    mgpu.utils.inline_ptx(
        f"barrier.sync {listing.BARRIER}, {turns.CONSUMER_THREADS};",
        has_side_effects=True,
        convergent=True,
    )
    fault = arith.cmpi(predicates.ne, zero, zero)
    for candidate, user, before, is_inside in neighbours:
        is_new = arith.cmpi(predicates.ne, user, before)
        is_new = is_new if is_inside is None else arith.andi(is_new, is_inside)
        put(0, arith.muli(user, two), candidate, is_new)
        has_other = arith.andi(is_new, arith.cmpi(predicates.sge, before, zero))
        put(0, arith.addi(arith.muli(before, two), mgpu.c(1, i32)), candidate, has_other)
        is_fault = arith.andi(is_new, arith.cmpi(predicates.slt, user, before))
        fault = arith.ori(fault, is_fault)
    end = arith.addi(arith.muli(last_user, two), mgpu.c(1, i32))
    put(0, end, mgpu.c(batch, i32), arith.cmpi(predicates.eq, thread, zero))
    for number, is_slot, user in owners:
        put(table.owners, number, user, is_slot)
    for user, is_user, of_user in keys:
        most = arith.minsi(of_user, mgpu.c(shape.kv_len, i32))
        put(table.lengths, user, arith.maxsi(most, zero), is_user)
    is_first = arith.cmpi(predicates.eq, warps.lane(), zero)
    warp = arith.divui(thread, mgpu.c(warps.LANES, i32))
    faults = warps.ones(warps.ballot(fault))
    at = arith.addi(warp, mgpu.c(table.faults, i32))
    warps.store_shared(words, at, faults, is_first)


def _strided(thread: ir.Value, count: int) -> list[tuple[ir.Value, ir.Value]]:
    """(number, whether it is below `count`) of this thread's part of `count` numbers."""
    i32 = ir.IntegerType.get_signless(32)
    numbers = [arith.addi(thread, mgpu.c(first, i32)) for first in range(0, count, listing.THREADS)]
    below = arith.CmpIPredicate.slt
    return [(number, arith.cmpi(below, number, mgpu.c(count, i32))) for number in numbers]


def _neighbours(
    index: ir.Value, thread: ir.Value, batch: int, users: int
) -> list[tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]]:
    """(candidate, user, user before it, whether there is one or None for always) of a thread's.

    The user before the first candidate is -1.
    """
    i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
    # All loads are issued before the first one is waited for.
    loaded = [
        (first, of_part, _load_before(index, first), is_part)
        for first, of_part, is_part in listing.loaded_parts(index, thread, batch)
    ]
    found = []
    for first, of_part, raw, is_inside in loaded:
        is_first = arith.cmpi(predicates.eq, first, mgpu.c(0, i32))
        before = arith.select(is_first, mgpu.c(-1, i32), clamped(raw, users))
        for i, word in enumerate(of_part):
            user = clamped(word, users)
            found.append((arith.addi(first, mgpu.c(i, i32)), user, before, is_inside))
            before = user
    return found


def _load_before(index: ir.Value, candidate: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    before = arith.maxsi(arith.subi(candidate, mgpu.c(1, i32)), mgpu.c(0, i32))
    return warps.load(index, before)
