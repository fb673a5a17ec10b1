"""Configurations of the linear-compression kernel whose CTAs keep their weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

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
#: Most compressed rows of a tile of a coarser level.
COARSE_ROWS = 48
#: Bytes of shared memory of an SM, and what it reserves for each CTA.
SM_SMEM_BYTES, RESERVED_BYTES = 228 * 1024, 1024
#: Most CTAs of an SM: 16 x 128 threads of 128 registers would not fit.
MAX_CTAS = 8


class ResidentCompressionShared(NamedTuple):
    """Shared memory and barriers of one CTA."""

    weight: Any  # [parts * k blocks of 64, block_m, 64]
    embedding: Any  # [stages * k steps, column blocks, depth, block_width]
    gathered: Any  # likewise, of the users' embeddings; None unless a tile loads them
    staging: Any  # [STAGING_SLOTS, column blocks, block_m, block_width]; None at coarser levels
    ready: Any  # a barrier for every k step of every stage
    gathered_ready: Any  # likewise


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
      gathered: (k steps, rows of K of a step) of the users' embeddings, if a tile loads these.
      has_one_user: whether all tiles of a CTA have the same columns of the only user, whose product
        the CTA computes once.
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

    @property
    def shares(self) -> int:
        """CTAs that have the same column tiles, or the same rows of the batch."""
        return self.groups * self.splits * self.strips

    def tiles(self, batch: int, n: int) -> int:
        """Column tiles of a strip."""
        return -(-batch * n // (self.block_n * self.strips))

    @property
    def block_n(self) -> int:
        """Columns of a tile."""
        return self.accumulators * WGMMA_M

    @property
    def k_blocks(self) -> tuple[int, int]:
        """Blocks of 64 columns of the weights: of the level, and of the level that it gathers."""
        ks = self.k, math.prod(self.gathered or (0,))
        own, gathered = (-(-k // BLOCK_K) for k in ks)
        return own, gathered

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
        gathered = gathered_ready = None
        if self.gathered is not None:
            steps, depth = self.gathered
            slots = steps * (1 if self.has_one_user else self.stages)
            gathered = memory.Blocks((slots, blocks, depth, width))
            gathered_ready = memory.Barriers(slots, blocks)
        slots = self.stages * self.steps
        # Rows of the batch that are one block each are contiguous in the output.
        staged = memory.Rows if is_contiguous(n) else memory.Blocks
        return ResidentCompressionShared(
            weight=memory.Tiles((self.parts * sum(self.k_blocks), self.block_m, BLOCK_K)),
            embedding=memory.Blocks((slots, blocks, self.depth, width)),
            gathered=gathered,
            staging=staged((STAGING_SLOTS, blocks, self.block_m, width)) if stores else None,
            # One copy loads all blocks if a candidate is one block.
            ready=memory.Barriers(slots, 1 if n == width else blocks),
            gathered_ready=gathered_ready,
        )


def is_contiguous(n: int) -> bool:
    """Whether a row of the batch is one block narrower than 64 columns.

    TMA would store such blocks in rows of 32 or 64 bytes, several cycles for each of them; but a
    part of a candidate is contiguous, and one bulk copy stores it.
    """
    return block_width(n) == n < WGMMA_M


def _depth(k: int) -> tuple[int, int]:
    """(k steps, rows of K of each), which load least; a step's weights begin at a whole block."""
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
    """

    single_launch: ClassVar[bool] = False

    accumulators: int = 2
    block_m: int = 16
    num_stages: int = 2
    ctas: int = 4
    gathers: bool = False
    coarse_k: int = 640

    def levels(self, problem: Any) -> range:
        """The levels that have a launch."""
        count = len(problem.ks)
        return range(count - 1 if self.gathers else 0, count)

    def layout(self, problem: Any, level: int) -> Layout:
        """How a level of a `LinearCompressionProblem` is divided."""
        k, m = problem.ks[level], problem.m
        if level == len(problem.ks) - 1:
            parts = -(-m // self.block_m)
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
                groups=1,
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
        """Bytes of shared memory of a CTA, of the level that needs most."""
        *_, last = levels = self.levels(problem)
        return max(
            memory.smem_bytes(self.layout(problem, i).shared(problem.n, stores=i == last))
            for i in levels
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
        if self.gathers and len(problem.ks) != 2:
            return f"the kernel gathers users of two levels only, but there are {len(problem.ks)}"
        if self.coarse_k < 1:
            return f"coarse_k must be at least 1, but is {self.coarse_k}"
        return hopper.why_not_smem(self, self.smem_bytes(problem))


def _many_ctas(problem: Any, level: int, layout: Layout) -> Layout:
    """With as many CTAs on an SM as shared memory has room for, and a second stage if it has."""
    size = memory.smem_bytes(layout.shared(problem.n, stores=False))
    tiles = layout.tiles(problem.batches[level], problem.n)
    ctas = max(1, min(MAX_CTAS, SM_SMEM_BYTES // (size + RESERVED_BYTES)))
    if tiles * layout.groups * layout.splits <= ctas * packed_compression.NUM_SMS:
        return dataclasses.replace(layout, ctas=ctas)
    two = dataclasses.replace(layout, stages=2)
    size = memory.smem_bytes(two.shared(problem.n, stores=False))
    if size > SM_SMEM_BYTES // 2 - RESERVED_BYTES:
        return dataclasses.replace(layout, ctas=ctas)
    return dataclasses.replace(two, ctas=min(MAX_CTAS, SM_SMEM_BYTES // (size + RESERVED_BYTES)))


# A model by which configurations are ordered. Predicted, not fitted: no time of this kernel was
# measured when it was written. Times are in us, bytes are for one us.
#: An empty launch with its barriers and descriptors; the latency of a first load.
LAUNCH_US, LOAD_US = 1.6, 0.9
#: A part of a tile, from its products to its store, where nothing else is on the SM; the look-up of
#: the users whose embeddings a tile loads.
PART_US, GATHER_US = 0.5, 0.5
#: What device memory delivers, L2 to all SMs, and L2 to one SM.
MEMORY_BYTES, L2_BYTES, SM_BYTES = 2.8e6, 4.5e6, 1.0e5
#: Part of the lesser times, of tiles, L2 and memory, that the greatest does not hide.
OVERLAP = 0.05
#: Registers of an SM, and of a thread: a base, and for each compressed row of all accumulators.
SM_REGISTERS, BASE_REGISTERS, ROW_REGISTERS = 65536, 24, 1.56


def _most_ctas(rows: int, size: int) -> int:
    """CTAs that an SM has registers and shared memory for."""
    registers = -(-int(BASE_REGISTERS + ROW_REGISTERS * rows) // 8) * 8
    by_registers = SM_REGISTERS // (registers * hopper.WARPGROUP_SIZE)
    return min(MAX_CTAS, by_registers, SM_SMEM_BYTES // (size + RESERVED_BYTES))


def candidate_configs(problem: Any) -> Iterator[ResidentCompressionConfig]:
    """Yields the legal configurations worth timing, the most promising first."""
    if packed_compression.why_not_served(problem):
        return
    last = len(problem.ks) - 1
    parts = {count for count in range(1, 9) if problem.m > 32 * (count - 1)}
    block_ms = {-(-problem.m // (16 * count)) * 16 for count in parts}
    users = [(False, 640), (True, 640)] + [(False, 1280)] * (max(problem.ks) > 640)
    configs = []
    for block_m, accumulators, num_stages, (gathers, coarse_k) in itertools.product(
        sorted(block_ms), (1, 2, 3, 4), (1, 2, 3), users
    ):
        config = ResidentCompressionConfig(
            accumulators, block_m, num_stages, 1, gathers=gathers, coarse_k=coarse_k
        )
        if config.illegal_reason(problem):
            continue
        size = memory.smem_bytes(config.layout(problem, last).shared(problem.n, stores=True))
        if ctas := _most_ctas(accumulators * block_m, size):
            configs.append(dataclasses.replace(config, ctas=ctas))
    yield from sorted(configs, key=lambda config: estimated_us(problem, config))


def estimated_us(problem: Any, config: ResidentCompressionConfig) -> float:
    """Time of the kernel by a model: the sum of its launches."""
    return sum(level_us(problem, config, level) for level in config.levels(problem))


def level_us(problem: Any, config: ResidentCompressionConfig, level: int) -> float:
    """Time of a launch by a model."""
    layout, is_last = config.layout(problem, level), level == len(problem.ks) - 1
    columns = problem.batches[level] * problem.n
    tiles, shares = layout.tiles(problem.batches[level], problem.n), layout.shares
    workers = min(tiles, max(1, packed_compression.NUM_SMS * layout.ctas // shares))
    read, k = 2 * columns * problem.ks[level], layout.k
    # An element of a fragment takes 3 bytes, an element of the result 2.
    rows = layout.groups * layout.rows
    written = 2 * columns * problem.m if is_last else 3 * columns * rows * layout.splits
    again = read * (layout.groups - 1)
    if layout.gathered is not None:
        of_users = 2 * problem.batches[level - 1] * problem.n * problem.ks[level - 1]
        gathered = 2 * columns * problem.ks[level - 1]
        if layout.has_one_user:
            gathered = workers * shares * 2 * layout.block_n * problem.ks[level - 1]
        read, again = read + of_users, again + max(0, gathered - of_users)
        k += math.prod(layout.gathered)
    elif level:
        again += 3 * columns * rows * config.layout(problem, level - 1).splits
    memory_us = (read + written) / MEMORY_BYTES
    l2_us = (read + written + again) / L2_BYTES
    looks_up = layout.gathered is not None and not layout.has_one_user
    part_us = layout.parts * PART_US + GATHER_US * looks_up
    exposed = LOAD_US if layout.stages == 1 else 0.0
    tiles_us = -(-tiles // workers) * (part_us + exposed)
    # The weights and the first tile of the CTAs that share an SM.
    ctas = -(-min(tiles, workers) * shares // packed_compression.NUM_SMS)
    first_us = ctas * 2 * k * (min(layout.block_n, columns) + layout.rows) / SM_BYTES
    limits = sorted((memory_us, l2_us, tiles_us))
    return LAUNCH_US + LOAD_US + max(limits[2], first_us) + OVERLAP * (limits[0] + limits[1])
