"""Configurations of the linear-compression kernel whose CTAs keep their weights."""

from __future__ import annotations

import dataclasses
import functools
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
#: Compressed rows of fragments that are loaded before a part is multiplied: 96 registers.
MAX_EARLY_ROWS = 128
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
            if self.has_one_user:
                # A repeated block is there once: a descriptor says that blocks are 0 bytes apart.
                gathered = memory.Blocks((steps, 1 if n == width else blocks, depth, width))
            else:
                gathered = memory.Blocks((self.stages * steps, blocks, depth, width))
                gathered_ready = memory.Barriers(self.stages * steps, blocks)
        slots = self.stages * self.steps
        # Rows of the batch that are one block each are contiguous in the output.
        staged = memory.Rows if is_contiguous(n) else memory.Blocks
        return ResidentCompressionShared(
            weight=memory.Tiles((self.parts * sum(self.k_blocks), self.block_m, BLOCK_K)),
            embedding=memory.Blocks((slots, blocks, self.depth, width)),
            gathered=gathered,
            staging=staged((STAGING_SLOTS, blocks, self.block_m, width)) if stores else None,
            # One copy loads all blocks if a candidate is one block.
            ready=None if self.by_threads else memory.Barriers(slots, 1 if n == width else blocks),
            gathered_ready=gathered_ready,
        )


def is_contiguous(n: int) -> bool:
    """Whether a row of the batch is one block narrower than 64 columns.

    TMA would store such blocks in rows of 32 or 64 bytes, several cycles for each of them; but a
    part of a candidate is contiguous, and one bulk copy stores it.
    """
    return block_width(n) == n < WGMMA_M


