"""Stores of a warpgroup's rows, from registers and from shared memory.

Values that LLVM and ptxas compute before all loops would occupy registers in the main loop, which
has none to spare. So addresses derive from a thread number that neither compiler knows to be
constant, and loop bounds are unknown to both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.row_order import RowOrder
from ikbo_jax.problems.hopper import WARPGROUP_SIZE, WGMMA_M

#: Threads that hold a row of an accumulator.
ROW_THREADS = 4
#: Layout of one value per row, the result of a reduction along rows.
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def thread_number() -> Integer:
    """Reads the thread's number in its warpgroup by a shuffle, which ptxas does not move."""
    return inline.issue_word(
        "{ .reg .u32 lane; mov.u32 lane, %laneid; mov.u32 $0, %tid.x; and.b32 $0, $0, 127; "
        "shfl.sync.idx.b32 $0, $0, lane, 31, 0xffffffff; }",
        convergent=True,
    )


def store_staged_rows(
    output: Any,
    tiles: Any,
    first_row: Any,
    head: Any,
    begin: Any,
    end: Any,
    *,
    order: RowOrder | None = None,
) -> None:
    """Stores row r of `tiles` to output[first_row + r, head] for r in [begin, end), in a loop.

    `output` is device memory [rows, heads, width]; `tiles` [column blocks, 64, 64] are committed,
    and read when this returns. With `order`, row first_row + r of key head `head` is stored where
    it says. Unrolled stores, or stores from registers, would spill.
    """
    _, heads, width = output.shape
    blocks, height, columns = tiles.shape
    if mosaic.is_interpreted():

        @pl.loop(begin, end)
        def _(r: Any) -> None:
            place = (first_row + r, head) if order is None else order.read(first_row + r, head)
            for i in range(blocks):
                part = min(columns, width - i * columns)
                output[*place, pl.ds(i * columns, part)] = tiles[i, r, :part]

        return
    vectors = mosaic.SWIZZLE // 16  # of a row of a block
    per_step = WARPGROUP_SIZE // vectors  # rows
    tables = () if order is None else order.tables

    @pl.loop(jnp.int32(0), pl.cdiv(end, per_step))
    def copy(step: Any) -> None:
        @inline.code(output, mosaic.operand(tiles), *(step, first_row, head, begin, end), *tables)
        def _(output: Any, tiles: Any, step: Integer, *rest: Any) -> None:
            first_row, head, begin, end, *table = rest
            thread = thread_number()
            vector_of_row = thread % vectors
            row = step * per_step + thread // vectors
            swizzled = vector_of_row ^ row % vectors
            offset = row * mosaic.SWIZZLE + swizzled * 16
            column = vector_of_row * (columns // vectors)
            place = first_row + row, head
            if order is not None:
                place = order.place(*place, *table)
            terms = [(place[0], heads * width), (place[1], width), (column, 1)]
            address = device_address(output, terms, 2)
            source = inline.address(tiles, offset, 8)
            is_row = within(row, begin, end)
            for block in range(blocks):
                source_offset = block * height * mosaic.SWIZZLE
                inline.issue(
                    "{ .reg .b32 a, b, c, d; "
                    f"@$2 ld.shared.v4.b32 {{a, b, c, d}}, [$1 + {source_offset}]; "
                    f"@$2 st.global.v4.b32 [$0 + {block * columns * 2}], {{a, b, c, d}}; }}",
                    address,
                    source,
                    is_row & (column < width - block * columns),
                )


def late_thread_number() -> Integer:
    """Reads the thread's number in its warpgroup at each use, so that no register keeps it."""
    return inline.issue_word("mov.u32 $0, %tid.x;") % WARPGROUP_SIZE


def digits(thread: Integer, counts: tuple[int, ...]) -> list[Integer]:
    """Divides a thread's number into digits, the fastest first."""
    digits = []
    for count in counts:
        digits.append(thread % count)
        thread = thread // count
    return digits


def thread_row(thread: Integer, half: int) -> Integer:
    """Computes the row of a thread's registers in an accumulator; `half` is 0 or 1."""
    warp, lane = thread // 32, thread % 32 // 4
    return warp * 16 + lane + 8 * half


def row_numbers(rows: Any) -> list[Any]:
    """Extracts the numbers of a thread's two rows of [64] in `ROW_LAYOUT`, or repeats a scalar."""
    if isinstance(rows, Integer):
        return [rows, rows]
    return [Integer(vector.extract(x, [], [0])) for x in rows.registers.flat]


def row_array(numbers: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    """Makes an array [64] in `ROW_LAYOUT` of the numbers of a thread's two rows."""
    return inline.array(numbers, (WGMMA_M,))


def within(row: Integer, begin: ir.Value, end: ir.Value) -> Integer:
    """Tests begin ≤ row < end."""
    return (row >= begin) & (row < end)


def device_address(ref: ir.Value, terms: Sequence[tuple[ir.Value, int]], size: int) -> ir.Value:
    """Computes the 64-bit address of element sum(value * stride), of `size` bytes."""
    i64 = ir.IntegerType.get_signless(64)
    offset = Integer(mgpu.c(0, i64))
    for value, stride in terms:
        offset = offset + Integer(arith.extsi(i64, value)) * stride
    return inline.address(ref, offset * size, 8)


class HeldRows:
    """A thread's part of values [64, width], or of one f32 value per row, in registers.

    A thread holds two rows (`thread_row`), and of each row pairs of neighbouring columns, eight
    columns apart. The four threads of a row exchange pairs of 16 bits before each stores 16 bytes:
    stored as they are held, they would take 0.5 to 2.5 us for a tile of 64 rows of 128 columns.
    """

    def __init__(self, values: mgpu.FragmentedArray, thread: Integer, *, is_f32: bool) -> None:
        self._of_row = thread % ROW_THREADS
        column = self._of_row * 2
        self._size = 4 if is_f32 else 2
        if len(values.shape) == 2:
            self._bits = 64 if is_f32 else 32
            pair_type = ir.IntegerType.get_signless(self._bits)
            self._words = [mgpu.utils.bitcast(pair, pair_type) for pair in values.registers.flat]
            self._kind, self._columns = f"b{self._bits}", [(column, 1)]
        else:
            self._bits, self._kind, self._columns = 32, "f32", []
            self._words = [vector.extract(register, [], [0]) for register in values.registers.flat]

    def store(
        self,
        output: ir.Value,
        half: int,
        row: Sequence[tuple[ir.Value, int]],
        predicate: ir.Value,
        *,
        begin: int = 0,
    ) -> None:
        """Stores row `half` (0 or 1) of the thread from column `begin` on, if `predicate` holds.

        The row's first element in `output` is the sum of value * stride over `row`.
        """
        words, first = self._words[half::2][begin // 8 :], begin // 8
        exchanged = len(words) // ROW_THREADS * ROW_THREADS if self._kind == "b32" else 0
        if exchanged:
            address = device_address(output, [*row, (self._of_row * 8, 1)], self._size)
            for i in range(0, exchanged, ROW_THREADS):
                inline.issue(
                    f"st.global.v4.b32 [$0 + {16 * (first + i)}], {{$1, $2, $3, $4}};",
                    address,
                    *warps.transposed(words[i : i + ROW_THREADS], self._of_row),
                    predicate=predicate,
                )
        if exchanged < len(words):
            address = device_address(output, [*row, *self._columns], self._size)
            for i, word in enumerate(words[exchanged:], first + exchanged):
                inline.issue(
                    f"st.global.{self._kind} [$0 + {self._bits // 2 * i}], $1;",
                    address,
                    word,
                    predicate=predicate,
                )


def store_rows(
    output: Any,
    values: jax.Array,
    first_row: Any,
    head: Any,
    begin: Any,
    end: Any,
    *,
    order: RowOrder | None = None,
) -> None:
    """Stores values[r] to output[first_row + r, head] for r in [begin, end), from registers.

    `values` are [64, width], or [64] f32; other arguments are as for `store_staged_rows`.
    """
    _, heads, *widths = output.shape
    width = widths[0] if widths else 1
    is_f32 = output.dtype == jnp.float32
    if mosaic.is_interpreted():

        @pl.loop(begin, end)
        def _(r: Any) -> None:
            place = (first_row + r, head) if order is None else order.read(first_row + r, head)
            row = lax.dynamic_index_in_dim(values, r, keepdims=False)
            output[*place] = row[:width] if widths else row

        return

    tables = () if order is None else order.tables

    @inline.code(output, values, first_row, head, begin, end, *tables)
    def write(
        output: Any, values: Any, first_row: Any, head: Any, begin: Any, end: Any, *table: Any
    ) -> None:
        # Read at each use, the thread's number spills at H = 192 and 256; read early, at H = 128.
        if is_f32 and widths:  # of the backward kernels, which have no register to spare
            thread = thread_number()
        elif width <= 128:
            thread = late_thread_number()
        else:
            thread = Integer(mgpu.thread_idx()) % WARPGROUP_SIZE
        held = HeldRows(values, thread, is_f32=is_f32)
        for half in (0, 1):
            row = thread_row(thread, half)
            is_wanted = within(row, begin, end)
            place = first_row + row, head
            if order is not None:
                place = order.place(*place, *table)
            terms = [(place[0], heads * width), (place[1], width)]
            held.store(output, half, terms, is_wanted)


def store_transposed(output: Any, values: jax.Array, row: Any, column: Any) -> None:
    """Stores values[i, j] to output[row + j, column + i], from registers; both are f32.

    Stores fill sectors if `column` and the output's width are multiples of 8.
    """
    width, columns = values.shape[1], output.shape[1]
    if mosaic.is_interpreted():

        @pl.loop(0, WGMMA_M)
        def _(i: Any) -> None:
            row_values = lax.dynamic_index_in_dim(values, i, keepdims=False)
            output[pl.ds(row, width), column + i] = row_values

        return

    @inline.code(output, values, row, column)
    def _(output: ir.Value, values: Any, row: Integer, column: Integer) -> None:
        thread = thread_number()
        # Registers hold pairs of neighbouring values of a row, eight columns apart.
        pair = thread % 4 * 2
        for half in (0, 1):
            terms = [(row + pair, columns), (column + thread_row(thread, half), 1)]
            address = device_address(output, terms, 4)
            for i, register in enumerate(list(values.registers.flat)[half::2]):
                for j in (0, 1):
                    inline.issue(
                        f"st.global.f32 [$0 + {4 * columns * (8 * i + j)}], $1;",
                        address,
                        vector.extract(register, [], [j]),
                    )


def store_staged(
    ctx: Any,
    staged: Sequence[tuple[Any, Any]],
    outputs: Sequence[Any],
    position: tuple[Any, Any],
    rows: tuple[Any, Any],
    *,
    is_full: Any,
    is_partial: Any,
    order: RowOrder | None = None,
) -> None:
    """Stores staged rows [begin, end) of every output; all 64 by TMA.

    Args:
      staged: (view for WGMMA, view for TMA) of operand tiles [column blocks, 64, 64] each.
      outputs: device memory [rows, heads, width] each; `position`: (first row, head).
      is_full: whether TMA stores the rows; it drops rows past the output's end.
      is_partial: whether threads store them; None: never.
      order: if not None, threads store all rows, where it says.
    """
    first_row, head = position

    def by_threads() -> None:
        for (matrix_view, _), output in zip(staged, outputs, strict=True):
            store_staged_rows(output, matrix_view, *position, *rows, order=order)
        plgpu.commit_smem()  # TMA will write operands where these threads have read

    if order is not None:
        by_threads()
        return

    @pl.when(is_full)
    def _() -> None:
        for (_, copy_view), output in zip(staged, outputs, strict=True):
            ctx.store(copy_view, output, (pl.ds(first_row, WGMMA_M), head))

    if is_partial is not None:
        pl.when(is_partial)(by_threads)
