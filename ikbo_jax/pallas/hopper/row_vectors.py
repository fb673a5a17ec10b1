"""Vectors of rows: 1, 2 or 4 words that a thread loads, adds in f32, and stores at once."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ikbo_jax.pallas.hopper import inline, mosaic, per_thread, stores
from ikbo_jax.pallas.hopper.per_thread import FLOAT32, INT32

#: A thread's words; under interpretation, its numbers in f32.
Words = tuple[jax.Array, ...]


class Rows(NamedTuple):
    """Vectors of `words` words of rows [rows, ...]; more than 4 are stored by several accesses."""

    ref: Any
    words: int

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.ref.dtype)

    @property
    def numbers(self) -> int:
        """The number of elements in a vector."""
        return self.words * 4 // self.dtype.itemsize

    def load(self, places: Sequence[tuple[jax.Array, jax.Array]]) -> list[Words]:
        """Issues all loads of one vector of a thread for each (row, number of the vector)."""
        if mosaic.is_interpreted():
            return [self._interpreted(*place) for place in places]

        @inline.code(
            self.ref,
            *(x for place in places for x in place),
            returns=(INT32,) * (self.words * len(places)),
        )
        def loaded(ref: ir.Value, *arrays: mgpu.FragmentedArray) -> Any:
            found = []
            for row, vector in zip(arrays[::2], arrays[1::2], strict=True):
                address = self._address(ref, row, vector)
                found += per_thread.load_words(address, self.words, is_early=True)
            return tuple(found)

        return [loaded[i : i + self.words] for i in range(0, len(loaded), self.words)]

    def floats(self, words: Words) -> tuple[jax.Array, ...]:
        """Converts a vector's words to f32."""
        if mosaic.is_interpreted():
            return words

        @inline.code(*words, returns=(FLOAT32,) * self.numbers)
        def converted(*words: mgpu.FragmentedArray) -> Any:
            return tuple(y for x in words for y in unpacked(per_thread.scalar(x), self.dtype))

        return converted

    def store(
        self,
        row: jax.Array,
        vector: jax.Array,
        words: Words,
        is_wanted: jax.Array,
        *,
        streams: bool = False,
    ) -> None:
        """Stores a vector of each thread that wants it; if it streams, L2 evicts it first."""
        if mosaic.is_interpreted():

            @per_thread.in_turn(is_wanted)
            def _(thread: Any) -> None:
                for i, x in enumerate(words):
                    column = vector[thread] * self.numbers + i
                    self.ref[row[thread], column] = x[thread].astype(self.dtype)

            return

        @inline.code(self.ref, row, vector, is_wanted.astype(jnp.int32), *words)
        def _(ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
            row, vector, wanted, *words = arrays
            address = self._address(ref, row, vector)
            values, zero = list(map(per_thread.scalar, words)), inline.i32(0)
            is_wanted = per_thread.scalar(wanted).differs(zero)
            for i in range(0, self.words, per_thread.VECTOR):
                part = values[i : i + per_thread.VECTOR]
                per_thread.store_words(address, part, is_wanted, 4 * i, streams=streams)

    def rounded(self, numbers: Sequence[jax.Array]) -> Words:
        """Rounds f32 numbers of a vector; returns its words."""
        if mosaic.is_interpreted():
            return tuple(numbers)

        @inline.code(*numbers, returns=(INT32,) * self.words)
        def converted(*numbers: mgpu.FragmentedArray) -> Any:
            of_word = self.numbers // self.words
            values = list(map(per_thread.scalar, numbers))
            return tuple(
                per_thread.array(packed(values[i : i + of_word], self.dtype), numbers[0])
                for i in range(0, self.numbers, of_word)
            )

        return converted

    def _interpreted(self, row: jax.Array, vector: jax.Array) -> Words:
        # In f32: jnp.take asks NumPy for the dtype's limits, and NumPy has none of bf16.
        values, width = self.ref[...].astype(jnp.float32), self.ref.shape[1]
        first = jnp.clip(row, 0, self.ref.shape[0] - 1) * width + vector * self.numbers
        return tuple(jnp.take(values, first + i, mode="clip") for i in range(self.numbers))

    def _address(
        self, ref: ir.Value, row: mgpu.FragmentedArray, vector: mgpu.FragmentedArray
    ) -> ir.Value:
        terms = [(row, math.prod(self.ref.shape[1:])), (vector, self.numbers)]
        scalars = [(per_thread.scalar(x), stride) for x, stride in terms]
        return stores.device_address(ref, scalars, self.dtype.itemsize)


def unpacked(word: ir.Value, dtype: Any) -> list[ir.Value]:
    """Unpacks a word into f32 numbers, the lower half first."""
    f32 = ir.F32Type.get()
    if dtype == jnp.float32:
        return [llvm.bitcast(f32, word)]
    if dtype == jnp.bfloat16:
        low = arith.shli(word, inline.i32(16))
        high = arith.andi(word, inline.i32(-65536))
        return [llvm.bitcast(f32, low), llvm.bitcast(f32, high)]
    return list(
        mgpu.utils.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            word,
            result_types=[f32, f32],
        )
    )


def packed(numbers: Sequence[ir.Value], dtype: Any) -> ir.Value:
    """Packs f32 numbers into a word, rounded: the inverse of `unpacked`."""
    i32 = ir.IntegerType.get_signless(32)
    if dtype == jnp.float32:
        return llvm.bitcast(i32, numbers[0])
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
    low, high = numbers
    return mgpu.utils.inline_ptx(f"cvt.rn.{kind}.f32 $0, $1, $2;", high, low, result_types=i32)
