"""Rules of `Merged`: an equation on merged values becomes one on the values before the reshape."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from ikbo_jax.rewrite.attention import contraction
from ikbo_jax.rewrite.interpret import Context, shape_of
from ikbo_jax.rewrite.rules import concatenation, elementwise, reshape, sources, split_rules
from ikbo_jax.rewrite.values import staged
from ikbo_jax.rewrite.values.lineage import Lazy, is_plain, transposed
from ikbo_jax.rewrite.values.merged import Merged
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.split import Split


def _wrapped(result: Any, groups: tuple[tuple[int, ...], ...]) -> Any:
    if all(len(group) == 1 for group in groups):
        return result
    if is_plain(result):
        shape = tuple(math.prod(result.shape[d] for d in group) for group in groups)
        return staged.reshape(result, shape)
    return Merged(result, groups)


def _like(eqn: Any, result_shape: Sequence[int], **params: Any) -> Any:
    (out,) = eqn.outvars
    aval = out.aval.update(shape=tuple(result_shape))
    return eqn.replace(outvars=[core.Var(aval)], params={**eqn.params, **params})


def _split(x: Any, like: Merged, wide: Sequence[int]) -> Any:
    """Reshapes a value that broadcasts to the shape of `like` to broadcast to the shape `wide`.

    `wide` is the shape of `like.inner`, where dimensions of size 1 may be larger.
    """
    if isinstance(x, Merged):
        if x.groups != like.groups or x.inner.shape != like.inner.shape:
            raise NotCovered("values are merged by different reshapes")
        return x.inner
    if np.ndim(x if is_plain(x) else ()) == 0 and shape_of(x) == ():
        return x
    if not is_plain(x) and not isinstance(x, Lazy):
        raise NotCovered("a merged value with a concatenation")
    base = x.base if isinstance(x, Lazy) else x
    shape: list[int] = [1] * len(like.inner.shape)
    axis = -1
    for d, group in enumerate(like.groups):
        if isinstance(x, Lazy) and d == x.axis:
            if len(group) != 1:
                raise NotCovered("a merged value with a value looked up along the merged axis")
            axis = group[0]
            shape[axis] = base.shape[d]
        elif base.shape[d] != 1:
            for inner in group:
                shape[inner] = wide[inner]
    base = staged.reshape(base, shape)
    if is_plain(x):
        return base
    return Lazy(base, tuple(wide), x.lineage, axis, x.origins)


def _first(operands: Any) -> Merged:
    return next(x for x in operands if isinstance(x, Merged))


def merged_elementwise(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Runs an elementwise equation on the values before the reshape."""
    if eqn.primitive.name == "mul":
        eqn, operands = elementwise.with_mask(ctx, eqn, operands)
    like = _first(operands)
    wide = list(like.inner.shape)
    sizes = zip(like.groups, like.shape, eqn.outvars[0].aval.shape, strict=True)
    for group, own, size in sizes:
        if own != size:
            # The operation broadcasts a dimension of size 1.
            if len(group) != 1:
                raise NotCovered(f"{eqn.primitive.name} of a merged value that is broadcast")
            wide[group[0]] = size
    split = [_split(x, like, wide) for x in operands]
    return _wrapped(elementwise.elementwise_to(ctx, eqn, tuple(wide), split), like.groups)


def merged_reshape(ctx: Context, eqn: Any, x: Merged) -> Any:
    """Reshapes the value before the reshape."""
    return reshape.reshape_to(ctx, eqn, x.inner, tuple(eqn.outvars[0].aval.shape))


def transpose(ctx: Context, eqn: Any, x: Merged) -> Any:
    """Transposes the dimensions that each dimension merges."""
    permutation = [int(d) for d in eqn.params["permutation"]]
    order = [d for n in permutation for d in x.groups[n]]
    return _wrapped(
        transposed(x.inner, order), _renumbered([len(x.groups[n]) for n in permutation])
    )


