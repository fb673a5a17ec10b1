"""Configurations of the linear-compression kernel whose CTAs keep their weights."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory, packed_compression
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_K, WGMMA_M
from ikbo_jax.problems.packed_compression import STAGING_SLOTS, block_width
from ikbo_jax.problems.problem import Config

#: Compressed rows of all accumulators of a part: accumulators, fragments and the address
#: arithmetic beside them take 128 registers a thread, with which four CTAs share an SM.
MAX_ROWS = 128
#: Parts of a tile: more would not fit beside the embeddings.
MAX_PARTS = 16
#: Rows of K that one TMA copy loads.
MAX_DEPTH = 256
#: Compressed rows of fragments that are loaded before a part is multiplied: 96 registers.
MAX_EARLY_ROWS = 128
#: Most CTAs of an SM: 16 x 128 threads of 128 registers would not fit.
MAX_CTAS = 8
#: Most compressed rows of a tile of a coarser level; more were not measured.
COARSE_ROWS = 48


def is_contiguous(n: int) -> bool:
    """Whether N is one block of fewer than 64 columns: one copy stores part of a candidate."""
    return block_width(n) == n < WGMMA_M


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a level's products are divided among CTAs.

    A CTA has one group of compressed rows and one split of K, whose weights it keeps, and a range
    of column tiles. It multiplies the `parts` of its group one after another.

    Attributes:
      accumulators: of a tile, 64 columns each.
      block_m: compressed rows of a part.
      splits: splits of K; each has a fragment of its own.
      steps: k steps of a split, of `depth` rows of K each.
      stages: column tiles that are loaded or multiplied at a time.
      ctas: CTAs of an SM.
      gathered: (k steps, rows of K of a step) of the users' embeddings, if a tile loads these.
      has_one_user: whether all tiles of a CTA have the same columns of the only user, whose product
        the CTA computes once.
      by_threads: whether a CTA has one tile, whose embeddings its threads load, not TMA.
      strips: strips of `block_n` columns of N, one for each CTA, if it has one user and a wider N.
    """

    accumulators: int
    block_m: int
    parts: int
    groups: int
    splits: int
    steps: int
    depth: int
    stages: int
    ctas: int
    gathered: tuple[int, int] | None = None
    has_one_user: bool = False
    strips: int = 1
    by_threads: bool = False

    @property
    def shares(self) -> int:
        """Number of CTAs that have the same column tiles, or the same rows of the batch."""
        return self.groups * self.splits * self.strips

    def tiles(self, batch: int, n: int) -> int:
        """Counts the column tiles of a strip."""
        return -(-batch * n // (self.block_n * self.strips))

    @property
    def block_n(self) -> int:
        """Columns of a tile."""
        return self.accumulators * WGMMA_M

    @property
    def k_blocks(self) -> tuple[int, int]:
        """Numbers of 64-column blocks of this level's weights and of the gathered level's."""
        ks = self.k, math.prod(self.gathered or (0,))
        own, gathered = (-(-k // BLOCK_K) for k in ks)
        return own, gathered

    @property
    def rows(self) -> int:
        """Number of compressed rows of a group."""
        return self.parts * self.block_m

    @property
    def k(self) -> int:
        """Number of rows of K of a split."""
        return self.steps * self.depth

    def shared(self, n: int, *, stores: bool) -> Any:
        """Declares one CTA's shared memory; `stores` (the last level) adds the staging buffer."""
        width = block_width(n)
        blocks = self.block_n // width
        gathered = gathered_ready = None  # the users' embeddings, if a tile loads them
        if self.gathered is not None:
            steps, depth = self.gathered
            if self.has_one_user:
                # A repeated block is there once: a descriptor says that blocks are 0 bytes apart.
                gathered = memory.Blocks((steps, 1 if n == width else blocks, depth, width))
            else:
                gathered = memory.Blocks((self.stages * steps, blocks, depth, width))
                gathered_ready = memory.Barriers(self.stages * steps, blocks)
        slots = self.stages * self.steps
        # Rows of the batch that are one block each are contiguous in the output.
        staged = memory.Rows if is_contiguous(n) else memory.Blocks
        return memory.shared(
            weight=memory.Tiles((self.parts * sum(self.k_blocks), self.block_m, BLOCK_K)),
            embedding=memory.Blocks((slots, blocks, self.depth, width)),
            gathered=gathered,
            staging=staged((STAGING_SLOTS, blocks, self.block_m, width)) if stores else None,
            # One copy loads all blocks if a candidate is one block.
            ready=None if self.by_threads else memory.Barriers(slots, 1 if n == width else blocks),
            gathered_ready=gathered_ready,
        )


def early_splits(layout: Layout) -> int:
    """Fragments that are loaded before a part is multiplied; the others are loaded after it."""
    return max(1, MAX_EARLY_ROWS // (layout.accumulators * layout.block_m))


def is_copied(k: int) -> bool:
    """Whether asynchronous copies load a weight [M, K]: whether rows begin at multiples of 8 bytes.

    Copies of 4 bytes would take longer than vectors that are loaded through registers.
    """
    return k % 4 == 0


def elements_of_load(k: int) -> int:
    """Counts the elements of a weight [M, K] that a thread loads at a time."""
    return 4 if k % 8 == 4 else 8


def _depth(k: int) -> tuple[int, int]:
    """Returns (k steps, rows of K of each) that load least; a step begins at a whole block."""
    if k <= MAX_DEPTH:
        return 1, -(-k // WGMMA_K) * WGMMA_K
    depths = range(BLOCK_K, MAX_DEPTH + 1, BLOCK_K)
    return min(((-(-k // depth), depth) for depth in depths), key=lambda x: (x[0] * x[1], x[0]))


@dataclasses.dataclass(frozen=True)
class ResidentCompressionConfig(Config):
    """Tuning parameters of the kernel whose CTAs keep their weights in shared memory.

    Attributes:
      accumulators: of a tile of the last level, 64 columns of consecutive candidates each.
      block_m: compressed rows that are multiplied and stored at a time; a multiple of 16.
      num_stages: tiles whose embeddings shared memory holds.
      ctas: CTAs of an SM.
      gathers: whether a tile loads its users' embeddings and multiplies them again for every
        candidate, in a single launch, instead of adding fragments of an earlier one; two levels.
      coarse_k: most rows of K that a tile of a coarser level sums. Longer sums are split, and the
        finer level adds one fragment for each split.
      groups: groups of compressed rows of the last level; a CTA keeps the weights of one.
    """

    single_launch: ClassVar[bool] = False

    accumulators: int = 2
    block_m: int = 16
    num_stages: int = 2
    ctas: int = 4
    gathers: bool = False
    coarse_k: int = 640
    groups: int = 1

    def levels(self, problem: Any) -> range:
        """Lists the levels that have a launch."""
        count = len(problem.ks)
        return range(count - 1 if self.gathers else 0, count)

    def layout(self, problem: Any, level: int) -> Layout:
        """Divides a level of a `LinearCompressionProblem` among CTAs."""
        k, m = problem.ks[level], problem.m
        if level == len(problem.ks) - 1:
            parts = -(-m // (self.block_m * self.groups))
            steps, depth = _depth(k)
            block_n = self.accumulators * WGMMA_M
            is_whole = not (problem.n % block_n and block_n % problem.n)
            has_one_user = (
                self.gathers and problem.batches[level - 1] == 1 and parts == 1 and is_whole
            )
            return Layout(
                self.accumulators,
                self.block_m,
                parts,
                groups=self.groups,
                splits=1,
                steps=steps,
                depth=depth,
                stages=self.num_stages,
                ctas=self.ctas,
                gathered=_depth(problem.ks[level - 1]) if self.gathers else None,
                has_one_user=has_one_user,
                strips=max(1, problem.n // block_n) if has_one_user else 1,
            )
        steps, depth = _depth(-(-k // -(-k // self.coarse_k)))
        # As many compressed rows as there is room for beside the embeddings.
        size = hopper.MAX_SMEM_BYTES - 4 * hopper.SMEM_ALIGNMENT
        most = size // (2 * steps * depth) - WGMMA_M
        groups = -(-m // max(16, min(COARSE_ROWS, most // 16 * 16)))
        block_m = -(-m // (16 * groups)) * 16
        splits = -(-k // (steps * depth))
        layout = Layout(1, block_m, 1, groups, splits, steps, depth, stages=1, ctas=1)
        return _many_ctas(problem, level, layout)

    def smem_bytes(self, problem: Any) -> int:
        """Counts the bytes of shared memory of a CTA, at the level that needs most."""
        *_, last = levels = self.levels(problem)
        return max(
            memory.smem_bytes(self.layout(problem, i).shared(problem.n, stores=i == last))
            for i in levels
        )

    @hopper.first_reason
    def illegal_reason(self, problem: Any) -> Iterator[str | None]:
        yield packed_compression.why_not_served(problem)
        if self.block_m % 16 or self.block_m < 16:
            yield f"block_m must be a multiple of 16, but is {self.block_m}"
        if self.accumulators < 1 or self.accumulators * self.block_m > MAX_ROWS:
            yield (
                f"accumulators times block_m must be at most {MAX_ROWS}, so that accumulators and "
                f"fragments fit the registers, but are {self.accumulators} and {self.block_m}"
            )
        yield hopper.why_too_few(self, groups=1)
        if -(-problem.m // (self.block_m * self.groups)) > MAX_PARTS:
            yield (
                f"a tile must have at most {MAX_PARTS} parts, but M={problem.m} and block_m is "
                f"{self.block_m}"
            )
        yield hopper.why_too_few(self, num_stages=1)
        if not 1 <= self.ctas <= MAX_CTAS:
            yield f"ctas must be from 1 to {MAX_CTAS}, but is {self.ctas}"
        if self.gathers and len(problem.ks) != 2:
            yield f"the kernel gathers users of two levels only, but there are {len(problem.ks)}"
        yield hopper.why_too_few(self, coarse_k=1)
        yield hopper.why_not_smem(self, self.smem_bytes(problem))


def _many_ctas(problem: Any, level: int, layout: Layout) -> Layout:
    """Takes as many CTAs an SM as shared memory permits, and a second stage if there is room."""
    size = memory.smem_bytes(layout.shared(problem.n, stores=False))
    tiles = layout.tiles(problem.batches[level], problem.n)
    ctas = max(1, min(MAX_CTAS, hopper.ctas_by_smem(size)))
    if tiles * layout.groups * layout.splits <= ctas * hopper.NUM_SMS:
        by_threads = block_width(problem.n) < WGMMA_M
        return dataclasses.replace(layout, ctas=ctas, by_threads=by_threads)
    two = dataclasses.replace(layout, stages=2)
    most = hopper.ctas_by_smem(memory.smem_bytes(two.shared(problem.n, stores=False)))
    if most < 2:
        return dataclasses.replace(layout, ctas=ctas)
    return dataclasses.replace(two, ctas=min(MAX_CTAS, most))
