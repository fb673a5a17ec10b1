"""Problem description and configurations of generalised dot-product attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ikbo_jax.tuning.configs import (
    BLOCK_K,
    KERNEL_DTYPES,
    MAX_SMEM_BYTES,
    NUM_CONSUMERS,
    SMEM_ALIGNMENT,
    WGMMA_K,
    WGMMA_M,
    AttentionConfig,
)

#: Head widths (96 is padded to 128 in shared memory), and the widest blocks of keys beside which a
#: consumer thread's accumulator, scores and weights fit its 240 registers.
GDPA_MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 256: 64}
#: Widest heads with `early_scores`.
EARLY_SCORES_MAX_WIDTH = 128
#: The activation that the attention kernel computes.
SOFTMAX = "softmax"
#: Query rows of a CTA tile: of one head and one sequence.
GDPA_TILE_ROWS = NUM_CONSUMERS * WGMMA_M
#: Sequences that fill more of their bounds than this are full: nearly all tiles are whole.
FULL = 0.75
#: Candidates for one problem: their XLA path takes up to 0.1 s a call, and is compared with each.
MOST_CANDIDATES = 16
#: (k_stages, v_stages, q_slots) of candidates, the likeliest best first. Fractions of the matmul on
#: an H200, batch 1152, N = 4, H = 128, gelu_tanh with approx="tanh", blocks of 128 keys: 0.805 with
#: the first ring, 0.780 with the second, full sequences of 1024.
RINGS = ((2, 2, 3), (2, 3, 2), (3, 3, 2), (4, 4, 2), (3, 3, 1), (2, 2, 1))
#: What else candidates differ in, the likeliest best first. Where keys do not stay, with the second
#: ring at 512, 1024 and 2048: late_turns 0.725, 0.794, 0.853; plain 0.728, 0.780, 0.824;
#: early_scores 0.708, 0.782 (2048 was not timed). The first ring with late_turns: 0.806 to 0.813 at
#: 1024, 0.854 at 2048.
LONG_MODES: tuple[dict[str, Any], ...] = ({"late_turns": True}, {})
#: Jagged sequences up to 512, 1024 and 2048: the first of these 0.481 (without late_turns), 0.645
#: and 0.753; none of them 0.472, 0.639 (with late_turns) and 0.757; blocks of 64 keys best to 256.
JAGGED_MODES: tuple[dict[str, Any], ...] = (
    {"late_turns": True, "skip_empty": True, "half_blocks": True},
    {"skip_empty": True, "half_blocks": True},
    *LONG_MODES,
)
#: Where they do, full sequences of 256 keys, first ring. 1024 queries: 0.702 with runs of 8, 0.687
#: of 4, 0.676 of 16; 0.678 with early_scores; 0.575 with the second ring and no runs. 512: 0.689
#: with runs of 4, 0.659 of 8. 256: 0.605 with runs of 2, 0.598 with late_turns alone, 0.588 with
#: early_scores and runs of 2.
SHORT_MODES: tuple[dict[str, Any], ...] = (
    {"run": 8},
    {"run": 4},
    {"run": 2},
    {"late_turns": True},
    {"run": 8, "late_turns": True},
    {},
)
#: Places that blocks of 64 keys lose against those of 128.
NARROW_BLOCK_COST = 3


@dataclasses.dataclass(frozen=True)
class GdpaProblem:
    """Sizes of a generalised dot-product attention, as far as they are known while tracing.

    Attributes:
      batch: query sequences.
      batch_kv: key-value sequences.
      q_rows: rows of all queries' results, those of no sequence among them.
      kv_rows: rows of all keys.
      q_heads: N.
      kv_heads: K, divides N.
      head_dim: H.
      dtype: name of the inputs' dtype.
      activations: names, one for each head or one for all of them.
      approx: an approximation's name, or None.
      broadcast_q: that all sequences have the same queries.
      max_seqlen_q: bound of the lengths, or None.
      max_seqlen_kv: bound of the lengths, or None.
    """

    batch: int
    batch_kv: int
    q_rows: int
    kv_rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    activations: tuple[str, ...]
    approx: str | None
    broadcast_q: bool
    max_seqlen_q: int | None
    max_seqlen_kv: int | None

    @property
    def is_full(self) -> bool:
        """Whether sequences nearly fill their bounds on the average; not known without bounds."""
        bounds = [(self.kv_rows, self.batch_kv, self.max_seqlen_kv)]
        if not self.broadcast_q:
            bounds.append((self.q_rows, self.batch, self.max_seqlen_q))
        return all(
            bound is not None and rows > FULL * sequences * bound
            for rows, sequences, bound in bounds
        )

    def useful_flops(self, pairs: int) -> int:
        """Multiply-adds times two of both products; `pairs` of a query and a key in a sequence."""
        return 4 * pairs * self.q_heads * self.head_dim

    def describe(self) -> str:
        """The problem in one line, e.g. `batch=8,8 rows=512,640 N=4 K=4 H=64 gelu bfloat16`."""
        limits = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_kv": self.max_seqlen_kv}
        words = [
            f"batch={self.batch},{self.batch_kv} rows={self.q_rows},{self.kv_rows}",
            f"N={self.q_heads} K={self.kv_heads} H={self.head_dim}",
            *(f"{name}={limit}" for name, limit in limits.items() if limit is not None),
            "+".join(self.activations),
            *([] if self.approx is None else [f"approx={self.approx}"]),
            *(["broadcast_q"] if self.broadcast_q else []),
            self.dtype,
        ]
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class GdpaConfig:
    """Tuning parameters of the forward kernel; a softmax has rings, query slots and late_turns.

    Attributes:
      block_kv: keys of a pipeline stage; a multiple of 16.
      k_stages: stages of the ring of key blocks.
      v_stages: stages of the ring of value blocks.
      q_slots: 2 or 3: the next tiles' queries arrive early and the output leaves through the
        finished tile's slot by TMA; 1: less shared memory, but the output leaves from registers.
      run: neighbouring tiles that a CTA works on, one after another and head by head; it keeps
        keys and values from one to the next of the same sequence if all fit the stages.
      early_scores: an item's second scores are multiplied while the item before is stored; needs
        more than one query slot, and heads up to `EARLY_SCORES_MAX_WIDTH` wide.
      late_turns: a consumer lets the other one issue its products when its own scores are there,
        not when it has issued its own; so the two activate at different times.
      skip_empty: a consumer skips the products and activations of a tile that has no rows for it:
        the second one, those of tiles of at most 64 rows.
      half_blocks: a sequence's last block, if at most half of it are keys, is multiplied and
        activated at half its width; its scores are not where it is the first block as well, or,
        with `early_scores`, the second.
    """

    block_kv: int = 128
    k_stages: int = 2
    v_stages: int = 3
    q_slots: int = 2
    run: int = 1
    early_scores: bool = False
    late_turns: bool = False
    skip_empty: bool = False
    half_blocks: bool = False

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of one CTA: query slots, both rings, descriptors, barriers."""
        row = -(-head_dim // BLOCK_K) * BLOCK_K * 2
        queries = self.q_slots * GDPA_TILE_ROWS * row
        ring = (self.k_stages + self.v_stages) * self.block_kv * row
        return queries + ring + 2 * SMEM_ALIGNMENT

    @property
    def for_softmax(self) -> AttentionConfig:
        """The same of the attention kernel, which computes a softmax."""
        return AttentionConfig(
            self.block_kv,
            self.k_stages,
            self.v_stages,
            self.q_slots,
            late_turns=self.late_turns,
        )


def gdpa_illegal_reason(problem: GdpaProblem, config: GdpaConfig) -> str | None:
    """Why the forward kernel cannot run `problem` with `config`; None if it can."""
    if problem.dtype not in KERNEL_DTYPES:
        return f"the kernel takes {' and '.join(KERNEL_DTYPES)}, but the inputs are {problem.dtype}"
    has_softmax = SOFTMAX in problem.activations
    if has_softmax and set(problem.activations) != {SOFTMAX}:
        return (
            "the kernels take a softmax in all heads or in none, "
            f"but the heads have {', '.join(problem.activations)}"
        )
    if problem.head_dim not in GDPA_MAX_BLOCK_KV:
        return (
            f"the kernel takes head widths {', '.join(map(str, GDPA_MAX_BLOCK_KV))}, "
            f"but H={problem.head_dim}"
        )
    widest = GDPA_MAX_BLOCK_KV[problem.head_dim]
    if config.block_kv % WGMMA_K or not WGMMA_K <= config.block_kv <= widest:
        return (
            f"block_kv must be a multiple of {WGMMA_K} from {WGMMA_K} to {widest}, where scores "
            f"and accumulator of H={problem.head_dim} fit the registers, but is {config.block_kv}"
        )
    if min(config.k_stages, config.v_stages) < 2:
        return (
            f"k_stages and v_stages must be at least 2, "
            f"but are {config.k_stages} and {config.v_stages}"
        )
    if config.half_blocks and config.block_kv % (2 * WGMMA_K):
        return (
            f"half_blocks needs a block_kv that is a multiple of {2 * WGMMA_K}, "
            f"but it is {config.block_kv}"
        )
    if config.q_slots not in (1, 2, 3):
        return f"q_slots must be 1, 2 or 3, but is {config.q_slots}"
    if config.run < 1:
        return f"run must be at least 1, but is {config.run}"
    switches = ("early_scores", "skip_empty", "half_blocks")
    unknown = [name for name in switches if getattr(config, name)]
    if has_softmax and (config.run > 1 or unknown):
        return (
            f"a softmax takes run=1 and none of {', '.join(switches)}, "
            f"but has run={config.run} and {', '.join(unknown) or 'none of them'}"
        )
    if config.early_scores and config.q_slots == 1:
        return "early_scores needs 2 or 3 q_slots, but q_slots is 1"
    if config.early_scores and problem.head_dim > EARLY_SCORES_MAX_WIDTH:
        return (
            f"early_scores takes head widths up to {EARLY_SCORES_MAX_WIDTH}, wider ones spill "
            f"registers, but H={problem.head_dim}"
        )
    smem_bytes = (config.for_softmax if has_softmax else config).smem_bytes(problem.head_dim)
    if smem_bytes > MAX_SMEM_BYTES:
        return (
            f"{config} needs {smem_bytes} bytes of shared memory at H={problem.head_dim}, "
            f"but a CTA has {MAX_SMEM_BYTES}"
        )
    return None


def keys_stay(problem: GdpaProblem, config: GdpaConfig) -> bool:
    """Whether all keys of a sequence fit the stages, as far as is known: a mean without a bound."""
    longest = problem.max_seqlen_kv or problem.kv_rows / max(problem.batch_kv, 1)
    return longest <= min(config.k_stages, config.v_stages) * config.block_kv


def gdpa_candidate_configs(problem: GdpaProblem) -> Iterator[GdpaConfig]:
    """Yields the legal configurations worth timing for `problem`, the likeliest best first.

    The first one is what runs where nothing was measured nearby. A configuration's place is the sum
    of its ring's, its mode's and its block's.
    """
    ranked: list[tuple[int, GdpaConfig]] = []
    for block, block_kv in enumerate((128, 64)):
        for ring, (k_stages, v_stages, q_slots) in enumerate(RINGS):
            plain = GdpaConfig(block_kv, k_stages, v_stages, q_slots)
            can_stay = keys_stay(problem, plain) and q_slots > 1
            long_modes = LONG_MODES if problem.is_full else JAGGED_MODES
            for mode, switches in enumerate(SHORT_MODES if can_stay else long_modes):
                config = dataclasses.replace(plain, **switches)
                if gdpa_illegal_reason(problem, config) is None:
                    ranked.append((NARROW_BLOCK_COST * block + ring + mode, config))
    ranked.sort(key=lambda entry: entry[0])
    yield from (config for _, config in ranked[:MOST_CANDIDATES])
