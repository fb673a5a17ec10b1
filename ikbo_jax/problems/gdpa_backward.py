"""The gradient of generalised dot-product attention: problems, configurations of its kernels."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.gdpa_sizes import SOFTMAX, GdpaSizes
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config, Ranked, by_rule

#: Largest `block` by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: two accumulators (d_key, d_value) and scores exceed a consumer thread's 240 registers.
MAX_BLOCKS = {64: 96, 96: 64, 128: 64}
HEAD_DIMS = tuple(MAX_BLOCKS)
#: Where the kernel for keys spills with a cap: with these activations, 16 to 48 bytes of a thread;
#: with several activations, 80 bytes.
SPILLING_CAPPED_WIDTHS, SPILLING_CAPPED = (128,), ("silu", "gelu_tanh")
#: Number of slots for a tile's operands and results: the finished tile and the next one.
SLOTS = 2
#: Words of a tile's descriptor in shared memory, of which `gdpa_backward.context` names five: with
#: 32 bytes a slot, four words are one 16-byte access; with 20 bytes they are four accesses.
ITEM_WORDS = 8
#: Words of a block's descriptor: number of rows, query head; with a mask, two more follow
#: (`gdpa_backward.masked`).
BLOCK_WORDS, MASK_WORDS = 2, 2
#: Vectors of f32 that a softmax's gradient needs for its rows of queries: lse and delta.
STATISTICS = 2
#: Copies of statistics take a multiple of this number of words: 128 bytes, to which TMA aligns its
#: destination, and which Mosaic GPU's copies are a multiple of.
COPY_WORDS = 32
#: Blocks and stages that the tuner tries.
BLOCKS, STAGES = (64, 96, 80, 48, 32), (3, 4, 2, 6)
#: Most bytes of gradients of scores that are stored, as for attention.
MAX_STORED_BYTES = 17 * 2**28
#: Gradients of scores are stored if rows see so many keys in the mean. Of ten sizes with 128 to
#: 2,247 keys, H = 64 and 128, silu and softmax, all were faster, by 1 to 14 % (H200).
LEAST_STORED_KEYS = 128
#: Most tiles of keys whose gradients are stored: XLA places them by comparing all pairs.
MOST_STORED_TILES = 16384


class Packing(NamedTuple):
    """Where a softmax's kernel keeps statistics and descriptors: one array of 32-bit words.

    Every array takes a whole number of KiB; two arrays would exceed a CTA's shared memory by 80
    bytes at H = 128.

    Attributes:
      stride: words of a vector of statistics; slot s has vectors 2 s and 2 s + 1.
      item_words: first word of the tiles' descriptors; `block_words`: of the blocks'.
      size: all words.
    """

    stride: int
    item_words: int
    block_words: int
    size: int


@dataclasses.dataclass(frozen=True)
class GdpaBackwardConfig(Config):
    """Tuning parameters of both backward kernels.

    Attributes:
      block: rows of each of the two operands in a pipeline stage; a multiple of 16.
      stages: stages of the ring.
      packs_statistics: whether statistics are int32, beside the descriptors; otherwise f32.
    """

    block: int = 64
    stages: int = 3
    packs_statistics: ClassVar[bool] = True

    def packing(self, num_results: int, has_mask: bool = False) -> Packing:
        """Lays out the words of a softmax's kernel with `num_results` results.

        Statistics belong to a tile in the kernel with one result, and to a block in the one with
        two.
        """
        slots, rows = (self.stages, self.block) if num_results == 2 else (1, TILE_ROWS)
        stride = -(-rows // COPY_WORDS) * COPY_WORDS
        item_words = slots * STATISTICS * stride * self.packs_statistics
        block_words = item_words + SLOTS * ITEM_WORDS
        size = block_words + self.stages * (BLOCK_WORDS + MASK_WORDS * has_mask)
        return Packing(stride, item_words, block_words, size)

    def shared(
        self,
        head_dim: int,
        softmax_results: int | None = None,
        has_mask: bool = False,
        reads_stored: bool = False,
    ) -> Any:
        """Declares shared memory and barriers of one CTA.

        `softmax_results` are the results of a softmax's kernel; None: there is no softmax. With
        `reads_stored`, a tile's slot is for the result alone.
        """
        blocks = hopper.column_blocks(head_dim)
        packed, statistics_free, ready = None, None, [0, 0]
        if softmax_results is not None:
            packed = memory.Words((self.packing(softmax_results, has_mask).size,))
            ready[softmax_results - 1] = STATISTICS
            if softmax_results == 1:  # whether statistics were read
                statistics_free = memory.Barriers(1, NUM_CONSUMERS)
        has_words = packed is None
        second = NUM_CONSUMERS if reads_stored else blocks
        return memory.shared(
            stationary=memory.ring(
                SLOTS,
                ready=1 + (0 if reads_stored else 2 * NUM_CONSUMERS * blocks + ready[0]),
                tiles=(2 - reads_stored, NUM_CONSUMERS, blocks, WGMMA_M, BLOCK_K),
                words=ITEM_WORDS if has_words else None,
            ),
            streamed=memory.ring(
                self.stages,
                ready=blocks + second + 1 + ready[1],
                tiles=(2, max(blocks, second), self.block, BLOCK_K),
                words=BLOCK_WORDS + MASK_WORDS * has_mask if has_words else None,
            ),
            staging=memory.Staging((NUM_CONSUMERS, 2, WGMMA_M, self.block)),
            packed=packed,
            statistics=None if self.packs_statistics else memory.Floats((STATISTICS, TILE_ROWS)),
            statistics_free=statistics_free,
        )

    @hopper.first_reason
    def illegal_reason(self, problem: GdpaSizes) -> Iterator[str | None]:
        yield _why_not_capped(problem)
        has_softmax, head_dim = SOFTMAX in problem.activations, problem.head_dim
        if has_softmax and set(problem.activations) != {SOFTMAX}:
            yield "the backward kernels support softmax in all heads or in none"
        if not problem.q_rows or not problem.kv_rows or not problem.batch:
            yield "the backward kernels need a query, a key and a sequence"
        if problem.mask and self.block != WGMMA_M:
            yield f"a mask needs a block of {WGMMA_M}, but it is {self.block}"
        yield hopper.why_not_dtype(problem.dtype)
        yield hopper.why_not_head_dim(head_dim, HEAD_DIMS, "backward kernels take")
        widest, operands = MAX_BLOCKS[head_dim], "scores and 2 accumulators"
        yield hopper.why_not_block("block", self.block, widest, head_dim, operands)
        yield hopper.why_too_few(self, stages=2)
        shared = [
            self.shared(head_dim, results if has_softmax else None, bool(problem.mask))
            for results in (1, 2)
        ]
        yield hopper.why_not_smem(self, max(map(memory.smem_bytes, shared)), head_dim)


#: Of the kernel that multiplies stored gradients of scores by keys.
STORED_CONFIG = GdpaBackwardConfig(64, 5)


def default_config(head_dim: int) -> GdpaBackwardConfig:
    """Returns the configuration of both kernels; every measurement has chosen it."""
    return GdpaBackwardConfig(64, 6 if head_dim <= BLOCK_K else 3)


def illegal_reason(problem: GdpaSizes) -> str | None:
    """Says why the kernels cannot compute a problem's gradients; None if they can."""
    return default_config(problem.head_dim).illegal_reason(problem)


