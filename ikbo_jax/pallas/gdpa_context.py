"""What the warpgroups of the GDPA forward kernel share: sizes, memory, barriers, descriptors."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas import schedule
from ikbo_jax.pallas.gdpa_weights import ActivationSpec
from ikbo_jax.tuning.configs import BLOCK_K
from ikbo_jax.tuning.gdpa_configs import GdpaConfig

#: Words of a descriptor in shared memory: an `Item`, then a `Place`.
ITEM_WORDS = 7
#: Descriptors beyond the query slots.  A consumer reads one for the last time after it has given up
#: the queries of the item that follows, so the one that may overwrite it is three items later.
EXTRA_ITEM_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      q_rows: rows of the queries' array.
      q_heads: N.
      kv_heads: K.
      head_dim: H.
      weighing: how scores become weights, and sums results.
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
    words: Any  # [most tiles, gdpa_tiles.TILE_WORDS] int32
    counts: Any  # [2] int32


class Shared(NamedTuple):
    """Shared memory and barriers; a tile is (view for WGMMA, view for TMA): `mosaic.tile_views`."""

    query: tuple[Any, Any]  # [q_slots, 2, column blocks, 64, 64]
    key: tuple[Any, Any]  # [k_stages, column blocks, block_kv, 64]
    value: tuple[Any, Any]  # [v_stages, column blocks, block_kv, 64]
    items: Any  # [item slots, ITEM_WORDS] int32
    item_ready: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    rows: Any  # [2, 64, columns], only under interpretation


class Item(NamedTuple):
    """What a consumer has to know of one tile of one head while it works on it."""

    blocks: Any  # of keys, at least 1; 0 ends the list
    length: Any  # keys
    head: Any
    is_resident: Any  # 1: all blocks are in shared memory, where the item before met them


class Destination(NamedTuple):
    """Where its result goes; read when it is there, since registers are scarce before."""

    head: Any
    target: Any  # first row of the tile in the result
    rows: Any  # of the tile


class WarpgroupContext(NamedTuple):
    """What every function of a warpgroup needs; `consumer` is 0 or 1, unused by the producer."""

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
        """Where the result of an item goes, which has been received."""
        slot, first = self.item_slot(item), len(Item._fields)
        return Destination(
            *(self.shared.items[slot, first + i] for i in range(len(Destination._fields)))
        )

    def k_stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.k_stages)

    def v_stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.v_stages)

    def step_after(self, first_step: Any, blocks: Any, is_kept: Any) -> Any:
        """Where in the rings an item begins after one of some blocks, which it meets if kept."""
        if self.config.run == 1:
            return first_step + blocks
        return first_step + jnp.where(is_kept != 0, 0, blocks)

    def columns(self, block: int) -> Any:
        """Columns of a block of the head width, past which TMA reads zeros and stores nothing."""
        begin: Any = block * BLOCK_K
        if begin + BLOCK_K > self.shape.head_dim:
            begin = begin + 0 * self.worker  # a start known in advance would be out of bounds
        return pl.ds(begin, BLOCK_K)

    def work_items(self, count: Any) -> Any:
        """How many of `count` runs are this CTA's."""
        return schedule.back_and_forth_share(self.worker, self.shape.workers, count)

    def work_item(self, i: Any) -> Any:
        """The number of this CTA's `i`-th run."""
        return schedule.back_and_forth(self.worker, self.shape.workers, i)
