"""A cost model of linear compression by CTAs that keep their weights."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from ikbo_jax.problems import hopper, memory, packed_cost
from ikbo_jax.problems.hopper import BLOCK_K, NUM_SMS, WGMMA_K, WGMMA_M
from ikbo_jax.problems.packed_compression import block_width, why_not_served
from ikbo_jax.problems.problem import Ranked
from ikbo_jax.problems.resident_compression import (
    MAX_CTAS,
    MAX_PARTS,
    MAX_ROWS,
    Layout,
    ResidentCompressionConfig,
    early_splits,
    elements_of_load,
    is_contiguous,
    is_copied,
)

# A model by which configurations are ordered. Times are in us, bytes are for one us; fitted on an
# H100 to times of 14 and of 81 sizes. At the 81 sizes, of the times up to 1.5 of the fastest
# (tests/support/measured_times.py), 139 of 174 err by less than 15 %, the worst by 45 %.
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
#: Of more compressed rows than `LARGE_M`, with a launch of its own for users, the kernel is taken
#: to be slower than this model by this factor: of five such sizes on an H100, the three that the
#: models put at more than 0.8 of the others' times were 7 to 26 % slower than by the others.
LARGE_M, LARGE_M_FIT = 384, 1.25
#: Most compressed rows for which this kernel is the default: no larger ones were measured.
MAX_DEFAULT_M = 1024
#: Most configurations that the tuner times, and most CTAs of an SM of these.
MOST_CONFIGS, MOST_CTAS = 12, 4
#: Most compressed rows of a part, of which the model chooses.
BLOCK_MS = (48, 64, 80, 96, 112, 128)
#: Registers of a thread: a base, for each compressed row of all accumulators, and for the fragments
#: of several splits.
BASE_REGISTERS, ROW_REGISTERS, SPLITS_REGISTERS = 24, 1.3, 64


def _most_ctas(layout: Layout, size: int, splits: int) -> int:
    """Counts CTAs of `size` bytes of shared memory that an SM has room and registers for."""
    registers = BASE_REGISTERS + ROW_REGISTERS * layout.accumulators * layout.block_m
    if splits > 1:
        registers += SPLITS_REGISTERS
    registers = -(-int(registers) // 8) * 8
    return min(MAX_CTAS, hopper.ctas_by_registers(registers), hopper.ctas_by_smem(size))


def ranked_configs(problem: Any) -> list[Ranked]:
    """Estimates the `MOST_CONFIGS` legal configurations that are most promising."""
    if why_not_served(problem) or not problem.n:
        return []
    last = len(problem.ks) - 1
    ways = [*_ways_of_users(problem)]
    tiles = [
        (users_us + least_us, users_us, splits, users, size, layout)
        for gathers in sorted({users.gathers for users, _, _ in ways})
        for least_us, size, layout in _tiles(problem, gathers=gathers)
        for users, splits, users_us in ways
        if users.gathers == gathers
    ]
    tiles.sort(key=lambda tile: tile[0])
    found: list[tuple[float, ResidentCompressionConfig]] = []
    for least_us, users_us, splits, users, size, layout in tiles:
        if len(found) == MOST_CONFIGS and least_us > found[-1][0]:
            break
        number = layout.tiles(problem.batches[last], problem.n)
        for ctas in range(1, min(_most_ctas(layout, size, splits), MOST_CTAS) + 1):
            us = users_us + _launch_us(problem, last, layout, splits, ctas)
            tile = (layout.accumulators, layout.block_m, layout.stages, ctas, users.gathers)
            found.append((us, ResidentCompressionConfig(*tile, users.coarse_k, layout.groups)))
            if NUM_SMS * ctas // layout.shares >= number:
                break  # more would have no tile
        found = sorted(found, key=_order)[:MOST_CONFIGS]
    return [*itertools.starmap(Ranked, found)]


def is_timed(problem: Any) -> bool:
    """Whether times were measured like the problem's: of two levels, and up to `MAX_DEFAULT_M`."""
    return len(problem.ks) == 2 and problem.m <= MAX_DEFAULT_M


