"""What the instructions of `sm90.Machine` share: operands, registers, addresses.

An instruction becomes a function of a warp and a mask (None: all lanes), which returns whether the
warp has to try again later. Registers are arrays of 32 lanes, never changed in place, except that a
WGMMA fills in the registers that it has left as NaN.
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import ptx
from ptx import Instruction, Memory
from sm90_state import SHARED, Trap, Warp

Run = Callable[[Warp, Any], Any]
#: Patterns of names, and what makes their functions.
Maker = Callable[[Any, Instruction, re.Match[str]], Run]
Table = list[tuple[str, Maker]]
U32, U64 = np.uint32, np.uint64
FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
KINDS: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16,
    "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16,
}  # fmt: skip


def bits_of(kind: Any) -> Any:
    """The dtype of a register that holds a value of `kind`."""
    if kind is np.bool_:
        return kind
    return {1: np.uint16, 2: np.uint16, 4: U32, 8: U64}[np.dtype(kind).itemsize]


def put(warp: Warp, mask: Any, target: int | None, value: np.ndarray) -> None:
    if target is None:
        return
    if mask is not None:
        old = warp.r[target]
        value = np.where(mask, value, np.zeros_like(value) if old is None else old)
    warp.r[target] = value


def lanes(mask: Any, values: np.ndarray) -> np.ndarray:
    return values if mask is None else values[mask]


def aligned(name: str, run: Run) -> Run:
    """An instruction that all lanes of a warp must execute together."""

    def checked(warp: Warp, mask: Any) -> Any:
        if mask is not None:
            raise Trap(f"a diverged warp executes {name}")
        return run(warp, mask)

    return checked


class Decoder:
    def __init__(self, machine: Any) -> None:
        self.machine, self.program = machine, machine.program
        self.extra: list[np.ndarray] = []
        self.known: dict[tuple[int, str], int] = {}

    def source(self, operand: Any, kind: Any) -> int:
        """The register of an operand; constants get one for each width."""
        assert isinstance(operand, int), operand
        if operand not in self.program.constants:
            return operand
        bits = bits_of(kind)
        key = (self.program.constants[operand], np.dtype(bits).name)
        if key not in self.known:
            self.known[key] = self.program.registers + len(self.extra)
            value = ptx.splat(key[0], bits) if bits is not np.bool_ else np.full(32, bool(key[0]))
            self.extra.append(value)
        return self.known[key]

    def decode(self, ins: Instruction, table: list[tuple[re.Pattern[str], Maker]]) -> Run:
        for pattern, make in table:
            if found := pattern.fullmatch(ins.name):
                return make(self, ins, found)
        raise ptx.PtxError(f"line {ins.line}: unknown instruction {ins.name}")

    def simple(
        self, ins: Instruction, function: Callable[..., Any], kind: Any, result: Any = None
    ) -> Run:
        """Computes the target by a function; `kind` is of all operands, or has one for each."""
        target, *operands = ins.operands
        kinds = kind if isinstance(kind, tuple) else (kind,) * len(operands)
        sources = [
            (self.source(x, k), k, k is not bits_of(k))
            for x, k in zip(operands, kinds, strict=True)
        ]
        out = bits_of(result or kinds[0])

        def run(warp: Warp, mask: Any) -> None:
            values = [warp.r[s].view(k) if has_view else warp.r[s] for s, k, has_view in sources]
            value = function(*values)
            if value.dtype != out:
                value = value.view(out)
            put(warp, mask, target, value)

        return run

    def address(self, memory: Any, *, is_shared: bool) -> Callable[[Warp], np.ndarray]:
        """Addresses as int64."""
        assert isinstance(memory, Memory)
        base, offset = self.source(memory.base, U64), memory.offset

        def addresses(warp: Warp) -> np.ndarray:
            at = warp.r[base].astype(np.int64) + offset
            return at & 0xFFFFFFFF if is_shared else at

        return addresses

    def shared_at(self, warp: Warp, addresses: np.ndarray, size: int) -> np.ndarray:
        at = addresses - SHARED
        if (addresses % size).any():
            raise Trap(
                f"an access of {size} bytes at shared address {addresses[addresses % size != 0][0]}"
            )
        if at.min() < 0 or at.max() + size > warp.block.size:
            raise Trap(f"shared addresses {addresses.min()} to {addresses.max() + size}")
        return at
