"""The gradient of broadcast attention: its problems, and which configurations are worth timing."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from ikbo_jax.problems.attention import AttentionSizes
from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    MAX_BLOCK_Q,
    MAX_BOTH_SUMS,
    STORED_BLOCK_KV,
    AttentionBackwardConfig,
)
from ikbo_jax.problems.hopper import BLOCK_K, NUM_SMS, TILE_ROWS, WGMMA_M, column_blocks
from ikbo_jax.problems.problem import Ranked

#: Most tiles of keys whose parts of d_query are stored apart by default; each part takes twice the
#: memory of the queries.
MAX_PARTS = 8
# Kernels of gradients by CUPTI on an H100, 2026-11-27 (`docs/experiments/attention_gradient.md`).
#: Most bytes of gradients of scores that L2 holds until they are multiplied. At H = 64, 17 MB took
#: 0.93 of the time of another launch for d_query, 19 MB 1.00, 50 MB 1.18 and 537 MB 1.31.
MAX_CACHED_BYTES = 20 * 10**6
#: Most rows of a user whose gradients of scores are fewer bytes than the keys and values that
#: another launch reads again: with 8 rows of 64 columns, stored ones took 0.94 of its time; with 24
#: rows 0.99, with 40 1.14.
MAX_ROWS_OF_STORED = 16
#: Rows of a user from which on blocks have `MAX_BLOCK_Q` rows, and heads wider than 64 columns
#: store gradients of scores. With 240 and 563 rows of 64 columns, blocks of 128 rows took 1.07 and
#: 0.97 of the time of blocks of 64; with 240 and 512 rows of 128 columns, another launch took 0.93
#: and 1.04 of the time of stored gradients.
MIN_MANY_ROWS = 384
#: Rows of a user from which on its keys need no second slot: with 128, 563 and 1,024 rows of
#: 64 columns, one slot took 1.25, 1.05 and 1.03 of the time of two; with 4,096, the same.
MIN_ROWS_OF_ONE_SLOT = 2048
#: Rows of a user from which on wide heads have four stages of keys.
MIN_DEEP_ROWS = 256
#: A user with this many rows needs blocks of at least 32. With 40 rows in the mean, blocks of 16
#: took 1.09 times as long as blocks of 32: at H = 64 with 2,048 keys, stored (H100), and at H = 128
#: with 87 keys, in parts (H200).
MIN_WIDER_ROWS = 33


@dataclasses.dataclass(frozen=True)
class AttentionBackwardProblem(AttentionSizes):
    """Sizes of the gradient of a broadcast attention, whose scores may be capped."""

    op: ClassVar[str] = "attention_backward"
    config_type: ClassVar[type] = AttentionBackwardConfig
    products: ClassVar[int] = 5

    has_logit_cap: bool = False

    @property
    def rows(self) -> int:
        """Mean number of query rows of a user and key head."""
        rows = -(-self.batch * self.q_len // max(self.users, 1))
        return rows * (self.q_heads // max(self.kv_heads, 1))

    @property
    def items(self) -> int:
        """Number of tiles of keys of all users and key heads."""
        return self.users * self.kv_heads * self._tiles

    @property
    def _tiles(self) -> int:
        return -(-self.kv_len // BLOCK_KV)

    @property
    def _stores_d_scores(self) -> bool:
        """Whether gradients of scores are stored, rather than computed again by another launch."""
        if self.head_dim > MAX_BOTH_SUMS:
            return True
        num_bytes = 2 * self.batch * self.q_len * self.q_heads * self.kv_len
        if num_bytes <= MAX_CACHED_BYTES:
            return True
        if self.head_dim <= BLOCK_K:
            return self.rows <= MAX_ROWS_OF_STORED
        return self._has_few_rows or self.rows >= MIN_MANY_ROWS

    @property
    def _has_few_rows(self) -> bool:
        """Whether users have one block of queries."""
        return self.rows <= WGMMA_M

    def rank(self) -> Iterator[Ranked]:
        """Yields the legal configurations, by a model of small gradients, then by rules."""
        small = small_configs(self)
        yield from (Ranked(estimated_us(self, config), config) for config in small)
        if self.head_dim > MAX_BOTH_SUMS:
            found = self._for_wide_heads()
        else:
            found = self._for_few_rows() if self._has_few_rows else self._for_many_rows()
        for config in dict.fromkeys(found):
            for splits in self._splits(config.block_q):
                candidate = dataclasses.replace(config, splits=splits)
                if candidate not in small and candidate.illegal_reason(self) is None:
                    yield Ranked(None, candidate)

    def _for_few_rows(self) -> Iterator[AttentionBackwardConfig]:
        """Yields configurations for users with one block, which load the next tile's keys early."""
        # On an H100, parts took 0.444 ms with 2,048 users of 8 rows and 256 keys, and 0.227 ms with
        # 512 users of 8 rows and 512 keys, where stored gradients of scores took 0.556 and 0.290.
        has_few_parts = self._tiles <= MAX_PARTS
        if not has_few_parts and not self._stores_d_scores:
            yield from self._launched()
        # Blocks of 32 rows and three stages took 0.97 to 1.00 of the time of blocks of 64 with 40,
        # 54 and 64 rows of a user.
        for block_q in (16, 32, 64) if self.rows < MIN_WIDER_ROWS else (32, 64, 16):
            # Of blocks of 16 rows, the tuner preferred two stages on both cards.
            stages_of_two = (2, 3) if block_q == 16 else (3, 2)
            for kv_slots, stages in *((2, x) for x in stages_of_two), (1, 2):
                d_query = "parts" if has_few_parts else "stored"
                yield AttentionBackwardConfig(block_q, stages, kv_slots, d_query)
        if not has_few_parts and self._stores_d_scores:  # which may be too large to store
            yield from self._launched()

    def _for_many_rows(self) -> Iterator[AttentionBackwardConfig]:
        ways = (self._stored(), self._launched())
        for configs in ways if self._stores_d_scores else reversed(ways):
            yield from configs

    def _launched(self) -> Iterator[AttentionBackwardConfig]:
        """Yields configurations of a second launch for d_query, which load keys early."""
        # (block_q, stages, kv_slots), and (block_kv, kv_stages). At H = 128 there is no room for
        # three stages beside two slots.
        if self.head_dim <= BLOCK_K:
            few, many = (64 if self.rows > 32 else 32, 3, 2), (128, 2, 2)
            blocks = [many, few] if self.rows >= MIN_MANY_ROWS else [few, many]
            blocks.insert(0 if self.rows >= MIN_ROWS_OF_ONE_SLOT else 2, (128, 3, 1))
            rings = ((128, 3), (96, 4), (64, 5))
        else:
            widest = MAX_BLOCK_Q.get(self.head_dim, WGMMA_M)
            blocks = [(widest, 2, 2), (widest, 3, 1)]
            blocks = blocks[::-1] if self.rows >= MIN_ROWS_OF_ONE_SLOT else blocks
            rings = ((64, 3), (96, 2), (80, 2))
        for block in blocks:
            for block_kv, kv_stages in rings:
                yield AttentionBackwardConfig(*block, "launch", block_kv, kv_stages)

    def _stored(self) -> Iterator[AttentionBackwardConfig]:
        if self.head_dim <= BLOCK_K:
            # With 128 and 256 rows, blocks of 64 took 0.81 and 0.95 of the time of blocks of 128;
            # with 472, 1.08 (H100).
            configs = [
                AttentionBackwardConfig(64, 2, 2, "stored", kv_stages=4),
                AttentionBackwardConfig(128, 3, 1, "stored", kv_stages=4),
            ]
            yield from configs[::-1] if self.rows >= MIN_MANY_ROWS else configs
            return
        yield AttentionBackwardConfig(64, 3, 1, "stored", kv_stages=4)

    def _for_wide_heads(self) -> Iterator[AttentionBackwardConfig]:
        # With 14 sizes on an H100, stored gradients of scores took 0.67 to 0.85 of the time of
        # launches that compute them again (`docs/experiments/attention_gradient.md`).
        blocks = [(64, 2), (48, 2), (32, 3), (32, 2)]
        if self._has_few_rows:
            # With 8 and 40 rows of 192 columns, blocks of 32 took 0.92 and 0.98 of the time of
            # blocks of 64; of 256 columns, 0.97 and 1.02 of the time of blocks of 48.
            of_256 = (48, 2) if self.rows >= MIN_WIDER_ROWS else (32, 2)
            blocks.insert(0, (32, 3) if self.head_dim == 192 else of_256)
        # With 240 rows, four stages of keys took 1.03 of the time of three, with 300 rows 0.97.
        depths = (4, 3, 2) if self.rows >= MIN_DEEP_ROWS else (3, 4, 2)
        for block_q, stages in dict.fromkeys(blocks):
            for depth in depths:
                yield AttentionBackwardConfig(block_q, stages, 1, "stored", STORED_BLOCK_KV, depth)

    def _splits(self, block_q: int) -> tuple[int, ...]:
        """Divides a user's queries into parts: at most two items an SM, of at least four blocks.

        Fewer parts if the SM with most items has no more rows of them: one user of 10,000 rows, 64
        items, took 195 us in two parts on an H200 and 202 in four.
        """
        if not 0 < self.items < NUM_SMS:
            return (1,)
        most = min(2 * NUM_SMS // self.items, self.rows // (4 * block_q))
        longest = {x: -(-self.items * x // NUM_SMS) / x for x in range(1, most + 1)}
        splits = min(longest, key=lambda x: (longest[x], x), default=1)
        return (splits, 1) if splits > 1 else (1,)


# A cost model of *small* gradients: a CTA has one item, and launches take most of the time. It says
# into how many parts they are cut.

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
            yield AttentionBackwardConfig(block_q, 2, 1, "parts", splits=splits)
            if block_q >= WGMMA_M:
                yield AttentionBackwardConfig(block_q, 3, 1, "stored", STORED_BLOCK_KV, 4, splits)


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
