"""Formats of lists of tiles and of offsets, for the launches, XLA and the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ikbo_jax.reference import gdpa, hstu

#: Words of a tile in `TileList.words`: first row in the array that is read, first row in the array
#: that is written, number of rows; first row and number of its keys.
SOURCE, TARGET, ROWS, KV_START, KV_LENGTH = range(5)
TILE_WORDS = 5
#: Further words of a tile of masked queries. No row of the tile sees the `SKIPPED` keys before its
#: block `SKIP_FROM`, so that block begins so many keys later. `FIRST_KEY` and `POSITION` are the
#: first key and the position of the first row, counted from the sequence's first key. Then come
#: the sequence's numbers of keys, contextual tokens and targets, and four words for each consumer,
#: which `keys_of_tile` computes. Where some tiles alone are long (`has_long_tiles`), a last
#: word for each consumer counts the blocks up to the last one that its rows see.
SKIP_FROM, SKIPPED, FIRST_KEY, POSITION, LENGTH, CONTEXTUAL, TARGETS, CUTS = range(8)
MASK_WORDS, SEEN_WORDS = 15, 2
#: Such a tile comes before all groups if it has more keys than this: otherwise, those of the last
#: groups would end long after all other tiles.
EARLY_KEYS = 2048
#: Words of a tile in `Work.tiles`: first row that is read, first row that is written, number of
#: rows, begin and end of its ranges, blocks of its ranges, first row of its statistics, padding.
WORK_WORDS = 8
#: Number of the word with the first row of a tile's statistics.
STATISTICS_ROW = 6
#: Words of a range: first row of the first streamed operand, first row of the second, number of
#: rows, and first row of its statistics.
RANGE_WORDS = 4


class Arrays(NamedTuple):
    """Device memory: the arrays of `Offsets`."""

    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    q_to_kv: Any
    num_targets: Any = None
    contextual: Any = None


class Offsets(NamedTuple):
    """Sequences of queries, and the sequences of keys that they attend to.

    Attributes:
      cu_seqlens_q: [batch + 1] int32; None: all sequences have the same `q_rows` queries, and the
        sequences' results follow one another.
      cu_seqlens_kv: [batch_kv + 1] int32.
      q_to_kv: [batch] int32, clamped; None: query sequence b attends to key-value sequence b.
      max_seqlen_q: rows beyond it belong to no sequence; keys beyond `max_seqlen_kv` are ignored.
      num_targets: [batch] int32, targets of sequences of queries; None: there are none.
      contextual: [batch] int32, contextual tokens; None: the rule has their number.
      rule: which keys a row sees; None: all.
    """

    cu_seqlens_q: jax.Array | None
    cu_seqlens_kv: jax.Array
    q_to_kv: jax.Array | None
    q_rows: int
    kv_rows: int
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    num_targets: jax.Array | None = None
    contextual: jax.Array | None = None
    rule: hstu.Rule | None = None

    @classmethod
    def of(cls, arrays: gdpa.Arrays, settings: gdpa.Settings) -> Offsets:
        """Takes the offsets and the sizes of a call's arrays."""
        rows = arrays.query.shape[0], arrays.key.shape[0]
        bounds = settings.max_seqlen_q, settings.max_seqlen_kv
        masked: Any = arrays.num_targets, arrays.contextual, settings.rule
        return cls(*arrays[3:6], *rows, *bounds, *masked)

    @property
    def arrays(self) -> Arrays:
        return Arrays(*self[:3], self.num_targets, self.contextual)

    @property
    def sizes(self) -> tuple[int, int, int | None, int | None]:
        return self[3:7]

    @property
    def is_broadcast(self) -> bool:
        """Whether all sequences have the same queries."""
        return self.cu_seqlens_q is None

    @property
    def sequences(self) -> int:
        """Number of sequences of queries."""
        return self.kv_sequences if self.q_to_kv is None else self.q_to_kv.shape[0]

    @property
    def kv_sequences(self) -> int:
        return self.cu_seqlens_kv.shape[0] - 1

    @property
    def result_rows(self) -> int:
        return self.q_rows * self.sequences if self.is_broadcast else self.q_rows


class WorkSettings(NamedTuple):
    """How the two backward kernels divide their work.

    Attributes:
      query_block: rows of a block of keys, in the kernel for queries.
      key_block: rows of a block of queries, in the kernel for keys.
      parts: copies of the keys that the kernel for keys takes; every n-th sequence of queries
        belongs to part n. 1 without `q_to_kv`.
    """

    query_block: int
    key_block: int
    group: int
    has_statistics: bool
    parts: int = 1


def has_long_tiles(rule: hstu.Rule | None) -> bool:
    """Whether tiles of contextual tokens see a history, and others little more than a window."""
    return rule is not None and rule.window is not None and rule.contextual != 0


def mask_words(rule: hstu.Rule) -> int:
    """Counts the further words of a tile of masked queries."""
    return MASK_WORDS + SEEN_WORDS * has_long_tiles(rule)


def early_keys(rule: hstu.Rule) -> int | None:
    """Returns the number of keys beyond which tiles are early; None: it has no effect."""
    return EARLY_KEYS if has_long_tiles(rule) else None


class TileList(NamedTuple):
    """Tiles in a kernel's order, [most tiles, TILE_WORDS]; counts of tiles with keys, and of all
    tiles.
    """

    words: jax.Array
    counts: jax.Array


class Work(NamedTuple):
    """Stationary tiles of one backward kernel, and the ranges of streamed rows for each.

    Attributes:
      tiles: [most tiles, WORK_WORDS] int32.
      counts: [2] int32: number of tiles with blocks, which come first; number of all tiles.
      ranges: [streamed sequences, RANGE_WORDS] int32.
    """

    tiles: jax.Array
    counts: jax.Array
    ranges: jax.Array


class Works(NamedTuple):
    """The work of both backward kernels: a tile of keys takes all sequences that share it.

    `blocks` [blocks, 4] int32, of each block of a softmax's statistics: the first query in the
    result, the number of queries, the first query in the sequence, the sequence; None without a
    softmax.
    """

    queries: Work
    keys: Work
    blocks: jax.Array | None
