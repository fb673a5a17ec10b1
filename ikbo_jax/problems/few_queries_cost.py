"""A cost model of attention's kernel for users with few queries, and the choice beside tiles.

Times are in us, bytes are for one us; fitted to 1,031 configurations of 263 sizes, and to the tiles
of 239, on an H100 (kernel time by CUPTI, commit 49a3c80). There, the choices take 1.020 times as
long as the fastest configuration in geometric mean.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

from ikbo_jax.problems import hopper
from ikbo_jax.problems.attention_tile_cost import (
    L2_BYTES,
    LEAST_WAVE,
    MANY_WAVES,
    MEMORY_BYTES,
    REREAD,
    SM_BYTES,
    expected_tiles,
    key_bytes,
    row_bytes,
)
from ikbo_jax.problems.few_queries import (
    CACHE_BYTES,
    LEAST_BUNDLES,
    MAX_COLUMNS,
    TIME_UNIT_US,
    FewQueriesConfig,
    head_group,
    pack_time,
    rows_of_head,
)
from ikbo_jax.problems.flash import tiles_read_pages
from ikbo_jax.problems.hopper import NUM_SMS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Ranked

#: Most queries of a candidate for which the kernel for few queries is a candidate; and if items of
#: 64 rows take one wave. Then tiles of 128 rows leave half of the SMs without work: 4.8 us instead
#: of 3.7 for 69 candidates with 64 queries each (S = 128, H = 64, an H200).
MAX_QUERIES, MAX_QUERIES_OF_WAVE = 16, 64
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: The launch, and an item of 128 rows besides its blocks of keys; an item of 64 rows likewise, but
#: without its queries and results, which its SM loads and stores at `SM_BYTES`. With 1 us for any
#: width, several waves of short items of 128 columns or more took 1.1 to 1.3 times the estimate.
LAUNCH_US, WIDE_ITEM_US, ITEM_US = 2.15, {1: 1.9, 2: 1.6, 3: 1.8, 4: 3.0}, 0.6
#: How much longer items of 64 rows take than estimated where row slots without rows come last: 1.03
#: to 1.10 times for six of seven sizes (H200). Otherwise this is in the estimate of their number.
PACKED = 1.08
#: What of a CTA's first item of 128 rows the launch has already, from H = 128 on: with one wave of
#: them 8.2 us were expected to be 10.0, and 9.2 to be 9.9 (an H200).
FIRST_ITEM_US = 0.65
#: A block of 64 rows by 128 keys, by column blocks, and the part of it that fewer keys do not save.
BLOCK_US, BLOCK_LATENCY = {1: 0.65, 2: 0.84, 3: 1.7, 4: 1.8}, 0.27
#: Factors of a block of 128 rows, by column blocks, and with turns.
WIDE, WIDE_TURNS = {1: 1.91, 2: 1.98, 3: 1.25, 4: 1.28}, 1.73
#: The launch that merges splits, with the gap before it.
MERGE_US = 3.0
#: What of gathering an item's queries no products hide, by column blocks.
GATHER_US = {1: 0.9, 2: 0.48, 3: 0.4, 4: 1.2}
#: Standard deviations above the mean of the CTA with most items.
UNEVEN = 1.75
#: Part of the lesser of the two times, of items and of memory, that the greater does not hide.
OVERLAP = 0.09
#: Most keys of an item that is over before the index has been searched for some others.
MOST_KEYS_OF_SHORT = 512


def serves(problem: Any) -> bool:
    """Whether the kernel for few queries is a candidate for an `AttentionProblem`."""
    p = problem
    items = p.batch * p.q_len / WGMMA_M * p.q_heads
    most = MAX_QUERIES if p.users > 1 or items > NUM_SMS else MAX_QUERIES_OF_WAVE
    return (
        # Ranges of keys, and some pages, have no other kernel.
        (0 < problem.q_len <= most or p.has_ranges or not tiles_read_pages(p))
        and min(p.batch, p.users, p.q_len, p.kv_len, p.q_heads) > 0
        and problem.q_heads % problem.kv_heads == 0
    )


def ranked_configs(problem: Any) -> list[Ranked]:
    """Estimates the legal configurations worth timing, the most promising first.

    With many rows of a user the tensor cores limit the time: the kernel of tiles is faster then.
    """
    configs = candidate_configs(problem)
    # The order is that of users with the same number of rows, the choice that of any.
    uneven_us = _uneven_us(problem, configs[0]) if configs else 0.0
    return [Ranked(estimated_us(problem, config) + uneven_us, config) for config in configs]


@functools.lru_cache(maxsize=1024)
def candidate_configs(problem: Any) -> tuple[FewQueriesConfig, ...]:
    """Lists the legal configurations worth timing, the most promising first."""
    if not serves(problem):
        return ()
    found = []
    for block_kv in (128, 80, 64, 32):
        for splits in SPLITS:
            if splits == 1 or problem.kv_len / splits >= 2 * block_kv:
                for tile_rows in (WGMMA_M, TILE_ROWS):
                    found += _with_most_stages(problem, tile_rows, splits, block_kv)
    found.sort(key=lambda config: estimated_us(problem, config))
    if found:
        first = _with_short_rings(problem, found[0])
        found = [first, *(config for config in found if config != first)]
    return tuple(found)


def _with_short_rings(
    problem: Any, config: FewQueriesConfig, items: int | None = None
) -> FewQueriesConfig:
    """Drops the stages and slots that no CTA uses; `items` of a CTA, if known.

    A CTA sets up the barriers of its rings before its first load, about 11 ns each: 3.55 us with
    two stages and slots instead of 3.94 with five stages and four slots (69 candidates, T = 64, S =
    128, H = 64, an H200).
    """
    items = _most_items(problem, config) if items is None else items
    blocks = math.ceil(math.ceil(problem.kv_len / config.block_kv) / config.splits)
    stages = max(2, items * blocks)
    return dataclasses.replace(
        config,
        k_stages=min(config.k_stages, stages),
        v_stages=min(config.v_stages, stages),
        q_slots=min(config.q_slots, max(2, items)),
    )


def _with_most_stages(
    problem: Any, tile_rows: int, splits: int, block_kv: int
) -> list[FewQueriesConfig]:
    """Finds the legal configuration with most stages; empty if all are illegal."""
    is_wide = problem.head_dim > MAX_COLUMNS
    has_all_columns = is_wide and tile_rows > WGMMA_M
    # Blocks of 80 keys, and 128 rows of wide heads, were measured without splits.
    if (block_kv == 80 and not is_wide) or ((block_kv == 80 or has_all_columns) and splits > 1):
        return []
    # With few blocks the queries of several items are in flight, unless a slot has 24 KB or more.
    is_long = problem.kv_len / splits > 2 * block_kv
    slots = [2] if is_long or is_wide else [4]
    # Two blocks of 128 keys leave no room for four slots: 31.2 us with two, where blocks of 64 keys
    # take 34.8 (S = 230, H = 128).
    if problem.kv_len / splits > block_kv == 128:
        slots.append(2)
    if has_all_columns:
        slots = [2, 1]
    # Where consumers have their own rows, H = 64 leaves most of the time to exponentials: with
    # turns 103 instead of 120 us, and 141 instead of 155 us. Where they share columns, turns took
    # 0.97 of the time in geometric mean, at most 1.04 (23 sizes).
    turns = hopper.column_blocks(problem.head_dim) == 1 and tile_rows > WGMMA_M
    turns = turns or (is_wide and not has_all_columns)
    # Then three stages of 128 keys took 0.93 to 1.01 of the time of five (8 sizes of S = 512 to
    # 10880, commit a92f387).
    most = 3 if turns and block_kv == 128 else 5
    # Short items wait for their rows: a table is then worth more than a stage.
    is_short, first = problem.kv_len / splits <= MOST_KEYS_OF_SHORT, None
    for q_slots, stages in itertools.product(slots, ((5, 5), (4, 4), (3, 3), (3, 2), (2, 2))):
        # One slot of 64 KB, and two stages of 32 KB: as measured.
        if stages[0] > (2 if q_slots == 1 else most):
            continue
        config = FewQueriesConfig(tile_rows, splits, block_kv, *stages, q_slots, turns=turns)
        if config.illegal_reason(problem) is not None:
            continue
        if not is_short or config.table(problem) == config.wanted_table(problem):
            return [config]
        first = first or config
    return [first] if first else []


def config_of_unsorted(problem: Any) -> FewQueriesConfig:
    """Returns the best of legal configurations for an unsorted index, by time with listing."""
    configs = candidate_configs(problem)
    best = min(configs, key=lambda config: estimated_unsorted_us(problem, config, NUM_SMS))
    items = None
    if best.lists(problem, NUM_SMS):
        listings = best.listings(problem, NUM_SMS)
        items = listings.of_cta * listings.bundle
    return _with_short_rings(problem, best, items)


def _further_slots(problem: Any, config: FewQueriesConfig) -> int:
    """Counts the row slots besides each user's first one."""
    head_rows = rows_of_head(head_group(problem.q_heads, problem.kv_heads))
    return int(problem.batch * problem.q_len // (head_rows * config.tile_rows // WGMMA_M))


def _most_items(problem: Any, config: FewQueriesConfig) -> int:
    """Items of a CTA if no row slot is empty."""
    groups = problem.q_heads // head_group(problem.q_heads, problem.kv_heads)
    slots = problem.users + _further_slots(problem, config)
    return math.ceil(slots * groups * config.splits / NUM_SMS)


def _packs_slots(problem: Any, config: FewQueriesConfig) -> bool:
    """Whether row slots without rows come last, by a table of the users; timed without splits."""
    if config.splits > 1 or key_bytes(problem)[1] > CACHE_BYTES:
        return False
    table = config.wanted_table(problem)
    return table is not None and table.packs


def _spread(problem: Any, config: FewQueriesConfig, tiles: float) -> float:
    """Estimates how many more items than the mean the CTA has that ends last.

    Of row slots beside the first of each user, some are empty. `tiles`: items of a user's rows.
    """
    p = problem
    users = min(p.users, p.batch)
    if users == 1 or _packs_slots(p, config):
        return 0.0
    further = _further_slots(p, config)
    bundle, parts = p.q_heads // head_group(p.q_heads, p.kv_heads), config.splits
    if (p.users + further) * parts < LEAST_BUNDLES * NUM_SMS:
        parts, bundle = parts * bundle, 1
    taken = min(users * (tiles - 1) / max(further, 1), 1.0)
    return bundle * UNEVEN * math.sqrt(further * parts / NUM_SMS * taken * (1 - taken))


def _uneven_us(problem: Any, config: FewQueriesConfig) -> float:
    """Estimates how much longer the CTA takes that has most items of more than 64 rows.

    Each consumer has all keys of such an item, and every other block of an item of fewer rows. If a
    user's rows fill 64 in the mean, either kind is frequent: 394 us, where tiles of one user take
    357 (B = 947, U = 63, T = 4, S = 10880, H = 64, an H200). Timed with turns alone.
    """
    p = problem
    users = min(p.users, p.batch)
    head_rows = rows_of_head(head_group(p.q_heads, p.kv_heads))
    is_mean_wide = p.batch * p.q_len > users * head_rows
    if users == 1 or is_mean_wide or not (config.turns and config.shares_keys(p.head_dim)):
        return 0.0
    tiles = expected_tiles(p, TILE_ROWS * head_rows // WGMMA_M)
    wide = min(max(expected_tiles(p, head_rows) / tiles - 1, 0.0), 1.0)
    groups = p.q_heads // head_group(p.q_heads, p.kv_heads)
    waves = math.ceil(users * tiles * groups * config.splits / NUM_SMS)
    if waves == 1:
        return 0.0
    blocks = math.ceil(math.ceil(p.kv_len / config.block_kv) / config.splits)
    more = blocks * BLOCK_US[hopper.column_blocks(p.head_dim)] * (WIDE_TURNS - 1)
    return more * UNEVEN * math.sqrt(waves * wide * (1 - wide))


def estimated_us(problem: Any, config: FewQueriesConfig, *, is_listed: bool = False) -> float:
    """Estimates the time: waves of items, which CTAs may list, traffic, and the merge."""
    p = problem
    group = head_group(p.q_heads, p.kv_heads)
    head_rows = rows_of_head(group)
    users = min(p.users, p.batch)
    tiles = expected_tiles(p, head_rows * config.tile_rows // WGMMA_M)
    items = users * (p.q_heads // group) * tiles
    columns = hopper.column_blocks(p.head_dim)
    block_us = BLOCK_US[columns]
    block_us *= BLOCK_LATENCY + (1 - BLOCK_LATENCY) * config.block_kv / 128
    is_wide = config.tile_rows > WGMMA_M and p.batch * p.q_len > users * head_rows
    is_packed = not is_listed and _packs_slots(p, config)
    if is_wide:
        is_fast = config.turns and config.shares_keys(p.head_dim)
        factor = WIDE_TURNS if is_fast else WIDE[columns]
        if is_packed and is_fast:
            # Of an item of at most 64 rows, each consumer has every other block.
            narrow = 2 - min(expected_tiles(p, head_rows) / tiles, 2.0)
            factor += narrow * (1 - factor)
        block_us *= factor
    of_split = math.ceil(math.ceil(p.kv_len / config.block_kv) / config.splits)
    # Each consumer has every other block.
    if not (is_wide or not config.shares_keys(p.head_dim)) and of_split > 1:
        of_split += of_split % 2
    keys, once = key_bytes(p)
    item_us = WIDE_ITEM_US[columns] if is_wide else ITEM_US + row_bytes(p) / (items * SM_BYTES)
    wave_us = of_split * block_us + item_us
    wave_us *= PACKED if is_packed and not is_wide else 1.0
    wave_us = max(wave_us, keys / config.splits / SM_BYTES)
    again = max(items * keys - once, 0)
    from_memory = once + (REREAD * again if once > CACHE_BYTES else 0) + row_bytes(p)
    traffic = max((once + again) / L2_BYTES, from_memory / MEMORY_BYTES)
    waves = items * config.splits / NUM_SMS
    if not is_listed:
        waves = max(waves, min(waves + _spread(p, config, tiles), _most_items(p, config)))
    full, last = math.floor(waves), 1.0 if waves < MANY_WAVES else 0.5
    rest = waves - full
    # In the last wave few CTAs load, which do not reach what memory delivers.
    times = [(full * wave_us, traffic * full / waves)]
    if rest > LEAST_WAVE or not full:
        times.append((last * wave_us, traffic * rest / waves))
    merge = 0.0
    if config.splits > 1:
        sums = 8 * config.splits * p.batch * p.q_len * p.q_heads * p.head_dim
        merge = MERGE_US + sums / (L2_BYTES if sums < CACHE_BYTES else MEMORY_BYTES)
    launch = LAUNCH_US - (FIRST_ITEM_US if is_wide and columns > 1 else 0.0)
    return launch + sum(max(t) + OVERLAP * min(t) for t in times) + merge


def _copy_us(problem: Any) -> float:
    """Estimates copies of queries that are not in L2, which `pack_time` leaves out."""
    rows = row_bytes(problem)  # queries and results: as much as a copy reads and writes
    operands = key_bytes(problem)[1] + rows + rows // 2
    return rows / MEMORY_BYTES if operands > CACHE_BYTES else 0.0


def estimated_unsorted_us(problem: Any, config: FewQueriesConfig, num_sms: int) -> float:
    """Estimates an unsorted index: CTAs list candidates, or a launch copies queries."""
    is_listed = config.lists(problem, num_sms)
    found = estimated_us(problem, config, is_listed=is_listed)
    if not is_listed:
        return found + pack_time(problem.batch) * TIME_UNIT_US + _copy_us(problem)
    listings = config.listings(problem, num_sms)
    items = listings.of_cta * listings.bundle
    gather = GATHER_US[hopper.column_blocks(problem.head_dim)]
    return found + listings.time * TIME_UNIT_US + items * gather
