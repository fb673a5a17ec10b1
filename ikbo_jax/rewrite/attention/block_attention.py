"""Attention to a user's tokens and a candidate's own: the product of `Blocks` with the values.

`blocks` describes how the parts of the queries are computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.ops.attention import merge_attention
from ikbo_jax.rewrite.attention import masked_keys
from ikbo_jax.rewrite.attention.block_masks import BlockMasks, joined
from ikbo_jax.rewrite.attention.blocks import (
    Part,
    arranged,
    lineage_of,
    masked_logits,
    of_one_user,
    parts_of,
    softmax_of_keys,
    weighted,
)
from ikbo_jax.rewrite.attention.operands import Operands, attend_by_row
from ikbo_jax.rewrite.attention.scores import (
    WIDTH,
    Label,
    Scores,
    labels_of_product,
    order_of_values,
)
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import unread
from ikbo_jax.rewrite.rules.elementwise import concat
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, Lineage
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.rows import take_rows

#: A softmax over at most so many keys is as written if most queries are a user's, but see keys that
#: are not. By parts, self-attention over 24 + 8 to 48 + 16 fields took 1.1 to 2.9 times as long on
#: an H100.
FEW_KEYS = 64


def product(ctx: Context, eqn: Any, scores: Scores, side: int, value: Any, kind: type[Call]) -> Any:
    """Returns the product of attention weights, the operand `side`, with values of the same tokens.

    `kind` is `Call` for a softmax, a subclass for other weights.
    """
    root, is_softmax = scores.root, kind is Call
    if not is_softmax and root.unscaled:
        # Factors are among the equations that this attention runs.
        root = root.unscaled
        scores = dataclasses.replace(scores, root=root)
    dims = order_of_values(eqn, scores, side, value)
    if -1 in dims:
        raise NotCovered("attention is not recognised: its values have no heads")
    value = of_one_user(ctx, lineage.transposed(value, dims), 0)
    if jnp.finfo(value.dtype).eps < jnp.finfo(root.key.dtype).eps:
        raise NotCovered(f"attention is not recognised: {value.dtype} values")
    keys = parts_of(root.key, 1, value)
    query_axis = root.query.axis if isinstance(root.query, Concat) else 1
    queries = parts_of(root.query, query_axis)
    dtype = eqn.outvars[0].aval.dtype
    if is_softmax and any(fill.value > masked_keys.LARGE for fill in root.fills):
        raise NotCovered(f"attention is not recognised: masked logits are {root.fills[0].value:g}")
    call = kind(ctx, eqn, scores, query_axis, keys, dtype)
    if is_softmax and keys[-1].stop <= FEW_KEYS:
        copied = sum(part.stop - part.start for part in queries if not call.keeps_batch(part))
        if 2 * copied > queries[-1].stop:
            raise NotCovered("few keys, and the user's own queries see the candidate's")
    outs = [call.attended(part) for part in queries]
    origins = lineage.origins_of(root.query, root.key, value) | root.mask_origins
    ctx.recorder.saved(eqn, origins, "attention with own tokens", True)
    # The result is [batch, *queries, *heads, width].
    have: list[Label] = [*root.labels[:-1], WIDTH]
    order = labels_of_product(eqn, scores, side)
    out = outs[0] if len(outs) == 1 else concat(outs, query_axis)
    return arranged(out, have, order)


class Call(BlockMasks):
    """Computes one attention: every part of its queries by itself."""

    def attended(self, query: Part) -> Any:
        """Returns the result of some queries: [batch, *queries, *heads, width]."""
        value, live = query.value, self._live(query)
        shape = list(shape_of(value))
        self.sizes = tuple(shape[1 : 1 + len(self.root.queries)])
        is_whole = sum(key.stop - key.start for key in live) == self.keys[-1].stop
        users = lineage_of(value)
        if users is not None and not all(self.of_users(key, users) for key in live):
            users = None
        finite = any(fill.value > -math.inf for fill in self.root.fills)
        keeps_keys = self._keeps_keys(query, live)
        if self.scores.emptied and not keeps_keys:
            raise NotCovered(
                "attention is not recognised: weights are masked, and a query may keep no key"
            )
        kept = None
        if users is not None and not keeps_keys and (finite or not is_whole):
            # Only rows of -inf, which become NaN, are the same for all candidates of a user.
            kept = self._rows_that_keep_keys(query, users)
            self.ctx.programs.unread = True
        if self.ctx.programs.unread and self.keys is self.all_keys:
            self.keys = list(map(self._read, self.keys))
            live = self._live(query)
        if users is None:
            out = self._at_candidate_batch(query, live, keeps_keys)
            return staged.reshape(out, (*shape[:-1], out.shape[-1]))
        out = self._at_user_batch(query, live, users, kept is not None)
        shape[-1] = out.shape[-1]
        out = staged.reshape(out, (out.shape[0], *shape[1:]))
        out = out if kept is None else unread.unread_rows(out, kept)
        return Lazy(out, tuple(shape), users, 0, lineage.origins_of(value))

    def keeps_batch(self, query: Part) -> bool:
        """Whether queries are the candidate's, or see keys of their user alone."""
        users = lineage_of(query.value)
        return users is None or all(self.of_users(key, users) for key in self._live(query))

    def of_users(self, key: Part, users: Lineage) -> bool:
        """Whether keys are the same for all candidates of a user."""
        return lineage_of(key.value) is users or (
            not lineage.is_plain(key.value) and key.value.base.shape[0] == 1
        )

    def flat(self, x: jax.Array) -> jax.Array:
        """Reshapes [batch, *rows, *heads, width] to [batch, rows, heads, width]."""
        batch, *between, width = shape_of(x)
        rows = math.prod(between[: len(between) - len(self.root.heads)])
        return staged.reshape(x, (batch, rows, self.heads, width))

    def _read(self, key: Part) -> Part:
        """Names the rows of a user's keys that queries read; the masks hide the others."""
        users = lineage_of(key.value)
        kept = None if users is None else self._kept_rows(key, users)[0]
        if kept is None or any(x.base.shape[:2] != kept.shape for x in (key.value, key.values)):
            return key
        rows, values = (
            dataclasses.replace(x, base=unread.read_rows(x.base, kept))
            for x in (key.value, key.values)
        )
        return Part(rows, key.start, key.stop, values)

    def _at_user_batch(
        self, query: Part, live: list[Part], users: Lineage, may_be_empty: bool
    ) -> jax.Array:
        """Computes users' attention to their keys: [users, queries, heads, width]."""
        all_keys = lineage.joined([self.user_rows(key.value, users) for key in live], 1)
        all_values = lineage.joined([self.user_rows(key.values, users) for key in live], 1)
        is_masked = not all(self._is_kept(query, key) for key in live)
        fills = self.root.fills if is_masked else ()
        logits = masked_logits(
            self.user_rows(query.value, users),
            all_keys,
            self._bias(query, live, users),
            [self._users_mask(fill, query, live, users) for fill in fills],
            scale=self.root.scale,
            cap=self.root.cap,
            numbers=tuple(max(x.value, -1e30) if may_be_empty else x.value for x in fills),
        )
        return staged.cast(weighted(softmax_of_keys(logits), all_values), self.dtype)

    def user_rows(self, x: Any, users: Lineage) -> jax.Array:
        """Returns queries, keys or values of one part: [users, rows, heads, width]."""
        return self.flat(lineage.spread(x.base, (users.users, *x.shape[1:])))

    def _at_candidate_batch(self, query: Part, live: list[Part], keeps_keys: bool) -> jax.Array:
        """Attends to keys of users and to own keys: [batch, queries, heads, width]."""
        of_query = lineage_of(query.value)
        reason = "queries that attend to keys of the candidate"
        if of_query is not None:
            reason = "the user's queries see the candidate's keys, as in every later layer"
        flat = self.flat(self.ctx.materialise(self.eqn, query.value, reason))
        groups: dict[Any, list[Part]] = {}
        for key in live:
            groups.setdefault(lineage_of(key.value), []).append(key)
        own = groups.pop(None, []) + _taken_as_own(groups, flat.shape[1])
        for users in [x for x, keys in groups.items() if self._bias_differs(query, keys, x)]:
            # As a bias of the time between the candidate and each event.
            own += groups.pop(users)
        own_kept = all(self._is_kept(query, key) for key in own)
        own_rows = self._all_rows(own, None) if own else None
        outs: list[tuple[jax.Array, jax.Array]] = []
        takes_own = False
        for users, keys in groups.items():
            assert users is not None
            lengths = None
            kept, seen = None, None
            if not all(self._is_kept(query, key) for key in keys):
                kept, seen = self._visible(query, keys, users)
            bias = self._bias(query, keys, users)
            if bias is not None:
                if seen is not None and bias.shape[2] != 1:
                    raise NotCovered("attention is not recognised: a bias, and a mask by query")
                bias = lineage.spread(bias, (users.users, *bias.shape[1:]))
            at_users = of_query is users and seen is None
            operands = Operands(
                self.user_rows(query.value, users) if at_users else flat,
                *self._all_rows(keys, users),
                jnp.arange(users.users) if at_users else users.index,
                *self.root.scale_and_cap,
            )._replace(bias=bias)
            if seen is not None:
                _, out, lse, _ = attend_by_row(operands, seen, kept)
                lse = staged.reshape(lse, flat.shape[:3])
                outs.append((staged.reshape(out, flat.shape), lse))
                continue
            if kept is not None:
                operands = operands.ordered(kept)
                lengths = jnp.sum(kept, axis=1, dtype=jnp.int32)
            if at_users:
                # Users attend at their own batch; candidates look their user's result up.
                found = operands.attend_with_lse(lengths)
                outs.append(tuple(take_rows(x, users.index, 0) for x in found))
                continue
            # Own keys that no mask hides, and that have no bias, are own tokens of the op.
            is_plain = own_kept and bias is None
            tokens = own_rows if is_plain and own_rows and not takes_own else (None, None)
            takes_own = takes_own or tokens[0] is not None
            outs.append(operands.attend_with_lse(lengths, self_key=tokens[0], self_value=tokens[1]))
        if own_rows and not takes_own:
            outs.append(self._to_own(query, own, flat, *own_rows))
        merged, lse = functools.reduce(lambda x, y: merge_attention(*x, *y), outs)
        if self.root.biases:
            if not keeps_keys:
                raise NotCovered("attention is not recognised: a bias, and a query may keep no key")
            # All keys of an empty row have the bias -inf. The product makes its gradients NaN.
            empty = jnp.where(lse == -jnp.inf, jnp.nan, 1.0)[..., None]
            merged = merged * empty.astype(merged.dtype)
        elif not keeps_keys:
            merged = self._with_empty_rows(merged, lse == -jnp.inf)
        return staged.cast(merged, self.dtype)

    def _with_empty_rows(self, out: jax.Array, empty: jax.Array) -> jax.Array:
        """Sets rows without kept keys to what the softmax of their masked logits gives them.

        `empty` is [batch, queries, heads]. The attention weights are equal, for the keys that all
        queries provably hide, too; or NaN.
        """
        fill, count = self.root.fills[0], self.keys[-1].stop
        if any((x.value, x.added) != (fill.value, fill.added) for x in self.root.fills):
            raise NotCovered("attention is not recognised: masks with several numbers")
        # Without a maximum that is subtracted, exponentials of these numbers are 0.
        is_nan = fill.value == -math.inf or not self.scores.shifted
        if fill.added is not None and fill.value == -math.inf:
            raise NotCovered("attention is not recognised: a row may be NaN by an added mask")
        if fill.added is not None or self.ctx.programs.unread and not is_nan:
            # Such logits have a gradient; or the equal weights would read rows that differ.
            self.ctx.run_original_if(jnp.any(empty))
            return out
        total: Any = 0.0
        for key in self.keys:
            users = lineage_of(key.values)
            wide = self._all_rows([key], users)[1].astype(jnp.float32)
            rows = jnp.sum(wide, axis=1, keepdims=True)
            total = total + (rows if users is None else take_rows(rows, users.index, 0))
        # Rows of NaN, and they alone, give NaN gradients to their values.
        weight = jnp.where(empty, jnp.float32(math.nan if is_nan else 1 / count), 0.0)
        mean = total * weight[..., None]
        return jnp.where(empty[..., None], mean.astype(out.dtype), out)

    def _all_rows(self, keys: list[Part], users: Lineage | None) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [users or batch, keys, heads, width]."""

        def rows(values: list[Any]) -> jax.Array:
            if users is not None:
                return lineage.joined([self.user_rows(x, users) for x in values], 1)
            return self.flat(lineage.joined([self.ctx.build(x) for x in values], 1))

        dtype = self.root.key.dtype
        found = rows([key.value for key in keys]), rows([key.values for key in keys])
        return staged.cast(found[0], dtype), staged.cast(found[1], dtype)

    def _to_own(
        self, query: Part, own: list[Part], flat: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to the candidates' own keys; returns result, and lse [batch, queries, heads]."""
        if not self.root.biases and self._sees_only_itself(query, own):
            return self._to_itself(flat, key, value)

        def mask(fill: Any) -> jax.Array:
            kept = [self.ctx.build(self._sliced(fill.kept, query, k)) for k in own]
            return joined(list(map(self._logits_mask, kept)), own)

        logits = masked_logits(
            flat,
            key,
            self._bias(query, own, None),
            list(map(mask, self.root.fills)),
            scale=self.root.scale,
            cap=self.root.cap,
            numbers=(-math.inf,) * len(self.root.fills),
        )
        weights, lse = masked_keys.softmax(logits, 3)
        return weighted(weights, value).astype(value.dtype), lse.transpose(0, 2, 1)

    def _sees_only_itself(self, query: Part, own: list[Part]) -> bool:
        """Whether every candidate of a row provably sees its own key alone."""
        bounds = [(key.start, key.stop) for key in own]
        if not self.root.queries or bounds != [(query.start, query.stop)]:
            return False
        states = [self._cut(fill.state, query, own[0]) for fill in self.root.fills]
        both = np.broadcast_arrays(*states)
        itself = np.eye(query.stop - query.start, dtype=bool)
        hidden, kept = np.any([x == 0 for x in both], 0), np.all([x == 1 for x in both], 0)
        hidden, kept = (np.moveaxis(x, self.axis, -2) for x in (hidden, kept))
        return bool(np.all(kept | ~itself) and np.all(hidden | itself))

    def _to_itself(
        self, flat: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attends from every candidate to its own key alone, whose weight is 1."""
        batch, rows, heads, _ = flat.shape
        own = [n if d == self.axis - 1 else 1 for d, n in enumerate(self.sizes)]
        key, value = (x.reshape(batch, *own, heads, x.shape[-1]) for x in (key, value))
        query = flat.reshape(batch, *self.sizes, heads, flat.shape[-1]).astype(jnp.float32)
        logits = jnp.sum(query * key.astype(jnp.float32), axis=-1) * self.root.scale
        logits = logits if self.root.cap is None else jnp.tanh(logits) * self.root.cap
        out = lineage.spread(value, (*query.shape[:-1], value.shape[-1]))
        return out.reshape(batch, rows, heads, -1), logits.reshape(batch, rows, heads)


def _taken_as_own(groups: dict[Any, list[Part]], queries: int) -> list[Part]:
    """Removes and returns the keys that are no longer than the queries and not most of the keys.

    A candidate's token may be looked up, too, in a table of items. An attention for itself would
    read the queries again, and its result would be merged; the copy of its keys is smaller.
    """
    sizes = {users: sum(x.stop - x.start for x in keys) for users, keys in groups.items()}
    most = max(sizes, key=lambda users: sizes[users], default=None)
    taken = [x for x in sizes if x is not most and sizes[x] <= queries]
    return [part for users in taken for part in groups.pop(users)]
