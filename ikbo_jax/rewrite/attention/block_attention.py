"""Attention to a user's tokens and a candidate's own: the product of `Blocks` with the values.

`blocks` describes how the parts of the queries are computed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.ops.attention import attention, merge_attention
from ikbo_jax.rewrite.attention.block_parts import (
    Part,
    at_users,
    block_of,
    concatenated,
    lineage_of,
    logits_of,
    masked,
    parts_of,
    reordered,
    weighted,
)
from ikbo_jax.rewrite.attention.blocks import BlockFill, Blocks, transposed
from ikbo_jax.rewrite.attention.scores import (
    BATCH,
    HEAD,
    KEY,
    WIDTH,
    Label,
    Scores,
    labels_of_product,
)
from ikbo_jax.rewrite.facts import known
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules.elementwise import concat
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Lazy,
    Lineage,
    is_plain,
    origins_of,
    spread,
)
from ikbo_jax.rewrite.values.registry import NotCovered

#: From this number down, a masked key has no attention weight beside a key that is kept.
_HIDES = -1e8


def product(ctx: Context, eqn: Any, lhs: Any, rhs: Any, scores: Scores, pointwise: Any) -> Any:
    """The product of attention weights with the values of the same tokens.

    `pointwise` makes the `Call` of weights that are no probabilities of a softmax.
    """
    root: Any = scores.root
    assert isinstance(root, Blocks)
    (contract, batch) = eqn.params["dimension_numbers"]
    left = scores is lhs
    value = rhs if left else lhs
    scores_side, value_side = (0, 1) if left else (1, 0)
    pairs = dict(
        zip((scores.labels[d] for d in batch[scores_side]), batch[value_side], strict=True)
    )
    heads: list[Any] = [pairs.get((HEAD, n)) for n in range(len(root.heads))]
    summed, batched = contract[value_side], batch[value_side]
    free = [d for d in range(len(shape_of(value))) if d not in (*summed, *batched)]
    if (
        [scores.labels[d] for d in contract[scores_side]] != [(KEY, 0)]
        or (BATCH, 0) not in pairs
        or None in heads
        or len(pairs) != 1 + len(heads)
        or len(free) != 1
    ):
        raise NotCovered("attention is not recognised: another product with its values")
    value = transposed(value, [int(pairs[BATCH, 0]), *map(int, summed), *heads, *free])
    if jnp.finfo(value.dtype).eps < jnp.finfo(root.key.dtype).eps:
        raise NotCovered(f"attention is not recognised: {value.dtype} values")
    keys = parts_of(root.key, 1, value)
    query_axis = root.query.axis if isinstance(root.query, Concat) else 1
    queries = parts_of(root.query, query_axis)
    dtype = eqn.outvars[0].aval.dtype
    if scores.stage != "probabilities":
        call = pointwise(ctx, eqn, scores, query_axis, keys, dtype)
    elif any(fill.value > _HIDES for fill in root.fills):
        raise NotCovered(f"attention is not recognised: masked logits are {root.fills[0].value:g}")
    else:
        call = Call(ctx, eqn, root, query_axis, keys, dtype)
    outs = [call.attended(part) for part in queries]
    origins = origins_of(root.query, root.key, value) | root.mask_origins
    ctx.recorder.saved(eqn, origins, "attention with own tokens", True)
    # The result is [batch, *queries, *heads, width].
    have: list[Label] = [*root.labels[:-1], WIDTH]
    order = labels_of_product(eqn, scores, scores_side)
    out = outs[0] if len(outs) == 1 else concat(outs, query_axis)
    return reordered(out, have, order, tuple(eqn.outvars[0].aval.shape))


class Call:
    """One attention: every part of its queries, computed by itself."""

    def __init__(
        self, ctx: Context, eqn: Any, root: Blocks, axis: int, keys: list[Part], dtype: Any
    ) -> None:
        self.ctx, self.eqn, self.root, self.axis = ctx, eqn, root, axis
        self.keys, self.dtype = keys, dtype
        self.heads = math.prod(root.heads)

    def attended(self, query: Part) -> Any:
        """The result of some queries: [batch, *queries, *heads, width]."""
        states = {id(key): self._state(query, key) for key in self.keys}
        live = [key for key in self.keys if not states[id(key)].hidden]
        users = lineage_of(query.value)
        at_users = users is not None and all(self.of_users(key, users) for key in live)
        finite = any(fill.value > -math.inf for fill in self.root.fills)
        if finite or len(live) < len(self.keys) or not at_users:
            # At user batch, rows of -inf become NaN; merged attentions without keys are 0.
            self._check_rows(query, live, states)
        shape = list(shape_of(query.value))
        if users is not None and at_users:
            out = self._at_user_batch(query, live, users)
            shape[-1] = out.shape[-1]
            out = staged.reshape(out, users_of(out, shape))
            return Lazy(out, tuple(shape), users, 0, origins_of(query.value))
        out = self._at_candidate_batch(query, live, states)
        shape[-1] = out.shape[-1]
        return staged.reshape(out, shape)

    def _state(self, query: Part, key: Part) -> _State:
        kept = True
        for fill in self.root.fills:
            state = self._cut(fill.state, query, key)
            if (state == 0).all():
                return _State(True, False)
            kept = kept and bool((state == 1).all())
        return _State(False, kept)

    def _cut(self, x: np.ndarray, query: Part, key: Part) -> np.ndarray:
        index = [slice(None)] * x.ndim
        if x.ndim > 2 and x.shape[self.axis] != 1 and self.root.queries:
            index[self.axis] = slice(query.start, query.stop)
        if x.shape[-1] != 1:
            index[-1] = slice(key.start, key.stop)
        return x[tuple(index)]

    def _check_rows(self, query: Part, live: list[Part], states: dict[int, _State]) -> None:
        """Raises NotCovered unless every query provably keeps a key."""
        if any(states[id(key)].kept for key in live):
            return
        total: Any = False
        for key in live:
            kept: Any = True
            for fill in self.root.fills:
                kept = kept & (self._cut(fill.state, query, key) == 1)
            total = total | np.any(kept, axis=-1)
        if not np.all(total):
            raise NotCovered("attention is not recognised: a query may keep no key")

    def of_users(self, key: Part, users: Lineage) -> bool:
        """Whether keys are the same for all candidates of a user."""
        return lineage_of(key.value) is users or (
            not is_plain(key.value) and key.value.base.shape[0] == 1
        )

    def _mask(self, fill: BlockFill, query: Part, key: Part) -> Any:
        """The block of a mask: [batch, *queries, *heads, keys]."""
        mask = block_of(fill.kept, len(self.root.labels) - 1, key.start, key.stop)
        return block_of(mask, self.axis, query.start, query.stop) if self.root.queries else mask

    def _logits_mask(self, mask: jax.Array, queries: int, keys: int) -> jax.Array:
        """A mask [batch, *queries, *heads, keys] as [batch, heads, queries, keys]."""
        batch, *between, last = mask.shape
        count = len(self.root.queries)
        of_queries, of_heads = between[:count], between[count:]
        sizes: list[int] = []
        for own, full in ((of_queries, queries), (of_heads, self.heads)):
            sizes.append(1 if all(n == 1 for n in own) else full)
        full_queries = list(of_queries)
        if sizes[0] != 1 and math.prod(of_queries) != queries:
            full_queries = [n if n != 1 else m for n, m in zip(of_queries, self.sizes, strict=True)]
        full_heads = list(of_heads)
        if sizes[1] != 1 and math.prod(of_heads) != self.heads:
            full_heads = list(self.root.heads)
        mask = spread(mask, (batch, *full_queries, *full_heads, last))
        return staged.transpose(staged.reshape(mask, (batch, *sizes, last)), (0, 2, 1, 3))

    def flat(self, x: jax.Array, rows: int) -> jax.Array:
        """[batch, *rows, *heads, width] as [batch, rows, heads, width]."""
        return staged.reshape(x, (x.shape[0], rows, self.heads, x.shape[-1]))

    def _at_user_batch(self, query: Part, live: list[Part], users: Lineage) -> jax.Array:
        """Softmax attention of users' queries to users' keys: [users, queries, heads, width]."""
        value = query.value
        base = spread(value.base, (users.users, *value.shape[1:]))
        self.sizes = value.shape[1 : 1 + len(self.root.queries)]
        rows = math.prod(self.sizes)
        all_keys = concatenated([self.user_rows(key.value, users) for key in live])
        all_values = concatenated([self.user_rows(key.values, users) for key in live])
        logits = logits_of(self.flat(base, rows), all_keys, self.root.scale)
        if not all(self._state(query, key).kept for key in live):
            for fill in self.root.fills:
                logits = masked(self._users_mask(fill, query, live, users), logits, fill.value)
        largest = lax.stop_gradient(staged.reduce_max(logits, (3,)))
        weights = staged.exp(staged.sub(logits, staged.expand_dims(largest, (3,))))
        total = staged.expand_dims(staged.reduce_sum(weights, (3,)), (3,))
        weights = staged.cast(staged.div(weights, total), all_values.dtype)
        return staged.cast(weighted(weights, all_values), self.dtype)

    def _users_mask(
        self, fill: BlockFill, query: Part, live: list[Part], users: Lineage
    ) -> jax.Array:
        """A mask at user batch: [users or 1, heads or 1, queries or 1, keys]."""

        def mask() -> jax.Array:
            parts = [at_users(self._mask(fill, query, key), users) for key in live]
            if any(part is None for part in parts):
                raise NotCovered("attention is not recognised: its mask differs by candidate")
            rows = math.prod(self.sizes)
            return _joined([self._logits_mask(x, rows, 0) for x in parts], live)

        bounds = tuple((part.start, part.stop) for part in (query, *live))
        key = ("mask at user batch", bounds, self.axis, tuple(self.sizes), self.root.heads)
        return self.ctx.scope.once(key, (fill.kept, users), mask)

    def user_rows(self, x: Any, users: Lineage) -> jax.Array:
        """Keys or values [users, keys, heads, width] of one part."""
        return self.flat(spread(x.base, (users.users, *x.shape[1:])), x.shape[1])

    def _at_candidate_batch(
        self, query: Part, live: list[Part], states: dict[int, _State]
    ) -> jax.Array:
        """Attention to the keys of users and to own keys: [batch, queries, heads, width]."""
        reason = "queries that attend to keys of the candidate"
        array = self.ctx.materialise(self.eqn, query.value, reason)
        self.sizes = array.shape[1 : 1 + len(self.root.queries)]
        rows = math.prod(self.sizes)
        dtype = self.root.key.dtype
        flat = self.flat(array, rows)
        groups: dict[Any, list[Part]] = {}
        for key in live:
            groups.setdefault(lineage_of(key.value), []).append(key)
        own = groups.pop(None, []) + _taken_as_own(groups, rows)
        own_kept = all(states[id(key)].kept for key in own)
        own_rows = None
        if own:
            count = sum(key.stop - key.start for key in own)
            own_rows = tuple(
                staged.cast(self.flat(concatenated([self.ctx.build(x) for x in xs]), count), dtype)
                for xs in ([key.value for key in own], [key.values for key in own])
            )
        merged: Any = None
        for n, (users, keys) in enumerate(groups.items()):
            assert users is not None
            of_users = [
                staged.cast(concatenated([self.user_rows(x, users) for x in xs]), dtype)
                for xs in ([key.value for key in keys], [key.values for key in keys])
            ]
            lengths = None
            if not all(states[id(key)].kept for key in keys):
                of_users, lengths = self._kept_first(query, keys, users, of_users)
            # Own keys that no mask hides are own tokens of the op.
            tokens = own_rows if n == 0 and own_kept and own_rows else (None, None)
            out = attention(
                flat,
                of_users[0],
                of_users[1],
                users.index,
                scale=self.root.scale,
                key_value_seq_lengths=lengths,
                self_key=tokens[0],
                self_value=tokens[1],
                return_residuals=True,
            )
            assert isinstance(out, tuple)
            merged = out if merged is None else _merged(merged, out)
        if own_rows and not (own_kept and groups):
            own_out = self._to_own(query, own, flat, *own_rows)
            merged = own_out if merged is None else _merged(merged, own_out)
        return staged.cast(merged[0], self.dtype)

    def _kept_first(
        self, query: Part, keys: list[Part], users: Lineage, of_users: list[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        """Moves unmasked keys and values to the front; also returns their number by user."""
        kept: Any = True
        for fill in self.root.fills:
            parts = []
            for key in keys:
                mask = self._of_keys(fill, query, key, users)
                if mask is None or any(n != 1 for n in mask.shape[1:-1]):
                    raise NotCovered("attention is not recognised: its mask differs by query")
                size = key.stop - key.start
                parts.append(spread(mask.reshape(mask.shape[0], -1), (mask.shape[0], size)))
            rows = max(x.shape[0] for x in parts)
            whole = jnp.concatenate([spread(x, (rows, x.shape[1])) for x in parts], axis=1)
            kept = kept & whole
        kept = spread(kept, (users.users, kept.shape[1]))
        order = jnp.argsort(~kept, axis=1, stable=True)[:, :, None, None]
        ordered = [jnp.take_along_axis(x, order, axis=1) for x in of_users]
        return ordered, jnp.sum(kept, axis=1, dtype=jnp.int32)

    def _of_keys(self, fill: BlockFill, query: Part, key: Part, users: Lineage) -> Any:
        """The block of a mask at user batch; without queries and heads if it is fixed and equal."""
        state = self._cut(fill.state, query, key)
        first = state.reshape(-1, state.shape[-1])[:1]
        if (state != known.UNKNOWN).all() and (state == first).all():
            shape = (1,) * (state.ndim - 1) + state.shape[-1:]
            return jnp.asarray(first.reshape(shape) == 1)
        return at_users(self._mask(fill, query, key), users)

    def _to_own(
        self, query: Part, own: list[Part], flat: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attention to own keys with masks: the result, and lse [batch, queries, heads]."""
        logits = logits_of(flat, key, self.root.scale)
        for fill in self.root.fills:
            parts = [
                self._logits_mask(
                    self.ctx.build(self._mask(fill, query, k)), flat.shape[1], k.stop - k.start
                )
                for k in own
            ]
            logits = masked(_joined(parts, own), logits, -jnp.inf)
        largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
        weights = jnp.exp(logits - largest)
        total = jnp.sum(weights, axis=-1)
        safe = jnp.where(total > 0, total, 1.0)
        out = weighted((weights / safe[..., None]).astype(value.dtype), value)
        lse = jnp.where(total > 0, jnp.log(safe) + largest[..., 0], -jnp.inf)
        return out.astype(value.dtype), lse.transpose(0, 2, 1)


