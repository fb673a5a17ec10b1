"""Orders candidates by user in one launch that counts in shared memory, and copies their queries.

XLA sorts an index of 4,700 to 11,000 candidates in 55 us on an H100, where attention takes 10 to 40
us. Here each CTA, of four warpgroups, owns a range of neighbouring candidates:

  1. It counts each user's candidates before its range, and all others, in the whole index.
  2. A thread adds up some users; the warpgroups exchange the sums. The sums say where the range's
  first candidate of each user goes.
  3. It compares the users of the range's candidates with each other: their order within a user.
  4. It stores the order, and copies the queries of its range.

The order is stable, as `jnp.argsort` of clamped indices. CTAs do not wait for each other.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import inline, mosaic, per_thread, stores
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.pallas.hopper.per_thread import VECTOR, Threads, same, select
from ikbo_jax.pallas.hopper.row_vectors import Rows
from ikbo_jax.pallas.worklist.scan import running_sums
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.reference import jagged

#: Warpgroups of a CTA.
WARPGROUPS = 4
#: Most candidates of a CTA: one for each thread.
MOST_OWN = WARPGROUPS * WARPGROUP_SIZE
#: Most candidates, in ranges of `MOST_OWN`, and users, whose counts take 132 KiB.
MOST_CANDIDATES, MOST_USERS = 65536, 16384
#: Most CTAs, if that makes ranges of at most `MOST_OWN`: one on each SM.
MOST_CTAS = 132
#: Bytes of a line of L2.
_LINE = 128
#: Vectors of a round that compares users.
_UNROLL = 4
#: Most bytes of queries that the launch copies, which takes 22 us at 3 TB/s. XLA copies larger ones
#: as fast as memory allows, and its launch of 2 us is little beside that.
MOST_COPIED = 2**25
#: Accesses of 16 bytes of a thread that are in flight at once, and 16-bit numbers of an access.
ACCESSES, ELEMENTS = 4, 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch that copies `vectors` 16-byte parts of a candidate, or 0."""

    batch: int
    users: int
    vectors: int = 0

    @property
    def own(self) -> int:
        """Number of a CTA's candidates: whole vectors of the index."""
        return pl.cdiv(pl.cdiv(self.batch, MOST_CTAS), VECTOR) * VECTOR

    @property
    def workers(self) -> int:
        return pl.cdiv(self.batch, self.own)

    @property
    def blocks(self) -> int:
        """Number of blocks of a CTA's candidates, each with one candidate for each thread."""
        return pl.cdiv(self.own, WARPGROUP_SIZE)

    @property
    def parts(self) -> int:
        """Number of warpgroups that share the comparisons of a block."""
        return WARPGROUPS // self.blocks

    @property
    def counted(self) -> int:
        """Number of users, rounded up so that all threads have equally many."""
        threads = Threads(WARPGROUPS, 0)
        return threads.parts(self.users)[2] * threads.count


class Operands(NamedTuple):
    """Device memory that the launch reads."""

    query: Any  # [B, T, N, H], or None
    index: Any  # [B] int32


class Order(NamedTuple):
    """Arrays that the launch writes: in the order of users, except `position`."""

    query: Any  # [B, T, N, H], or None
    user: Any  # [B] int32, of each candidate, clamped
    order: Any  # [B] int32, the caller's number of each candidate
    position: Any  # [B] int32, place of each candidate, in the caller's order; or None


def fits(batch: int, users: int) -> bool:
    """Whether a launch orders so many candidates of so many users."""
    return batch <= MOST_CANDIDATES and users <= MOST_USERS


def ordered(
    query: jax.Array | None, index: jax.Array, users: int, *, has_position: bool = False
) -> Order:
    """Orders candidates by user, and copies their queries, if given.

    The order is stable. `index` [B] int32 is clamped to [0, users). `query` [B, T, N, H] has 16
    bits, H is a multiple of 8. XLA copies large queries, and sorts what the launch does not take.
    """
    copied = query
    if query is not None and query.size * query.dtype.itemsize > MOST_COPIED:
        copied = None
    if fits(index.shape[0], users) and not mosaic.is_interpreted():
        found = count_order(copied, index, users, has_position=has_position)
    else:
        user = jnp.clip(index, 0, users - 1)
        order = jnp.argsort(user).astype(jnp.int32)
        found = Order(None, user[order], order, jagged.inverse(order) if has_position else None)
    if query is not None and found.query is None:
        found = found._replace(query=query[found.order])
    return found


