"""Lanes and memory of `sm90.Machine`: shuffles, votes, loads, stores and fences."""

import re
from typing import Any

import numpy as np
import ptx
from ptx import Instruction, Memory
from sm90_decoder import KINDS, U32, U64, Decoder, Run, Table, aligned, bits_of, lanes, put
from sm90_state import Warp


def shuffle(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    target, value, by, clamp, _ = ins.operands
    a, b, c = d.source(value, U32), d.source(by, U32), d.source(clamp, U32)
    targets = target if isinstance(target, tuple) else (target, None)
    mode = found["mode"]

    def run(warp: Warp, mask: Any) -> None:
        lane = np.arange(32)
        by, clamp = warp.r[b].astype(np.int64) & 31, warp.r[c].astype(np.int64)
        segment = (clamp >> 8) & 31
        low = lane & segment
        high = low | (clamp & 31 & ~segment)
        if mode == "idx":
            source = low | (by & ~segment)
        elif mode == "bfly":
            source = lane ^ by
        else:
            source = lane - by if mode == "up" else lane + by
        is_in = source >= high if mode == "up" else source <= high
        source = np.where(is_in, source, lane)
        put(warp, mask, targets[0], warp.r[a][source])
        put(warp, mask, targets[1], is_in)

    return run


def elect(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    target = ins.operands[0]
    assert isinstance(target, tuple)

    def run(warp: Warp, mask: Any) -> None:
        leader = 0 if mask is None else int(np.argmax(mask))
        put(warp, mask, target[0], ptx.splat(leader, U32))
        put(warp, mask, target[1], np.arange(32) == leader)

    return run


def vote(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    target, p, _ = ins.operands
    source = d.source(p, np.bool_)
    mode = found["mode"]

    def run(warp: Warp, mask: Any) -> None:
        values = warp.r[source]
        if mode == "ballot":
            result = ptx.splat(sum(1 << i for i in range(32) if values[i]), U32)
        else:
            result = np.full(32, values.any() if mode == "any" else values.all())
        put(warp, mask, target, result)

    return aligned("vote", run)


def reduction(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    """The sum of a register over all lanes, or the largest signed value."""
    target, x, _ = ins.operands
    source, is_largest = d.source(x, U32), found["kind"] == "max"

    def run(warp: Warp, mask: Any) -> None:
        values = warp.r[source]
        result = values.view(np.int32).max() if is_largest else values.astype(np.uint64).sum()
        put(warp, mask, target, ptx.splat(int(result) % 2**32, U32))

    return aligned("redux", run)


def access(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    """Loads and stores."""
    is_load, space = found["op"] == "ld", found["space"]
    kind = KINDS[found["kind"]]
    values, memory = ins.operands if is_load else reversed(ins.operands)
    if space == "param":
        return load_param(d, ins)
    registers = values if isinstance(values, tuple) else (values,)
    addresses = d.address(memory, is_shared=space == "shared")
    size = np.dtype(kind).itemsize
    whole = size * len(registers)
    bits = bits_of(kind)
    if not is_load:
        registers = tuple(d.source(r, kind) for r in registers)

    def run(warp: Warp, mask: Any) -> None:
        at = lanes(mask, addresses(warp))
        if space == "shared":
            array, at = warp.block.memory, d.shared_at(warp, at, whole)
        else:
            array, at = d.machine.locate(at, whole)
        index = at[:, None] + np.arange(whole)
        if is_load:
            data = array[index].view(kind)
            for i, register in enumerate(registers):
                value = data[:, i].astype(bits) if size == 1 else data[:, i].view(bits)
                if register in d.program.wide and size < 8:  # a load extends
                    value = data[:, i].astype(np.int64 if kind == np.int32 else U64).view(U64)
                if mask is not None:
                    full = np.zeros(32, value.dtype)
                    full[mask] = value
                    value = full
                put(warp, mask, register, value.copy())
            return
        data = np.stack([lanes(mask, warp.r[r]) for r in registers], axis=1)
        if size == 1:
            data = data.astype(np.uint8)
        array[index] = np.ascontiguousarray(data).view(np.uint8)
        if space == "shared":
            warp.dirty.append(index.reshape(-1))

    return run


def load_param(d: Decoder, ins: Instruction) -> Run:
    target, memory = ins.operands
    assert isinstance(memory, Memory)
    value = ptx.splat(d.machine.params[memory.offset], U64)

    def run(warp: Warp, mask: Any) -> None:
        put(warp, mask, target, value)

    return run


def atomic(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    kind = KINDS[found["kind"]]
    target, memory, value = ins.operands if found["op"] == "atom" else (None, *ins.operands)
    is_shared = found["space"] == "shared"
    addresses, source = d.address(memory, is_shared=is_shared), d.source(value, kind)
    how: dict[str, Any] = {
        "add": lambda a, b: a + b,
        "exch": lambda a, b: b,
        "max": max,
        "min": min,
    }
    function = how[found["how"]]
    size = np.dtype(kind).itemsize

    def run(warp: Warp, mask: Any) -> None:
        at = lanes(mask, addresses(warp))
        if is_shared:
            array, at = warp.block.memory, d.shared_at(warp, at, size)
            warp.dirty.append((at[:, None] + np.arange(size)).reshape(-1))
        else:
            array, at = d.machine.locate(at, size)
        chosen = np.arange(32) if mask is None else np.flatnonzero(mask)
        values, old = warp.r[source].view(kind), np.zeros(32, kind)
        for lane, place in zip(chosen, at, strict=True):
            memory = array[place : place + size].view(kind)
            old[lane] = memory[0]
            memory[0] = function(memory[0], values[lane])
        put(warp, mask, target, old.view(bits_of(kind)))

    return run


def matrices(d: Decoder, ins: Instruction, found: re.Match[str]) -> Run:
    """Loads and stores of matrices of 8 by 8."""
    is_load = found["op"] == "ld"
    registers, memory = ins.operands if is_load else reversed(ins.operands)
    assert isinstance(registers, tuple)
    addresses = d.address(memory, is_shared=True)
    is_transposed, count = bool(found["trans"]), int(found["count"])
    sources = registers if is_load else [d.source(r, U32) for r in registers]

    def run(warp: Warp, mask: Any) -> None:
        at, shared = d.shared_at(warp, addresses(warp)[: 8 * count], 16), warp.block.memory
        for rows, register in zip(at.reshape(count, 8), sources, strict=True):
            index = rows[:, None] + np.arange(16)
            data = shared[index] if is_load else np.ascontiguousarray(warp.r[register])
            matrix = data.view(np.uint16).reshape(8, 8)
            if is_transposed:
                matrix = np.ascontiguousarray(matrix.T)
            if is_load:
                put(warp, mask, register, matrix.reshape(-1).view(U32))
            else:
                shared[index] = matrix.view(np.uint8)
                warp.dirty.append(index.reshape(-1))

    return aligned(f"{found['op']}matrix", run)


def proxy_fence(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    def run(warp: Warp, mask: Any) -> None:
        if warp.dirty:
            at = np.concatenate(warp.dirty)
            warp.block.proxy[at] = warp.block.memory[at]
            warp.dirty.clear()

    return run


def prefetch(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    """Loads nothing; but the addresses must be those of an array."""
    addresses = d.address(ins.operands[0], is_shared=False)

    def run(warp: Warp, mask: Any) -> None:
        d.machine.locate(lanes(mask, addresses(warp)), 1)

    return run


def nothing(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    return lambda warp, mask: None


def warp_barrier(d: Decoder, ins: Instruction, _: re.Match[str]) -> Run:
    """All lanes of a warp run each instruction together."""
    return aligned("bar.warp.sync", lambda warp, mask: None)


TABLE: Table = [
    (r"shfl\.sync\.(?P<mode>idx|bfly|up|down)\.b32", shuffle),
    (r"elect\.sync", elect),
    (r"bar\.warp\.sync", warp_barrier),
    (r"vote\.sync\.(?P<mode>ballot|any|all)\.(?:b32|pred)", vote),
    (r"redux\.sync\.(?P<kind>add|max)\.s32", reduction),
    (
        r"(?P<op>ld|st)(?:\.(?:volatile|relaxed|acquire|release|weak))?(?:\.gpu|\.sys|\.cta)?"
        r"\.(?P<space>shared|global|param)(?:::\w+)?(?:\.nc|\.cs)?(?:\.L1::\w+)?"
        r"(?:\.v[248])?\.(?P<kind>[busf]\d+)",
        access,
    ),
    (
        r"(?P<op>atom|red)(?:\.\w+?)*?\.(?P<space>global|shared)"
        r"\.(?P<how>add|exch|max|min)\.(?P<kind>\w+)",
        atomic,
    ),
    (
        r"(?P<op>ld|st)matrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?"
        r"\.shared\.b16",
        matrices,
    ),
    (r"fence\.proxy\.async(?:\.\S+)?", proxy_fence),
    (r"prefetch\.global\.L2", prefetch),
    (
        r"fence\.(?:acquire|release|acq_rel|mbarrier_init|sc)\S*|membar\S*|prefetch\S*|nanosleep\S*"
        r"|bar\.warp\.sync|wgmma\.fence\S*|griddepcontrol\S*|applypriority\S*",
        nothing,
    ),
]