def _taken_as_own(groups: dict[Any, list[Part]], queries: int) -> list[Part]:
    """Removes and returns the keys that are no longer than the queries and not most of the keys.

    A candidate's token may be looked up, too, in a table of items. An attention for itself would
    read the queries again, and its result would be merged; the copy of its keys is smaller.
    """
    sizes = {users: sum(x.stop - x.start for x in keys) for users, keys in groups.items()}
    most = max(sizes, key=lambda users: sizes[users], default=None)
    taken = [x for x in sizes if x is not most and sizes[x] <= queries]
    return [part for users in taken for part in groups.pop(users)]


def _merged(first: Any, second: Any) -> tuple[jax.Array, jax.Array]:
    """The attention to the keys of two attentions, each a result and its lse."""
    return merge_attention(first[0], first[1], second[0], second[1])


@dataclasses.dataclass(frozen=True)
class _State:
    """What is proven of a block: that it is hidden, or that no mask hides any of it."""

    hidden: bool
    kept: bool


def users_of(out: jax.Array, shape: list[int]) -> tuple[int, ...]:
    """The shape of a base, for a value of this shape."""
    return (out.shape[0], *shape[1:])


def _joined(masks: list[jax.Array], parts: list[Part]) -> jax.Array:
    """Masks [batch, heads, queries, keys] of several parts of the keys, as one."""
    masks = [
        spread(x, (*x.shape[:-1], part.stop - part.start))
        for x, part in zip(masks, parts, strict=True)
    ]
    common = lax.broadcast_shapes(*((*x.shape[:-1], 1) for x in masks))
    return jnp.concatenate([spread(x, (*common[:-1], x.shape[-1])) for x in masks], axis=-1)
