"""Lookups and segment sums: their problems, and the configurations of their kernels."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

from ikbo_jax.problems import hopper
from ikbo_jax.problems.hopper import NUM_SMS, WARPGROUP_SIZE
from ikbo_jax.problems.problem import Config, Problem, Ranked

#: Dtypes that the kernels accept, and bytes of a number.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Values of `SegmentSumConfig.columns` and `SegmentSumConfig.each` that are considered.
COLUMNS, EACH = (128, 64, 32, 16, 8, 4, 2), (128, 32, 16, 8, 4)
#: Values of `SegmentSumConfig.parts` that are considered.
PARTS = (1, 2, 4, 8, 16)
#: Most candidates that a warpgroup lists: 32 for each thread.
MOST_LISTED = 32 * WARPGROUP_SIZE
#: Most users whose candidates a CTA lists.
MOST_USERS = 1024
#: Most vectors of a row where CTAs list several users: 4 kB; timed up to 3.3 kB.
MOST_LISTED_VECTORS = 256
#: Most candidates that all CTAs together read, where each lists one user.
MOST_READ = 1e7
#: Threads of CTAs that list, on all SMs at once.
RESIDENT = 4 * WARPGROUP_SIZE * NUM_SMS
#: Bytes of one user's candidates up to which XLA sums them, not the kernel; L2 has 50 MB.
CACHE_BYTES = 4e7
#: Vectors up to which XLA looks rows up; 76: 0.96 us instead of 0.99 (H200), 1.22 and 1.25 (H100).
FEW_VECTORS = WARPGROUP_SIZE
#: Vectors of a lookup from which on a thread moves two.
MANY_VECTORS = 2**17
#: Bytes of a lookup's result from which on L2 evicts it first: 91 us instead of 102 for 220 MB.
STREAMED_BYTES = 3.2e7
#: Largest number that the kernels compute with.
MOST = 2**31 - 2**20


def vector_words(width: int, item_bytes: int) -> int:
    """Counts the 32-bit words that a thread moves at once; 0 if a row ends in half a word."""
    return next((words for words in (4, 2, 1) if width * item_bytes % (4 * words) == 0), 0)


@dataclasses.dataclass(frozen=True)
class RowsProblem(Problem):
    """Holds the sizes of a lookup of `width` numbers a row, or of its transpose."""

    request: ClassVar[tuple[str, ...]] = ("batch", "users")

    batch: int
    users: int
    width: int
    dtype: str
    is_sorted: bool = False

    def describe(self) -> str:
        order = " sorted" if self.is_sorted else ""
        return f"B={self.batch} U={self.users} width={self.width} {self.dtype}{order}"

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
    """Tuning parameters of lookups: vectors that a thread moves at once; whether L2 evicts the
    result.
    """

    accesses: int = 2
    streams: bool = False

    @hopper.first_reason
    def illegal_reason(self, problem: RowsProblem) -> Iterator[str | None]:
        if not 1 <= self.accesses <= 16:
            yield f"accesses must be from 1 to 16, but is {self.accesses}"
        yield problem.why_not_rows()
        if not vector_words(problem.width, ITEM_BYTES[problem.dtype]):
            yield (
                "the kernel needs rows of a multiple of 4 bytes, but a row has "
                f"{problem.width} numbers of {problem.dtype}"
            )


@dataclasses.dataclass(frozen=True)
class SegmentSumConfig(Config):
    """Holds tuning parameters of the kernel for segment sums.

    Attributes:
      columns: most vectors of a row that a CTA adds up, a thread each.
      each: candidates of a thread, about.
      unroll: candidates whose loads are in flight at once.
      users: users whose candidates a CTA lists; 0: candidates are put into the order of users
        first, and CTAs share them evenly.
      parts: parts of the candidates, each with CTAs of its own that list.
    """

    columns: int = 16
    each: int = 16
    unroll: int = 4
    warpgroups: int = 1
    users: int = 0
    parts: int = 1

    def divide(self, batch: int, users: int, vectors: int) -> tuple[int, int]:
        """Returns the number of chunks of columns, and of CTAs of a chunk and a part."""
        chunks = -(-vectors // min(self.columns, WARPGROUP_SIZE))
        if self.users:
            return chunks, -(-users // self.users)
        lanes = self.warpgroups * WARPGROUP_SIZE // -(-vectors // chunks)
        return chunks, min(users, -(-(batch + users) // (lanes * self.each)))

    @hopper.first_reason
    def illegal_reason(self, problem: RowsProblem) -> Iterator[str | None]:
        if not 1 <= self.columns <= WARPGROUP_SIZE:
            yield f"columns must be from 1 to {WARPGROUP_SIZE}, but is {self.columns}"
        if self.each < 1 or not 1 <= self.unroll <= 8 or not 1 <= self.warpgroups <= 4:
            yield f"each, unroll up to 8 and warpgroups up to 4 must be at least 1: {self}"
        if not 0 <= self.users <= MOST_USERS or self.parts < 1 or self.parts > 1 > self.users:
            yield f"users must be from 0 to {MOST_USERS}, and parts 1, or more with users: {self}"
        if self.users and -(-problem.batch // self.parts) > MOST_LISTED * self.warpgroups:
            yield (
                f"{self.warpgroups} warpgroups list at most {MOST_LISTED * self.warpgroups} of "
                f"B={problem.batch} candidates in each of {self.parts} parts"
            )
        yield problem.why_not_rows()
        if self.parts * problem.users * problem.vectors > MOST:
            yield f"{self.parts} parts have more than {MOST} vectors: {problem.describe()}"


@dataclasses.dataclass(frozen=True)
class LookUpProblem(RowsProblem):
    """Holds the sizes of a lookup."""

    op: ClassVar[str] = "look_up"
    config_type: ClassVar[type[Config]] = LookUpConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields XLA, if few vectors are looked up, and the kernel's configuration, if legal."""
        if LookUpConfig().illegal_reason(self) is None:
            if self.batch * self.vectors <= FEW_VECTORS:
                yield Ranked(None, None, "few vectors: a gather by XLA")
            # Two were 10 % slower where all take 1.3 us, and 12 % faster where they take 5 (H200).
            accesses = 1 if self.batch * self.vectors < MANY_VECTORS else 2
            yield Ranked(None, LookUpConfig(accesses, self.bytes_read >= STREAMED_BYTES))


