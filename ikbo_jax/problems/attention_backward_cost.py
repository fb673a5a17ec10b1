"""A cost model of attention's small gradients: into how many parts they are cut.

In a *small* gradient a CTA has one item, and most of the time is what launches take.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    MAX_BLOCK_Q,
    MAX_BOTH_SUMS,
    STORED_BLOCK_KV,
    AttentionBackwardConfig,
)
from ikbo_jax.problems.hopper import NUM_SMS, TILE_ROWS, WGMMA_M, column_blocks

#: Most blocks of queries for each SM of a small gradient. It bounds the memory of parts: 528 blocks
#: and a partial one for each item, of 32 KiB in f32, and 132 tiles of 128 KiB, 37 MiB in all.
MAX_SMALL_BLOCKS = 4
#: Small gradients' configurations that the tuner times.
MAX_SMALL_CANDIDATES = 8

# Times are in us, of the sum of kernels by CUPTI; read off 45 configurations of 13 sizes (H200,
# median of 10, 2026-11-26), of which 42 are within 1.5 us. The choices take at most 1.03 times as
# long as the fastest one timed (`tests/tuning/test_ranked_replay.py`).
#: The launch of d_key and d_value, by column blocks. At H = 128 with 1, 4 and 8 blocks it took 7.5,
#: 14.2 and 23.0 with parts of d_query and 6.3, 10.7 and 16.3 with stored gradients of scores.
LAUNCH_US = {1: 4.1, 2: 5.2}
#: A block of queries, by column blocks and `block_q`, with parts of d_query, and with stored
#: gradients of scores. Of 16 rows at H = 128, a guess.
PARTS_BLOCK_US = {1: {16: 0.3, 32: 0.65, 64: 1.45, 128: 2.55}, 2: {16: 0.7, 32: 1.35, 64: 2.25}}
STORED_BLOCK_US = {1: {64: 1.1, 128: 2.0}, 2: {64: 1.43}}
#: What each CTA adds to it, by column blocks, if it writes f32 gradients of its part of rows: with
#: 18, 72 and 132 CTAs of H = 128, 7.5, 8.6 and, less two blocks, 10.5.
WRITE_US = {1: 0.011, 2: 0.022}
#: The launch that adds parts, each part that a thread adds in sequence, and each 10**6 bytes. With
#: 7, 14 and 27 parts it took 2.0, 2.7 and 4.2; with 0.6, 2.4, 4.7, 9.1 and 26 MB 1.5, 1.9, 2.6, 2.7
#: and 5.3.
ADD_US, ADD_PART_US, ADD_MEGABYTE_US = 0.95, 0.12, 0.16
#: The launch that multiplies stored gradients of scores, and a block of 64 keys, by column blocks:
#: 4.0, 4.9, 7.4 and 9.9 with 107, 273, 793 and 1,362 keys of 128 columns.
MULTIPLY_US, MULTIPLY_BLOCK_US = {1: 2.9, 2: 3.3}, {1: 0.18, 2: 0.3}


@functools.lru_cache(maxsize=1024)
def small_configs(problem: Any) -> tuple[AttentionBackwardConfig, ...]:
    """Lists configurations of a small gradient, the fastest first; none if it is not small."""
    has_kernel = problem.head_dim in MAX_BLOCK_Q and problem.head_dim <= MAX_BOTH_SUMS
    if not has_kernel or not 0 < problem.items < NUM_SMS or not problem.rows:
        return ()
    found = [x for x in _all(problem) if x.illegal_reason(problem) is None]
    found.sort(key=lambda config: estimated_us(problem, config))
    return tuple(found[:MAX_SMALL_CANDIDATES])


def _all(problem: Any) -> Iterator[AttentionBackwardConfig]:
    most = NUM_SMS // problem.items
    for block_q in (16, 32, WGMMA_M, 2 * WGMMA_M):
        if block_q > MAX_BLOCK_Q[problem.head_dim]:
            continue
        mean, longest = (math.ceil(rows / block_q) for rows in _rows(problem))
        if problem.items * mean > MAX_SMALL_BLOCKS * NUM_SMS:
            continue
        # Narrow blocks were timed where a part has one.
        least = longest if block_q < WGMMA_M else 1
        for splits in range(least, min(most, longest) + 1):
            yield AttentionBackwardConfig(
                block_q, 2, 1, "parts", splits=splits, adds_by_launch=True
            )
            if block_q >= WGMMA_M:
                yield AttentionBackwardConfig(
                    *(block_q, 3, 1, "stored", STORED_BLOCK_KV, 4, splits),
                    adds_by_launch=splits > 1,
                )


def _rows(problem: Any) -> tuple[float, float]:
    """Returns a user's mean rows, and a standard deviation more if candidates are random."""
    if problem.users == 1:
        return problem.rows, problem.rows
    return problem.rows, problem.rows * (1 + math.sqrt(problem.users / problem.batch))


def estimated_us(problem: Any, config: AttentionBackwardConfig) -> float:
    """Estimates the time of a small gradient's kernels, without the kernel of lse and delta.

    The mean of two estimates: users with equally many candidates, and with random numbers of them.
    """
    width = column_blocks(problem.head_dim)
    of_block = (STORED_BLOCK_US if config.stores_d_scores else PARTS_BLOCK_US)[width]
    mean, longest = (math.ceil(x / (config.block_q * config.splits)) for x in _rows(problem))
    us = LAUNCH_US[width] + of_block[config.block_q] * (mean + longest) / 2
    tiles, count, size = -(-problem.kv_len // BLOCK_KV), 0, 0
    row_size = 4 * problem.head_dim
    if config.splits > 1:
        us += WRITE_US[width] * problem.items * config.splits
        count = config.splits
        size = 2 * row_size * config.splits * problem.users * problem.kv_len * problem.kv_heads
    if config.stores_d_scores:
        per_tile = MULTIPLY_BLOCK_US[width] * -(-problem.kv_len // STORED_BLOCK_KV)
        of_queries = problem.users * problem.kv_heads * -(-problem.rows // TILE_ROWS)
        us += MULTIPLY_US[width] + per_tile * -(-of_queries // NUM_SMS)
    else:
        count = max(count, tiles)
        size += row_size * tiles * problem.batch * problem.q_len * problem.q_heads
    if count:
        us += ADD_US + ADD_PART_US * count + ADD_MEGABYTE_US * size / 1e6
    return us
