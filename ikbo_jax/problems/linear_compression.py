"""Linear compression: its problems, and the configurations of its kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from ikbo_jax.problems import memory, packed_compression, packed_cost, resident_cost
from ikbo_jax.problems.hopper import (
    BLOCK_K,
    NUM_CONSUMERS,
    WGMMA_M,
    why_not_dtype,
    why_not_smem,
    why_not_width,
)
from ikbo_jax.problems.packed_compression import STAGING_SLOTS, PackedCompressionConfig
from ikbo_jax.problems.problem import Config, Problem, doublings, octave, size, typed
from ikbo_jax.problems.resident_compression import ResidentCompressionConfig

#: Most candidates of the kernel whose tiles span candidates, and of the kernel whose CTAs keep
#: their weights, that the autotuner times.
MOST_PACKED, MOST_RESIDENT = 12, 12
#: Largest block_m without register spills: at 224, accumulator and fragment take 196 of a consumer
#: thread's 240 registers.
MAX_BLOCK_M = 224
#: A nearby row's block_m may pad M to at most this multiple of M padded by the default block_m.
MAX_EXTRA_PADDING = 1.125
#: Coefficients of linear compression's distance. M decides how tiles fit and has the largest
#: coefficient; the coarse levels do little work.
DISTANCE_WEIGHTS = {
    "m": 2.0,
    "n": 1.0,
    "k_fine": 1.0,
    "b_fine": 1.0,
    "k_coarse": 0.25,
    "ratio": 0.25,
}
#: Added to the distance for each level that only one of the problems has.
LEVEL_DISTANCE = 2.0


class LinearCompressionShared(NamedTuple):
    """Shared memory and barriers of linear compression."""

    weight: Any  # [stages, block_m, 64]
    embedding: Any  # [stages, 2, 64, 64]
    staging: Any  # [2, STAGING_SLOTS, epilogue_rows, 64]
    stages: Any  # ring, whose operands are the two above
    tickets: Any  # ring of one word, filled only; None unless CTAs claim user tiles
    user_stage_free: Any  # `stages.free` of the user phase; likewise


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

    def shared(self, *, with_claims: bool) -> LinearCompressionShared:
        """Shared memory and barriers of one CTA; `with_claims`: of a single launch."""
        stages = self.num_stages
        return LinearCompressionShared(
            weight=memory.Tiles((stages, self.block_m, BLOCK_K)),
            embedding=memory.Tiles((stages, NUM_CONSUMERS, BLOCK_K, WGMMA_M)),
            staging=memory.Tiles((NUM_CONSUMERS, STAGING_SLOTS, self.epilogue_rows, WGMMA_M)),
            **packed_compression.rings(self, 1 + NUM_CONSUMERS, with_claims=with_claims),
        )

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of one CTA of a single launch; other launches take less."""
        return memory.smem_bytes(self.shared(with_claims=True))

    def illegal_reason(self, problem: LinearCompressionSizes) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := why_not_dtype(problem.dtype):
            return reason
        if reason := why_not_width(problem.n):
            return reason
        if min(problem.ks) < 1:
            return f"the kernel needs K of at least 1 at every level, but K={problem.ks}"
        if self.block_m % 16 or not 16 <= self.block_m <= MAX_BLOCK_M:
            return (
                f"block_m must be a multiple of 16 from 16 to {MAX_BLOCK_M}, so that accumulators "
                f"and a finished tile fit the registers, but is {self.block_m}"
            )
        if self.epilogue_rows < 8 or self.epilogue_rows % 8 or self.block_m % self.epilogue_rows:
            return (
                f"epilogue_rows must be a multiple of 8 that divides block_m={self.block_m}, "
                f"but is {self.epilogue_rows}"
            )
        if (self.block_m // self.epilogue_rows) % STAGING_SLOTS:
            return (
                f"block_m / epilogue_rows must be a multiple of {STAGING_SLOTS}, so that every "
                f"tile starts with the staging buffer whose store was issued first, but is "
                f"{self.block_m} / {self.epilogue_rows}"
            )
        return packed_compression.why_not_stages(self) or why_not_smem(self, self.smem_bytes)


@dataclasses.dataclass(frozen=True)
class LinearCompressionSizes(Problem):
    """Sizes of a (multi-level) linear compression, or of its gradient; the coarsest level is first.

    Attributes:
      batches: batch size of every level, e.g. (U, B).
      ks: embedding rows K of every level, e.g. (K_user, K_cand).
      m: M, compressed rows.
      n: N, embedding width.
      dtype: name of the inputs' dtype.
    """

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    m: int
    n: int
    dtype: str

    @property
    def useful_flops(self) -> int:
        """Two FLOPs per multiply-add, every level at its batch size; no padding, no copies."""
        return sum(2 * b * k * self.m * self.n for b, k in zip(self.batches, self.ks, strict=True))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        batches = tuple(size(b, "batches") for b in typed(fields.get("batches"), list, "batches"))
        ks = tuple(size(k, "ks") for k in typed(fields.get("ks"), list, "ks"))
        if not batches or len(batches) != len(ks):
            raise ValueError(f"row has {len(batches)} batches and {len(ks)} ks")
        dtype = typed(fields.get("dtype"), str, "dtype")
        return cls(batches, ks, size(fields.get("m"), "m"), size(fields.get("n"), "n"), dtype)

    def describe(self) -> str:
        batches = ",".join(map(str, self.batches))
        ks = ",".join(map(str, self.ks))
        return f"B={batches} K={ks} M={self.m} N={self.n} {self.dtype}"

    def shape_class(self) -> str:
        """Batches, ratios, K by octave; M by 16, the step of block_m; N by 128, a tile's width.

        An N below 128 is a class of its own: it decides how many candidates fill a tile.
        """
        batches = self.batches
        n = self.n if self.n < 128 else -(-self.n // 128) * 128
        ratios = [octave(fine / max(coarse, 1)) for coarse, fine in _adjacent(batches)]
        return (
            f"{self.op} b=2^{octave(batches[-1])} "
            f"ratio={','.join(f'2^{r}' for r in ratios) or '-'} "
            f"k={','.join(f'2^{octave(k)}' for k in self.ks)} "
            f"m={-(-self.m // 16) * 16} n={n}"
        )

    def distance(self, other: LinearCompressionSizes) -> float:
        """Weighted sum of |log2| of the sizes' ratios; levels are paired from the finest.

        See `DISTANCE_WEIGHTS`; "ratio" is a level's batch over the batch of the next coarser one.
        """
        weights = DISTANCE_WEIGHTS
        total = weights["m"] * doublings(self.m, other.m) + weights["n"] * doublings(
            self.n, other.n
        )
        total += weights["k_fine"] * doublings(self.ks[-1], other.ks[-1])
        total += weights["b_fine"] * doublings(self.batches[-1], other.batches[-1])
        for k_a, k_b in zip(self.ks[-2::-1], other.ks[-2::-1], strict=False):
            total += weights["k_coarse"] * doublings(k_a, k_b)
        ratios_a = [fine / max(coarse, 1) for coarse, fine in _adjacent(self.batches)]
        ratios_b = [fine / max(coarse, 1) for coarse, fine in _adjacent(other.batches)]
        for r_a, r_b in zip(ratios_a[::-1], ratios_b[::-1], strict=False):
            total += weights["ratio"] * doublings(r_a, r_b, least=1e-6)
        return total + LEVEL_DISTANCE * abs(len(self.batches) - len(other.batches))


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

    def candidate_configs(
        self,
    ) -> Iterator[LinearCompressionConfig | PackedCompressionConfig | ResidentCompressionConfig]:
        """Yields the legal configurations worth timing, the most promising first.

        The first one is the default configuration; the autotuner times them in this order.
        """
        resident = resident_cost.candidate_configs(self)[:MOST_RESIDENT]
        is_resident = resident_cost.is_preferred(self)
        if is_resident:
            yield from resident
        packed = itertools.islice(packed_cost.candidate_configs(self), MOST_PACKED)
        if packed_cost.is_preferred(self):
            yield from packed
        yield from self.row_configs()
        if packed_cost.is_candidate(self):
            yield from packed
        if not is_resident and resident_cost.is_candidate(self):
            yield from resident

    def why_xla(self) -> str | None:
        """XLA runs small problems whose launches take longer than the work."""
        if resident_cost.is_preferred(self) or not packed_cost.is_xla_preferred(self):
            return None
        return f"XLA by a cost model, {packed_cost.describe_estimates(self)}"

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
        stages = (4, 5, 3)
        single_launches = (True, False) if len(self.batches) > 1 else (False,)
        clusters = (2, 1)
        ranked: list[tuple[int, LinearCompressionConfig]] = []
        for (i, block_m), (j, num_stages), (k, single_launch), (c, cluster) in itertools.product(
            enumerate(block_ms), enumerate(stages), enumerate(single_launches), enumerate(clusters)
        ):
            divisors = [rows for rows in range(8, block_m + 1, 8) if block_m % rows == 0]
            # With block_m=224, epilogue_rows=56 was fastest.
            divisors.sort(key=lambda rows: max(rows / 56, 56 / rows))
            configs = [
                LinearCompressionConfig(block_m, num_stages, rows, single_launch, cluster)
                for rows in divisors
            ]
            legal = [config for config in configs if config.illegal_reason(self) is None]
            ranked.extend((i + j + k + c + rank, config) for rank, config in enumerate(legal[:2]))
            if legal and self.m > block_m and self.m % block_m:
                ranked.append((i + j + k + c + 1, dataclasses.replace(legal[0], trim=True)))
        ranked.sort(key=lambda entry: entry[0])
        yield from (config for _, config in ranked)

    def fits(self, config: Config) -> bool:
        """False if a model prefers the other kernel or XLA, or if tiles pad M by far more."""
        if not isinstance(config, LinearCompressionConfig):
            return False
        if resident_cost.is_preferred(self):
            return False
        if packed_cost.is_preferred(self) or packed_cost.is_xla_preferred(self):
            return False
        return pads_little(self.m, config.block_m, self.default_config().block_m)


def pads_little(m: int, block_m: int, default_block_m: int) -> bool:
    """Whether tiles pad M to at most `MAX_EXTRA_PADDING` times what tiles of a default need."""
    padded, by_default = (-(-m // block) * block for block in (block_m, default_block_m))
    return padded <= MAX_EXTRA_PADDING * by_default


def _adjacent(batches: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(batches[:-1], batches[1:], strict=True))
