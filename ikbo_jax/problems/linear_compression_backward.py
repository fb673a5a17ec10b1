"""The gradient of linear compression: its problems, and the configurations of its kernels."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.linear_compression import (
    LinearCompressionConfig,
    LinearCompressionProblem,
    LinearCompressionSizes,
)
from ikbo_jax.problems.packed_compression import PackedCompressionConfig
from ikbo_jax.problems.problem import Config, Ranked, by_rule
from ikbo_jax.problems.resident_compression import ResidentCompressionConfig

#: Configurations of the kernels that compute a gradient of embeddings.
EmbeddingConfig = LinearCompressionConfig | PackedCompressionConfig | ResidentCompressionConfig
#: The configuration that stands for none where no configuration is legal.
_ROWS = LinearCompressionConfig(single_launch=False)
#: Largest n of a WGMMA instruction.
MAX_BLOCK_M = 256
#: Most stages of the ring of a weight's gradient; tiles of 224 compressed rows leave room for 5.
MAX_STAGES = 8
#: What a work item costs beside its k steps, in k steps: the first load and the store.
ITEM_COST = 12
#: Most waves of work items that `WeightGradientConfig.splits` considers.
MAX_WAVES = 4


@dataclasses.dataclass(frozen=True)
class WeightGradientConfig(Config):
    """Tuning parameters of the kernel for a weight's gradient.

    `block_m`: compressed rows of a CTA tile, the n of a WGMMA instruction; a multiple of 8.
    `stages` of the shared memory ring hold 64 embedding columns each.
    """

    block_m: int = 224
    stages: int = 5

    @property
    def shared(self) -> Any:
        return memory.shared(
            embedding=memory.Tiles((self.stages, NUM_CONSUMERS, WGMMA_M, BLOCK_K)),
            cotangent=memory.Tiles((self.stages, self.block_m, BLOCK_K)),
            stages=memory.barriers(self.stages, 1 + NUM_CONSUMERS),
        )

    @hopper.first_reason
    def illegal_reason(self, problem: LinearCompressionSizes) -> Iterator[str | None]:
        yield _why_not_sizes(problem)
        yield hopper.why_not_rows(problem)
        if self.block_m % 8 or not 8 <= self.block_m <= MAX_BLOCK_M:
            yield f"block_m must be a multiple of 8 from 8 to {MAX_BLOCK_M}, but is {self.block_m}"
        yield hopper.why_too_few(self, stages=2)
        yield hopper.why_not_smem(self, memory.smem_bytes(self.shared))

    def splits(self, batch: int, k: int, m: int, n: int, *, problems: int, num_sms: int) -> int:
        """Counts parts of each problem's batch, whose products and `ITEM_COST` end together."""
        tiles = problems * -(-k // TILE_ROWS) * -(-m // self.block_m)
        steps = -(-n // BLOCK_K)

        def time(splits: int) -> float:
            waves = -(-tiles * splits // num_sms)
            return waves * (-(-batch // splits) * steps + ITEM_COST)

        most = max(1, min(batch, MAX_WAVES * num_sms // tiles))
        return min(range(1, most + 1), key=time)


def embedding_problem(problem: LinearCompressionSizes, level: int) -> LinearCompressionProblem:
    """Returns the compression by a transposed weight that gives a level's gradient."""
    sizes = (problem.batches[level],), (problem.m,), problem.ks[level], problem.n
    return LinearCompressionProblem(*sizes, problem.dtype)


def embedding_config(problem: LinearCompressionSizes, level: int) -> EmbeddingConfig:
    """Returns the configuration of the forward kernel that multiplies a level's cotangents by the
    transposed weight; legal unless none is.
    """
    config: EmbeddingConfig = embedding_problem(problem, level).default_config() or _ROWS
    return config


def default_config(problem: LinearCompressionSizes) -> WeightGradientConfig:
    """Returns the configuration for all weights without a measurement; legal unless none is."""
    return _with_most_stages(_block_ms(problem.m)[0])


def _with_most_stages(block_m: int) -> WeightGradientConfig:
    weights = [WeightGradientConfig(block_m, stages) for stages in range(MAX_STAGES, 1, -1)]
    return next(x for x in weights if memory.smem_bytes(x.shared) <= hopper.MAX_SMEM_BYTES)


def _block_ms(m: int) -> list[int]:
    """Lists values of block_m by the cost of tiles over M; each tile costs 32 more rows."""
    least = -(-m // MAX_BLOCK_M)
    blocks = [-(-m // (8 * tiles)) * 8 for tiles in range(max(1, least), least + 3)]
    return sorted(dict.fromkeys(blocks), key=lambda block: -(-m // block) * (block + 32))


def illegal_reason(problem: LinearCompressionSizes) -> str | None:
    """Says why the kernels cannot compute a problem's gradient; None if they can."""
    if reason := _why_not_sizes(problem):
        return reason
    for level in range(len(problem.ks)):
        config = embedding_config(problem, level)
        if reason := config.illegal_reason(embedding_problem(problem, level)):
            return reason
    return default_config(problem).illegal_reason(problem)


def _why_not_sizes(problem: LinearCompressionSizes) -> str | None:
    p = problem
    if min(*p.batches, *p.ks, p.m, p.n) >= 1:
        return None
    sizes = f"B={p.batches}, K={p.ks}, M={p.m} and N={p.n}"
    return f"the gradient's kernels need sizes of at least 1, but {sizes}"


@dataclasses.dataclass(frozen=True)
class LinearCompressionBackwardProblem(LinearCompressionSizes):
    """Sizes of the gradient of a linear compression."""

    op: ClassVar[str] = "linear_compression_backward"
    config_type: ClassVar[type] = WeightGradientConfig

    @property
    def useful_flops(self) -> int:
        """Number of FLOPs of two products a level: for the weight and for the embedding."""
        return 2 * super().useful_flops

    def rank(self) -> Iterator[Ranked]:
        """Yields the configurations of the kernel for weights that are worth timing.

        The kernels for embeddings have the configurations of their forward problems.
        """
        if illegal_reason(self) is not None:
            return iter(())
        return by_rule(
            dataclasses.replace(config, stages=stages)
            for config in map(_with_most_stages, _block_ms(self.m))
            for stages in range(config.stages, max(config.stages - 2, 1), -1)
        )
