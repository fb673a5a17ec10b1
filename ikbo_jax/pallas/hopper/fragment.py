"""Fragments: accumulators [64, columns] f32 that CTAs exchange through device memory.

A fragment holds f32 values rounded to 24 bits (16 significant bits, f32's range) in two planes: the
upper 16 bits of every value, which are a bf16, and the 8 bits below. It takes three quarters of the
traffic of f32, and its rounding is 1/256 of the final one to bf16, or 1/32 of that to f16.

Word w of thread t in group g of 16 columns is at [g, t, w], so every access of a warp is
contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ikbo_jax.pallas.hopper import inline, mosaic
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.hopper import WARPGROUP_SIZE


class Fragment(NamedTuple):
    """A fragment in registers; or its type; or the device memory that holds it."""

    upper: Any  # bf16 [64, columns] in WGMMA layout; memory: int32 [columns / 16, 128, 4]
    lower: Any  # int32 [columns / 8 * 128]; memory: int32 [columns / 16, 128, 2]

    def part(self, index: tuple[Any, ...], begin: Any, columns: int) -> Fragment:
        """Selects `columns` columns from `begin` on of a fragment of an array in device memory."""
        part: Any = pl.ds(begin // 16, columns // 16)
        if mosaic.is_interpreted():
            part = (slice(None), pl.ds(begin, columns))
        return Fragment(*(plane.at[index].at[part] for plane in self))


def types(columns: int, leading: tuple[int, ...], threads: int = WARPGROUP_SIZE) -> Fragment:
    """Declares an array of fragments in device memory; each is of `threads` threads."""
    if mosaic.is_interpreted():
        shape = (*leading, threads // 2, columns)
        return Fragment(*(jax.ShapeDtypeStruct(shape, jnp.float32),) * 2)
    shape = (*leading, columns // 16, threads)
    return Fragment(*(jax.ShapeDtypeStruct((*shape, words), jnp.int32) for words in (4, 2)))


def device_pointer(ref: ir.Value) -> ir.Value:
    """Makes a pointer in the global address space; generic pointers take slower instructions."""
    return llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(ref))


def _offset(address: ir.Value, words: ir.Value) -> ir.Value:
    return mgpu.utils.getelementptr(address, [words], ir.IntegerType.get_signless(32))


def _own_words(plane: ir.Value, width: int) -> ir.Value:
    """Computes the address of this thread's first vector of `width` words."""
    thread = Integer(mgpu.thread_idx()) % WARPGROUP_SIZE
    return _offset(device_pointer(plane), thread * width)


def load_words(
    address: ir.Value, vectors: int, width: int, threads: int = WARPGROUP_SIZE
) -> list[ir.Value]:
    """Loads `vectors` vectors of `width` words, `threads` vectors apart."""
    kind, words = _vector_type(width), []
    for v in range(vectors):
        at = _offset(address, inline.i32(v * threads * width))
        loaded = llvm.load(kind, at, alignment=4 * width)
        words += [vector.extract(loaded, [], [i]) for i in range(width)]
    return words


def _vector_type(width: int) -> ir.Type:
    return ir.VectorType.get((width,), ir.IntegerType.get_signless(32))


