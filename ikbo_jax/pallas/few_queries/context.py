"""Sizes, memory and descriptors that the warpgroups of the kernel for few queries share."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations.cap import Cap
from ikbo_jax.pallas.flash.context import AttentionShape
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.rings import Ring
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.few_queries import MAX_COLUMNS, UserTable
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_M, OwnStages, column_blocks

#: How the consumers of a CTA share an item: one consumer computes it; each takes every other block
#: of keys, half of the rows, or two blocks of columns of the values.
ALONE, BY_KEYS, BY_ROWS, BY_COLUMNS = range(4)
#: Most items of a period of `firsts_before`.
PERIOD = 1024


def firsts_before(position: Any, firsts: int, extra: int) -> Any:
    """Counts the items of users' first slots before a position in the order of all items.

    Periods mix the `firsts` items of first slots and the `extra` others evenly, in 32 bits.
    """
    periods = -(-(firsts + extra) // PERIOD)
    of_period, further = firsts // periods, extra // periods
    early = firsts % periods
    later = jnp.maximum(position - early, 0)
    number, rest = lax.div(later, of_period + further), lax.rem(later, of_period + further)
    found = number * of_period + rest - lax.div(rest * further, of_period + further)
    return jnp.minimum(jnp.minimum(position, early) + found, firsts)


@dataclasses.dataclass(frozen=True)
class Shape(AttentionShape):
    """Static description of a launch. A *row* is a candidate's query of all heads.

    Attributes:
      group: query heads of one key head whose queries share a tile.
      head_rows: rows of a tile of 64 that belong to one query head.
      slots: row slots, see `rows`; if CTAs list candidates, slot i has rows of user i % U.
      bundle: neighbouring items, of one slot and split, that a CTA takes at once, so that rows are
        found or listed once: 1, or groups of query heads.
      listed: most candidates of an item, if CTAs list them because the index is not sorted; else 0.
      table: the table that CTAs make of a sorted index; None if they search it, or list candidates.
      page: positions of a page, a multiple of a block's keys; 0: a user's keys are in one array.
      own: the stages that have an item's own tokens; None: there are no own tokens.
    """

    group: int
    head_rows: int
    item_rows: int
    slots: int
    splits: int
    bundle: int
    log2_scale: float
    workers: int
    listed: int = 0
    alternates: bool = False
    prefetches: bool = False
    table: UserTable | None = None
    cap: Cap | None = None
    page: int = 0
    own: OwnStages | None = None

    @property
    def groups(self) -> int:
        """Number of groups of query heads."""
        return self.q_heads // self.group

    @property
    def packs_slots(self) -> bool:
        """Whether further slots without rows come last: see `user_table.packed_slot`."""
        return self.table is not None and self.table.packs and not self.alternates

    @property
    def bundles(self) -> int:
        """Number of bundles of all CTAs."""
        return self.slots * self.splits * self.groups // self.bundle


class Operands(NamedTuple):
    """Device memory; operands that a launch does not use are None."""

    query: Any  # [B * T, N, H]
    key: Any  # [U, S, K, H]
    value: Any  # [U, S, K, H]
    cand_to_user: Any  # [B] int32; None with one user
    lengths: Any  # [U] int32
    targets: Any  # [B] int32, the candidates of the results; None: as the queries
    ranges: Any = None  # [2 * B] int32: begin and end of the keys, by candidate of the results
    self_key: Any = None  # [B, K, H], of own tokens, in the order of the queries
    self_value: Any = None  # likewise
    # [U * most] int32, each user's pages; key and value are then [pages, page, K, H].
    pages: Any = None


class Outputs(NamedTuple):
    """Device memory; with splits, rows are (split, row), and `out` is not normalised."""

    out: Any  # [splits * B * T, N, H]
    lse: Any  # [B * T, N] f32
    maximum: Any  # [splits * B * T, N] f32, raw scores
    sums: Any  # [splits * B * T, N] f32


class Item(NamedTuple):
    """The descriptor of an item, as the producer writes it."""

    blocks: Any  # blocks of keys, at least 0; negative: no item follows
    keys: Any  # number of keys from the first block on
    head: Any  # first query head of the group
    target: Any  # first row in the outputs
    rows: Any
    sharing: Any  # ALONE, BY_KEYS, BY_ROWS or BY_COLUMNS
    next_user: Any = None  # user whose candidates are listed before the next item; negative: none
    next_rank: Any = None  # rank among the next user's candidates of the first one listed then
    # With ranges: the first block's first key; every row sees blocks [whole_from, whole_to) whole.
    first_key: Any = None
    whole_from: Any = None
    whole_to: Any = None


class Place(NamedTuple):
    """Place of an item among slots, splits and heads."""

    slot: Any
    split: Any
    head: Any  # first query head
    kv_head: Any


class Part(NamedTuple):
    """A consumer's part of an item."""

    begin: Any  # its first block
    stride: Any  # from one of its blocks to the next
    count: Any  # number of its blocks
    tile: Any  # its tile of queries
    target: Any  # first row in the outputs; if candidates are listed, the split's first row
    rows: Any
    offset: Any  # its first row in the item
    gives: Any  # whether its results go to consumer 0
    takes: Any  # whether it adds consumer 1's results to its own
    stores: Any
    turns: Any  # number of its blocks, from the first on, whose products wait for a turn


