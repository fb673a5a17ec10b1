"""Words that a warp's lanes hold: a word each, so that loads are in flight while the warp works.

Such a value is a scalar for Pallas, but differs by lane: it may be carried, and read by the
functions below alone. Under interpretation it says where the words are.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline, mosaic, warps

_SPLAT = plgpu.Layout.WG_SPLAT(())
_WORD = mosaic.SCALAR


def load(source: Any, row: Any, *, interpret: bool) -> Any:
    """Issues the loads of source[row], at most 32 words, one by each lane; does not wait."""
    if interpret:
        return row
    count = source.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT), return_type=_WORD)
    def issue(_: Any, source: ir.Value, row: Any) -> mgpu.FragmentedArray:
        lane = warps.lane()
        place = arith.addi(arith.muli(row.registers.item(), inline.i32(count)), lane)
        is_wanted = arith.cmpi(arith.CmpIPredicate.slt, lane, inline.i32(count))
        found = warps.load(source, place, is_wanted)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return issue(source, row)


def word(held: Any, source: Any, number: int, *, interpret: bool) -> Any:
    """Reads word `number` of source[row], which `load` has returned as `held`."""
    return source[held, number] if interpret else _from_lane(held, number)


def store(
    held: Any, source: Any, first: int, target: Any, slot: Any, at: int, *, interpret: bool
) -> None:
    """Stores the words from `first` on in target[slot], shared memory, from word `at` on."""
    count = source.shape[1]
    if interpret:
        for i in range(first, count):
            target[slot, at + i - first] = source[held, i]
        return

    width = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, _SPLAT))
    def issue(_: Any, target: ir.Value, slot: Any, held: Any) -> None:
        lane = warps.lane()
        is_wanted = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, lane, inline.i32(first)),
            arith.cmpi(arith.CmpIPredicate.slt, lane, inline.i32(count)),
        )
        row = arith.muli(slot.registers.item(), inline.i32(width))
        place = arith.addi(arith.addi(row, inline.i32(at - first)), lane)
        warps.store_shared(target, place, held.registers.item(), is_wanted)
        mgpu.utils.warp_barrier()

    issue(target, slot, held)


def take_ticket(counter: Any, number: Any, *, interpret: bool) -> Any:
    """Takes a ticket as `mosaic.next_ticket` does, but does not wait; `ticket` reads it."""
    if interpret:
        return number

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_WORD)
    def take(_: Any, counter: ir.Value) -> mgpu.FragmentedArray:
        held = inline.issue_word(
            "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
            "mov.u32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
            mgpu.utils.memref_ptr(counter),
        )
        return mgpu.FragmentedArray.splat(held, (), is_signed=True)

    return take(counter)


def ticket(held: Any, *, interpret: bool) -> Any:
    """Reads a ticket, when it has arrived."""
    return held if interpret else _from_lane(held, 0)


def _from_lane(held: Any, number: int) -> Any:
    @plgpu.inline_mgpu(arg_types=(_SPLAT,), return_type=_WORD)
    def read(_: Any, held: Any) -> mgpu.FragmentedArray:
        found = warps.from_lane(held.registers.item(), number)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return read(held)
