"""Sizes, memory, barriers and descriptors that the GDPA forward kernel's warpgroups share."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.flash.context import FlashContext
from ikbo_jax.pallas.hopper import schedule
from ikbo_jax.problems.gdpa import ITEM_WORDS
from ikbo_jax.reference import hstu
from ikbo_jax.reference.activations import SOFTMAX


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch; `has_mask`: rows do not see all keys; `rule`: None: it is
    read.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    activation: ActivationSpec
    workers: int
    has_mask: bool = False
    rule: hstu.Rule | None = None

    @property
    def log2_scale(self) -> float | None:
        """The scale of a softmax's scores in powers of 2; None without a softmax."""
        if SOFTMAX not in self.activation.names:
            return None
        return self.activation.scale * math.log2(math.e)

    @property
    def has_gaps(self) -> bool:
        """Whether blocks of a tile may be skipped, and rows have gaps."""
        return self.has_mask and (self.rule is None or self.rule.has_targets)


class Item(NamedTuple):
    """The words of an item's descriptor that a consumer keeps in registers."""

    blocks: Any  # blocks of keys, at least 1; 0: no item follows
    length: Any  # number of keys
    head: Any
    is_resident: Any  # 1: the item before left all blocks in shared memory


@dataclasses.dataclass(frozen=True)
class GdpaContext(FlashContext):
    """The context of a GDPA forward kernel's warpgroup."""

    def destination(self, item: Any) -> list[Any]:
        """Reads the further words of an item: head, first row of the result, rows of the tile.

        Only when they are used, to save registers before.
        """
        items, first = self.shared.items, len(Item._fields)
        slot = items.slot(item)
        return [items.words[slot, first + i] for i in range(3)]

    def mask_word(self, item: Any, number: int) -> Any:
        """Reads word `number` of the mask in the descriptor of the received item `item`."""
        items = self.shared.items
        return items.words[items.slot(item), ITEM_WORDS + number]

    def step_after(self, first_step: Any, blocks: Any, is_kept: Any) -> Any:
        """Returns the step at which the item after an item of `blocks` blocks begins."""
        if self.config.run == 1:
            return first_step + blocks
        return first_step + jnp.where(is_kept != 0, 0, blocks)

    def work_items(self, count: Any) -> Any:
        return schedule.back_and_forth_share(self.worker, self.shape.workers, count)

    def work_item(self, i: Any) -> Any:
        return schedule.back_and_forth(self.worker, self.shape.workers, i)
