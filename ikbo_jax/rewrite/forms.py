"""Forms of values, and their arrays: what calls, loops and branches pass on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ikbo_jax.rewrite.lineage import Concat, Lazy, base_of, is_plain, slice_along, spread
from ikbo_jax.rewrite.merged import Merged

# Only arrays can be arguments and results of a traced function. So `unpack` splits a value into its
# arrays and a function `pack` that rebuilds the value from them.


def unpack(value: Any) -> tuple[list[Any], Any]:
    """The arrays of a value, and the function that rebuilds the value."""
    if is_plain(value):
        return [value], lambda arrays: arrays[0]
    if isinstance(value, Lazy):
        return [value.base], lambda arrays: dataclasses.replace(value, base=arrays[0])
    if isinstance(value, Merged):
        arrays, pack_inner = unpack(value.inner)
        return arrays, lambda arrays: dataclasses.replace(value, inner=pack_inner(arrays))
    assert isinstance(value, Concat)
    arrays, pack_parts = unpack_all(value.parts)
    return arrays, lambda arrays: Concat(tuple(pack_parts(arrays)), value.axis)


def unpack_all(values: Sequence[Any]) -> tuple[list[Any], Any]:
    """The arrays of all values, and the function that rebuilds the values."""
    unpacked = [unpack(value) for value in values]

    def pack(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [pack_one([next(rest) for _ in inner]) for inner, pack_one in unpacked]

    return [array for inner, _ in unpacked for array in inner], pack


def form(value: Any) -> Any:
    """The form of a value: its kind, shapes, lineage and axis; "plain" for an array."""
    if isinstance(value, Lazy):
        base = (value.base.shape, value.base.dtype)
        return (base, value.shape, value.lineage, value.axis)
    if isinstance(value, Concat):
        return (value.axis, tuple(map(form, value.parts)))
    if isinstance(value, Merged):
        return (value.groups, form(value.inner))
    return "plain"


def skeleton(value: Any) -> Any:
    """The value with shapes and dtypes in place of its arrays, which a trace may not let out."""
    arrays, pack = unpack(value)
    return pack([jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in arrays])


def widened(value: Any, like: Any) -> Any:
    """A value in a form that holds it and `like`, as a loop's carry must; None without such a form.

    A carry begins with zeros or with one learned row, which are equal for all candidates. If the
    loop's body returns looked-up rows, the first rows are looked up alike.

    Args:
      value: the value.
      like: the other value, or its skeleton.
    """
    if isinstance(like, Concat) and isinstance(value, Lazy) and value.lineage is None:
        if value.base.shape[like.axis] != 1:
            return None
        parts, start = [], 0
        for part, size in zip(like.parts, like.sizes, strict=True):
            cut = slice_along(value, start, start + size, like.axis)
            start += size
            if is_plain(part):
                parts.append(spread(cut.base, cut.shape))
            else:
                parts.append(widened(cut, part))
        return None if any(part is None for part in parts) else Concat(tuple(parts), like.axis)
    if isinstance(like, Merged):
        if not isinstance(value, Lazy) or value.lineage is not None or value.base.size != 1:
            return None
        ones = (1,) * len(like.inner.shape)
        inner = widened(Lazy(value.base.reshape(ones), tuple(like.inner.shape)), like.inner)
        return None if inner is None else dataclasses.replace(like, inner=inner)
    if not isinstance(value, Lazy) or not isinstance(like, Lazy):
        return None
    return _widened_rows(value, like)


def _widened_rows(value: Lazy, like: Lazy) -> Lazy | None:
    """`widened` of values that may both be looked up, by one lineage."""
    known = value if value.lineage is not None else like
    if like.lineage is not None and (like.lineage, like.axis) != (known.lineage, known.axis):
        return None
    shape = [max(n, m) for n, m in zip(value.base.shape, like.base.shape, strict=True)]
    if known.lineage is not None:
        if value.lineage is None and value.base.shape[known.axis] != 1:
            return None
        shape[known.axis] = known.lineage.users
    base = spread(base_of(value), tuple(shape))
    origins = value.origins | like.origins
    return dataclasses.replace(
        value, base=base, lineage=known.lineage, axis=known.axis, origins=origins
    )
