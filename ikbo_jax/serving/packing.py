"""Inputs of a call, and rows of users' states, in few arrays: one for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Rows of one array: a whole array, or a list of arrays that follow one another.
Column = Array | list[Any]


#: Every array starts at a multiple of so many bytes, as XLA's arrays do: a kernel may get the
#: address of a slice instead of a copy. A multiple of the size of every dtype.
ALIGNMENT = 256


class Piece(NamedTuple):
    """Where one array stands: elements [start, stop) of a packed array, and the array's shape."""

    packed: int
    start: int
    stop: int
    shape: tuple[int, ...]


class Packing:
    """Several arrays side by side, in one flat array for each dtype.

    Args:
      specs: shapes and dtypes of the arrays.

    Attributes:
      packed: `jax.ShapeDtypeStruct` of the flat arrays.
    """

    def __init__(self, specs: Sequence[jax.ShapeDtypeStruct]) -> None:
        lengths: dict[Any, int] = {}
        self._pieces: list[Piece] = []
        dtypes = list(dict.fromkeys(spec.dtype for spec in specs))
        for spec in specs:
            item = np.dtype(spec.dtype).itemsize
            start = -(-lengths.get(spec.dtype, 0) * item // ALIGNMENT) * ALIGNMENT // item
            lengths[spec.dtype] = stop = start + spec.size
            self._pieces.append(Piece(dtypes.index(spec.dtype), start, stop, spec.shape))
        self.packed = [jax.ShapeDtypeStruct((lengths[dtype],), dtype) for dtype in dtypes]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """The arrays, views of NumPy arrays, or slices in a traced function."""
        return [packed[n][start:stop].reshape(shape) for n, start, stop, shape in self._pieces]

    def empty(self) -> tuple[list[Array], list[Array]]:
        """New packed arrays, and the arrays as views that write to them.

        They are new for every call: the device may read them until the call has ended.
        """
        packed = [np.empty(spec.shape, spec.dtype) for spec in self.packed]
        return packed, self.unpacked(packed)


class RowPacking:
    """Rows of several arrays side by side, in one array [n, width] for each dtype.

    One kernel then gathers or scatters the rows of all arrays of a dtype.

    Args:
      specs: shapes and dtypes of one row of every array.

    Attributes:
      packed: `jax.ShapeDtypeStruct` of one row of the packed arrays.
    """

    def __init__(self, specs: Sequence[jax.ShapeDtypeStruct]) -> None:
        dtypes = list(dict.fromkeys(spec.dtype for spec in specs))
        widths = [0] * len(dtypes)
        self._pieces: list[Piece] = []
        for spec in specs:
            n = dtypes.index(spec.dtype)
            self._pieces.append(Piece(n, widths[n], widths[n] + spec.size, spec.shape))
            widths[n] += spec.size
        self.packed = [
            jax.ShapeDtypeStruct((width,), dtype)
            for width, dtype in zip(widths, dtypes, strict=True)
        ]

    def pack(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        """The packed arrays [n, width] of arrays [n, ...]; in a traced function."""
        parts: list[list[jax.Array]] = [[] for _ in self.packed]
        for piece, array in zip(self._pieces, rows, strict=True):
            parts[piece.packed].append(array.reshape(len(array), piece.stop - piece.start))
        return [jnp.concatenate(columns, axis=1) for columns in parts]

    def unpack(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays [n, ...] of packed arrays [n, width]; in a traced function."""
        return [
            packed[n][:, start:stop].reshape(len(packed[n]), *shape)
            for n, start, stop, shape in self._pieces
        ]


def pad(array: Array, filled: int) -> None:
    """Repeats the last one of the first `filled` rows of an array in the rows after it.

    Whatever a program does with a row is legal for padding, too.
    """
    array[filled:] = array[filled - 1]


def fill(array: Array, rows: Column, *, stack: bool = False) -> None:
    """Writes rows to an array's first rows, and pads the rest.

    Args:
      array: is written, [n, ...].
      rows: the rows, as one array or a list of arrays; n rows at most.
      stack: every array of a list is one row.
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
