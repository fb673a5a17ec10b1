"""Configurations of the linear-compression kernel whose tiles span candidates."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Staging buffers of a consumer warpgroup: it writes one while TMA stores the other.
STAGING_SLOTS = 2
#: Columns of a granule: the rows of a WGMMA accumulator that one warp holds.
GRANULE = 16
#: Most compressed rows of all of a consumer's accumulators.
MAX_ROWS = 224
#: Alignment of weight rows, bytes.  TMA needs 16; with 128, a row of an operand tile is one L2
#: line, not parts of two: 0.328 instead of 0.359 ms for the candidate product of the default shape
#: (H200). A launch of packed tiles of fewer FLOPs takes weights whose rows TMA can load as they
#: are: a launch that pads them takes longer.
TMA_ALIGNMENT, WEIGHT_ALIGNMENT = 16, 128
PAD_FROM_FLOPS = 1e10
#: From this number of whole user tiles per SM on, smaller tiles no longer balance the work better.
WHOLE_TILES_PER_SM = 4


def block_width(n: int) -> int:
    """Columns of a block: of 64, 32 and 16 the largest that divides N, a multiple of 16."""
    return next(width for width in (64, 32, 16) if n % width == 0)


def row_parts(block_n: int) -> int:
    """Counts the parts of a tile's rows: one for each consumer if both share the columns."""
    return NUM_CONSUMERS if block_n < TILE_ROWS else 1


def rings(config: Any, copies: int, *, with_claims: bool) -> dict[str, Any]:
    """Declares barriers of a ring, which `copies` arrive at, and those of claimed tiles."""
    stages = config.num_stages
    free_in_cta = memory.Barriers(stages, NUM_CONSUMERS)
    free = dataclasses.replace(free_in_cta, is_clustered=config.cluster > 1)
    # The producer is at most `stages` tiles ahead, since each tile uses at least one stage.
    tickets = memory.descriptors(stages + 2, 1)
    return {
        "stages": memory.barriers(stages, copies, free),
        "tickets": tickets if with_claims else None,
        "user_stage_free": free_in_cta if with_claims else None,
    }


@functools.lru_cache(maxsize=4096)
def smem_bytes(config: Any) -> int:
    """Counts bytes of shared memory of one CTA of a single launch; other launches take less."""
    return memory.smem_bytes(config.shared(with_claims=True))


@hopper.first_reason
def why_not_stages(config: Any, of_one: int, rows: int) -> Iterator[str | None]:
    """Checks stores, ring and cluster of such a kernel, and its shared memory.

    `of_one`: compressed rows of a consumer; `rows`: of all its accumulators.
    """
    if config.epilogue_rows < 8 or config.epilogue_rows % 8 or of_one % config.epilogue_rows:
        yield (
            f"epilogue_rows must be a multiple of 8 that divides a consumer's {of_one} rows of "
            f"block_m={config.block_m}, but is {config.epilogue_rows}"
        )
    if (rows // config.epilogue_rows) % STAGING_SLOTS:
        yield (
            f"a tile must have a multiple of {STAGING_SLOTS} stores, so that every tile starts "
            f"with the staging buffer whose store was issued first, but has "
            f"{rows // config.epilogue_rows}"
        )
    yield hopper.why_too_few(config, num_stages=2)
    if config.cluster not in (1, 2):
        yield f"cluster must be 1 or 2, but is {config.cluster}"
    yield hopper.why_not_smem(config, smem_bytes(config))


@dataclasses.dataclass(frozen=True)
class PackedCompressionConfig(Config):
    """Tuning parameters of the kernel whose tiles span candidates; others are as of the other
    kernel.

    Attributes:
      block_n: embedding columns of a CTA tile, of consecutive candidates. Of a multiple of 128,
        each consumer has half of the columns; of 64 columns, half of the tile's compressed rows.
      block_m: compressed rows of a CTA tile; a multiple of 16 for each of its parts.
      epilogue_rows: compressed rows that one TMA store writes; divides a consumer's rows.
    """

    trim: ClassVar[bool] = False

    block_n: int = 256
    block_m: int = 64
    num_stages: int = 4
    epilogue_rows: int = 32
    single_launch: bool = True
    cluster: int = 1

    @property
    def accumulators(self) -> int:
        """Accumulators of a consumer, of 64 columns each."""
        return -(-self.block_n // TILE_ROWS)

    @property
    def parts(self) -> int:
        return row_parts(self.block_n)

    @property
    def consumer_rows(self) -> int:
        """Number of compressed rows of each of a consumer's accumulators."""
        return self.block_m // self.parts

    def shared(self, *, with_claims: bool, n: int = WGMMA_M) -> Any:
        """Declares shared memory and barriers of one CTA; the size does not depend on N."""
        stages, width = self.num_stages, block_width(n)
        blocks = self.block_n // width
        staged = (WGMMA_M // width, self.epilogue_rows, width)
        return memory.shared(
            weight=memory.Tiles((stages, self.parts, self.consumer_rows, BLOCK_K)),
            embedding=memory.Blocks((stages, blocks, BLOCK_K, width)),
            staging=memory.Blocks((NUM_CONSUMERS, STAGING_SLOTS, *staged)),
            # One copy loads all blocks if a candidate is one block.
            **rings(self, self.parts + (1 if n == width else blocks), with_claims=with_claims),
        )

    @hopper.first_reason
    def illegal_reason(self, problem: Any) -> Iterator[str | None]:
        yield why_not_served(problem)
        if self.block_n != WGMMA_M and (self.block_n % TILE_ROWS or self.block_n < TILE_ROWS):
            yield f"block_n must be {WGMMA_M} or a multiple of {TILE_ROWS}, but is {self.block_n}"
        multiple, rows = 16 * self.parts, self.accumulators * self.consumer_rows
        if self.block_m % multiple or self.block_m < multiple or rows > MAX_ROWS:
            yield (
                f"block_m must be a multiple of {multiple}, and all accumulators of a consumer "
                f"have at most {MAX_ROWS} rows, so that they and a finished tile fit the "
                f"registers, but block_m is {self.block_m} and block_n is {self.block_n}, which "
                f"gives {rows} rows"
            )
        yield why_not_stages(self, self.consumer_rows, rows)


@hopper.first_reason
def why_not_served(problem: Any) -> Iterator[str | None]:
    """Says why no configuration can run a `LinearCompressionProblem`; None if some may."""
    yield hopper.why_not_dtype(problem.dtype)
    if problem.n % GRANULE:
        yield (
            f"the kernel whose tiles span candidates needs N to be a multiple of {GRANULE}, "
            f"but N={problem.n}"
        )
    if min(problem.ks) < 1 or min(problem.batches) < 1:
        yield (
            "the kernel needs K and B of at least 1 at every level, "
            f"but K={problem.ks} and B={problem.batches}"
        )
    # Mosaic GPU leaves axes of size one out of TMA's descriptors, so that a store past their end
    # would not be dropped.
    if min(problem.batches[-1], problem.m) < 2:
        yield (
            "the kernel whose tiles span candidates needs M and the last level's B of at least 2, "
            f"but M={problem.m} and B={problem.batches}"
        )
