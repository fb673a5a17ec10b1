"""Configurations of the backward kernels of generalised dot-product attention."""

from __future__ import annotations

import dataclasses

from ikbo_jax.tuning.configs import (
    BLOCK_K,
    KERNEL_DTYPES,
    MAX_SMEM_BYTES,
    NUM_CONSUMERS,
    SMEM_ALIGNMENT,
    WGMMA_K,
    WGMMA_M,
)

#: Largest `block` by head width (width 96 is padded to 128 in shared memory): for the kernel with
#: two results (d_key, d_value), and with one (d_query). With larger blocks accumulators and scores
#: exceed a consumer thread's 240 registers.
MAX_BLOCKS = {64: (96, 128), 96: (64, 96), 128: (64, 96)}
HEAD_DIMS = tuple(MAX_BLOCKS)
#: Rows of a CTA tile; all belong to one head and one sequence.
TILE_ROWS = NUM_CONSUMERS * WGMMA_M
#: Number of slots for a tile's operands and results: the finished tile and the next one.
SLOTS = 2


@dataclasses.dataclass(frozen=True)
class GdpaBackwardConfig:
    """Tuning parameters of one backward kernel.

    Attributes:
      block: rows of each of the two operands in a pipeline stage; a multiple of 16.
      stages: stages of the ring.
    """

    block: int = 64
    stages: int = 3

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of one CTA: tiles, ring, descriptors, barriers."""
        row = -(-head_dim // BLOCK_K) * BLOCK_K * 2
        return 2 * row * (SLOTS * TILE_ROWS + self.stages * self.block) + 3 * SMEM_ALIGNMENT


def illegal_reason(
    dtype: str, head_dim: int, config: GdpaBackwardConfig, *, num_results: int
) -> str | None:
    """Why the kernel with `num_results` results cannot run with `config`; None if it can."""
    if dtype not in KERNEL_DTYPES:
        return f"the kernel takes {' and '.join(KERNEL_DTYPES)}, but the inputs are {dtype}"
    if head_dim not in HEAD_DIMS:
        return (
            f"the backward kernels take head widths {', '.join(map(str, HEAD_DIMS))}, "
            f"but H={head_dim}"
        )
    widest = MAX_BLOCKS[head_dim][0 if num_results == 2 else 1]
    if config.block % WGMMA_K or not WGMMA_K <= config.block <= widest:
        return (
            f"block must be a multiple of {WGMMA_K} from {WGMMA_K} to {widest}, so that scores and "
            f"{num_results} accumulators fit the registers at H={head_dim}, but is {config.block}"
        )
    if config.stages < 2:
        return f"stages must be at least 2, but is {config.stages}"
    smem_bytes = config.smem_bytes(head_dim)
    if smem_bytes > MAX_SMEM_BYTES:
        return (
            f"{config} needs {smem_bytes} bytes of shared memory at H={head_dim}, "
            f"but a CTA has {MAX_SMEM_BYTES}"
        )
    return None


def default_config(head_dim: int) -> GdpaBackwardConfig:
    """The configuration of both kernels; nothing else was measured."""
    return GdpaBackwardConfig(64, 6 if head_dim <= BLOCK_K else 3)
