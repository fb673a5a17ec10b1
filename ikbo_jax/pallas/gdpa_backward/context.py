"""Sizes, memory, barriers and descriptors that the backward kernels' warpgroups share."""

import dataclasses
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.row_order import RowOrder
from ikbo_jax.problems.gdpa_backward import (
    BLOCK_WORDS,
    ITEM_WORDS,
    MASK_WORDS,
    STATISTICS,
    GdpaBackwardConfig,
)
from ikbo_jax.problems.hopper import BLOCK_K
from ikbo_jax.reference.activations import SOFTMAX

#: Words of a tile's descriptor in shared memory: first row and number of rows of the result, head,
#: whether the tile has any blocks, number of blocks (at least 1). With a mask: the first row of the
#: tile's statistics, or its first key; how many blocks need no mask; its place (`stored.PLACE`);
#: and the head is `END` where no tile follows.
FIRST_ROW, ROWS, HEAD, HAS_BLOCKS, BLOCKS, ORIGIN, WHOLE_BLOCKS, PLACE = range(8)
END = -1
#: Further words of a block's descriptor, with a mask: what consumers do with it; its first key, or
#: its first query's row of `masked.Masks.rows`.
FLAGS, FIRST = 2, 3
#: (activation, approximation) that spill beside two sums unless a branch encloses the activation;
#: those that do with a mask, too; and those that do only in blocks that need the mask.
SPILLING_ACTIVATIONS = (("gelu", None), ("gelu", "tanh"), ("silu", "tanh"))
SPILLING_MASKED_ACTIVATIONS = (("gelu_tanh", None),)
SPILLING_CUT_ACTIVATIONS = (("silu", None),)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    Attributes:
      heads: heads of the stationary operands: K in the kernel for keys, N for queries.
      streamed_per_head: streamed heads for each stationary head; 1 in the kernel for queries.
      heads_per_streamed: stationary heads that share a streamed head; 1 in the kernel for keys.
      scales: factor of each result's sum.
      has_stored: whether gradients of scores are stored by the kernel for keys, read by the other.
    """

    heads: int
    streamed_per_head: int
    heads_per_streamed: int
    head_dim: int
    activation: ActivationSpec
    scales: tuple[float, ...]
    workers: int
    has_mask: bool = False
    has_stored: bool = False

    @property
    def is_for_keys(self) -> bool:
        return len(self.scales) == 2

    @property
    def reads_stored(self) -> bool:
        return self.has_stored and not self.is_for_keys

    @property
    def has_softmax(self) -> bool:
        """Whether all heads have a softmax; otherwise none has."""
        return SOFTMAX in self.activation.names

    def has_activation_in_branch(self, is_cut: bool) -> bool:
        """Whether a branch keeps ptxas from spilling; `is_cut`: the block needs the mask."""
        names = self.activation.names
        is_alone, kind = len(set(names)) == 1, (names[0], self.activation.approx)
        is_wide = self.is_for_keys and self.head_dim > BLOCK_K
        spills = kind in SPILLING_ACTIVATIONS
        spills |= self.has_mask and kind in SPILLING_MASKED_ACTIVATIONS
        spills |= is_cut and kind in SPILLING_CUT_ACTIVATIONS
        spills |= self.activation.cap is not None
        return is_wide and is_alone and spills


class Operands(NamedTuple):
    """Device memory: scores are `stationary[0] @ streamed[0].T`, gradients of activated scores
    `stationary[1] @ streamed[1].T`, or their transposes.
    """

    stationary: tuple[Any, Any]  # (key, value) [total_kv, K, H] or (query, d_out) [total_q, N, H]
    streamed: tuple[Any, Any]  # the other pair
    tiles: Any  # [tiles, TILE_WORDS] int32
    counts: Any  # [2] int32: tiles with blocks, all tiles
    ranges: Any  # [sequences, RANGE_WORDS] int32
    statistics: Any = None  # [N, 2, rows], int32 (bits) or f32: lse and delta, of a softmax
    order: Any = None  # only for attention: candidates in user order
    masks: Any = None  # `masked.Masks`


@dataclasses.dataclass(frozen=True)
class PackedWords:
    """Descriptors [slots, words] that are a part of a flat array of words, from `first` on."""

    array: Any
    first: int
    words: int

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        return self.array[self._position(*index)]

    def __setitem__(self, index: tuple[Any, Any], word: Any) -> None:
        self.array[self._position(*index)] = word

    def _position(self, slot: Any, word: Any) -> Any:
        return self.first + slot * self.words + word


def with_words(shape: Shape, config: GdpaBackwardConfig, shared: Any) -> Any:
    """Gives the rings of a softmax's kernel their descriptors."""
    if shared.packed is None:
        return shared
    packing = config.packing(len(shape.scales))
    items = PackedWords(shared.packed, packing.item_words, ITEM_WORDS)
    words = BLOCK_WORDS + MASK_WORDS * shape.has_mask
    blocks = PackedWords(shared.packed, packing.block_words, words)
    return shared._replace(
        stationary=shared.stationary._replace(words=items),
        streamed=shared.streamed._replace(words=blocks),
    )


@dataclasses.dataclass(frozen=True)
class BackwardContext(WarpgroupContext):
    """A warpgroup's context; a *step* numbers blocks, and `outputs` begins with gradients."""

    @property
    def order(self) -> RowOrder | None:
        """Where rows are stored; None: in the order in which they are read."""
        return None

    def tile_word(self, tile: Any, word: int) -> Any:
        """Reads a word of a tile, of those that `worklist.lists.WORK_WORDS` counts."""
        return self.operands.tiles[tile, word]

    def range_word(self, index: Any, word: int) -> Any:
        """Reads a word of a range of streamed rows, one of `worklist.lists.RANGE_WORDS`."""
        return self.operands.ranges[index, word]

    def statistics(self, slot: Any, number: int) -> Any:
        """Returns a vector of a slot of statistics in shared memory; it may have rows to spare."""
        if self.shared.statistics is not None:
            return self.shared.statistics.at[number]
        packing = self.config.packing(len(self.shape.scales))
        first = (slot * STATISTICS + number) * packing.stride
        return self.shared.packed.at[pl.ds(first, packing.stride)]

    def number_after(self, number: Any, items: Any) -> Any:
        """Takes the item after `number`, its `items`-th; interpreted CTAs have fixed shares."""
        if self.interpret:
            return number + self.shape.workers
        return self.shape.workers + self.take(items, 0)

    @property
    def tile_count(self) -> Any:
        return self.operands.counts[1]

    @property
    def item_count(self) -> Any:
        """Number of items, (tile, head), of this CTA."""
        shape = self.shape
        items = self.tile_count * shape.heads
        return (items - self.worker + shape.workers - 1) // shape.workers
