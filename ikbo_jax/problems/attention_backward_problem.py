"""The gradient of broadcast attention: its problems, and which configurations are worth timing."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from ikbo_jax.problems.attention import AttentionSizes
from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    MAX_BLOCK_Q,
    MAX_BOTH_SUMS,
    STORED_BLOCK_KV,
    AttentionBackwardConfig,
)
from ikbo_jax.problems.attention_backward_cost import estimated_us, small_configs
from ikbo_jax.problems.hopper import BLOCK_K, NUM_SMS, TILE_ROWS, WGMMA_M
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
#: Least number of a user's rows for tiles of 256 of them.
MIN_TALL_ROWS = 256
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
                candidate = _added_by_launch(candidate)
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
        tall = AttentionBackwardConfig(64, 3, 1, "stored", kv_stages=3, tall=True)
        plain = AttentionBackwardConfig(64, 3, 1, "stored", kv_stages=4)
        tiles = self.users * self.kv_heads * -(-self.rows // (2 * TILE_ROWS))
        is_tall = self.rows >= MIN_TALL_ROWS and tiles >= NUM_SMS
        yield from (tall, plain) if is_tall else (plain, tall)

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
        first, second = (4, 3) if self.rows >= MIN_TALL_ROWS else (3, 4)
        for block_q, stages in dict.fromkeys(blocks):
            for kv_stages, tall in ((first, False), (second, False), (2, True)):
                yield AttentionBackwardConfig(
                    block_q, stages, 1, "stored", STORED_BLOCK_KV, kv_stages, tall=tall
                )
        for block_q, stages in ((64, 2), (48, 2), (32, 3)):
            for block_kv, kv_stages in ((48, 2), (32, 3)):
                yield AttentionBackwardConfig(block_q, stages, 1, "launch", block_kv, kv_stages)

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


def _added_by_launch(config: AttentionBackwardConfig) -> AttentionBackwardConfig:
    """Makes one launch add the parts of `config`; XLA took up to 3.7 us longer (8 cases, H200)."""
    has_parts = config.splits > 1 or config.d_query == "parts"
    return dataclasses.replace(config, adds_by_launch=has_parts)
