"""Vectors of eight elements that begin anywhere in device memory.

A load of 16 bytes needs an address that is a multiple of 16. So a thread loads the two vectors that
hold its elements, of which its neighbours load one too, and shifts them together.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

#: Words of two vectors.
WORDS = 8


def load(memory: ir.Value, elements: int, source: ir.Value, valid: ir.Value) -> Any:
    """Words of the one or two whole vectors that hold `valid` elements from `source` on, or 0.

    A vector that ends past the memory's `elements` is not loaded.

    Args:
      memory: device memory, which begins at a multiple of 16 bytes, of 16-bit elements.
      source: an address.
      valid: from 0 to 8.
    """
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    byte = ir.IntegerType.get_signless(8)
    size = mgpu.c(2 * elements, i64)
    end = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [size], byte)
    low, high = ("{" + ", ".join(f"${i + j}" for j in range(4)) + "}" for i in (0, 4))
    return mgpu.utils.inline_ptx(
        "{ .reg .b64 first, next; .reg .b32 size, skipped; .reg .pred p, q; "
        "and.b64 first, $8, -16; "
        "cvt.u32.u64 skipped, $8; and.b32 skipped, skipped, 14; "
        "shl.b32 size, $9, 1; add.s32 size, size, skipped; "
        "add.u64 next, first, 16; setp.le.u64 p, next, $10; setp.gt.and.s32 p, $9, 0, p; "
        "add.u64 next, next, 16; setp.le.u64 q, next, $10; setp.gt.and.s32 q, size, 16, q; "
        + " ".join(f"mov.b32 ${i}, 0;" for i in range(WORDS))
        + f" @p ld.global.nc.v4.b32 {low}, [first];"
        f" @q ld.global.nc.v4.b32 {high}, [first + 16]; }}",
        source,
        valid,
        end,
        result_types=[i32] * WORDS,
        has_side_effects=True,
    )


def store(target: ir.Value, source: ir.Value, valid: ir.Value, words: Any, is_wanted: Any) -> None:
    """Writes the `valid` elements from `source` on, and zeros after them, to a vector of `target`.

    Args:
      target: an address in shared memory, a multiple of 16 bytes.
      words: what `load` returned.
      is_wanted: whether to write.
    """
    lines = [
        ".reg .b32 w0, w1, w2, w3, w4, w5, skipped, t; .reg .pred p;",
        "cvt.u32.u64 skipped, $1;",
        *_moved("8", 2, 6, "${}", offset=4),
        *_moved("4", 1, 5, "w{}"),
        "and.b32 t, skipped, 2; shl.b32 t, t, 3;",
        *(f"shf.r.wrap.b32 w{i}, w{i}, w{i + 1}, t;" for i in range(4)),
        # An invalid element may be NaN, which a product with 0 would keep.
        "shl.b32 skipped, $2, 4;",
    ]
    for i in range(4):
        lines += [
            f"sub.s32 t, skipped, {32 * i}; max.s32 t, t, 0;",
            f"shl.b32 t, -1, t; not.b32 t, t; and.b32 w{i}, w{i}, t;",
        ]
    lines += ["@$3 st.shared.v4.b32 [$0], {w0, w1, w2, w3};"]
    mgpu.utils.inline_ptx(
        "{ " + " ".join(lines) + " }",
        target,
        source,
        valid,
        is_wanted,
        *words,
        has_side_effects=True,
    )


def _moved(bit: str, by: int, count: int, name: str, offset: int = 0) -> list[str]:
    """Moves words down by `by` if the address has a bit."""
    lines = [f"and.b32 t, skipped, {bit}; setp.ne.u32 p, t, 0;"]
    for i in range(count):
        high, low = name.format(i + by + offset), name.format(i + offset)
        lines.append(f"selp.b32 w{i}, {high}, {low}, p;")
    return lines
