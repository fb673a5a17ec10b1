"""A cost model of attention's tiles, of several users or of one, and what both kernels share."""

import math
from typing import Any

from ikbo_jax.problems import hopper
from ikbo_jax.problems.few_queries import CACHE_BYTES
from ikbo_jax.problems.hopper import NUM_SMS, TILE_ROWS, WGMMA_M

# The models by which a kernel and its configuration are chosen where none was measured. Times are
# in us, bytes are for one us; fitted to 558 configurations of 31 drawn sizes on an H100 (kernel
# time by CUPTI, commit bef06a9). There, the choices take 1.01 times as long as the fastest
# configuration in geometric mean, and at most 1.07 times. The factors of 3 and 4 column blocks are
# estimates; with them the choices take 1.01 times as long, at most 1.06 (23 sizes, commit 13031e8).

#: Bytes that L2 delivers to all SMs, bytes that L2 delivers to one SM, and bytes of device memory.
L2_BYTES, SM_BYTES, MEMORY_BYTES = 1.05e7, 7.2e4, 2.9e6
#: Part of repeated reads of keys and values that comes from device memory if L2 cannot hold all of
#: them: for few queries, for tiles that span users, for tiles of one user.
REREAD, TILE_REREAD, ONE_USER_REREAD = 0.73, 0.8, 0.4
#: From this number of waves on, the last one counts as half full; least part of a wave that counts.
MANY_WAVES, LEAST_WAVE = 8, 0.02
#: From this mean number of a user's tiles on, the last tile counts as half full.
MANY_TILES = 30
#: The kernel whose tiles of 128 rows span users: the launch, a pass, and a block of 128 rows by 128
#: keys, by column blocks.
TILE_LAUNCH_US, PASS_US, TILE_BLOCK_US = 5.3, 0.8, {1: 0.92, 2: 1.5, 3: 2.3, 4: 3.0}
#: With one user, a CTA finds its tiles without loads, and all tiles read the same keys: the launch
#: and a factor of a block's time (44 drawn sizes, an H100, kernel time by CUPTI; few of them with 3
#: and 4 column blocks).
ALONE_LAUNCH_US, ALONE_BLOCK = 3.5, {1: 1.0, 2: 0.8, 3: 0.82, 4: 0.77}
#: What parts of tiles add if tiles span users and T is no multiple of 64: 10.1 us were expected to
#: be 17.9, 11.0 to be 14.9 and 19.0 to be 26.1 (of the same drawn sizes).
SPANNING_US = 3.2
#: How much longer a pass takes, the fewer queries candidates have, if users end in its tile:
#: consumers store parts of 64 rows from registers.
PARTIAL_US = 1.5
#: Heads wider than 128: time of a tile's queries and results for each column block but the first
#: (the time of a block includes narrower heads' queries and results), and keys of a block. Without
#: both, the estimate of 25.8 us was 18.1 us (S = 96, H = 192, an H200).
WIDE_ROWS_US, WIDE_BLOCK_KV = 0.43, 64
#: The launch that lists tiles of one user, with the gap after it, and its part for each 1,024
#: candidates.
LIST_US, LIST_EACH_US = 4.0, 0.35
#: Words of offsets and index beyond which XLA lists tiles (`worklist.tiles`); its 24 kernels' time.
MOST_LISTED_WORDS, XLA_LIST_US = 46080, 60.0
#: Tiles that are cut at users are preferred if their estimate is lower by this factor.
CUT_MARGIN = 1.02
#: Factor of tiles with several users where memory takes more than `MEMORY_PART` of their time; its
#: inverse applies elsewhere: idle CTAs take over tiles, but not in the kernel for few queries.
#: Without the factor, the choice between both kernels takes up to 1.5 times as long (26 sizes).
OF_MEMORY, MEMORY_PART = 1.1, 0.49
#: Most warpgroup tiles that `balance` cuts by default, the kernels that cut them, and how much
#: longer the kernel then takes.
MOST_BALANCED, CUT_US, BALANCED = 1024, 2.0, 1.02
#: What a further pass of a tile takes of the first pass's time, by column blocks: often only one
#: consumer has rows of it. At H = 64, where exponentials limit the time, one consumer takes as long
#: as two. And how many standard deviations above the mean the CTA with most further passes is.
FURTHER_PASS, WORST = {1: 1.0, 2: 0.8, 3: 0.8, 4: 0.8}, 2.0


def expected_tiles(problem: Any, item_rows: int) -> float:
    """Estimates the mean number of items for the rows of a user that has candidates.

    A user's number of candidates is taken as normally distributed, its variance as its mean.
    """
    users = min(problem.users, problem.batch)
    mean = problem.batch / users
    tiles = mean * problem.q_len / item_rows
    if users == 1:
        return math.ceil(tiles)
    if tiles > MANY_TILES:
        return tiles + 0.5
    deviation = math.sqrt(mean) * problem.q_len / item_rows
    found = 1.0
    for further in range(1, math.ceil(tiles + 4 * deviation) + 1):
        found += 0.5 * math.erfc((further - tiles) / (deviation * math.sqrt(2)))
    return found


def key_bytes(problem: Any) -> tuple[int, int]:
    """Counts bytes of keys and values: one head of a user, and all users with candidates."""
    p = problem
    keys = 4 * p.kv_len * p.head_dim
    return keys, min(p.users, p.batch) * p.kv_heads * keys