def _renumbered(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns groups of these lengths of the dimensions 0, 1, ..."""
    groups, start = [], 0
    for length in lengths:
        groups.append(tuple(range(start, start + length)))
        start += length
    return tuple(groups)


def reduction(ctx: Context, eqn: Any, x: Merged) -> Any:
    """Reduces all dimensions that a dimension merges."""
    axes = [int(a) for a in eqn.params["axes"]]
    inner_axes = tuple(d for a in axes for d in x.groups[a])
    if eqn.primitive.name in ("argmax", "argmin") and len(inner_axes) != 1:
        raise NotCovered(f"{eqn.primitive.name} over a merged axis")
    shape = [n for d, n in enumerate(x.inner.shape) if d not in inner_axes]
    lengths = [len(group) for n, group in enumerate(x.groups) if n not in axes]
    inner_eqn = _like(eqn, shape, axes=inner_axes)
    return _wrapped(elementwise.reduction(ctx, inner_eqn, x.inner), _renumbered(lengths))


def broadcast(ctx: Context, eqn: Any, x: Merged, *dynamic: Any) -> Any:
    """Adds dimensions to the value before the reshape."""
    shape, dims = eqn.params["shape"], [int(d) for d in eqn.params["broadcast_dimensions"]]
    if dynamic or any(shape[t] != x.shape[d] for d, t in enumerate(dims)):
        raise NotCovered("broadcast of a merged axis")
    lengths = [len(x.groups[dims.index(t)]) if t in dims else 1 for t in range(len(shape))]
    groups = _renumbered(lengths)
    inner_shape, inner_dims = [1] * sum(lengths), [0] * len(x.inner.shape)
    for t, group in enumerate(groups):
        if t not in dims:
            inner_shape[group[0]] = shape[t]
            continue
        for new, old in zip(group, x.groups[dims.index(t)], strict=True):
            inner_shape[new] = x.inner.shape[old]
            inner_dims[old] = new
    inner_eqn = _like(
        eqn, inner_shape, shape=tuple(inner_shape), broadcast_dimensions=tuple(inner_dims)
    )
    return _wrapped(sources.broadcast_in_dim(ctx, inner_eqn, x.inner), groups)


def dot_general(ctx: Context, eqn: Any, lhs: Any, rhs: Any) -> Any:
    """Multiplies split operands: a merged summed axis is several summed axes."""
    (contract, batch) = eqn.params["dimension_numbers"]
    paired = [
        {int(d): int(other) for d, other in zip(a, b, strict=True)}
        for a, b in (
            ((*contract[0], *batch[0]), (*contract[1], *batch[1])),
            ((*contract[1], *batch[1]), (*contract[0], *batch[0])),
        )
    ]
    sides = []
    for x, other, pairs in ((lhs, rhs, paired[0]), (rhs, lhs, paired[1])):
        groups: list[tuple[int, ...]] = []
        sizes: list[int] = []
        for d, n in enumerate(shape_of(x)):
            own = _sizes(x, d)
            theirs = _sizes(other, pairs[d]) if d in pairs else [n]
            if len(own) > 1 and len(theirs) > 1 and own != theirs:
                raise NotCovered("product of values that are merged by different reshapes")
            new = own if len(own) > 1 else theirs
            groups.append(tuple(range(len(sizes), len(sizes) + len(new))))
            sizes += new
        sides.append((_refined(ctx, eqn, x, groups, sizes), groups, sizes))

    def expanded(of_sides: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(inner for d in dims for inner in groups[int(d)])
            for dims, (_, groups, _) in zip(of_sides, sides, strict=True)
        )

    # The dimensions of the result: the side and number of each.
    out = [(0, int(d)) for d in batch[0]]
    for n, (_, groups, _) in enumerate(sides):
        out += [(n, d) for d in range(len(groups)) if d not in (*contract[n], *batch[n])]
    lengths = [len(sides[n][1][d]) for n, d in out]
    shape = [sides[n][2][inner] for n, d in out for inner in sides[n][1][d]]
    inner_eqn = _like(eqn, shape, dimension_numbers=(expanded(contract), expanded(batch)))
    result = contraction.dot_general(ctx, inner_eqn, sides[0][0], sides[1][0])
    return _wrapped(result, _renumbered(lengths))


def _sizes(x: Any, dim: int) -> list[int]:
    if isinstance(x, Merged):
        return [x.inner.shape[d] for d in x.groups[dim]]
    return [shape_of(x)[dim]]


def _refined(ctx: Context, eqn: Any, x: Any, groups: Any, sizes: list[int]) -> Any:
    """Splits an operand into the dimensions `sizes`; `groups` of them are its own dimensions."""
    if isinstance(x, Merged):
        if all(len(g) == len(own) for g, own in zip(groups, x.groups, strict=True)):
            return x.inner
        raise NotCovered("product of values that are merged by different reshapes")
    if all(len(group) == 1 for group in groups):
        return x
    return _reshaped(ctx, eqn, x, tuple(sizes))


def _reshaped(ctx: Context, eqn: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes an operand beside a merged one; rows of both dimensions together are built."""
    found = reshape.reshape_to(ctx, eqn, x, shape)
    if isinstance(found, Split):
        return ctx.materialise(eqn, found, "looked up by other rows than the merged value")
    return found


def gather(ctx: Context, eqn: Any, operand: Any, indices: Any) -> Any:
    """Looks rows up by indices that are flattened before the lookup."""
    numbers = eqn.params["dimension_numbers"]
    if not isinstance(indices, Merged) or isinstance(operand, Merged):
        raise NotCovered("lookup in a value whose looked-up axis is merged by a reshape")
    if len(indices.groups[-1]) != 1 or numbers.start_indices_batching_dims:
        raise NotCovered("lookup by index vectors that are merged by a reshape")
    shape, rest = eqn.outvars[0].aval.shape, iter(indices.groups[:-1])
    lengths = [1 if d in numbers.offset_dims else len(next(rest)) for d in range(len(shape))]
    groups = _renumbered(lengths)
    sizes = iter([indices.inner.shape[d] for group in indices.groups[:-1] for d in group])
    inner_shape, offset = [], []
    for d, group in enumerate(groups):
        if d in numbers.offset_dims:
            offset.append(group[0])
            inner_shape.append(shape[d])
        else:
            inner_shape += [next(sizes) for _ in group]
    numbers = numbers._replace(offset_dims=tuple(offset))
    inner_eqn = _like(eqn, inner_shape, dimension_numbers=numbers)
    result = sources.gather(ctx, inner_eqn, operand, indices.inner)
    if isinstance(result, Split):
        return split_rules.reshape_split(ctx, eqn, result)
    return _wrapped(result, groups)


def concatenate(ctx: Context, eqn: Any, *operands: Any) -> Any:
    """Concatenates along a dimension that is not merged."""
    like, axis = _first(operands), eqn.params["dimension"]
    if len(like.groups[axis]) != 1:
        raise NotCovered("concatenation along a merged axis")
    (inner_axis,), split = like.groups[axis], []
    before, after = like.inner.shape[:inner_axis], like.inner.shape[inner_axis + 1 :]
    for x in operands:
        shape = (*before, shape_of(x)[axis], *after)
        if not isinstance(x, Merged):
            split.append(_reshaped(ctx, eqn, x, shape))
        elif x.groups == like.groups and x.inner.shape == shape:
            split.append(x.inner)
        else:
            raise NotCovered("values are merged by different reshapes")
    shape = (*before, eqn.outvars[0].aval.shape[axis], *after)
    inner_eqn = _like(eqn, shape, dimension=inner_axis)
    return _wrapped(concatenation.concatenate(ctx, inner_eqn, *split), like.groups)
