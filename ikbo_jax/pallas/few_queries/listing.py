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

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from ikbo_jax.pallas.hopper import mosaic, stores, turns, warps
from ikbo_jax.problems.few_queries import LISTED, LISTING_WARPS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WARPGROUP_SIZE

#: The named barrier at which the consumers wait for each other; `consumer` uses the next one.
BARRIER = turns.TURN_BARRIER + NUM_CONSUMERS + 1
#: Candidates whose users a thread loads at once, 16 bytes, and the threads that load them.
PART, THREADS = 4, LISTING_WARPS * warps.LANES
_SCALAR = plgpu.Layout.WG_SPLAT(())
#: Bytes of a line of L2, and most lines of a candidate's queries that are loaded ahead.
_LINE, _MOST_LINES = 128, 16


def find(ctx: Any, user: Any, rank: Any, head: Any = None) -> None:
    """Lists up to `shape.listed` of a user's candidates from number `rank` on; tells the producer.

    Both consumers call it. `head`: None, or the first of the query heads whose queries are
    prefetched.
    """
    listing, index = ctx.shared.listing, ctx.operands.cand_to_user
    if ctx.interpret:
        mosaic.named_barrier("sync", jnp.int32(BARRIER), turns.CONSUMER_THREADS)
        pl.when(ctx.consumer == 0)(lambda: _find_at_once(ctx, user, rank))
    else:
        _find(ctx, index, listing, user, rank, head)
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


def _find(ctx: Any, index: Any, listing: Any, user: Any, rank: Any, head: Any) -> None:
    shape = ctx.shape
    of_queries = () if head is None else (ctx.operands.query, head)

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR),
            *(plgpu.RefType(), _SCALAR)[: len(of_queries)],
        )
    )
    def search(_: Any, index: ir.Value, listing: ir.Value, *rest: Any) -> None:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        consumer, user, rank = (s.registers.item() for s in rest[:3])
        thread = thread_of(consumer)
        warp = arith.divui(thread, mgpu.c(warps.LANES, i32))
        share = _Share(shape.batch, thread)
        words = share.find(index, user, shape.users)
        if of_queries:
            query, head = rest[3], rest[4].registers.item()
            for number, word in enumerate(words):
                share.prefetch(query, number, word, head, shape)
        count = mgpu.c(0, i32)
        for word in words:
            count = arith.addi(count, warps.ones(word))
        before, total = warps.sums(count)
        at = arith.addi(warp, mgpu.c(LISTED, i32))
        warps.store_shared(
            listing, at, total, arith.cmpi(predicates.eq, warps.lane(), mgpu.c(0, i32))
        )
        mgpu.utils.inline_ptx(
            f"barrier.sync {BARRIER}, {turns.CONSUMER_THREADS};",
            has_side_effects=True,
            convergent=True,
        )
        before = arith.subi(before, rank)
        for number in range(LISTING_WARPS - 1):
            of_warp = warps.load_shared(listing, mgpu.c(LISTED + number, i32))
            is_before = arith.cmpi(predicates.sgt, warp, mgpu.c(number, i32))
            before = arith.addi(before, arith.select(is_before, of_warp, mgpu.c(0, i32)))
        share.write(listing, words, before, shape.listed)

    search(index, listing, ctx.consumer, user, rank, *of_queries)


