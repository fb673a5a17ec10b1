"""Hopper's limits, and the checks that the kernels' configurations share.

A check returns a sentence that says why a kernel cannot run, or None.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

#: Bytes of shared memory that one CTA may use on Hopper (227 KiB of the SM's 256 KiB).
MAX_SMEM_BYTES = 227 * 1024
#: Bytes of shared memory of an SM, and what it reserves for each CTA.
SM_SMEM_BYTES, RESERVED_SMEM_BYTES = 228 * 1024, 1024
#: Streaming multiprocessors (SMs) of an H100 and of an H200, which cost models and layouts assume.
NUM_SMS = 132
#: Registers of an SM.
SM_REGISTERS = 65536
#: Alignment of every shared memory allocation in bytes; TMA and WGMMA swizzles need it.
SMEM_ALIGNMENT = 1024
#: Rows of one consumer warpgroup's tile: the m of a WGMMA instruction.
WGMMA_M = 64
#: The k of one WGMMA instruction on 16-bit operands.
WGMMA_K = 16
#: Number of consumer warpgroups, which multiply; one producer warpgroup loads their operands.
NUM_CONSUMERS = 2
#: Embedding rows of a pipeline stage: one swizzled row of shared memory, 128 bytes.
BLOCK_K = 64
#: Threads of a warpgroup.
WARPGROUP_SIZE = 128
#: Rows of the tile that both consumer warpgroups of a CTA compute.
TILE_ROWS = NUM_CONSUMERS * WGMMA_M
#: Dtypes that the kernels accept.
KERNEL_DTYPES = ("bfloat16", "float16")


def first_reason[**Arguments](
    checks: Callable[Arguments, Iterator[str | None]],
) -> Callable[Arguments, str | None]:
    """Makes a function that returns the first reason of a generator of checks, or None.

    A check may rely on those before it, since none runs after a reason.
    """

    @functools.wraps(checks)
    def reason(*args: Arguments.args, **kwargs: Arguments.kwargs) -> str | None:
        for found in checks(*args, **kwargs):
            if found:
                return found
        return None

    return reason


def ctas_by_smem(size: int) -> int:
    """Counts CTAs of `size` bytes of shared memory for which an SM has room."""
    return SM_SMEM_BYTES // (size + RESERVED_SMEM_BYTES)


def ctas_by_registers(registers: int) -> int:
    """Counts CTAs of one warpgroup, with `registers` a thread, for which an SM has room."""
    return SM_REGISTERS // (WARPGROUP_SIZE * registers)


class OwnStages(NamedTuple):
    """The stages of values that have a tile's own tokens, before the blocks of its values.

    Attributes:
      columns: most candidates of a group, rounded up to 8.
      groups: of a tile's rows: 1, or one for every 64 rows.
      stages: of a group: 1, whose values follow `columns` keys; or 2, of keys and of values.
    """

    columns: int
    groups: int
    stages: int

    @property
    def number(self) -> int:
        return self.groups * self.stages

    @classmethod
    def choose(cls, rows: int, tiles: int, q_len: int, config: Any) -> Self | None:
        """Chooses the fewest for tiles of `rows` rows of a head; None: a stage is too small."""
        for stages, groups in ((1, 1), (1, tiles), (2, 1), (2, tiles)):
            of_group = rows * tiles // groups
            # A tile may begin within a candidate's queries, and end within another's.
            is_whole = of_group % q_len == 0
            most = of_group // q_len if is_whole else (of_group + q_len - 2) // q_len + 1
            columns = -(-most // 8) * 8
            if 2 * columns <= stages * config.block_kv:
                return cls(columns, groups, stages)
        return None


def column_blocks(width: int) -> int:
    """Counts the blocks of 64 columns (one swizzled row each) that hold `width` columns."""
    return -(-width // BLOCK_K)


def why_not_dtype(dtype: str) -> str | None:
    """Checks the inputs' dtype."""
    if dtype in KERNEL_DTYPES:
        return None
    return f"the kernel takes {' and '.join(KERNEL_DTYPES)}, but the inputs are {dtype}"


def why_not_head_dim(
    head_dim: int, supported: Iterable[int], kernel: str = "kernel takes"
) -> str | None:
    """Checks the head width H."""
    widths = tuple(supported)
    if head_dim in widths:
        return None
    return f"the {kernel} head widths {', '.join(map(str, widths))}, but H={head_dim}"


def why_not_block(name: str, block: int, widest: int, head_dim: int, operands: str) -> str | None:
    """Checks the rows of a pipeline stage, beside which `operands` have to fit the registers."""
    if block % WGMMA_K == 0 and WGMMA_K <= block <= widest:
        return None
    return (
        f"{name} must be a multiple of {WGMMA_K} from {WGMMA_K} to {widest}, so that {operands} "
        f"fit the registers at H={head_dim}, but is {block}"
    )


def why_not_rows(problem: Any) -> str | None:
    """Checks the dtype of a linear compression, and the width N of rows that TMA reads."""
    reason = why_not_dtype(problem.dtype)
    if reason or problem.n % 8 == 0:
        return reason
    return f"the kernel needs N to be a multiple of 8 (16 bytes, for TMA), but N={problem.n}"


def why_not_heads(q_heads: int, kv_heads: int) -> str | None:
    """Checks that every key head serves the same number of query heads."""
    if q_heads % kv_heads == 0:
        return None
    return f"the kernel needs N to be a multiple of K, but N={q_heads} and K={kv_heads}"


def why_too_few(config: Any, **least: int) -> str | None:
    """Checks that fields of a configuration are not below their least values."""
    for name, number in least.items():
        if getattr(config, name) < number:
            return f"{name} must be at least {number}, but is {getattr(config, name)}"
    return None


def why_not_smem(config: Any, smem_bytes: int, head_dim: int | None = None) -> str | None:
    """Checks the shared memory of one CTA."""
    if smem_bytes <= MAX_SMEM_BYTES:
        return None
    at = "" if head_dim is None else f" at H={head_dim}"
    return f"{config} needs {smem_bytes} bytes of shared memory{at}, but a CTA has {MAX_SMEM_BYTES}"