def _why_not_capped(problem: GdpaSizes) -> str | None:
    """Why the kernels cannot compute gradients through a cap; None if they can, or have none."""
    names = set(problem.activations)
    if not problem.has_logit_cap or problem.head_dim not in SPILLING_CAPPED_WIDTHS:
        return None
    if len(names) > 1 or (problem.approx is None and names & set(SPILLING_CAPPED)):
        return (
            f"with a logit_cap at H={problem.head_dim}, the backward kernels take one activation, "
            f"and {' and '.join(SPILLING_CAPPED)} if they are approximate, but activation is "
            f"{', '.join(problem.activations)} with approx={problem.approx}"
        )
    return None


@dataclasses.dataclass(frozen=True)
class GdpaBackwardProblem(GdpaSizes):
    """Sizes of the gradient of a generalised dot-product attention."""

    op: ClassVar[str] = "gdpa_backward"
    config_type: ClassVar[type] = GdpaBackwardConfig

    def useful_flops(self, pairs: int) -> int:
        """Counts five products for the two of the forward pass."""
        return 5 * super().useful_flops(pairs) // 2

    def rank(self) -> Iterator[Ranked]:
        """Yields the configurations worth timing."""
        others = itertools.starmap(GdpaBackwardConfig, itertools.product(BLOCKS, STAGES))
        configs = dict.fromkeys((default_config(self.head_dim), *others))
        return by_rule(x for x in configs if x.illegal_reason(self) is None)
