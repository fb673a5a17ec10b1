"""A cost model of linear compression's row tiles, of its packed tiles and of XLA."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from ikbo_jax.problems.hopper import BLOCK_K, MAX_SMEM_BYTES, NUM_SMS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.packed_compression import (
    GRANULE,
    MAX_ROWS,
    PAD_FROM_FLOPS,
    TMA_ALIGNMENT,
    WEIGHT_ALIGNMENT,
    WHOLE_TILES_PER_SM,
    PackedCompressionConfig,
    block_width,
    row_parts,
    smem_bytes,
    why_not_served,
)
from ikbo_jax.problems.problem import Ranked

# The models by which a kernel or XLA is chosen where none was measured. Times are in us, bytes and
# FLOPs are for one us; fitted on an H100 to times of 14 and of 81 sizes, together with the model of
# resident weights. XLA's was fitted before, to the 14. At the 81 sizes, of the times up to 1.5 of
# the fastest (tests/support/measured_times.py), 226 of 300 of packed tiles err by less than 15 %
# (the worst by 40 %), and 38 of 52 of row tiles (32 %).
#: Factors of row tiles that waste no column, and of row tiles that waste some.
ROW_WHOLE, ROW_WASTED = 0.97, 1.03
#: The launches: the kernel and the one that zeroes counters; the one that pads weights; from the
#: end of the last user tile to the first use of its fragment.
LAUNCH_US, PAD_US, USERS_US = 2.4, 1.5, 1.6
#: A tile besides its loads and products; a store that no k step hides.
TILE_US, STORE_US = 0.41, 0.1
#: A k step: its barriers and the start of its products.
STEP_US = 0.14
#: From the request of a stage to its use.
LATENCY_US = 0.85
#: A row of a TMA box, which TMA copies row by row: a row of 32 or 64 bytes, and a row of 128 bytes.
ROW_US, WIDE_ROW_US = 0.00042, 0.0013
#: Rows of 32 or 64 bytes that L2 delivers to all SMs in one us.
BOX_ROWS = 1.6e5
#: Cycles of a tensor core.
CYCLES = 1900
#: What device memory delivers, L2 to all SMs, and L2 to one SM.
MEMORY_BYTES, L2_BYTES, SM_BYTES = 3.1e6, 1.2e7, 9.5e4
#: What one SM loads, or stores, of fragments. The loads begin only three k steps before a tile's
#: end, and K of 27 or 44 has one k step.
FRAGMENT_BYTES = 7.1e4
#: Part of the lesser of the two times, of tiles and of memory, that the greater does not hide.
OVERLAP = 0.34
#: XLA's launches; the padding of a weight whose rows are no multiples of 16 bytes; its FLOPs where
#: they are and where they are not; what device memory delivers to it.
XLA_US, XLA_PAD_US, XLA_FLOPS, XLA_UNALIGNED_FLOPS = 5.2, 1.0, 4.0e8, 1.4e8
XLA_MEMORY_BYTES = 2.5e6
#: Bytes of an array that is still in L2 when the next launch reads it.
CACHED_BYTES = 2.5e7
#: Bytes of L2, which arrays share by what is read and written of them.
CACHE_BYTES = 4e7


def ranked_configs(problem: Any) -> list[Ranked]:
    """Estimates the legal configurations worth timing, the most promising first."""
    if why_not_served(problem):
        return []
    configs = (_deepest(problem, x) for x in (*_wide(problem), *_narrow(problem)))
    ways = (Ranked(estimated_us(problem, x), x) for x in configs if x is not None)
    return sorted(ways, key=lambda way: cast(float, way.us))


def _wide(problem: Any) -> Iterator[PackedCompressionConfig]:
    """Yields tiles whose consumers have columns of their own."""
    for block_n in (128, 256, 384, 512, 768, 1024):
        most = MAX_ROWS // (block_n // TILE_ROWS) // 16 * 16
        columns = problem.batches[-1] * problem.n
        if block_n == TILE_ROWS and problem.n % TILE_ROWS == 0:
            continue  # the other kernel has such tiles
        if not most or (block_n > TILE_ROWS and block_n * NUM_SMS > 2 * columns):
            continue
        tiles = -(-problem.m // most)
        block_ms = {-(-problem.m // (16 * count)) * 16 for count in (tiles, tiles + 1)}
        # With several accumulators and three or more blocks of 16 columns in a row of the batch,
        # clusters spill 3 to 7 kB of registers.
        is_spilled = problem.n > block_width(problem.n) == GRANULE
        for block_m in block_ms:
            for cluster in (1,) if is_spilled and block_n > TILE_ROWS else (1, 2):
                yield PackedCompressionConfig(block_n, block_m, cluster=cluster)


def _narrow(problem: Any) -> Iterator[PackedCompressionConfig]:
    """Yields tiles whose consumers share 64 columns, for problems that leave SMs idle."""
    tiles = -(-problem.batches[-1] * problem.n // WGMMA_M)
    multiple = row_parts(WGMMA_M) * GRANULE
    counts = range(1, NUM_SMS // max(tiles, 1) + 1)
    for block_m in sorted({-(-problem.m // (multiple * count)) * multiple for count in counts}):
        for cluster in (1, 2):
            yield PackedCompressionConfig(WGMMA_M, block_m, cluster=cluster)


def _deepest(problem: Any, config: PackedCompressionConfig) -> PackedCompressionConfig | None:
    """Sets `epilogue_rows` near 56, and as many stages as shared memory has room for."""
    of_one = config.consumer_rows
    divisors = [rows for rows in range(8, of_one + 1, 8) if of_one % rows == 0]
    divisors.sort(key=lambda rows: max(rows / 56, 56 / rows))
    single_launch = len(problem.batches) > 1
    for rows in divisors:
        config = dataclasses.replace(
            config, num_stages=2, epilogue_rows=rows, single_launch=single_launch
        )
        if config.illegal_reason(problem) is not None:
            continue
        of_stage = 2 * BLOCK_K * (config.block_m + config.block_n)
        most = 2 + (MAX_SMEM_BYTES - smem_bytes(config)) // of_stage
        for stages in range(min(8, most), 2, -1):
            deep = dataclasses.replace(config, num_stages=stages)
            if smem_bytes(deep) <= MAX_SMEM_BYTES:
                return deep
        return config
    return None


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of a level, `rows` by `columns`.

    Attributes:
      valid: columns that exist.
      number: tiles of the level.
      cluster: CTAs that share the weights.
      stores: stores of the tile; 0 if it is stored as a fragment.
      boxed: rows of TMA boxes, if these are shorter than 128 bytes.
    """

    level: int
    rows: int
    columns: int
    valid: int
    number: int
    stages: int
    cluster: int = 1
    stores: int = 0
    boxed: int = 0

    @property
    def waves(self) -> int:
        return -(-self.number // NUM_SMS)

    def us(self, problem: Any) -> float:
        k = problem.ks[self.level]
        steps, used = -(-k // BLOCK_K), min(self.rows, -(-problem.m // 8) * 8)
        # An instruction reads its 64 x 16 operand in the time of 32 more rows; both consumers do.
        read = used + 32 * row_parts(self.columns)
        products = self.columns / WGMMA_M * -(-k // 16) * read / 2 / CYCLES
        of_sm = L2_BYTES / min(max(self.number, 1), NUM_SMS)
        loads = 2 * k * (self.valid + used / self.cluster) / min(SM_BYTES, of_sm)
        # A level adds the fragments of a coarser one; all but the last store their own.
        fragments = (self.level > 0) + (self.stores == 0)
        fragments_us = fragments * 3 * self.columns * self.rows / min(FRAGMENT_BYTES, of_sm)
        exposed = self.stores - min(self.stores, steps)
        row_us = max(ROW_US, min(self.number, NUM_SMS) / BOX_ROWS)
        # Of weights, and of embeddings in 64 columns: 64 rows of K for each of them.
        wide = used / self.cluster + (0 if self.boxed else self.columns)
        boxes = row_us * self.boxed + WIDE_ROW_US * steps * wide
        longest = max(products, loads, steps * max(STEP_US, LATENCY_US / self.stages), boxes)
        return longest + TILE_US + STORE_US * exposed + fragments_us


def _kernel_us(
    problem: Any, coarser: list[_Tile], last: _Tile, *, padded_n: int, alignment: int
) -> float:
    """Estimates a kernel with these tiles; fragments have `padded_n` columns of a candidate."""
    tiles_us = sum(tile.waves * tile.us(problem) + USERS_US for tile in coarser)
    tiles_us += last.waves * last.us(problem)
    num_bytes = _num_bytes(problem)
    if coarser:
        width = 3 * padded_n * -(-problem.m // last.rows) * last.rows
        stored, loaded = (width * batch for batch in problem.batches[-2:])
        num_bytes += missed(stored, loaded, num_bytes) * (stored + loaded)
    limits = sorted((tiles_us, num_bytes / MEMORY_BYTES))
    launches = LAUNCH_US * max(1, len(problem.batches) - 1)
    if any(2 * k % alignment for k in problem.ks):
        launches += PAD_US
    return launches + limits[1] + OVERLAP * limits[0]


def missed(size: float, loaded: float, others: float, cache: float = CACHE_BYTES) -> float:
    """Estimates the part of an array's loads that L2 does not hold: it has a share by its traffic.

    The array has `size` bytes, of which `loaded` are read, several times or in any order, while
    `others` bytes are read and written once.
    """
    return max(0.0, 1 - cache * loaded / (loaded + others) / max(size, 1))


def _num_bytes(problem: Any) -> float:
    rows = sum(b * k for b, k in zip(problem.batches, problem.ks, strict=True))
    return 2 * (problem.n * (rows + problem.batches[-1] * problem.m) + problem.m * sum(problem.ks))


def estimated_us(problem: Any, config: PackedCompressionConfig) -> float:
    """Estimates the kernel whose tiles span candidates."""

    def tile(level: int, columns: int, rows: int, stores: int = 0) -> _Tile:
        valid = min(columns, problem.batches[level] * problem.n)
        number = -(-problem.batches[level] * problem.n // columns) * -(-problem.m // rows)
        boxed = _boxed_rows(problem, level, valid, stored=rows if stores else 0)
        cluster = config.cluster if stores else 1
        stages = config.num_stages
        return _Tile(level, rows, columns, valid, number, stages, cluster, stores, boxed)

    *coarser, finest = range(len(problem.batches))
    tiles = []
    for level in coarser:
        whole = tile(level, config.block_n, config.block_m)
        if whole.number < WHOLE_TILES_PER_SM * NUM_SMS:
            multiple, columns = GRANULE * config.parts, min(TILE_ROWS, config.block_n)
            block_ms = range(multiple, config.block_m, multiple)
            narrow = (tile(level, columns, x) for x in block_ms if config.block_m % x == 0)
            spread = (x for x in narrow if x.number <= NUM_SMS)
            whole = next(spread, tile(level, columns, config.block_m))
        tiles.append(whole)
    stores = config.accumulators * config.consumer_rows // config.epilogue_rows
    last = tile(finest, config.block_n, config.block_m, stores)
    alignment = TMA_ALIGNMENT if problem.useful_flops < PAD_FROM_FLOPS else WEIGHT_ALIGNMENT
    return _kernel_us(problem, tiles, last, padded_n=problem.n, alignment=alignment)


def _boxed_rows(problem: Any, level: int, columns: int, stored: int = 0) -> int:
    """Counts the rows of a tile's TMA boxes, if these are shorter than 128 bytes.

    Of each column block, every k step loads 64, however small K is, and `stored` are stored.
    """
    width = block_width(problem.n)
    if width == WGMMA_M:
        return 0
    return -(-columns // width) * (-(-problem.ks[level] // BLOCK_K) * BLOCK_K + stored)


def estimated_row_us(problem: Any, config: Any) -> float:
    """Estimates the kernel whose tiles have the columns of one candidate."""

    def tile(level: int, rows: int, stores: int = 0) -> _Tile:
        number = problem.batches[level] * -(-problem.n // TILE_ROWS) * -(-problem.m // rows)
        valid, cluster = min(TILE_ROWS, problem.n), config.cluster if stores else 1
        return _Tile(level, rows, TILE_ROWS, valid, number, config.num_stages, cluster, stores)

    *coarser, finest = range(len(problem.batches))
    tiles = []
    for level in coarser:
        whole = tile(level, config.block_m)
        if whole.number < WHOLE_TILES_PER_SM * NUM_SMS and config.block_m % 32 == 0:
            whole = tile(level, config.block_m // 2)
        tiles.append(whole)
    last = tile(finest, config.block_m, config.block_m // config.epilogue_rows)
    padded_n = -(-problem.n // TILE_ROWS) * TILE_ROWS
    fit = ROW_WASTED if problem.n % TILE_ROWS else ROW_WHOLE
    return fit * _kernel_us(problem, tiles, last, padded_n=padded_n, alignment=WEIGHT_ALIGNMENT)


def estimated_xla_us(problem: Any) -> float:
    """Estimates the decomposed form in XLA: f32 products, then a sum that is rounded.

    A matrix product of its own for each row of the batch pads M to 64 and N to 32.
    """
    total = XLA_US + _num_bytes(problem) / XLA_MEMORY_BYTES
    m, n = -(-problem.m // 64) * 64, -(-problem.n // 32) * 32
    for batch, k in zip(problem.batches, problem.ks, strict=True):
        rate = XLA_UNALIGNED_FLOPS if k % 8 else XLA_FLOPS
        total += XLA_PAD_US if k % 8 else 0
        products = 2.0 * batch * k * m * n / rate
        total += max(0.0, products - 2 * batch * k * problem.n / XLA_MEMORY_BYTES)
        product = 4 * batch * problem.m * problem.n
        total += product * (2 if product > CACHED_BYTES else 1) / XLA_MEMORY_BYTES
    return total
