"""Configurations of the linear-compression kernel whose CTAs keep their weights."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from ikbo_jax.problems import hopper, memory, packed_compression
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_K, WGMMA_M
from ikbo_jax.problems.packed_compression import STAGING_SLOTS, block_width
from ikbo_jax.problems.problem import Config

#: Compressed rows of all accumulators of a part: accumulators, fragments and the address
#: arithmetic beside them take 128 registers a thread, with which four CTAs share an SM.
MAX_ROWS = 128
#: Parts of a tile, which the kernel unrolls.
MAX_PARTS = 8
#: Rows of K that one TMA copy loads.
MAX_DEPTH = 256
#: Compressed rows of a tile of a coarser level, and its rows of K, all of which are in flight at
#: once. Longer sums are split, and the finer level adds one fragment for each split.
COARSE_ROWS, COARSE_K = 48, 640
#: Bytes of shared memory of an SM, and what it reserves for each CTA.
SM_SMEM_BYTES, RESERVED_BYTES = 228 * 1024, 1024
#: Most CTAs of an SM: 16 x 128 threads of 128 registers would not fit.
MAX_CTAS = 8


class ResidentCompressionShared(NamedTuple):
    """Shared memory and barriers of one CTA."""

    weight: Any  # [k blocks of 64, rows, 64]
    embedding: Any  # [stages * k steps, column blocks, depth, block_width]
    staging: Any  # [STAGING_SLOTS, column blocks, block_m, block_width]; None at coarser levels
    ready: Any  # a barrier for every k step of every stage


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a level's products are divided among CTAs.

    A CTA has one group of compressed rows and one split of K, whose weights it keeps, and a range
    of column tiles. It multiplies the `parts` of its group one after another.

    Attributes:
      accumulators: of a tile, 64 columns each.
      block_m: compressed rows of a part.
      parts: parts of a group.
      groups: groups of compressed rows.
      splits: splits of K; each has a fragment of its own.
      steps: k steps of a split.
      depth: rows of K of a step.
      stages: column tiles that are loaded or multiplied at a time.
      ctas: CTAs of an SM.
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

    @property
    def block_n(self) -> int:
        """Columns of a tile."""
        return self.accumulators * WGMMA_M

    @property
    def rows(self) -> int:
        """Compressed rows of a group."""
        return self.parts * self.block_m

    @property
    def k(self) -> int:
        """Rows of K of a split."""
        return self.steps * self.depth

    def shared(self, n: int, *, stores: bool) -> ResidentCompressionShared:
        """Shared memory of one CTA; `stores`: of the last level."""
        width = block_width(n)
        blocks = self.block_n // width
        slots = self.stages * self.steps
        # Rows of the batch that are one block each are contiguous in the output.
        staged = memory.Rows if is_contiguous(n) else memory.Blocks
        return ResidentCompressionShared(
            weight=memory.Tiles((-(-self.k // BLOCK_K), self.rows, BLOCK_K)),
            embedding=memory.Blocks((slots, blocks, self.depth, width)),
            staging=staged((STAGING_SLOTS, blocks, self.block_m, width)) if stores else None,
            # One copy loads all blocks if a candidate is one block.
            ready=memory.Barriers(slots, 1 if n == width else blocks),
        )


def is_contiguous(n: int) -> bool:
    """Whether a row of the batch is one block narrower than 64 columns.

    TMA would store such blocks in rows of 32 or 64 bytes, several cycles for each of them; but a
    part of a candidate is contiguous, and one bulk copy stores it.
    """
    return block_width(n) == n < WGMMA_M


def _depth(k: int) -> tuple[int, int]:
    """(k steps, rows of K of each); a step's weights begin at a block of 64 columns."""
    steps = -(-k // MAX_DEPTH)
    multiple = WGMMA_K if steps == 1 else BLOCK_K
    return steps, -(-k // (steps * multiple)) * multiple


@dataclasses.dataclass(frozen=True)
class ResidentCompressionConfig(Config):
    """Tuning parameters of the kernel whose CTAs keep their weights in shared memory.

    Attributes:
      accumulators: of a tile of the last level, 64 columns of consecutive candidates each.
      block_m: compressed rows that are multiplied and stored at a time; a multiple of 16.
      num_stages: tiles whose embeddings shared memory holds.
      ctas: CTAs of an SM.
    """

    single_launch: ClassVar[bool] = False

    accumulators: int = 2
    block_m: int = 16
    num_stages: int = 2
    ctas: int = 4

    def layout(self, problem: Any, level: int) -> Layout:
        """How a level of a `LinearCompressionProblem` is divided."""
        k, m = problem.ks[level], problem.m
        if level == len(problem.ks) - 1:
            parts = -(-m // self.block_m)
            steps, depth = _depth(k)
            return Layout(
                self.accumulators,
                self.block_m,
                parts,
                groups=1,
                splits=1,
                steps=steps,
                depth=depth,
                stages=self.num_stages,
                ctas=self.ctas,
            )
        groups = -(-m // COARSE_ROWS)
        block_m = -(-m // (16 * groups)) * 16
        steps, depth = _depth(-(-k // -(-k // COARSE_K)))
        splits = -(-k // (steps * depth))
        layout = Layout(1, block_m, 1, groups, splits, steps, depth, stages=1, ctas=1)
        return _many_ctas(problem, level, layout)

    def smem_bytes(self, problem: Any) -> int:
        """Bytes of shared memory of a CTA, of the level that needs most."""
        last = len(problem.ks) - 1
        return max(
            memory.smem_bytes(self.layout(problem, i).shared(problem.n, stores=i == last))
            for i in range(last + 1)
        )

    def illegal_reason(self, problem: Any) -> str | None:
        """Why the kernel cannot run a `LinearCompressionProblem` so; None if it can."""
        if reason := packed_compression.why_not_served(problem):
            return reason
        if self.block_m % 16 or self.block_m < 16:
            return f"block_m must be a multiple of 16, but is {self.block_m}"
        if self.accumulators < 1 or self.accumulators * self.block_m > MAX_ROWS:
            return (
                f"accumulators times block_m must be at most {MAX_ROWS}, so that accumulators and "
                f"fragments fit the registers, but are {self.accumulators} and {self.block_m}"
            )
        if -(-problem.m // self.block_m) > MAX_PARTS:
            return (
                f"a tile must have at most {MAX_PARTS} parts, but M={problem.m} and block_m is "
                f"{self.block_m}"
            )
        if self.num_stages < 1:
            return f"num_stages must be at least 1, but is {self.num_stages}"
        if not 1 <= self.ctas <= MAX_CTAS:
            return f"ctas must be from 1 to {MAX_CTAS}, but is {self.ctas}"
        return hopper.why_not_smem(self, self.smem_bytes(problem))


def _many_ctas(problem: Any, level: int, layout: Layout) -> Layout:
    """With as many CTAs on an SM as shared memory has room for, and a second stage if it has."""
    size = memory.smem_bytes(layout.shared(problem.n, stores=False))
    tiles = -(-problem.batches[level] * problem.n // layout.block_n)
    ctas = max(1, min(MAX_CTAS, SM_SMEM_BYTES // (size + RESERVED_BYTES)))
    if tiles * layout.groups * layout.splits <= ctas * packed_compression.NUM_SMS:
        return dataclasses.replace(layout, ctas=ctas)
    two = dataclasses.replace(layout, stages=2)
    size = memory.smem_bytes(two.shared(problem.n, stores=False))
    if size > SM_SMEM_BYTES // 2 - RESERVED_BYTES:
        return dataclasses.replace(layout, ctas=ctas)
    return dataclasses.replace(two, ctas=min(MAX_CTAS, SM_SMEM_BYTES // (size + RESERVED_BYTES)))
