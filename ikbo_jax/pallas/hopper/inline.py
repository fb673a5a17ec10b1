"""Numbers and addresses in inline code."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector


def i32(value: int) -> ir.Value:
    """Makes a constant of 32 bits."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def f32(value: float) -> ir.Value:
    """Makes an f32 constant."""
    return mgpu.c(value, ir.F32Type.get())


def address(ref: ir.Value, index: ir.Value, bits: int = 32) -> ir.Value:
    """Computes the address of element `index` of an array of `bits`-bit elements."""
    element = ir.IntegerType.get_signless(bits)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], element)


def word(value: ir.Value) -> ir.Value:
    """Reinterprets a value of 32 bits as an integer."""
    return mgpu.utils.bitcast(value, ir.IntegerType.get_signless(32))


def issue(ptx: str, *operands: ir.Value, **options: Any) -> Any:
    """Issues PTX that LLVM neither moves nor drops."""
    return mgpu.utils.inline_ptx(ptx, *operands, has_side_effects=True, **options)


def issue_word(ptx: str, *operands: ir.Value, **options: Any) -> ir.Value:
    """Issues PTX like `issue`; returns its result of 32 bits."""
    return issue(ptx, *operands, result_types=ir.IntegerType.get_signless(32), **options)


def compute_word(ptx: str, *operands: ir.Value) -> ir.Value:
    """Computes 32 bits by PTX that LLVM may move or drop."""
    return mgpu.utils.inline_ptx(ptx, *operands, result_types=ir.IntegerType.get_signless(32))


def load_vector(address: ir.Value, width: int) -> list[ir.Value]:
    """Loads `width` neighbouring words of 32 bits."""
    kind = ir.VectorType.get((width,), ir.IntegerType.get_signless(32))
    loaded = llvm.load(kind, address, alignment=4 * width)
    return [vector.extract(loaded, [], [i]) for i in range(width)]


def accumulator(registers: np.ndarray) -> mgpu.FragmentedArray:
    """Makes an array in an accumulator's layout from its registers."""
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
