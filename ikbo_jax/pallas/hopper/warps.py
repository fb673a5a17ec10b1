"""What a warp's lanes do together: inline PTX, called by all 32 lanes."""

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline
from ikbo_jax.pallas.hopper.inline import Integer

LANES = 32
#: The least integer of 32 bits.
LEAST = -(2**31)


def lane() -> Integer:
    """Reads this lane's number."""
    return inline.compute_word("mov.u32 $0, %laneid;")


def load(ref: ir.Value, index: ir.Value, is_wanted: ir.Value | None = None) -> Integer:
    """Loads element `index` of 32 bits of device memory; 0 if it is not wanted."""
    address = inline.address(ref, index)
    if is_wanted is None:
        return inline.compute_word("ld.global.b32 $0, [$1];", address)
    return inline.issue_word(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
        address,
        arith.extui(ir.IntegerType.get_signless(32), is_wanted),
    )


def load_shared(ref: ir.Value, index: ir.Value) -> Integer:
    """Loads element `index` of 32 bits of shared memory."""
    return inline.issue_word("ld.shared.b32 $0, [$1];", inline.address(ref, index))


def store_shared(
    ref: ir.Value, index: ir.Value, value: ir.Value, is_wanted: ir.Value, *, bits: int = 32
) -> None:
    """Stores `value`, or its lower half, as element `index` of 32 or 16 bits of shared memory."""
    inline.issue(
        f"st.shared.b{bits} [$0], $1;",
        inline.address(ref, index, bits),
        value if bits == 32 else arith.trunci(ir.IntegerType.get_signless(bits), value),
        predicate=is_wanted,
    )


def ballot(predicate: ir.Value) -> Integer:
    """Collects the lanes' predicates, one bit of each lane."""
    ptx = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return _of_lanes(ptx, arith.extui(ir.IntegerType.get_signless(32), predicate))


def lowest_bit(x: ir.Value) -> Integer:
    """Finds the number of the lowest set bit."""
    return inline.compute_word("{ .reg .b32 x; brev.b32 x, $1; clz.b32 $0, x; }", x)


def from_lane(x: ir.Value, lane: int) -> Integer:
    """Reads the value of one lane."""
    return _of_lanes(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;", x)


def from_below(x: ir.Value) -> Integer:
    """Reads the value of the lane below; the lowest lane reads its own."""
    return _of_lanes("shfl.sync.up.b32 $0, $1, 1, 0, 0xffffffff;", x)


def ones(x: ir.Value) -> Integer:
    """Counts the set bits."""
    return inline.compute_word("popc.b32 $0, $1;", x)


def total(x: ir.Value) -> Integer:
    """Adds all lanes' values."""
    return _of_lanes("redux.sync.add.s32 $0, $1, 0xffffffff;", x)


def reduced(x: ir.Value, kind: str) -> Integer:
    """Finds the "min" or "max" of all lanes' signed values."""
    return _of_lanes(f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", x)


def _of_lanes(ptx: str, x: ir.Value) -> Integer:
    return inline.issue_word(ptx, x, convergent=True)


def sums(x: Integer) -> tuple[Integer, Integer]:
    """Computes (sum of lower lanes' values, sum of all lanes' values)."""
    total = _up_to(x, "add", 0)
    return total - x, from_lane(total, LANES - 1)


def maxima(x: Integer) -> tuple[Integer, Integer]:
    """Finds (largest of lower lanes' values, or `LEAST`; largest of all lanes' signed values)."""
    most = _up_to(x, "max", LEAST)
    return lane().equals(0).select(LEAST, from_below(most)), from_lane(most, LANES - 1)


def _up_to(x: Integer, operation: str, neutral: int) -> Integer:
    """Combines the values of the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        x = inline.issue_word(
            "{ .reg .pred p; .reg .b32 y; "
            f"shfl.sync.up.b32 y|p, $1, {distance}, 0, 0xffffffff; "
            f"@!p mov.b32 y, {neutral}; {operation}.s32 $0, y, $1; }}",
            x,
            convergent=True,
        )
    return x


def transposed(words: Sequence[ir.Value], number: Integer) -> list[ir.Value]:
    """Collects word `number`, this lane's among four neighbours, of each in the lanes' order."""
    is_odd, is_late = ((number & bit).differs(0) for bit in (1, 2))
    # First pairs of lanes exchange words 0 and 1, and 2 and 3; then pairs of pairs, two at once.
    pairs = [_exchanged(words[i], words[i + 1], is_odd, 1) for i in (0, 2)]
    columns = [_exchanged(low, high, is_late, 2) for low, high in zip(*pairs, strict=True)]
    return [columns[j][i] for i in (0, 1) for j in (0, 1)]


def _exchanged(
    low: ir.Value, high: ir.Value, is_high: Integer, distance: int
) -> tuple[ir.Value, ir.Value]:
    """Collects `low` of two lanes, or `high` on the lane that `is_high`, the lower lane's first."""
    received = inline.issue_word(
        f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;",
        is_high.select(low, high),
        convergent=True,
    )
    return is_high.select(received, low), is_high.select(high, received)
