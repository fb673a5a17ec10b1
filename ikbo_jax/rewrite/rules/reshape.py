"""Rules of reshapes: they keep the looked-up axis whole, or turn a repetition into a lookup."""

import functools
import math
from typing import Any

from ikbo_jax.rewrite.facts import proofs
from ikbo_jax.rewrite.interpret import Context
from ikbo_jax.rewrite.rules.elementwise import concat
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Lazy,
    has_lineage,
    is_at_least,
    is_plain,
    lazy,
    spread_axes,
)
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import merged, split


def reshape(ctx: Context, eqn: Any, x: Any) -> Any:
    """Reshapes, or squeezes; the interpreter transposes before, where a reshape permutes."""
    return reshape_to(ctx, eqn, x, eqn.outvars[0].aval.shape)


def reshape_to(ctx: Context, eqn: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes a value."""
    if is_plain(x):
        return staged.reshape(x, shape)
    groups = groups_of(x.shape, shape)
    try:
        if isinstance(x, Concat):
            return _reshape_concat(ctx, eqn, x, shape, groups)
        return _reshape_lazy(ctx, eqn, x, shape, groups)
    except NotCovered:
        pass
    try:
        return merged(x, shape, groups)
    except NotCovered:
        if (found := _split(ctx, eqn, x, shape, groups)) is None:
            raise
        return found


def _split(ctx: Context, eqn: Any, x: Any, shape: tuple[int, ...], groups: list[Any]) -> Any:
    """Splits the looked-up axis; None if the reshape does more with it, or splits another axis."""
    for dims, targets in groups:
        (axis, *others) = [d for d in dims if x.shape[d] != 1] or [-1]
        if (
            others
            or sum(shape[t] != 1 for t in targets) < 2
            or isinstance(x, Concat)
            and axis == x.axis
        ):
            continue
        first, sizes = targets[0], tuple([shape[t] for t in targets])
        whole = (*shape[:first], x.shape[axis], *shape[targets[-1] + 1 :])
        return split(reshape_to(ctx, eqn, x, whole), first, sizes)
    return None


def _reshape_lazy(
    ctx: Context, eqn: Any, x: Lazy, shape: Any, groups: list[Any], *, repeats: bool = True
) -> Any:
    """Reshapes a lazy value; `repeats`: dimensions merged with a broadcast one become a lookup."""
    base_shape: list[int] = []
    axis, full, repeat = -1, [], None
    for dims, targets in groups:
        sizes = [shape[t] for t in targets]
        if x.lineage and x.axis in dims:
            if [x.shape[d] for d in dims if x.shape[d] != 1] != [n for n in sizes if n != 1]:
                if not repeats:
                    raise NotCovered("the looked-up axis of a part is merged or split by a reshape")
                x, groups = _as_broadcast(ctx, x, shape)
                return _reshape_lazy(ctx, eqn, x, shape, groups)
            axis = len(base_shape) + next(i for i, n in enumerate(sizes) if n != 1)
            base_shape += [n if n == 1 else x.base.shape[x.axis] for n in sizes]
        elif all(x.base.shape[d] == 1 for d in dims):
            base_shape += [1] * len(sizes)
        elif repeats and not repeat and len(sizes) == 1 and _is_repeat(ctx, x, dims):
            repeat = (len(base_shape), dims)
            base_shape.append(math.prod(x.base.shape[d] for d in dims))
        else:
            full += dims
            base_shape += sizes
    base = staged.reshape(spread_axes(x, full).base, base_shape)
    if repeat is not None:
        return _repeated(ctx, x, base, shape, *repeat)
    return lazy(base, tuple(shape), x.lineage, axis, x.origins)


def _as_broadcast(ctx: Context, x: Lazy, shape: tuple[int, ...]) -> tuple[Lazy, list[Any]]:
    """Returns tiles or repeated rows as a broadcast along a new dimension, for a reshape.

    NotCovered if they are neither, or if the reshape would write the copies.
    """
    assert x.lineage is not None
    is_tile, axis, rows = ctx.scope.is_of("tile", x.lineage), x.axis, x.lineage.users
    reason = "the looked-up axis is merged or split by a reshape"
    if not is_tile and not ctx.scope.is_of("repeat", x.lineage):
        raise NotCovered(reason)
    new, times = axis + (not is_tile), x.lineage.batch // rows
    base = staged.reshape(x.base, (*x.base.shape[:new], 1, *x.base.shape[new:]))
    sizes = (times, rows) if is_tile else (rows, times)
    out = Lazy(base, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), origins=x.origins)
    groups = groups_of(out.shape, shape)
    dims, targets = next(pair for pair in groups if new in pair[0])
    is_repeated = len(targets) == 1 and _is_pair(out, dims)
    if not is_repeated and any(base.shape[d] != 1 for d in dims):
        raise NotCovered(reason)
    return out, groups


def _is_pair(x: Lazy, dims: list[int]) -> bool:
    """Whether a dimension is merged with a broadcast dimension, which repeats its rows."""
    full = [d for d in dims if x.shape[d] != 1]
    return len(full) == 2 and sum(x.base.shape[d] == 1 for d in full) == 1


def _is_repeat(ctx: Context, x: Lazy, dims: list[int]) -> bool:
    return x.lineage is None and _is_pair(x, dims) and not proofs.is_fixed(ctx, x)


def _repeated(ctx: Context, x: Lazy, base: Any, shape: Any, axis: int, dims: list[int]) -> Any:
    """Turns `jnp.repeat` by a constant, or `jnp.tile`, written as a reshape, into a lookup."""
    first, second = (d for d in dims if x.shape[d] != 1)
    batch, rows = shape[axis], base.shape[axis]
    is_repeat = x.base.shape[second] == 1
    index = (ctx.scope.of_repeats if is_repeat else ctx.scope.of_tiles)(rows, batch)
    ctx.recorder.confirmed(x.origins)
    return Lazy(base, tuple(shape), index, axis, x.origins)


def _reshape_concat(ctx: Context, eqn: Any, x: Concat, shape: Any, groups: Any) -> Any:
    """Reshapes the parts, if the reshape takes whole slices of the concatenated axis."""
    dims, targets = next((d, t) for d, t in groups if x.axis in d)
    if any(x.shape[d] != 1 for d in dims if d < x.axis):
        raise NotCovered("the concatenated axis is merged with an axis before it by a reshape")
    axis = next((t for t in targets if shape[t] != 1), None)
    if axis is None:
        raise NotCovered("the concatenated axis is dropped by a reshape")
    # One slice of the concatenated axis has `inner` elements, one of the new axis has `length`.
    inner = math.prod(x.shape[d] for d in dims if d > x.axis)
    length = math.prod(shape[t] for t in targets if t > axis)
    if any(size * inner % length for size in x.sizes):
        raise NotCovered("a reshape splits the parts of a concatenation")
    # Beside the keys of a history, a candidate's keys that are repeated for heads are copied.
    parts, repeats = list[Any](), not any(map(has_lineage, x.parts))
    for part, size in zip(x.parts, x.sizes, strict=True):
        part_shape = (*shape[:axis], size * inner // length, *shape[axis + 1 :])
        if isinstance(part, Lazy):
            part_groups = groups_of(part.shape, part_shape)
            parts.append(_reshape_lazy(ctx, eqn, part, part_shape, part_groups, repeats=repeats))
        else:
            parts.append(reshape_to(ctx, eqn, part, part_shape))
    return concat(parts, axis)


@functools.lru_cache(maxsize=4096)
def groups_of(before: Any, after: Any) -> list[tuple[list[int], list[int]]]:
    """Finds the smallest groups of neighbouring dimensions with equal products."""
    if 0 in before:
        raise NotCovered("reshape of an empty value")
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        dims: list[int] = []
        targets: list[int] = []
        left, right = 1, 1
        while True:
            # In place of `<`, since a symbolic size may be 1.
            differ = left != right
            if i < len(before) and (not dims or differ and is_at_least(right, left)):
                left *= before[i]
                dims.append(i)
                i += 1
            elif j < len(after) and (not targets or differ and is_at_least(left, right)):
                right *= after[j]
                targets.append(j)
                j += 1
            else:
                break
        if left != right:
            raise NotCovered("reshape of sizes whose order is unknown")
        groups.append((dims, targets))
    return groups
