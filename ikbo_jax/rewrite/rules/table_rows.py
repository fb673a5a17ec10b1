"""Which rows of a table a gather looks up, and rows for indices out of bounds."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context, at_shapes, shape_of
from ikbo_jax.rewrite.rules import reselect, variants
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Concat, Lineage, base_of, has_lineage, is_plain
from ikbo_jax.rewrite.values.registry import NotCovered


def looked_up(
    ctx: Context, eqn: Any, operand: Any, indices: Any, column: int, axis: int
) -> tuple[Any, Lineage]:
    """Returns the operand and the lineage by which a column of gather indices looks rows up.

    An index out of bounds fills a row, or takes the nearest row with or without a gradient. If no
    row of the operand has this value and derivative, a row for it is appended to the operand and
    looked up like all rows.
    """
    rows, mode = shape_of(operand)[axis], eqn.params["mode"]
    if axis == 0 or not proofs.is_fixed(ctx, indices):
        # Features that the program selects are no table of items.
        ctx.programs.looks_up(rows)
    value, column = column_of(ctx, indices, column)
    root = ctx.build(value)
    batch = indices.shape[0]
    index = root if root.ndim == 1 else root[:, column]
    proven = proofs.within(ctx, root, 0, rows - 1)
    is_gather = eqn.primitive.name == "gather"
    if is_gather and not proven and ctx.differentiated and is_plain(indices):
        # The variant for derivatives runs in place of the original, also if it is checked.
        index = _checked(eqn, index, indices, shape_of(operand))
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP and not proven
    # `x[index]` takes the nearest row, but adds no gradient to it.
    drops = mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS and not proven
    is_sorted = indices.shape[1:] == (1,) and eqn.params.get("indices_are_sorted", False)
    by = functools.partial(ctx.scope.lineage, numbers=(root, rows) if root.ndim == 1 else None)
    in_bounds = functools.partial(by, is_sorted=is_sorted)
    plain: Lineage | None = None

    def nearest() -> jax.Array:
        if proven:
            return staged.cast(index, jnp.int32)
        first, last = np.zeros((), index.dtype), lineage.number(rows - 1, index.dtype)
        return staged.cast(lax.clamp(first, index, last), jnp.int32)

    def outside() -> jax.Array:
        return _numbered(index, nearest() if plain is None else plain.index, rows)

    # `checkify` must find an index out of bounds, also in a constant that takes every row.
    differs = not proven or not _takes_every_row(root, column, rows)
    if differs and not ctx.differentiated:
        # Ids have no gradient, but the embedding that they select has one, also for unused ids.
        ctx.gradient_differs()
    exact = differs and ctx.differentiated
    if not fills and not exact:
        return operand, in_bounds(("rows", root, column), rows, batch, nearest)
    if has_lineage(operand) and not lineage.is_at_least(batch, rows + 1):

        def ends(last: list[jax.Array]) -> list[jax.Array]:
            if fills:
                return [_fill_row(eqn, operand, axis)] * 2
            return list(map(_without_gradient, last)) if drops else last

        row = nearest() if proven else outside()
        return reselect.again(
            ctx, operand, (root, column, int(fills)), row, None if proven else ends, exact
        )
    if has_lineage(operand):
        # The operand is materialised at its own batch, which is smaller than the result's.
        operand = ctx.build(operand)
    if proven:
        fine = in_bounds(("used", root, column), rows, batch, nearest)
    else:
        plain = None if exact else in_bounds(("rows", root, column), rows, batch, nearest)
        fine = by(("outside", root, column), rows + 2, batch, outside, plain)
        operand = _with_rows_outside(eqn, operand, axis, fills, drops)
    return (reselect.without_unused(operand, fine, axis) if exact else operand), fine


def _checked(eqn: Any, index: Any, indices: Any, shape: Sequence[int]) -> Any:
    """Returns `index`; `checkify` checks a gather by `indices`, from which it is computed."""

    def gathered(index: Any, indices: Any) -> Any:
        table = lax.full(shape, np.zeros((), bool))  # Its values have no effect on the report.
        eqn.primitive.bind(table, indices, **{**eqn.params, "fill_value": None})
        return index

    return variants.with_checks_of(gathered, lambda index, _: index, index, indices)


_without_gradient_p = core.Primitive("ikbo_without_gradient")
_without_gradient_p.def_impl(lambda x: x)
_without_gradient_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_without_gradient_p, lambda _, x: [x])
batching.defvectorized(_without_gradient_p)
ad.deflinear2(_without_gradient_p, lambda _, x: [ad.Zero(x.aval)])


def _without_gradient(x: jax.Array) -> jax.Array:
    """Returns `x`, with its tangent in forward mode and no gradient in reverse mode.

    So does `x[index]` out of bounds: JAX's gather takes the nearest row of the tangent, but its
    scatter drops the gradient.
    """
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    found: jax.Array = _without_gradient_p.bind(x) if inexact else x
    return found


@functools.partial(jax.jit, static_argnames="rows")
def _numbered(index: jax.Array, nearest: jax.Array, rows: int) -> jax.Array:
    """Replaces `nearest` by the numbers of the appended rows where the index is out of bounds."""
    row = jnp.where(index < 0, lineage.number(rows, np.int32), nearest)
    past = index > lineage.number(rows - 1, index.dtype)
    return jnp.where(past, lineage.number(rows + 1, np.int32), row)


def _with_rows_outside(eqn: Any, operand: Any, axis: int, fills: bool, drops: bool) -> Any:
    """Appends two rows to the operand: for indices below 0, and for indices past the end."""
    base = base_of(operand)
    if fills:
        base = staged.concatenate([base, *[_fill_row(eqn, operand, axis)] * 2], axis)
    else:
        base = lineage.with_nearest_rows(base, axis, _without_gradient if drops else None)
    if is_plain(operand):
        return base
    shape = (*operand.shape[:axis], operand.shape[axis] + 2, *operand.shape[axis + 1 :])
    return dataclasses.replace(operand, base=base, shape=shape)


def _takes_every_row(root: Any, column: int, rows: int) -> bool:
    """Whether an index is a constant that takes every row, so that no row is unused."""
    if isinstance(root, jax.core.Tracer):
        return False
    index = np.asarray(root)
    found = np.unique(index if index.ndim == 1 else index[:, column])
    # An index out of bounds takes no row of its own.
    return int(((found >= 0) & (found < rows)).sum()) == rows


def _fill_row(eqn: Any, operand: Any, axis: int) -> jax.Array:
    """Returns the row with which a gather fills an index out of bounds."""
    dtype = operand.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise NotCovered(f"lookup that fills rows out of bounds, of {dtype}")
    shape = base_of(operand).shape
    return lax.full((*shape[:axis], 1, *shape[axis + 1 :]), eqn.params["fill_value"], dtype)


def column_of(ctx: Context, indices: Any, column: int) -> tuple[Any, int]:
    """Traces a column of gather indices back to a vector, or to a matrix and the column of it."""
    is_of_columns = isinstance(indices, Concat) and indices.axis == 1
    parts: Any = indices.parts if is_of_columns else None
    name, eqn, operands = ctx.made_by(indices)
    if name == "concatenate" and eqn.params["dimension"] == 1:
        parts = operands
    if parts is not None:
        for part in parts:
            if column < part.shape[1]:
                return column_of(ctx, part, column)
            column -= part.shape[1]
    if len(shape_of(indices)) == 2 and indices.shape[1] == 1:
        moved = name in ("reshape", "broadcast_in_dim")
        if moved and shape_of(operands[0]) == indices.shape[:1]:
            return proofs.selected(ctx, operands[0]), 0
        vector = _vector_of(ctx, indices, indices.shape[0])
        return (indices, column) if vector is None else (proofs.selected(ctx, vector), 0)
    return indices, column


def _vector_of(ctx: Context, x: Any, batch: int) -> Any:
    """Returns the vector [batch] of which a value is made that has more dimensions.

    `take_along_axis` counts negative indices from the end when the index is a column, or broadcast
    along features; `x[index]` before. The equations run on the vector, so that both look up by one
    lineage. None if there is no such vector.
    """
    if shape_of(x) == (batch,):
        return x
    if has_lineage(x) or not proofs.is_along_one(x, batch):
        return None
    name, eqn, operands = ctx.made_by(x)
    if name in (*proofs.MOVES, "slice"):
        return _vector_of(ctx, operands[0], batch)
    vectors = [_vector_of(ctx, y, batch) if shape_of(y) else y for y in operands]
    if name not in ("lt", "add", "select_n") or any(y is None for y in vectors):
        return None
    return ctx.run_equation(at_shapes(eqn, vectors, [(batch,)]), vectors)[0]
