"""Broadcast attention: its problems, and the configurations of its kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

from ikbo_jax.problems import attention_tile_cost, few_queries_cost, hopper, memory
from ikbo_jax.problems.few_queries import FewQueriesConfig
from ikbo_jax.problems.flash import MAX_PAGED_WIDTH, FlashConfig, why_not_pages, why_not_users
from ikbo_jax.problems.hopper import NUM_CONSUMERS
from ikbo_jax.problems.problem import (
    Config,
    Problem,
    Ranked,
)

#: Largest block_kv by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: accumulator, scores and probabilities exceed a consumer thread's 240 registers and spill.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
HEAD_DIMS = tuple(MAX_BLOCK_KV)
#: Widest heads whose kernel takes a cap with `reuse`: it spills 32 bytes at H = 256.
MAX_CAPPED_REUSE_WIDTH = 128
#: Words of a descriptor in shared memory: words that both consumers read, and three per consumer.
ITEM_WORDS = 16
#: Words of a consumer's flags: whether any flag is set, and a flag for each group of consecutive
#: tiles.
FLAG_WORDS = 128
#: Up to this number of keys, queries of several tiles are in flight (`_spanning_configs`).
SHORT_KEYS = 256
#: Least keys with late turns, up to `SHORT_KEYS`; most keys with early scores, beyond `SHORT_KEYS`.
LATE_REUSE_KEYS, EARLY_SCORES_KEYS = 181, 724
#: Configurations of the kernel for few queries that are worth timing.
MOST_FEW_QUERIES = 8


@dataclasses.dataclass(frozen=True)
class AttentionConfig(FlashConfig):
    """Tuning parameters of the attention kernel, besides the rings.

    Attributes:
      reuse: whether a CTA processes neighbouring tiles, and keeps keys and values in shared memory
        between tiles of the same user; needs all keys to fit the stages.
      balance: whether tiles are split where users end, if T is an odd multiple of 64.
      early_scores: whether the scores of a pass's second block are computed while the preceding
        pass stores its output; takes effect if T is a multiple of 64, H at most 128 and q_slots 2
        or 3.
      late_turns: whether a consumer warpgroup lets the other one issue its products only after its
        own scores have arrived, so the two compute exponentials at different times.
      one_user: whether tiles are cut where users end, by a launch that lists them; so every tile
        has one pass. Tiles with many keys come first. Ignores `balance`.
    """

    reuse: bool = False
    balance: bool = False
    early_scores: bool = False
    late_turns: bool = False
    one_user: bool = False

    def shared(self, head_dim: int, *, loads_own: bool = False) -> Any:
        """`loads_own`: whether own keys and values of a pass are loaded into a stage of values."""
        return memory.shared(
            items=memory.descriptors(self.q_slots, ITEM_WORDS, spare=1),  # and one of `_save`
            **self.rings(head_dim, 1 + loads_own),
            flags=memory.Words((NUM_CONSUMERS, FLAG_WORDS)),
            # An array, so that it can be indexed; only element 0 is used.
            flags_ready=memory.Barriers(2, NUM_CONSUMERS),
        )

    @hopper.first_reason
    def illegal_reason(self, problem: AttentionProblem) -> Iterator[str | None]:
        yield self.why_not_tiles(problem, MAX_BLOCK_KV)
        yield why_not_users(problem)
        yield why_not_pages(problem, self.block_kv)
        if problem.page and problem.head_dim > MAX_PAGED_WIDTH:
            yield f"H={problem.head_dim} takes no pages of keys, H={MAX_PAGED_WIDTH} does"
        stages = min(self.k_stages, self.v_stages)
        if self.reuse and problem.kv_len > stages * self.block_kv:
            yield (
                f"reuse needs all keys to fit k_stages and v_stages, but S={problem.kv_len} and "
                f"{stages} stages hold {stages * self.block_kv}"
            )
        if self.reuse and problem.has_logit_cap and problem.head_dim > MAX_CAPPED_REUSE_WIDTH:
            yield f"reuse takes no logit_cap at H={problem.head_dim}"
        if self.reuse and self.one_user:
            yield f"a list of tiles does not support reuse, but config is {self}"
        yield hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)

    def own_stages(self, q_len: int) -> hopper.OwnStages | None:
        """Chooses the stages of own tokens; None: they do not fit beside one of the pass before."""
        own = hopper.OwnStages.choose(hopper.TILE_ROWS, 1, q_len, self)
        return own if own and own.number < self.v_stages and not self.reuse else None

    def takes_own_tokens(self, problem: AttentionProblem) -> bool:
        """Whether the kernel merges a candidate's own token, without spilling."""
        own = self.own_stages(problem.q_len)
        if own is None or problem.has_logit_cap:
            return False
        # 128 candidates of a tile spill 952 bytes at H = 128.
        return problem.head_dim <= 128 and own.columns * problem.head_dim <= 64 * 128


