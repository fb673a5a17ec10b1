"""Sizes, memory, barriers and descriptors that the attention kernel's warpgroups share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems import AttentionConfig
from ikbo_jax.problems.hopper import BLOCK_K, TILE_ROWS, WGMMA_M

#: Words of a descriptor in shared memory: words that both consumers read, and three per consumer.
ITEM_WORDS = 16
COMMON_ITEM_WORDS = 6
#: Words of a consumer's flags: whether any flag is set, and a flag for each group of consecutive
#: tiles.
FLAG_WORDS = 128
#: Widest heads to which `early_scores` applies: H = 192 spills 96 bytes with it, H = 256 392 bytes.
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
        """Tiles of a head, if tile boundaries ignore users."""
        return pl.cdiv(self.rows, TILE_ROWS)

    @property
    def column_blocks(self) -> int:
        """Blocks of 64 columns that hold the head width."""
        return pl.cdiv(self.head_dim, BLOCK_K)

    @property
    def has_partial_passes(self) -> bool:
        """Whether a pass may store only some of a warpgroup's 64 rows."""
        return self.q_len % WGMMA_M != 0

    @property
    def tiles_per_flag(self) -> int:
        return pl.cdiv(pl.cdiv(self.most_tiles, self.workers), FLAG_WORDS - 1)


class Operands(NamedTuple):
    """Device memory; operands that a launch does not use are None.

    A launch with a list of tiles has the keys and values of all sequences in one array, and no
    index.
    """

    query: Any  # [B * T, N, H]; with a list of tiles, [rows, N, H]
    key: Any  # [U, S, K, H]; with a list of tiles, [rows, K, H]
    value: Any  # [U, S, K, H]; with a list of tiles, [rows, K, H]
    cand_to_user: Any  # [B] int32
    lengths: Any  # [U] int32
    order: Any  # [B] int32
    run_ends: Any  # [B] int32; see `work_order.run_ends`
    cuts: Any  # [warpgroup tiles + 1] int32; see `work_order.cuts`
    cut_counts: Any  # [warpgroup tiles] int32; see `work_order.cuts`
    words: Any = None  # [most tiles, TILE_WORDS] int32, of a `tile_list.TileList`
    counts: Any = None  # [2] int32, of a `tile_list.TileList`


class Outputs(NamedTuple):
    """Device memory that a launch fills."""

    out: Any  # [B * T, N, H]
    lse: Any  # [B * T, N] f32


class Shared(NamedTuple):
    """Shared memory and barriers; an operand has two views, (for WGMMA, for TMA): see
    `mosaic.tile_views`."""

    query: Any  # [q_slots, 2, column blocks, 64, 64]
    key: Any  # [k_stages, column blocks, block_kv, 64]
    value: Any  # [v_stages, column blocks, block_kv, 64]
    items: Any  # [q_slots + 1, ITEM_WORDS] int32; the last descriptor is the producer's `_save`
    flags: Any  # [2, FLAG_WORDS] int32
    item_ready: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    flags_ready: Any
    staging: Any  # [2, 64, columns], only under interpretation
    row_value_staging: Any  # [2, 64] f32, only under interpretation


class Item(NamedTuple):
    """The descriptor of a pass, as a consumer reads it."""

    blocks: Any  # blocks of keys, at least 1; 0: no pass follows
    length: Any  # number of keys
    head: Any
    flag: Any  # index of the flag of the pass's tile
    is_resident: Any  # 1: the pass before left all blocks in shared memory
    is_kept: Any  # 1: this pass leaves all blocks in shared memory
    first_row: Any  # this consumer's first row, in device memory
    begin: Any  # the pass stores rows [begin, end) of the consumer's 64
    end: Any


class WarpgroupContext(NamedTuple):
    """Arguments that all functions of a warpgroup share; `consumer` is 0 or 1 (producer: unused).

    A *step* numbers the blocks of keys, and of values, that the CTA loads; its remainder by the
    number of stages is the block's stage.
    """

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
        """Whether scores of the next pass are computed while a pass is stored.

        Wider heads and partial passes have too few registers for it.  With a single query slot, the
        next pass's descriptor would overwrite the pass's before it is stored.
        """
        has_registers = (
            self.shape.head_dim <= EARLY_SCORES_MAX_WIDTH and not self.shape.has_partial_passes
        )
        return self.config.early_scores and has_registers and self.config.q_slots > 1

    def unless(self, is_reused: Any, act: Callable[[], None]) -> None:
        """Acts on a block's barrier, unless the block is reused by the next pass."""
        if self.config.reuse:
            pl.when(is_reused == 0)(act)
        else:
            act()

    def step_after(self, item: Item, first_step: Any) -> Any:
        """The step at which the pass after `item` begins."""
        if not self.config.reuse:
            return first_step + item.blocks
        return first_step + jnp.where(item.is_kept != 0, 0, item.blocks)

    def columns(self, block: int) -> Any:
        """Columns of a block of the head width."""
        return mosaic.block_columns(block, self.shape.head_dim, self.worker)
