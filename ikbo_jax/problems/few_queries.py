"""Configurations of the attention kernel for users with few queries."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from ikbo_jax.problems import flash, hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_kv by head width (width 96 is padded to 128 in shared memory).
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 192: 80, 256: 80}
#: Largest block_kv if each consumer has 64 rows and all columns of heads wider than 128.
MAX_WIDE_BLOCK_KV = 64
#: Likewise, with ranges of keys at H = 256; and with ranges where query heads share a tile, or with
#: a cap, at H = 96 and 128.
MAX_RANGED_WIDE_BLOCK_KV, MAX_RANGED_GROUP_BLOCK_KV = 32, 64
#: Most columns of values that a consumer multiplies if it adds the other's sums to its own. With
#: all columns of wider heads, H = 192 spills 80 to 500 bytes then, and H = 256 200 bytes, with
#: blocks of 32 keys already.
MAX_COLUMNS = 128
#: Words of an item's descriptor in shared memory.
ITEM_WORDS = 8
#: The same where candidates have ranges of keys.
ITEM_WORDS_OF_RANGES = 12
#: Most candidates of an item whose CTA lists them, and warps that list: each counts what it finds.
LISTED, LISTING_WARPS = 128, 8
#: Warps that gather the queries of listed candidates: all of a warpgroup but the producer.
GATHERING_WARPS = 3
#: Most candidates of an index that is not sorted, of which each CTA lists its own: each thread of
#: the consumers has one of 256 in a register.
MOST_LISTED = 16384
#: Most listings of a CTA. It reads the whole index for each, before it computes.
MOST_LISTINGS = 4
#: Times in units of a block of 64 rows and 128 keys, 0.66 us at H = 64 (`few_queries_cost`): an
#: item besides its blocks, and a listing, 0.6 us with 1,024 candidates on an H100.
TIME_UNIT_US = 0.66
ITEM_TIME, LISTING_TIME = 1.04, 1.0
#: In the same unit: the launch that copies candidates into the order of users, with the gap between
#: launches, and its part for each 1,024 candidates (2 us for 512, 5.2 us for 10,985 on an H100).
PACK_TIME, PACK_TIME_EACH = 4.0, 0.5
#: In the same unit: the longest time that a CTA may take if one user has all candidates, 0.3 ms.
#: CTAs that list candidates leave all items to that user's CTAs then; candidates in the order of
#: users would be spread over the device.
MOST_SKEWED_TIME = 450.0
#: Sorted candidates whose users CTAs put into a table: at most 64 for each of 256 consumer threads,
#: at least more than one round of loads counts; most users and row slots of the table; and most
#: keys, since numbers in the table have 16 bits.
MOST_TABLED, LEAST_TABLED, MOST_TABLE_ROWS, MOST_TABLED_KEYS = 16384, 513, 4096, 2**16 - 1
#: Most row slots beside the users' first ones that a warp packs; 250 were timed.
MOST_PACKED = 256
#: f32 words of a row's statistics that one consumer hands to the other: maximum and sum, for each
#: of the two rows of a thread.
STATISTIC_WORDS = 4
#: Bytes of L2 in which keys and values stay between the items that read them.
CACHE_BYTES = 4e7
#: If the index is sorted, items are bundled from this number of bundles for each CTA on; with
#: fewer, CTAs would finish at different times. Otherwise `FewQueriesConfig.listings` says.
LEAST_BUNDLES = 4
#: Rows of a group of swizzled rows in shared memory: a head's queries begin at a multiple of it.
SWIZZLE_ROWS = 8


@dataclasses.dataclass(frozen=True)
class UserTable:
    """Where a CTA has what it knows of `users`, in words of its table; see `user_table`.

    Word u has the first candidate of user u in its lower half, and the end in its upper half. Other
    numbers are two in a word. `extra`: row slots beside the users' first ones.
    """

    users: int
    extra: int

    @property
    def packs(self) -> bool:
        """Whether a warp finds which of the further row slots have rows."""
        return 0 < self.extra <= MOST_PACKED

    @property
    def lengths(self) -> int:
        """Index of the first word of the users' numbers of keys."""
        return self.users

    @property
    def owners(self) -> int:
        """Index of the first word of the users of further row slots."""
        return self.lengths + math.ceil(self.users / 2)

    @property
    def faults(self) -> int:
        """Index of the first word of the warps' counts of candidates out of order."""
        return self.owners + math.ceil(self.extra / 2)

    @property
    def words(self) -> int:
        return self.faults + LISTING_WARPS