@dataclasses.dataclass(frozen=True)
class SegmentSumProblem(RowsProblem):
    """Holds the sizes of a segment sum."""

    op: ClassVar[str] = "segment_sum"
    config_type: ClassVar[type[Config]] = SegmentSumConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields XLA, if there is one user, and the kernel's configuration, if one is legal."""
        if self.why_not_rows() is not None:
            return
        if self.users == 1 and self.bytes_read <= CACHE_BYTES:
            yield Ranked(None, None, "one user: a reduction by XLA")
        yield Ranked(None, self._fastest())

    def _fastest(self) -> SegmentSumConfig:
        """Chooses whether CTAs list or share candidates, and how."""
        shares = [SegmentSumConfig(x, each) for each in EACH for x in COLUMNS[2:-2]]
        # CTAs with many candidates take longest; so there should be several of them on each SM.
        least = {128: 4 * NUM_SMS}
        sharing = next(
            (x for x in shares if self._ctas(x) >= least.get(x.each, 3 * NUM_SMS // 2)), shares[-1]
        )
        # Five CTAs with eight loads in flight fit an SM: 40 us instead of 43 for 134 MB, but 67
        # instead of 56 where rows are gathered.
        if self.is_sorted and self.bytes_read > CACHE_BYTES and self._ctas(sharing) <= 5 * NUM_SMS:
            sharing = dataclasses.replace(sharing, unroll=8)
        listings = (x for x in self._listings() if x.illegal_reason(self) is None)
        listing = min(listings, key=self._listing_us, default=None)
        if listing and self._listing_us(listing) < self._sharing_us(sharing):
            return listing
        return sharing

    def _listings(self) -> Iterator[SegmentSumConfig]:
        """Yields configurations whose CTAs list one user, or as many as four CTAs on an SM need."""
        warpgroups = next((x for x in (1, 2) if self.batch <= x * MOST_LISTED), 4)
        # 227 MB of 15 users: 55.9 us with eight loads in flight, 60.1 with four.
        unroll = 8 if self.bytes_read > CACHE_BYTES and self.batch >= 64 * self.users else 4
        lists = [SegmentSumConfig(x, 1, unroll, warpgroups, 1) for x in COLUMNS]
        config = next((x for x in lists if self._ctas(x) >= 100), lists[-1])
        if self.batch * self._ctas(config) <= MOST_READ:
            yield config
        if self.vectors > MOST_LISTED_VECTORS or self.bytes_read > CACHE_BYTES:
            return
        # A sorted part has the candidates of few users, and so of few CTAs.
        all_parts = PARTS[:1] if self.is_sorted else PARTS
        wide = min(16, self.vectors)
        for warpgroups, parts in itertools.product((1, 2, 4), all_parts):
            ctas, unroll = 4 * NUM_SMS // warpgroups // parts, 4
            users = {x: -(-self.users // max(1, ctas // -(-self.vectors // x))) for x in (4, wide)}
            # Narrow chunks divide a hot user: 11.4 us, not 20.6; where all are alike, 6.0, not 5.5.
            columns = 4 if self.vectors > 16 and users[4] <= 32 else wide
            # XLA adds up fewer parts, and a lane loads all its candidates at once: 5.9 us, not 6.2.
            if (warpgroups, parts) == (2, 16) and parts * self.users * self.width > 2**19:
                parts, unroll = 8, 8
            yield SegmentSumConfig(columns, 1, unroll, warpgroups, users[columns], parts)

    def _listing_us(self, config: SegmentSumConfig) -> float:
        """Estimates the microseconds of a launch that lists, and of XLA's sum of parts."""
        chunks, runs = config.divide(self.batch, self.users, self.vectors)
        threads = config.warpgroups * WARPGROUP_SIZE
        ctas, lanes = chunks * runs * config.parts, threads // -(-self.vectors // chunks)
        part, waves = self.batch / config.parts, max(1, ctas * threads / RESIDENT)
        listed = part / runs
        reading = max(1, ctas / NUM_SMS) * part  # candidates, by an SM
        summing = 0.125 * waves * listed / lanes
        if config.users > 1:
            summing += waves * (0.33 * math.ceil(listed / threads) + 0.001 * config.users)
        us = 1.6 + 0.4 * config.warpgroups + self._memory_us(2.2e-4 * reading + summing)
        if config.parts > 1:
            us += 1.5 + 1.9e-6 * config.parts * self.users * self.width
        return us

    def _sharing_us(self, config: SegmentSumConfig) -> float:
        """Estimates the same of a launch that shares candidates, and of one that orders them."""
        us = 3.5 + self._memory_us(0.06 * config.each + 1.3e-7 * self.bytes_read)
        return us + (0 if self.is_sorted else 1.5 + 1.7e-4 * self.batch + 1.2e-4 * self.users)

    def _memory_us(self, us: float) -> float:
        """Returns the longer of `us` and the time to read rows that do not stay in L2."""
        return max(us, 3.9e-7 * self.bytes_read * (self.bytes_read > CACHE_BYTES))

    def _ctas(self, config: SegmentSumConfig) -> int:
        return math.prod(config.divide(self.batch, self.users, self.vectors))
