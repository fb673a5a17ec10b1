"""Lookups and segment sums: their problems, and the configurations of their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from ikbo_jax.problems.hopper import NUM_SMS, WARPGROUP_SIZE
from ikbo_jax.problems.problem import Config, Problem, Ranked, doublings, size, typed

#: Dtypes that the kernels accept, and bytes of a number.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Most candidates that a warpgroup lists: 32 for each thread.
MOST_LISTED = 32 * WARPGROUP_SIZE
#: Largest number that the kernels compute with.
MOST = 2**31 - 2**20


def vector_words(width: int, item_bytes: int) -> int:
    """32-bit words that a thread moves at once: 4, 2 or 1; 0 if rows are no whole words."""
    return next((words for words in (4, 2, 1) if width * item_bytes % (4 * words) == 0), 0)


@dataclasses.dataclass(frozen=True)
class RowsProblem(Problem):
    """Sizes of a lookup, or of its transpose.

    Attributes:
      batch: candidates.
      users: users.
      width: numbers of a row.
      dtype: name of the rows' dtype.
    """

    batch: int
    users: int
    width: int
    dtype: str

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        sizes = (size(fields.get(name), name) for name in ("batch", "users", "width"))
        return cls(*sizes, typed(fields.get("dtype"), str, "dtype"))

    def describe(self) -> str:
        return f"B={self.batch} U={self.users} width={self.width} {self.dtype}"

    def distance(self, other: Any) -> float:
        pairs = ((self.batch, other.batch), (self.users, other.users), (self.width, other.width))
        return sum(doublings(a, b) for a, b in pairs)

    @property
    def vectors(self) -> int:
        """Vectors of a row, each of which one access of a thread moves."""
        words = vector_words(self.width, ITEM_BYTES[self.dtype])
        return self.width * ITEM_BYTES[self.dtype] // (4 * words) if words else self.width

    def why_not_rows(self) -> str | None:
        """Why no kernel moves such rows; None if one does."""
        if self.dtype not in ITEM_BYTES:
            return f"the kernel takes {', '.join(ITEM_BYTES)}, but the rows are {self.dtype}"
        if min(self.batch, self.users, self.width) < 1:
            return f"the kernel needs sizes of at least 1, but has {self.describe()}"
        if (self.batch + self.users) * self.vectors > MOST:
            return f"the kernel takes at most {MOST} vectors of 16 bytes, but {self.describe()}"
        return None


@dataclasses.dataclass(frozen=True)
class LookUpConfig(Config):
    """Tuning parameters of the kernel for lookups.

    Attributes:
      accesses: vectors that a thread moves, all in flight at once.
    """

    accesses: int = 4

    def illegal_reason(self, problem: RowsProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if not 1 <= self.accesses <= 16:
            return f"accesses must be from 1 to 16, but is {self.accesses}"
        if reason := problem.why_not_rows():
            return reason
        if not vector_words(problem.width, ITEM_BYTES[problem.dtype]):
            return (
                "the kernel needs rows of a multiple of 4 bytes, but a row has "
                f"{problem.width} numbers of {problem.dtype}"
            )
        return None


@dataclasses.dataclass(frozen=True)
class SegmentSumConfig(Config):
    """Tuning parameters of the kernel for segment sums.

    Attributes:
      columns: most vectors of a row that a CTA adds up, a thread each.
      each: candidates of a thread, about.
      unroll: candidates whose loads are in flight at once.
      warpgroups: of a CTA.
      lists: whether a CTA lists the candidates of one user; otherwise, candidates are put into the
        order of users first, and CTAs share them evenly.
    """

    columns: int = 16
    each: int = 16
    unroll: int = 4
    warpgroups: int = 1
    lists: bool = False

    def divide(self, batch: int, users: int, vectors: int) -> tuple[int, int]:
        """(chunks of columns, CTAs of a chunk)."""
        chunks = -(-vectors // min(self.columns, WARPGROUP_SIZE))
        if self.lists:
            return chunks, users
        lanes = self.warpgroups * WARPGROUP_SIZE // -(-vectors // chunks)
        return chunks, min(users, -(-(batch + users) // (lanes * self.each)))

    def illegal_reason(self, problem: RowsProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if not 1 <= self.columns <= WARPGROUP_SIZE:
            return f"columns must be from 1 to {WARPGROUP_SIZE}, but is {self.columns}"
        if self.each < 1 or not 1 <= self.unroll <= 8 or not 1 <= self.warpgroups <= 4:
            return f"each, unroll up to 8 and warpgroups up to 4 must be at least 1: {self}"
        if self.lists and problem.batch > MOST_LISTED * self.warpgroups:
            return (
                f"{self.warpgroups} warpgroups list at most {MOST_LISTED * self.warpgroups} "
                f"candidates, but B={problem.batch}"
            )
        return problem.why_not_rows()


@dataclasses.dataclass(frozen=True)
class LookUpProblem(RowsProblem):
    """Sizes of a lookup."""

    op: ClassVar[str] = "look_up"
    config_type: ClassVar[type[Config]] = LookUpConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields XLA, then the kernel."""
        if LookUpConfig().illegal_reason(self) is None:
            yield Ranked(None, LookUpConfig())


@dataclasses.dataclass(frozen=True)
class SegmentSumProblem(RowsProblem):
    """Sizes of a segment sum."""

    op: ClassVar[str] = "segment_sum"
    config_type: ClassVar[type[Config]] = SegmentSumConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields the legal configurations worth timing."""
        if self.why_not_rows() is not None:
            return
        yield Ranked(None, default_sum_config(self))


def default_sum_config(problem: RowsProblem) -> SegmentSumConfig:
    """The widest chunks of columns that still give every SM some CTAs."""
    batch, users, vectors = problem.batch, problem.users, problem.vectors
    configs = [
        SegmentSumConfig(columns, each) for each in (16, 8, 4) for columns in (32, 16, 8, 4, 2)
    ]

    def ctas(config: SegmentSumConfig) -> int:
        chunks, slices = config.divide(batch, users, vectors)
        return chunks * slices

    found = next((x for x in configs if ctas(x) >= 4 * NUM_SMS), configs[-1])
    if batch > 512 * users and ctas(found) < NUM_SMS:
        found = dataclasses.replace(found, warpgroups=4)
    return found