def head_group(q_heads: int, kv_heads: int) -> int:
    """Counts query heads of a key head whose queries share a tile: the largest divisor up to 8."""
    heads = q_heads // kv_heads
    return max(n for n in range(1, SWIZZLE_ROWS + 1) if heads % n == 0)


def rows_of_head(group: int) -> int:
    """Counts the rows of a 64-row tile that one query head of a group has; a power of 2."""
    rows = WGMMA_M // group
    return 1 << (rows.bit_length() - 1)


def pack_time(batch: int) -> float:
    """Estimates the launch that copies candidates into the order of users, in units of a block."""
    return PACK_TIME + PACK_TIME_EACH * batch / 1024


class Listings(NamedTuple):
    """How CTAs list the candidates of an index that is not sorted.

    Attributes:
      candidates: most candidates of an item; 0 if a candidate's queries do not fit it.
      slots: row slots; slot i has candidates of user i % U.
      bundle: groups of query heads that one listing serves, which a CTA takes one after the other.
      of_cta: most listings of a CTA, if no user has more candidates than its slots.
      time: how much longer CTAs take than with a sorted index, in the unit of `LISTING_TIME`.
      skewed_time: time of a CTA if one user has all candidates.
    """

    candidates: int
    slots: int
    bundle: int
    of_cta: int
    time: float
    skewed_time: float


def listed_tiles(batch: int, users: int, candidates: int) -> int:
    """Counts row slots of each user, of `candidates` each, if CTAs list candidates.

    Two standard deviations above the mean; the same CTA takes the rest of a user's candidates.
    """
    mean = batch / users
    return max(1, math.ceil((mean + 2 * math.sqrt(mean)) / candidates))


