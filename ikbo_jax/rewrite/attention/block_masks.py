"""The masks of one attention over a user's tokens and a candidate's own, block by block."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.attention.blocks import Part, at_users, grouped, unspread
from ikbo_jax.rewrite.attention.logit_masks import rows_of
from ikbo_jax.rewrite.attention.scores import HEAD, KEY, QUERY, Fill, Label, Scores
from ikbo_jax.rewrite.facts import masks
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules.elementwise import slice_along
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Lineage
from ikbo_jax.rewrite.values.registry import NotCovered


class BlockMasks:
    """Holds one attention with its masks; `Call` computes it."""

    sizes: tuple[int, ...]

    def __init__(
        self, ctx: Context, eqn: Any, scores: Scores, axis: int, keys: list[Part], dtype: Any
    ) -> None:
        root: Any = scores.root
        self.ctx, self.eqn, self.scores, self.root = ctx, eqn, scores, root
        self.axis, self.keys, self.dtype = axis, keys, dtype
        self.all_keys = keys
        self.heads = math.prod(root.heads)
        self.labels = root.labels
        self._lives: dict[tuple[int, int], list[Part]] = {}

    def _live(self, query: Part) -> list[Part]:
        """Returns the keys that are not hidden from all of the queries, found once."""
        at = id(self.keys), query.start
        if at not in self._lives:
            trimmed = [self._trimmed(query, key) for key in self.keys]
            self._lives[at] = [part for part in trimmed if part is not None]
        return self._lives[at]

    def _trimmed(self, query: Part, key: Part) -> Part | None:
        """Drops the first and the last keys that are hidden from all queries; None without keys."""
        hidden = np.zeros(key.stop - key.start, bool)
        for fill in self.root.fills:
            state = self._cut(fill.state, query, key)
            hidden = hidden | (state == 0).reshape(-1, state.shape[-1]).all(axis=0)
        (seen,) = np.nonzero(~hidden)
        if len(seen) in (0, len(hidden)):
            return key if len(seen) else None
        first, last = int(seen[0]), int(seen[-1]) + 1
        rows, values = (slice_along(x, first, last, 1) for x in (key.value, key.values))
        return Part(rows, key.start + first, key.start + last, values)

    def _is_kept(self, query: Part, key: Part) -> bool:
        """Whether no mask hides any of a block."""
        return all((self._cut(x.state, query, key) == 1).all() for x in self.root.fills)

    def _region(self, labels: Sequence[Label], query: Part, key: Part) -> masks.Region:
        """Says where a block lies in an array whose dimensions have these labels."""
        parts = ((KEY, 0), key), ((QUERY, self.axis - 1), query)
        return tuple([(labels.index(w), x.start, x.stop) for w, x in parts if w in labels])

    def _cut(self, x: np.ndarray, query: Part, key: Part, labels: Any = None) -> np.ndarray:
        """Returns the block of an array of NumPy: [batch, *queries, *heads, keys], or `labels`."""
        return masks.cut(x, self._region(labels or self.labels, query, key))

    def _sliced(self, x: Any, query: Part, key: Part, labels: Any = None) -> Any:
        """Returns the block of any value: [batch, *queries, *heads, keys], or `labels`."""
        for dim, start, stop in self._region(labels or self.labels, query, key):
            x = slice_along(x, start, stop, dim)
        return x

    def _keeps_keys(self, query: Part, live: list[Part]) -> bool:
        """Whether every query provably keeps a key."""
        if any(self._is_kept(query, key) for key in live):
            return True
        total: Any = False
        for key in live:
            kept: Any = True
            for fill in self.root.fills:
                kept = kept & (self._cut(fill.state, query, key) == 1)
            total = total | np.any(kept, axis=-1)
        return bool(np.all(total))

    def _rows_that_keep_keys(self, query: Part, users: Lineage) -> jax.Array:
        """Returns the rows [users, queries] that are not hidden where they are keys.

        Raises NotCovered unless each of these rows, as a query, provably keeps its own key, and the
        other rows may differ from the original's.
        """
        reason = "attention is not recognised: a query may keep no key"
        is_left = self.ctx.programs.leaves_unread and self.axis == 1 and self.root.queries
        kept, sources = self._kept_rows(query, users) if is_left else (None, frozenset())
        diagonal = np.arange(query.stop - query.start)
        for fill in self.root.fills:
            for _, state, _, source in fill.factors(self.ctx, ()):
                block = self._cut(state, query, query)
                shape = (*block.shape[:1], len(diagonal), *block.shape[2:-1], len(diagonal))
                block = np.moveaxis(np.broadcast_to(block, shape), 1, -2)
                own = (block[..., diagonal, diagonal] == 1).all()
                if not own and source not in sources:
                    raise NotCovered(reason)
        if kept is None:
            raise NotCovered(reason)
        return kept

    def _kept_rows(self, part: Part, users: Lineage) -> tuple[Any, frozenset[Any]]:
        """Returns which keys [users, keys] of a part some factors of the masks keep.

        These factors are the same for all candidates of a user and all queries. None without them.
        And returns the identities of the values that the factors are made of.
        """

        def found() -> tuple[Any, frozenset[Any]]:
            kept, sources = None, set()
            for fill in self.root.fills:
                for mask, state, _, source in fill.factors(self.ctx, ()):
                    whole = Part(None, 0, shape_of(self.root.query)[1])
                    of_part = self._of_keys(mask, self._cut(state, whole, part), whole, part, users)
                    rows = self._by_user([of_part], [part])
                    if rows is not None:
                        kept = rows if kept is None else kept & rows
                        sources.add(source)
            if kept is not None:
                kept = lineage.spread(kept, (users.users, part.stop - part.start))
            return kept, frozenset(sources)

        masked = [fill.kept for fill in self.root.fills]
        return self.ctx.scope.once(("kept rows", part.start, part.stop), (users, *masked), found)

    def _bias(self, query: Part, keys: list[Part], users: Lineage | None) -> jax.Array | None:
        """Returns the sum of the biases: [batch or 1, heads or 1, queries or 1, keys] float32.

        The batch is that of `users`, or of the candidates without them. None without a bias.
        """
        total = None
        for bias in self.root.biases:
            values = [self._sliced(bias, query, key) for key in keys]
            parts = [self.ctx.build(x) if users is None else at_users(x, users) for x in values]
            if any(part is None for part in parts):
                raise NotCovered("attention is not recognised: its bias differs by candidate")
            wide = joined(list(map(self._logits_mask, parts)), keys).astype(jnp.float32)
            total = wide if total is None else jnp.add(*jnp.broadcast_arrays(total, wide))
        return total

    def _bias_differs(self, query: Part, keys: list[Part], users: Lineage) -> bool:
        """Whether a bias of these keys differs by candidate."""
        blocks = [self._sliced(x, query, key) for x in self.root.biases for key in keys]
        return any(at_users(x, users) is None for x in blocks)

    def _logits_mask(self, mask: jax.Array) -> Any:
        """Reshapes a mask [batch, *queries, *heads, keys] to [batch, heads, queries, keys]."""
        return grouped(mask, self.labels, [(HEAD, self.root.heads), (QUERY, self.sizes)])

    def _users_mask(self, fill: Fill, query: Part, live: list[Part], users: Lineage) -> jax.Array:
        """Returns a mask at user batch: [users or 1, heads or 1, queries or 1, keys]."""

        def mask() -> jax.Array:
            # The rows of queries and keys may each be concatenated; a mask of both is not.
            for is_split in (False, True):
                factors = [x for x, *_ in fill.factors(self.ctx, ())] if is_split else [fill.kept]
                of_keys = [
                    [at_users(self._sliced(x, query, key), users) for key in live] for x in factors
                ]
                if all(part is not None for parts in of_keys for part in parts):
                    kept = (joined(list(map(self._logits_mask, x)), live) for x in of_keys)
                    return functools.reduce(operator.and_, kept)
            raise NotCovered("attention is not recognised: its mask differs by candidate")

        bounds = tuple((part.start, part.stop) for part in (query, *live))
        key = ("mask at user batch", bounds, self.axis, tuple(self.sizes), self.root.heads)
        return self.ctx.scope.once(key, (fill.kept, users), mask)

    def _visible(self, query: Part, keys: list[Part], users: Lineage) -> tuple[Any, Any]:
        """Returns which keys the masks keep for a user, and which for a query; None for all.

        Returns:
          [users, keys], and [batch or 1, queries or 1, keys], an interval in each row.
        """
        size = sum(key.stop - key.start for key in keys)
        kept, seen = None, None
        for fill in self.root.fills:
            columns = [self._column(fill.kept, fill.state, False, query, keys, users)]
            if columns[0] is None:
                whole = Part(None, keys[0].start, keys[-1].stop)
                region = self._region(fill.labels, query, whole)
                columns = [
                    self._column(mask, state, is_interval, query, keys, users)
                    for mask, state, is_interval, _ in fill.factors(self.ctx, region)
                ]
            for column in columns:
                if column is None:
                    raise NotCovered("attention is not recognised: its mask differs by query")
                by_user, by_row = column
                if by_user is not None:
                    kept = by_user if kept is None else kept & by_user
                if by_row is not None:
                    seen = by_row if seen is None else seen & by_row
        return kept if kept is None else lineage.spread(kept, (users.users, size)), seen

    def _column(
        self,
        mask: Any,
        state: np.ndarray,
        is_interval: bool,
        query: Part,
        keys: list[Part],
        users: Lineage,
    ) -> tuple[Any, Any] | None:
        """Returns the columns of a mask, by user or by query; None if they are neither."""
        states = [self._cut(state, query, key) for key in keys]
        if all((x == 1).all() for x in states):
            return None, None
        by_user = [
            self._of_keys(mask, x, query, key, users) for x, key in zip(states, keys, strict=True)
        ]
        if (kept := self._by_user(by_user, keys)) is not None:
            return kept, None
        if not any((x == masks.UNKNOWN).any() for x in states):
            row = self._by_query([x == 1 for x in states], keys)
            return (None, row) if masks.are_intervals(row) else None
        if not is_interval:
            return None
        parts = [unspread(self.ctx, self._sliced(mask, query, key), True) for key in keys]
        return None, self._by_query(parts, keys)

    def _of_keys(self, mask: Any, state: np.ndarray, query: Part, key: Part, users: Lineage) -> Any:
        """Returns a mask's block at user batch; without queries and heads if fixed and equal."""
        first = state.reshape(-1, state.shape[-1])[:1]
        if (state != masks.UNKNOWN).all() and (state == first).all():
            shape = (1,) * (state.ndim - 1) + state.shape[-1:]
            return jnp.asarray(first.reshape(shape) == 1)
        return at_users(self._sliced(mask, query, key), users)

    def _by_user(self, parts: list[Any], keys: list[Part]) -> Any:
        """Joins masks of keys at user batch: [users or 1, keys]; None if they are none."""
        if any(x is None or any(n != 1 for n in x.shape[1:-1]) for x in parts):
            return None
        parts = [staged.reshape(x, (x.shape[0], x.shape[-1])) for x in parts]
        sizes = [(x.shape[0], key.stop - key.start) for x, key in zip(parts, keys, strict=True)]
        return lineage.joined(list(map(lineage.spread, parts, sizes)), 1)

    def _by_query(self, parts: list[Any], keys: list[Part]) -> Any:
        """Joins masks [batch, *queries, *heads, keys]: [batch or 1, queries or 1, keys]."""
        rows = [rows_of(x, self.labels, tuple(self.sizes)) for x in parts]
        moves = np if all(isinstance(x, np.ndarray) for x in rows) else jnp
        shape = lax.broadcast_shapes(*(x.shape[:2] for x in rows))
        full = [
            moves.broadcast_to(x, (*shape, key.stop - key.start))
            for x, key in zip(rows, keys, strict=True)
        ]
        return full[0] if len(full) == 1 else moves.concatenate(full, axis=2)


def joined(masks: list[jax.Array], parts: list[Part]) -> jax.Array:
    """Joins masks [..., keys] of parts, whose keys may have the size 1."""
    masks = [
        lineage.spread(x, (*x.shape[:-1], part.stop - part.start))
        for x, part in zip(masks, parts, strict=True)
    ]
    return lineage.joined(masks, 3)
