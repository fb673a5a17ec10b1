"""Device memory of the forward kernels, and what their warpgroups' contexts share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention: B, T, N, K, S, U and H."""

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    kv_len: int
    users: int
    head_dim: int

    @property
    def rows(self) -> int:
        return self.batch * self.q_len


class Operands(NamedTuple):
    """Device memory; operands that a launch does not use are None.

    A launch on tiles has the keys and values of all sequences in one array, and no index. With
    `pages`, keys and values are [pages, page, K, H].
    """

    query: Any  # [B * T, N, H]; with tiles, [rows, N, H]
    key: Any  # [U, S, K, H]; with tiles, [rows, K, H]
    value: Any  # [U, S, K, H]; with tiles, [rows, K, H]
    cand_to_user: Any = None  # [B] int32
    lengths: Any = None  # [U] int32
    order: Any = None  # [B] int32
    run_ends: Any = None  # [B] int32; see `work_order.run_ends`
    cuts: Any = None  # [warpgroup tiles + 1] int32; see `work_order.cuts`
    cut_counts: Any = None  # [warpgroup tiles] int32; see `work_order.cuts`
    words: Any = None  # [most tiles, TILE_WORDS] int32, of a `lists.TileList`
    counts: Any = None  # [2] int32, of a `lists.TileList`
    targets: Any = None  # [B] int32, the candidates of the results; None: as the queries
    cu_seqlens_q: Any = None  # of `lists.Offsets`, if CTAs find their tiles
    cu_seqlens_kv: Any = None  # of `lists.Offsets`, if CTAs find their tiles
    q_to_kv: Any = None  # always None: `segments` reads it
    seen: Any = None  # [tiles, 2, 4, 64] int32, of `gdpa_masked.mask_tiles`
    self_key: Any = None  # [B, K, H], of own tokens, in work order
    self_value: Any = None  # likewise
    pages: Any = None  # [U * most] int32, each user's pages


class Outputs(NamedTuple):
    """Device memory that a launch fills."""

    out: Any  # [rows, N, H]
    lse: Any = None  # [rows, N] f32, if it is returned

    @classmethod
    def of(cls, rows: int, query: jax.Array, *, has_lse: bool) -> Outputs:
        """Declares the results for `rows` query rows; `query` is [..., N, H]."""
        heads, width = query.shape[-2:]
        lse = jax.ShapeDtypeStruct((rows, heads), jnp.float32) if has_lse else None
        return cls(jax.ShapeDtypeStruct((rows, heads, width), query.dtype), lse)


@dataclasses.dataclass(frozen=True)
class FlashContext(WarpgroupContext):
    """The context of a kernel with rings of keys and values; a *step* numbers their blocks."""

    def load_queries(self, item: Any, first_row: Callable[[int], Any], head: Any) -> None:
        """Loads 64 rows of queries for each consumer, from its first row on."""
        query, source = self.shared.query, self.operands.query
        slot = query.slot(item)
        for consumer in range(NUM_CONSUMERS):
            row = jnp.minimum(first_row(consumer), source.shape[0] - 1)
            tiles = query.tiles[1].at[slot, consumer]
            self.load(source, (pl.ds(row, WGMMA_M), head), tiles, query.ready.at[slot])

    def product(self, item: Any, step: Any, columns: int | None = None) -> jax.Array:
        """Issues the scores of item `item` and the first `columns` keys of the block at `step`."""
        query, key = self.shared.query, self.shared.key
        return mma.product(
            query.tiles[0].at[query.slot(item), self.consumer],
            key.matrix(step),
            self.shape.head_dim,
            columns=columns,
        )

    def free_read_queries(self, item: Any, is_last: Any) -> None:
        """Frees a single query slot as soon as the last scores of the item are computed."""
        if self.config.q_slots == 1:

            @pl.when(is_last)
            def _() -> None:
                self.shared.query.release(item)

    def free_stored_slot(self, item: Any) -> None:
        """Frees one of several query slots after TMA has read the output staged in it."""
        if self.config.q_slots > 1:

            @pl.when(item >= 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.shared.query.release(item)

    def release_all(self) -> None:
        """Frees all slots and stages, as a consumer before its first read."""
        for ring in (self.shared.key, self.shared.value, self.shared.query):
            ring.release_all()

    def drain(self) -> None:
        """Waits for all slots and stages, as the producer at its end."""
        for ring in (self.shared.key, self.shared.value, self.shared.query):
            ring.drain()
