"""The linear layer after attention: its problem, and its kernel's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.norm_linear import LinearProblem
from ikbo_jax.problems.problem import Config

#: Name of the norm of rows that are multiplied as they are.
NO_NORM = "no"
#: The most groups of columns: their statistics take 1 KiB each.
MAX_GROUPS = 16
#: The widest tile: 128 registers of a thread.
MAX_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class GatedLinearConfig(Config):
    """Tuning parameters of the kernel of `gated_linear`.

    Attributes:
      blocks: blocks of 64 columns of a tile of the result, 1 to 4.
      row_slots: blocks of 128 rows by 64 columns of u, a and the residual in shared memory.
      weight_slots: k steps of weights in shared memory.
    """

    blocks: int = MAX_BLOCKS
    row_slots: int = 6
    weight_slots: int = 4

    def shared(self, groups: int) -> Any:
        """Declares one CTA's shared memory and barriers, for groups of columns."""
        return memory.shared(
            # Blocks of rows of u, a and the residual.
            rows=memory.ring(
                self.row_slots, ready=NUM_CONSUMERS, tiles=(NUM_CONSUMERS, 1, WGMMA_M, BLOCK_K)
            ),
            weight=memory.ring(
                self.weight_slots, ready=self.blocks, tiles=(self.blocks, BLOCK_K, BLOCK_K)
            ),
            # Mean and scale of rows.
            statistics=memory.Floats((groups, 2, TILE_ROWS)) if groups > 1 else None,
            staging=memory.Staging((NUM_CONSUMERS, WGMMA_M, BLOCK_K)),  # u · norm(a)
        )

    @hopper.first_reason
    def illegal_reason(self, problem: GatedLinearProblem) -> Iterator[str | None]:
        yield problem.why_not_served()
        if not 1 <= self.blocks <= MAX_BLOCKS:
            yield f"blocks must be from 1 to {MAX_BLOCKS}, but is {self.blocks}"
        # A step reads blocks of u and a while those of the step before are being replaced.
        yield hopper.why_too_few(self, row_slots=3, weight_slots=2)
        yield hopper.why_not_smem(self, memory.smem_bytes(self.shared(problem.groups)))


@dataclasses.dataclass(frozen=True)
class GatedLinearProblem(LinearProblem):
    """Holds the sizes of a `gated_linear`; `columns` are those of `a`.

    Attributes:
      groups: groups of columns that are normalised on their own.
      concat: whether the rows that are multiplied are [u, a, u · norm(a)].
      dropout: whether some of their numbers are dropped.
      is_plain: whether there is no `u`; `has_factors`: whether the norm has a scale or a bias.
      shared_rows: rows that have a row of the shared residual in common; 0: there is none.
    """

    groups: int
    concat: bool
    dropout: bool
    is_plain: bool = False
    has_factors: bool = False
    shared_rows: int = 0

    op: ClassVar[str] = "gated_linear"
    config_type: ClassVar[type[Config]] = GatedLinearConfig
    #: Of 512 rows, XLA takes 10.9 us and the kernel 11.6, of 4,096, 26.3 and 14.5 (H200).
    few_rows: ClassVar[int] = 512

    @hopper.first_reason
    def why_not_served(self) -> Iterator[str | None]:
        yield super().why_not_served()
        if self.dropout:
            yield "the kernel drops nothing, but the call has a dropout key"
        if self.is_plain and (self.norm == "layer" or self.groups > 1 or self.has_factors):
            yield "without a gate, the kernel takes no norm but an RMS norm of rows without factors"
        if not self.is_plain and self.norm == NO_NORM:
            yield "with a gate, the kernel needs a norm"
        if self.shared_rows % WGMMA_M:
            yield (
                f"the kernel adds a shared residual to a multiple of {WGMMA_M} rows, "
                f"but it is to be added to {self.shared_rows}"
            )
        groups, columns = self.groups, self.columns[0]
        if groups > 1 and (groups > MAX_GROUPS or columns % (groups * BLOCK_K)):
            yield (
                f"the kernel normalises at most {MAX_GROUPS} heads of a multiple of {BLOCK_K} "
                f"columns, but there are {groups} of {columns // groups}"
            )

    def by_tiles(self) -> Config:
        blocks = min(
            range(1, 1 + min(MAX_BLOCKS, hopper.column_blocks(self.features))), key=self.time
        )
        # Statistics of many groups take the place of a slot.
        row_slots, weight_slots = 6 - (self.groups > 2), 4 if blocks > 2 else 8
        return GatedLinearConfig(blocks, row_slots, weight_slots)

    def time(self, blocks: int) -> int:
        """Estimates the time of the CTA with most tiles: one of C = 512 takes 7 + 2 blocks."""
        tiles = -(-self.rows // TILE_ROWS) * -(-hopper.column_blocks(self.features) // blocks)
        return -(-tiles // hopper.NUM_SMS) * (7 + 2 * blocks)
