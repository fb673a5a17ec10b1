"""Configurations of the kernels for linear compression's gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import (
    BLOCK_K,
    NUM_CONSUMERS,
    TILE_ROWS,
    WGMMA_M,
    why_not_dtype,
    why_not_smem,
)
from ikbo_jax.problems.linear_compression import LinearCompressionProblem
from ikbo_jax.problems.problem import Config

#: Largest n of a WGMMA instruction.
MAX_BLOCK_M = 256
#: What a work item costs beside its k steps, in k steps: the first load and the store.
ITEM_COST = 12
#: Most waves of work items that `WeightGradientConfig.splits` considers.
MAX_WAVES = 4


class WeightGradientShared(NamedTuple):
    """Shared memory and barriers of the kernel for a weight's gradient."""

    embedding: Any  # [stages, 2, 64, 64]
    cotangent: Any  # [stages, block_m, 64]
    stages: Any  # ring, whose operands are the two above
    staging: Any


@dataclasses.dataclass(frozen=True)
class WeightGradientConfig(Config):
    """Tuning parameters of the kernel for a weight's gradient.

    Attributes:
      block_m: compressed rows of a CTA tile, the n of a WGMMA instruction; a multiple of 8.
      stages: stages of the shared memory ring; each holds 64 embedding columns.
      cluster: number of CTAs with neighbouring tiles along M that share embedding tiles by
        multicast, 1 or 2.
    """

    block_m: int = 224
    stages: int = 5
    cluster: int = 1

    @property
    def shared(self) -> WeightGradientShared:
        """Shared memory and barriers of one CTA."""
        return WeightGradientShared(
            embedding=memory.Tiles((self.stages, NUM_CONSUMERS, WGMMA_M, BLOCK_K)),
            cotangent=memory.Tiles((self.stages, self.block_m, BLOCK_K)),
            stages=memory.Ring(
                None,
                None,
                memory.Barriers(self.stages, 1 + NUM_CONSUMERS),
                memory.Barriers(self.stages, NUM_CONSUMERS, is_clustered=self.cluster > 1),
            ),
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, self.block_m), "float32"),
        )

    def illegal_reason(self, problem: LinearCompressionProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := why_not_dtype(problem.dtype):
            return reason
        if problem.n % 8:
            return (
                f"the kernel needs N to be a multiple of 8 (16 bytes, for TMA), but N={problem.n}"
            )
        if self.block_m % 8 or not 8 <= self.block_m <= MAX_BLOCK_M:
            return f"block_m must be a multiple of 8 from 8 to {MAX_BLOCK_M}, but is {self.block_m}"
        if self.stages < 2:
            return f"stages must be at least 2, but is {self.stages}"
        if self.cluster not in (1, 2):
            return f"cluster must be 1 or 2, but is {self.cluster}"
        return why_not_smem(self, memory.smem_bytes(self.shared))

    def splits(self, batch: int, k: int, m: int, n: int, num_sms: int) -> int:
        """Into how many parts the batch is split, so that CTAs are busy to the end.

        Each part's sum is a work item, which takes `ITEM_COST` beside its products.
        """
        tiles = -(-k // TILE_ROWS) * -(-(-(-m // self.block_m)) // self.cluster)
        workers = num_sms // self.cluster
        steps = -(-n // BLOCK_K)

        def time(splits: int) -> float:
            waves = -(-tiles * splits // workers)
            return waves * (-(-batch // splits) * steps + ITEM_COST)

        most = max(1, min(batch, MAX_WAVES * workers // tiles))
        return min(range(1, most + 1), key=time)


class SumShared(NamedTuple):
    """Shared memory and barriers of the kernel that sums cotangents."""

    cotangent: Any  # [stages, 2, 64, 64]
    sums: Any  # [2, 1, 64, 64]
    stages: Any  # ring, whose operands are `cotangent`
    staging: Any


@dataclasses.dataclass(frozen=True)
class SumConfig(Config):
    """Tuning parameters of the kernel that sums cotangents over the candidates of each user.

    Attributes:
      stages: stages of the shared memory ring; each holds a tile of 128 x 64 of one candidate.
    """

    stages: int = 12

    @property
    def shared(self) -> SumShared:
        """Shared memory and barriers of one CTA."""
        tile = (NUM_CONSUMERS, WGMMA_M, BLOCK_K)
        return SumShared(
            cotangent=memory.Tiles((self.stages, *tile)),
            sums=memory.Tiles((NUM_CONSUMERS, 1, WGMMA_M, BLOCK_K)),
            stages=memory.Ring(
                None,
                None,
                memory.Barriers(self.stages, NUM_CONSUMERS),
                memory.Barriers(self.stages, NUM_CONSUMERS),
            ),
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, BLOCK_K), "float32"),
        )

    def illegal_reason(self, problem: LinearCompressionProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := why_not_dtype(problem.dtype):
            return reason
        if problem.n % 8:
            return (
                f"the kernel needs N to be a multiple of 8 (16 bytes, for TMA), but N={problem.n}"
            )
        if self.stages < 2:
            return f"stages must be at least 2, but is {self.stages}"
        return why_not_smem(self, memory.smem_bytes(self.shared))
