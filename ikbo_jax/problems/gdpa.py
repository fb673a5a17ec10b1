"""Generalised dot-product attention: its problems, and configurations of its forward kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory, short_gdpa
from ikbo_jax.problems.attention import AttentionConfig
from ikbo_jax.problems.flash import FlashConfig
from ikbo_jax.problems.gdpa_sizes import SOFTMAX, GdpaSizes
from ikbo_jax.problems.hopper import NUM_SMS, TILE_ROWS, WGMMA_K
from ikbo_jax.problems.problem import Config, Ranked, by_rule
from ikbo_jax.problems.short_gdpa import ShortGdpaConfig

#: Largest block_kv by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: accumulator, scores and activated scores exceed a consumer thread's 240 registers.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 256: 64}
#: Head widths at which ptxas serialises all products of some kernels with `half_blocks` (C7513): of
#: relu at H = 64 and 256; of gelu at 256 and, with the table row's configuration, at 64. The other
#: widths compile with it, and these widths without it.
SERIALISED_HALVES_WIDTHS = (64, 256)
#: Activations that ptxas does not serialise with `half_blocks` there, if all heads have the same.
COMPILED_HALVES = ("gelu_tanh", "silu")
#: Head width at which gelu's products are serialised for some sizes: with one head and blocks of 64
#: keys, with tickets and seeds; not for 1,152 sequences with four heads.
SERIALISED_GELU_WIDTH = 96
#: Words of a descriptor in shared memory: an `Item`, then a `Destination` (`flash.gdpa_context`).
ITEM_WORDS = 7
#: Head widths of the kernel with masks. At H = 256 it spills 8 bytes of a thread.
MASKED_HEAD_DIMS = (64, 96, 128)
#: Further words with a mask, and with `skip_empty`, see `worklist.lists`.
MASK_WORDS, SEEN_WORDS = 15, 2
#: Bytes of the keys and values that masked tiles of one group read. Tiles that run at the same time
#: should find them in L2: if they belong to any sequences, a causal mask takes 2.5 times as long as
#: its products at 1,024 keys, and 2.1 times at 2,048 (SiLU, N = 4, H = 128, 65,536 rows, an H100).
GROUP_BYTES = 2**24
#: Bytes of keys and values up to which all masked tiles are one group: L2 holds them in any order.
#: At 16 to 40 MiB, groups took 0.98 to 1.15 of the time, forward and for gradients (H200).
GROUPED_BYTES = 40 * 2**20
#: Most groups: numbers by which tiles are sorted have 30 bits.
MOST_GROUPS = 256
#: Largest bound up to which masked blocks of 64 keys are faster, at H = 64 and at wider heads.
#: With 64 and 128 keys, us on an H200: H = 64, up to 190 keys 27.0 and 30.0, 256 68.0 and 58.3;
#: H = 128, 162 79.0 and 120.6, 384 95.0 and 102.1, 640 62.4 and 66.5, 740 76.5 and 72.8.
MASKED_NARROW_KEYS = 192, 640
#: Slots for descriptors beyond the number of query slots.  A consumer reads a descriptor for the
#: last time after it has freed the next item's queries, so only the descriptor of an item at least
#: three later may overwrite it.
EXTRA_ITEM_SLOTS = 2
#: Largest number of configurations to time for one problem: each result is compared with the XLA
#: path, which takes up to 0.1 s a call.
MAX_CONFIGS = 16
#: Largest number of these configurations that the kernel for short sequences has.
MAX_SHORT_CONFIGS = 6
#: (k_stages, v_stages, q_slots) of configurations worth timing, the most promising first. Fractions
#: of the reference matmul on an H200 for batch 1152, N = 4, H = 128, gelu_tanh with approx="tanh",
#: blocks of 128 keys and full sequences of 1024: 0.805 with the first ring, 0.780 with the second.
Ring = tuple[int, int, int]
RINGS: tuple[Ring, ...] = ((2, 2, 3), (2, 3, 2), (3, 3, 2), (4, 4, 2), (3, 3, 1), (2, 2, 1))
#: The same with masks. H = 128, blocks of 64 keys: 95.0 us with the first, 98.8 with the second at
#: 384 keys; at 162, 79.0 with the second and 100 with two query slots.
MASKED_RINGS: tuple[Ring, ...] = ((4, 4, 3), (3, 3, 3), (2, 3, 2), (2, 2, 2), (2, 2, 1))
#: Further parameters, the most promising first, if the keys of a sequence do not fit the stages.
#: Fractions with the second ring at lengths 512, 1024 and 2048: late_turns 0.725, 0.794, 0.853;
#: none 0.728, 0.780, 0.824. With the first ring and late_turns: 0.806 to 0.813 at 1024, 0.854 at
#: 2048.
LONG_MODES: tuple[dict[str, Any], ...] = ({"late_turns": True}, {})
#: Further parameters for jagged sequences. Fractions for bounds 512, 1024 and 2048: with skip_empty
#: and half_blocks 0.481 (without late_turns), 0.645 and 0.753; without them 0.472, 0.639 (with
#: late_turns) and 0.757.
JAGGED_MODES: tuple[dict[str, Any], ...] = (
    {"late_turns": True, "skip_empty": True, "half_blocks": True},
    {"skip_empty": True, "half_blocks": True},
    *LONG_MODES,
)
#: Further parameters if a sequence's keys fit the stages. Fractions for full sequences of 256 keys,
#: with the first ring. 1024 queries: 0.702 with run=8, 0.687 with 4, 0.676 with 16; 0.575 with the
#: second ring and run=1. 512 queries: 0.689 with run=4, 0.659 with 8. 256 queries: 0.605 with
#: run=2, 0.598 with late_turns alone.
SHORT_MODES: tuple[dict[str, Any], ...] = (
    {"run": 8},
    {"run": 4},
    {"run": 2},
    {"late_turns": True},
    {"run": 8, "late_turns": True},
    {},
)
#: Ranks that a configuration with blocks of 64 keys is placed behind the same one with 128 keys.
NARROW_BLOCK_COST = 3
#: Largest bound of jagged sequences up to which blocks of 64 keys are the default. Best times with
#: 64 and 128 keys, uniform lengths, us on an H100: up to 129, 26.4 and 27.8; 152, 12.1 and 13.9;
#: 172, 140.9 and 162.3; 278, 15.1 and 15.8; 372, 890.6 and 931.7; but 665, 851.8 and 837.2.
NARROW_MAX_KEYS, NARROW_MEAN_KEYS = 384, 2048
#: Most rounds of work items, one item of each CTA, for which the default is that CTAs take them by
#: a counter where lengths differ by far. 2.2 and 2.7 rounds of log-normal lengths: 32.8 us instead
#: of 38.1, 34.5 instead of 41.4; with 8.5 rounds of PMA 30.9 instead of 39.3, with 29.8 rounds 78.7
#: instead of 81.2. By counting blocks, the last CTA ends 9 % earlier with 7.3 rounds, 6 % with 14;
#: but not with 1.2, where it has nothing but the longest item: 24.2 and 24.0 us.
TICKETS_MOST_ROUNDS = 32
#: Lengths differ by far if the bound is more than so many times the mean.
LONG_TAIL = 4


def group_rows(rows: int, columns: int) -> int:
    """Counts rows of `columns` columns of a group, which its masked tiles find in L2."""
    row_bytes = 2 * 2 * columns
    is_single = rows * row_bytes <= GROUPED_BYTES
    return max(rows if is_single else GROUP_BYTES // row_bytes, -(-rows // MOST_GROUPS), 1)


@dataclasses.dataclass(frozen=True)
class GdpaConfig(FlashConfig):
    """Tuning parameters of the forward kernel, besides the rings.

    With softmax and no mask, only block_kv, stages, q_slots and late_turns apply.

    Attributes:
      run: number of neighbouring tiles that a CTA processes in sequence, head by head. It keeps
        keys and values in shared memory between tiles of the same sequence if all fit the stages.
      late_turns: whether a consumer warpgroup lets the other one issue its products only after its
        own scores have arrived, so the two compute activations at different times.
      skip_empty: whether a consumer warpgroup skips products and activations of a tile that has no
        rows for it; the second warpgroup has none in tiles of at most 64 rows. With a window
        and contextual tokens: whether it skips blocks after the last one that its rows see.
      half_blocks: whether a sequence's last block is multiplied and activated at half width if at
        most half of it holds keys.
      tickets: whether a CTA takes its next work item by a counter that XLA zeroes in a launch of
        its own; otherwise, each has a fixed share.
    """

    run: int = 1
    late_turns: bool = False
    skip_empty: bool = False
    half_blocks: bool = False
    tickets: bool = False

    def shared(self, head_dim: int, has_mask: bool = False) -> Any:
        words = ITEM_WORDS + (MASK_WORDS + SEEN_WORDS * self.skip_empty) * has_mask
        items = memory.descriptors(self.q_slots + EXTRA_ITEM_SLOTS, words)
        return memory.shared(items=items, **self.rings(head_dim))

    @property
    def for_softmax(self) -> AttentionConfig:
        """The equivalent configuration of the attention kernel, which computes a softmax."""
        return AttentionConfig(
            self.block_kv, self.k_stages, self.v_stages, self.q_slots, late_turns=self.late_turns
        )

    @hopper.first_reason
    def illegal_reason(self, problem: GdpaProblem) -> Iterator[str | None]:
        if problem.has_logit_cap and SOFTMAX not in problem.activations:
            yield self._why_not_plain(problem, "logit_cap")
        yield self.why_not_tiles(problem, MAX_BLOCK_KV)
        yield problem.why_not_softmax
        if problem.mask:
            yield self._why_not_plain(problem, "mask")
        if self.half_blocks and self.block_kv % (2 * WGMMA_K):
            yield (
                f"half_blocks needs a block_kv that is a multiple of {2 * WGMMA_K}, "
                f"but it is {self.block_kv}"
            )
        yield hopper.why_too_few(self, run=1)
        switches = ("skip_empty", "half_blocks", "tickets")
        enabled = [name for name in switches if getattr(self, name)]
        if problem.is_attention and (self.run > 1 or enabled):
            yield (
                f"softmax needs run=1 and none of {', '.join(switches)}, "
                f"but the config has run={self.run} and {', '.join(enabled) or 'none of them'}"
            )
        launched = self.for_softmax if problem.is_attention else self
        yield hopper.why_not_smem(self, launched.smem_bytes(problem.head_dim), problem.head_dim)

    def _why_not_plain(self, problem: GdpaProblem, cause: str) -> str | None:
        """Why a problem's `cause` does not allow this configuration or its heads; None if it does.

        With a cap, ptxas serialises the products of some kernels with `half_blocks` (C7513).
        """
        # A softmax with a cap spills 32 bytes with `skip_empty` at H = 128.
        may_skip = problem.has_long_tiles and not problem.has_logit_cap
        names = ("half_blocks",) if may_skip else ("skip_empty", "half_blocks")
        enabled = [name for name in names if getattr(self, name)]
        if self.run > 1 or enabled:
            return (
                f"a {cause} needs run=1, no skip_empty and no half_blocks, "
                f"but the config has run={self.run} and {', '.join(enabled) or 'none of them'}"
            )
        kernel = f"kernel with a {cause} takes"
        return hopper.why_not_head_dim(problem.head_dim, MASKED_HEAD_DIMS, kernel)


@dataclasses.dataclass(frozen=True)
class GdpaProblem(GdpaSizes):
    """Sizes of a generalised dot-product attention, forward.

    Without a row nearby the kernel runs: it was 6 to 10 times as fast as the XLA path.
    """

    op: ClassVar[str] = "gdpa"
    config_type: ClassVar[type] = GdpaConfig

    @property
    def is_attention(self) -> bool:
        """Whether the attention kernel computes it: a softmax without a mask."""
        return SOFTMAX in self.activations and not self.mask

    @classmethod
    def config_type_of(cls, fields: Mapping[str, Any]) -> type[Config]:
        return ShortGdpaConfig if "tile_rows" in fields else GdpaConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields the legal configurations of both kernels, the most promising first, by rules."""
        if self.mask or (self.has_logit_cap and SOFTMAX not in self.activations):
            kernel = "the kernel with masks" if self.mask else "the kernel with a logit_cap"
            yield from by_rule(self._masked_configs(), kernel)
            return
        reason = short_gdpa.why_preferred(self)
        short = itertools.islice(short_gdpa.candidate_configs(self), MAX_SHORT_CONFIGS)
        is_candidate = reason is not None or short_gdpa.is_candidate(self)
        of_short = [
            *by_rule(short if is_candidate else (), f"the kernel for short sequences ({reason})")
        ]
        of_long = by_rule(
            self._long_configs(MAX_CONFIGS - len(of_short)),
            "the kernel for long sequences, which is faster than XLA at all measured sizes",
        )
        yield from of_short if reason is not None else ()
        yield from of_long
        yield from of_short if reason is None else ()

    def _long_configs(self, most: int) -> Iterator[GdpaConfig]:
        """Yields `most` configurations of the kernel for long sequences.

        A rank is the sum of the positions of ring and mode, plus `NARROW_BLOCK_COST` for the block
        that is not preferred.
        """
        ranks: dict[GdpaConfig, int] = {}
        early, blocks = self._early_ring, (64, 128) if self._prefers_narrow_blocks else (128, 64)
        modes = LONG_MODES if self.is_full else JAGGED_MODES
        if early:
            modes = tuple(sorted(modes, key=lambda mode: "late_turns" in mode))
        for block, block_kv in enumerate(blocks):
            for number, ring in enumerate(dict.fromkeys((early or RINGS[0], *RINGS))):
                plain = GdpaConfig(block_kv, *ring)
                is_short = self.keys_fit_stages(plain) and plain.q_slots > 1 and not early
                for mode, switches in enumerate(SHORT_MODES if is_short else modes):
                    config = self._with_tickets(dataclasses.replace(plain, **switches))
                    if config.illegal_reason(self) is None:
                        ranks.setdefault(config, NARROW_BLOCK_COST * block + number + mode)
        yield from sorted(ranks, key=ranks.__getitem__)[:most]

    def _masked_configs(self) -> Iterator[GdpaConfig]:
        """Yields the legal configurations of the kernel with masks, the most promising first.

        CTAs take tiles by a counter: 0.63 to 1.07 of the time of fixed shares. A softmax has early
        turns. With a window, the second consumer skips most keys of contextual tokens' tiles, whose
        first rows alone see them: at the width that was timed.
        """
        late_turns = SOFTMAX not in self.activations
        skip_empty = self.has_long_tiles and self.head_dim == 128 and not self.has_logit_cap
        modes = {"late_turns": late_turns, "skip_empty": skip_empty, "tickets": True}
        longest = self.max_seqlen_kv or self.kv_rows
        is_short = longest <= MASKED_NARROW_KEYS[self.head_dim > 64]
        blocks = (64, 128) if is_short else (128, 64)
        # At H = 64, (3, 3, 3) takes 0.985 to 1 of the time of (4, 4, 3).
        rings = MASKED_RINGS if self.head_dim > 64 else MASKED_RINGS[1:]
        for block_kv, ring in itertools.product(blocks, rings):
            config = GdpaConfig(block_kv, *ring, **modes)
            if config.illegal_reason(self) is None:
                yield config

    @property
    def has_long_tiles(self) -> bool:
        """Whether contextual tokens see a history, and other rows a window."""
        return "contextual" in self.mask and "window" in self.mask

    @property
    def _early_ring(self) -> Ring | None:
        """The default's ring if its turns are early, else None; tuned on an H200."""
        if SOFTMAX in self.activations:
            is_jagged = self.broadcast_q or not self.is_full
            return (2, 3, 2) if self.head_dim == 128 and is_jagged else None
        if self.prefers_tickets or (self.is_full and not self.broadcast_q):
            return None
        if self.head_dim == 128 and self._prefers_narrow_blocks:
            return (4, 4, 2) if self.broadcast_q else (4, 4, 3)
        is_long = not (self.broadcast_q or self._prefers_narrow_blocks)
        return (2, 3, 2) if self.head_dim == 64 and is_long else None

    @property
    def _prefers_narrow_blocks(self) -> bool:
        """Whether blocks of 64 keys are faster: for short jagged sequences; and at H = 128 for few
        keys that all meet the same queries.
        """
        if self.broadcast_q:
            is_few = self._mean_lengths()[1] <= NARROW_MEAN_KEYS
            is_timed = self.head_dim == 128 and SOFTMAX not in self.activations
            return is_few and is_timed and not self.prefers_tickets
        bounds = (self.max_seqlen_q, self.max_seqlen_kv)
        is_short = all(bound is not None and bound <= NARROW_MAX_KEYS for bound in bounds)
        return is_short and not self.is_full

    @property
    def prefers_tickets(self) -> bool:
        """Whether CTAs take work items by a counter by default (`TICKETS_MOST_ROUNDS`)."""
        mean = self._mean_lengths()[1]
        is_long_tailed = (self.max_seqlen_kv or 0) > LONG_TAIL * mean
        rounds = short_gdpa.work_items(self, TILE_ROWS) / NUM_SMS
        return is_long_tailed and not self.is_attention and 1 < rounds <= TICKETS_MOST_ROUNDS

    def keys_fit_stages(self, config: GdpaConfig) -> bool:
        """Whether a sequence's keys, by their bound or else their mean, fit both rings' stages."""
        longest = self.max_seqlen_kv or self.kv_rows / max(self.batch_kv, 1)
        return longest <= min(config.k_stages, config.v_stages) * config.block_kv

    def _with_tickets(self, config: GdpaConfig) -> GdpaConfig:
        """With `tickets` where these are the default; without `half_blocks` where ptxas may
        serialise the kernel's products."""
        if self.prefers_tickets:
            config = dataclasses.replace(config, tickets=True)
        is_compiled = len(set(self.activations)) == 1 and self.activations[0] in COMPILED_HALVES
        is_gelu = self.head_dim == SERIALISED_GELU_WIDTH and "gelu" in self.activations
        if is_compiled or not (is_gelu or self.head_dim in SERIALISED_HALVES_WIDTHS):
            return config
        return dataclasses.replace(config, half_blocks=False)
