"""Where the rows of a key head stand among the queries of all heads, in the caller's order.

A kernel reads rows of a key head: a candidate after another, each with its queries, each with the
query heads that share the key head. Results go back to the caller's order as they are stored.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import inline, per_thread
from ikbo_jax.pallas.hopper.inline import Integer


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The order of rows of a key head.

    `order` [B] int32 in device memory is the caller's number of each candidate; None if candidates
    are in the caller's order. `rows`: of a key head, if the array has several parts of so many.
    """

    order: Any
    q_len: int
    group: int = 1
    rows: int | None = None

    @property
    def tables(self) -> tuple[Any, ...]:
        """References that inline code takes as arguments, for `place`."""
        return () if self.order is None else (self.order,)

    def read(self, row: Any, head: Any) -> tuple[Any, Any]:
        """Computes a row's query number and query head, under interpretation."""
        per_candidate, group = jnp.int32(self.q_len * self.group), jnp.int32(self.group)
        in_part = row if self.rows is None else lax.rem(row, jnp.int32(self.rows))
        place, rest = lax.div(in_part, per_candidate), lax.rem(in_part, per_candidate)
        candidate = place if self.order is None else self.order[place]
        query = candidate * self.q_len + lax.div(rest, group)
        return query + (row - in_part), head * self.group + lax.rem(rest, group)

    def place(self, row: Integer, head: Integer, *tables: ir.Value) -> tuple[Integer, Integer]:
        """Computes `read` in inline code; rows past the end count as rows of the last candidate."""
        per_candidate, group = (inline.i32(x) for x in (self.q_len * self.group, self.group))
        in_part = row if self.rows is None else row % self.rows
        candidate, rest = in_part // per_candidate, in_part % per_candidate
        for table in tables:
            last = ir.MemRefType(table.type).shape[0] - 1
            address = inline.address(table, candidate.at_most(last))
            (candidate,) = per_thread.load_words(address, 1)
        query = candidate * self.q_len + rest // group
        if self.rows is not None:
            query = query + (row - in_part)
        return query, head * group + rest % group