def count_order(
    query: jax.Array | None, index: jax.Array, users: int, *, has_position: bool = False
) -> Order:
    """Launches the kernel that orders candidates by user; `fits(B, users)`.

    `query` [B, T, N, H] has 16 bits, and H is a multiple of 8; None: no queries are copied. `index`
    [B] int32 is clamped. With `has_position`, the inverse of the order is returned, too.
    """
    vectors = 0 if query is None else math.prod(query.shape[1:]) // ELEMENTS
    shape = Shape(index.shape[0], users, vectors)
    numbers = jax.ShapeDtypeStruct(index.shape, jnp.int32)
    declared = Order(
        None if query is None else jax.ShapeDtypeStruct(query.shape, query.dtype),
        numbers,
        numbers,
        numbers if has_position else None,
    )
    words = memory.Words((MOST_OWN,))
    return launch_threads(
        _order,
        shape,
        Operands(query, index),
        declared,
        memory.shared(
            # A user's candidates before the CTA's; others; unused.
            counts=memory.Words((2 * shape.counted + 1,)),
            sums=memory.Words((WARPGROUPS * per_thread.WARPS,)),
            own=words,  # users of the CTA's candidates, -1 past the last
            ranks=words,  # candidates of the same user before each; then the candidate's place
        ),
        name="ikbo_user_order" if query is None else "ikbo_attention_pack",
        workers=shape.workers,
        warpgroups=WARPGROUPS,
        context=_Range,
    )


@dataclasses.dataclass(frozen=True)
class _Range(WarpgroupContext):
    """The context of a warpgroup, whose CTA has the candidates from `first` on."""

    first: Any = None

    @property
    def threads(self) -> Threads:
        return Threads(WARPGROUPS, self.consumer)

    def loaded_user(self, candidate: jax.Array) -> jax.Array:
        """Loads a candidate's user from the index; past the end, the last candidate's user."""
        last = same(self.shape.batch - 1)
        return self.threads.read(self.operands.index, jnp.minimum(candidate, last), "global")

    def count(self, number: jax.Array, values: tuple[jax.Array, ...], is_wanted: jax.Array) -> None:
        """Counts the users of candidates from `number` on; unwanted ones go to a spare word."""
        counted = self.shape.counted
        begin = select(number < self.first, 0, counted)
        begin = jnp.where(is_wanted, begin, 2 * counted)
        last = select(is_wanted, self.shape.users - 1, 0)
        for value in values:
            user = jnp.minimum(jnp.maximum(value, 0), last)
            per_thread.add_one(self.shared.counts, begin + user)


def _order(own: _Range) -> None:
    """Runs a warpgroup: counts users, ranks its candidates, stores the order and the queries."""
    shape, shared, outputs, threads = own.shape, own.shared, own.outputs, own.threads
    own = own.replace(first=own.worker * shape.own)
    thread = threads.number()
    candidate = own.first + thread
    is_own = (thread < shape.own) & (candidate < shape.batch)
    user = own.loaded_user(candidate)  # on its way while the CTA counts
    _count(own)
    user = jnp.clip(user, 0, shape.users - 1)
    threads.keep(shared.own, thread, jnp.where(is_own, user, -1), thread >= 0)
    threads.keep(shared.ranks, thread, same(0), thread >= 0)
    threads.commit()
    _begin_users(own)
    _rank(own)
    threads.commit()
    place = threads.read(shared.counts, user) + threads.read(shared.ranks, thread)
    for ref, values in ((outputs.user, user), (outputs.order, candidate)):
        threads.write(ref, place, values, is_own)
    if outputs.position is not None:
        threads.write(outputs.position, candidate, place, is_own)
    if outputs.query is not None:
        threads.keep(shared.ranks, thread, place, is_own)
        threads.commit()
        _copy(own)


def _count(own: _Range) -> None:
    """Counts each user's candidates (step 1); the threads see the counts after `commit`."""
    shape, threads, index = own.shape, own.threads, own.operands.index
    vectors, rest = divmod(shape.batch, VECTOR)
    rounds, numbers_of = threads.rounds(vectors)
    thread = threads.number()

    def loaded(turn: Any) -> list[tuple[jax.Array, ...]]:
        last = same(vectors - 1)
        places = [jnp.minimum(x, last) for x in numbers_of(turn)]
        return [per_thread.gather_vectors(index, x, "global") for x in places]

    def add(turn: Any, words: list[tuple[jax.Array, ...]]) -> None:
        for number, values in zip(numbers_of(turn), words, strict=True):
            own.count(number * VECTOR, values, number < vectors)

    words = loaded(0) if rounds else []  # on their way while counts become 0
    others = vectors * VECTOR + thread
    other_users = own.loaded_user(others) if rest else None
    if own.outputs.query is not None:
        lines = lax.div(_own_vectors(own) * 16, jnp.int32(_LINE))
        _prefetch(own.operands.query, own.first, thread, thread < lines)
    turns, step = threads.parts(2 * shape.counted)[:2]

    @pl.loop(0, turns)
    def _(turn: Any) -> None:
        for i in range(step):
            place = (turn * step + i) * threads.count + thread
            threads.keep(own.shared.counts, place, same(0), place < 2 * shape.counted)

    threads.commit()
    if rounds:

        def add_and_load(turn: Any, words: Any) -> Any:
            following = loaded(turn + 1)
            add(turn, words)
            return following

        add(rounds - 1, lax.fori_loop(0, rounds - 1, add_and_load, words))
    if other_users is not None:
        own.count(others, (other_users,), others < shape.batch)


