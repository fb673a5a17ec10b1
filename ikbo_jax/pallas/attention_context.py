"""What the warpgroups of the attention kernel share: sizes, memory, barriers, descriptors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.tuning.configs import (
    ATTENTION_TILE_ROWS,
    BLOCK_K,
    WGMMA_M,
    AttentionConfig,
)

#: Words of a descriptor in shared memory: those that both consumers read, and three for each.
ITEM_WORDS = 16
COMMON_ITEM_WORDS = 6
#: Words of a consumer's flags: whether any is set, and one for each group of neighbouring tiles.
FLAG_WORDS = 128
#: Widest heads at which `early_scores` acts: 192 spills 96 bytes, 256 392.
EARLY_SCORES_MAX_WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch."""

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    kv_len: int
    users: int
    head_dim: int
    log2_scale: float
    sum_limit: float
    workers: int
    most_tiles: int  # of all heads
    output_scale: float = 1.0

    @property
    def rows(self) -> int:
        return self.batch * self.q_len

    @property
    def row_tiles(self) -> int:
        """Tiles of a head, where they are cut without regard to users."""
        return pl.cdiv(self.rows, ATTENTION_TILE_ROWS)

    @property
    def column_blocks(self) -> int:
        """Blocks of 64 columns that hold the head width."""
        return pl.cdiv(self.head_dim, BLOCK_K)

    @property
    def has_partial_passes(self) -> bool:
        """Whether a pass may own some rows of a warpgroup and not others."""
        return self.q_len % WGMMA_M != 0

    @property
    def tiles_per_flag(self) -> int:
        return pl.cdiv(pl.cdiv(self.most_tiles, self.workers), FLAG_WORDS - 1)


class Operands(NamedTuple):
    """Device memory; what a launch has not got is None.

    A launch with a list of tiles has keys and values of one sequence after another, and no index.
    """

    query: Any  # [B * T, N, H], or any rows with a list
    key: Any  # [U, S, K, H], or [rows, K, H]
    value: Any  # [U, S, K, H], or [rows, K, H]
    cand_to_user: Any  # [B] int32
    lengths: Any  # [U] int32
    order: Any  # [B] int32
    run_ends: Any  # [B] int32, past the last candidate of the run, by position
    cuts: Any  # [R + 1] int32, of R warpgroup tiles: where tile i begins; R past the last
    cut_counts: Any  # [R] int32, tiles that begin at or before a warpgroup tile
    words: Any = None  # [most tiles, TILE_WORDS] int32, of a `gdpa_tiles.TileList`
    counts: Any = None  # [2] int32, likewise


class Outputs(NamedTuple):
    """Device memory that a launch fills."""

    out: Any  # [B * T, N, H]
    lse: Any  # [B * T, N] f32


class Shared(NamedTuple):
    """Shared memory and barriers; a tile is (view for WGMMA, view for TMA): `mosaic.tile_views`."""

    query: tuple[Any, Any]  # [q_slots, 2, column blocks, 64, 64]
    key: tuple[Any, Any]  # [k_stages, column blocks, block_kv, 64]
    value: tuple[Any, Any]  # [v_stages, column blocks, block_kv, 64]
    items: Any  # [q_slots + 1, ITEM_WORDS] int32; the last row is the producer's own
    flags: Any  # [2, FLAG_WORDS] int32
    item_ready: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    flags_ready: Any
    rows: Any  # [2, 64, columns], only under interpretation
    row_values: Any  # [2, 64] f32, only under interpretation


class Item(NamedTuple):
    """One pass, as a consumer sees it."""

    blocks: Any  # of keys, at least 1; 0 ends the list
    length: Any  # keys
    head: Any
    flag: Any  # index of the flag of the pass's tile
    is_resident: Any  # 1: the pass before has left all blocks in shared memory
    is_kept: Any  # 1: this pass leaves them there
    first_row: Any  # of this consumer, in device memory
    begin: Any  # of the rows that belong to the pass, from 0 to 64
    end: Any


class WarpgroupContext(NamedTuple):
    """What every function of a warpgroup needs; `consumer` is 0 or 1, unused by the producer."""

    shape: Shape
    config: AttentionConfig
    shared: Shared
    operands: Operands
    outputs: Outputs
    worker: Any
    consumer: Any
    interpret: bool

    def slot(self, item: Any) -> Any:
        return lax.rem(item, self.config.q_slots)

    def k_stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.k_stages)

    def v_stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.v_stages)

    @property
    def is_early(self) -> bool:
        """Whether the next pass's scores are multiplied while a pass is stored.

        Wider heads, and passes of some rows, have no registers for it; and with a single slot the
        pass's description makes way for the next one before.
        """
        has_registers = (
            self.shape.head_dim <= EARLY_SCORES_MAX_WIDTH and not self.shape.has_partial_passes
        )
        return self.config.early_scores and has_registers and self.config.q_slots > 1

    def unless(self, is_reused: Any, act: Callable[[], None]) -> None:
        """Acts on the barrier of a block, unless it stays from one pass to the next."""
        if self.config.reuse:
            pl.when(is_reused == 0)(act)
        else:
            act()

    def step_after(self, item: Item, first_step: Any) -> Any:
        """Where in the rings the pass after `item` begins."""
        if not self.config.reuse:
            return first_step + item.blocks
        return first_step + jnp.where(item.is_kept != 0, 0, item.blocks)

    def columns(self, block: int) -> Any:
        """Columns of a block of the head width, past which TMA reads zeros and stores nothing."""
        begin: Any = block * BLOCK_K
        if begin + BLOCK_K > self.shape.head_dim:
            begin = begin + 0 * self.worker  # a start known in advance would be out of bounds
        return pl.ds(begin, BLOCK_K)
