"""Sizes, memory, barriers and descriptors that the attention backward kernel's warps share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS

#: Words of an item's descriptor in shared memory: number of query blocks (negative: no more items),
#: number of query rows, part of a user's rows, key head, number of the tile of keys, keys of the
#: user from the tile's first on, first row in `d_query`.
BLOCKS, ROWS, PART, HEAD, TILE, KEYS, FIRST_TARGET = range(7)
#: Words of a consumer's part of d_query: number of the tile of keys (negative: no more parts),
#: plane of `d_query`, first row in it, number of the part's counter.
PART_TILE, PART_PLANE, PART_ROW, PART_COUNTER = range(4)
DESCRIPTOR_WORDS = 8
#: Words of a part of a user's rows in device memory: first query row, number of query rows, first
#: row in `d_query`, number of the user's keys.
USER_WORDS = 4
#: f32 columns of a shared memory row of 128 bytes.
SUM_COLUMNS = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      rows: query rows of a key head: B * T * N / K.
      kv_tiles: tiles of keys of a user.
      blocks: the largest number of query blocks of a key head.
      splits: parts of a user's rows.
      scale: of the scores.
    """

    rows: int
    users: int
    kv_len: int
    kv_heads: int
    head_dim: int
    kv_tiles: int
    blocks: int
    splits: int
    scale: float

    @property
    def items(self) -> int:
        return self.users * self.splits * self.kv_heads * self.kv_tiles

    @property
    def column_blocks(self) -> int:
        """Blocks of 64 columns that hold the head width."""
        return pl.cdiv(self.head_dim, BLOCK_K)


def part_shape(head_dim: int, block_q: int) -> tuple[int, int, int]:
    """A consumer's part of a block of d_query: halves of 32 columns, rows, columns.

    The consumers share the head width, or the queries if the head has 64 columns.
    """
    rows = block_q // NUM_CONSUMERS if head_dim <= BLOCK_K else block_q
    return BLOCK_K // SUM_COLUMNS, rows, SUM_COLUMNS


class Operands(NamedTuple):
    """Device memory."""

    query: Any  # [rows, K, H], a user's rows side by side
    d_out: Any  # [rows, K, H]
    statistics: Any  # [K, 2, at least rows] f32: lse * log2(e), and delta
    key: Any  # [U, S, K, H]
    value: Any  # [U, S, K, H]
    users: Any  # [U * splits, USER_WORDS] int32


class Outputs(NamedTuple):
    """Device memory that the launch fills."""

    d_query: Any  # [K, or tiles of keys * K, blocks * block_q, H] f32, rows of no query arbitrary;
    # None if a second launch computes d_query
    d_key: Any  # [U, S, K, H] of 16 bits, or [U * splits * S, K, H] f32
    d_value: Any  # likewise


class Shared(NamedTuple):
    """Shared memory and barriers; an operand has two views, (for WGMMA, for TMA): see
    `mosaic.tile_views`."""

    keys_values: Any  # [kv_slots, 2 operands, 2 consumers, column blocks, 64, 64]
    queries: Any  # [stages, 2 operands, column blocks, block_q, 64]: query and d_out
    statistics: Any  # [stages, 2, block_q] f32
    d_scores: Any  # [D_SCORES_BUFFERS, 2 consumers, block_q, 64]: queries by a consumer's keys
    d_query: Any  # [2 consumers, 2, rows, 32] f32, see `part_shape`; None without `Outputs.d_query`
    words: Any  # [kv_slots + 2, DESCRIPTOR_WORDS] int32; the last two are of the consumers' parts
    item_ready: Any
    kv_ready: Any
    kv_free: Any
    queries_ready: Any
    queries_free: Any
    d_scores_ready: Any
    d_scores_free: Any
    part_ready: Any
    part_free: Any
    staging: Any  # [2 consumers, 64, block_q], only under interpretation
    f32_staging: Any  # [2 consumers, 64, columns] f32, likewise


class Global(NamedTuple):
    """Counters in device memory, zero when the kernel starts; None under interpretation."""

    tickets: Any
    finished: Any  # [K * blocks * 2 consumers]: tiles that have added their part of d_query


class WarpgroupContext(NamedTuple):
    """Arguments that all functions of a warpgroup share; `consumer` is 0 or 1 (others: unused).

    A *step* numbers the query blocks that the CTA loads; its remainder by the number of stages is
    the block's stage.
    """

    shape: Shape
    config: AttentionBackwardConfig
    shared: Shared
    operands: Operands
    outputs: Outputs
    counters: Global
    worker: Any
    consumer: Any
    interpret: bool

    @property
    def has_d_query(self) -> bool:
        return self.config.d_query != "launch"

    def slot(self, item: Any) -> Any:
        return lax.rem(item, self.config.kv_slots)

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.stages)

    def buffer(self, step: Any) -> Any:
        return lax.rem(step, self.config.d_scores_buffers(self.shape.head_dim))

    def columns(self, block: int) -> Any:
        """Columns of a block of the head width."""
        return mosaic.block_columns(block, self.shape.head_dim, self.worker)
