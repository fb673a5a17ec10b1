"""Lists the candidates of a CTA's bundles of items, for an index that is not sorted.

The two consumers read the whole index, each of their 256 threads a share (`_Share`), and write the
numbers of a user's candidates to shared memory in the order of threads, which is the same in every
CTA, so that the CTAs of a user's slots list different candidates. Other warps then gather the
candidates' queries (`gathering`), and the consumers store results to their rows. One listing serves
a bundle, whose items differ in their query heads.

Synchronisations in addition to the kernel's:
  1. A named barrier between finding candidates and writing their numbers: both consumers have
  stored the results of the bundle before, and so read its list.
  2. `listed`, all threads of the consumers -> producer, gathering warps: the list and the number of
  candidates. The consumers list again only after the bundle's last item.
  3. `query.ready` of any item of the bundle also tells each consumer that the list is complete.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from ikbo_jax.pallas.hopper import inline, mosaic, stores, turns, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.few_queries import LISTED, LISTING_WARPS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WARPGROUP_SIZE

#: The named barrier at which the consumers wait for each other; `consumer` uses the next one.
BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS + 1
#: Candidates whose users a thread loads at once, 16 bytes, and the threads that load them.
PART, THREADS = 4, LISTING_WARPS * warps.LANES
#: Bytes of a line of L2, and most lines of a candidate's queries that are loaded ahead.
_LINE, _MOST_LINES = 128, 16


def find(ctx: Any, user: Any, rank: Any, head: Any = None) -> None:
    """Lists up to `shape.listed` of a user's candidates from number `rank` on; tells the producer.

    Both consumers call it. `head`: None, or the first of the query heads whose queries are
    prefetched.
    """
    if ctx.interpret:
        mosaic.named_barrier("sync", jnp.int32(BARRIER), turns.CONSUMER_THREADS)
        pl.when(ctx.consumer == 0)(lambda: _find_at_once(ctx, user, rank))
    else:
        _find(ctx, user, rank, head)
    plgpu.barrier_arrive(ctx.shared.listed.at[0])


def _find_at_once(ctx: Any, user: Any, rank: Any) -> None:
    listing, shape = ctx.shared.listing, ctx.shape
    users = jnp.clip(ctx.operands.cand_to_user[...], 0, shape.users - 1)
    is_found = users == user
    place = jnp.cumsum(is_found, dtype=jnp.int32) - 1 - rank
    number = jnp.arange(shape.batch, dtype=jnp.int32)

    @pl.loop(0, shape.listed)
    def _(i: Any) -> None:
        listing[i] = jnp.sum(jnp.where(is_found & (place == i), number, 0), dtype=jnp.int32)

    for warp in range(LISTING_WARPS):
        listing[LISTED + warp] = jnp.sum(is_found, dtype=jnp.int32) if warp == 0 else jnp.int32(0)


def _find(ctx: Any, user: Any, rank: Any, head: Any) -> None:
    shape, index = ctx.shape, ctx.operands.cand_to_user
    of_queries = () if head is None else (ctx.operands.query, head)

    @inline.code(index, ctx.shared.listing, ctx.consumer, user, rank, *of_queries)
    def _(index: Any, listing: Any, consumer: Integer, user: Any, rank: Any, *rest: Any) -> None:
        thread = thread_of(consumer)
        warp = thread // warps.LANES
        share = _Share(shape.batch, thread)
        words = share.find(index, user, shape.users)
        if of_queries:
            query, head = rest
            for number, word in enumerate(words):
                share.prefetch(query, number, word, head, shape)
        count = inline.i32(0)
        for word in words:
            count = count + warps.ones(word)
        before, total = warps.sums(count)
        warps.store_shared(listing, warp + LISTED, total, warps.lane().equals(0))
        inline.issue(f"barrier.sync {BARRIER}, {turns.CONSUMER_THREADS};", convergent=True)
        before = before - rank
        for number in range(LISTING_WARPS - 1):
            of_warp = warps.load_shared(listing, inline.i32(LISTED + number))
            before = before + (warp > number).select(of_warp, 0)
        share.write(listing, words, before, shape.listed)


def thread_of(consumer: Integer) -> Integer:
    """Returns this thread's number among the threads of both consumers."""
    return consumer * WARPGROUP_SIZE + stores.thread_number()


def loaded_parts(
    index: ir.Value, thread: Integer, batch: int
) -> Iterator[tuple[Integer, list[Integer], Integer | None]]:
    """Yields (first candidate, the words of its candidates, whether the part is the thread's or
    None for always) of a thread's parts of an index, without a wait for loads.
    """
    parts, rest = divmod(batch, PART)
    for begin in range(0, parts, THREADS):
        part, is_part = thread + begin, None
        if begin + THREADS > parts:
            is_part, part = part < parts, part.at_most(parts - 1)
        first = part * PART
        yield first, load_part(index, first), is_part
    if rest:
        is_rest = thread < rest
        number = thread.at_most(rest - 1) + parts * PART
        yield number, [warps.load(index, number)], is_rest


def load_part(index: ir.Value, first: ir.Value) -> list[Integer]:
    """Loads the users of four candidates from `first` on, a multiple of 4."""
    address = inline.address(index, first)
    return inline.issue_words("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", PART, address)


