"""Lookups and segment sums: their problems, and the configurations of their kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from ikbo_jax.problems.hopper import NUM_SMS, WARPGROUP_SIZE
from ikbo_jax.problems.problem import Config, Problem, Ranked, by_rule, doublings, size, typed

#: Dtypes that the kernels accept, and bytes of a number.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Values of `SegmentSumConfig.columns` and `SegmentSumConfig.each` that are considered.
COLUMNS, EACH = (128, 64, 32, 16, 8, 4, 2), (128, 32, 16, 8, 4)
#: Most candidates that a warpgroup lists: 32 for each thread.
MOST_LISTED = 32 * WARPGROUP_SIZE
#: Bytes of one user's candidates up to which XLA sums them, not the kernel; L2 has 50 MB.
CACHE_BYTES = 4e7
#: Vectors of a lookup above which a thread moves two.
MANY_VECTORS = 2**19
#: Largest number that the kernels compute with.
MOST = 2**31 - 2**20


def vector_words(width: int, item_bytes: int) -> int:
    """Counts the 32-bit words that a thread moves at once; 0 if a row ends in half a word."""
    return next((words for words in (4, 2, 1) if width * item_bytes % (4 * words) == 0), 0)


@dataclasses.dataclass(frozen=True)
class RowsProblem(Problem):
    """Holds the sizes of a lookup, or of its transpose.

    Attributes:
      batch: candidates.
      users: users.
      width: numbers of a row.
      dtype: name of the rows' dtype.
      is_sorted: whether the index never decreases.
    """

    batch: int
    users: int
    width: int
    dtype: str
    is_sorted: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        batch, users, width = (size(fields.get(x), x) for x in ("batch", "users", "width"))
        dtype = typed(fields.get("dtype"), str, "dtype")
        return cls(batch, users, width, dtype, typed(fields.get("is_sorted"), bool, "is_sorted"))

    def describe(self) -> str:
        order = " sorted" if self.is_sorted else ""
        return f"B={self.batch} U={self.users} width={self.width} {self.dtype}{order}"

    def distance(self, other: Any) -> float:
        if self.is_sorted != other.is_sorted:
            return math.inf
        pairs = ((self.batch, other.batch), (self.users, other.users), (self.width, other.width))
        return sum(doublings(a, b) for a, b in pairs)

    @property
    def vectors(self) -> int:
        """Number of vectors of a row; one access of a thread moves a vector."""
        words = vector_words(self.width, ITEM_BYTES[self.dtype])
        return self.width * ITEM_BYTES[self.dtype] // (4 * words) if words else self.width

    @property
    def bytes_read(self) -> int:
        """Number of bytes of candidates' rows."""
        return self.batch * self.width * ITEM_BYTES[self.dtype]

    def why_not_rows(self) -> str | None:
        """Says why no kernel takes the rows; None if one does."""
        if self.dtype not in ITEM_BYTES:
            return f"the kernel takes {', '.join(ITEM_BYTES)}, but the rows are {self.dtype}"
        if min(self.batch, self.users, self.width) < 1:
            return f"the kernel needs sizes of at least 1, but has {self.describe()}"
        if (self.batch + self.users) * self.vectors > MOST:
            return f"the kernel takes at most {MOST} vectors of 16 bytes, but {self.describe()}"
        return None


