"""The gradient of broadcast attention: its problems, and the configurations of its kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Self

from ikbo_jax.problems import hopper
from ikbo_jax.problems.attention import AttentionSizes
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, SMEM_ALIGNMENT, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_q by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: two sums, scores and gradients of weights exceed a consumer thread's 240 registers and spill.
MAX_BLOCK_Q = {64: 128, 96: 64, 128: 64}
HEAD_DIMS = tuple(MAX_BLOCK_Q)
#: Largest block_kv by head width, for the same reason.
MAX_BLOCK_KV = {64: 128, 96: 96, 128: 96}
#: Keys of a tile: 64 for each consumer.
BLOCK_KV = TILE_ROWS
#: Buffers of gradients of scores, as many as fit: each consumer multiplies by the block before,
#: and with three of them, one consumer can be most of a block ahead of the other.
D_SCORES_BUFFERS = (3, 2)
#: Slots for queries of the second launch: of the finished tile and of the next one.
Q_SLOTS = 2
#: Ways to compute d_query; see `AttentionBackwardConfig`.
D_QUERY = ("sum", "parts", "launch")
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
      d_query: how the parts of d_query become a sum, one of `D_QUERY`. "sum": all tiles of keys add
        their parts to one sum in device memory, one tile after another. "parts": each tile stores
        its part, and XLA adds the parts; that takes S / 128 times as much memory, but no tile waits
        for another. "launch": a second launch computes d_query, with seven products instead of
        five, but without exchange of gradients of scores, and without sums in memory.
      block_kv: keys of a block of the second launch, a multiple of 16.
      kv_stages: stages of the second launch's ring of key blocks.
      splits: parts that a user's queries are cut into, where users are too few to occupy the
        device. XLA adds the parts' gradients of keys and values, in f32.
    """

    block_q: int = 64
    stages: int = 2
    kv_slots: int = 1
    d_query: str = "sum"
    block_kv: int = 64
    kv_stages: int = 3
    splits: int = 1

    def d_scores_buffers(self, head_dim: int) -> int:
        """Buffers of gradients of scores."""
        most, least = D_SCORES_BUFFERS
        return most if self._smem_bytes(head_dim, most) <= hopper.MAX_SMEM_BYTES else least

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of one CTA, of the launch that needs more."""
        return self._smem_bytes(head_dim, self.d_scores_buffers(head_dim))

    def _smem_bytes(self, head_dim: int, d_scores_buffers: int) -> int:
        row = hopper.column_blocks(head_dim) * BLOCK_K * 2
        total = self.kv_slots * 2 * BLOCK_KV * row + self.stages * 2 * self.block_q * row
        if self.d_query == "launch":
            second = 2 * row * (Q_SLOTS * TILE_ROWS + self.kv_stages * self.block_kv)
            total = max(total, second - SMEM_ALIGNMENT)  # it has fewer small allocations
        else:
            total += d_scores_buffers * self.block_q * NUM_CONSUMERS * BLOCK_K * 2
            total += self.block_q * row * 2
        return total + SMALL_ALLOCATIONS * SMEM_ALIGNMENT

    def illegal_reason(self, problem: AttentionSizes) -> str | None:
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
        if self.splits < 1:
            return f"splits must be at least 1, but is {self.splits}"
        if self.d_query not in D_QUERY:
            return f"d_query must be one of {', '.join(D_QUERY)}, but is {self.d_query}"
        if self.d_query == "launch":
            widest = MAX_BLOCK_KV[problem.head_dim]
            if reason := hopper.why_not_block(
                "block_kv", self.block_kv, widest, problem.head_dim, "scores and a sum"
            ):
                return reason
            if self.kv_stages < 2:
                return f"kv_stages must be at least 2, but is {self.kv_stages}"
        return hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)


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

    def candidate_configs(self) -> Iterator[AttentionBackwardConfig]:
        """Yields the legal configurations worth timing, the most promising first."""
        rows = -(-self.batch * self.q_len // max(self.users, 1))
        rows *= self.q_heads // max(self.kv_heads, 1)
        is_small = rows <= WGMMA_M
        block_qs = (16, 32, 64) if is_small else (128, 96, 80, 64, 48, 32)
        for block_q in sorted(block_qs, key=lambda block: (is_small and block < rows, 0)):
            for kv_slots in (2, 1) if is_small else (1, 2):
                for stages in (2, 3):
                    for d_query in ("parts", "sum") if is_small else ("sum", "launch", "parts"):
                        config = AttentionBackwardConfig(block_q, stages, kv_slots, d_query)
                        if config.illegal_reason(self) is None:
                            yield config