def _order(entry: tuple[float, ResidentCompressionConfig]) -> tuple[float, ...]:
    us, x = entry
    return us, x.block_m, x.groups, x.accumulators, -x.num_stages, x.gathers, x.coarse_k, x.ctas


def _ways_of_users(problem: Any) -> Iterator[tuple[ResidentCompressionConfig, int, float]]:
    """Yields configurations that differ in coarser levels: with splits, and time of these levels.

    Of those with equally many splits, which the last level adds, the fastest.
    """
    last, longest = len(problem.ks) - 1, max(problem.ks)
    found: dict[int, tuple[ResidentCompressionConfig, float]] = {}
    for coarse_k in (160, 320, 640, 1280):
        if coarse_k != 640 and longest <= coarse_k // 2:
            continue
        config = ResidentCompressionConfig(coarse_k=coarse_k)
        layouts = [config.layout(problem, level) for level in range(last)]
        shared = [memory.smem_bytes(x.shared(problem.n, stores=False)) for x in layouts]
        if max(shared, default=0) > hopper.MAX_SMEM_BYTES:
            continue
        splits = [0, *(layout.splits for layout in layouts)]
        us = sum(_launch_us(problem, i, x, splits[i]) for i, x in enumerate(layouts))
        if splits[-1] not in found or us < found[splits[-1]][1]:
            found[splits[-1]] = config, us
    yield from ((config, splits, us) for splits, (config, us) in found.items())
    if last == 1:
        yield ResidentCompressionConfig(gathers=True), 0, 0.0


