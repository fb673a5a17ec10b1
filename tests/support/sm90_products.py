"""Products of `sm90.Machine`: WGMMA on 16-bit operands, with f32 accumulators."""

import functools
import re
from typing import Any

import numpy as np
import ptx
from ptx import Instruction
from sm90_decoder import FLOATS, U32, U64, Decoder, Run, Table, aligned
from sm90_state import SHARED, Trap, Warp


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
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<kind>bf16|f16)\.\w+", products),
    (r"wgmma\.commit_group\S*", commit_products),
    (r"wgmma\.wait_group\S*", wait_products),
]
