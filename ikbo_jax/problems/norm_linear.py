"""The linear layers around attention: their problems, and their kernels' configurations."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.problems.problem import Config, Problem, Ranked

#: Columns of a tile, and of what a consumer stores at a time.
BLOCK_N = 128
STORE_COLUMNS = 64
#: Warps that compute the statistics of a CTA's next rows.
STATISTICS_WARPS = 2


@dataclasses.dataclass(frozen=True)
class NormLinearConfig(Config):
    """Tuning parameters of the kernel of `norm_linear`.

    Attributes:
      row_slots: blocks of 64 columns of the rows of a tile that shared memory holds, at least all
        of a row. Those beyond let the next rows arrive while the last ones are multiplied.
      weight_slots: k steps of weights that shared memory holds.
      parts: parts of the columns; a CTA normalises 128 rows for one part.
      is_early: whether other warps compute the statistics of a CTA's next rows in time, from device
        memory; otherwise consumers do, when the rows have arrived, as for a CTA's first ones. With
        F of more than 512, registers would spill.
    """

    row_slots: int = 8
    weight_slots: int = 5
    parts: int = 1
    is_early: bool = False

    def shared(self) -> Any:
        blocks = BLOCK_N // BLOCK_K
        return memory.shared(
            rows=memory.ring(
                self.row_slots, ready=NUM_CONSUMERS, tiles=(NUM_CONSUMERS, WGMMA_M, BLOCK_K)
            ),
            weight=memory.ring(self.weight_slots, ready=blocks, tiles=(blocks, BLOCK_K, BLOCK_K)),
            staging=memory.Tiles((NUM_CONSUMERS, 1, WGMMA_M, STORE_COLUMNS)),
            # Mean and scale of the next item's rows.
            statistics=memory.Floats((2, TILE_ROWS)) if self.is_early else None,
            early=memory.barriers(1, STATISTICS_WARPS) if self.is_early else None,
        )

    @hopper.first_reason
    def illegal_reason(self, problem: NormLinearProblem) -> Iterator[str | None]:
        yield problem.why_not_served()
        blocks = hopper.column_blocks(problem.features)
        if self.row_slots < blocks:
            yield (
                f"row_slots must be at least {blocks}, the blocks of 64 columns of a row of "
                f"F={problem.features}, but is {self.row_slots}"
            )
        yield hopper.why_too_few(self, weight_slots=2)
        if not 1 <= self.parts <= problem.column_tiles:
            yield (
                f"parts must be from 1 to {problem.column_tiles}, the tiles of {BLOCK_N} columns, "
                f"but is {self.parts}"
            )
        yield hopper.why_not_smem(self, memory.smem_bytes(self.shared()))


#: The widest rows beside which there is room for two k steps of weights.
MAX_FEATURES = 640


@dataclasses.dataclass(frozen=True)
class LinearProblem(Problem):
    """Holds the sizes of a `norm_linear` or a `gated_linear`.

    Attributes:
      features: columns of the token that comes in (`norm_linear`) or goes out (`gated_linear`).
      columns: columns of every group of columns.
      details: the other options in words.
      few_rows: rows up to which XLA is faster.
    """

    few_rows: ClassVar[int]

    rows: int
    features: int
    columns: tuple[int, ...]
    norm: str
    dtype: str
    details: str

    def describe(self) -> str:
        columns = "+".join(map(str, self.columns))
        sizes = f"rows={self.rows} F={self.features} columns={columns} {self.dtype}"
        return f"{sizes} {self.norm} norm, {self.details}"

    def rank(self) -> Iterator[Ranked]:
        if self.why_not_served():
            return
        if self.rows <= self.few_rows:
            yield Ranked(None, None, f"XLA is faster for at most {self.few_rows} rows")
        yield Ranked(None, self.by_tiles(), "by the number of tiles")

    @abc.abstractmethod
    def by_tiles(self) -> Config:
        """Chooses the kernel's configuration, by the number of tiles."""

    @hopper.first_reason
    def why_not_served(self) -> Iterator[str | None]:
        """Checks what every configuration of the kernel needs."""
        yield hopper.why_not_dtype(self.dtype)
        if self.rows < 2:
            yield f"the kernel needs at least 2 rows, for TMA, but there is {self.rows}"
        for name, size in (("F", self.features), *(("columns", c) for c in self.columns)):
            if size % 8:
                yield f"the kernel needs multiples of 8 (16 bytes, for TMA), but {name}={size}"


@dataclasses.dataclass(frozen=True)
class NormLinearProblem(LinearProblem):
    """Holds the sizes of a `norm_linear`."""

    op: ClassVar[str] = "norm_linear"
    config_type: ClassVar[type[Config]] = NormLinearConfig
    #: Of 64 rows, XLA takes 8.9 us and the kernel 9.6, of 512, 15.7 and 9.9 (H200).
    few_rows: ClassVar[int] = 128

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def column_tiles(self) -> int:
        """Number of tiles of all groups' columns; a tile has columns of one group."""
        return sum(-(-columns // BLOCK_N) for columns in self.columns)

    @hopper.first_reason
    def why_not_served(self) -> Iterator[str | None]:
        yield super().why_not_served()
        if self.features > MAX_FEATURES:
            yield (
                f"the kernel holds normalised rows of at most F={MAX_FEATURES} in shared memory, "
                f"but F={self.features}"
            )

    def by_tiles(self) -> Config:
        row_slots = max(8, hopper.column_blocks(self.features))
        tiles = self.column_tiles
        parts = min(range(1, tiles + 1), key=lambda parts: (self.waves(parts), parts))
        is_early = row_slots == 8 and self.row_tiles * parts > hopper.NUM_SMS
        return NormLinearConfig(row_slots, 13 - row_slots, parts, is_early)

    def waves(self, parts: int) -> float:
        """Estimates the time of the CTA with most tiles, in column tiles."""
        items = self.row_tiles * parts
        # Loading and normalising a tile of rows take as long as a column tile.
        return -(-items // hopper.NUM_SMS) * (-(-self.column_tiles // parts) + 1)


# The layer after attention.

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
