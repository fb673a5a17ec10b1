"""Which columns of a block a row of a product may see: the mask of every kernel.

Keys past a user's length or a sequence's end are others': their weights are 0, and zeros replace
their values, since 0 times another user's NaN is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic, operand_tiles, stores


class Visible(NamedTuple):
    """The visible columns [begin, end) of a block of `size` columns (static), for one row or for
    all.

    `begin` and `end` are int32, or [64] int32 by row; values past `size` are the block's end.
    """

    size: int
    end: Any
    begin: Any = 0

    @classmethod
    def in_block(cls, end: Any, block: Any, size: int) -> Visible:
        """Describes block `block` of `size` columns; `end` counts columns from the first block."""
        return cls(size, end - block * size)

    @property
    def is_partial(self) -> Any:
        """Whether a column of the block is not visible; of scalars only."""
        is_cut = self.end < self.size
        return is_cut if self._begins_at_0 else is_cut | (self.begin > 0)

    @property
    def _begins_at_0(self) -> bool:
        return isinstance(self.begin, int) and self.begin == 0

    def keep(self, values: jax.Array, fill: float = 0.0, *, axis: int = 1) -> jax.Array:
        """Replaces f32 values outside the visible range of `axis`, the block's columns, by `fill`.

        A warpgroup whose columns are all visible, as in most blocks, skips the selection.
        """

        def masked() -> jax.Array:
            return self.select(values, inside=True, fill=fill, axis=axis)

        return lax.cond(self.is_partial, masked, lambda: values)

    def select(
        self, values: jax.Array, *, inside: bool, fill: float = 0.0, axis: int = 1
    ) -> jax.Array:
        """Replaces values outside the range of `axis`, or inside, by `fill`.

        Unlike `keep`, it does not test whether the block needs this: the ends may be by row.
        """
        number = plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=plgpu.Layout.WGMMA)
        begin, end = (
            lax.broadcast_in_dim(x, number.shape, (0,)) if getattr(x, "ndim", 0) else x
            for x in (self.begin, self.end)
        )
        is_inside, other = number < end, jnp.float32(fill)
        if not self._begins_at_0:
            is_inside &= number >= begin
        return (
            jnp.where(is_inside, values, other) if inside else jnp.where(is_inside, other, values)
        )

    def select_by_row(self, values: jax.Array, *, inside: bool, fill: float) -> jax.Array:
        """Selects, with ends by row, by constants: columns' numbers would take a register each."""
        if mosaic.is_interpreted():
            return self.select(values, inside=inside, fill=fill)
        limits = [self.end] if self._begins_at_0 else [self.end, self.begin]

        @inline.code(values, *limits, returns=values)
        def selected(values: mgpu.FragmentedArray, *limits: Any) -> mgpu.FragmentedArray:
            column = stores.late_thread_number() % 4 * 2
            ends, *begins = ([x - column for x in stores.row_numbers(limit)] for limit in limits)
            registers, other = values.registers.copy(), inline.f32(fill)
            for i, pair in enumerate(registers.flat):
                elements = [vector.extract(pair, [], [j]) for j in (0, 1)]
                for j, number in enumerate((i // 2 * 8, i // 2 * 8 + 1)):
                    is_inside = ends[i % 2] > number
                    for begin in begins:
                        is_inside = is_inside & (begin[i % 2] < number + 1)
                    choices = (elements[j], other) if inside else (other, elements[j])
                    elements[j] = arith.select(is_inside, *choices)
                registers.flat[i] = vector.from_elements(pair.type, elements)
            return inline.accumulator(registers)

        return selected

    def zero_rest(self, tiles: Any) -> None:
        """Zeroes the rows of operand tiles from `end` on; a `commit_smem` must follow."""
        operand_tiles.zero_rows(tiles, self.end)


def ranges_and_gaps(intervals: jax.Array) -> jax.Array:
    """Converts two intervals [..., 4] to a range and its gap; (0, 0) where one is empty."""
    begins, ends = ([intervals[..., i + x] for i in (0, 2)] for x in (0, 1))
    # Without reductions over the two, which XLA would not fuse.
    is_empty = [begin >= end for begin, end in zip(begins, ends, strict=True)]
    ends = [jnp.where(empty, 0, end) for empty, end in zip(is_empty, ends, strict=True)]
    last = jnp.maximum(*ends)
    first = jnp.minimum(*(jnp.where(x, last, y) for x, y in zip(is_empty, begins, strict=True)))
    # The gap is between the end of the interval that begins first, and the begin of the other one.
    is_first = begins[0] <= begins[1]
    gap_begin, gap_end = (
        jnp.where(is_first, ends[0], ends[1]),
        jnp.where(is_first, begins[1], begins[0]),
    )
    has_gap = ~(is_empty[0] | is_empty[1]) & (gap_begin < gap_end)
    gap = (jnp.where(has_gap, x, 0) for x in (gap_begin, gap_end))
    return jnp.stack((first, last, *gap), axis=-1)
