"""The operands of a recognised attention, and the calls of the ops with them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax import masks
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.dot_product_attention import keys_first
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.gdpa_arguments import equal_offsets
from ikbo_jax.rewrite.attention.scores import Logits
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import spread
from ikbo_jax.rewrite.values.rows import take_rows


class Operands(NamedTuple):
    """Holds the operands of an attention.

    Attributes:
      query: [batch, queries, heads, width].
      key: [users, keys, heads, width].
      value: [users, keys, heads, width].
      users: [batch] int32, the user of every row of queries.
      scale: the factor of the logits.
      cap: the bound of the logits, see `ikbo_jax.attention`; None: there is none.
      nan_is_zero: whether rows whose logits are NaN or infinite are 0.
      bias: None, or [users, heads or 1, queries or 1, keys], see `ikbo_jax.attention`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    users: jax.Array
    scale: float
    cap: float | None = None
    nan_is_zero: bool = False
    bias: jax.Array | None = None

    @classmethod
    def of(cls, root: Logits, value: jax.Array) -> Operands:
        """Reshapes the operands of logits, and values [users, keys, *heads, width]."""
        (batch, *_, width), (users, keys, *_) = root.query.shape, value.shape
        heads = math.prod(root.heads)
        return cls(
            staged.reshape(root.query, (batch, math.prod(root.queries), heads, width)),
            staged.reshape(root.key.base, (users, keys, heads, width)),
            staged.reshape(value, (users, keys, heads, width)),
            root.lineage.index,
            *root.scale_and_cap,
            bias=next((spread(x, (users, *x.shape[1:])) for x in root.biases), None),
        )

    def activated(
        self,
        activation: str,
        scale: float,
        output_scale: float,
        cap: float | None = None,
        seen: Any = None,
        kept: jax.Array | None = None,
    ) -> jax.Array:
        """Attends with an activation instead of the softmax; see `intervals`."""
        (batch, queries), (users, keys) = self.query.shape[:2], self.key.shape[:2]
        mask = None
        if seen is not None or kept is not None:
            self, *ends = self.intervals(seen, kept)
            rows = [staged.reshape(spread(x, (batch, queries)), (batch * queries, 1)) for x in ends]
            mask = masks.intervals(*rows)
        query, key, value = (
            staged.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])) for x in self[:3]
        )
        out = gdpa(
            query,
            key,
            value,
            equal_offsets(batch, queries),
            equal_offsets(users, keys),
            activation=activation,
            scale=scale,
            output_scale=output_scale,
            logit_cap=cap,
            q_to_kv=self.users,
            max_seqlen_q=queries,
            max_seqlen_kv=keys,
            mask=mask,
        )
        return staged.reshape(out, staged.shape_of(self.query))

    def attend(self, lengths: jax.Array | None = None) -> jax.Array:
        if self.nan_is_zero:
            if lengths is None:
                lengths = jnp.full(self.key.shape[0], self.key.shape[1], jnp.int32)
            found, lse = self.attend_with_lse(lengths)
            return jnp.where(jnp.isfinite(lse)[..., None], found, jnp.zeros((), found.dtype))
        return self._attention(key_value_seq_lengths=lengths)

    def attend_with_lse(
        self, lengths: jax.Array | None, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Also returns lse; `options` are arguments of `ikbo_jax.attention`."""
        found: tuple[jax.Array, jax.Array] = self._attention(
            key_value_seq_lengths=lengths, return_residuals=True, **options
        )
        return found

    def _attention(self, **options: Any) -> Any:
        scale, cap, bias = self.scale, self.cap, self.bias
        return attention(*self[:4], scale=scale, logit_cap=cap, bias=bias, **options)

    def ordered(self, first: jax.Array) -> Operands:
        """Moves the keys where `first` [users, keys] is true to the front."""
        if self.bias is None:
            key, value = keys_first(first, self.key, self.value)
            return self._replace(key=key, value=value)
        bias = self.bias.transpose(0, 3, 1, 2)
        key, value, bias = keys_first(first, self.key, self.value, bias)
        return self._replace(key=key, value=value, bias=bias.transpose(0, 2, 3, 1))

    def of_user(self, x: jax.Array) -> jax.Array:
        """Looks [users, ...] up by candidate: [batch, queries, ...]."""
        rows = jnp.expand_dims(take_rows(x, self.users, 0), 1)
        return jnp.broadcast_to(rows, (*self.query.shape[:2], *x.shape[1:]))

    def intervals(
        self, seen: Any, kept: jax.Array | None, lengths: jax.Array | None = None
    ) -> tuple[Operands, jax.Array, jax.Array]:
        """Returns the keys that users keep, and the interval of them that each query sees.

        Args:
          seen: [batch or 1, queries or 1, keys] bool, an interval of keys in each row; None: all.
          kept: [users, keys] bool; None: all.
          lengths: [users] int32 if `kept` is the first `lengths` keys; else None.

        Returns:
          The operands, and begins and ends of intervals, [batch, queries or 1] int32.
        """
        batch, (_, size, *_) = self.query.shape[0], self.key.shape
        if seen is None:
            begin = jnp.zeros((batch, 1), jnp.int32)
            end = jnp.full((batch, 1), size, jnp.int32)
        else:
            # A mask that is equal for all keys may have one of them.
            seen = jnp.asarray(seen)
            seen = spread(seen, (batch, seen.shape[1], size))
            begin = jnp.argmax(seen, axis=2).astype(jnp.int32)
            end = begin + jnp.sum(seen, axis=2, dtype=jnp.int32)
        if lengths is not None:
            return self, begin, jnp.minimum(end, take_rows(lengths, self.users, 0)[:, None])
        if kept is None:
            return self, begin, end
        # Among the kept keys alone, those that a query sees follow each other, too.
        before = jnp.cumsum(jnp.pad(kept, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
        users = self.users[:, None]
        begin, end = (before.at[users, x].get(mode="promise_in_bounds") for x in (begin, end))
        return self.ordered(kept), begin, end


def attend_by_row(
    operands: Operands, seen: Any, kept: jax.Array | None, lengths: jax.Array | None = None
) -> tuple[Operands, jax.Array, jax.Array, jax.Array]:
    """Attends from every query to the keys that it sees; see `Operands.intervals`.

    Returns:
      Operands whose batch rows are rows of equal intervals; for these, the result, 0 for a query
      that sees nothing, and lse [batch, queries, heads], -inf for such a query; and whether a row's
      queries see nothing, [batch].
    """
    rows, begin, end = operands.intervals(seen, kept, lengths)
    if begin.shape[1] != 1:
        # Every query is a batch row.
        batch, queries, *rest = staged.shape_of(rows.query)
        users = staged.reshape(spread(rows.users[:, None], (batch, queries)), (batch * queries,))
        query = staged.reshape(rows.query, (batch * queries, 1, *rest))
        rows = rows._replace(query=query, users=users)
    begin, end = (staged.reshape(x, rows.users.shape) for x in (begin, end))
    ranges = jnp.stack([begin, end], axis=1)
    return rows, *rows.attend_with_lse(None, key_value_ranges=ranges), begin >= end