def while_any(body: Callable[..., list[Integer]], *words: ir.Value) -> list[Integer]:
    """Repeats words = body(*words) while the first word of any lane is not 0."""
    kinds = [x.type for x in words]
    loop = scf.WhileOp(kinds, words)
    block = loop.before.blocks.append(*kinds)
    with ir.InsertionPoint(block):
        lanes = warps.ballot(Integer(block.arguments[0]).differs(0))
        scf.condition(lanes.differs(0), block.arguments)
    block = loop.after.blocks.append(*kinds)
    with ir.InsertionPoint(block):
        scf.yield_(body(*map(Integer, block.arguments)))
    return [Integer(x) for x in loop.results]


class _Share:
    """The candidates that one thread compares with a user: parts of four, and at most one more.

    Element 4 * i + j is candidate j of the thread's part i; element 4 * `loads` is one of the last
    candidates, which fill no part. Bit e % 32 of word e / 32 is set if element e is the user's.
    """

    def __init__(self, batch: int, thread: Integer) -> None:
        self._batch, self._thread = batch, thread
        self._parts, self._rest = divmod(batch, PART)
        self._loads = pl.cdiv(self._parts, THREADS)

    def find(self, index: ir.Value, user: Integer, users: int) -> list[Integer]:
        """Finds the user's candidates; returns the words of the thread's elements."""
        others: list[Integer] = []
        is_inside: list[Integer | None] = []
        # All loads are issued before the first one is waited for.
        for _, part, is_part in loaded_parts(index, self._thread, self._batch):
            others += part
            is_inside += [is_part] * len(part)
        # Users out of range count as the first or the last one.
        zero, last = inline.i32(0), inline.i32(users - 1)
        low = user.equals(zero).select(-(2**31), user)
        span = user.equals(last).select(2**31 - 1, user) - low
        words = [zero] * pl.cdiv(len(others), warps.LANES)
        for element, (other, is_part) in enumerate(zip(others, is_inside, strict=True)):
            number, bit = divmod(element, warps.LANES)
            is_found = (other - low).not_above(span)
            if is_part is not None:
                is_found = is_found & is_part
            words[number] = words[number] | is_found.select(inline.bit(bit), zero)
        return words

    def write(self, listing: ir.Value, words: list[Integer], at: Integer, most: int) -> None:
        """Lists the candidates from place `at` on, up to place `most`.

        The code is not a loop over the candidates of a lane, which took 100 cycles a candidate.
        """
        zero = inline.i32(0)
        for element in range(self._loads * PART + min(self._rest, 1)):
            number, bit = divmod(element, warps.LANES)
            is_found = (words[number] & inline.bit(bit)).differs(zero)
            # Unsigned: candidates before the first one that is wanted have large numbers.
            is_wanted = at.below(most)
            candidate = self._candidate(inline.i32(element))
            warps.store_shared(listing, at, candidate, is_found & is_wanted)
            at = at + is_found.extended()

    def prefetch(
        self, query: ir.Value, number: int, word: ir.Value, head: ir.Value, shape: Any
    ) -> None:
        """Prefetches the queries of word `number`'s candidates to L2, of a group from `head` on."""
        row = shape.q_heads * shape.head_dim * 2
        offsets = [
            t * row + part
            for t in range(shape.q_len)
            for part in range(0, shape.group * shape.head_dim * 2, _LINE)
        ]

        def one_candidate(word: Integer) -> list[Integer]:
            element = warps.lowest_bit(word) + number * warps.LANES
            terms = [(self._candidate(element), shape.q_len * row // 2), (head, shape.head_dim)]
            address = stores.device_address(query, terms, 2)
            for offset in offsets[:_MOST_LINES]:
                wanted = word.differs(0)
                inline.issue(f"prefetch.global.L2 [$0 + {offset}];", address, predicate=wanted)
            return [word & (word - 1)]

        while_any(one_candidate, word)

    def _candidate(self, element: Integer) -> Integer:
        part = element // PART * THREADS + self._thread
        candidate = part * PART + element % PART
        if not self._rest:
            return candidate
        is_of_part = element < self._loads * PART
        return is_of_part.select(candidate, self._thread + self._parts * PART)


class Found(NamedTuple):
    """Results of a listing."""

    rows: Any  # of an item of the bundle
    items: Any  # of the bundle; one, if there are no candidates
    following: Any  # bundle whose candidates are listed next
    next_user: Any
    next_rank: Any  # rank among the next user's candidates of the first one that is listed next


def await_found(ctx: Any, i: Any, rank: Any) -> Found:
    """Waits until the candidates of the CTA's bundle `i`, from number `rank` on, are listed."""
    shape = ctx.shape
    stride = shape.slots // shape.users * shape.listed
    plgpu.barrier_wait(ctx.shared.listed.at[0])
    total = ctx.shared.listing[LISTED]
    for warp in range(1, LISTING_WARPS):
        total = total + ctx.shared.listing[LISTED + warp]
    found = jnp.clip(total - rank, 0, shape.listed)
    stays = rank + stride < total
    following = jnp.where(stays, i, i + 1)
    user, next_rank = ctx.listed_place(ctx.place(following).slot)
    next_rank = jnp.where(stays, rank + stride, next_rank)
    items = jnp.where(found == 0, 1, shape.bundle)
    return Found(found * shape.q_len, items, following, user, next_rank)


def listed_row(listing: ir.Value, row: Integer, q_len: int) -> Integer:
    """Returns the row of the queries, and of the results, that is row `row` of the item."""
    return warps.load_shared(listing, row // q_len) * q_len + row % q_len