def _tiles(problem: Any, *, gathers: bool) -> Iterator[tuple[float, int, Layout]]:
    """Yields least time and shared memory of legal layouts of the last level, and these."""
    parts = {-(-problem.m // most) for most in BLOCK_MS}
    last = len(problem.ks) - 1
    for block_m in sorted({-(-problem.m // (16 * count)) * 16 for count in parts}):
        all_parts = -(-problem.m // block_m)
        for groups, accumulators, num_stages in itertools.product(
            sorted({x for x in (1, 2, 4, 8, 16) if x < all_parts} | {all_parts}),
            range(1, min(4, MAX_ROWS // block_m) + 1),
            (2, 1),
        ):
            if -(-problem.m // (block_m * groups)) > MAX_PARTS:
                continue
            tile = (accumulators, block_m, num_stages, 1, gathers)
            layout = ResidentCompressionConfig(*tile, groups=groups).layout(problem, last)
            size = memory.smem_bytes(layout.shared(problem.n, stores=True))
            if size > hopper.MAX_SMEM_BYTES:
                continue
            tiles = layout.tiles(problem.batches[last], problem.n)
            of_sm = -(-tiles * layout.shares // NUM_SMS)
            of_cta = -(-tiles // min(tiles, max(1, NUM_SMS * MOST_CTAS // layout.shares)))
            us = max(_products_us(layout) * of_sm, _part_us(layout) * of_cta) * layout.parts
            yield LAUNCH_US + us, size, layout


def estimated_us(problem: Any, config: ResidentCompressionConfig) -> float:
    """Adds up the times of the kernel's launches."""
    levels = config.levels(problem)
    layouts = {level: config.layout(problem, level) for level in levels}
    splits = {level + 1: layout.splits for level, layout in layouts.items()}
    return sum(_launch_us(problem, i, x, splits.get(i, 0)) for i, x in layouts.items())


def _launch_us(problem: Any, level: int, layout: Layout, splits: int, ctas: int = 0) -> float:
    """Estimates a launch.

    `splits`: fragments of the coarser level, 0 if it adds none; `ctas`: of an SM, 0: the layout's.
    """
    is_last = level == len(problem.ks) - 1
    tiles, shares = layout.tiles(problem.batches[level], problem.n), layout.shares
    workers = min(tiles, max(1, NUM_SMS * (ctas or layout.ctas) // shares))
    if layout.by_threads:
        workers = tiles
    ctas, tiles_of_sm = -(-workers * shares // NUM_SMS), -(-tiles * shares // NUM_SMS)  # of an SM
    products_us = _products_us(layout)
    *_, second, longest = sorted(
        (
            *_traffic_us(problem, level, layout, splits, workers),
            _boxes_us(problem, layout, is_last=is_last) * tiles_of_sm,
            products_us * layout.parts * tiles_of_sm,
            _chain_us(problem, level, layout, splits, workers),
        )
    )
    us = LAUNCH_US + CTA_US * (ctas - 1) + longest + OVERLAP * second
    return us * LARGE_M_FIT if is_last and splits and problem.m > LARGE_M else us


def _traffic_us(
    problem: Any, level: int, layout: Layout, splits: int, workers: int
) -> tuple[float, float]:
    """Estimates the times of device memory and of L2."""
    is_last = level == len(problem.ks) - 1
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
        fragments = 3 * columns * rows * splits
        stored = fragments // problem.batches[level] * problem.batches[level - 1]
        again += fragments
        share = packed_cost.missed(stored, fragments, once, CACHE_BYTES)
        read += share * fragments
    return read / READ_BYTES + written / WRITE_BYTES, (read + written + again) / L2_BYTES


def _boxes_us(problem: Any, layout: Layout, *, is_last: bool) -> float:
    """Estimates the rows of a tile's TMA boxes, if these are shorter than 128 bytes."""
    if block_width(problem.n) == WGMMA_M:
        return 0.0
    rows = 0 if layout.by_threads else layout.k
    if layout.gathered is not None and not layout.has_one_user:
        rows += math.prod(layout.gathered)
    if is_last and not is_contiguous(problem.n):
        rows += layout.rows
    return ROW_US * rows * layout.block_n / block_width(problem.n)


def _products_us(layout: Layout) -> float:
    gathered = 0 if layout.has_one_user else math.prod(layout.gathered or (0,))
    instructions = layout.accumulators * -(-(layout.k + gathered) // WGMMA_K)
    return instructions * (layout.block_m + OPERAND_ROWS) / 2 / CYCLES


def _copies_us(problem: Any, layout: Layout, level: int) -> float:
    """Estimates the copies by a CTA's threads of what TMA does not load."""
    total = 0.0
    for blocks, k in zip(layout.k_blocks, problem.ks[level::-1], strict=False):
        elements = elements_of_load(k)
        copies = blocks * BLOCK_K * layout.rows / elements / hopper.WARPGROUP_SIZE
        total += copies * (COPY_US if is_copied(k) else VECTOR_US)
    rows, columns = layout.k if layout.by_threads else 0, layout.block_n
    if layout.has_one_user:
        rows, columns = math.prod(layout.gathered or ()), min(layout.block_n, problem.n)
    return total + COPY_US * rows * columns / 8 / hopper.WARPGROUP_SIZE


def _part_us(layout: Layout) -> float:
    """Bounds the time of a part of a tile from below: its products and its steps."""
    rows = layout.accumulators * layout.block_m
    steps_us = PART_US + ACCUMULATOR_US * (layout.accumulators - 1) + PART_ROW_US * rows
    return steps_us + _products_us(layout)


def _chain_us(problem: Any, level: int, layout: Layout, splits: int, workers: int) -> float:
    """Estimates one CTA, whose steps wait for one another."""
    sms = NUM_SMS
    ctas = -(-workers * layout.shares // sms)  # of an SM
    number = layout.tiles(problem.batches[level], problem.n)
    tiles = -(-number // workers)
    # All CTAs begin at the same time, and share the memory.
    of_sm = min(SM_BYTES, READ_BYTES / min(sms, workers * layout.shares))
    first_us = ctas * min(layout.stages, tiles) * 2 * layout.k * layout.block_n / of_sm
    copies_us = _copies_us(problem, layout, level) * ctas
    rows, part_us = layout.accumulators * layout.block_m, _part_us(layout)
    tile_us = 0.0
    if level and layout.gathered is None:
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
