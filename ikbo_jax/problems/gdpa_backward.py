"""Configurations of the backward kernels of generalised dot-product attention."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.gdpa import SOFTMAX, GdpaProblem
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M

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
#: Vectors of f32 that a softmax's gradient needs for its rows of queries: lse and delta.
STATISTICS = 2
#: Copies of statistics take a multiple of this number of words: 128 bytes, to which TMA aligns its
#: destination, and which Mosaic GPU's copies are a multiple of.
COPY_WORDS = 32


class GdpaBackwardShared(NamedTuple):
    """Shared memory and barriers of a backward kernel; shapes follow the slot."""

    stationary: Any  # ring of [2 operands, 2 consumers, column blocks, 64, 64] and a tile's words
    streamed: Any  # ring of [2 operands, column blocks, block, 64] and a block's words
    staging: Any  # [2 consumers, 2, 64, block], only under interpretation
    f32_staging: Any  # [2 consumers, 64, columns] f32, likewise
    packed: Any = None  # with a softmax: statistics, then the words of both rings; see `Packing`
    statistics_free: Any = None  # and, in the kernel with one result, whether they were read


class Packing(NamedTuple):
    """Where a softmax's kernel keeps statistics and descriptors: one array of 32-bit words.

    Every array takes a whole number of KiB. At H = 128, with three stages, statistics in an array
    of their own, beside one for descriptors, would exceed a CTA's shared memory by 80 bytes.

    Attributes:
      stride: words of a vector of statistics; slot s has vectors 2 s and 2 s + 1.
      item_words: first word of the tiles' descriptors.
      block_words: first word of the blocks' descriptors.
      size: all words.
    """

    stride: int
    item_words: int
    block_words: int
    size: int


@dataclasses.dataclass(frozen=True)
class GdpaBackwardConfig:
    """Tuning parameters of one backward kernel.

    Attributes:
      block: rows of each of the two operands in a pipeline stage; a multiple of 16.
      stages: stages of the ring.
    """

    block: int = 64
    stages: int = 3

    def packing(self, num_results: int) -> Packing:
        """How a softmax's kernel with `num_results` results packs its words.

        Statistics belong to queries: to a tile in the kernel with one result, which has one slot
        for them, and to a block in the kernel with two.
        """
        slots, rows = (self.stages, self.block) if num_results == 2 else (1, TILE_ROWS)
        stride = -(-rows // COPY_WORDS) * COPY_WORDS
        item_words = slots * STATISTICS * stride
        block_words = item_words + SLOTS * ITEM_WORDS
        size = block_words + self.stages * BLOCK_WORDS
        return Packing(stride, item_words, block_words, size)

    def shared(self, head_dim: int, softmax_results: int | None = None) -> GdpaBackwardShared:
        """Shared memory and barriers of one CTA.

        `softmax_results`: results of a softmax's kernel; None: there is no softmax.
        """
        blocks = hopper.column_blocks(head_dim)
        packed, statistics_free, ready = None, None, [0, 0]
        if softmax_results is not None:
            packed = memory.Words((self.packing(softmax_results).size,))
            ready[softmax_results - 1] = STATISTICS
            if softmax_results == 1:
                statistics_free = memory.Barriers(1, NUM_CONSUMERS)
        has_words = packed is None
        return GdpaBackwardShared(
            stationary=memory.ring(
                SLOTS,
                ready=2 * NUM_CONSUMERS * blocks + 1 + ready[0],
                tiles=(2, NUM_CONSUMERS, blocks, WGMMA_M, BLOCK_K),
                words=ITEM_WORDS if has_words else None,
            ),
            streamed=memory.ring(
                self.stages,
                ready=2 * blocks + 1 + ready[1],
                tiles=(2, blocks, self.block, BLOCK_K),
                words=BLOCK_WORDS if has_words else None,
            ),
            staging=memory.Staging((NUM_CONSUMERS, 2, WGMMA_M, self.block)),
            f32_staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, blocks * BLOCK_K), "float32"),
            packed=packed,
            statistics_free=statistics_free,
        )

    def smem_bytes(self, head_dim: int, softmax_results: int | None = None) -> int:
        """Bytes of shared memory of one CTA; see `shared`."""
        return memory.smem_bytes(self.shared(head_dim, softmax_results))

    def illegal_reason(
        self, dtype: str, head_dim: int, *, num_results: int, has_softmax: bool = False
    ) -> str | None:
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
        smem_bytes = self.smem_bytes(head_dim, num_results if has_softmax else None)
        return hopper.why_not_smem(self, smem_bytes, head_dim)


def default_config(head_dim: int) -> GdpaBackwardConfig:
    """The configuration of both kernels; nothing else was measured."""
    return GdpaBackwardConfig(64, 6 if head_dim <= BLOCK_K else 3)


def illegal_reason(problem: GdpaProblem) -> str | None:
    """Why the kernels cannot compute the gradients of a problem; None if they can."""
    has_softmax = SOFTMAX in problem.activations
    if has_softmax and set(problem.activations) != {SOFTMAX}:
        return "the backward kernels support softmax in all heads or in none"
    if not problem.q_rows or not problem.kv_rows or not problem.batch:
        return "the backward kernels need a query, a key and a sequence"
    config = default_config(problem.head_dim)
    for num_results in (1, 2):
        reason = config.illegal_reason(
            problem.dtype, problem.head_dim, num_results=num_results, has_softmax=has_softmax
        )
        if reason is not None:
            return reason
    return None
