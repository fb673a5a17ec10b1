"""Sizes and descriptors that the attention backward kernel's warps share."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.row_order import RowOrder
from ikbo_jax.pallas.worklist.numbering import Sizes
from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    MAX_BOTH_SUMS,
    has_halves,
    most_blocks,
)
from ikbo_jax.problems.hopper import BLOCK_K

#: Words of an item's descriptor in shared memory: number of query blocks (negative: no more items),
#: number of query rows, part of a user's rows, key head, number of the tile of keys, keys of the
#: user from the tile's first on, first row in `d_query`.
BLOCKS, ROWS, PART, HEAD, TILE, KEYS, FIRST_TARGET = range(7)
#: Words of a part of d_query: number of the tile of keys (negative: no more parts),
#: plane of `d_query`, first row in it.
PART_TILE, PART_PLANE, PART_ROW = range(3)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch, which computes gradients of `kv_len` keys of every user.

    They are the keys from `first_key` on, a multiple of a tile's keys.
    """

    sizes: Sizes
    kv_len: int
    kv_heads: int
    head_dim: int
    num_sms: int
    scale: float
    logit_cap: float | None = None
    first_key: int = 0

    @property
    def keys(self) -> tuple[int, int, int, int]:
        """[U, keys, K, H], the shape of gradients of keys and values."""
        return self.sizes.users, self.kv_len, self.kv_heads, self.head_dim

    @property
    def kv_tiles(self) -> int:
        return pl.cdiv(self.kv_len, BLOCK_KV)

    @property
    def items(self) -> int:
        return self.sizes.users * self.sizes.splits * self.kv_heads * self.kv_tiles

    @property
    def workers(self) -> int:
        """CTAs of a launch that takes the items by a counter."""
        return 1 if mosaic.is_interpreted() else min(self.num_sms, self.items)

    @property
    def query_workers(self) -> int:
        """CTAs of a launch that computes d_query alone, which have fixed shares of the tiles."""
        return min(self.num_sms, self.sizes.most_tiles * self.kv_heads)

    @property
    def blocks(self) -> int:
        """The largest number of query blocks of a key head."""
        sizes = self.sizes
        return most_blocks(sizes.batch, sizes.users, sizes.per_candidate, sizes.block_q)

    @property
    def targets(self) -> int:
        """Rows of a plane of `Outputs.d_query`."""
        return self.blocks * self.sizes.block_q

    @property
    def d_query(self) -> tuple[int, int, int]:
        """[B * T, N, H], the shape of d_query where a launch computes it alone."""
        sizes = self.sizes
        return sizes.batch * sizes.q_len, self.kv_heads * sizes.group, self.head_dim

    def row_order(self, order: Any) -> RowOrder | None:
        """Where rows are in d_query; `order` [B] int32 in device memory, or None if sorted."""
        if order is None and self.sizes.group == 1:
            return None
        return RowOrder(order, self.sizes.q_len, self.sizes.group)

    @property
    def has_key(self) -> bool:
        """Whether the first launch computes d_key, too, beside d_value."""
        return self.head_dim <= MAX_BOTH_SUMS

    @property
    def column_blocks(self) -> int:
        """Blocks of 64 columns that hold the head width."""
        return pl.cdiv(self.head_dim, BLOCK_K)


class Operands(NamedTuple):
    """Device memory."""

    query: Any  # [rows, K, H], a user's rows side by side
    d_out: Any  # [rows, K, H]
    statistics: Any  # [K, 2, rows of `d_query` + 128] f32: lse * log2(e), and delta
    key: Any  # [U, S, K, H]
    value: Any  # [U, S, K, H]
    users: Any  # [U * splits, USER_WORDS] int32


class Outputs(NamedTuple):
    """Device memory that the launch fills."""

    d_query: Any  # [tiles of keys * K, blocks * block_q, H] f32, rows of no query arbitrary;
    # None if a second launch computes d_query
    # Queries by a consumer's 64 keys, [K * tiles of keys * 2, blocks * block_q, 64] of 16 bits;
    # None unless another launch multiplies them. Rows of no query, and keys of tiles past a user's
    # length, are arbitrary.
    d_scores: Any
    d_key: Any  # [U, keys, K, H] of 16 bits, or [U * splits * keys, K, H] f32; None if not computed
    d_value: Any  # likewise


@dataclasses.dataclass(frozen=True)
class BackwardContext(WarpgroupContext):
    """The context of the backward kernel's warps; a *step* numbers the CTA's query blocks.

    The counter is of tickets, unless each CTA has one item.
    """

    @property
    def has_halves(self) -> bool:
        return has_halves(self.shape.head_dim)

    def query_slot(self, step: Any, operand: Any) -> Any:
        """The number in the ring of blocks of queries (0) or d_out (1) of a step."""
        return 2 * step + operand if self.has_halves else step

    def half_statistics(self, step: Any, operand: Any) -> Any:
        """lse (0) or delta (1) of a step, where `has_halves`."""
        slot = self.shared.queries.slot(self.query_slot(step, operand))
        return self.shared.statistics.at[slot, 0, pl.ds(0, self.config.block_q)]

    @property
    def sums(self) -> tuple[Any, ...]:
        """Where the launch stores its sums, in their order: gradients that are not None."""
        return tuple(x for x in (self.outputs.d_key, self.outputs.d_value) if x is not None)


def send_items(ctx: WarpgroupContext, items: int, send: Callable[..., Any]) -> Any:
    """Sends the CTA's items by send(item, number, step), which returns a step; counts them."""

    def one_item(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        item, number, step = carry
        step = send(item, number, step)
        return item + 1, ctx.take(item + 1, items), step

    zero = jnp.int32(0)
    start = (zero, ctx.take(zero, items), zero)
    return lax.while_loop(lambda carry: carry[1] < items, one_item, start)[0]


def receive_items(ctx: WarpgroupContext, compute: Callable[..., None]) -> Any:
    """Calls `compute(item, blocks, step)` for each item until the end; returns their number."""

    def receive(item: Any) -> Any:
        ctx.shared.items.await_ready(item)
        return ctx.shared.items.word(item, BLOCKS)

    def one_item(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        item, blocks, step = carry
        compute(item, blocks, step)
        return item + 1, receive(item + 1), step + blocks

    zero = jnp.int32(0)
    start = (zero, receive(zero), zero)
    return lax.while_loop(lambda carry: carry[1] >= 0, one_item, start)[0]