@dataclasses.dataclass(frozen=True)
class AttentionSizes(Problem):
    """Sizes of a broadcast attention, or of its gradient.

    Attributes:
      products: matrix products of a key by a query, in either direction, that the op needs.
      q_len: T, queries of a candidate.
      kv_len: S, keys of a user.
      q_heads: N, number of query heads.
      kv_heads: K, number of key heads; divides N.
      head_dim: H, head width.
      dtype: name of the inputs' dtype.
    """

    products: ClassVar[int]
    request: ClassVar[tuple[str, ...]] = ("batch", "users", "q_len", "kv_len", "is_sorted")

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
        """Counts two FLOPs per multiply-add of the products, all keys valid, without padding."""
        pairs = self.batch * self.q_len * self.q_heads * self.kv_len
        return 2 * self.products * pairs * self.head_dim

    def describe(self) -> str:
        p = self
        return (
            f"B={p.batch} U={p.users} T={p.q_len} S={p.kv_len} N={p.q_heads} K={p.kv_heads} "
            f"H={p.head_dim} {p.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class AttentionProblem(AttentionSizes):
    """Sizes of a broadcast attention, forward.

    `is_sorted`: candidates of a user are known to be neighbours; `has_ranges`: each has its keys.
    `page`: positions of a page of keys; 0: the keys of a user are in one array. `has_bias`: a bias
    is added to the scores.
    """

    op: ClassVar[str] = "attention"
    config_type: ClassVar[type] = AttentionConfig
    products: ClassVar[int] = 2

    is_sorted: bool = True
    has_ranges: bool = False
    has_logit_cap: bool = False
    page: int = 0
    has_bias: bool = False

    def describe(self) -> str:
        words = {
            "key_value_ranges": self.has_ranges,
            "logit_cap": self.has_logit_cap,
            f"pages of {self.page}": self.page > 0,
            "bias": self.has_bias,
        }
        return " ".join((super().describe(), *(word for word, has in words.items() if has)))

    def why_not_scores(self, *, takes_ranges: bool = False) -> str | None:
        """Why a kernel, which may take ranges, cannot run a problem with them."""
        if self.has_bias:
            return "a bias runs in XLA"
        if self.has_ranges and not takes_ranges:
            return "key_value_ranges need the kernel for few queries"
        return None

    @classmethod
    def config_type_of(cls, fields: Mapping[str, Any]) -> type[Config]:
        return FewQueriesConfig if "tile_rows" in fields else AttentionConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields the legal configurations of both kernels, by the time that their models give.

        Which kernel is chosen does not depend on the order of the index.
        """
        few = few_queries_cost.ranked_configs(self)[:MOST_FEW_QUERIES]
        ways = sorted((*few, *self._tile_configs()), key=lambda way: cast(float, way.us))
        if not self.is_sorted and ways and isinstance(ways[0].config, FewQueriesConfig):
            config = few_queries_cost.config_of_unsorted(self)
            ways = [Ranked(ways[0].us, config), *(way for way in ways if way.config != config)]
        yield from ways

    def _tile_configs(self) -> Iterator[Ranked]:
        """Yields the legal configurations of the kernel of tiles, the most promising first."""
        plain = list(self._spanning_configs())
        if not plain:
            return
        for number, (mode, us) in enumerate(attention_tile_cost.tile_modes(self)):
            # Modes with a higher estimate than the first have two configurations worth timing.
            configs = dict.fromkeys(_cut(config, mode) for config in plain)
            for config in itertools.islice(configs, 2 if number else None):
                yield Ranked(us, config)

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
        elif self.head_dim == 64:
            rings.insert(0, (4, 4, 2))  # the fastest of 4,096 keys on an H200
        for block_kv, ring, switches in itertools.product(blocks, rings, self._switches()):
            config = AttentionConfig(block_kv, *ring, **switches)
            if config.illegal_reason(self) is None:
                yield config

    def _switches(self) -> list[dict[str, bool]]:
        """Lists further parameters worth timing, the most promising first."""
        # reuse: 0.074 ms instead of 0.082 ms at S = 256 and 64 candidates a user in one
        # measurement, 0.086 ms instead of 0.089 ms in another (H = 128).
        found: list[dict[str, bool]] = [{}, {"reuse": True}]
        if self.head_dim != 128:
            return found
        # Of H = 128, the tuner's results on an H200 with 32 users, T = 64 and 128 to 1,024 keys.
        if self.kv_len <= SHORT_KEYS:
            is_late = self.kv_len > LATE_REUSE_KEYS
            return [{"reuse": True, "late_turns": is_late}, *found]
        both = {"early_scores": True, "late_turns": True}
        return [both, *found] if self.kv_len <= EARLY_SCORES_KEYS else found


def _cut(config: AttentionConfig, mode: str) -> AttentionConfig:
    """Returns the configuration with a mode of `attention_tile_cost.tile_modes`."""
    if mode == "one_user":
        return dataclasses.replace(config, one_user=True, reuse=False)
    if mode == "balance":
        return dataclasses.replace(config, balance=True, late_turns=True)
    return config
