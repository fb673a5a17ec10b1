"""Configurations of the generalised attention's kernel for short sequences."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ikbo_jax.problems import flash, hopper, memory
from ikbo_jax.problems.gdpa_sizes import SOFTMAX
from ikbo_jax.problems.hopper import BLOCK_K, WARPGROUP_SIZE, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_kv by head width: accumulator, scores and weights of wider ones leave too few
#: registers for two CTAs of an SM.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128}
#: Rows of a tile: what TMA loads of the queries.
TILE_ROWS = (16, 32, 64)
#: Largest number of keys of a sequence, and of its queries, for which this kernel is the default.
#: Up to 64 rows, a tile of the kernel for long sequences is one block, at least half of its 128
#: rows and 128 keys are padding, and nothing hides its latencies: 4,096 sequences of 1 to 64 rows
#: with N = 4 and H = 64 take it 0.456 ms on an H100, five times the roofline. Up to 93 rows and at
#: H = 64, this kernel takes 11.6 us and the other one 18.9; up to 75 at H = 128, 29.9 and 36.7.
MAX_KEYS, MAX_QUERIES = 96, 96
#: Largest number of either for which configurations of this kernel are worth timing.
MAX_CANDIDATE = 128
#: Most sequences for which the default is that CTAs find their tiles; none was timed yet.
MOST_FOUND = 0
#: Words that the warps of a CTA which finds its tiles exchange: four arrays of four.
FOUND_PARTS = 16
#: Most registers of a thread.
MAX_REGISTERS = 255
#: ptxas gives a thread up to twice the registers of accumulator and scores, and up to 40 more for
#: the activations below, unless one of their approximations is computed.
REGISTER_FACTOR, LONG_REGISTERS = 2, 40
#: And so many more where a CTA finds its tiles, unless LLVM knows that a sequence is one tile and
#: one block: 144 instead of 119 at H = 64; 91 where it knows.
FOUND_REGISTERS = 24
LONG_ACTIVATIONS = {
    "gelu": ("polynomial",),
    "gelu_tanh": ("tanh", "tanh_bf16"),
    "silu": ("tanh", "tanh_bf16"),
}
#: Most CTAs of an SM that are worth it: with eight, 16 loads of 1 us are in flight.
MAX_CTAS = 8


class Batch(NamedTuple):
    """What the memory of a CTA that finds its tiles depends on.

    Attributes:
      sequences: their number.
      is_broadcast: whether all have the same queries.
      max_seqlen_q: longest sequence of queries, or None.
    """

    sequences: int
    is_broadcast: bool
    max_seqlen_q: int | None

    @classmethod
    def of(cls, problem: Any) -> Batch:
        """Of a `GdpaProblem`."""
        return cls(problem.batch, problem.broadcast_q, problem.max_seqlen_q)

    def has_equal_tiles(self, tile_rows: int) -> bool:
        """Whether all sequences surely have equally many tiles."""
        bound = self.max_seqlen_q
        return self.is_broadcast or (bound is not None and bound <= tile_rows)


class FoundTilesShared(NamedTuple):
    """Shared memory of a CTA that finds its tiles, int32; see `flash.found_tiles`."""

    parts: Any  # [16]: exchanged between warps
    q_offsets: Any  # [batch + 3]: running maxima between 0 and the number of rows, or None
    kv_offsets: Any  # [batch + 1]: likewise, not surrounded
    ends: Any  # [batch]: tiles up to and with each sequence; None if each has equally many
    kv_numbers: Any = None  # of launches that have an index
    bins: Any = None  # of launches that sort


class ShortGdpaShared(NamedTuple):
    """Shared memory and barriers of the kernel; shapes follow the slot."""

    query: Any  # ring of [column blocks, 64, 64]
    key: Any  # ring of [column blocks, block_kv, 64]
    value: Any  # likewise
    staging: Any  # [1, 64, columns], only under interpretation
    row_staging: Any  # [1, 64] f32, only under interpretation
    found: Any = None  # `FoundTilesShared`, or None


@dataclasses.dataclass(frozen=True)
class ShortGdpaConfig(Config):
    """Tuning parameters of the kernel for short sequences.

    Attributes:
      tile_rows: query rows of a tile, 16, 32 or 64. The tensor core multiplies 64 rows in any case,
        but fewer are loaded.
      block_kv: keys of a block; a multiple of 16.
      slots: slots of queries, of blocks of keys and of blocks of values. All but one are loaded
        while the consumer computes.
      ctas: CTAs of an SM, which run side by side: their latencies overlap.
      finds_tiles: whether each CTA finds its tiles from all offsets, so that no launch lists them
        before; with an index they are listed nevertheless.
    """

    tile_rows: int = 64
    block_kv: int = 64
    slots: int = 2
    ctas: int = 2
    finds_tiles: bool = False

    def shared(self, head_dim: int, batch: Batch | None = None) -> ShortGdpaShared:
        """Shared memory and barriers of one CTA; of one that finds the tiles of `batch`."""
        blocks = hopper.column_blocks(head_dim)

        def ring(rows: int) -> memory.Ring:
            tiles = memory.Tiles((self.slots, blocks, rows, BLOCK_K))
            return memory.Ring(tiles, None, memory.Barriers(self.slots, blocks), None)

        return ShortGdpaShared(
            query=ring(WGMMA_M),
            key=ring(self.block_kv),
            value=ring(self.block_kv),
            staging=memory.Staging((1, WGMMA_M, max(self.block_kv, head_dim))),
            row_staging=memory.Staging((1, WGMMA_M), "float32"),
            found=None if batch is None else self._found(batch),
        )

    def _found(self, batch: Batch) -> FoundTilesShared:
        sequences = batch.sequences
        return FoundTilesShared(
            parts=memory.Words((FOUND_PARTS,)),
            q_offsets=None if batch.is_broadcast else memory.Words((sequences + 3,)),
            kv_offsets=memory.Words((sequences + 1,)),
            ends=None if batch.has_equal_tiles(self.tile_rows) else memory.Words((sequences,)),
        )

    def smem_bytes(self, head_dim: int, batch: Batch | None = None) -> int:
        """Bytes of shared memory of one CTA."""
        return memory.smem_bytes(self.shared(head_dim, batch))

    def problem_bytes(self, problem: Any) -> int:
        """Bytes of shared memory of one CTA for a `GdpaProblem`."""
        return self.smem_bytes(problem.head_dim, Batch.of(problem) if self.finds_tiles else None)

    def illegal_reason(self, problem: Any) -> str | None:
        """Why the kernel cannot run a `GdpaProblem` with this configuration; None if it can."""
        if reason := flash.why_not_operands(problem, self.block_kv, MAX_BLOCK_KV):
            return reason
        if self.tile_rows not in TILE_ROWS:
            return f"tile_rows must be 16, 32 or 64, but is {self.tile_rows}"
        if self.slots < 2 or self.ctas < 1:
            return f"slots must be at least 2 and ctas 1, but are {self.slots} and {self.ctas}"
        if "softmax" in problem.activations and len(set(problem.activations)) > 1:
            return (
                "the kernels support softmax in all heads or in none, "
                f"but the activations are {', '.join(problem.activations)}"
            )
        if self.finds_tiles and problem.batch != problem.batch_kv:
            return (
                "finds_tiles needs a sequence of keys for each sequence of queries, but there are "
                f"{problem.batch_kv} for {problem.batch}"
            )
        smem_bytes = self.problem_bytes(problem)
        if reason := hopper.why_not_smem(self, smem_bytes, problem.head_dim):
            return reason
        most = most_ctas(self, problem)
        if self.ctas > most:
            return (
                f"an SM has shared memory and registers for {most} CTAs with tile_rows="
                f"{self.tile_rows}, block_kv={self.block_kv} and slots={self.slots}, "
                f"but ctas is {self.ctas}"
            )
        return None


def registers(config: ShortGdpaConfig, problem: Any) -> int:
    """Registers of a thread that a launch takes at most."""
    block = config.block_kv
    if SOFTMAX in problem.activations:
        # 48 and 96 keys take it as many registers as 64 and 128: 128 and 184 at H = 64.
        block = 1 << (block - 1).bit_length()
    values = WGMMA_M * (block + problem.head_dim) // WARPGROUP_SIZE
    is_long = any(
        problem.approx not in LONG_ACTIVATIONS.get(name, (problem.approx,))
        for name in problem.activations
    )
    bound = problem.max_seqlen_kv
    is_one_step = bound is not None and bound <= config.block_kv
    is_one_step &= Batch.of(problem).has_equal_tiles(config.tile_rows)
    count = REGISTER_FACTOR * values + is_long * LONG_REGISTERS
    count += (config.finds_tiles and not is_one_step) * FOUND_REGISTERS
    return min(-(-count // 8) * 8, MAX_REGISTERS + 1)


def most_ctas(config: ShortGdpaConfig, problem: Any) -> int:
    """CTAs for which an SM has shared memory and registers, at most `MAX_CTAS`."""
    by_smem = hopper.ctas_by_smem(config.problem_bytes(problem))
    by_registers = hopper.ctas_by_registers(registers(config, problem))
    return min(by_smem, by_registers, MAX_CTAS)


def longest(problem: Any) -> tuple[float, float]:
    """Bounds of the numbers of queries and of keys of a sequence; the mean without a bound."""
    p = problem
    q = p.q_rows / max(p.batch, 1)
    if not p.broadcast_q and p.max_seqlen_q is not None:
        q = p.max_seqlen_q
    kv = p.kv_rows / max(p.batch_kv, 1) if p.max_seqlen_kv is None else p.max_seqlen_kv
    return q, kv


def is_preferred(problem: Any) -> bool:
    """Whether the kernel is the default for a `GdpaProblem`: every sequence is one short tile.

    Without bounds, the mean decides, at half of the limits: some sequences are longer.
    """
    p = problem
    queries, keys = longest(p)
    if p.max_seqlen_kv is None:
        keys *= 2
    if not p.broadcast_q and p.max_seqlen_q is None:
        queries *= 2
    if p.batch > p.batch_kv or p.head_dim not in MAX_BLOCK_KV:
        return False  # tiles of several query sequences share their keys, or there is no kernel
    return bool(keys <= MAX_KEYS and queries <= MAX_QUERIES)


def is_candidate(problem: Any) -> bool:
    """Whether configurations of the kernel are worth timing for a `GdpaProblem`."""
    return max(longest(problem)) <= MAX_CANDIDATE


def candidate_configs(problem: Any) -> Iterator[ShortGdpaConfig]:
    """Yields the legal configurations worth timing, the most promising first.

    Of those whose CTAs find their tiles, the first only: before the others up to `MOST_FOUND`
    sequences, else as the second one.
    """
    queries, keys = longest(problem)
    rows = next((n for n in TILE_ROWS if queries <= n), WGMMA_M)
    block = min(max(-(-int(keys) // 16) * 16, 16), 128)
    blocks = dict.fromkeys((min(block, 64), block, 64, 32))
    is_first, is_found = True, problem.batch <= MOST_FOUND
    for block_kv, slots in itertools.product(blocks, (2, 3)):
        for finds_tiles in (is_found, not is_found) if is_first else (False,):
            plain = ShortGdpaConfig(rows, block_kv, slots, 1, finds_tiles)
            if plain.illegal_reason(problem) is None:
                yield dataclasses.replace(plain, ctas=most_ctas(plain, problem))
                is_first = False
