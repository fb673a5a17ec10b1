"""Lookups written as a product with one-hot vectors: `one_hot(index, users) @ user`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import reshaped_axes
from ikbo_jax.rewrite.rules.table_rows import looked_up
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Lazy, base_of, has_lineage, is_plain, origins_of
from ikbo_jax.rewrite.values.reshaped import split


def is_lookup(ctx: Context, eqn: Any, operands: Any) -> bool:
    """Whether a product of arrays has an operand that may be one-hot: a cast of booleans."""
    del eqn
    return any(isinstance(x, jax.core.Tracer) and _equal(ctx, x) is not None for x in operands)


def lookup(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Returns the lookup that a product with one-hot vectors is; None for any other product.

    A row whose index is out of bounds is 0, as the row of a gather that fills with 0.
    """
    (contract, batch) = eqn.params["dimension_numbers"]
    if batch[0] or len(contract[0]) != 1:
        return None
    for left, x, other, dim, axis in (
        (True, lhs, rhs, contract[0][0], contract[1][0]),
        (False, rhs, lhs, contract[1][0], contract[0][0]),
    ):
        index = _index(ctx, x, int(dim)) if is_plain(x) and np.ndim(x) >= 2 else None
        if index is None or isinstance(other, Concat):
            continue
        sizes, out = shape_of(index), eqn.outvars[0].aval
        if len(sizes) == 1:
            return _rows(ctx, eqn, index, other, int(axis), left)
        flat = reshaped_axes.to_shape(ctx, eqn, index, (math.prod(sizes),))
        rest = out.shape[len(sizes) :] if left else out.shape[: -len(sizes)]
        shape = (*flat.shape, *rest) if left else (*rest, *flat.shape)
        inner = eqn.replace(outvars=[core.Var(out.update(shape=shape))])
        found = _rows(ctx, inner, flat, other, int(axis), left)
        return None if found is None else split(found, 0 if left else len(rest), sizes)
    return None


def _rows(ctx: Context, eqn: Any, index: Any, table: Any, axis: int, left: bool) -> Any:
    out = eqn.outvars[0].aval
    rows, batch = shape_of(table)[axis], index.shape[0]
    if not lineage.is_at_least(batch, rows + 1) or has_lineage(table) and table.axis != axis:
        return None
    if not jnp.issubdtype(table.dtype, jnp.floating) or not jnp.issubdtype(out.dtype, jnp.floating):
        return None
    if jnp.finfo(out.dtype).eps > jnp.finfo(table.dtype).eps:
        return None
    filled = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    as_gather = eqn.replace(params=filled)
    what = f"{lineage.text(table)} looked up by {batch} one-hot vectors -> {lineage.text(out)}"
    table = lineage.spread_axes(table, [axis])
    table, fine = looked_up(ctx, as_gather, table, index, 0, axis)
    base = staged.cast(base_of(table), out.dtype)
    found = ctx.recorder.found(eqn, what, True)
    ctx.recorder.saved(eqn, frozenset({found}), "lookup", True)
    if has_lineage(table):
        fine = ctx.scope.compose(table.lineage, fine)
    order = [d for d in range(base.ndim) if d != axis]
    order = [axis, *order] if left else [*order, axis]
    base = base if order == sorted(order) else staged.transpose(base, order)
    at = 0 if left else base.ndim - 1
    return Lazy(base, tuple(out.shape), fine, at, origins_of(table) | {found})


def _equal(ctx: Context, x: Any) -> Any:
    """Returns the operands of the comparison that an array of 0 and 1 is cast from, or None."""
    # A program that is shared by several calls does not see the equations of its operands. Asking
    # for them would make every call of a product with an operand its own program.
    produced = ctx.scope.producer(x, ("convert_element_type",))
    if produced is None:
        return None
    name, _, compared = ctx.made_by(produced[1][0])
    return compared if name == "eq" else None


def _index(ctx: Context, x: Any, dim: int) -> Any:
    """Finds the index [batch] of one-hot vectors along `dim`; None if x may hold others."""
    compared = _equal(ctx, x)
    if compared is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    for index, positions in (compared, compared[::-1]):
        count, batch = x.shape[dim], x.shape[:dim] + x.shape[dim + 1 :]
        if shape_of(positions)[dim : dim + 1] != (count,):
            continue
        if not proofs.counts_along(ctx, positions, dim):
            continue
        if np.shape(base_of(index)) != (*x.shape[:dim], 1, *x.shape[dim + 1 :]):
            continue
        while index is not None and shape_of(index) != batch:
            name, _, operands = ctx.made_by(index)
            is_moved = name in proofs.MOVES and _keeps_order(ctx, index, batch)
            index = operands[0] if is_moved else None
        if index is None or not is_plain(index):
            return None
        if not jnp.issubdtype(index.dtype, jnp.integer):
            return None
        # Positions that the index's dtype cannot hold would wrap around.
        return index if count - 1 <= jnp.iinfo(index.dtype).max else None
    return None


def _keeps_order(ctx: Context, x: Any, batch: tuple[int, ...]) -> bool:
    """Whether the equation that makes `x` from elements [batch] keeps their order."""
    if len(batch) == 1:
        return proofs.is_along_one(x, batch[0])
    name, _, operands = ctx.made_by(x)
    if name not in ("broadcast_in_dim", "reshape", "squeeze"):
        return False
    sizes = (np.shape(base_of(y)) for y in (x, operands[0]))
    own, others = ([n for n in shape if n != 1] for shape in sizes)
    return own == others
