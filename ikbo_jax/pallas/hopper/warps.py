"""What a warp's lanes do together: inline PTX, called by all 32 lanes."""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline

LANES = 32


def lane() -> ir.Value:
    """This lane's number."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("mov.u32 $0, %laneid;", result_types=i32)


def load(ref: ir.Value, index: ir.Value, is_wanted: ir.Value | None = None) -> ir.Value:
    """Element `index` of 32 bits of device memory; 0 if it is not wanted."""
    i32 = ir.IntegerType.get_signless(32)
    address = inline.address(ref, index)
    if is_wanted is not None:
        return inline.issue_word(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            address,
            arith.extui(i32, is_wanted),
        )
    return mgpu.utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=i32)


def load_shared(ref: ir.Value, index: ir.Value) -> ir.Value:
    """Element `index` of 32 bits of shared memory."""
    address = inline.address(ref, index)
    return inline.issue_word("ld.shared.b32 $0, [$1];", address)


def store_shared(
    ref: ir.Value, index: ir.Value, value: ir.Value, is_wanted: ir.Value, *, bits: int = 32
) -> None:
    """Element `index` of 32 or 16 bits of shared memory becomes `value`, or its lower half."""
    element = ir.IntegerType.get_signless(bits)
    inline.issue(
        f"st.shared.b{bits} [$0], $1;",
        mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], element),
        value if bits == 32 else arith.trunci(element, value),
        predicate=is_wanted,
    )


def ballot(predicate: ir.Value) -> ir.Value:
    """A bit of each lane: its predicate."""
    i32 = ir.IntegerType.get_signless(32)
    return inline.issue_word(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        arith.extui(i32, predicate),
        convergent=True,
    )


def lowest_bit(x: ir.Value) -> ir.Value:
    """Number of the lowest bit that is set."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "{ .reg .b32 x; brev.b32 x, $1; clz.b32 $0, x; }", x, result_types=i32
    )


def from_lane(x: ir.Value, lane: int) -> ir.Value:
    """The value of a given lane."""
    return _of_lanes(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;", x)


def from_below(x: ir.Value) -> ir.Value:
    """The value of the lane below; of the lowest lane, its own."""
    return _of_lanes("shfl.sync.up.b32 $0, $1, 1, 0, 0xffffffff;", x)


def ones(x: ir.Value) -> ir.Value:
    """How many bits are set."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("popc.b32 $0, $1;", x, result_types=i32)


def total(x: ir.Value) -> ir.Value:
    """The sum of all lanes' values."""
    return _of_lanes("redux.sync.add.s32 $0, $1, 0xffffffff;", x)


def _of_lanes(ptx: str, x: ir.Value) -> ir.Value:
    """What an instruction for all lanes makes of their values, 32 bits each."""
    return inline.issue_word(ptx, x, convergent=True)


def sums(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(the sum of lower lanes' values, the sum of all lanes' values)."""
    total = x
    for distance in (1, 2, 4, 8, 16):
        total = inline.issue_word(
            "{ .reg .pred p; .reg .b32 y; "
            f"shfl.sync.up.b32 y|p, $1, {distance}, 0, 0xffffffff; "
            "@!p mov.b32 y, 0; add.s32 $0, y, $1; }",
            total,
            convergent=True,
        )
    return arith.subi(total, x), from_lane(total, LANES - 1)


def transposed(words: list[ir.Value], number: ir.Value) -> list[ir.Value]:
    """Word `number` of each of four neighbouring lanes, in their order.

    Args:
      words: four of 32 bits.
      number: of this lane among the four, from 0 to 3.
    """
    is_odd, is_late = (
        arith.cmpi(arith.CmpIPredicate.ne, arith.andi(number, inline.i32(bit)), inline.i32(0))
        for bit in (1, 2)
    )
    # First pairs of lanes exchange words 0 and 1, and 2 and 3; then pairs of pairs, two at once.
    pairs = [_exchanged(words[i], words[i + 1], is_odd, 1) for i in (0, 2)]
    columns = [_exchanged(low, high, is_late, 2) for low, high in zip(*pairs, strict=True)]
    return [columns[j][i] for i in (0, 1) for j in (0, 1)]


def _exchanged(
    low: ir.Value, high: ir.Value, is_high: ir.Value, distance: int
) -> tuple[ir.Value, ir.Value]:
    """`low` of two lanes, the lower one's first, or `high` of both, on the lane that `is_high`."""
    received = inline.issue_word(
        f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;",
        arith.select(is_high, low, high),
        convergent=True,
    )
    return arith.select(is_high, received, low), arith.select(is_high, high, received)
