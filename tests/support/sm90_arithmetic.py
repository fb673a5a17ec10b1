"""Arithmetic of `sm90.Machine`: of registers, and WGMMA of 16-bit operands with f32 sums."""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import ptx
from ptx import Instruction
from sm90_decoder import FLOATS, KINDS, U32, U64, Decoder, Run, Table, aligned, bits_of, put
from sm90_state import SHARED, Trap, Warp


def _high(a: Any, b: Any) -> Any:
    """The upper half of a product, of whatever width the factors have."""
    shift = 8 * a.dtype.itemsize
    product = (a.astype(object) * b.astype(object)) >> shift
    return product.astype(a.dtype)


def _shift(x: Any, by: Any, left: bool) -> Any:
    width = x.dtype.itemsize * 8
    by = by.astype(np.uint64)
    far = by >= width
    by = np.where(far, width - 1, by).astype(x.dtype)
    if left:
        return np.where(far, 0, x << by).astype(x.dtype)
    result = x >> by
    if x.dtype.kind == "u":
        result = np.where(far, 0, result).astype(x.dtype)
    return result


INTEGER: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a, "neg": lambda a: -a, "abs": np.abs,
    "min": np.minimum, "max": np.maximum,
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
    "mad.lo": lambda a, b, c: a * b + c, "mul.hi": _high,
    "shl": functools.partial(_shift, left=True), "shr": functools.partial(_shift, left=False),
    "div": lambda a, b: (np.trunc(a.astype(np.float64) / b)).astype(a.dtype),
    "rem": lambda a, b: np.fmod(a, b),
    "mov": lambda a: a, "cvta": lambda a: a,
}  # fmt: skip


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (a.astype(np.float64) * b + c).astype(np.float32)


