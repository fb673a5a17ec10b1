"""Configurations of the kernels for linear compression's gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import (
    BLOCK_K,
    MAX_SMEM_BYTES,
    NUM_CONSUMERS,
    TILE_ROWS,
    WGMMA_M,
    why_not_dtype,
    why_not_smem,
    why_not_width,
)
from ikbo_jax.problems.linear_compression import (
    LinearCompressionConfig,
    LinearCompressionProblem,
)
from ikbo_jax.problems.packed_compression import PackedCompressionConfig
from ikbo_jax.problems.problem import Config

#: Largest n of a WGMMA instruction.
MAX_BLOCK_M = 256
#: Most stages of the ring of a weight's gradient; tiles of 224 compressed rows leave room for 5.
MAX_STAGES = 8
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
    """

    block_m: int = 224
    stages: int = 5

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
                memory.Barriers(self.stages, NUM_CONSUMERS),
            ),
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, self.block_m), "float32"),
        )

    def illegal_reason(self, problem: LinearCompressionProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := why_not_dtype(problem.dtype):
            return reason
        if reason := why_not_width(problem.n):
            return reason
        if self.block_m % 8 or not 8 <= self.block_m <= MAX_BLOCK_M:
            return f"block_m must be a multiple of 8 from 8 to {MAX_BLOCK_M}, but is {self.block_m}"
        if self.stages < 2:
            return f"stages must be at least 2, but is {self.stages}"
        return why_not_smem(self, memory.smem_bytes(self.shared))

    def splits(self, batch: int, k: int, m: int, n: int, *, problems: int, num_sms: int) -> int:
        """Into how many parts each problem's batch is split, so that CTAs are busy to the end.

        Each part's sum is a work item, which takes `ITEM_COST` beside its products.
        """
        tiles = problems * -(-k // TILE_ROWS) * -(-m // self.block_m)
        steps = -(-n // BLOCK_K)

        def time(splits: int) -> float:
            waves = -(-tiles * splits // num_sms)
            return waves * (-(-batch // splits) * steps + ITEM_COST)

        most = max(1, min(batch, MAX_WAVES * num_sms // tiles))
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
        if reason := why_not_width(problem.n):
            return reason
        if self.stages < 2:
            return f"stages must be at least 2, but is {self.stages}"
        return why_not_smem(self, memory.smem_bytes(self.shared))


@dataclasses.dataclass(frozen=True)
class LinearCompressionBackwardConfig(Config):
    """Tuning parameters of all kernels of linear compression's gradient.

    Attributes:
      embeddings: of the forward kernel that multiplies cotangents by a transposed weight, for every
        level.
      weights: of the kernel for a weight's gradient, for every level.
      sums: of the kernel that sums cotangents.
    """

    embeddings: tuple[LinearCompressionConfig | PackedCompressionConfig, ...]
    weights: tuple[WeightGradientConfig, ...]
    sums: SumConfig = SumConfig()

    def illegal_reason(self, problem: LinearCompressionProblem) -> str | None:
        """Why the kernels cannot compute the gradient of `problem`; None if they can."""
        if not len(self.embeddings) == len(self.weights) == len(problem.ks):
            return (
                f"the configuration is for {len(self.embeddings)} and {len(self.weights)} levels, "
                f"but the problem has {len(problem.ks)}"
            )
        reasons = [
            config.illegal_reason(embedding_problem(problem, level))
            for level, config in enumerate(self.embeddings)
        ]
        reasons += [config.illegal_reason(problem) for config in (*self.weights, self.sums)]
        return next((reason for reason in reasons if reason is not None), None)


def embedding_problem(problem: LinearCompressionProblem, level: int) -> LinearCompressionProblem:
    """The linear compression by a transposed weight that gives a level's gradient: M is its K."""
    return dataclasses.replace(
        problem, batches=(problem.batches[level],), ks=(problem.m,), m=problem.ks[level]
    )


def default_config(problem: LinearCompressionProblem) -> LinearCompressionBackwardConfig:
    """The configuration without a measurement; legal unless none is."""
    embeddings = []
    for level in range(len(problem.ks)):
        config = embedding_problem(problem, level).default_config()
        embeddings.append(config or LinearCompressionConfig(single_launch=False))
    block_m = _block_m(problem.m)
    weights = [WeightGradientConfig(block_m, stages) for stages in range(MAX_STAGES, 1, -1)]
    weight = next(x for x in weights if memory.smem_bytes(x.shared) <= MAX_SMEM_BYTES)
    return LinearCompressionBackwardConfig(tuple(embeddings), (weight,) * len(embeddings))


def _block_m(m: int) -> int:
    """The block_m whose tiles cover M at the least cost; each costs 32 rows beside its own."""
    least = -(-m // MAX_BLOCK_M)
    blocks = [-(-m // (8 * tiles)) * 8 for tiles in range(max(1, least), least + 3)]
    return min(blocks, key=lambda block: -(-m // block) * (block + 32))


def illegal_reason(problem: LinearCompressionProblem) -> str | None:
    """Why the kernels cannot compute the gradient of a problem; None if they can."""
    if min(*problem.batches, *problem.ks, problem.m, problem.n) < 1:
        return (
            f"the gradient's kernels need sizes of at least 1, but B={problem.batches}, "
            f"K={problem.ks}, M={problem.m} and N={problem.n}"
        )
    return default_config(problem).illegal_reason(problem)
