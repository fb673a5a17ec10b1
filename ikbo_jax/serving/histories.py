"""A scorer of users whose histories grow: only the rows of new events are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.serving.base import BatchScorer, seconds_of
from ikbo_jax.serving.batches import (
    BadRequestError,
    Batch,
    Buckets,
    Checked,
    Form,
    Request,
    Tree,
    is_integer,
)
from ikbo_jax.serving.packing import Packing, fill
from ikbo_jax.serving.pages import PagePool
from ikbo_jax.serving.programs import (
    Job,
    Specs,
    check_finite,
    checked,
    checked_shapes,
    compiled,
    device_of,
    score_spec,
    scored,
    unflatten,
    with_rows,
)

#: Position of padding, past the end of every history.
PADDING = 2**30
#: A program takes more events than the longest history at hand has if this share of it is filled.
FILLED = 0.75


class History(NamedTuple):
    """Locates the histories of U users in pages; in a traced function.

    Attributes:
      pages: the tree of the pool's arrays [pages, page, ...].
      table: [U, most] int32, the pages of every user: the `page_table` of `ikbo_jax.attention`.
      lengths: [U] int32, the number of events of every history, new ones included.
      event_to_user: [E] int32, ascending, the row in `table` of every new event.
      position: [E] int32, the place of every new event in its history; larger for padding.
    """

    pages: Tree
    table: jax.Array
    lengths: jax.Array
    event_to_user: jax.Array
    position: jax.Array

    @property
    def ranges(self) -> jax.Array:
        """[E, 2] int32: a new event sees the events up to itself."""
        return jnp.stack([jnp.zeros_like(self.position), self.position + 1], axis=1)

    def write(self, pages: jax.Array, rows: jax.Array) -> jax.Array:
        """Writes the rows [E, ...] of the new events to an array of pages, in place."""
        size = pages.shape[1]
        at = self.table.at[self.event_to_user, self.position // size].get(mode="clip")
        number = jnp.arange(len(self.position), dtype=jnp.int32)
        # Padding has different places past the last page.
        is_real = self.position < self.lengths[self.event_to_user]
        at = jnp.where(is_real, at, len(pages) + number)
        places = pages.at[at, self.position % size]
        return places.set(rows, mode="drop", unique_indices=True)


class HistoryModel(Protocol):
    """Computes a `HistoryScorer`'s model by two functions that can be jitted."""

    def append(self, weights: Tree, history: History, events: Tree) -> Tree:
        """Writes the rows of new events, a tree of arrays [E, ...], and returns the pages.

        Every array of pages goes through `history.write`. An event's rows may depend on earlier
        events of its history, whose rows are in the pages, and on nothing that changes later.
        """

    def score(
        self, weights: Tree, history: History, candidates: Tree, cand_to_user: jax.Array
    ) -> jax.Array:
        """Scores the candidates, [B] or [B, ...], as `Model.score` does; no event is new."""


#: Returns events as a tree of arrays [n, ...]: of users, from the positions `starts` to `stops`.
EventsOf = Callable[[list[Any], list[int], list[int]], Tree]


class Piece(NamedTuple):
    """Locates events: positions [start, stop) of a user's history, and the row of the first."""

    user: Hashable
    start: int
    stop: int
    row: int