def early_splits(layout: Layout) -> int:
    """Fragments that are loaded before a part is multiplied; the others are loaded after it."""
    return max(1, MAX_EARLY_ROWS // (layout.accumulators * layout.block_m))


def is_copied(k: int) -> bool:
    """Whether asynchronous copies load a weight [M, K]: whether rows begin at multiples of 8 bytes.

    Copies of 4 bytes would take longer than vectors that are loaded through registers.
    """
    return k % 4 == 0


def elements_of_load(k: int) -> int:
    """Elements of a weight [M, K] that a thread loads at a time, through registers or not."""
    return 4 if k % 8 == 4 else 8


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
      groups: groups of compressed rows of the last level; a CTA keeps the weights of one.
      coarse_rows: most compressed rows of a tile of a coarser level; a multiple of 16.
    """

    single_launch: ClassVar[bool] = False

    accumulators: int = 2
    block_m: int = 16
    num_stages: int = 2
    ctas: int = 4
    gathers: bool = False
    coarse_k: int = 640
    groups: int = 1
    coarse_rows: int = 48

    def levels(self, problem: Any) -> range:
        """The levels that have a launch."""
        count = len(problem.ks)
        return range(count - 1 if self.gathers else 0, count)

    def layout(self, problem: Any, level: int) -> Layout:
        """How a level of a `LinearCompressionProblem` is divided."""
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
        groups = -(-m // max(16, min(self.coarse_rows, most // 16 * 16)))
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
        if self.groups < 1:
            return f"groups must be at least 1, but is {self.groups}"
        if -(-problem.m // (self.block_m * self.groups)) > MAX_PARTS:
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
        if self.coarse_rows % 16 or not 16 <= self.coarse_rows <= MAX_ROWS:
            return (
                f"coarse_rows must be a multiple of 16 from 16 to {MAX_ROWS}, but is "
                f"{self.coarse_rows}"
            )
        return hopper.why_not_smem(self, self.smem_bytes(problem))


def _many_ctas(problem: Any, level: int, layout: Layout) -> Layout:
    """With as many CTAs on an SM as shared memory has room for, and a second stage if it has."""
    size = memory.smem_bytes(layout.shared(problem.n, stores=False))
    tiles = layout.tiles(problem.batches[level], problem.n)
    ctas = max(1, min(MAX_CTAS, hopper.ctas_by_smem(size)))
    if tiles * layout.groups * layout.splits <= ctas * packed_compression.NUM_SMS:
        by_threads = block_width(problem.n) < WGMMA_M
        return dataclasses.replace(layout, ctas=ctas, by_threads=by_threads)
    two = dataclasses.replace(layout, stages=2)
    most = hopper.ctas_by_smem(memory.smem_bytes(two.shared(problem.n, stores=False)))
    if most < 2:
        return dataclasses.replace(layout, ctas=ctas)
    return dataclasses.replace(two, ctas=min(MAX_CTAS, most))


# A model by which configurations are ordered. Times are in us, bytes are for one us; fitted, and
# adjusted by hand, to 73 times of 14 sizes on an H100 (tests/support/compression_times.py). 56 err
# by less than 15 %, the worst by 40 %.
#: A launch, and a further CTA of an SM: its barriers.
LAUNCH_US, CTA_US = 0.95, 0.1
#: The latency of a first load; a part of a tile, a further accumulator of it, a compressed row of
#: its accumulators; such a row of a fragment that is loaded after the products; the look-up of the
#: users whose embeddings a tile loads; the latency of a load, if there is one stage.
LOAD_US, PART_US, ACCUMULATOR_US, PART_ROW_US = 0.3, 0.5, 0.05, 0.0006
LATE_ROW_US, GATHER_US, RELOAD_US = 0.002, 0.16, 0.9
#: Such a row of a fragment of one of several users, if no other CTA of the SM multiplies meanwhile.
ALONE_ROW_US = 0.0035
#: A copy of each thread, of 8 or 16 bytes; a vector that is loaded through registers; the part of
#: either that a further CTA of an SM adds.
COPY_US, VECTOR_US, COPY_SHARE = 0.024, 0.07, 0.85
#: Cycles of a tensor core, and rows in whose time an instruction reads its 64 x 16 operand.
CYCLES, OPERAND_ROWS = 1900, 8
#: A row of a TMA box, if it is shorter than 128 bytes.
ROW_US = 0.0016
#: What device memory delivers and takes, L2 delivers to all SMs, and to one SM.
READ_BYTES, WRITE_BYTES, L2_BYTES, SM_BYTES = 3.2e6, 2.3e6, 6.9e6, 3e5
#: Part of the fragments that L1 does not hold; bytes of L2 that fragments and users share.
FRAGMENT_SHARE, CACHE_BYTES = 0.85, 2e7
#: Part of the lesser times, of tiles, products, boxes, L2 and memory, that the greatest does not
#: hide: of the next one.
OVERLAP = 0.11
#: Most compressed rows for which the model may choose this kernel: M = 351 is the largest that was
#: measured.
MAX_DEFAULT_M = 1024
#: Most compressed rows of a part, of which the model chooses.
BLOCK_MS = (48, 64, 80, 96, 112, 128)
#: Compressed rows of a tile of a coarser level, of which the model chooses.
COARSE_ROWS = (48, 96, 128)
#: The tuner times this kernel unless its model takes longer than the others' by this factor.
CANDIDATE_FACTOR = 1.3
#: Registers of a thread: a base, for each compressed row of all accumulators, and for the fragments
#: of several splits.
BASE_REGISTERS, ROW_REGISTERS, SPLITS_REGISTERS = 24, 1.3, 64


def _most_ctas(problem: Any, config: ResidentCompressionConfig) -> int:
    """CTAs that an SM has registers and shared memory for."""
    last = len(problem.ks) - 1
    size = memory.smem_bytes(config.layout(problem, last).shared(problem.n, stores=True))
    registers = BASE_REGISTERS + ROW_REGISTERS * config.accumulators * config.block_m
    if last and not config.gathers and config.layout(problem, last - 1).splits > 1:
        registers += SPLITS_REGISTERS
    registers = -(-int(registers) // 8) * 8
    return min(MAX_CTAS, hopper.ctas_by_registers(registers), hopper.ctas_by_smem(size))


def candidate_configs(problem: Any) -> Iterator[ResidentCompressionConfig]:
    """Yields the legal configurations worth timing, the most promising first."""
    if packed_compression.why_not_served(problem) or not problem.n:
        return
    longest = max(problem.ks)
    parts = {-(-problem.m // most) for most in BLOCK_MS}
    block_ms = sorted({-(-problem.m // (16 * count)) * 16 for count in parts})
    users = [_coarse(problem, k) for k in (160, 320, 640, 1280) if k == 640 or longest > k // 2]
    users = [*dict.fromkeys(users), ResidentCompressionConfig(gathers=True)]
    configs = []
    tiles = [
        (block_m, groups)
        for block_m in block_ms
        for groups in sorted({1, 2, 4, 8, 16, -(-problem.m // block_m)})
        if groups <= -(-problem.m // block_m)
    ]
    for (block_m, groups), accumulators, num_stages, of_users in itertools.product(
        tiles, (1, 2, 3, 4), (2, 1), users
    ):
        config = dataclasses.replace(
            of_users,
            accumulators=accumulators,
            block_m=block_m,
            num_stages=num_stages,
            ctas=1,
            groups=groups,
        )
        if config.illegal_reason(problem):
            continue
        for ctas in range(1, min(_most_ctas(problem, config), 4) + 1):
            configs.append(dataclasses.replace(config, ctas=ctas))
    yield from sorted(configs, key=lambda config: estimated_us(problem, config))


def _coarse(problem: Any, coarse_k: int) -> ResidentCompressionConfig:
    """With the tiles of coarser levels that take least by the model."""
    levels = range(len(problem.ks) - 1)
    configs = [ResidentCompressionConfig(coarse_k=coarse_k, coarse_rows=x) for x in COARSE_ROWS]
    return min(configs, key=lambda config: sum(level_us(problem, config, i) for i in levels))


@functools.lru_cache(maxsize=1024)
def best_us(problem: Any) -> float:
    """Time of the most promising configuration by the model; infinite if none is legal."""
    best = next(candidate_configs(problem), None)
    return math.inf if best is None else estimated_us(problem, best)


def is_candidate(problem: Any) -> bool:
    """Whether this kernel is worth timing: whether its model is not far slower."""
    return best_us(problem) < CANDIDATE_FACTOR * min(packed_compression.estimates(problem))


def is_preferred(problem: Any) -> bool:
    """Whether this kernel is the default: whether it takes less time by its model than the others.

    Of two levels and up to `MAX_DEFAULT_M`, of which times were measured.
    """
    if len(problem.ks) != 2 or problem.m > MAX_DEFAULT_M:
        return False
    packed, row, xla = packed_compression.estimates(problem)
    return best_us(problem) < min(packed_compression.MARGIN * min(packed, row), xla)


def estimated_us(problem: Any, config: ResidentCompressionConfig) -> float:
    """Time of the kernel by a model: the sum of its launches."""
    return sum(level_us(problem, config, level) for level in config.levels(problem))


def level_us(problem: Any, config: ResidentCompressionConfig, level: int) -> float:
    """Time of a launch by a model."""
    layout, is_last = config.layout(problem, level), level == len(problem.ks) - 1
    tiles, shares = layout.tiles(problem.batches[level], problem.n), layout.shares
    sms = packed_compression.NUM_SMS
    workers = min(tiles, max(1, sms * layout.ctas // shares))
    if layout.by_threads:
        workers = tiles
    ctas, tiles_of_sm = -(-workers * shares // sms), -(-tiles * shares // sms)  # of an SM
    *_, second, longest = sorted(
        (
            *_traffic_us(problem, config, level, workers),
            _boxes_us(problem, layout, is_last=is_last) * tiles_of_sm,
            _products_us(layout) * layout.parts * tiles_of_sm,
            _chain_us(problem, config, level, workers),
        )
    )
    return LAUNCH_US + CTA_US * (ctas - 1) + longest + OVERLAP * second


def _traffic_us(problem: Any, config: Any, level: int, workers: int) -> tuple[float, float]:
    """Times of device memory and of L2."""
    layout, is_last = config.layout(problem, level), level == len(problem.ks) - 1
    columns = problem.batches[level] * problem.n
    read = 2 * columns * problem.ks[level]
    # An element of a fragment takes 3 bytes, an element of the result 2.
    rows = layout.groups * layout.rows
    written = 2 * columns * problem.m if is_last else 3 * columns * rows * layout.splits
    again = read * (layout.groups - 1)
    once = read + written
    if layout.gathered is not None:
        of_users = 2 * problem.batches[level - 1] * problem.n * problem.ks[level - 1]
        gathered = 2 * columns * problem.ks[level - 1] * layout.groups
        if layout.has_one_user:
            block_n = min(layout.block_n, problem.n)
            gathered = workers * layout.shares * 2 * block_n * problem.ks[level - 1]
        further = max(0, gathered - of_users)
        share = packed_compression.missed(of_users, gathered, once, CACHE_BYTES)
        read, again = read + of_users + share * further, again + further
    elif level:
        fragments = 3 * columns * rows * config.layout(problem, level - 1).splits
        stored = fragments // problem.batches[level] * problem.batches[level - 1]
        again += FRAGMENT_SHARE * fragments
        share = packed_compression.missed(stored, fragments, once, CACHE_BYTES)
        read += share * fragments
    return read / READ_BYTES + written / WRITE_BYTES, (read + written + again) / L2_BYTES


def _boxes_us(problem: Any, layout: Layout, *, is_last: bool) -> float:
    """Time of the rows of a tile's TMA boxes, if these are shorter than 128 bytes."""
    if block_width(problem.n) == WGMMA_M:
        return 0.0
    rows = 0 if layout.by_threads else layout.k
    if layout.gathered is not None and not layout.has_one_user:
        rows += math.prod(layout.gathered)
    if is_last and not is_contiguous(problem.n):
        rows += layout.rows
    return ROW_US * rows * layout.block_n / block_width(problem.n)


def _products_us(layout: Layout) -> float:
    """Time of the products of a part."""
    gathered = 0 if layout.has_one_user else math.prod(layout.gathered or (0,))
    instructions = layout.accumulators * -(-(layout.k + gathered) // WGMMA_K)
    return instructions * (layout.block_m + OPERAND_ROWS) / 2 / CYCLES


def _copies_us(problem: Any, layout: Layout, level: int) -> float:
    """Time in which the threads of a CTA copy what TMA does not."""
    total = 0.0
    for blocks, k in zip(layout.k_blocks, problem.ks[level::-1], strict=False):
        elements = elements_of_load(k)
        copies = blocks * BLOCK_K * layout.rows / elements / hopper.WARPGROUP_SIZE
        total += copies * (COPY_US if is_copied(k) else VECTOR_US)
    rows, columns = layout.k if layout.by_threads else 0, layout.block_n
    if layout.has_one_user:
        rows, columns = math.prod(layout.gathered or ()), min(layout.block_n, problem.n)
    return total + COPY_US * rows * columns / 8 / hopper.WARPGROUP_SIZE


def _chain_us(problem: Any, config: Any, level: int, workers: int) -> float:
    """Time of one CTA, whose steps wait for one another."""
    layout, sms = config.layout(problem, level), packed_compression.NUM_SMS
    ctas = -(-workers * layout.shares // sms)  # of an SM
    number = layout.tiles(problem.batches[level], problem.n)
    tiles = -(-number // workers)
    # All CTAs begin at the same time, and share the memory.
    of_sm = min(SM_BYTES, READ_BYTES / min(sms, workers * layout.shares))
    first_us = ctas * min(layout.stages, tiles) * 2 * layout.k * layout.block_n / of_sm
    copies_us = _copies_us(problem, layout, level) * (1 + COPY_SHARE * (ctas - 1))
    rows = layout.accumulators * layout.block_m
    part_us = PART_US + ACCUMULATOR_US * (layout.accumulators - 1) + PART_ROW_US * rows
    part_us += _products_us(layout)
    tile_us = 0.0
    if level and layout.gathered is None:
        splits = config.layout(problem, level - 1).splits
        part_us += LATE_ROW_US * rows * max(0, splits - early_splits(layout))
        if ctas == 1 and problem.batches[level - 1] > 1:
            part_us += ALONE_ROW_US * rows
    elif level and not layout.has_one_user:
        tile_us += GATHER_US
    total = LOAD_US + max(copies_us, first_us) + tiles * (tile_us + layout.parts * part_us)
    if layout.stages == 1:
        # Loads and products alternate, unless another CTA of the SM multiplies meanwhile.
        load_us = 2 * layout.k * layout.block_n / (of_sm if ctas == 1 else SM_BYTES)
        if layout.gathered is not None and not layout.has_one_user:
            gathered = 2 * math.prod(layout.gathered) * layout.block_n
            load_us += gathered / min(SM_BYTES, L2_BYTES / min(sms, workers * layout.shares))
        total += (number / workers - 1) * load_us + (tiles - 1) * RELOAD_US
    return total