def row_bytes(problem: Any) -> int:
    """Counts the bytes of the queries and of the result."""
    p = problem
    return 4 * p.batch * p.q_len * p.q_heads * p.head_dim


def _pass_us(problem: Any, ending: float) -> float:
    """Estimates a pass of 128 rows; `ending` is the part of the tiles in which users end."""
    p = problem
    columns = hopper.column_blocks(p.head_dim)
    blocks, rows_us = math.ceil(p.kv_len / 128), 0.0
    if columns > 2:
        blocks = math.ceil(p.kv_len / WIDE_BLOCK_KV) * WIDE_BLOCK_KV / 128
        rows_us = WIDE_ROWS_US * (columns - 1)
    partial_us = PARTIAL_US * min(ending, 1.0) * (1 - min(p.q_len, WGMMA_M) / WGMMA_M)
    block_us = TILE_BLOCK_US[columns] * (ALONE_BLOCK[columns] if p.users == 1 else 1.0)
    return blocks * block_us + PASS_US + rows_us + partial_us


def estimated_tile_us(problem: Any) -> float:
    """Estimates tiles that span users: waves of tiles, a pass for each user of a tile."""
    p = problem
    rows = p.batch * p.q_len
    items = -(-rows // TILE_ROWS) * p.q_heads
    waves = math.ceil(items / NUM_SMS)
    # Passes of a tile besides its first one, unless users end where tiles do.
    further = min(TILE_ROWS * p.users / rows, TILE_ROWS - 1) if p.users > 1 else 0.0
    further *= 1 - min(p.q_len, TILE_ROWS) / TILE_ROWS
    columns = hopper.column_blocks(p.head_dim)
    more = waves * further + WORST * math.sqrt(waves * further)
    pass_us = _pass_us(p, further)
    compute = (waves + FURTHER_PASS[columns] * more) * pass_us
    keys, once = key_bytes(p)
    # Tiles with rows of one user alone read its keys at the same time.
    again = 0.0
    if once > CACHE_BYTES:
        again = min(items * further * keys, max(items * (1 + further) * keys - once, 0))
    memory_us = (once + TILE_REREAD * again + row_bytes(p)) / MEMORY_BYTES
    launch = TILE_LAUNCH_US if p.users > 1 else ALONE_LAUNCH_US
    return launch + max(compute, memory_us)


def estimated_one_user_us(problem: Any) -> float:
    """Estimates tiles of one user: waves of passes, and the list of tiles."""
    p = problem
    users = min(p.users, p.batch)
    tiles = users * expected_tiles(p, TILE_ROWS)
    waves = tiles * p.q_heads / NUM_SMS
    # The list has tiles with many keys first, so CTAs end at about the same time.
    waves = math.ceil(waves) if waves < MANY_WAVES else waves + 0.25
    compute = waves * _pass_us(p, users / tiles)
    keys, once = key_bytes(p)
    again = max(tiles * p.q_heads * keys - once, 0)
    from_memory = once + (ONE_USER_REREAD * again if once > CACHE_BYTES else 0) + row_bytes(p)
    traffic = max((once + again) / L2_BYTES, from_memory / MEMORY_BYTES)
    return TILE_LAUNCH_US + _list_us(p) + max(compute, traffic)


def estimated_balance_us(problem: Any) -> float:
    """Estimates the kernel with `balance`; kernels of XLA cut its tiles at users."""
    p = problem
    tiles = p.batch * p.q_len // WGMMA_M
    if p.q_len % TILE_ROWS != WGMMA_M or tiles > MOST_BALANCED:
        return math.inf
    return BALANCED * (estimated_one_user_us(p) - _list_us(p)) + CUT_US


def _list_us(problem: Any) -> float:
    """Estimates the launch that lists tiles of one user, or XLA's kernels that do."""
    if 2 * (problem.batch + problem.users) > MOST_LISTED_WORDS:
        return XLA_LIST_US
    return LIST_US + LIST_EACH_US * problem.batch / 1024


def tile_modes(problem: Any) -> list[tuple[str, float]]:
    """Lists ways to cut tiles, by time: "" spans users; "balance" only if it is the fastest."""
    p = problem
    if not min(p.batch, p.q_len, p.kv_len, p.q_heads):
        return [("", 0.0)]
    spanning = estimated_tile_us(p)
    modes = {"": spanning / CUT_MARGIN}
    if p.users > 1:
        modes["one_user"] = estimated_one_user_us(p)
        modes["balance"] = estimated_balance_us(p)
    best = min(modes, key=lambda mode: modes[mode])
    # Beside the kernel for few queries alone: the modes were compared by times of their own.
    modes[""] = spanning + (SPANNING_US if p.users > 1 and p.q_len % WGMMA_M else 0.0)
    us = modes.pop(best)
    modes.pop("balance", None)
    if p.users > 1:
        memory_us = (key_bytes(p)[1] + row_bytes(p)) / MEMORY_BYTES
        us *= OF_MEMORY if memory_us > MEMORY_PART * us else 1 / OF_MEMORY
    return [(best, us), *((mode, max(us, other)) for mode, other in modes.items())]
