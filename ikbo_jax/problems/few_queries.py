"""Configurations of the attention kernel for users with few queries."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ikbo_jax.problems import flash, hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_kv by head width (width 96 is padded to 128 in shared memory). Wider heads spill
#: registers: H = 192 80 to 500 bytes, H = 256 200 bytes, with blocks of 32 keys already.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128}
#: Words of an item's descriptor in shared memory.
ITEM_WORDS = 10
#: Most candidates of an item whose CTA lists them, and warps that list: each counts what it finds.
LISTED, LISTING_WARPS = 128, 8
#: Most candidates of an index that is not sorted, of which each CTA lists its own: each thread of
#: the consumers has one of 256 in a register.
MOST_LISTED = 16384
#: Most items of a CTA that lists candidates. It reads the whole index for each, before it computes.
MOST_LISTINGS = 4
#: f32 words of a row's statistics that one consumer hands to the other: maximum and sum, for each
#: of the two rows of a thread.
STATISTIC_WORDS = 4
#: CTAs of a cluster that can have the parts of an item's keys. No default configuration has
#: clusters: on an H100 they took 1.15 to 2 times as long as parts that XLA adds, or no parts (five
#: sizes, commit 84c7f80). 32 clusters of 4 took two waves, so fewer run at the same time.
CLUSTERS = (2, 3, 4, 6, 8)
#: Rows of a group of swizzled rows in shared memory: a head's queries begin at a multiple of it.
SWIZZLE_ROWS = 8
#: Most queries of a candidate for which this kernel is a candidate.
MAX_QUERIES = 16

# The models by which a kernel and its configuration are chosen where none was measured.
NUM_SMS = 132
#: Time of a CTA for one block of 64 rows by 128 keys at H = 64, of one of 128 rows, of an item, and
#: of the launch, us; measured on an H200, like the numbers below.
BLOCK_US, WIDE_BLOCK_US, ITEM_US, LAUNCH_US = 0.7, 1.5, 0.6, 4.0
#: Time of the launch that merges splits, us.
MERGE_US = 3.0
#: Bytes that L2, device memory, and L2 to one SM deliver in a us.
L2_BYTES, MEMORY_BYTES, SM_BYTES = 5.5e6, 3.5e6, 6e4
#: Factor of the time with fewer than three stages: the rings run empty.
SHALLOW = 1.05
#: The kernel whose tiles of 128 rows span users: the launch and the XLA kernels beside it, a pass,
#: and a block of 128 rows by 128 keys, by column blocks.
TILE_LAUNCH_US, PASS_US, TILE_BLOCK_US = 6.0, 1.0, {1: 0.95, 2: 1.6}
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class FewQueriesShared(NamedTuple):
    """Shared memory and barriers of the kernel; shapes follow the slot."""

    items: Any  # ring of descriptors, filled only
    query: Any  # ring of [tiles of 64 rows, column blocks, 64, 64]
    key: Any  # ring of [column blocks, block_kv, 64]
    value: Any  # likewise
    exchange: Any  # [words of a thread / 4, 128, 4] words: consumer 1's part of an item
    exchange_ready: Any  # consumer 1 -> 0: the part is in `exchange`
    exchange_free: Any  # consumer 0 -> 1: it was read
    listing: Any  # [LISTED + LISTING_WARPS]: an item's candidates, and how many each warp found
    listed: Any  # consumers -> producer: the numbers of candidates are in `listing`
    staging: Any  # [2, 64, columns], only under interpretation
    merged: Any  # likewise: the CTA's part of an item, which the CTAs of the cluster read
    merge_ready: Any  # of a cluster's CTAs: all of them have written their parts to `merged`
    merge_free: Any  # likewise: all of them have read the parts
    exchange_staging: Any  # [64, H] f32, only under interpretation
    row_staging: Any  # [2, 64] f32, only under interpretation
    float_staging: Any  # [2, 64, H] f32, only under interpretation


def head_group(q_heads: int, kv_heads: int) -> int:
    """Query heads of one key head whose queries share a tile: the largest divisor up to 8."""
    heads = q_heads // kv_heads
    return max(n for n in range(1, SWIZZLE_ROWS + 1) if heads % n == 0)


def rows_of_head(group: int) -> int:
    """Rows of a tile of 64 that belong to one query head of a group; a power of 2."""
    rows = WGMMA_M // group
    return 1 << (rows.bit_length() - 1)


def listed_candidates(q_len: int, item_rows: int) -> int:
    """Candidates of an item whose CTA lists them; 0 if a candidate's queries do not fit it."""
    return min(item_rows // q_len, LISTED)


def listed_tiles(batch: int, users: int, candidates: int) -> int:
    """Items of each user and group of heads, of `candidates` each, if CTAs list candidates.

    Two standard deviations more than the mean; the rest of a user's candidates follows in the same
    CTA.
    """
    mean = batch / users
    return max(1, math.ceil((mean + 2 * math.sqrt(mean)) / candidates))


def clusters(num_sms: int, size: int) -> int:
    """Clusters that run at the same time: the SMs of a cluster belong to one GPC, of 16 or 18."""
    return max(num_sms // size - (size > 2), 1)


def serves(problem: Any) -> bool:
    """Whether the kernel is a candidate for an `AttentionProblem`."""
    return (
        0 < problem.q_len <= MAX_QUERIES
        and min(problem.batch, problem.users, problem.kv_len) > 0
        and problem.q_heads % problem.kv_heads == 0
    )


@functools.lru_cache(maxsize=1024)
def is_preferred(problem: Any) -> bool:
    """Whether the kernel is the default for an `AttentionProblem`: whether its model is faster.

    With many rows of a user the tensor cores limit the time. Then the kernel whose tiles span users
    is faster, whose softmax keeps the maximum of the first block.
    """
    best = next(candidate_configs(problem), None)
    return best is not None and estimated_us(problem, best) < estimated_tile_us(problem)


def candidate_configs(problem: Any) -> Iterator[FewQueriesConfig]:
    """Yields the legal configurations worth timing, the most promising first."""
    if not serves(problem):
        return
    configs = []
    for block_kv in (128, 64, 32):
        for splits in SPLITS:
            keys = problem.kv_len / splits
            # With few blocks the queries of several items are in flight.
            q_slots = 2 if keys > 2 * block_kv else 4
            if splits > 1 and keys < 2 * block_kv:
                continue
            configs += [
                FewQueriesConfig(tile_rows, splits, block_kv, *stages, q_slots)
                for tile_rows in (WGMMA_M, TILE_ROWS)
                for stages in ((5, 5), (4, 4), (3, 3), (3, 2), (2, 2))
            ]
    legal = [config for config in configs if config.illegal_reason(problem) is None]
    # Of configurations that differ in their stages alone, the first has most.
    seen: dict[tuple[int, ...], FewQueriesConfig] = {}
    for config in legal:
        kind = (config.tile_rows, config.splits, config.block_kv)
        seen.setdefault(kind, config)
    yield from sorted(seen.values(), key=lambda config: estimated_us(problem, config))


def estimated_us(problem: Any, config: FewQueriesConfig) -> float:
    """Time by a model: waves of items, the traffic of L2 and of device memory, and the merge."""
    p = problem
    group = head_group(p.q_heads, p.kv_heads)
    head_rows = rows_of_head(group)
    # With several users, one standard deviation more than the mean: half of the users have more.
    mean = p.batch / p.users
    rows = math.ceil(mean + (math.sqrt(mean) if p.users > 1 and mean > 1 else 0)) * p.q_len
    item_rows = head_rows * config.tile_rows // WGMMA_M
    tiles = -(-rows // item_rows)
    items = min(p.users, p.batch) * (p.q_heads // group) * tiles
    blocks = -(-p.kv_len // config.block_kv)
    width = hopper.column_blocks(p.head_dim) * config.block_kv / 128
    is_wide = rows > head_rows and config.tile_rows > WGMMA_M
    block_us = (WIDE_BLOCK_US if is_wide else BLOCK_US) * max(width, 0.5 + 0.5 * width)
    waves = math.ceil(items * config.splits / NUM_SMS)
    of_split = math.ceil(blocks / config.splits)
    if not is_wide:  # each consumer has every other block
        of_split += of_split % 2
    compute = waves * (of_split * block_us + ITEM_US)
    keys = 4 * p.kv_len * p.head_dim  # bytes of a user's keys and values of one head
    compute = max(compute, waves * keys / config.splits / SM_BYTES)
    read = min(p.users, p.batch) * p.kv_heads * keys
    traffic = max(items * keys / L2_BYTES, read / MEMORY_BYTES)
    merge = 0.0
    if config.splits > 1:
        sums = 8 * config.splits * p.batch * p.q_len * p.q_heads * p.head_dim
        merge = MERGE_US + sums / MEMORY_BYTES
    shallow = SHALLOW if min(config.k_stages, config.v_stages) < 3 else 1.0
    return LAUNCH_US + max(compute, traffic) * shallow + merge


def estimated_tile_us(problem: Any) -> float:
    """Time of the kernel whose tiles span users: waves of tiles, and a pass for each user."""
    p = problem
    items = -(-p.batch * p.q_len // TILE_ROWS) * p.q_heads
    waves = math.ceil(items / NUM_SMS)
    passes = min(1 + (p.users > 1) * TILE_ROWS * p.users / (p.batch * p.q_len), TILE_ROWS)
    if waves == 1:  # the tile with most passes ends last
        passes = math.ceil(passes)
    block_us = TILE_BLOCK_US[hopper.column_blocks(p.head_dim)]
    return TILE_LAUNCH_US + waves * passes * (-(-p.kv_len // 128) * block_us + PASS_US)


@dataclasses.dataclass(frozen=True)
class FewQueriesConfig(Config):
    """Tuning parameters of the attention kernel for users with few queries.

    Attributes:
      tile_rows: query rows of an item, 64 or 128. With 128, an item with more than 64 rows gives
        each consumer warpgroup its own rows, and both read the same keys. An item with fewer rows
        gives each of them every other block of keys.
      splits: number of parts of the keys, which are separate items. Without `cluster`, a second
        pass in XLA adds their results. More than 1 if users, heads and rows make too few items for
        the device.
      block_kv: keys of a block, which fills a pipeline stage; a multiple of 16.
      k_stages: stages of the ring of key blocks.
      v_stages: stages of the ring of value blocks.
      q_slots: number of query slots.
      stagger: whether users' keys begin with different blocks, if there are no lengths, so that
        CTAs do not read all users' keys at the same offset at the same time.
      turns: whether the consumers take turns at issuing products, so that one computes exponentials
        while the other multiplies.
      cluster: whether the parts of the keys belong to the CTAs of a cluster, which add their
        results to each other's through shared memory; needs splits in `CLUSTERS`, and 64 rows.
    """

    tile_rows: int = 64
    splits: int = 1
    block_kv: int = 128
    k_stages: int = 4
    v_stages: int = 4
    q_slots: int = 2
    stagger: bool = False
    turns: bool = False
    cluster: bool = False

    def lists(self, problem: Any, num_sms: int) -> bool:
        """Whether CTAs list the candidates of their items, for an index that is not sorted.

        Otherwise XLA sorts the index, and moves queries and results, in six kernels of 1 to 2 us.
        """
        p = problem
        group = head_group(p.q_heads, p.kv_heads)
        candidates = listed_candidates(p.q_len, rows_of_head(group) * self.tile_rows // WGMMA_M)
        if not (candidates and p.users > 1 and p.batch <= MOST_LISTED):
            return False
        if memory.smem_bytes(self.shared(p.head_dim, lists=True)) > hopper.MAX_SMEM_BYTES:
            return False
        items = p.users * listed_tiles(p.batch, p.users, candidates) * p.q_heads // group
        return items * self.splits <= MOST_LISTINGS * num_sms

    def shared(self, head_dim: int, group: int = 1, *, lists: bool = False) -> FewQueriesShared:
        """Shared memory and barriers of one CTA; `group`: see `head_group`."""
        blocks = hopper.column_blocks(head_dim)
        tiles = self.tile_rows // WGMMA_M
        block = (blocks, self.block_kv, BLOCK_K)
        words = WGMMA_M * head_dim // hopper.WARPGROUP_SIZE + STATISTIC_WORDS
        exchange = memory.Words((words // 4, hopper.WARPGROUP_SIZE, 4))
        return FewQueriesShared(
            items=memory.descriptors(self.q_slots, ITEM_WORDS),
            query=memory.ring(
                self.q_slots,
                ready=tiles * blocks * group,
                tiles=(tiles, blocks, WGMMA_M, BLOCK_K),
            ),
            key=memory.ring(self.k_stages, ready=blocks, tiles=block),
            value=memory.ring(self.v_stages, ready=blocks, tiles=block),
            exchange=exchange,
            # Arrays, so that they can be indexed; only element 0 is used.
            exchange_ready=memory.Barriers(2, 1),
            exchange_free=memory.Barriers(2, 1),
            listing=memory.Words((LISTED + LISTING_WARPS,)) if lists else None,
            merged=exchange if self.cluster else None,
            merge_ready=memory.Barriers(2, 1, is_clustered=True) if self.cluster else None,
            merge_free=memory.Barriers(2, 1, is_clustered=True) if self.cluster else None,
            listed=memory.Barriers(2, NUM_CONSUMERS) if lists else None,
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, max(self.block_kv, head_dim))),
            exchange_staging=memory.Staging((WGMMA_M, head_dim), "float32"),
            row_staging=memory.Staging((2 * NUM_CONSUMERS, WGMMA_M), "float32"),
            float_staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, head_dim), "float32"),
        )

    def smem_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory of one CTA."""
        return memory.smem_bytes(self.shared(head_dim))

    def illegal_reason(self, problem: Any) -> str | None:
        """Why the kernel cannot run an `AttentionProblem` with this configuration, or None."""
        if reason := flash.why_not_operands(problem, self.block_kv, MAX_BLOCK_KV):
            return reason
        if problem.kv_len < 1 or problem.users < 1:
            return (
                f"the kernel needs a user and a key, but U={problem.users} and S={problem.kv_len}"
            )
        if reason := hopper.why_not_heads(problem.q_heads, problem.kv_heads):
            return reason
        if self.tile_rows not in (WGMMA_M, TILE_ROWS):
            return f"tile_rows must be {WGMMA_M} or {TILE_ROWS}, but is {self.tile_rows}"
        if self.splits < 1:
            return f"splits must be at least 1, but is {self.splits}"
        if self.cluster:
            if self.splits not in CLUSTERS:
                return f"cluster needs splits in {CLUSTERS}, but there are {self.splits}"
            if self.tile_rows != WGMMA_M or self.stagger:
                return (
                    f"cluster needs tile_rows={WGMMA_M} and no stagger, but tile_rows is "
                    f"{self.tile_rows} and stagger is {self.stagger}"
                )
        if min(self.k_stages, self.v_stages, self.q_slots) < 2:
            return (
                "k_stages, v_stages and q_slots must be at least 2, "
                f"but are {self.k_stages}, {self.v_stages} and {self.q_slots}"
            )
        return hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)
