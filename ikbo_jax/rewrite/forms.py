"""Forms of values, and their arrays: what calls, loops and branches pass on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ikbo_jax.rewrite.lineage import Concat, Lazy, is_plain
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
