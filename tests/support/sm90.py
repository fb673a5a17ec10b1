"""A machine that runs a kernel's PTX on a CPU, warp by warp, as unkindly as Hopper is allowed to.

It stands for what Pallas' interpreter cannot see: addresses and descriptors that kernels compute in
inline PTX, layouts of fragments, alignment, what several thread blocks do to each other.

What Hopper may do in any order happens in an order drawn from a seed:

- Warps of all thread blocks run in turns of random length.
- A copy by TMA reads and writes at any time between its instruction and the wait for it. So does a
  WGMMA read its operands; its registers hold NaN until then.
- The async proxy (TMA, WGMMA) sees what a thread stored in shared memory only after the thread's
  `fence.proxy.async`.

A `Trap` says what the hardware would refuse, or what has no defined result: addresses out of bounds
or not aligned, boxes of TMA, `.aligned` instructions of diverged warps, too many arrivals, exits
before copies have read shared memory, warps that wait for ever.

Memory orders of ordinary loads and stores are not modelled: every store is visible at once.
Clusters are missing.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ptx
import sm90_arithmetic
import sm90_async
import sm90_memory
from sm90_decoder import Decoder
from sm90_state import (
    ARRAY_BITS,
    ARRAYS,
    PARAMS,
    SHARED,
    SHARED_BYTES,
    Block,
    Descriptor,
    Store,
    Trap,
    Warp,
)

_INSTRUCTIONS = [
    (re.compile(pattern), make)
    for module in (sm90_arithmetic, sm90_memory, sm90_async)
    for pattern, make in module.TABLE
]

__all__ = ["PARAMS", "SHARED", "Descriptor", "Machine", "Trap"]


class Machine:
    """Runs one launch.

    Args:
      program: the kernel.
      arrays: device memory, which the launch changes; contiguous.
      params: value of every parameter: a pointer as (array, offset), or descriptors by offset.
      grid: thread blocks.
      shared_bytes: of a thread block.
      registers: per thread, at the kernel's entry.
      seed: of the order of events.
      resident: thread blocks that run at the same time, others begin when one ends.
      most: instructions of all warps before the launch counts as hung.
      blocks: numbers of the thread blocks that run; None for all of the grid.
    """

    def __init__(
        self,
        program: ptx.Program,
        arrays: list[np.ndarray],
        params: list[Any],
        *,
        grid: int,
        shared_bytes: int,
        registers: int = 168,
        seed: int = 0,
        resident: int = 132,
        most: int = 5_000_000,
        blocks: Sequence[int] | None = None,
    ) -> None:
        if shared_bytes > SHARED_BYTES:
            raise Trap(f"{shared_bytes} bytes of shared memory")
        self.program, self.grid, self.shared_bytes = program, grid, shared_bytes
        self.entry_registers, self.resident, self.most = registers, resident, most
        self.blocks = range(grid) if blocks is None else blocks
        self.random = random.Random(seed)
        self.arrays = [x.reshape(-1).view(np.uint8) for x in arrays]
        self.descriptors: dict[int, Descriptor] = {}
        self.params: dict[int, int] = {}
        for at, param in zip(program.params, params, strict=True):
            if isinstance(param, tuple):
                self.params[at] = ARRAYS + (param[0] << ARRAY_BITS) + param[1]
            else:
                for offset, descriptor in param.items():
                    if reason := descriptor.why_illegal():
                        raise Trap(f"{descriptor}: {reason}")
                    self.descriptors[at + offset] = descriptor
        self.pending: list[Callable[[], None]] = []
        self.constants: dict[tuple[int, str], int] = {}
        decoder = Decoder(self)
        for ins in program.instructions:
            if ins.name not in ("bra", "ret"):
                ins.run = decoder.decode(ins, _INSTRUCTIONS)
        self.first: list[Any] = [None] * program.registers + decoder.extra

    # Device memory

    def locate(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The array (its bytes), and offsets in it, of accesses by the lanes of a warp."""
        offset = addresses.astype(np.int64) - ARRAYS
        numbers = offset >> ARRAY_BITS
        array = self.arrays[int(numbers[0])] if 0 <= numbers[0] < len(self.arrays) else None
        offset = offset - (numbers << ARRAY_BITS)
        if array is None or (numbers != numbers[0]).any():
            raise Trap(f"addresses {addresses} are in no array, or in several")
        if (offset % size).any():
            raise Trap(f"an access of {size} bytes at offset {offset[offset % size != 0][0]}")
        if (offset < 0).any() or (offset + size > array.size).any():
            raise Trap(
                f"an access out of bounds: bytes {offset.min()} to {offset.max() + size} of array "
                f"{numbers[0]} with {array.size} bytes"
            )
        return array, offset

    # TMA

    def box(self, descriptor: Descriptor, coordinates: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of a box's elements in the array, and whether they exist; both flat."""
        index, exists = np.zeros((), np.int64), np.ones((), bool)
        first = list(reversed(coordinates))
        if len(first) != len(descriptor.box):
            raise Trap(f"{len(first)} coordinates of a map with box {descriptor.box}")
        if first[-1] * descriptor.element % 16:
            raise Trap(
                f"a copy begins {first[-1] * descriptor.element % 16} bytes past a multiple of 16"
            )
        for begin, size, stride, extent in zip(
            first, descriptor.sizes, descriptor.strides, descriptor.box, strict=True
        ):
            at = begin + np.arange(extent)
            index = index[..., None] + at * stride
            exists = exists[..., None] & (at >= 0) & (at < size)
        return index.reshape(-1), exists.reshape(-1)

    def shared_box(self, descriptor: Descriptor, address: int) -> np.ndarray:
        """Offsets in shared memory of the bytes of a box."""
        if address % 128:
            raise Trap(f"a copy's shared address {address} is no multiple of 128")
        at = address + np.arange(descriptor.bytes)
        if descriptor.swizzle > 16:
            vectors = descriptor.swizzle // 16 - 1
            at ^= ((at >> 7) & vectors) << 4
        at -= SHARED
        if at.min() < 0 or at.max() >= self.shared_bytes:
            raise Trap(f"a copy past shared memory, at {address}")
        return at

    def elements(self, descriptor: Descriptor) -> np.ndarray:
        kind = {2: np.uint16, 4: np.uint32}[descriptor.element]
        return self.arrays[descriptor.array][descriptor.offset :].view(kind)

    def load(
        self, block: Block, map_at: int, coordinates: list[int], address: int, barrier: int
    ) -> None:
        descriptor = self.descriptor(map_at)
        index, exists = self.box(descriptor, coordinates)
        target = self.shared_box(descriptor, address)
        completes = block.barrier(barrier)

        def run() -> None:
            memory = self.elements(descriptor)
            values = np.where(exists, memory[np.where(exists, index, 0)], 0).astype(memory.dtype)
            block.memory[target] = block.proxy[target] = values.view(np.uint8)
            completes.filled(descriptor.bytes)

        self.pending.append(run)

    def store(
        self, warp: Warp, map_at: int, coordinates: list[int], address: int, *, adds: bool
    ) -> None:
        descriptor = self.descriptor(map_at)
        index, exists = self.box(descriptor, coordinates)
        source = self.shared_box(descriptor, address)
        block = warp.block

        def read() -> np.ndarray:
            kind = {2: np.uint16, 4: np.uint32}[descriptor.element]
            return block.proxy[source].view(kind)

        def write(values: np.ndarray) -> None:
            memory, at = self.elements(descriptor), index[exists]
            if adds:
                sums = memory[at].view(np.float32) + values[exists].view(np.float32)
                memory[at] = sums.view(np.uint32)
            else:
                memory[at] = values[exists]

        store = Store(read, write)
        warp.open_stores.append(store)
        self.pending += [store.read, store.write]

    def copy(self, warp: Warp, shared: int, device: int, size: int, barrier: int | None) -> None:
        """Copies contiguous bytes: to shared memory if there is a barrier, else from it."""
        block = warp.block
        if shared % 16 or size % 16:
            raise Trap(f"a copy of {size} bytes at shared address {shared}: not multiples of 16")
        if shared < SHARED or shared + size > SHARED + self.shared_bytes:
            raise Trap(f"a copy past shared memory, at {shared}")
        array, first = self.locate(np.asarray([device]), 16)
        begin, at = int(first[0]), shared - SHARED
        if begin + size > array.size:
            raise Trap(f"a copy out of bounds: {begin + size} bytes of {array.size}")
        if barrier is None:
            store = Store(
                lambda: block.proxy[at : at + size].copy(),
                lambda values: array.__setitem__(slice(begin, begin + size), values),
            )
            warp.open_stores.append(store)
            self.pending += [store.read, store.write]
            return
        completes = block.barrier(barrier)

        def load() -> None:
            block.memory[at : at + size] = block.proxy[at : at + size] = array[begin : begin + size]
            completes.filled(size)

        self.pending.append(load)

    def descriptor(self, address: int) -> Descriptor:
        if address not in self.descriptors:
            raise Trap(f"no tensor map at {address}")
        return self.descriptors[address]

    # Running

    def start(self, number: int) -> Block:
        block = Block(number, self.shared_bytes, self.entry_registers)
        threads, special = self.program.threads, self.program.special
        for w in range(threads // ptx.LANES):
            registers = list(self.first)
            lanes = np.arange(ptx.LANES, dtype=np.uint32)
            registers[special["%tid.x"]] = lanes + np.uint32(w * ptx.LANES)
            registers[special["%laneid"]] = lanes
            registers[special["%lanemask_lt"]] = (np.uint32(1) << lanes) - np.uint32(1)
            for name, value in (
                ("%ctaid.x", number),
                ("%nctaid.x", self.grid),
                ("%ntid.x", threads),
            ):
                registers[special[name]] = ptx.splat(value, np.uint32)
            block.warps.append(Warp(block, w, registers))
        return block

    def run(self) -> None:
        """Runs the launch to its end; raises Trap."""
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        waiting = list(self.blocks)
        running: list[Warp] = []
        blocks = 0
        steps = 0
        while waiting or running:
            while waiting and blocks < self.resident:
                running += self.start(waiting.pop(0)).warps
                blocks += 1
            ready = [w for w in running if w.blocked is None or w.blocked()]
            if self.pending and (not ready or self.random.random() < 0.3):
                self.complete_one(running)
                continue
            if not ready:
                if any(w.products for w in running):
                    raise AssertionError("products are only waited for by their warp")
                raise Trap(f"all warps wait: {self.describe(running)}")
            warp = self.random.choice(ready)
            warp.blocked = None
            if warp.products and self.random.random() < 0.5:
                warp.multiply_next()
            steps += self.turn(warp, self.random.choice((3, 30, 300, 3000)))
            if steps > self.most:
                raise Trap(f"no end after {steps} instructions: {self.describe(running)}")
            if not warp.parts:
                running.remove(warp)
                self.end(warp)
                if not any(w.block is warp.block for w in running):
                    blocks -= 1
        for run in self.pending:
            run()

    def complete_one(self, running: list[Warp]) -> None:
        at = self.random.randrange(len(self.pending))
        self.pending[at], self.pending[-1] = self.pending[-1], self.pending[at]
        self.pending.pop()()

    def turn(self, warp: Warp, most: int) -> int:
        """Executes up to `most` instructions of a warp; returns how many."""
        instructions = self.program.instructions
        for count in range(most):
            part = min(warp.parts, key=lambda p: p[0]) if len(warp.parts) > 1 else warp.parts[0]
            at, mask = part
            ins = instructions[at]
            if ins.predicate >= 0:
                p = warp.r[ins.predicate]
                if ins.is_negated:
                    p = ~p
                if mask is not None:
                    p = p & mask
                if ins.name != "bra":
                    if not p.any():
                        part[0] = at + 1
                        continue
                    mask = None if p.all() else p
                else:
                    self.branch(warp, part, p, ins.target)
                    continue
            elif ins.name == "bra":
                part[0] = ins.target
                self.merge(warp)
                continue
            if ins.name == "ret":
                warp.parts.remove(part)
                if not warp.parts:
                    return count
                continue
            try:
                is_blocked = ins.run(warp, mask)
            except Trap as trap:
                place = f"line {ins.line}, {ins.name}, warp {warp.number} of {warp.block.number}"
                raise Trap(f"{trap} ({place})") from None
            if is_blocked:
                return count + 1
            part[0] = at + 1
            if warp.blocked is not None:
                return count + 1
            if len(warp.parts) > 1:
                self.merge(warp)
        return most

    def branch(self, warp: Warp, part: list[Any], taken: np.ndarray, target: int) -> None:
        mask = part[1]
        rest = ~taken if mask is None else mask & ~taken
        if not rest.any():
            part[0] = target
        elif not taken.any():
            part[0] += 1
        else:
            part[0], part[1] = part[0] + 1, rest
            warp.parts.append([target, taken])
        self.merge(warp)

    @staticmethod
    def merge(warp: Warp) -> None:
        if len(warp.parts) < 2:
            return
        by_place: dict[int, list[Any]] = {}
        for part in warp.parts:
            if part[0] in by_place:
                other = by_place[part[0]]
                other[1] = other[1] | part[1]
            else:
                by_place[part[0]] = part
        warp.parts = list(by_place.values())
        for part in warp.parts:
            if part[1] is not None and part[1].all():
                part[1] = None

    def end(self, warp: Warp) -> None:
        """Checks a warp that has ended."""
        stores = [s for group in (*warp.stores, warp.open_stores) for s in group]
        if not all(store.is_awaited for store in stores):
            raise Trap(f"warp {warp.number} ends before TMA has read what it stores")
        if warp.products:
            raise Trap(f"warp {warp.number} ends before its products")

    def describe(self, running: list[Warp]) -> str:
        lines = []
        for warp in running[:24]:
            ins = self.program.instructions[min(p[0] for p in warp.parts)]
            lines.append(f"block {warp.block.number} warp {warp.number} line {ins.line} {ins.name}")
        return "; ".join(lines)
