"""Users' keys and values in pages of one pool: a history takes the pages that its length needs."""

from __future__ import annotations

import bisect
import collections
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.batches import BadRequestError, Form, Tree
from ikbo_jax.serving.packing import fill

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

    A history grows by `append`, which writes to the end of the user's last page; a page belongs to
    one user. Where no page is free, the least recently used history is dropped, but for those of
    the users at hand. `ikbo_jax.attention` reads `arrays` by the tables of `table`. The methods
    belong to one thread.

    Args:
      rows: one position of a history, a tree of `jax.ShapeDtypeStruct`, such as key and value
        [K, H].
      max_bytes: bytes of all pages.
      page: positions of a page.
      most: pages of one user: the width of `table`.
      appended: numbers of rows that programs are compiled for, ascending; an append is padded.
        Empty if `append` is never called.

    Attributes:
      arrays: a tree like `rows` of arrays [pages, page, ...]. `append` donates them.
      leaves: the leaves of this tree, which a program that writes pages itself replaces.

    Raises:
      ValueError: if a size is below 1, or one user's longest history takes more than `max_bytes`.
    """

    def __init__(
        self,
        rows: Tree,
        max_bytes: int,
        *,
        page: int = 128,
        most: int = 32,
        appended: Sequence[int] = (16, 256, 4096),
    ) -> None:
        for name, size in (("page", page), ("most", most), *(("appended", n) for n in appended)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected at least 1")
        self._form = Form(rows, "rows")
        leaves = self._form.leaves
        page_bytes = page * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        self.page, self.most, self.pages = page, most, max_bytes // page_bytes
        if self.pages < most:
            raise ValueError(
                f"the pool has {max_bytes} bytes but the {most} pages of one user take "
                f"{most * page_bytes}"
            )
        self._appended = tuple(appended)
        self._hits = self._misses = self._evictions = 0
        self.renew()
        self._programs = {size: self._compiled(size) for size in self._appended}

    @property
    def arrays(self) -> Tree:
        """A tree like `rows` of arrays [pages, page, ...]."""
        return jax.tree.unflatten(self._form.structure, self.leaves)

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
        empty = [
            np.zeros((self.pages, self.page, *leaf.shape), leaf.dtype) for leaf in self._form.leaves
        ]
        self.leaves: list[jax.Array] = [jax.device_put(pages) for pages in empty]
        self.clear()

    def lengths(self, keys: Sequence[Hashable]) -> list[int]:
        """Returns the number of positions of every user; 0 if the history is not there.

        Counts hits and misses. A caller computes the rows from this position on, and appends them.
        """
        found = [self._histories[key].length if key in self._histories else 0 for key in keys]
        hits = sum(key in self._histories for key in keys)
        self._hits, self._misses = self._hits + hits, self._misses + len(keys) - hits
        return found

    def append(self, keys: Sequence[Hashable], counts: Sequence[int], rows: Tree) -> None:
        """Appends rows to the histories of different users, all or nothing.

        Args:
          keys: the users; those whose history is not there begin one.
          counts: number of rows of every user.
          rows: a tree of arrays [n, ...], the rows in the order of the users.

        Raises:
          BadRequestError: if the rows do not fit, a user occurs twice, a count is negative, or a
            history would need more than `most` pages.
          ValueError: if the pages of these users are more than the pool has.
        """
        columns = self._form.leaves_of(rows, stacked=True)
        found = len(columns[0]) if columns else sum(counts)
        if sum(counts) != found:
            raise BadRequestError(f"there are {found} rows, but the counts are {list(counts)}")
        self.reserve(keys, counts)
        at, offset = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        for key, count in zip(keys, counts, strict=True):
            pages, end = self._histories[key]
            position = np.arange(end - count, end)
            at.append(np.asarray(pages, np.int32)[position // self.page])
            offset.append((position % self.page).astype(np.int32))
        self._write(np.concatenate(at), np.concatenate(offset), columns)

    def reserve(self, keys: Sequence[Hashable], counts: Sequence[int]) -> None:
        """Makes the histories of different users longer, all or nothing; writes no rows.

        A program that reads `table` writes them, and replaces `leaves`. The arguments and errors
        are those of `append`.
        """
        self._check(keys, counts)
        self._make_room(keys, counts)
        for key, count in zip(keys, counts, strict=True):
            pages, length = self._histories.pop(key, History([], 0))
            end = length + count
            pages = pages + [self._free.pop() for _ in range(self._pages(end) - len(pages))]
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

    def _pages(self, length: int) -> int:
        return -(-length // self.page)

    def _check(self, keys: Sequence[Hashable], counts: Sequence[int]) -> None:
        if not len(keys) == len(counts) == len(set(keys)):
            raise BadRequestError(
                f"there are {len(keys)} users, of which {len(set(keys))} differ, and "
                f"{len(counts)} counts; expected equal numbers"
            )
        if min(counts, default=0) < 0:
            raise BadRequestError(f"a count is negative: the counts are {list(counts)}")
        for key, count in zip(keys, counts, strict=True):
            before = self._histories[key].length if key in self._histories else 0
            if self._pages(before + count) > self.most:
                raise BadRequestError(
                    f"user {key!r:.80} would have {before + count} positions, at most "
                    f"{self.most * self.page} are possible"
                )

    def _make_room(self, keys: Sequence[Hashable], counts: Sequence[int]) -> None:
        """Drops histories of other users, the least recently used first."""
        mine = set(keys)
        held = {key: self._histories[key] for key in keys if key in self._histories}
        wanted = 0
        for key, count in zip(keys, counts, strict=True):
            pages, length = held.get(key, History([], 0))
            wanted += self._pages(length + count) - len(pages)
        total = wanted + sum(len(pages) for pages, _ in held.values())
        if total > self.pages:
            raise ValueError(f"the users need {total} pages but the pool has {self.pages}")
        if len(self._free) >= wanted:
            return
        for key in [key for key in self._histories if key not in mine]:
            if len(self._free) < wanted:
                self._free += self._histories.pop(key).pages
                self._evictions += 1

    def _write(self, at: Index, offset: Index, columns: list[Any]) -> None:
        sizes = self._appended
        for start in range(0, len(at), sizes[-1]):
            rows = slice(start, start + sizes[-1])
            filled = len(at[rows])
            size = sizes[bisect.bisect_left(sizes, filled)]
            # Padding has different places past the last page.
            places = np.full((2, size), self.pages, np.int32)
            places[1] = np.arange(size)
            places[0, :filled], places[1, :filled] = at[rows], offset[rows]
            padded = []
            for leaf, column in zip(self._form.leaves, columns, strict=True):
                padded.append(np.empty((size, *leaf.shape), leaf.dtype))
                fill(padded[-1], np.asarray(column[rows]))
            self.leaves = self._programs[size](self.leaves, *places, padded)

    def _compiled(self, size: int) -> Any:
        """Compiles the program that writes so many rows in place."""

        def write(pages: list[Any], at: Any, offset: Any, rows: list[Any]) -> list[Any]:
            return [
                x.at[at, offset].set(row, mode="drop", unique_indices=True)
                for x, row in zip(pages, rows, strict=True)
            ]

        index = jax.ShapeDtypeStruct((size,), jnp.int32)
        rows = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in self._form.leaves]
        lower = functools.partial(jax.jit(write, donate_argnums=0).lower, self.leaves)
        return lower(index, index, rows).compile()