class HistoryScorer(BatchScorer):
    """Scores candidates of users whose histories grow; keeps rows of events in pages on the device.

    A request's `version` is the number of events that the user's history has. Where the pages have
    fewer events, the rows of the others are computed and appended. A smaller version reads the
    beginning of the history. Pages of the least recently used histories are freed. Requests have no
    `features`. All methods may be called from several threads.

    Args:
      model: two functions, see `HistoryModel`.
      weights: a tree of arrays, as for `Scorer`.
      event: an event's features, a tree of `jax.ShapeDtypeStruct`.
      row: what is kept of an event in the same form, such as keys and values [K, H].
      candidate: a candidate's features in the same form.
      events_of: takes users, and the first and the last position, exclusive, of each user's events;
        returns these events user after user, a tree of arrays [n, ...]. If it raises, it is called
        again for every user alone, so that only the requests of these users get the error.
      buckets: the sizes of programs that score; `new_users` has no effect.
      appends: numbers of events and of users of the programs that append, ascending.
      user_bytes: bytes of all pages.
      page: positions of a page.
      most: pages of the longest history.
      version: a name of the weights, in every answer.

    Attributes:
      call_seconds: as for `Scorer`.

    Raises:
      ValueError: as for `Scorer`; if the histories of the largest bucket's users may take more than
        `user_bytes`, or `append` returns other pages than it takes.
    """

    def __init__(
        self,
        model: HistoryModel,
        weights: Tree,
        event: Tree,
        row: Tree,
        candidate: Tree,
        *,
        events_of: EventsOf,
        buckets: Buckets | None = None,
        appends: Sequence[tuple[int, int]] = ((64, 16), (1024, 1)),
        user_bytes: int = 1 << 28,
        page: int = 128,
        most: int = 32,
        version: Hashable = 0,
    ) -> None:
        buckets = Buckets.checked(buckets)
        if not callable(events_of):
            raise ValueError(f"events_of is {events_of!r:.80}, expected a function")
        if not jax.tree.leaves(event):
            raise ValueError(f"event is {event!r:.80}, expected at least 1 array")
        if not appends or list(appends) != sorted(set(appends)) or min(map(min, appends)) < 1:
            raise ValueError(f"appends is {appends}, expected ascending pairs of at least 1")
        self._pool = PagePool(row, user_bytes, page=page, most=most)
        if (needed := buckets.largest[1] * most) > self._pool.pages:
            raise ValueError(
                f"the pool has {self._pool.pages} pages but the histories of a call's "
                f"{buckets.largest[1]} users may take {needed}"
            )
        self._events, self._events_of = Form(event, "events"), events_of
        shapes = checked_shapes(weights, event=event, candidate=candidate)
        self._pages = with_rows(row, self._pool.pages, page)
        found = score_spec(
            model.score, shapes, History(self._pages, *self._located(1, 0)), candidate
        )
        specs = Specs(shapes, event, candidate, row, found)
        check_finite(weights)
        self._compile(model, specs, buckets, appends)
        super().__init__(specs, weights, buckets, self._on, version)
        self._run_every_program()
        self._ready()

    def _located(self, users: int, events: int) -> list[Any]:
        """Specs of the arrays of `History` after the pages."""
        shapes = ((users, self._pool.most), (users,), (events,), (events,))
        return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def _compile(
        self,
        model: HistoryModel,
        specs: Specs,
        buckets: Buckets,
        appends: Sequence[tuple[int, int]],
    ) -> None:
        self._append_inputs = {
            (events, users): Packing(
                [*self._located(users, events), *jax.tree.leaves(with_rows(specs.user, events))]
            )
            for events, users in appends
        }
        self._score_inputs = {
            (cands, users): Packing(
                [
                    *self._located(users, 0)[:2],
                    jax.ShapeDtypeStruct((cands,), jnp.int32),
                    *jax.tree.leaves(with_rows(specs.candidate, cands)),
                ]
            )
            for cands, users in buckets.pairs
        }
        row = specs.state

        def append(inputs: Packing, weights: Any, pool: Any, packed: Any) -> list[jax.Array]:
            arrays = inputs.unpacked(packed)
            history = History(unflatten(row, pool), *arrays[:4])
            events = unflatten(specs.user, arrays[4:])
            pages = model.append(unflatten(specs.weights, weights), history, events)
            return checked(pages, with_rows(row, self._pool.page), self._pool.pages, "append")

        def score(inputs: Packing, weights: Any, pool: Any, packed: Any) -> jax.Array:
            table, lengths, cand_to_user, *candidates = inputs.unpacked(packed)
            none = jnp.zeros(0, jnp.int32)
            history = History(unflatten(row, pool), table, lengths, none, none)
            return scored(model, specs, weights, history, candidates, cand_to_user)

        arguments = jax.tree.leaves(specs.weights), jax.tree.leaves(self._pages)
        self._append, self._score = compiled(
            Job(append, self._append_inputs, arguments, {"donate_argnums": 1}),
            Job(score, self._score_inputs, arguments, {}),
        )
        self._on = device_of([*self._append.values(), *self._score.values()])

    def _run_every_program(self) -> None:
        for sizes, inputs in self._append_inputs.items():
            packed, arrays = inputs.empty(np.zeros)
            arrays[3][...] = PADDING
            self._pool.leaves = self._append[sizes](self._weights, self._pool.leaves, packed)
        for bucket, inputs in self._score_inputs.items():
            packed, arrays = inputs.empty(np.zeros)
            # Kernels read as many keys as the longest histories have.
            arrays[1][...] = self._pool.most * self._pool.page
            arguments = self._weights, self._pool.leaves, packed
            self.call_seconds[bucket] = seconds_of(self._score[bucket], *arguments)

    def _users_counts(self) -> dict[str, int]:
        found = self._pool.metrics
        counts = {"hits": found.hits, "misses": found.misses, "evictions": found.evictions}
        return {**counts, "pages_in_use": found.pages_in_use, "pages": found.pages}

    def _forget(self) -> None:
        self._pool.clear()

    def _reset(self) -> None:
        with jax.default_device(self._device):
            self._pool.renew()

    def _checked(self, request: Request) -> Checked:
        found = super()._checked(request)
        version: Any = request.version
        most = self._pool.most * self._pool.page
        if not is_integer(version) or not 0 <= version <= most:
            raise BadRequestError(
                f"version is {version!r:.80}, expected a number of events, 0 to {most}"
            )
        return found

    def _inputs_for(self, batch: Batch) -> tuple[Any, dict[Hashable, Exception]]:
        wanted: dict[Hashable, int] = {}
        keys: list[Any] = list(batch.keys)
        for user, version in keys:
            wanted[user] = max(wanted.get(user, 0), int(version))
        known = dict(zip(wanted, self._pool.lengths(list(wanted)), strict=True))
        asked = [(user, known[user], stop) for user, stop in wanted.items() if known[user] < stop]
        failed: dict[Hashable, Exception] = {}
        found: list[tuple[Any, list[Any]]] = []
        try:
            found.append((asked, self._fetched_events(asked)))
        except Exception as error:
            # The error may be one user's: the events of every user are fetched alone.
            failed = {asked[0][0]: error}
            for one in asked if len(asked) > 1 else ():
                try:
                    found.append(([one], self._fetched_events([one])))
                    failed.pop(one[0], None)
                except Exception as error:
                    failed[one[0]] = error
        return (known, found), {key: failed[key[0]] for key in keys if key[0] in failed}

    def _fetched_events(self, asked: list[tuple[Any, int, int]]) -> list[Any]:
        """Fetches the leaves of users' events, [n, ...] each."""
        if not asked:
            return [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in self._events.leaves]
        users, starts, stops = (list(column) for column in zip(*asked, strict=True))
        leaves = self._events.leaves_of(self._events_of(users, starts, stops), stacked=True)
        if len(leaves[0]) != (expected := sum(stops) - sum(starts)):
            raise BadRequestError(f"events_of returned {len(leaves[0])} events, not {expected}")
        return leaves

    def _call(self, batch: Batch, inputs: Any) -> jax.Array:
        known, found = inputs
        columns = [np.concatenate(parts) for parts in zip(*(x for _, x in found), strict=True)]
        pieces, row = [], 0
        for user, start, stop in (one for asked, _ in found for one in asked):
            pieces.append(Piece(user, start, stop, row))
            row += stop - start
        keys: list[Any] = list(batch.keys)
        counts = dict.fromkeys((user for user, _ in keys), 0)
        counts |= {piece.user: piece.stop - piece.start for piece in pieces}
        self._pool.reserve(list(counts), list(counts.values()))
        for sizes, group in _groups(pieces, list(self._append_inputs)):
            self._append_events(sizes, group, columns)
        packed, arrays = self._score_inputs[batch.bucket].empty()
        table, _ = self._pool.table([user for user, _ in keys])
        lengths = np.asarray([version for _, version in keys], np.int32)
        index = np.repeat(batch.rows, batch.sizes)
        for array, column in zip(arrays, (table, lengths, index, *batch.columns), strict=True):
            fill(array, column)
        return self._counted(
            batch, self._score[batch.bucket](self._weights, self._pool.leaves, packed)
        )

    def _append_events(
        self, sizes: tuple[int, int], group: list[Piece], columns: list[Any]
    ) -> None:
        packed, arrays = self._append_inputs[sizes].empty()
        table, lengths = self._pool.table([piece.user for piece in group])
        spans = [piece.stop - piece.start for piece in group]
        index = np.repeat(np.arange(len(group)), spans)
        position = np.concatenate([np.arange(piece.start, piece.stop) for piece in group])
        rows = np.concatenate(
            [np.arange(span) + x.row for span, x in zip(spans, group, strict=True)]
        )
        events = [column[rows] for column in columns]
        for array, column in zip(arrays, (table, lengths, index, position, *events), strict=True):
            fill(array, column)
        arrays[3][len(position) :] = PADDING
        self._pool.leaves = self._append[sizes](self._weights, self._pool.leaves, packed)


def _groups(
    pieces: list[Piece], appends: list[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], list[Piece]]]:
    """Divides events among calls of the programs that append, each of so many events and users.

    The longest pieces come first. A piece that is longer than the largest program is cut.
    """
    most = appends[-1][0]
    cut = [
        Piece(user, at, min(at + most, stop), row + at - start)
        for user, start, stop, row in pieces
        for at in range(start, stop, most)
    ]
    cut.sort(key=lambda piece: piece.start - piece.stop)
    left = sum(piece.stop - piece.start for piece in cut)
    while cut:
        longest = cut[0].stop - cut[0].start
        fitting = [x for x in appends if x[0] >= longest]
        sizes = next((x for x in fitting[:0:-1] if FILLED * x[0] <= left and x[1] > 1), fitting[0])
        group: list[Piece] = []
        rest: list[Piece] = []
        filled = 0
        for piece in cut:
            span = piece.stop - piece.start
            fits = filled + span <= sizes[0] and len(group) < sizes[1]
            (group if fits else rest).append(piece)
            filled += span if fits else 0
        cut, left = rest, left - filled
        yield sizes, group