def thread_of(consumer: ir.Value) -> ir.Value:
    """Returns this thread's number among the threads of both consumers."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.addi(arith.muli(consumer, mgpu.c(WARPGROUP_SIZE, i32)), stores.thread_number())


def loaded_parts(
    index: ir.Value, thread: ir.Value, batch: int
) -> Iterator[tuple[ir.Value, list[ir.Value], ir.Value | None]]:
    """Yields (first candidate, the words of its candidates, whether the part is the thread's or
    None for always) of a thread's parts of an index, without a wait for loads.
    """
    i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
    parts, rest = divmod(batch, PART)
    for begin in range(0, parts, THREADS):
        part = arith.addi(thread, mgpu.c(begin, i32))
        is_part = None
        if begin + THREADS > parts:
            is_part = arith.cmpi(predicates.slt, part, mgpu.c(parts, i32))
            part = arith.minsi(part, mgpu.c(parts - 1, i32))
        first = arith.muli(part, mgpu.c(PART, i32))
        yield first, load_part(index, first), is_part
    if rest:
        is_rest = arith.cmpi(predicates.slt, thread, mgpu.c(rest, i32))
        number = arith.minsi(thread, mgpu.c(rest - 1, i32))
        number = arith.addi(number, mgpu.c(parts * PART, i32))
        yield number, [warps.load(index, number)], is_rest


def load_part(index: ir.Value, first: ir.Value) -> list[ir.Value]:
    """Loads the users of four candidates from `first` on, a multiple of 4."""
    i32 = ir.IntegerType.get_signless(32)
    words = mgpu.utils.inline_ptx(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        mgpu.utils.getelementptr(mgpu.utils.memref_ptr(index), [first], i32),
        result_types=[i32] * PART,
        has_side_effects=True,
    )
    return list(words)


class _Share:
    """The candidates that one thread compares with a user: parts of four, and at most one more.

    Element 4 * i + j is candidate j of the thread's part i; element 4 * `loads` is one of the last
    candidates, which fill no part. Bit e % 32 of word e / 32 is set if element e is the user's.
    """

    def __init__(self, batch: int, thread: ir.Value) -> None:
        self._batch, self._thread = batch, thread
        self._parts, self._rest = divmod(batch, PART)
        self._loads = pl.cdiv(self._parts, THREADS)

    def find(self, index: ir.Value, user: ir.Value, users: int) -> list[ir.Value]:
        """Finds the user's candidates; returns the words of the thread's elements."""
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        others: list[ir.Value] = []
        is_inside: list[ir.Value | None] = []
        # All loads are issued before the first one is waited for.
        for _, part, is_part in loaded_parts(index, self._thread, self._batch):
            others += part
            is_inside += [is_part] * len(part)
        # Users out of range count as the first or the last one.
        zero, last = mgpu.c(0, i32), mgpu.c(users - 1, i32)
        low = arith.select(arith.cmpi(predicates.eq, user, zero), mgpu.c(-(2**31), i32), user)
        high = arith.select(arith.cmpi(predicates.eq, user, last), mgpu.c(2**31 - 1, i32), user)
        span = arith.subi(high, low)
        words = [zero] * pl.cdiv(len(others), warps.LANES)
        for element, (other, is_part) in enumerate(zip(others, is_inside, strict=True)):
            number, bit = divmod(element, warps.LANES)
            is_found = arith.cmpi(predicates.ule, arith.subi(other, low), span)
            if is_part is not None:
                is_found = arith.andi(is_found, is_part)
            found = arith.select(is_found, mgpu.c(1 << bit if bit < 31 else -(2**31), i32), zero)
            words[number] = arith.ori(words[number], found)
        return words

    def write(self, listing: ir.Value, words: list[ir.Value], at: ir.Value, most: int) -> None:
        """Lists the candidates from place `at` on, up to place `most`.

        The code is not a loop over the candidates of a lane, which took 100 cycles a candidate.
        """
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        zero = mgpu.c(0, i32)
        for element in range(self._loads * PART + min(self._rest, 1)):
            number, bit = divmod(element, warps.LANES)
            mask = mgpu.c(1 << bit if bit < 31 else -(2**31), i32)
            is_found = arith.cmpi(predicates.ne, arith.andi(words[number], mask), zero)
            # Unsigned: candidates before the first one that is wanted have large numbers.
            is_wanted = arith.cmpi(predicates.ult, at, mgpu.c(most, i32))
            candidate = self._candidate(mgpu.c(element, i32))
            warps.store_shared(listing, at, candidate, arith.andi(is_found, is_wanted))
            at = arith.addi(at, arith.extui(i32, is_found))

    def prefetch(
        self, query: ir.Value, number: int, word: ir.Value, head: ir.Value, shape: Any
    ) -> None:
        """Prefetches the queries of word `number`'s candidates to L2, of a group from `head` on."""
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        zero = mgpu.c(0, i32)
        row = shape.q_heads * shape.head_dim * 2
        offsets = [
            t * row + part
            for t in range(shape.q_len)
            for part in range(0, shape.group * shape.head_dim * 2, _LINE)
        ]
        loop = scf.WhileOp([i32], [word])
        block = loop.before.blocks.append(i32)
        with ir.InsertionPoint(block):
            (word,) = block.arguments
            lanes = warps.ballot(arith.cmpi(predicates.ne, word, zero))
            scf.condition(arith.cmpi(predicates.ne, lanes, zero), [word])
        block = loop.after.blocks.append(i32)
        with ir.InsertionPoint(block):
            (word,) = block.arguments
            element = arith.addi(warps.lowest_bit(word), mgpu.c(number * warps.LANES, i32))
            terms = [(self._candidate(element), shape.q_len * row // 2), (head, shape.head_dim)]
            address = stores.device_address(query, terms, 2)
            for offset in offsets[:_MOST_LINES]:
                mgpu.utils.inline_ptx(
                    f"prefetch.global.L2 [$0 + {offset}];",
                    address,
                    predicate=arith.cmpi(predicates.ne, word, zero),
                    has_side_effects=True,
                )
            scf.yield_([arith.andi(word, arith.subi(word, mgpu.c(1, i32)))])

    def _candidate(self, element: ir.Value) -> ir.Value:
        i32 = ir.IntegerType.get_signless(32)
        part = arith.divui(element, mgpu.c(PART, i32))
        part = arith.addi(arith.muli(part, mgpu.c(THREADS, i32)), self._thread)
        first = arith.muli(part, mgpu.c(PART, i32))
        candidate = arith.addi(first, arith.remui(element, mgpu.c(PART, i32)))
        if not self._rest:
            return candidate
        is_of_part = arith.cmpi(arith.CmpIPredicate.slt, element, mgpu.c(self._loads * PART, i32))
        number = arith.addi(self._thread, mgpu.c(self._parts * PART, i32))
        return arith.select(is_of_part, candidate, number)


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
    total = await_total(ctx)
    found = jnp.clip(total - rank, 0, shape.listed)
    stays = rank + stride < total
    following = jnp.where(stays, i, i + 1)
    user, next_rank = ctx.listed_place(ctx.place(following))
    next_rank = jnp.where(stays, rank + stride, next_rank)
    items = jnp.where(found == 0, 1, shape.bundle)
    return Found(found * shape.q_len, items, following, user, next_rank)


def await_total(ctx: Any) -> Any:
    """Waits for a listing; returns how many candidates the user has."""
    plgpu.barrier_wait(ctx.shared.listed.at[0])
    total = ctx.shared.listing[LISTED]
    for warp in range(1, LISTING_WARPS):
        total = total + ctx.shared.listing[LISTED + warp]
    return total


def listed_row(listing: ir.Value, row: ir.Value, q_len: int) -> ir.Value:
    """Returns the row of the queries, and of the results, that is row `row` of the item."""
    i32 = ir.IntegerType.get_signless(32)
    candidate = warps.load_shared(listing, arith.divui(row, mgpu.c(q_len, i32)))
    return arith.addi(
        arith.muli(candidate, mgpu.c(q_len, i32)), arith.remui(row, mgpu.c(q_len, i32))
    )
