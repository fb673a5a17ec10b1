"""Configurations of the backward kernel of broadcast attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ikbo_jax.problems import hopper
from ikbo_jax.problems.attention import AttentionProblem
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, SMEM_ALIGNMENT, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_q by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: two sums, scores and gradients of weights exceed a consumer thread's 240 registers and spill.
MAX_BLOCK_Q = {64: 128, 96: 64, 128: 64}
HEAD_DIMS = tuple(MAX_BLOCK_Q)
#: Keys of a tile: 64 for each consumer.
BLOCK_KV = TILE_ROWS
#: Buffers of gradients of scores: the consumers write one while they multiply by the other.
D_SCORES_BUFFERS = 2
#: Allocations that hold less than a tile each: statistics, descriptors, barriers.
SMALL_ALLOCATIONS = 4


@dataclasses.dataclass(frozen=True)
class AttentionBackwardConfig(Config):
    """Tuning parameters of the attention backward kernel.

    Attributes:
      block_q: query rows of a block, a multiple of 16. Few rows for users with few queries.
      stages: stages of the ring of query blocks.
      kv_slots: slots for tiles of keys and values. With 2, the keys of the next tile are loaded
        early, which matters if a user has few queries.
      ordered: whether all tiles of keys add their part of d_query to one sum in device memory, one
        tile after another. Otherwise each tile stores its part, and XLA adds the parts: that takes
        S / 128 times as much memory, but no tile waits for another.
    """

    block_q: int = 64
    stages: int = 2
    kv_slots: int = 1
    ordered: bool = True

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of one CTA: keys and values, ring, gradients of scores and of queries."""
        row = hopper.row_bytes(head_dim)
        keys_values = self.kv_slots * 2 * BLOCK_KV * row
        ring = self.stages * 2 * self.block_q * row
        d_scores = D_SCORES_BUFFERS * self.block_q * NUM_CONSUMERS * BLOCK_K * 2
        d_query = self.block_q * row * 2
        return keys_values + ring + d_scores + d_query + SMALL_ALLOCATIONS * SMEM_ALIGNMENT

    def illegal_reason(self, problem: AttentionProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := hopper.why_not_dtype(problem.dtype):
            return reason
        if reason := hopper.why_not_head_dim(
            problem.head_dim, HEAD_DIMS, "attention backward kernel takes"
        ):
            return reason
        if min(problem.batch, problem.q_len, problem.kv_len, problem.users) < 1:
            return (
                f"the attention backward kernel needs a query, a user and a key, but "
                f"B={problem.batch}, T={problem.q_len}, U={problem.users} and S={problem.kv_len}"
            )
        if problem.q_heads % problem.kv_heads:
            return (
                f"the kernel needs N to be a multiple of K, "
                f"but N={problem.q_heads} and K={problem.kv_heads}"
            )
        widest, operands = MAX_BLOCK_Q[problem.head_dim], "scores and two sums"
        if reason := hopper.why_not_block(
            "block_q", self.block_q, widest, problem.head_dim, operands
        ):
            return reason
        if self.stages < 2:
            return f"stages must be at least 2, but is {self.stages}"
        if self.kv_slots not in (1, 2):
            return f"kv_slots must be 1 or 2, but is {self.kv_slots}"
        return hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)


def candidate_configs(problem: AttentionProblem) -> Iterator[AttentionBackwardConfig]:
    """Yields the legal configurations worth timing, the most promising first. None is measured."""
    rows = -(-problem.batch * problem.q_len // max(problem.users, 1))
    rows *= problem.q_heads // max(problem.kv_heads, 1)
    is_small = rows <= WGMMA_M
    block_qs = (16, 32, 64) if is_small else (128, 96, 80, 64, 48, 32)
    for block_q in sorted(block_qs, key=lambda block: (is_small and block < rows, 0)):
        for kv_slots in (2, 1) if is_small else (1, 2):
            for stages in (2, 3):
                for ordered in (False, True) if is_small else (True, False):
                    config = AttentionBackwardConfig(block_q, stages, kv_slots, ordered)
                    if config.illegal_reason(problem) is None:
                        yield config


def default_config(problem: AttentionProblem) -> AttentionBackwardConfig | None:
    """The most promising configuration without a measurement; None if none is legal."""
    return next(candidate_configs(problem), None)
