"""Forms of values, and their arrays: what calls, loops and branches pass on."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ikbo_jax.rewrite.values.lineage import (
    Concat,
    Deferred,
    Lazy,
    base_of,
    is_only_broadcast,
    is_plain,
    spread,
)
from ikbo_jax.rewrite.values.registry import NotCovered
from ikbo_jax.rewrite.values.reshaped import Reshaped, Taken
from ikbo_jax.rewrite.values.staged import shape_of

# Only arrays can be arguments and results of a traced function. So `unpack` splits a value into its
# arrays and a function `pack` that rebuilds the value from them.


def can_pass(value: Any) -> bool:
    """Whether a value can be an argument or a result of a traced function."""
    if inside := inside_of(value):
        return all(map(can_pass, inside))
    return is_plain(value) or isinstance(value, Lazy)


def inside_of(value: Any) -> Sequence[Any]:
    """Returns the values that a concatenation or a reshaped value holds; () for other values."""
    if isinstance(value, Concat):
        return value.parts
    return (value.inner,) if isinstance(value, (Reshaped, Taken)) else ()


def with_inside(value: Any, inside: Sequence[Any]) -> Any:
    """Replaces the values that a concatenation or a reshaped value holds."""
    if isinstance(value, Concat):
        return Concat(tuple(inside), value.axis)
    (inner,) = inside
    return dataclasses.replace(value, inner=inner)


def with_all_inside(values: Sequence[Any]) -> list[Any]:
    """Lists values, then the values inside of them, then the values inside of these."""
    found = list(values)
    # The loop appends to the list that it iterates over.
    for x in found:
        found += inside_of(x)
    return found


class Nodes(NamedTuple):
    """Holds values as `with_all_inside` returns them, and how they are nested.

    Attributes:
      values: all of them.
      inside: for each, the positions of the values inside of it.
      roots: for each, the position of the outermost value that holds it.
    """

    values: list[Any]
    inside: list[range]
    roots: list[int]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Nodes:
        nodes = cls(with_all_inside(values), [], list(range(len(values))))
        for n, x in enumerate(nodes.values):
            start, count = len(nodes.roots), len(inside_of(x))
            nodes.inside.append(range(start, start + count))
            nodes.roots.extend([nodes.roots[n]] * count)
        return nodes


def unpack(value: Any) -> tuple[list[Any], Any]:
    """Returns the arrays of a value, and the function that rebuilds the value.

    The function holds no arrays, since it is called where the trace of the arrays has ended.
    """
    if is_plain(value):
        return [value], operator.itemgetter(0)
    if isinstance(value, Lazy):
        shape, lineage, axis, origins = value.shape, value.lineage, value.axis, value.origins
        return [value.base], lambda arrays: Lazy(arrays[0], shape, lineage, axis, origins)
    if isinstance(value, (Reshaped, Taken)):
        kind, layout, (arrays, pack_inner) = type(value), value.layout, unpack(value.inner)
        return arrays, lambda arrays: kind(pack_inner(arrays), *layout)
    if not isinstance(value, Concat):
        raise NotCovered("a function of a value that is not computed")
    axis, (arrays, pack_parts) = value.axis, unpack_all(value.parts)
    return arrays, lambda arrays: Concat(tuple(pack_parts(arrays)), axis)


def unpack_all(values: Sequence[Any]) -> tuple[list[Any], Any]:
    """Returns the arrays of all values, and the function that rebuilds the values."""
    unpacked = [unpack(value) for value in values]
    packs = [(len(inner), pack_one) for inner, pack_one in unpacked]

    def pack(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [pack_one([next(rest) for _ in range(count)]) for count, pack_one in packs]

    return [array for inner, _ in unpacked for array in inner], pack


def form(value: Any) -> Any:
    """Returns the form of a value: its kind, shapes, lineage and axis; "plain" for an array."""
    if not isinstance(value, Deferred):
        return "plain"
    if isinstance(value, Lazy):
        base = (value.base.shape, value.base.dtype)
        return (base, value.shape, value.lineage, value.axis)
    if isinstance(value, (Concat, Reshaped, Taken)):
        return (type(value), value.layout, tuple(map(form, inside_of(value))))
    return type(value)


def skeleton(value: Any) -> Any:
    """Replaces the arrays of a value, which a trace may not let out, by shapes and dtypes."""
    arrays, pack = unpack(value)
    return pack([jax.ShapeDtypeStruct(shape_of(x), x.dtype) for x in arrays])


def widened(value: Any, like: Any) -> Any:
    """Returns a value in a form that holds it and `like`, as a loop's carry must, or None.

    A carry begins with zeros or with one learned row, which are equal for all candidates. If the
    loop's body returns looked-up rows, the first rows are looked up alike. `like` may be a
    skeleton.
    """
    if is_plain(value) or is_plain(like):
        return value if is_plain(value) and is_plain(like) else None
    inside = inside_of(value)
    if inside and type(value) is type(like) and value.layout == like.layout:
        parts = list(map(widened, inside, inside_of(like)))
        return None if any(part is None for part in parts) else with_inside(like, parts)
    if isinstance(like, Concat) and is_only_broadcast(value):
        if value.base.shape[like.axis] != 1:
            return None
        parts = []
        for part, start, stop in like.pieces():
            sizes = (*value.shape[: like.axis], stop - start, *value.shape[like.axis + 1 :])
            cut = dataclasses.replace(value, shape=sizes)
            parts.append(spread(cut.base, sizes) if is_plain(part) else widened(cut, part))
        return None if any(part is None for part in parts) else Concat(tuple(parts), like.axis)
    if isinstance(like, Reshaped) and not like.order and is_only_broadcast(value):
        rest, shape = iter(value.base.shape), list[int]()
        for group in like.groups:
            own = [next(rest) for _ in group.sizes]
            if not group.is_plain and any(n != 1 for n in own):
                return None
            shape += own if group.is_plain else [1] * len(group.before)
        inner = widened(Lazy(value.base.reshape(shape), tuple(like.inner.shape)), like.inner)
        return None if inner is None else dataclasses.replace(like, inner=inner)
    if not isinstance(value, Lazy) or not isinstance(like, Lazy):
        return None
    return _widened_rows(value, like)


def in_form_of(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Broadcasts the values' arrays to the shapes of `like`'s arrays; NotCovered in other forms."""
    wide = list(map(widened, values, like))
    if any(x is None or form(x) != form(y) for x, y in zip(wide, like, strict=True)):
        raise NotCovered("a function that mixes rows")
    return wide


def _widened_rows(value: Lazy, like: Lazy) -> Lazy | None:
    """Widens a value if both may be looked up, by one lineage."""
    known = value if value.lineage is not None else like
    if like.lineage is not None and (like.lineage, like.axis) != (known.lineage, known.axis):
        return None
    shape = [m if n == 1 else n for n, m in zip(value.base.shape, like.base.shape, strict=True)]
    if known.lineage is not None:
        if value.lineage is None and value.base.shape[known.axis] != 1:
            return None
        shape[known.axis] = known.lineage.users
    base = spread(base_of(value), tuple(shape))
    origins = value.origins | like.origins
    return dataclasses.replace(
        value, base=base, lineage=known.lineage, axis=known.axis, origins=origins
    )
