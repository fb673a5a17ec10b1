"""Configurations of the backward kernels of generalised dot-product attention."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.gdpa import SOFTMAX, GdpaProblem
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M

#: Largest `block` by head width (width 96 is padded to 128 in shared memory): for the kernel with
#: two results (d_key, d_value), and with one (d_query). With larger blocks accumulators and scores
#: exceed a consumer thread's 240 registers.
MAX_BLOCKS = {64: (96, 128), 96: (64, 96), 128: (64, 96)}
HEAD_DIMS = tuple(MAX_BLOCKS)
#: Number of slots for a tile's operands and results: the finished tile and the next one.
SLOTS = 2
#: Words of a tile's descriptor in shared memory, of which `gdpa_backward.context` names five: with
#: 32 bytes a slot, four words are one 16-byte access; with 20 bytes they are four accesses.
ITEM_WORDS = 8
#: Words of a block's descriptor: number of rows, query head.
BLOCK_WORDS = 2


class GdpaBackwardShared(NamedTuple):
    """Shared memory and barriers of a backward kernel; shapes follow the slot."""

    stationary: Any  # ring of [2 operands, 2 consumers, column blocks, 64, 64] and a tile's words
    streamed: Any  # ring of [2 operands, column blocks, block, 64] and a block's words
    staging: Any  # [2 consumers, 2, 64, block], only under interpretation
    f32_staging: Any  # [2 consumers, 64, columns] f32, likewise


@dataclasses.dataclass(frozen=True)
class GdpaBackwardConfig:
    """Tuning parameters of one backward kernel.

    Attributes:
      block: rows of each of the two operands in a pipeline stage; a multiple of 16.
      stages: stages of the ring.
    """

    block: int = 64
    stages: int = 3

    def shared(self, head_dim: int) -> GdpaBackwardShared:
        """Shared memory and barriers of one CTA."""
        blocks = hopper.column_blocks(head_dim)
        return GdpaBackwardShared(
            stationary=memory.ring(
                SLOTS,
                ready=2 * NUM_CONSUMERS * blocks + 1,
                tiles=(2, NUM_CONSUMERS, blocks, WGMMA_M, BLOCK_K),
                words=ITEM_WORDS,
            ),
            streamed=memory.ring(
                self.stages,
                ready=2 * blocks + 1,
                tiles=(2, blocks, self.block, BLOCK_K),
                words=BLOCK_WORDS,
            ),
            staging=memory.Staging((NUM_CONSUMERS, 2, WGMMA_M, self.block)),
            f32_staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, blocks * BLOCK_K), "float32"),
        )

    def smem_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory of one CTA."""
        return memory.smem_bytes(self.shared(head_dim))

    def illegal_reason(self, dtype: str, head_dim: int, *, num_results: int) -> str | None:
        """Why the kernel with `num_results` results cannot run with `config`; None if it can."""
        if reason := hopper.why_not_dtype(dtype):
            return reason
        if reason := hopper.why_not_head_dim(head_dim, HEAD_DIMS, "backward kernels take"):
            return reason
        widest = MAX_BLOCKS[head_dim][0 if num_results == 2 else 1]
        operands = f"scores and {num_results} accumulators"
        if reason := hopper.why_not_block("block", self.block, widest, head_dim, operands):
            return reason
        if self.stages < 2:
            return f"stages must be at least 2, but is {self.stages}"
        return hopper.why_not_smem(self, self.smem_bytes(head_dim), head_dim)


def default_config(head_dim: int) -> GdpaBackwardConfig:
    """The configuration of both kernels; nothing else was measured."""
    return GdpaBackwardConfig(64, 6 if head_dim <= BLOCK_K else 3)


def illegal_reason(problem: GdpaProblem) -> str | None:
    """Why the kernels cannot compute the gradients of a problem; None if they can."""
    if SOFTMAX in problem.activations:
        return "the backward kernels do not support softmax"
    if not problem.q_rows or not problem.kv_rows or not problem.batch:
        return "the backward kernels need a query, a key and a sequence"
    config = default_config(problem.head_dim)
    for num_results in (1, 2):
        reason = config.illegal_reason(problem.dtype, problem.head_dim, num_results=num_results)
        if reason is not None:
            return reason
    return None
