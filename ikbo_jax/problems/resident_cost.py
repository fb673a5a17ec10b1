"""A cost model of linear compression by CTAs that keep their weights."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

from ikbo_jax.problems import hopper, memory, packed_cost
from ikbo_jax.problems.hopper import BLOCK_K, NUM_SMS, WGMMA_K, WGMMA_M
from ikbo_jax.problems.packed_compression import block_width, why_not_served
from ikbo_jax.problems.resident_compression import (
    MAX_CTAS,
    Layout,
    ResidentCompressionConfig,
    early_splits,
    elements_of_load,
    is_contiguous,
    is_copied,
)

# A model by which configurations are ordered. Times are in us, bytes are for one us; fitted on an
# H100 to times of 14 and of 81 sizes. At the 81 sizes, of the times up to 1.5 of the fastest
# (tests/support/compression_times.py), 139 of 174 err by less than 15 %, the worst by 45 %.
#: A launch, and a further CTA of an SM: its barriers.
LAUNCH_US, CTA_US = 0.67, 0.1
#: The latency of a first load; a part of a tile, a further accumulator of it, a compressed row of
#: its accumulators; such a row of a fragment that is loaded after the products; the look-up of the
#: users whose embeddings a tile loads; the latency of a load, if there is one stage.
LOAD_US, PART_US, ACCUMULATOR_US, PART_ROW_US = 0.73, 0.48, 0.037, 0.00035
LATE_ROW_US, GATHER_US, RELOAD_US = 0.0015, 0.044, 0.63
#: Such a row of a fragment of one of several users, if no other CTA of the SM multiplies meanwhile.
ALONE_ROW_US = 0.0022
#: A copy of each thread, of 8 or 16 bytes; a vector that is loaded through registers.
COPY_US, VECTOR_US = 0.011, 0.13
#: Cycles of a tensor core, and rows in whose time an instruction reads its 64 x 16 operand.
CYCLES, OPERAND_ROWS = 1900, 8
#: A row of a TMA box, if it is shorter than 128 bytes.
ROW_US = 0.0021
#: What device memory delivers and takes, L2 delivers to all SMs, and to one SM.
READ_BYTES, WRITE_BYTES, L2_BYTES, SM_BYTES = 3.3e6, 2.1e6, 9.3e6, 2.5e5
#: Bytes of L2 that fragments and users share.
CACHE_BYTES = 2.2e7
#: Part of the lesser times, of tiles, products, boxes, L2 and memory, that the greatest does not
#: hide: of the next one.
OVERLAP = 0.14
#: Of more compressed rows than `LARGE_M`, with a launch of its own for users, this kernel is the
#: default only if its time is less than the others' by this factor: of five such sizes on an H100,
#: the three with a higher quotient of the models' times were 7 to 26 % slower than by the others.
LARGE_M, LARGE_M_MARGIN = 384, 0.8
#: Most compressed rows for which this kernel is the default: no larger ones were measured.
MAX_DEFAULT_M = 1024
#: Most compressed rows of a part, of which the model chooses.
BLOCK_MS = (48, 64, 80, 96, 112, 128)
#: Compressed rows of a tile of a coarser level, of which the model chooses: 96 and 128 are legal,
#: but were not measured.
COARSE_ROWS = (48,)
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


@functools.lru_cache(maxsize=256)
def candidate_configs(problem: Any) -> tuple[ResidentCompressionConfig, ...]:
    """The legal configurations worth timing, the most promising first."""
    if why_not_served(problem) or not problem.n:
        return ()
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
    return tuple(sorted(configs, key=lambda config: estimated_us(problem, config)))


def _coarse(problem: Any, coarse_k: int) -> ResidentCompressionConfig:
    """With the tiles of coarser levels that take least by the model."""
    levels = range(len(problem.ks) - 1)
    configs = [ResidentCompressionConfig(coarse_k=coarse_k, coarse_rows=x) for x in COARSE_ROWS]
    return min(configs, key=lambda config: sum(level_us(problem, config, i) for i in levels))


def best_us(problem: Any) -> float:
    """Time of the most promising configuration by the model; infinite if none is legal."""
    return min((estimated_us(problem, x) for x in candidate_configs(problem)[:1]), default=math.inf)


def is_candidate(problem: Any) -> bool:
    """Whether this kernel is worth timing: whether its model is not far slower."""
    return best_us(problem) < CANDIDATE_FACTOR * min(packed_cost.estimates(problem))


def is_preferred(problem: Any) -> bool:
    """Whether this kernel is the default: whether it takes less time by its model than the others.

    Of two levels and up to `MAX_DEFAULT_M`, of which times were measured.
    """
    if len(problem.ks) != 2 or problem.m > MAX_DEFAULT_M:
        return False
    packed, row, xla = packed_cost.estimates(problem)
    best = next(iter(candidate_configs(problem)), None)
    if best is None:
        return False
    is_safe = problem.m <= LARGE_M or best.gathers
    margin = packed_cost.MARGIN if is_safe else LARGE_M_MARGIN
    return estimated_us(problem, best) < min(margin * min(packed, row), xla)


def estimated_us(problem: Any, config: ResidentCompressionConfig) -> float:
    """Time of the kernel by a model: the sum of its launches."""
    return sum(level_us(problem, config, level) for level in config.levels(problem))


def level_us(problem: Any, config: ResidentCompressionConfig, level: int) -> float:
    """Time of a launch by a model."""
    layout, is_last = config.layout(problem, level), level == len(problem.ks) - 1
    tiles, shares = layout.tiles(problem.batches[level], problem.n), layout.shares
    sms = NUM_SMS
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
        share = packed_cost.missed(of_users, gathered, once, CACHE_BYTES)
        read, again = read + of_users + share * further, again + further
    elif level:
        fragments = 3 * columns * rows * config.layout(problem, level - 1).splits
        stored = fragments // problem.batches[level] * problem.batches[level - 1]
        again += fragments
        share = packed_cost.missed(stored, fragments, once, CACHE_BYTES)
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
    layout, sms = config.layout(problem, level), NUM_SMS
    ctas = -(-workers * layout.shares // sms)  # of an SM
    number = layout.tiles(problem.batches[level], problem.n)
    tiles = -(-number // workers)
    # All CTAs begin at the same time, and share the memory.
    of_sm = min(SM_BYTES, READ_BYTES / min(sms, workers * layout.shares))
    first_us = ctas * min(layout.stages, tiles) * 2 * layout.k * layout.block_n / of_sm
    copies_us = _copies_us(problem, layout, level) * ctas
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