FLOATING: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": _fma,
    "neg": lambda a: -a, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "tanh": np.tanh, "div": lambda a, b: a / b,
    "sin": np.sin, "cos": np.cos,
}  # fmt: skip
COMPARE: dict[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b, "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b, "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: ~(a == b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}  # fmt: skip


def integer(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    function, kind = INTEGER[found["op"]], KINDS[found["kind"]]
    if found["op"] in ("shl", "shr"):
        return d.simple(ins, function, (kind, U32), kind)
    return d.simple(ins, function, kind)


def floating(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    return d.simple(ins, FLOATING[found["op"]], np.float32)


def extreme(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    pairs = {"min": (np.minimum, np.fmin), "max": (np.maximum, np.fmax)}[found["op"]]
    return d.simple(ins, pairs[0 if ".NaN" in ins.name else 1], np.float32)


def halves(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = FLOATS[found["kind"]]
    functions: dict[str, Any] = {
        **FLOATING,
        "fma": lambda a, b, c: (a.astype(np.float64) * b.astype(np.float64) + c).astype(kind),
        "min": np.minimum,
        "max": np.maximum,
    }
    function = functions[found["op"]]

    def of_pairs(*values: Any) -> Any:
        return function(*(x.view(kind) for x in values)).astype(kind).view(U32)

    return d.simple(ins, of_pairs, U32)


def wide(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = KINDS[found["kind"]]
    result = {np.int32: np.int64, np.uint32: np.uint64, np.int16: np.int32, np.uint16: U32}
    out = result[kind]
    if found["op"] == "mul":
        return d.simple(ins, lambda a, b: a.astype(out) * b.astype(out), kind, out)
    return d.simple(ins, lambda a, b, c: a.astype(out) * b.astype(out) + c, (kind, kind, out), out)


def compare(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    function, kind = COMPARE[found["op"]], KINDS[found["kind"]]
    combine = found["with"]
    if not combine:
        return d.simple(ins, function, kind, np.bool_)
    combined = np.logical_and if combine == ".and" else np.logical_or
    kinds = kind, kind, np.bool_
    return d.simple(ins, lambda a, b, c: combined(function(a, b), c), kinds, np.bool_)


def select(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = bits_of(KINDS[found["kind"]])
    return d.simple(ins, lambda a, b, p: np.where(p, a, b), (kind, kind, np.bool_))


def move(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = bits_of(KINDS[found["kind"]])
    target, value = ins.operands
    part = {U32: np.uint16, U64: U32}
    if isinstance(value, tuple):
        sources = [d.source(x, part[kind]) for x in value]

        def pack(warp: Warp, mask: Any) -> None:
            parts = np.stack([warp.r[s] for s in sources], axis=1)
            put(warp, mask, target, np.ascontiguousarray(parts).view(kind)[:, 0])

        return pack
    source = d.source(value, kind)
    if isinstance(target, tuple):

        def unpack(warp: Warp, mask: Any) -> None:
            parts = np.ascontiguousarray(warp.r[source]).view(part[kind]).reshape(32, -1)
            for i, t in enumerate(target):
                put(warp, mask, t, parts[:, i].copy())

        return unpack

    def run(warp: Warp, mask: Any) -> None:
        put(warp, mask, target, warp.r[source])

    return run


def convert(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    to, of = KINDS[found["to"]], KINDS[found["of"]]
    rounding = found["mode"] or ""

    def function(x: Any) -> Any:
        if np.dtype(to).kind in "iu" and np.dtype(of).kind == "f":
            x = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[
                rounding.split(".")[-1]
            ](x)
        value = x.astype(to)
        if np.dtype(to).itemsize == 1:
            value = value.astype(np.int16 if np.dtype(to).kind == "i" else np.uint16)
        return value

    if np.dtype(of).itemsize == 1:
        return d.simple(ins, lambda x: function(x.astype(of)), np.uint16, to)
    return d.simple(ins, function, of, to)


def convert_pair(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = FLOATS[found["kind"]]
    is_relu = ".relu" in ins.name

    def function(high: Any, low: Any) -> Any:
        pair = np.stack([low, high], axis=1)
        if is_relu:
            pair = np.maximum(pair, 0)
        return pair.astype(kind).view(U32)[:, 0]

    return d.simple(ins, function, np.float32, U32)


def bitfield(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = KINDS[found["kind"]]
    bits = bits_of(kind)

    def function(value: Any, begin: Any, width: Any) -> Any:
        x, width = value.astype(U64) >> begin.astype(U64), width.astype(U64)
        x &= (np.uint64(1) << width) - np.uint64(1)
        if found["kind"][0] == "s":
            sign = (x >> (width - np.uint64(1))) & np.uint64(1)
            x = np.where(sign != 0, x | (~np.uint64(0) << width), x)
        return x.astype(bits)

    return d.simple(ins, function, (bits, U32, U32))


def permute(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    def function(low: Any, high: Any, selector: Any) -> Any:
        both, result = low.astype(U64) | high.astype(U64) << U64(32), np.zeros(32, U32)
        for i in range(4):
            chosen = (selector >> U32(4 * i)) & U32(0xF)
            byte = (both >> ((chosen & U32(7)).astype(U64) * U64(8))) & U64(0xFF)
            sign = np.where(byte & U64(0x80), U64(0xFF), U64(0))
            byte = np.where(chosen & U32(8), sign, byte)
            result |= byte.astype(U32) << U32(8 * i)
        return result

    return d.simple(ins, function, U32)


def funnel(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    """Shifts 64 bits, of which the second operand is the upper half, and keeps one half."""

    def shift(low: Any, high: Any, by: Any) -> Any:
        both = low.astype(U64) | high.astype(U64) << U64(32)
        count = (by & U32(31)).astype(U64)
        result = (both << count) >> U64(32) if found["way"] == "l" else both >> count
        return result.astype(U32)

    return d.simple(ins, shift, U32)


def count_bits(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    def count(x: Any) -> Any:
        bits = (x[:, None] >> np.arange(32, dtype=U32)) & U32(1)  # [lane, bit]
        if found["op"] == "popc":
            return bits.sum(axis=1).astype(U32)
        if found["op"] == "brev":
            return (bits[:, ::-1] << np.arange(32, dtype=U32)).sum(axis=1).astype(U32)
        first = np.argmax(bits[:, ::-1], axis=1)
        return np.where(bits.any(axis=1), first, 32).astype(U32)

    return d.simple(ins, count, U32)


_INTEGER = r"(?:pred|[bus](?:16|32|64))"


def products(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    columns, kind = int(found["n"]), FLOATS[found["kind"]]
    targets, a, b, p, *rest = ins.operands
    assert isinstance(targets, tuple)
    if len(targets) != columns // 2 or columns % 8 or columns > 256:
        raise ptx.PtxError(f"line {ins.line}: {len(targets)} registers of {columns} columns")
    signs = [d.program.constants[x] for x in rest]
    if signs[:2] != [1, 1]:
        raise ptx.PtxError(f"line {ins.line}: negated operands")
    transposes = signs[2:]
    b_at, scale = d.source(b, U64), d.source(p, np.bool_)
    from_registers = isinstance(a, tuple)
    a_at = list(a) if isinstance(a, tuple) else [d.source(a, U64)]

    def run(warp: Warp, mask: Any) -> None:
        scales = warp.r[scale]
        if scales.any() != scales.all():
            raise Trap("lanes scale an accumulator differently")
        before = [warp.r[t] for t in targets] if scales[0] else None
        values = [warp.r[x] for x in a_at]
        descriptor = int(warp.r[b_at][0])
        after = np.full((len(targets), 32), np.nan, np.float32)
        for t, row in zip(targets, after, strict=True):
            warp.r[t] = row.view(U32)

        def multiply() -> None:
            if from_registers:
                left = _left_of_registers(values, kind)
            else:
                rows = np.arange(16) + 16 * (warp.number % 4)
                left = _operand(warp, int(values[0][0]), rows, transposes[0], kind)
            right = _operand(warp, descriptor, np.arange(columns), transposes[-1], kind)
            product = left @ right.T
            parts = product.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3)
            total = parts.reshape(-1, 32)
            if before is not None:
                total = total + np.stack([x.view(np.float32) for x in before])
            after[...] = total

        warp.products.append(multiply)
        warp.issued += 1

    return aligned("wgmma", run)


def commit_products(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    def run(warp: Warp, mask: Any) -> None:
        warp.product_groups.append(warp.issued)

    return aligned("wgmma.commit_group", run)


def wait_products(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    most = d.program.constants[ins.operands[0]]

    def run(warp: Warp, mask: Any) -> None:
        over = len(warp.product_groups) - most
        if over > 0:
            while warp.done < warp.product_groups[over - 1]:
                warp.multiply_next()
            del warp.product_groups[:over]

    return aligned("wgmma.wait_group", run)


def _left_of_registers(values: list[np.ndarray], kind: Any) -> np.ndarray:
    """[16, 16] f32 from four registers of two values each."""
    pairs = np.stack(values).view(kind).astype(np.float32)  # [4, 32 * 2]
    parts = pairs.reshape(2, 2, 8, 4, 2)  # [half of k, half of rows, row, pair, value]
    return parts.transpose(1, 2, 0, 3, 4).reshape(16, 16)


@functools.cache
def _offsets(
    first: int, rows: int, is_transposed: int, leading: int, stride: int, swizzle: int
) -> np.ndarray:
    """Offsets [rows, 16] in bytes of an operand's elements, before swizzling."""
    row, k = np.arange(first, first + rows)[:, None], np.arange(16)[None]
    if is_transposed:
        width = swizzle // 2
        return row % width * 2 + row // width * leading + k % 8 * swizzle + k // 8 * stride
    return row % 8 * swizzle + row // 8 * stride + k * 2


def _operand(warp: Warp, descriptor: int, rows: np.ndarray, is_transposed: int, kind: Any) -> Any:
    """Rows of an operand [rows, k] f32 in shared memory; always swizzled."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (((descriptor >> at) & 0x3FFF) << 4 for at in (16, 32))
    swizzle = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62, 0)
    if not swizzle or (descriptor >> 49) & 7:
        raise Trap(f"a matrix descriptor {descriptor:#x} without a swizzle")
    if start & 7 * swizzle:
        raise Trap(f"a matrix begins inside of eight rows, at shared address {start}")
    at = start + _offsets(int(rows[0]), len(rows), is_transposed, leading, stride, swizzle)
    at = at ^ (((at >> 7) & (swizzle // 16 - 1)) << 4)
    at -= SHARED
    if at.min() < 0 or at.max() + 2 > warp.block.size:
        raise Trap(f"a matrix past shared memory, at {start}")
    values = warp.block.proxy.view(np.uint16)[at >> 1]
    return values.view(kind).astype(np.float32)


TABLE: Table = [
    (r"mov\.(?P<kind>\w+)", move),
    (r"cvta(?:\.to)?\.\w+\.(?P<kind>u64)", move),
    (
        r"(?P<op>add|sub|mul\.lo|mul\.hi|mad\.lo|and|or|xor|not|neg|abs|(?:min|max)(?:\.relu)?|shl|shr"
        rf"|div|rem)\.(?P<kind>{_INTEGER})",
        integer,
    ),
    (r"(?P<op>mul|mad)\.wide\.(?P<kind>\w+)", wide),
    (
        r"(?P<op>add|sub|mul|fma|neg|abs|ex2|lg2|rcp|sqrt|rsqrt|tanh|div|sin|cos)"
        r"(?:\.(?:rn|approx|full|ftz))*\.f32",
        floating,
    ),
    (r"(?P<op>min|max)(?:\.NaN|\.ftz)*\.f32", extreme),
    (
        r"(?P<op>add|sub|mul|fma|min|max|neg|tanh)(?:\.rn|\.NaN|\.approx)*\.(?P<kind>bf16|f16)x2",
        halves,
    ),
    (r"setp\.(?P<op>\w+?)(?P<with>\.and|\.or)?(?:\.ftz)?\.(?P<kind>[busf]\d+)", compare),
    (r"selp\.(?P<kind>\w+)", select),
    (r"cvt\.rn(?:\.relu)?\.(?P<kind>bf16|f16)x2\.f32", convert_pair),
    (
        r"cvt(?:\.(?P<mode>[a-z]+(?:\.ftz|\.sat)?))??\.(?P<to>[busf]\w*\d+)\.(?P<of>[busf]\w*\d+)",
        convert,
    ),
    (r"bfe\.(?P<kind>\w+)", bitfield),
    (r"prmt\.b32", permute),
    (r"shf\.(?P<way>[lr])\.wrap\.b32", funnel),
    (r"(?P<op>popc|brev|clz)\.b32", count_bits),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<kind>bf16|f16)\.\w+", products),
    (r"wgmma\.commit_group\S*", commit_products),
    (r"wgmma\.wait_group\S*", wait_products),
]
