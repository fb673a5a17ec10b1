"""Users' keys and values in pages of one pool: a history takes the pages that its length needs."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.batches import BadRequestError, Tree, check_size

Index = npt.NDArray[np.int32]


class History(NamedTuple):
    """Locates a user's history: its pages in their order, and its number of positions."""

    pages: list[int]
    length: int


class PageMetrics(NamedTuple):
    """Counts since the pool was made.

    Attributes:
      hits: number of users whose history was there when it was asked for.
      misses: number of users whose history was not there.
      evictions: number of histories that were dropped to make room.
      users: number of users whose history is there.
      pages_in_use: number of pages that these histories take.
      pages: number of pages of the pool.
    """

    hits: int
    misses: int
    evictions: int
    users: int
    pages_in_use: int
    pages: int

    @property
    def hit_rate(self) -> float:
        """Share of users whose history was there; 0 before the first question."""
        return self.hits / max(1, self.hits + self.misses)


class PagePool:
    """Keeps rows of users' histories, such as keys and values, in pages on the device.

    `reserve` makes histories longer, and a program writes the new rows, as `History.write` does; a
    page belongs to one user. Where no page is free, the least recently used history is dropped, but
    for those of the users at hand. `ikbo_jax.attention` reads the pages by the tables of `table`.
    The methods belong to one thread.

    Args:
      rows: one position of a history, a tree of `jax.ShapeDtypeStruct`, such as key and value
        [K, H].
      max_bytes: bytes of all pages.
      page: positions of a page.
      most: pages of one user: the width of `table`.

    Attributes:
      leaves: the leaves of a tree like `rows`, arrays [pages, page, ...]. A program to which they
        are donated replaces them.

    Raises:
      ValueError: if a size is below 1, or one user's longest history takes more than `max_bytes`.
    """

    def __init__(self, rows: Tree, max_bytes: int, *, page: int = 128, most: int = 32) -> None:
        for name, size in (("max_bytes", max_bytes), ("page", page), ("most", most)):
            check_size(name, size)
        self._rows = jax.tree.leaves(rows)
        page_bytes = page * sum(leaf.size * leaf.dtype.itemsize for leaf in self._rows)
        if not page_bytes:
            raise ValueError(f"rows are {rows!r:.80}, expected at least 1 array that is not empty")
        self.page, self.most, self.pages = page, most, max_bytes // page_bytes
        if self.pages < most:
            raise ValueError(
                f"the pool has {max_bytes} bytes but the {most} pages of one user take "
                f"{most * page_bytes}"
            )
        self._hits = self._misses = self._evictions = 0
        self.renew()

    @property
    def metrics(self) -> PageMetrics:
        """Counts since the pool was made."""
        in_use = self.pages - len(self._free)
        counts = (self._hits, self._misses, self._evictions, len(self._histories))
        return PageMetrics(*counts, in_use, self.pages)

    def clear(self) -> None:
        """Drops all histories; the counts stay."""
        # The least recently used history is the first.
        self._histories: collections.OrderedDict[Hashable, History] = collections.OrderedDict()
        self._free = list(range(self.pages))

    def renew(self) -> None:
        """Drops all histories and makes new pages, for a program that lost the donated ones."""
        # From NumPy arrays, since `jnp.zeros` would compile.
        shape = (self.pages, self.page)
        empty = [np.zeros((*shape, *leaf.shape), leaf.dtype) for leaf in self._rows]
        self.leaves: list[jax.Array] = [jax.device_put(pages) for pages in empty]
        self.clear()

    def lengths(self, keys: Sequence[Hashable]) -> list[int]:
        """Returns the number of positions of every user; 0 if the history is not there.

        Counts hits and misses. A caller computes the rows from this position on.
        """
        found = [self._histories[key].length if key in self._histories else 0 for key in keys]
        hits = sum(key in self._histories for key in keys)
        self._hits, self._misses = self._hits + hits, self._misses + len(keys) - hits
        return found

    def reserve(self, keys: Sequence[Hashable], counts: Sequence[int]) -> None:
        """Makes the histories of different users longer, all or nothing; writes no rows.

        Args:
          keys: the users; those whose history is not there begin one, unless its count is 0.
          counts: number of further rows of every user.

        Raises:
          BadRequestError: if a user occurs twice, or a history would need more than `most` pages.
          ValueError: if a count is no integer of at least 0, or the users need more pages than the
            pool has.
        """
        if not len(keys) == len(counts) == len(set(keys)):
            raise BadRequestError(
                f"there are {len(keys)} users, of which {len(set(keys))} differ, and "
                f"{len(counts)} counts; expected equal numbers"
            )
        for position, count in enumerate(counts):
            check_size(f"counts[{position}]", count, 0)
        held = [self._histories.get(key, History([], 0)) for key in keys]
        ends = [length + count for (_, length), count in zip(held, counts, strict=True)]
        for key, end in zip(keys, ends, strict=True):
            if end > self.most * self.page:
                raise BadRequestError(
                    f"user {key!r:.80} would have {end} positions, at most "
                    f"{self.most * self.page} are possible"
                )
        needed = [-(-end // self.page) for end in ends]
        if sum(needed) > self.pages:
            raise ValueError(f"the users need {sum(needed)} pages but the pool has {self.pages}")
        self._make_room(sum(needed) - sum(len(pages) for pages, _ in held), set(keys))
        for key, (pages, _), end, number in zip(keys, held, ends, needed, strict=True):
            pages = pages + [self._free.pop() for _ in range(number - len(pages))]
            self._histories.pop(key, None)
            # Nothing would ever drop a history without pages.
            if end:
                self._histories[key] = History(pages, end)

    def table(self, keys: Sequence[Hashable]) -> tuple[Index, Index]:
        """Returns page_table [n, most] and lengths [n], int32; length 0 without a history."""
        table, lengths = np.zeros((len(keys), self.most), np.int32), np.zeros(len(keys), np.int32)
        for row, key in enumerate(keys):
            if key in self._histories:
                self._histories.move_to_end(key)
                pages, lengths[row] = self._histories[key]
                table[row, : len(pages)] = pages
        return table, lengths

    def _make_room(self, wanted: int, kept: set[Hashable]) -> None:
        """Drops histories of other users, the least recently used first, for so many pages."""
        dropped: list[Hashable] = []
        missing = wanted - len(self._free)
        for key in self._histories:
            if missing <= 0:
                break
            if key not in kept:
                dropped.append(key)
                missing -= len(self._histories[key].pages)
        for key in dropped:
            self._free += self._histories.pop(key).pages
        self._evictions += len(dropped)
