"""Packs the inputs of a call, and the rows of users' states, into one array for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Rows of one array: a whole array, or a list of arrays that follow one another.
Column = Array | list[Any]

#: Every array starts at a multiple of so many bytes, as XLA's arrays do, so that a kernel may get
#: the address of a slice instead of a copy.
ALIGNMENT = 256


class Piece(NamedTuple):
    """Locates an array: elements [start, stop) of a packed array, and the array's shape."""

    packed: int
    start: int
    stop: int
    shape: tuple[int, ...]


class Packing:
    """Packs several arrays into one flat array for each dtype.

    Args:
      specs: shapes and dtypes of the arrays.

    Attributes:
      packed: `jax.ShapeDtypeStruct` of the flat arrays.
    """

    alignment = ALIGNMENT

    def __init__(self, specs: Sequence[jax.ShapeDtypeStruct]) -> None:
        lengths: dict[Any, int] = {}
        self._pieces: list[Piece] = []
        dtypes = list(dict.fromkeys(spec.dtype for spec in specs))
        for spec in specs:
            item = np.dtype(spec.dtype).itemsize
            unit = max(self.alignment // item, 1)
            start = -(-lengths.get(spec.dtype, 0) // unit) * unit
            lengths[spec.dtype] = stop = start + spec.size
            self._pieces.append(Piece(dtypes.index(spec.dtype), start, stop, spec.shape))
        self.packed = [jax.ShapeDtypeStruct((lengths[dtype],), dtype) for dtype in dtypes]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """Returns the arrays: views of NumPy arrays, or slices in a traced function."""
        return [packed[n][start:stop].reshape(shape) for n, start, stop, shape in self._pieces]

    def empty(self, make: Callable[..., Array] = np.empty) -> tuple[list[Array], list[Array]]:
        """Allocates packed arrays by `make`; returns them and the arrays as views.

        Every call needs new arrays: the device may read them until the call has ended.
        """
        packed = [make(spec.shape, spec.dtype) for spec in self.packed]
        return packed, self.unpacked(packed)


class RowPacking(Packing):
    """Packs rows of several arrays into one array [n, width] for each dtype.

    One kernel then gathers or scatters the rows of all arrays of a dtype.

    Args:
      specs: shapes and dtypes of one row of every array.

    Attributes:
      packed: `jax.ShapeDtypeStruct` of one row of the packed arrays.
    """

    alignment = 1

    def pack(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        """Packs arrays [n, ...] to arrays [n, width]; in a traced function."""
        parts: list[list[jax.Array]] = [[] for _ in self.packed]
        for piece, array in zip(self._pieces, rows, strict=True):
            parts[piece.packed].append(array.reshape(len(array), piece.stop - piece.start))
        return [jnp.concatenate(columns, axis=1) for columns in parts]

    def unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """Unpacks arrays [n, width] to arrays [n, ...]; in a traced function."""
        return [
            packed[n][:, start:stop].reshape(len(packed[n]), *shape)
            for n, start, stop, shape in self._pieces
        ]


def pad(array: Array, filled: int) -> None:
    """Repeats row `filled - 1` in the rows after it, so that padding is as legal as a row."""
    array[filled:] = array[filled - 1]


def fill(array: Array, rows: Column, *, stack: bool = False) -> None:
    """Writes rows to the first rows of `array` and pads the rest.

    `rows` is an array or a list of arrays; with `stack`, every array of the list is one row.
    """
    if isinstance(rows, list) and not stack:
        filled = sum(map(len, rows))
        np.concatenate(rows, out=array[:filled])
    else:
        filled = len(rows)
        if isinstance(rows, list):
            np.stack(rows, out=array[:filled])
        else:
            array[:filled] = rows
    pad(array, filled)
