"""Sizes, memory and segments of keys, in the launch that lists the backward kernels' tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.per_thread import same
from ikbo_jax.pallas.worklist.jagged_segments import Segment, SegmentContext, Shape, rows


@dataclasses.dataclass(frozen=True)
class KeyShape(Shape):
    """The shape of the list of keys: what `Shape` calls queries are keys here, and the reverse.

    Attributes:
      group: query heads of one key head.
      streamed_rows: queries of each sequence if they are broadcast, or None.
      most_shared: blocks of queries of any key-value sequence if sequences share keys, or None.
      parts: copies of the keys, where every n-th sequence of queries belongs to part n. `sequences`
        are those of one copy, and `q_rows` the rows of all.
    """

    group: int = 1
    streamed_rows: int | None = None
    most_shared: int | None = None
    parts: int = 1

    @property
    def segments(self) -> int:
        return self.parts * (self.sequences + 2)

    @property
    def most_blocks(self) -> int:
        if self.most_shared is not None:
            return self.most_shared
        if self.streamed_rows is not None:
            return pl.cdiv(self.streamed_rows, self.unit)
        return super().most_blocks


class Launch(NamedTuple):
    """Static description of the launch."""

    queries: Shape
    keys: KeyShape
    has_statistics: bool
    query_workers: int  # CTAs that list queries

    @property
    def first(self) -> int:
        """Number of the first sequence's segment."""
        return 0 if self.queries.is_broadcast else 1

    @property
    def end(self) -> int:
        return self.first + self.queries.sequences


class Operands(NamedTuple):
    """Device memory."""

    cu_seqlens_q: Any  # [batch + 1] int32, or None
    cu_seqlens_kv: Any  # [batch_kv + 1] int32
    q_to_kv: Any  # [batch] int32, or None


class Outputs(NamedTuple):
    """Device memory that the launch fills: `Work` of both kernels.

    A kernel's work has the ranges of the other's sequences, which it streams.
    """

    query_tiles: Any
    query_counts: Any
    query_ranges: Any  # of sequences of queries
    key_tiles: Any
    key_counts: Any
    key_ranges: Any
    blocks: Any  # [blocks, BLOCK_WORDS] of statistics, or None


class Shared(NamedTuple):
    """Shared memory, int32; see `tile_list_kernel.Shared` for the fields of the same names."""

    parts: Any
    q_offsets: Any
    kv_offsets: Any
    kv_numbers: Any
    bins: Any
    own_bins: Any
    own_tiles: Any
    own_before: Any
    own_firsts: Any
    own_ends: Any
    rest_ends: Any
    begins: Any  # [keys + 1]: ranges of lower numbers of keys; None without an index
    key_blocks: Any  # [keys]: blocks of queries; likewise. Keys of all copies
    statistics: (
        Any  # [segments of queries]: blocks of statistics before; None without, or broadcast
    )


class WorkContext(SegmentContext):
    """The context of a warpgroup; `config` is the `Launch`, `shape` that of the CTA's list."""


class KeyContext(WorkContext):
    """The context of a warpgroup that lists tiles of keys."""

    def segment(self, index: jax.Array) -> Segment:
        """Segments of keys; `kv_length` counts queries, rounded to whole blocks if shared."""
        shape, shared, read = self.shape, self.shared, self.threads.read
        part, local = same(0), index
        if shape.parts > 1:
            each = same(shape.sequences + 2)
            part, local = lax.div(index, each), lax.rem(index, each)
        found = rows(self, shared.kv_offsets, local)
        exists = index < shape.segments
        is_sequence = exists & found.is_sequence
        before = part * (shape.q_rows // shape.parts)
        number = jnp.clip(local - 1, 0, shape.sequences - 1)
        if shape.most_shared is not None:
            number = number + jnp.minimum(part, shape.parts - 1) * shape.sequences
            streamed = read(shared.key_blocks, number) * shape.unit
        elif shape.streamed_rows is not None:
            streamed = same(shape.streamed_rows)
        else:
            streamed = read(shared.q_offsets, number + 2) - read(shared.q_offsets, number + 1)
            if shape.max_seqlen_kv is not None:
                streamed = jnp.minimum(streamed, shape.max_seqlen_kv)
        return Segment(
            found.start + before,
            jnp.where(exists, found.length, 0),
            jnp.where(exists, found.rest, 0),
            found.rest_start + before,
            same(0),
            jnp.where(is_sequence, streamed, 0),
            jnp.where(is_sequence, number, -1),
        )
