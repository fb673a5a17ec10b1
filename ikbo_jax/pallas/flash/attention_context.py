"""Sizes, memory, barriers and descriptors that the attention kernel's warpgroups share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations.cap import Cap
from ikbo_jax.pallas.flash.context import AttentionShape, FlashContext
from ikbo_jax.pallas.hopper.row_order import RowOrder
from ikbo_jax.problems.attention import FLAG_WORDS
from ikbo_jax.problems.hopper import TILE_ROWS, WGMMA_M

#: Words of a descriptor that both consumers read; three for each consumer follow.
COMMON_ITEM_WORDS = 6
#: Widest heads to which `early_scores` applies: H = 192 spills 96 bytes with it, H = 256 392 bytes.
EARLY_SCORES_MAX_WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Shape(AttentionShape):
    """Static description of a launch."""

    log2_scale: float
    workers: int
    most_tiles: int  # of all heads
    output_scale: float = 1.0
    cap: Cap | None = None  # of the scores, before `log2_scale`

    @property
    def row_tiles(self) -> int:
        """Number of tiles of a head, if tile boundaries ignore users."""
        return pl.cdiv(self.rows, TILE_ROWS)

    @property
    def has_partial_passes(self) -> bool:
        """Whether a pass may store only some of a warpgroup's 64 rows."""
        return self.q_len % WGMMA_M != 0

    @property
    def tiles_per_flag(self) -> int:
        return pl.cdiv(pl.cdiv(self.most_tiles, self.workers), FLAG_WORDS - 1)


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


@dataclasses.dataclass(frozen=True)
class AttentionContext(FlashContext):
    """The context of an attention kernel's warpgroup.

    `ends`: sequences of passes that have ended.
    """

    ends: int = 0

    @property
    def own(self) -> Any:
        """The `OwnStages` of values that have a pass's own tokens; None: there are none."""
        has_own = self.operands.self_key is not None
        return self.config.own_stages(self.shape.q_len) if has_own else None

    @property
    def page(self) -> int:
        """Positions of a page, a multiple of a block's keys; 0: there are none."""
        return 0 if self.operands.pages is None else int(self.operands.key.shape[1])

    @property
    def is_early(self) -> bool:
        """Whether scores of the next pass are computed while a pass is stored.

        Wider heads, partial passes and own tokens have too few registers.
        """
        is_narrow = self.shape.head_dim <= EARLY_SCORES_MAX_WIDTH
        has_registers = is_narrow and not self.shape.has_partial_passes and self.own is None
        return self.config.early_scores and has_registers and self.config.q_slots > 1

    @property
    def row_order(self) -> RowOrder | None:
        """Order of the results' rows, or None if results are in the order of the queries."""
        targets = self.operands.targets
        return None if targets is None else RowOrder(targets, self.shape.q_len)

    def unless(self, is_reused: Any, act: Callable[..., None], *barrier: Any) -> None:
        """Acts on a block's barrier, unless the block is reused by the next pass."""
        if self.config.reuse:
            pl.when(is_reused == 0)(functools.partial(act, *barrier))
        else:
            act(*barrier)

    def value_step(self, index: Any, step: Any) -> Any:
        """Returns the step of pass `index` among values, behind own tokens."""
        own = self.own
        return step if own is None else step + (index - self.ends + 1) * own.number

    def step_after(self, item: Item, first_step: Any) -> Any:
        """Returns the step at which the pass after `item` begins."""
        if not self.config.reuse:
            return first_step + item.blocks
        return first_step + jnp.where(item.is_kept != 0, 0, item.blocks)
