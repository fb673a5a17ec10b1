"""Rows of a lookup that are chosen again: slices, shuffles, rolls, padding of the looked-up axis.

`users[index][2:]` looks rows up by `index[2:]`, and a concatenation of lookups along the looked-up
axis is a lookup by concatenated indices. So negative samples, shards of candidates and padded
batches need no copy of the users.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.rules import variants
from ikbo_jax.rewrite.values import lineage, staged
from ikbo_jax.rewrite.values.lineage import Lazy, Lineage
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.rows import take_rows

#: Names the lookups of `rows` whose rows are few.
_FEW = "few rows of a lookup"


def rows(ctx: Any, x: Lazy, key: Any, batch: int, choose: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns the rows of `x` that `choose` takes from its index [rows]; `batch` is their number.

    `key` is equal for equal choices, as the key of `Scope.lineage`.
    """
    assert x.lineage is not None
    users = _chosen(ctx, x.lineage, key, batch, choose)
    shape = (*x.shape[: x.axis], batch, *x.shape[x.axis + 1 :])
    chosen = dataclasses.replace(x, shape=shape, lineage=users)
    if not lineage.is_at_least(batch, x.lineage.users + 1):
        # Fewer rows than users: looked up at once, which copies fewer rows than the original does.
        # A concatenation with other rows, as in `jnp.roll`, looks all of them up.
        few = lineage.spread(take_rows(x.base, users.index, x.axis), shape)
        ctx.scope.keep_results((_FEW, id(few)), few, [chosen])
        return few
    if ctx.differentiated:
        return without_unused(chosen, users, x.axis)
    ctx.gradient_differs()
    return chosen


def _chosen(ctx: Any, users: Lineage, key: Any, batch: int, choose: Any) -> Lineage:
    """Composes `users` with the choice: replaces its last step, and keeps the earlier steps."""
    *coarse, last = users.steps
    nearest = None if last.nearest is None else _chosen(ctx, last.nearest, key, batch, choose)
    found: Lineage = ctx.scope.lineage(
        ("chosen", last, *key), last.users, batch, lambda: choose(last.index), nearest
    )
    for step in reversed(coarse):
        found = ctx.scope.compose(step, found)
    return found


def aligned(ctx: Any, values: Sequence[Any]) -> list[Any]:
    """Gives lookups one lineage if they are by one index, except for its numbers out of bounds.

    `x[i]` counts negative numbers from the end, and `jnp.take(y, i, mode="clip")` takes row 0 for
    them. Both get a row for every number that they tell apart.
    """
    values = lineage.aligned(values)
    lineages = list(dict.fromkeys([x.lineage for x in values if lineage.has_lineage(x)]))
    if len(lineages) < 2:
        return values
    numbers, rows, *_ = first = _numbers(ctx, lineages[0])
    others = [_numbers(ctx, x) for x in lineages[1:]]
    if numbers is None or any(x[0] is not numbers or x[1] != rows for x in others):
        return values
    joint, batch, users = lineages[0], lineages[0].batch, 2 * rows + 2
    if any(x[2:] != first[2:] for x in others):
        if not lineage.is_at_least(batch, users + 1):
            return values

        def index() -> jax.Array:
            least = np.array(max(-rows - 1, np.iinfo(numbers.dtype).min), numbers.dtype)
            near = lax.clamp(least, numbers, lineage.number(rows, numbers.dtype))
            return staged.cast(near, jnp.int32) + np.int32(rows + 1)

        joint = ctx.scope.lineage(("joint", numbers), users, batch, index, numbers=(numbers, rows))

    def one(x: Any) -> Any:
        if not lineage.has_lineage(x) or x.lineage is joint:
            return x
        base = at_rows_of(ctx, x.base, x.axis, x.lineage, joint)
        return dataclasses.replace(x, base=base, lineage=joint)

    return [ctx.scope.once(("joint", joint), [x], functools.partial(one, x)) for x in values]


