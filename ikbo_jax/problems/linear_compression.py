"""Linear compression: its problems, and the configurations of its kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikbo_jax.problems import hopper, memory, packed_compression, packed_cost, resident_cost
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M
from ikbo_jax.problems.packed_compression import STAGING_SLOTS, PackedCompressionConfig
from ikbo_jax.problems.problem import Config, Problem, Ranked, by_rule
from ikbo_jax.problems.resident_compression import ResidentCompressionConfig

#: Most configurations of tiles that span candidates which the autotuner times.
MOST_PACKED = 12
#: The autotuner times configurations whose estimate is at most this factor of the lowest estimate.
WORTH_TIMING = 1.3
#: Largest block_m without register spills: at 224, accumulator and fragment take 196 of a consumer
#: thread's 240 registers.
MAX_BLOCK_M = 224


@dataclasses.dataclass(frozen=True)
class LinearCompressionConfig(Config):
    """Tuning parameters of the linear-compression kernel.

    Attributes:
      block_m: compressed rows of a CTA tile, the n of a WGMMA instruction; a multiple of 16.
      num_stages: stages of the shared memory ring; each holds 64 embedding rows.
      epilogue_rows: compressed rows that one TMA store writes; divides block_m.
      single_launch: whether one launch computes the last two levels, instead of one launch each.
      cluster: number of CTAs that share weight tiles by multicast, 1 or 2.
      trim: whether a second copy of the main loop multiplies only the valid rows of the last M
        tile. It spills registers for most shapes; for M = 433 and long K it saves 1.8 %.
    """

    block_m: int = 224
    num_stages: int = 4
    epilogue_rows: int = 56
    single_launch: bool = True
    cluster: int = 2
    trim: bool = False

    def shared(self, *, with_claims: bool) -> Any:
        """Declares shared memory and barriers of one CTA; `with_claims`: of a single launch."""
        stages = self.num_stages
        return memory.shared(
            weight=memory.Tiles((stages, self.block_m, BLOCK_K)),
            embedding=memory.Tiles((stages, NUM_CONSUMERS, BLOCK_K, WGMMA_M)),
            staging=memory.Tiles((NUM_CONSUMERS, STAGING_SLOTS, self.epilogue_rows, WGMMA_M)),
            **packed_compression.rings(self, 1 + NUM_CONSUMERS, with_claims=with_claims),
        )

    @hopper.first_reason
    def illegal_reason(self, problem: LinearCompressionSizes) -> Iterator[str | None]:
        yield hopper.why_not_rows(problem)
        if min(problem.ks) < 1:
            yield f"the kernel needs K of at least 1 at every level, but K={problem.ks}"
        if self.block_m % 16 or not 16 <= self.block_m <= MAX_BLOCK_M:
            yield (
                f"block_m must be a multiple of 16 from 16 to {MAX_BLOCK_M}, so that accumulators "
                f"and a finished tile fit the registers, but is {self.block_m}"
            )
        yield packed_compression.why_not_stages(self, self.block_m, self.block_m)


@dataclasses.dataclass(frozen=True)
class LinearCompressionSizes(Problem):
    """Sizes of a (multi-level) linear compression, or of its gradient; the coarsest level is first.

    Attributes:
      batches: batch size of every level, e.g. (U, B).
      ks: embedding rows K of every level, e.g. (K_user, K_cand).
      m: M, compressed rows; `n`: N, embedding width.
      dtype: name of the inputs' dtype.
    """

    request: ClassVar[tuple[str, ...]] = ("batches",)

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    m: int
    n: int
    dtype: str

    @property
    def useful_flops(self) -> int:
        """Number of FLOPs, every level at its batch size, without padding and copies."""
        return sum(2 * b * k * self.m * self.n for b, k in zip(self.batches, self.ks, strict=True))

    def describe(self) -> str:
        batches = ",".join(map(str, self.batches))
        ks = ",".join(map(str, self.ks))
        return f"B={batches} K={ks} M={self.m} N={self.n} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class LinearCompressionProblem(LinearCompressionSizes):
    """Sizes of a (multi-level) linear compression, forward."""

    op: ClassVar[str] = "linear_compression"
    config_type: ClassVar[type] = LinearCompressionConfig

    @classmethod
    def config_type_of(cls, fields: Mapping[str, Any]) -> type[Config]:
        if "accumulators" in fields:
            return ResidentCompressionConfig
        return PackedCompressionConfig if "block_n" in fields else LinearCompressionConfig

    def rank(self) -> Iterator[Ranked]:
        """Yields XLA and the legal configurations of three kernels, by their models' times.

        Of tiles of one candidate, the time of the first configuration stands for all.
        """
        rows = [*self.row_configs()]
        row_us = packed_cost.estimated_row_us(self, rows[0]) if rows else math.inf
        resident = resident_cost.ranked_configs(self)
        kernels = {
            "with tiles that span candidates": packed_cost.ranked_configs(self)[:MOST_PACKED],
            "with tiles of one candidate": [Ranked(row_us, config) for config in rows],
        }
        if resident_cost.is_timed(self):
            kernels = {"with resident weights": resident, **kernels}
        us = {name: ways[0].us for name, ways in kernels.items() if ways and ways[0].us is not None}
        most = WORTH_TIMING * min(us.values(), default=math.inf)
        # XLA runs small problems whose launches take longer than the work.
        us["in XLA"] = packed_cost.estimated_xla_us(self)
        estimates = ", ".join(f"{time:.1f} us {name}" for name, time in us.items())
        xla = Ranked(us["in XLA"], None, f"XLA by a cost model, {estimates}")
        timed = [(x.us or 0.0, x) for x in (*itertools.chain(*kernels.values()), xla)]
        timed.sort(key=lambda entry: entry[0])
        yield from (x for time, x in timed if time <= most or x is xla)
        if not resident_cost.is_timed(self):
            yield from by_rule(x.config for x in resident)

    def row_configs(self) -> Iterator[LinearCompressionConfig]:
        """Yields the configurations of the kernel whose tiles have columns of one candidate.

        Configurations that differ from the first in one parameter precede those that differ in two.
        """

        # A k-step of 16 reads its 64 x 16 embedding operand from shared memory in 16 cycles, in
        # which the tensor core could multiply 32 rows of M. So a tile costs block_m + 32 rows.
        def cost(block_m: int) -> int:
            return -(-self.m // block_m) * (block_m + 32)

        block_ms = sorted(
            range(16, MAX_BLOCK_M + 1, 16), key=lambda block_m: (cost(block_m), -block_m)
        )[:3]
        single_launches = (True, False) if len(self.batches) > 1 else (False,)
        ranked: list[tuple[int, LinearCompressionConfig]] = []
        for (i, block_m), (j, num_stages) in itertools.product(
            enumerate(block_ms), enumerate((4, 5, 3))
        ):
            divisors = [rows for rows in range(8, block_m + 1, 8) if block_m % rows == 0]
            # With block_m=224, epilogue_rows=56 was fastest.
            divisors.sort(key=lambda rows: max(rows / 56, 56 / rows))
            plain = (LinearCompressionConfig(block_m, num_stages, rows) for rows in divisors)
            legal = [*itertools.islice((x for x in plain if not x.illegal_reason(self)), 2)]
            shapes = [(rank, config.epilogue_rows, False) for rank, config in enumerate(legal)]
            if legal and self.m > block_m and self.m % block_m:
                shapes.append((1, legal[0].epilogue_rows, True))
            for (k, single_launch), (c, cluster), (rank, rows, trim) in itertools.product(
                enumerate(single_launches), enumerate((2, 1)), shapes
            ):
                config = LinearCompressionConfig(
                    block_m, num_stages, rows, single_launch, cluster, trim
                )
                ranked.append((i + j + k + c + rank, config))
        ranked.sort(key=lambda entry: entry[0])
        yield from (config for _, config in ranked)