def load(memory: Fragment, columns: int) -> Fragment:
    """Issues the loads of a fragment; they complete while the caller continues."""
    if mosaic.is_interpreted():
        return Fragment(memory.upper[...], memory.lower[...])

    @inline.code(*memory, returns=register_types(columns))
    def issued(upper: ir.Value, lower: ir.Value) -> Any:
        return (
            upper_in_registers(load_words(_own_words(upper, 4), columns // 16, 4), columns),
            lower_in_registers(load_words(_own_words(lower, 2), columns // 16, 2)),
        )

    return Fragment(*issued)


def register_types(columns: int) -> tuple[Any, Any]:
    """Declares a fragment in registers."""
    return (
        jax.ShapeDtypeStruct((64, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((columns // 8 * WARPGROUP_SIZE,), jnp.int32),
    )


def upper_in_registers(words: list[ir.Value], columns: int) -> mgpu.FragmentedArray:
    """Packs a thread's words into the upper plane of a fragment."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    return inline.array([mgpu.utils.bitcast(word, pair) for word in words], (64, columns))


def lower_in_registers(words: list[ir.Value]) -> mgpu.FragmentedArray:
    """Packs a thread's low bytes into the lower plane of a fragment."""
    return inline.array(words, (len(words) * WARPGROUP_SIZE,))


def store(memory: Fragment, value: jax.Array) -> None:
    """Stores an accumulator [64, columns] f32 as a fragment."""
    if mosaic.is_interpreted():
        memory.upper[...] = value
        memory.lower[...] = jnp.zeros_like(value)
        return

    @inline.code(*memory, value)
    def _(upper: ir.Value, lower: ir.Value, array: mgpu.FragmentedArray) -> None:
        for plane, width, words in zip((upper, lower), (4, 2), words_of(array), strict=True):
            address = _own_words(plane, width)
            for i in range(0, len(words), width):
                at = _offset(address, inline.i32(i * WARPGROUP_SIZE))
                stored = vector.from_elements(_vector_type(width), words[i : i + width])
                llvm.store(stored, at, alignment=4 * width)


def words_of(array: mgpu.FragmentedArray) -> tuple[list[ir.Value], list[ir.Value]]:
    """Rounds an f32 accumulator to the words of both planes."""
    bits = [
        _round_to_24_bits(inline.word(vector.extract(pair, [], [i])))
        for pair in array.registers.flat
        for i in range(2)
    ]
    uppers = [_permute_bytes(a, b, 0x7632) for a, b in zip(bits[::2], bits[1::2], strict=True)]
    halves = [_permute_bytes(a, b, 0x0051) for a, b in zip(bits[::2], bits[1::2], strict=True)]
    lowers = [_permute_bytes(a, b, 0x5410) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    return uppers, lowers


def _permute_bytes(a: ir.Value, b: ir.Value, selector: int) -> ir.Value:
    """Selects byte selector[i] of b:a as byte i of the result."""
    return inline.compute_word(f"prmt.b32 $0, $1, $2, 0x{selector:04x};", a, b)


def _round_to_24_bits(bits: Integer) -> Integer:
    """Rounds the bits of a finite f32 so that `add`, which copies byte 1 to byte 0, recovers 16
    bits.

    Subtracting half of that range before truncation centres the error.
    """
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude.below(0x7F7FFF00)
    low = (bits >> 8) & 0xFF
    rounded = bits - low + 0x80
    # Bits below 0x100 would wrap: denormal numbers are truncated without rounding.
    normal = magnitude.above(0x00800000)
    return (finite & normal).select(rounded, bits)


def add(acc: jax.Array, fragment: Fragment) -> jax.Array:
    """Computes acc + fragment, f32 [64, columns]."""
    if mosaic.is_interpreted():
        return acc + fragment.upper

    @inline.code(acc, *fragment, returns=acc)
    def sums(acc: Any, upper: Any, lower: Any) -> Any:
        f32 = ir.F32Type.get()
        lowers = [vector.extract(r, [], [0]) for r in lower.registers.flat]
        registers = acc.registers.copy()
        pairs = zip(upper.registers.flat, acc.registers.flat, strict=True)
        for r, (pair, value) in enumerate(pairs):
            word = inline.word(pair)
            low = lowers[r // 2]
            pair_sum = []
            for i in range(2):
                byte = 4 + 2 * (r % 2) + i
                selector = (0x1000 if i == 0 else 0x3000) + (0x0000 if i == 0 else 0x0200)
                selector += (byte << 4) + byte
                bits = _permute_bytes(word, low, selector)
                pair_sum.append(
                    arith.addf(vector.extract(value, [], [i]), mgpu.utils.bitcast(bits, f32))
                )
            registers.flat[r] = vector.from_elements(ir.VectorType.get((2,), f32), pair_sum)
        return inline.accumulator(registers)

    return sums