def _numbers(ctx: Any, users: Lineage) -> tuple[Any, Any, bool, int]:
    """Returns by which numbers a lineage looks up, or None if unknown, and of how many rows.

    Also whether negative numbers count from the end, and its rows with those out of bounds.
    """
    root, rows = users.numbers or (None, None)
    if not isinstance(rows, int):
        return None, rows, False, 0
    name, eqn, operands = ctx.made_by(root)
    whole = operands[0] if name == "reshape" else root
    numbers, wraps = proofs.unwrapped(ctx, whole, rows, clips=users.users == rows)
    if name == "reshape":
        numbers = root if numbers is whole else ctx.run_equation(eqn, [numbers])[0]
    return numbers, rows, wraps, users.users


def at_rows_of(ctx: Any, base: jax.Array, axis: int, old: Lineage, new: Lineage) -> jax.Array:
    """Gives a base that `old` looks up the rows that `new` looks up; see `aligned`."""
    if new.nearest is old:
        return lineage.with_nearest_rows(base, axis)
    (_, rows, wraps, count), of_new = _numbers(ctx, old), _numbers(ctx, new)
    if of_new[2:] == (wraps, count):
        return base
    ends = (rows, rows + 1) if count == rows + 2 else (0, rows - 1)
    first, last = [staged.slice_in_dim(base, n, n + 1, axis=axis) for n in ends]
    inside = staged.slice_in_dim(base, 0, rows, axis=axis)
    negative = inside if wraps else lineage.spread(first, inside.shape)
    return staged.concatenate([first, negative, inside, last], axis)


def at_last_steps(ctx: Any, operands: Sequence[Any]) -> list[Any]:
    """Looks rows up whose lookups end alike, by all steps but these: then they have one lineage.

    So a small table that is looked up for users, and then for candidates, meets users' rows.
    """
    operands = aligned(ctx, operands)
    of_operands = [x.lineage.steps[::-1] for x in operands if lineage.has_lineage(x)]
    alike = itertools.takewhile(lambda x: len(set(x)) == 1, zip(*of_operands, strict=False))
    last = [step for step, *_ in alike]
    if not last:
        return list(operands)
    fine = functools.reduce(lambda fine, step: ctx.scope.compose(step, fine), last)

    def moved(x: Any) -> Any:
        if not lineage.has_lineage(x) or x.lineage is fine:
            return x
        rows = x.base
        for step in x.lineage.steps[: -len(last)]:
            rows = take_rows(rows, step.index, x.axis, is_sorted=step.is_sorted)
        return dataclasses.replace(x, base=rows, lineage=fine)

    return list(map(moved, operands))


