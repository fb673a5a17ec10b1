"""Broadcast attention: its problems, and the configurations of its kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from ikbo_jax.problems import attention_tile_cost, few_queries_cost, hopper, memory
from ikbo_jax.problems.few_queries import FewQueriesConfig
from ikbo_jax.problems.flash import FlashConfig, why_not_users
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.problem import (
    Config,
    Problem,
    attention_distance,
    attention_sizes,
    octave,
    sizes_from_json,
    typed,
)

#: Largest block_kv by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: accumulator, scores and probabilities exceed a consumer thread's 240 registers and spill.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
HEAD_DIMS = tuple(MAX_BLOCK_KV)
#: Words of a descriptor in shared memory: words that both consumers read, and three per consumer.
ITEM_WORDS = 16
#: Words of a consumer's flags: whether any flag is set, and a flag for each group of consecutive
#: tiles.
FLAG_WORDS = 128
#: Most keys with which a tile is so short that the queries of several are in flight; see
#: `AttentionProblem._tile_configs`.
SHORT_KEYS = 256
#: Configurations of the kernel for few queries that are worth timing.
MOST_FEW_QUERIES = 8


class AttentionShared(NamedTuple):
    """Shared memory and barriers of the attention kernel; shapes follow the slot."""

    items: Any  # ring of descriptors, filled only; one more than slots: the producer's `_save`
    query: Any  # ring of [2, column blocks, 64, 64]
    key: Any  # ring of [column blocks, block_kv, 64]
    value: Any  # likewise
    flags: Any  # [2, FLAG_WORDS] int32
    flags_ready: Any
    staging: Any  # [2, 64, columns], only under interpretation
    row_value_staging: Any  # [2, 64] f32, only under interpretation


@dataclasses.dataclass(frozen=True)
class AttentionConfig(FlashConfig):
    """Tuning parameters of the attention kernel, besides the rings.

    Attributes:
      chunk: number of consecutive tiles of one head in the schedule, which find their user's keys
        in L2.
      reuse: whether a CTA processes neighbouring tiles, ignoring `chunk`, and keeps keys and values
        in shared memory between tiles of the same user; needs all keys to fit the stages.
      balance: whether tiles are split where users end, if T is an odd multiple of 64. A tile that
        holds two candidates of different users is then two work items instead of one long one.
      early_scores: whether the scores of a pass's second block are computed while the preceding
        pass stores its output; takes effect if T is a multiple of 64, H at most 128 and q_slots 2
        or 3.
      late_turns: whether a consumer warpgroup lets the other one issue its products only after its
        own scores have arrived, and not already after it has issued its own products; so the two
        compute exponentials at different times.
      one_user: whether tiles are cut where users end, by a launch that lists them; so every tile
        has one pass. Tiles with many keys come first. Ignores `chunk` and `balance`.
    """

    chunk: int = 32
    reuse: bool = False
    balance: bool = False
    early_scores: bool = False
    late_turns: bool = False
    one_user: bool = False

    def shared(self, head_dim: int) -> AttentionShared:
        """Shared memory and barriers of one CTA."""
        return AttentionShared(
            items=memory.descriptors(self.q_slots, ITEM_WORDS, spare=1),
            flags=memory.Words((NUM_CONSUMERS, FLAG_WORDS)),
            # An array, so that it can be indexed; only element 0 is used.
            flags_ready=memory.Barriers(2, NUM_CONSUMERS),
            row_value_staging=memory.Staging((NUM_CONSUMERS, WGMMA_M), "float32"),
            **self.rings(head_dim),
        )

    def illegal_reason(self, problem: AttentionProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := self.why_not_tiles(problem, MAX_BLOCK_KV):
            return reason
        if reason := why_not_users(problem):
            return reason
        if self.chunk < 1:
            return f"chunk must be at least 1, but is {self.chunk}"
        stages = min(self.k_stages, self.v_stages)
        if self.reuse and problem.kv_len > stages * self.block_kv:
            return (
                f"reuse needs all keys to fit k_stages and v_stages, but S={problem.kv_len} and "
                f"{stages} stages hold {stages * self.block_kv}"
            )
        if self.reuse and self.one_user:
            return f"a list of tiles does not support reuse, but config is {self}"
        return hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)


@dataclasses.dataclass(frozen=True)
class AttentionSizes(Problem):
    """Sizes of a broadcast attention, or of its gradient.

    Attributes:
      products: matrix products of a key by a query, in either direction, that the op needs.
      batch: B, number of candidates.
      users: U, number of users.
      q_len: T, queries of a candidate.
      kv_len: S, keys of a user.
      q_heads: N, number of query heads.
      kv_heads: K, number of key heads; divides N.
      head_dim: H, head width.
      dtype: name of the inputs' dtype.
    """

    products: ClassVar[int]

    batch: int
    users: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def useful_flops(self) -> int:
        """Two FLOPs per multiply-add of the products, all keys valid; no padding, no softmax."""
        pairs = self.batch * self.q_len * self.q_heads * self.kv_len
        return 2 * self.products * pairs * self.head_dim

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        dtype = typed(fields.get("dtype"), str, "dtype")
        return cls(**sizes_from_json(cls, fields), dtype=dtype)

    def describe(self) -> str:
        p = self
        return (
            f"B={p.batch} U={p.users} T={p.q_len} S={p.kv_len} N={p.q_heads} K={p.kv_heads} "
            f"H={p.head_dim} {p.dtype}"
        )

    def shape_class(self) -> str:
        """H exactly, every other size by octave."""
        p = self
        return (
            f"{p.op} h={p.head_dim} s=2^{octave(p.kv_len)} t=2^{octave(p.q_len)} "
            f"b=2^{octave(p.batch)} ratio=2^{octave(p.batch / max(p.users, 1))} "
            f"n=2^{octave(p.q_heads)} k=2^{octave(p.kv_heads)}"
        )

    def distance(self, other: AttentionSizes) -> float:
        """Infinite if H, and so the tiles, differ; see `ATTENTION_DISTANCE_WEIGHTS`."""
        if self.head_dim != other.head_dim:
            return math.inf
        return attention_distance(self._sizes(), other._sizes())

    def _sizes(self) -> dict[str, float]:
        return attention_sizes(self, self.q_len, self.kv_len, self.batch * self.q_len, self.users)


@dataclasses.dataclass(frozen=True)
class AttentionProblem(AttentionSizes):
    """Sizes of a broadcast attention, forward."""

    op: ClassVar[str] = "attention"
    config_type: ClassVar[type] = AttentionConfig
    products: ClassVar[int] = 2

    @classmethod
    def config_type_of(cls, fields: Mapping[str, Any]) -> type[Config]:
        return FewQueriesConfig if "tile_rows" in fields else AttentionConfig

    def candidate_configs(self) -> Iterator[AttentionConfig | FewQueriesConfig]:
        """Yields the legal configurations worth timing, the most promising first."""
        for_few = few_queries_cost.candidate_configs(self)[:MOST_FEW_QUERIES]
        if few_queries_cost.is_preferred(self):
            yield from for_few
        yield from self._tile_configs()
        if not few_queries_cost.is_preferred(self):
            yield from for_few

    def fits(self, config: Config) -> bool:
        """False if the other kernel is preferred, if splits were chosen for another problem, or if
        the rings are those of long sequences, but this problem's are short."""
        if not isinstance(config, AttentionConfig) or few_queries_cost.is_preferred(self):
            return False
        if self.kv_len > SHORT_KEYS:
            return True
        best = next(self._tile_configs(), None)
        return best is None or config.q_slots >= best.q_slots

    def adapt(self, config: Any) -> Any:
        """With tiles that are cut at users, or not, as the cost model says."""
        if not isinstance(config, AttentionConfig) or config.one_user or config.balance:
            return config
        return self._cut(config, attention_tile_cost.tile_mode(self)[0])

    def _cut(self, config: AttentionConfig, mode: str) -> AttentionConfig:
        """A configuration with one of the modes of `attention_tile_cost.tile_mode`."""
        if mode == "one_user":
            return dataclasses.replace(config, one_user=True, reuse=False)
        if mode == "balance":
            return dataclasses.replace(config, balance=True, late_turns=True)
        return config

    def _tile_configs(self) -> Iterator[AttentionConfig]:
        """Yields the legal configurations of the kernel of tiles, the most promising first."""
        plain = list(self._spanning_configs())
        if not plain:
            return
        best = attention_tile_cost.tile_mode(self)[0]
        modes = ("", "one_user") if self.users > 1 else ("",)
        for mode in sorted({best, *modes}, key=lambda mode: mode != best):
            # Of the ways that seem slower, two configurations are worth timing.
            configs = [self._cut(config, mode) for config in plain]
            yield from list(dict.fromkeys(configs))[: None if mode == best else 2]

    def _spanning_configs(self) -> Iterator[AttentionConfig]:
        """Yields the legal configurations of tiles that span users."""
        # (k_stages, v_stages, q_slots). Three query slots were fastest up to 256 keys: on an H200
        # 0.053 ms instead of 0.076 ms at S = 128, but 0.134 ms instead of 0.123 ms at S = 512.
        rings = [(2, 3, 2), (3, 3, 1), (3, 3, 2), (4, 4, 1), (2, 2, 3), (2, 2, 2), (2, 2, 1)]
        blocks = [128, 64]
        if self.kv_len <= SHORT_KEYS:
            rings.sort(key=lambda ring: ring != (2, 2, 3))
            if self.head_dim > 192:
                # Two query slots leave room for blocks of 32 keys: on an H100 209 instead of 314
                # us at S = 76, 77 instead of 101 us at S = 128, 14.6 instead of 21.7 us at S = 64.
                blocks, rings = [32, *blocks], [(3, 3, 2), *rings]
        for block_kv in blocks:
            for k_stages, v_stages, q_slots in rings:
                config = AttentionConfig(block_kv, k_stages, v_stages, q_slots)
                # reuse: 0.074 ms instead of 0.082 ms at S = 256 and 64 candidates a user in one
                # measurement, 0.086 ms instead of 0.089 ms in another.
                for variant in (config, dataclasses.replace(config, reuse=True)):
                    if variant.illegal_reason(self) is None:
                        yield variant
