"""Sizes, memory, barriers and descriptors that the GDPA forward kernel's warpgroups share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.hopper import mosaic, schedule
from ikbo_jax.problems import GdpaConfig
from ikbo_jax.problems.hopper import BLOCK_K

#: Words of a descriptor in shared memory: an `Item`, then a `Destination`.
ITEM_WORDS = 7
#: Slots for descriptors beyond the number of query slots.  A consumer reads a descriptor for the
#: last time after it has freed the next item's queries, so only the descriptor of an item at least
#: three later may overwrite it.
EXTRA_ITEM_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      q_rows: rows of the queries' array.
      q_heads: N.
      kv_heads: K.
      head_dim: H.
      activation: how scores become weights, and sums results.
      workers: CTAs.
    """

    q_rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    activation: ActivationSpec
    workers: int

    @property
    def column_blocks(self) -> int:
        """Blocks of 64 columns that hold the head width."""
        return pl.cdiv(self.head_dim, BLOCK_K)


class Operands(NamedTuple):
    """Device memory."""

    query: Any  # [q_rows, N, H]
    key: Any  # [kv_rows, K, H]
    value: Any  # [kv_rows, K, H]
    words: Any  # [most tiles, tile_list.TILE_WORDS] int32
    counts: Any  # [2] int32


class Shared(NamedTuple):
    """Shared memory and barriers; an operand has two views, (for WGMMA, for TMA): see
    `mosaic.tile_views`."""

    query: Any  # [q_slots, 2, column blocks, 64, 64]
    key: Any  # [k_stages, column blocks, block_kv, 64]
    value: Any  # [v_stages, column blocks, block_kv, 64]
    items: Any  # [item slots, ITEM_WORDS] int32
    item_ready: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    staging: Any  # [2, 64, columns], only under interpretation


class Item(NamedTuple):
    """The words of an item's descriptor that a consumer keeps in registers."""

    blocks: Any  # blocks of keys, at least 1; 0: no item follows
    length: Any  # number of keys
    head: Any
    is_resident: Any  # 1: the item before left all blocks in shared memory


class Destination(NamedTuple):
    """Where an item's result goes; read only when it is stored, to save registers before."""

    head: Any
    target: Any  # first row of the tile in the result
    rows: Any  # rows of the tile


class WarpgroupContext(NamedTuple):
    """Arguments that all functions of a warpgroup share; `consumer` is 0 or 1 (producer: unused).

    A *step* numbers the blocks of keys, and of values, that the CTA loads; its remainder by the
    number of stages is the block's stage.
    """

    shape: Shape
    config: GdpaConfig
    shared: Shared
    operands: Operands
    out: Any  # device memory [rows, N, H]
    worker: Any
    consumer: Any
    interpret: bool

    def slot(self, item: Any) -> Any:
        return lax.rem(item, self.config.q_slots)

    def item_slot(self, item: Any) -> Any:
        return lax.rem(item, self.config.q_slots + EXTRA_ITEM_SLOTS)

    def destination(self, item: Any) -> Destination:
        """The destination of the received item number `item`."""
        slot, first = self.item_slot(item), len(Item._fields)
        return Destination(
            *(self.shared.items[slot, first + i] for i in range(len(Destination._fields)))
        )

    def k_stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.k_stages)

    def v_stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.v_stages)

    def step_after(self, first_step: Any, blocks: Any, is_kept: Any) -> Any:
        """The step at which the next item begins, after an item of `blocks` blocks."""
        if self.config.run == 1:
            return first_step + blocks
        return first_step + jnp.where(is_kept != 0, 0, blocks)

    def columns(self, block: int) -> Any:
        """Columns of a block of the head width."""
        return mosaic.block_columns(block, self.shape.head_dim, self.worker)

    def work_items(self, count: Any) -> Any:
        """How many of `count` work items this CTA takes."""
        return schedule.back_and_forth_share(self.worker, self.shape.workers, count)

    def work_item(self, i: Any) -> Any:
        """The number of this CTA's `i`-th work item."""
        return schedule.back_and_forth(self.worker, self.shape.workers, i)
