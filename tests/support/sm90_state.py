"""The state of `sm90.Machine`: thread blocks, warps, barriers, tensor maps and stores."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

#: Where shared memory, parameters and arrays begin; a shared address is below `PARAMS`.
SHARED = 1024
PARAMS = 1 << 40
ARRAYS = 1 << 44
#: Distance of arrays, in bits.
ARRAY_BITS = 36
#: Of a thread block, at most.
SHARED_BYTES = 227 * 1024


class Trap(Exception):
    """The kernel did what has no defined result."""


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A tensor map: dimensions from the slowest to the fastest, sizes in elements."""

    array: int
    offset: int  # bytes
    element: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int  # bytes; 16: none

    def why_illegal(self) -> str | None:
        if self.offset % 16:
            return f"the array begins {self.offset % 16} bytes past a multiple of 16"
        if any(s * self.element % 16 for s in self.strides[:-1]) or self.strides[-1] != 1:
            return f"strides {self.strides} of {self.element} bytes are no multiples of 16 bytes"
        if not all(1 <= b <= 256 for b in self.box):
            return f"the box {self.box} exceeds 256"
        inner = self.box[-1] * self.element
        if inner % 16 or (self.swizzle > 16 and inner > self.swizzle):
            return f"a row of the box has {inner} bytes, with a swizzle of {self.swizzle}"
        return None

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.element


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        if self.pending < 0:
            raise Trap(f"{-self.pending} more arrivals at a barrier than its {self.count}")
        self.complete()

    def expect(self, count: int) -> None:
        self.bytes += count

    def filled(self, count: int) -> None:
        self.bytes -= count
        self.complete()

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class Block:
    """A thread block: shared memory as threads and as the async proxy see it, and its barriers."""

    def __init__(self, number: int, size: int, registers: int) -> None:
        self.number = number
        self.size = size
        fill = np.full(size, 0xFF, np.uint8)
        self.memory, self.proxy = fill, fill.copy()
        self.barriers: dict[int, Barrier] = {}
        #: Named barriers: threads that have arrived, threads that it takes, completed phases.
        self.named: dict[int, tuple[int, int, int]] = {}
        self.free_registers = 0
        self.registers = registers
        self.warps: list[Warp] = []

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise Trap(f"no barrier at shared address {address}")
        return self.barriers[address]


class Warp:
    """32 threads; `parts` are [next instruction, mask or None for all], one unless diverged."""

    def __init__(self, block: Block, number: int, registers: list[np.ndarray]) -> None:
        self.block, self.number, self.r = block, number, registers
        self.parts: list[list[Any]] = [[0, None]]
        #: None, or what the warp waits for.
        self.blocked: Callable[[], bool] | None = None
        self.dirty: list[np.ndarray] = []
        #: WGMMAs that have not read their operands, oldest first; and groups of them.
        self.products: collections.deque[Callable[[], None]] = collections.deque()
        self.product_groups: list[int] = []
        self.issued = self.done = 0
        #: Stores by TMA: of the group that is being made, and of groups not waited for.
        self.open_stores: list[Store] = []
        self.stores: list[list[Store]] = []
        #: Copies to shared memory by lanes.
        self.copies: list[Callable[[], None]] = []
        self.registers = block.registers

    def multiply_next(self) -> None:
        self.products.popleft()()
        self.done += 1


class Store:
    """A copy from shared to device memory, in two steps."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._read, self._write = read, write
        self.data: Any = None
        self.is_read = self.is_written = False
        #: Whether a wait said that shared memory has been read.
        self.is_awaited = False

    def read(self) -> None:
        if not self.is_read:
            self.data, self.is_read = self._read(), True

    def write(self) -> None:
        self.read()
        if not self.is_written:
            self.is_written = True
            self._write(self.data)

    def finish(self, *, is_written: bool) -> None:
        self.is_awaited = True
        self.read()
        if is_written:
            self.write()
