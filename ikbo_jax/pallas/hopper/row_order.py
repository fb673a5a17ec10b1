"""Where the rows of a key head stand among the queries of all heads, in the caller's order.

A kernel reads rows of a key head: a candidate after another, each with its queries, each with the
query heads that share the key head. Results go back to the caller's order as they are stored.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline, per_thread


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

    def place(self, row: ir.Value, head: ir.Value, *tables: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Computes `read` in inline code; rows past the end count as rows of the last candidate."""
        per_candidate, group = (inline.i32(x) for x in (self.q_len * self.group, self.group))
        in_part = row if self.rows is None else arith.remui(row, inline.i32(self.rows))
        candidate, rest = (x(in_part, per_candidate) for x in (arith.divui, arith.remui))
        for table in tables:
            last = ir.MemRefType(table.type).shape[0] - 1
            number = arith.minsi(candidate, inline.i32(last))
            address = inline.address(table, number)
            (candidate,) = per_thread.load_words(address, 1)
        query = arith.muli(candidate, inline.i32(self.q_len))
        query = arith.addi(query, arith.divui(rest, group))
        if self.rows is not None:
            query = arith.addi(query, arith.subi(row, in_part))
        return query, arith.addi(arith.muli(head, group), arith.remui(rest, group))