@dataclasses.dataclass(frozen=True)
class LookUpConfig(Config):
    """Holds tuning parameters of the kernel for lookups.

    Attributes:
      accesses: vectors that a thread moves, all in flight at once.
    """

    accesses: int = 2

    def illegal_reason(self, problem: RowsProblem) -> str | None:
        """Says why the kernel cannot run `problem`; None if it can."""
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
    """Holds tuning parameters of the kernel for segment sums.

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
    users: int = 1
    parts: int = 1
    is_clustered: bool = False

    def divide(self, batch: int, users: int, vectors: int) -> tuple[int, int]:
        """Returns the number of chunks of columns, and of CTAs of a chunk."""
        chunks = -(-vectors // min(self.columns, WARPGROUP_SIZE))
        if self.lists:
            return chunks, -(-users // self.users)
        lanes = self.warpgroups * WARPGROUP_SIZE // -(-vectors // chunks)
        lanes *= self.parts
        return chunks, min(users, -(-(batch + users) // (lanes * self.each)))

    def illegal_reason(self, problem: RowsProblem) -> str | None:
        """Says why the kernel cannot run `problem`; None if it can."""
        if not 1 <= self.columns <= WARPGROUP_SIZE:
            return f"columns must be from 1 to {WARPGROUP_SIZE}, but is {self.columns}"
        if self.each < 1 or not 1 <= self.unroll <= 8 or not 1 <= self.warpgroups <= 4:
            return f"each, unroll up to 8 and warpgroups up to 4 must be at least 1: {self}"
        if self.lists and -(-problem.batch // self.parts) > MOST_LISTED * self.warpgroups:
            return (
                f"{self.warpgroups} warpgroups list at most {MOST_LISTED * self.warpgroups} "
                f"candidates, but B={problem.batch}"
            )
        return problem.why_not_rows()


@dataclasses.dataclass(frozen=True)
class LookUpProblem(RowsProblem):
    """Holds the sizes of a lookup."""

    op: ClassVar[str] = "look_up"
    config_type: ClassVar[type[Config]] = LookUpConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields the legal configurations, the most promising first."""
        if LookUpConfig().illegal_reason(self) is None:
            # One access was 10 % faster where all take 1.5 us on an H100, and 5 % slower from
            # 30 us on.
            accesses = (1, 2, 4) if self.batch * self.vectors < MANY_VECTORS else (2, 4, 1)
            yield from by_rule(map(LookUpConfig, accesses))


@dataclasses.dataclass(frozen=True)
class SegmentSumProblem(RowsProblem):
    """Holds the sizes of a segment sum."""

    op: ClassVar[str] = "segment_sum"
    config_type: ClassVar[type[Config]] = SegmentSumConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields the legal ways worth timing, the most promising first."""
        if self.why_not_rows() is not None:
            return
        if self.users == 1 and self.bytes_read <= CACHE_BYTES:
            yield Ranked(None, None, "one user: a reduction by XLA")
        yield from by_rule(filter(self._is_legal, self._configs()))

    def _is_legal(self, config: Config) -> bool:
        return config.illegal_reason(self) is None

    def _configs(self) -> Iterator[SegmentSumConfig]:
        """Yields configurations that list and that share candidates, the faster kind first."""
        warpgroups = next((x for x in (1, 2) if self.batch <= x * MOST_LISTED), 4)
        lists = [SegmentSumConfig(x, 1, 4, warpgroups, lists=True) for x in COLUMNS]
        shares = [SegmentSumConfig(x, each) for each in EACH for x in COLUMNS[2:-2]]
        listing = next((x for x in lists if self._ctas(x) >= 100), lists[-1])
        # CTAs with many candidates take longest; so there should be several of them on each SM.
        least = {128: 4 * NUM_SMS}
        sharing = next(
            (x for x in shares if self._ctas(x) >= least.get(x.each, 3 * NUM_SMS // 2)), shares[-1]
        )
        # As fitted to an H100, in microseconds. Every CTA reads the whole index from L2 to list its
        # candidates. Otherwise CTAs search for theirs, and a launch before may sort.
        listing_us = 4 * self.batch * self._ctas(listing) / 4.5e6 + 2 * (warpgroups - 1)
        sharing_us = 2.5 + self.bytes_read / 3e7 + (0 if self.is_sorted else 3)
        ways = [listing, sharing] if listing_us < sharing_us else [sharing, listing]
        yield from dict.fromkeys([*ways, *shares[:8], *lists])

    def _ctas(self, config: SegmentSumConfig) -> int:
        return math.prod(config.divide(self.batch, self.users, self.vectors))
