"""The gradient of broadcast attention: its problems, and which configurations are worth timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Self

from ikbo_jax.problems.attention import AttentionSizes
from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    MAX_BLOCK_Q,
    MAX_BOTH_SUMS,
    STORED_BLOCK_KV,
    AttentionBackwardConfig,
)
from ikbo_jax.problems.attention_backward_cost import small_configs
from ikbo_jax.problems.hopper import BLOCK_K, NUM_SMS, WGMMA_M

#: Most tiles of keys whose parts of d_query are stored apart by default; each part takes twice the
#: memory of the queries.
MAX_PARTS = 8
#: Largest number of a user's rows for which heads of 64 columns store gradients of scores.
MAX_STORED_ROWS = 1024
#: Least number of a user's rows for tiles of 256 of them.
MIN_TALL_ROWS = 256
#: Rows of a user from which on blocks have 32 rows at least, with parts of wider heads than 64.
MIN_WIDER_ROWS = 33


@dataclasses.dataclass(frozen=True)
class AttentionBackwardProblem(AttentionSizes):
    """Sizes of the gradient of a broadcast attention."""

    op: ClassVar[str] = "attention_backward"
    config_type: ClassVar[type] = AttentionBackwardConfig
    products: ClassVar[int] = 5

    @classmethod
    def of(cls, forward: AttentionSizes) -> Self:
        """The gradient of `forward`."""
        return cls(**dataclasses.asdict(forward))

    @property
    def rows(self) -> int:
        """Mean number of query rows of a user and key head."""
        rows = -(-self.batch * self.q_len // max(self.users, 1))
        return rows * (self.q_heads // max(self.kv_heads, 1))

    @property
    def items(self) -> int:
        """Tiles of keys of all users and key heads."""
        return self.users * self.kv_heads * self._tiles

    @property
    def _tiles(self) -> int:
        return -(-self.kv_len // BLOCK_KV)

    def fits(self, config: AttentionBackwardConfig) -> bool:
        """Small blocks and parts are for few rows, stored ones of narrow heads not for many.

        Small gradients have configurations of their own, which the model chooses.
        """
        if small_configs(self):
            return False
        if config.d_query == "parts":
            return self._has_few_rows and self._tiles <= MAX_PARTS
        is_either = self.head_dim <= BLOCK_K and config.d_query in ("launch", "stored")
        if is_either and config.stores_d_scores != (self.rows <= MAX_STORED_ROWS):
            return False
        is_narrow = config.block_q < min(WGMMA_M, MAX_BLOCK_Q.get(self.head_dim, WGMMA_M))
        if is_narrow:
            return self._has_few_rows
        # With users of 8 rows, blocks of 64 took 1.2 to 1.4 times as long as blocks of 16 (H100).
        return self.head_dim > MAX_BOTH_SUMS or self.rows > config.block_q // 2

    def adapt(self, config: AttentionBackwardConfig) -> AttentionBackwardConfig:
        """Splits and the height of tiles depend on the number of users and of their rows."""
        is_tall = config.tall and self.rows >= MIN_TALL_ROWS
        # With 101 users of 40 rows in the mean, H = 128 and 87 keys, blocks of 32 took 24.2 us,
        # those of 16 26.5 (H200).
        is_wide = config.d_query == "parts" and self.head_dim > BLOCK_K
        block_q = max(config.block_q, 32 if is_wide and self.rows >= MIN_WIDER_ROWS else 0)
        splits = self._splits(block_q)[0]
        adapted = dataclasses.replace(config, block_q=block_q, splits=splits, tall=is_tall)
        adapted = _added_by_launch(adapted)
        return config if adapted.illegal_reason(self) else adapted

    @property
    def _has_few_rows(self) -> bool:
        """Whether users have one block of queries."""
        return self.rows <= WGMMA_M

    def candidate_configs(self) -> Iterator[AttentionBackwardConfig]:
        """Yields the legal configurations worth timing, the most promising first."""
        small = small_configs(self)
        yield from small
        has_few = self._has_few_rows and self.head_dim <= MAX_BOTH_SUMS
        found = self._for_few_rows() if has_few else self._for_many_rows()
        for config in dict.fromkeys(found):
            for splits in self._splits(config.block_q):
                candidate = dataclasses.replace(config, splits=splits)
                candidate = _added_by_launch(candidate)
                if candidate not in small and candidate.illegal_reason(self) is None:
                    yield candidate

    def _for_few_rows(self) -> Iterator[AttentionBackwardConfig]:
        """For users with one block of queries; keys of the next tile are loaded early."""
        # On an H100, parts took 0.444 ms with 2,048 users of 8 rows and 256 keys, and 0.227 ms with
        # 512 users of 8 rows and 512 keys, where stored gradients of scores took 0.556 and 0.290.
        has_few_parts = self._tiles <= MAX_PARTS
        for block_q in sorted((16, 32, 64), key=lambda block: block < self.rows):
            for kv_slots, stages in ((2, 2), (1, 2), (2, 3)):
                ways = ("parts", "sum") if has_few_parts else ("stored", "sum")
                for d_query in ways:
                    yield AttentionBackwardConfig(block_q, stages, kv_slots, d_query)

    def _for_many_rows(self) -> Iterator[AttentionBackwardConfig]:
        if self.head_dim > MAX_BOTH_SUMS:
            yield from self._for_wide_heads()
            return
        widest = MAX_BLOCK_Q.get(self.head_dim, WGMMA_M)
        is_narrow = self.head_dim <= BLOCK_K
        # On an H100 with S = 2048 and 64 candidates a user, stored gradients of scores took 1.43 ms
        # at H = 128, and another launch for d_query 1.63 ms. At H = 64, where they save half as
        # many products, these took 0.99 and 0.93 ms; with 2 users of 472 rows and 8 heads, 31 and
        # 36 us.
        launched = self._launched(((128, 3), (128, 2), (96, 4), (64, 5)) if is_narrow else None)
        if is_narrow and self.rows > MAX_STORED_ROWS:
            yield from launched
            yield from self._stored()
        else:
            yield from self._stored()
            yield from launched
        for block_q in (widest, *(x for x in (96, 64, 48, 32) if x < widest)):
            for stages in (2, 3):
                yield AttentionBackwardConfig(block_q, stages)

    def _launched(
        self, rings: tuple[tuple[int, int], ...] | None
    ) -> Iterator[AttentionBackwardConfig]:
        widest = MAX_BLOCK_Q.get(self.head_dim, WGMMA_M)
        for stages in (3, 2):
            for block_kv, kv_stages in rings or ((64, 3), (96, 2), (80, 2)):
                yield AttentionBackwardConfig(widest, stages, 1, "launch", block_kv, kv_stages)

    def _stored(self) -> Iterator[AttentionBackwardConfig]:
        if self.head_dim <= BLOCK_K:
            yield AttentionBackwardConfig(64, 2, 2, "stored", kv_stages=4)
            yield AttentionBackwardConfig(128, 3, 1, "stored", kv_stages=4)
            return
        if self.rows >= MIN_TALL_ROWS:
            yield AttentionBackwardConfig(64, 3, 1, "stored", kv_stages=3, tall=True)
        yield AttentionBackwardConfig(64, 3, 1, "stored", kv_stages=4)

    def _for_wide_heads(self) -> Iterator[AttentionBackwardConfig]:
        launched = [
            AttentionBackwardConfig(block_q, stages, 1, "launch", block_kv, kv_stages)
            for block_q, stages in ((64, 2), (48, 3), (48, 2), (32, 3))
            for block_kv, kv_stages in ((64, 2), (48, 2), (32, 3), (32, 2))
        ]
        launched = [config for config in launched if config.illegal_reason(self) is None]
        yield from launched[:1]  # the default, until stored gradients are measured
        for block_q, stages in ((64, 2), (48, 2), (32, 2)):
            for kv_stages, tall in ((4, False), (3, False), (2, True)):
                yield AttentionBackwardConfig(
                    block_q, stages, 1, "stored", STORED_BLOCK_KV, kv_stages, tall=tall
                )
        yield from launched[1:]

    def _splits(self, block_q: int) -> tuple[int, ...]:
        """Parts of a user's queries: at most two items an SM, of at least four blocks.

        Fewer parts if the SM with most items has no more rows of them. With one user of 10,000
        rows, 8 heads and 1,024 keys, 64 items, two parts took 195 us on an H200 (with the result)
        and four 202; one took 1.34 times as long as four on an H100. With 112 items of 599 rows,
        one part took 47 us, two 54.
        """
        if not 0 < self.items < NUM_SMS:
            return (1,)
        most = min(2 * NUM_SMS // self.items, self.rows // (4 * block_q))
        longest = {x: -(-self.items * x // NUM_SMS) / x for x in range(1, most + 1)}
        splits = min(longest, key=lambda x: (longest[x], x), default=1)
        return (splits, 1) if splits > 1 else (1,)


def _added_by_launch(config: AttentionBackwardConfig) -> AttentionBackwardConfig:
    """`config`, whose parts one launch adds.

    With its parts added by XLA, 8 configurations of 7 sizes took 0.02 to 3.7 us longer (H200), and
    none a shorter time.
    """
    has_parts = config.splits > 1 or config.d_query == "parts"
    return dataclasses.replace(config, adds_by_launch=has_parts)
