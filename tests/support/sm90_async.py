"""Synchronisation and TMA of `sm90.Machine`: barriers, registers of warpgroups, copies."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from ptx import Instruction, Memory
from sm90_decoder import U32, Decoder, Run, Table, aligned, lanes, put
from sm90_state import Barrier, Trap, Warp


def barrier_at(d: Decoder, memory: Any) -> Callable[[Warp, Any], Barrier]:
    addresses = d.address(memory, is_shared=True)

    def find(warp: Warp, mask: Any) -> Barrier:
        at = lanes(mask, addresses(warp))
        if (at != at[0]).any():
            raise Trap("lanes use several barriers")
        return warp.block.barrier(int(at[0]))

    return find


def barrier_init(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    memory, count = ins.operands
    addresses, source = d.address(memory, is_shared=True), d.source(count, U32)

    def run(warp: Warp, mask: Any) -> None:
        for at in lanes(mask, addresses(warp)):
            d.shared_at(warp, np.asarray([at]), 8)
            warp.block.barriers[int(at)] = Barrier(int(warp.r[source][0]))

    return run


def barrier_arrive(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    memory, *rest = ins.operands[1:]
    find, mode = barrier_at(d, memory), found["mode"] or ""
    source = d.source(rest[0], U32) if rest else -1

    def run(warp: Warp, mask: Any) -> None:
        barrier = find(warp, mask)
        values = np.ones(32, np.int64) if source < 0 else warp.r[source].astype(np.int64)
        total = int(lanes(mask, values).sum())
        if "expect_tx" in mode:
            barrier.expect(total)
            total = len(lanes(mask, values))
        if "noComplete" in mode and barrier.pending <= total:
            raise Trap("an arrival that must not complete its barrier does")
        barrier.arrive(total)

    return run


def barrier_expect(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    memory, count = ins.operands
    find, source = barrier_at(d, memory), d.source(count, U32)
    sign = -1 if found["op"] == "complete_tx" else 1

    def run(warp: Warp, mask: Any) -> None:
        barrier = find(warp, mask)
        barrier.expect(sign * int(lanes(mask, warp.r[source]).sum()))
        barrier.complete()

    return run


def barrier_wait(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    target, memory, parity = ins.operands[:3]
    find, source = barrier_at(d, memory), d.source(parity, U32)

    def run(warp: Warp, mask: Any) -> Any:
        barrier, parities = find(warp, mask), lanes(mask, warp.r[source])
        if (parities != parities[0]).any():
            raise Trap("lanes wait for different phases")
        parity = int(parities[0]) & 1
        if barrier.phase & 1 == parity:
            warp.blocked = lambda: barrier.phase & 1 != parity
            return True
        put(warp, mask, target, np.ones(32, bool))
        return False

    return run


def named(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    number, *rest = (d.source(x, U32) for x in ins.operands)
    is_sync = found["op"] == "sync"

    def run(warp: Warp, mask: Any) -> None:
        numbers = lanes(mask, warp.r[number])
        if (numbers != numbers[0]).any() or numbers[0] > 15:
            raise Trap(f"named barriers {numbers}")
        key = int(numbers[0])
        count = int(warp.r[rest[0]][0]) if rest else d.program.threads
        arrived, wanted, generation = warp.block.named.get(key, (0, count, 0))
        if arrived and wanted != count:
            raise Trap(f"named barrier {key} is used with {wanted} and {count} threads")
        arrived += 32
        if arrived == count:
            warp.block.named[key] = (0, count, generation + 1)
            return
        warp.block.named[key] = (arrived, count, generation)
        if is_sync:
            block = warp.block
            warp.blocked = lambda: block.named[key][2] != generation

    return run


def registers(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    count = d.program.constants[ins.operands[0]]
    is_more = found["op"] == "inc"

    def run(warp: Warp, mask: Any) -> Any:
        block, more = warp.block, count - warp.registers
        if count % 8 or (more < 0) == is_more:
            raise Trap(f"setmaxnreg from {warp.registers} to {count}")
        if more > block.free_registers:
            warp.blocked = lambda: block.free_registers >= more
            return True
        block.free_registers -= more
        warp.registers = count
        return False

    return aligned("setmaxnreg", run)


def tensor(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    is_load = found["to"].startswith("shared")
    if is_load:
        shared, tensor, barrier = ins.operands
        barriers = d.address(barrier, is_shared=True)
    else:
        tensor, shared = ins.operands
    assert isinstance(tensor, Memory)
    maps = d.address(Memory(tensor.base, tensor.offset), is_shared=False)
    places = d.address(shared, is_shared=True)
    coordinates = [d.source(c, U32) for c in tensor.coordinates]
    machine = d.machine
    adds = ".add" in ins.name

    def run(warp: Warp, mask: Any) -> None:
        chosen = np.arange(32) if mask is None else np.flatnonzero(mask)
        if len(chosen) != 1:
            raise Trap(f"{len(chosen)} lanes issue the same copy")
        lane = chosen[0]
        first = [int(warp.r[c].view(np.int32)[lane]) for c in coordinates]
        at, place = int(maps(warp)[lane]), int(places(warp)[lane])
        if is_load:
            machine.load(warp.block, at, first, place, int(barriers(warp)[lane]))
        else:
            machine.store(warp, at, first, place, adds=adds)

    return run


def bulk(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    """Copies of contiguous bytes."""
    is_load = found["to"].startswith("shared")
    target, source, count, *barrier = ins.operands
    shared, device = (target, source) if is_load else (source, target)
    places, arrays = d.address(shared, is_shared=True), d.address(device, is_shared=False)
    barriers = d.address(barrier[0], is_shared=True) if is_load else None
    size, machine = d.source(count, U32), d.machine

    def run(warp: Warp, mask: Any) -> None:
        chosen = np.arange(32) if mask is None else np.flatnonzero(mask)
        targets = {int((places if is_load else arrays)(warp)[lane]) for lane in chosen}
        if len(targets) != len(chosen):
            raise Trap(f"{len(chosen)} lanes issue the same copy")
        for lane in chosen:
            machine.copy(
                warp,
                int(places(warp)[lane]),
                int(arrays(warp)[lane]),
                int(warp.r[size][lane]),
                None if barriers is None else int(barriers(warp)[lane]),
            )

    return run


def copy_small(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    """Copies of every lane to shared memory, zeros past the size; as late as is allowed."""
    target, source, whole, *size = ins.operands
    places, arrays = d.address(target, is_shared=True), d.address(source, is_shared=False)
    width = d.program.constants[whole]
    sizes = d.source(size[0] if size else whole, U32)

    def run(warp: Warp, mask: Any) -> None:
        at = d.shared_at(warp, lanes(mask, places(warp)), width)
        array, begin = d.machine.locate(lanes(mask, arrays(warp)), width)
        within = np.arange(width) < lanes(mask, warp.r[sizes])[:, None]
        index = at[:, None] + np.arange(width)

        def finish() -> None:
            data = array[begin[:, None] + np.arange(width)]
            warp.block.memory[index] = np.where(within, data, 0)
            warp.dirty.append(index.reshape(-1))

        warp.copies.append(finish)

    return run


def wait_small(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    def run(warp: Warp, mask: Any) -> None:
        for finish in warp.copies:
            finish()
        warp.copies.clear()

    return run


def commit_stores(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    def run(warp: Warp, mask: Any) -> None:
        warp.stores.append(warp.open_stores)
        warp.open_stores = []

    return run


def wait_stores(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    most = d.program.constants[ins.operands[0]]

    def run(warp: Warp, mask: Any) -> None:
        over = warp.stores[: len(warp.stores) - most] if most else warp.stores
        for group in over:
            for store in group:
                store.finish(is_written=not found["read"])
        if not found["read"]:
            del warp.stores[: len(over)]

    return run


TABLE: Table = [
    (r"mbarrier\.init\.shared(?:::cta)?\.b64", barrier_init),
    (
        r"mbarrier\.arrive(?P<mode>(?:\.noComplete|\.expect_tx)*)(?:\.release|\.cta)*"
        r"(?:\.shared(?:::cta)?)\.b64",
        barrier_arrive,
    ),
    (
        r"mbarrier\.(?P<op>expect_tx|complete_tx)(?:\.relaxed|\.cta)*\.shared(?:::cta)?\.b64",
        barrier_expect,
    ),
    (
        r"mbarrier\.(?:try|test)_wait\.parity(?:\.acquire|\.cta)*\.shared(?:::cta)?\.b64",
        barrier_wait,
    ),
    (r"(?:bar|barrier)(?:\.cta)?\.(?P<op>sync|arrive)(?:\.aligned)?", named),
    (r"setmaxnreg\.(?P<op>inc|dec)\.sync\.aligned\.u32", registers),
    (
        r"cp(?:\.reduce)?\.async\.bulk\.tensor\.\dd\."
        r"(?P<to>shared::(?:cluster|cta)\.global|global\.shared::cta)(?:\.add)?(?:\.tile)?"
        r"(?:\.mbarrier::complete_tx::bytes|\.bulk_group)",
        tensor,
    ),
    (
        r"cp\.async\.bulk\."
        r"(?P<to>shared::(?:cluster|cta)\.global|global\.shared::cta)"
        r"(?:\.mbarrier::complete_tx::bytes|\.bulk_group)",
        bulk,
    ),
    (r"cp\.async\.c[ag]\.shared\.global", copy_small),
    (r"cp\.async\.wait_all", wait_small),
    (r"cp\.async\.bulk\.commit_group", commit_stores),
    (r"cp\.async\.bulk\.wait_group(?P<read>\.read)?", wait_stores),
]