@dataclasses.dataclass(frozen=True)
class FewQueriesConfig(Config):
    """Tuning parameters of the attention kernel for users with few queries.

    Attributes:
      tile_rows: query rows of an item, 64 or 128. With 128, an item with more than 64 rows gives
        each consumer warpgroup its own rows, and both read the same keys; with fewer rows, every
        other block of keys. With heads wider than 128, each consumer of an item of 64 rows has all
        keys and two blocks of 64 columns of the values; and of items of 128 rows, those with fewer
        than 65 are one consumer's.
      splits: number of parts of the keys, which are separate items; a second pass in XLA adds their
        results. More than 1 if users, heads and rows make too few items for the device.
      block_kv: keys of a block, which fills a pipeline stage; a multiple of 16.
      k_stages: stages of the ring of key blocks; `v_stages`: of value blocks.
      q_slots: number of query slots.
      turns: whether the consumers take turns at issuing products, so that one computes exponentials
        while the other multiplies.
    """

    tile_rows: int = 64
    splits: int = 1
    block_kv: int = 128
    k_stages: int = 4
    v_stages: int = 4
    q_slots: int = 2
    turns: bool = False

    def lists(self, problem: Any, num_sms: int) -> bool:
        """Whether CTAs list the candidates of an unsorted index, which a launch packs otherwise."""
        p = problem
        if not (p.users > 1 and p.batch <= MOST_LISTED):
            return False
        if memory.smem_bytes(self.shared(p.head_dim, lists=True)) > hopper.MAX_SMEM_BYTES:
            return False
        if p.head_dim > 192 and self.block_kv > (32 if self.has_all_columns(p.head_dim) else 64):
            return False  # no registers are left: 56 to 320 bytes would be spilled
        found = self.listings(p, num_sms)
        is_short = found.time <= pack_time(p.batch) and found.skewed_time <= MOST_SKEWED_TIME
        return found.candidates > 0 and found.of_cta <= MOST_LISTINGS and is_short

    def listings(self, problem: Any, num_sms: int) -> Listings:
        """Chooses how CTAs list, even if `lists` says that they should not.

        Large bundles need the fewest listings, but smaller ones give the busiest CTA fewer items.
        Of the bundles that `MOST_LISTINGS` permits, the one with the least estimate is taken.
        """
        p = problem
        group = head_group(p.q_heads, p.kv_heads)
        candidates = min(rows_of_head(group) * self.tile_rows // WGMMA_M // p.q_len, LISTED)
        if not candidates:
            return Listings(0, 0, 1, 0, 0.0, 0.0)
        groups, parts = p.q_heads // group, self.parts(p.kv_len)
        blocks = p.kv_len / parts / 128 * self.tile_rows / WGMMA_M  # in the unit of ITEM_TIME
        # Where SMs are to spare, a user with many more candidates than others has more slots.
        spare = min(num_sms // (p.users * groups * parts), math.ceil(p.batch / candidates))
        slots = p.users * max(listed_tiles(p.batch, p.users, candidates), spare)
        items = math.ceil(slots * parts * groups / num_sms)
        found = []
        for bundle in range(1, groups + 1):
            if groups % bundle == 0:
                of_cta = math.ceil(slots * parts * (groups // bundle) / num_sms)
                time = (of_cta * bundle - items) * (ITEM_TIME + blocks) + of_cta * LISTING_TIME
                chunks = math.ceil(p.batch / (candidates * (slots // p.users)))
                skewed = chunks * (LISTING_TIME + bundle * (ITEM_TIME + blocks))
                found.append(Listings(candidates, slots, bundle, of_cta, time, skewed))
        return min(found, key=lambda x: (max(x.of_cta, MOST_LISTINGS), x.time))

    def shares_columns(self, head_dim: int) -> bool:
        """Whether the consumers share the columns of values: each multiplies two blocks of 64."""
        return head_dim > MAX_COLUMNS and self.tile_rows == WGMMA_M

    def has_all_columns(self, head_dim: int) -> bool:
        """Whether each consumer has its own rows and all columns of the values of wide heads."""
        return head_dim > MAX_COLUMNS and self.tile_rows > WGMMA_M

    def shares_keys(self, head_dim: int) -> bool:
        """Whether each consumer takes every other block of an item of at most 64 rows.

        With wider heads, one consumer has no room for the other's sums.
        """
        return head_dim <= MAX_COLUMNS

    def takes_own_tokens(self, problem: Any) -> bool:
        """Whether the kernel merges a candidate's own token, which is not capped."""
        group = head_group(problem.q_heads, problem.kv_heads)
        return not problem.has_logit_cap and self.own_stages(problem.q_len, group) is not None

    def own_stages(self, q_len: int, group: int) -> hopper.OwnStages | None:
        """Chooses the stages of own tokens; None: no stage holds those of a tile."""
        tiles = self.tile_rows // WGMMA_M
        own = hopper.OwnStages.choose(rows_of_head(group), tiles, q_len, self)
        return own if own and self.block_parts + own.stages > 2 else None

    def parts(self, kv_len: int) -> int:
        """Counts the parts of the keys: as many of `splits` as have blocks."""
        blocks = math.ceil(kv_len / self.block_kv)
        return math.ceil(blocks / math.ceil(blocks / min(self.splits, blocks)))

    @property
    def block_parts(self) -> int:
        """Number of parts of a block that are loaded separately where a user's keys end in it."""
        rows = 32 if self.block_kv % 32 == 0 and self.block_kv > 32 else 16
        return self.block_kv // rows

    def table(self, problem: Any) -> UserTable | None:
        """Returns the table that CTAs make of a sorted index if it pays and fits; else None."""
        table = self.wanted_table(problem)
        if table is None:
            return None
        shared = self.shared(
            problem.head_dim, head_group(problem.q_heads, problem.kv_heads), table=table
        )
        return table if memory.smem_bytes(shared) <= hopper.MAX_SMEM_BYTES else None

    def wanted_table(self, problem: Any) -> UserTable | None:
        """Returns `table` whether shared memory has room for it or not."""
        p = problem
        group = head_group(p.q_heads, p.kv_heads)
        item_rows = rows_of_head(group) * self.tile_rows // WGMMA_M
        table = UserTable(p.users, p.batch * p.q_len // item_rows)
        if p.users == 1 or not LEAST_TABLED <= p.batch <= MOST_TABLED:
            return None
        if max(table.users, table.extra) > MOST_TABLE_ROWS or p.kv_len > MOST_TABLED_KEYS:
            return None
        return table

    def shared(
        self,
        head_dim: int,
        group: int = 1,
        *,
        lists: bool = False,
        table: UserTable | None = None,
        has_lengths: bool = False,
        has_ranges: bool = False,
        own: hopper.OwnStages | None = None,
        has_own_ring: bool = False,
    ) -> Any:
        """Declares shared memory and barriers of one CTA; `group`: see `head_group`.

        Own tokens are in a ring of their own, or in stages of values.
        """
        has_parts = has_lengths or has_ranges or (own is not None and not has_own_ring)
        parts = self.block_parts if has_parts else 1
        blocks = hopper.column_blocks(head_dim)
        tiles = self.tile_rows // WGMMA_M
        block = (blocks, self.block_kv, BLOCK_K)
        words = WGMMA_M * head_dim // hopper.WARPGROUP_SIZE + STATISTIC_WORDS
        is_exchanged = self.shares_keys(head_dim)
        return memory.shared(
            items=memory.descriptors(
                self.q_slots, ITEM_WORDS_OF_RANGES if has_ranges else ITEM_WORDS
            ),
            query=memory.ring(
                self.q_slots,
                ready=GATHERING_WARPS if lists else tiles * blocks * group,
                tiles=(tiles, blocks, WGMMA_M, BLOCK_K),
            ),
            key=memory.ring(self.k_stages, ready=blocks * parts, tiles=block),
            value=memory.ring(self.v_stages, ready=blocks * parts, tiles=block),
            own=self._own_ring(blocks, own) if own and has_own_ring else None,
            # Consumer 1's part of an item; a barrier says that it is there, one that it was read.
            exchange=memory.Words((words // 4, hopper.WARPGROUP_SIZE, 4)) if is_exchanged else None,
            exchange_ready=memory.Barriers(1, 1) if is_exchanged else None,
            exchange_free=memory.Barriers(1, 1) if is_exchanged else None,
            # An item's candidates, and how many each warp found.
            listing=memory.Words((LISTED + LISTING_WARPS,)) if lists else None,
            # Consumers -> producer, and the warps that gather.
            listed=memory.Barriers(1, NUM_CONSUMERS) if lists else None,
            table=memory.Words((table.words,)) if table else None,  # what `UserTable` describes
            tabled=memory.Barriers(1, NUM_CONSUMERS) if table else None,
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, self.block_kv)),
        )

    def shared_with_own(
        self, own: hopper.OwnStages | None, head_dim: int, *sizes: int, **options: Any
    ) -> tuple[Self, Any]:
        """Declares `shared`, with own tokens; returns the configuration for which it does, too.

        Own tokens of items of 64 rows have a ring of their own where there is room, if need be for
        one stage of values less: consumers need them behind the last block. Those among values are
        needed first, as are those of items of 128 rows: consumers with rows of their own both add
        own tokens, and multiply their keys beside the first block's.
        """
        has_room = own and self.tile_rows == WGMMA_M and head_dim <= MAX_COLUMNS
        tries = (self.v_stages, max(self.v_stages - 1, 2)) if has_room else ()
        for stages in tries:
            config = dataclasses.replace(self, v_stages=stages)
            shared = config.shared(head_dim, *sizes, own=own, has_own_ring=True, **options)
            if memory.smem_bytes(shared) <= hopper.MAX_SMEM_BYTES:
                return config, shared
        return self, self.shared(head_dim, *sizes, own=own, **options)

    def _own_ring(self, blocks: int, own: hopper.OwnStages) -> memory.Ring:
        rows, ready = 2 * own.columns // own.stages, blocks * self.block_parts
        return memory.ring(self.q_slots * own.number, ready=ready, tiles=(blocks, rows, BLOCK_K))

    def smem_bytes(self, head_dim: int) -> int:
        return memory.smem_bytes(self.shared(head_dim))

    @hopper.first_reason
    def illegal_reason(self, problem: Any) -> Iterator[str | None]:
        yield flash.why_not_operands(problem, self.block_kv, MAX_BLOCK_KV)
        yield flash.why_not_users(problem, takes_ranges=True)
        yield self._why_not_ranges(problem)
        yield flash.why_not_pages(problem, self.block_kv)
        is_wide = self.has_all_columns(problem.head_dim)
        if is_wide and self.block_kv > MAX_WIDE_BLOCK_KV:
            yield (
                f"block_kv must be at most {MAX_WIDE_BLOCK_KV} with tile_rows={self.tile_rows} at "
                f"H={problem.head_dim}, but is {self.block_kv}"
            )
        if self.tile_rows not in (WGMMA_M, TILE_ROWS):
            yield f"tile_rows must be {WGMMA_M} or {TILE_ROWS}, but is {self.tile_rows}"
        yield hopper.why_too_few(self, splits=1, k_stages=2, v_stages=2, q_slots=1)
        yield hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)

    def _why_not_ranges(self, problem: Any) -> str | None:
        """Checks the block if candidates have ranges: masks by row take registers."""
        p, most = problem, self.block_kv
        if p.has_ranges and self.has_all_columns(p.head_dim) and p.head_dim > 192:
            most = MAX_RANGED_WIDE_BLOCK_KV
        is_grouped = head_group(p.q_heads, p.kv_heads) > 1
        # With a cap, blocks of 128 keys spill 96 bytes, too.
        if p.has_ranges and 64 < p.head_dim <= 128 and (is_grouped or p.has_logit_cap):
            most = MAX_RANGED_GROUP_BLOCK_KV
        if self.block_kv <= most:
            return None
        return (
            f"block_kv must be at most {most} with key_value_ranges, tile_rows={self.tile_rows}, "
            f"N={p.q_heads}, K={p.kv_heads} and H={p.head_dim}, but is {self.block_kv}"
        )