def sliced(ctx: Any, x: Lazy, start: int, stop: int, stride: int) -> Any:
    """Slices `x[start:stop:stride]` along the looked-up axis."""
    batch = -(-(stop - start) // stride)

    def choose(index: jax.Array) -> jax.Array:
        return lax.slice(index, (start,), (stop,), (stride,))

    return rows(ctx, x, ("slice", start, stop, stride), batch, choose)


def without_unused(operand: Any, fine: Lineage, axis: int) -> Any:
    """Replaces every row of the operand that no index takes by a row that is taken.

    The original never computes with an unused row, but the rewritten program does, at the smaller
    batch. If the result is infinity or NaN, as for a norm of padding, its gradient of 0 would turn
    the gradient of every weight into NaN.
    """
    users = fine.users

    def is_used(index: jax.Array) -> jax.Array:
        # A sum of ones: XLA's partitioner adds up what parts of a sharded index sum. To set flags,
        # it would gather the index.
        taken = jnp.zeros(users, jnp.int32).at[index].add(1, mode="promise_in_bounds")
        return taken > 0

    def checked(index: jax.Array) -> jax.Array:
        # `checkify` raises IndexError at a scatter under `vmap`.
        return jnp.any(index[None] == jnp.arange(users, dtype=jnp.int32)[:, None], axis=1)

    used = variants.with_checks_of(checked, is_used, fine.index)
    base = lineage.base_of(operand)
    if jnp.issubdtype(base.dtype, jnp.inexact):
        # The gradient of a selection is a selection, in place of a lookup's sums.
        row = lax.stop_gradient(take_rows(base, fine.index[:1], axis))
        used = used.reshape([-1 if d == axis else 1 for d in range(base.ndim)])
        base = jnp.where(used, base, row)
    else:
        rows = jnp.where(used, jnp.arange(fine.users, dtype=jnp.int32), fine.index[0])
        base = take_rows(base, rows, axis)
    return base if lineage.is_plain(operand) else dataclasses.replace(operand, base=base)


def again(
    ctx: Any, operand: Lazy, key: Any, row: jax.Array, ends: Any, exact: bool
) -> tuple[jax.Array, Lineage]:
    """Returns base and lineage of a lookup in looked-up rows, which has no more rows than these.

    `row` [batch] int32 says which rows of the operand are taken. It is the number of rows for an
    index below 0, and one more for an index past the end; `ends` computes the two rows for these,
    or is None. `key` is the lineage's; the gradient must be right if `exact`.
    """
    assert operand.lineage is not None
    users, axis, count = operand.lineage, operand.axis, operand.shape[operand.axis]
    base, size = operand.base, users.users
    index = take_rows(users.index, jnp.minimum(row, count - 1), 0)
    if ends is not None:
        last = [
            take_rows(base, lax.slice(users.index, (n,), (n + 1,)), axis) for n in (0, count - 1)
        ]
        base = lax.concatenate([base, *ends(last)], axis)
        index = jnp.where(row >= count, size + row - count, index)
        size += 2
    fine = ctx.scope.lineage(
        ("again", users, size, *key), size, row.shape[0], lambda: index.astype(jnp.int32)
    )
    return (without_unused(base, fine, axis) if exact else base), fine


def concatenated(ctx: Any, parts: Sequence[Any], axis: int, shape: Any) -> Any:
    """Concatenates lookups along the looked-up axis, and rows that are all equal."""
    parts = [(ctx.scope.results((_FEW, id(x))) or [x])[0] for x in parts]
    parts = lineage.aligned(parts)
    for x in parts:
        constant = lineage.is_only_broadcast(x) and x.base.shape[axis] == 1
        if not constant and not (lineage.has_lineage(x) and x.axis == axis):
            raise NotCovered("concatenation along the looked-up axis")
    bases = list({id(x.base): x.base for x in parts}.values())
    slots = [next(n for n, base in enumerate(bases) if base is x.base) for x in parts]
    starts = np.cumsum([0, *(base.shape[axis] for base in bases)]).tolist()
    if not lineage.is_at_least(shape[axis], starts[-1] + 1):
        raise NotCovered("concatenation along the looked-up axis of more rows than results")
    sources = [x.lineage if x.lineage is not None else x.shape[axis] for x in parts]

    def users(sources: Sequence[Any], rows: int, near: Lineage | None = None) -> Lineage:
        def index() -> jax.Array:
            pieces = []
            for source, slot in zip(sources, slots, strict=True):
                if isinstance(source, Lineage):
                    pieces.append(source.index + np.int32(starts[slot]))
                else:
                    pieces.append(jnp.full(source, starts[slot], jnp.int32))
            return lax.concatenate(pieces, 0)

        key = ("joined", *sources, *slots, *starts)
        found: Lineage = ctx.scope.lineage(key, rows, shape[axis], index, near)
        return found

    nearest = [source.nearest if isinstance(source, Lineage) else None for source in sources]
    near = users(nearest, starts[1] - 2) if len(bases) == 1 and all(nearest) else None
    base, found = lineage.joined(bases, axis), users(sources, starts[-1], near)
    return Lazy(base, tuple(shape), found, axis, lineage.origins_of(*parts))