def _begin_users(own: _Range) -> None:
    """Replaces a user's first count by the place of the CTA's first candidate (step 2)."""
    shape, threads, counts = own.shape, own.threads, own.shared.counts

    def read(users: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        return [(threads.read(counts, x), threads.read(counts, x + shape.counted)) for x in users]

    def add(sums: Any, numbers: Any) -> tuple[jax.Array]:
        return (sums[0] + numbers[0] + numbers[1],)

    def store(user: jax.Array, start: Any, numbers: Any) -> None:
        threads.keep(counts, user, start[0] + numbers[0], user >= 0)

    running_sums(threads, shape.users, read, store, own.shared.sums, add=add)


def _rank(own: _Range) -> None:
    """Adds to each candidate's rank (step 3), which threads see after `commit`."""
    shape, threads, shared = own.shape, own.threads, own.shared
    block = lax.rem(own.consumer, jnp.int32(shape.blocks))
    part = lax.div(own.consumer, jnp.int32(shape.blocks))
    number = block * WARPGROUP_SIZE + per_thread.number()
    user = threads.read(shared.own, number)
    in_block = WARPGROUP_SIZE // (VECTOR * _UNROLL)  # rounds

    def compared(turn: Any, rank: jax.Array, *, is_before: bool) -> jax.Array:
        vectors = [turn * _UNROLL + i for i in range(_UNROLL)]
        users = [per_thread.gather_vectors(shared.own, same(0) + x, "shared") for x in vectors]
        for x, others in zip(vectors, users, strict=True):
            found = [other == user for other in others]
            if not is_before:
                found = [y & (same(i) + x * VECTOR < number) for i, y in enumerate(found)]
            a, b, c, d = (y.astype(jnp.int32) for y in found)
            rank = rank + ((a + b) + (c + d))
        return rank

    def share(begin: Any, end: Any, rank: jax.Array, *, is_before: bool) -> jax.Array:
        each = (end - begin + (shape.parts - 1)) // shape.parts
        first = begin + part * each
        last = jnp.minimum(first + each, end)
        return lax.fori_loop(
            first, last, lambda turn, x: compared(turn, x, is_before=is_before), rank
        )

    is_wanted = part < shape.parts
    before = jnp.where(is_wanted, block * in_block, 0)
    after = jnp.where(is_wanted, before + in_block, 0)
    # The range's candidates may end within the block.
    after = jnp.minimum(after, pl.cdiv(shape.own, VECTOR * _UNROLL))
    rank = share(jnp.int32(0), before, same(0), is_before=True)
    rank = share(before, after, rank, is_before=False)
    threads.add(shared.ranks, number, rank, same(0) + part < shape.parts)


def _own_vectors(own: _Range) -> Any:
    """Returns how many vectors the queries of the CTA have."""
    return jnp.minimum(own.shape.own, own.shape.batch - own.first) * own.shape.vectors


def _copy(own: _Range) -> None:
    shape, threads, most = own.shape, own.threads, _own_vectors(own)
    rounds, numbers_of = threads.rounds(shape.own * shape.vectors, unroll=ACCESSES)
    queries, ordered = (Rows(x, VECTOR) for x in (own.operands.query, own.outputs.query))

    @pl.loop(0, rounds)
    def _(turn: Any) -> None:
        copies = []
        for number in numbers_of(turn):
            wanted = number < most
            candidate = lax.div(jnp.minimum(number, most - 1), same(shape.vectors))
            vector = jnp.minimum(number, most - 1) - candidate * shape.vectors
            (words,) = queries.load([(own.first + candidate, vector)])
            copies.append((candidate, vector, words, wanted))
        for candidate, vector, words, wanted in copies:
            place = threads.read(own.shared.ranks, candidate)
            ordered.store(place, vector, words, wanted)


def _prefetch(query: Any, first: Any, line: jax.Array, is_wanted: jax.Array) -> None:
    """Prefetches line `line` of 128 bytes to L2, counted from candidate `first` on."""
    size = math.prod(query.shape[1:])

    @inline.code(query, per_thread.same(0) + first, line, is_wanted.astype(jnp.int32))
    def _(query: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        first, line, wanted = map(per_thread.scalar, arrays)
        address = stores.device_address(query, [(first, size), (line, 64)], 2)
        inline.issue("prefetch.global.L2 [$0];", address, predicate=wanted.differs(0))
