"""Inline code, and the numbers and addresses in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.problems.hopper import WGMMA_M

#: An int32 scalar that inline code returns.
INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


class Typed(NamedTuple):
    """An operand of `code`, and its layout or the type of its memory."""

    value: Any
    type: Any


def code(*operands: Any, returns: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function as inline code on operands; its name becomes the result.

    Operands are memory without transforms, or arrays: a scalar, which is an `Integer` in inline
    code, [64] rows of an accumulator, [64, columns], or an element for every thread. Operands of
    other memory or layouts are `Typed`. `returns`: arrays, or types, of the results' shapes and
    dtypes; for an int32 scalar or one element for every thread, inline code returns a value.
    """
    typed = [x if isinstance(x, Typed) else Typed(x, _type_of(x)) for x in operands]
    results = jax.tree.map(
        lambda x: plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_layout(x.shape)), returns
    )

    def run(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def with_integers(_: Any, *arguments: Any) -> Any:
            found = function(*map(_unpacked, arguments))
            return jax.tree.map(_packed, found, results, is_leaf=_is_array)

        types = tuple(x.type for x in typed)
        inlined = plgpu.inline_mgpu(arg_types=types, return_type=results)(with_integers)
        return inlined(*(x.value for x in typed))

    return run


def _type_of(operand: Any) -> Any:
    if not isinstance(getattr(operand, "aval", None), jax.core.ShapedArray):
        return plgpu.RefType()
    return _layout(operand.shape)


def _layout(shape: tuple[int, ...]) -> Any:
    if len(shape) == 2:
        return plgpu.Layout.WGMMA
    if shape == (WGMMA_M,):
        return plgpu.Layout.WGMMA.reduce(1)
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1) if shape else plgpu.Layout.WG_SPLAT(())


def _is_array(value: Any) -> bool:
    return isinstance(value, mgpu.FragmentedArray)


def _unpacked(argument: Any) -> Any:
    is_scalar = _is_array(argument) and not argument.shape
    return Integer(argument.registers.item()) if is_scalar else argument


def _packed(result: Any, kind: Any) -> Any:
    if _is_array(result):
        return result
    if kind.shape:
        return array([result], kind.shape)
    return mgpu.FragmentedArray.splat(result, (), is_signed=True)


def _operator(operation: Any) -> Callable[[Any, ir.Value | int], Integer]:
    """Makes a method of `Integer` of an operation on two values of the same type."""
    return lambda self, other: Integer(operation(self, _constant(other, self.type)))


def _comparison(predicate: arith.CmpIPredicate) -> Callable[[Any, ir.Value | int], Integer]:
    return _operator(functools.partial(arith.cmpi, predicate))


class Integer(ir.Value):
    """An integer of inline code, or a predicate, with Python's operators.

    The other operand is a value of the same type, or an int, which becomes a constant. Quotients,
    remainders and right shifts are of unsigned integers, comparisons by operators of signed ones.
    """

    def __init__(self, value: ir.Value) -> None:
        super().__init__(value)

    __add__ = _operator(arith.addi)
    __sub__ = _operator(arith.subi)
    __mul__ = _operator(arith.muli)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __xor__ = _operator(arith.xori)
    __rshift__ = _operator(arith.shrui)
    __lt__ = _comparison(arith.CmpIPredicate.slt)
    __gt__ = _comparison(arith.CmpIPredicate.sgt)
    __ge__ = _comparison(arith.CmpIPredicate.sge)
    # Of unsigned integers: <, >, <=.
    below = _comparison(arith.CmpIPredicate.ult)
    above = _comparison(arith.CmpIPredicate.ugt)
    not_above = _comparison(arith.CmpIPredicate.ule)
    equals = _comparison(arith.CmpIPredicate.eq)
    differs = _comparison(arith.CmpIPredicate.ne)
    # The smaller of both, signed, and the larger.
    at_most = _operator(arith.minsi)
    at_least = _operator(arith.maxsi)

    def __rsub__(self, other: int) -> Integer:
        return Integer(arith.subi(_constant(other, self.type), self))

    def select(self, on_true: ir.Value | int, on_false: ir.Value | int) -> Integer:
        """Selects by a predicate; two ints have 32 bits."""
        values = [x for x in (on_true, on_false) if not isinstance(x, int)]
        kind = values[0].type if values else ir.IntegerType.get_signless(32)
        return Integer(arith.select(self, _constant(on_true, kind), _constant(on_false, kind)))

    def extended(self) -> Integer:
        """Makes 0 or 1 of 32 bits of a predicate."""
        return Integer(arith.extui(ir.IntegerType.get_signless(32), self))


def _constant(value: ir.Value | int, kind: ir.Type) -> ir.Value:
    return mgpu.c(value, kind) if isinstance(value, int) else value


def i32(value: int) -> Integer:
    """Makes a constant of 32 bits."""
    return Integer(mgpu.c(value, ir.IntegerType.get_signless(32)))


def bit(number: int) -> int:
    """Returns 2**number as a signed integer of 32 bits."""
    return 1 << number if number < 31 else -(1 << 31)


def f32(value: float) -> ir.Value:
    """Makes an f32 constant."""
    return mgpu.c(value, ir.F32Type.get())


def address(ref: ir.Value, index: ir.Value, bits: int = 32) -> ir.Value:
    """Computes the address of element `index` of an array of `bits`-bit elements."""
    element = ir.IntegerType.get_signless(bits)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], element)


def word(value: ir.Value) -> Integer:
    """Reinterprets a value of 32 bits as an integer."""
    return Integer(mgpu.utils.bitcast(value, ir.IntegerType.get_signless(32)))


def issue(ptx: str, *operands: ir.Value, **options: Any) -> Any:
    """Issues PTX that LLVM neither moves nor drops."""
    return mgpu.utils.inline_ptx(ptx, *operands, has_side_effects=True, **options)


def issue_word(ptx: str, *operands: ir.Value, **options: Any) -> Integer:
    """Issues PTX like `issue`; returns its result of 32 bits."""
    return Integer(issue(ptx, *operands, result_types=ir.IntegerType.get_signless(32), **options))


def issue_words(ptx: str, count: int, *operands: ir.Value, **options: Any) -> list[Integer]:
    """Issues PTX like `issue`; returns its `count` results of 32 bits."""
    kinds = [ir.IntegerType.get_signless(32)] * count
    return [Integer(x) for x in issue(ptx, *operands, result_types=kinds, **options)]


def compute_word(ptx: str, *operands: ir.Value) -> Integer:
    """Computes 32 bits by PTX that LLVM may move or drop."""
    kind = ir.IntegerType.get_signless(32)
    return Integer(mgpu.utils.inline_ptx(ptx, *operands, result_types=kind))


def array(values: Sequence[ir.Value], shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    """Makes an array of a thread's elements; [64, columns] of pairs of neighbouring elements."""
    if len(shape) == 1:
        kind = ir.VectorType.get((1,), values[0].type)
        values = [vector.from_elements(kind, [x]) for x in values]
    layout = _layout(shape).to_mgpu()
    registers = np.array(values, dtype=object).reshape(layout.registers_shape(shape))
    is_signed = True if isinstance(values[0].type.element_type, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def accumulator(registers: np.ndarray) -> mgpu.FragmentedArray:
    """Makes an array in an accumulator's layout from its registers."""
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