class Work(NamedTuple):
    """An item, this consumer's part of it, and where its blocks are."""

    item: Item
    part: Part
    index: Any  # of the item
    first_step: Any


@dataclasses.dataclass(frozen=True)
class Context(WarpgroupContext):
    """The context of a warpgroup; a *step* numbers the blocks of keys that the CTA loads."""

    def receive(self, index: Any) -> Item:
        """Waits for the descriptor of item `index`."""
        items = self.shared.items
        items.await_ready(index)
        slot = items.slot(index)
        names: tuple[str, ...] = Item._fields
        if not self.has_ranges:
            names = names[: names.index("first_key" if self.shape.listed else "next_user")]
        return Item(*(items.words[slot, i] for i in range(len(names))))

    def place(self, i: Any, member: Any = 0) -> Place:
        """Returns the place of item `member` of the CTA's bundle `i`."""
        shape = self.shape
        number, _ = self._bundle(i)
        groups = shape.groups // shape.bundle
        group, rest = lax.rem(number, groups) * shape.bundle + member, lax.div(number, groups)
        split, slot = lax.rem(rest, shape.splits), lax.div(rest, shape.splits)
        head = group * shape.group
        return Place(slot, split, head, lax.div(head, shape.q_heads // shape.kv_heads))

    def _bundle(self, i: Any) -> tuple[Any, Any]:
        """Returns the bundle that the CTA takes in round `i`, and the CTA's place in the round.

        If row slots alternate, a round has bundles of first slots, then of further slots, and the
        next round's first slots go to the next CTAs.
        """
        shape = self.shape
        if not shape.alternates:
            return self.worker + i * shape.workers, self.worker
        firsts = shape.bundles // shape.slots * shape.users
        extra = shape.bundles - firsts
        begin = i * shape.workers
        before = firsts_before(begin, firsts, extra)
        end = jnp.minimum(begin + shape.workers, shape.bundles)
        number = firsts_before(end, firsts, extra) - before
        rank = lax.rem(self.worker + shape.workers - lax.rem(before, shape.workers), shape.workers)
        other = firsts + begin - before
        return jnp.where(rank < number, before + rank, other + rank - number), rank

    def count(self) -> Any:
        """Returns the number of the CTA's bundles."""
        full, rest = divmod(self.shape.bundles, self.shape.workers)
        _, rank = self._bundle(jnp.int32(full))
        return full + (rank < rest).astype(jnp.int32)

    def listed_place(self, slot: Any) -> tuple[Any, Any]:
        """Returns a slot's user and the rank of its first candidate, if CTAs list candidates."""
        users = self.shape.users
        return lax.rem(slot, users), lax.div(slot, users) * self.shape.listed

    def part(self, item: Item, index: Any) -> Part:
        """Returns this consumer's part of an item."""
        consumer, head_rows = self.consumer, self.shape.head_rows
        is_alone, is_by_keys = item.sharing == ALONE, item.sharing == BY_KEYS
        alone = lax.rem(index, 2)
        # An item without rows may have blocks, which were loaded before that was known.
        computes = (item.rows > 0) & (~is_alone | (consumer == alone))
        tile = jnp.where(item.sharing == BY_ROWS, consumer, 0)
        offset = tile * head_rows
        begin = jnp.where(is_by_keys, consumer, 0)
        stride = jnp.where(is_by_keys, 2, 1)
        alternate = lax.div(item.blocks - consumer + 1, 2)
        count = jnp.where(computes, jnp.where(is_by_keys, alternate, item.blocks), 0)
        stores = computes & ~(is_by_keys & (consumer == 1))
        return Part(
            begin,
            stride,
            count,
            tile,
            item.target if self.shape.listed else item.target + offset,
            jnp.minimum(item.rows - offset, head_rows),
            offset,
            is_by_keys & (consumer == 1),
            is_by_keys & (consumer == 0),
            stores,
            jnp.where(is_alone, 0, jnp.where(is_by_keys, lax.div(item.blocks, 2), item.blocks)),
        )

    def visible(self, item: Item, block: Any) -> Visible:
        """Describes the item's keys in a block."""
        return Visible.in_block(item.keys, block, self.config.block_kv)

    def value_step(self, index: Any, step: Any) -> Any:
        """Returns the step among values of item `index`'s block `step`, behind own tokens."""
        return step + (index + 1) * self.own_stages if self.own_stages else step

    def own_step(self, index: Any, first_step: Any) -> Any:
        """Returns the step of own tokens in their ring, of item `index` from `first_step` on."""
        before = index * self.shape.own.number
        return first_step + before if self.own_stages else before

    @property
    def own_ring(self) -> Ring:
        """The ring whose stages have own tokens."""
        return self.shared.own or self.shared.value

    @property
    def own_stages(self) -> int:
        """Number of stages of values that have an item's own tokens."""
        return self.shape.own.number if self.shape.own and self.shared.own is None else 0

    @property
    def columns(self) -> int:
        """Number of columns of the values that a consumer multiplies."""
        return MAX_COLUMNS if self.shares_columns else self.shape.head_dim

    @property
    def shares_columns(self) -> bool:
        return self.config.shares_columns(self.shape.head_dim)

    def columns_of(self, values: Any) -> Any:
        """Returns the blocks of 64 columns of values that this consumer multiplies."""
        if not self.shares_columns:
            return values
        first = self.consumer * (column_blocks(self.shape.head_dim) - MAX_COLUMNS // BLOCK_K)
        return values.at[pl.ds(first, MAX_COLUMNS // BLOCK_K)]

    def queries(self, work: Work) -> Any:
        """Returns the tile of queries of a consumer's part."""
        query = self.shared.query
        return query.tiles[0].at[query.slot(work.index), work.part.tile if self.tiles > 1 else 0]

    @property
    def has_ranges(self) -> bool:
        """Whether every candidate has its own range of keys."""
        return self.operands.ranges is not None

    @property
    def ends_in_block(self) -> bool:
        """Whether an item's keys may end within a block, before those of a user do."""
        return self.operands.lengths is not None or self.has_ranges

    @property
    def block_parts(self) -> int:
        """Number of parts in which a block of keys may be loaded; its barrier expects all parts."""
        has_parts = self.ends_in_block or self.own_stages > 0
        return self.config.block_parts if has_parts else 1

    @property
    def tiles(self) -> int:
        """Number of an item's tiles of 64 rows."""
        return self.config.tile_rows // WGMMA_M

    @property
    def split_blocks(self) -> int:
        """Number of blocks of keys of one split."""
        return pl.cdiv(pl.cdiv(self.shape.kv_len, self.config.block_kv), self.shape.splits)
