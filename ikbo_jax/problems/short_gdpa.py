"""Configurations of the generalised attention's kernel for short sequences."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ikbo_jax.problems import flash, hopper, memory
from ikbo_jax.problems.gdpa_sizes import FULL_FRACTION, SOFTMAX
from ikbo_jax.problems.hopper import BLOCK_K, NUM_SMS, WARPGROUP_SIZE, WGMMA_M
from ikbo_jax.problems.problem import Config

#: Largest block_kv by head width: accumulator, scores and weights of wider ones leave too few
#: registers for two CTAs of an SM.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128}
#: Rows of a tile: what TMA loads of the queries.
TILE_ROWS = (16, 32, 64)
#: Keys of a block of the default configurations: those that were timed.
BLOCKS = (16, 32, 48, 64, 96, 128)
#: Largest number of keys of a sequence for which this kernel is the default. Up to 64 rows, a tile
#: of the kernel for long sequences is one block, at least half of its 128 rows and 128 keys are
#: padding, and nothing hides its latencies: 4,096 sequences of 1 to 64 rows with N = 4 and H = 64
#: take it 0.456 ms on an H100, five times the roofline. Up to 93 rows and at H = 64, this kernel
#: takes 9.2 us and the other one 15.4; with 31 keys and log-normal queries at H = 128, 125 and 186
#: to 268; with 94 keys, 10.9 and 16.9.
MAX_KEYS = 96
#: With at most `MAX_KEYS` keys, this kernel is the default up to this mean number of queries; 172
#: was timed. With more, the other kernel loads keys once for many tiles (`GdpaConfig.run`).
MAX_MEAN_QUERIES = 256
#: Largest number of queries that all sequences share (PMA) for which this kernel is the default
#: with any number of keys: 25.6 us with 23 of them and 64.9 with 19; the other kernel 30.0 and 71.9
#: at best. There its second consumer has no rows.
SEEDS = 64
#: With more keys than `MAX_KEYS`, this kernel is the default for jagged sequences of at most
#: `MAX_FEW_KEYS` rows with at most so many items of 64 rows for each SM: an SM is then not full,
#: and the list of tiles, 4 of 12 to 24 us, is what can be saved. At H = 64, 20.2 us instead of 24.0
#: (2.0 items), 7.7 and 11.8 (2.4), 11.7 and 14.7 (3.7); but at H = 128, 38.5 instead of 32.8 (3.8)
#: and 44.9 instead of 34.5 (5.7).
MAX_FEW_KEYS, FEW_ITEMS = 2048, 4
#: Largest number of queries and keys for which configurations are worth timing in any case.
MAX_CANDIDATE = 128
#: Most sequences for which the default is that CTAs find their tiles: 4.1 instead of 8.0 us (69
#: sequences), 6.6 and 10.8 (698), 16.1 and 20.8 (1,115), 19.3 and 24.7 (1,654). More were not timed
#: but 1,964, with PMA.
MOST_FOUND = 2048
#: If finding takes an SM's registers or memory for a CTA, and fewer CTAs than so many are left,
#: tiles are listed beyond so many items of each: 125.3 us with 3 CTAs and a list of 5.9 us, 134.3
#: with 2 CTAs that find their tiles (55 items each); but 9.2 us with 2 (2.5 items).
FULL_CTAS, FULL_ITEMS = 3, 8
#: Blocks of jagged keys have at least so many, if the longest sequence has more.
NARROW_BLOCK = 64
#: PMA and few tiles take this kernel only if an SM holds two CTAs with blocks of so many keys: at
#: H = 64. What was timed had 128, or 96 where those are too wide.
WIDE_BLOCK = 96
#: Words that the warps of a CTA which finds its tiles exchange: four arrays of four.
FOUND_PARTS = 16
#: Most registers of a thread.
MAX_REGISTERS = 255
#: ptxas gives a thread up to twice the registers of accumulator and scores, and up to 40 more for
#: the activations below, unless one of their approximations is computed.
REGISTER_FACTOR, LONG_REGISTERS = 2, 40
#: Further registers where a CTA finds its tiles, unless LLVM knows that a sequence is one tile and
#: one block: 144 instead of 119 registers at H = 64; 91 where LLVM knows.
FOUND_REGISTERS = 24
LONG_ACTIVATIONS = {
    "gelu": ("polynomial",),
    "gelu_tanh": ("tanh", "tanh_bf16"),
    "silu": ("tanh", "tanh_bf16"),
}
#: Most CTAs of an SM that are worth it: with eight, 16 loads of 1 us are in flight.
MAX_CTAS = 8


class Batch(NamedTuple):
    """What the memory of a CTA that finds its tiles depends on."""

    sequences: int
    is_broadcast: bool
    max_seqlen_q: int | None

    @classmethod
    def of(cls, problem: Any) -> Batch:
        return cls(problem.batch, problem.broadcast_q, problem.max_seqlen_q)

    def has_equal_tiles(self, tile_rows: int) -> bool:
        """Whether all sequences surely have equally many tiles."""
        bound = self.max_seqlen_q
        return self.is_broadcast or (bound is not None and bound <= tile_rows)


@dataclasses.dataclass(frozen=True)
class ShortGdpaConfig(Config):
    """Tuning parameters of the kernel for short sequences.

    Attributes:
      tile_rows: query rows of a tile, 16, 32 or 64, of the 64 rows that the tensor core multiplies.
      block_kv: keys of a block; a multiple of 16.
      slots: slots of queries, and of blocks. All but one are loaded while the consumer computes.
      ctas: CTAs of an SM, which run side by side: their latencies overlap.
      finds_tiles: whether each CTA finds its tiles from all offsets, so that no launch lists them
        before; with an index they are listed nevertheless.
    """

    tile_rows: int = 64
    block_kv: int = 64
    slots: int = 2
    ctas: int = 2
    finds_tiles: bool = False

    def shared(self, head_dim: int, batch: Batch | None = None) -> Any:
        """Declares shared memory and barriers of one CTA; with `batch`, the CTA finds its tiles."""
        blocks = hopper.column_blocks(head_dim)

        def ring(rows: int) -> memory.Ring:
            tiles = memory.Tiles((self.slots, blocks, rows, BLOCK_K))
            return memory.Ring(tiles, None, memory.Barriers(self.slots, blocks), None)

        return memory.shared(
            query=ring(WGMMA_M),
            key=ring(self.block_kv),
            value=ring(self.block_kv),
            staging=memory.Staging((1, WGMMA_M, self.block_kv)),
            found=None if batch is None else self._found(batch),
        )

    def _found(self, batch: Batch) -> Any:
        sequences = batch.sequences
        return memory.shared(
            parts=memory.Words((FOUND_PARTS,)),  # exchanged between warps
            # Running maxima between 0 and the number of rows.
            q_offsets=None if batch.is_broadcast else memory.Words((sequences + 3,)),
            kv_offsets=memory.Words((sequences + 1,)),
            # Tiles up to and with each sequence.
            ends=None if batch.has_equal_tiles(self.tile_rows) else memory.Words((sequences,)),
            kv_numbers=None,
            bins=None,
        )

    def smem_bytes(self, head_dim: int, batch: Batch | None = None) -> int:
        return memory.smem_bytes(self.shared(head_dim, batch))

    def problem_bytes(self, problem: Any) -> int:
        """Counts bytes of shared memory of one CTA for a `GdpaProblem`."""
        return self.smem_bytes(problem.head_dim, Batch.of(problem) if self.finds_tiles else None)

    @hopper.first_reason
    def illegal_reason(self, problem: Any) -> Iterator[str | None]:
        if problem.mask:
            yield f"masks run in XLA, and the call has mask={problem.mask}"
        if problem.has_logit_cap:
            yield "the kernel for short sequences takes no logit_cap"
        yield flash.why_not_operands(problem, self.block_kv, MAX_BLOCK_KV)
        if self.tile_rows not in TILE_ROWS:
            yield f"tile_rows must be 16, 32 or 64, but is {self.tile_rows}"
        yield hopper.why_too_few(self, slots=2, ctas=1)
        yield problem.why_not_softmax
        if self.finds_tiles and problem.batch != problem.batch_kv:
            yield (
                "finds_tiles needs a sequence of keys for each sequence of queries, but there are "
                f"{problem.batch_kv} for {problem.batch}"
            )
        yield hopper.why_not_smem(self, self.problem_bytes(problem), problem.head_dim)
        most = most_ctas(self, problem)
        if self.ctas > most:
            yield (
                f"an SM has shared memory and registers for {most} CTAs with tile_rows="
                f"{self.tile_rows}, block_kv={self.block_kv} and slots={self.slots}, "
                f"but ctas is {self.ctas}"
            )


def registers(config: ShortGdpaConfig, problem: Any) -> int:
    """Bounds the registers of a thread."""
    block = config.block_kv
    if SOFTMAX in problem.activations:
        # A softmax of 48 or 96 keys takes as many registers as of 64 or 128: 128 and 184 at H = 64.
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
    """Counts CTAs for which an SM has shared memory and registers, at most `MAX_CTAS`."""
    by_smem = hopper.ctas_by_smem(config.problem_bytes(problem))
    by_registers = hopper.ctas_by_registers(registers(config, problem))
    return min(by_smem, by_registers, MAX_CTAS)


def longest(problem: Any) -> tuple[float, float]:
    """Bounds the queries and the keys of a sequence; takes the mean without a bound."""
    p = problem
    q = p.q_rows / max(p.batch, 1)
    if not p.broadcast_q and p.max_seqlen_q is not None:
        q = p.max_seqlen_q
    kv = p.kv_rows / max(p.batch_kv, 1) if p.max_seqlen_kv is None else p.max_seqlen_kv
    return q, kv


@functools.lru_cache(maxsize=1024)  # the table asks for each of its rows
def why_preferred(problem: Any) -> str | None:
    """Says why the kernel is the default for a `GdpaProblem`; None if it is not.

    Without bounds, the mean decides, at half of the limits: some sequences are longer.
    """
    p = problem
    queries, keys = longest(p)
    if p.max_seqlen_kv is None:
        keys *= 2
    if p.batch > p.batch_kv or p.head_dim not in MAX_BLOCK_KV:
        return None  # tiles of several query sequences share their keys, or there is no kernel
    if keys <= MAX_KEYS and p.q_rows <= MAX_MEAN_QUERIES * p.batch:
        return f"up to {MAX_KEYS} keys"
    if _widest_block(p) < WIDE_BLOCK:
        return None
    if p.broadcast_q and queries <= SEEDS:
        return f"up to {SEEDS} queries that all sequences share"
    is_few = not p.broadcast_q and work_items(p, WGMMA_M) <= FEW_ITEMS * NUM_SMS
    bounds = (p.max_seqlen_q, p.max_seqlen_kv)
    is_few &= all(bound is not None and bound <= MAX_FEW_KEYS for bound in bounds)
    if is_few and not p.is_full and _may_find(p):
        return f"at most {FEW_ITEMS} tiles for each SM"
    return None


def is_candidate(problem: Any) -> bool:
    """Whether configurations of the kernel are worth timing for a `GdpaProblem`."""
    return max(longest(problem)) <= MAX_CANDIDATE


def candidate_configs(problem: Any) -> Iterator[ShortGdpaConfig]:
    """Yields the legal configurations worth timing, the default one first.

    The second one differs from it in who finds the tiles, if that is legal.
    """
    rows = _tile_rows(problem)
    first = _default_block(problem, rows)
    whole = min(max(-(-int(longest(problem)[1]) // 16) * 16, 16), BLOCKS[-1])
    found: set[ShortGdpaConfig] = set()
    blocks = dict.fromkeys((first, min(whole, 64), whole, 32))
    for block_kv, slots in itertools.product(blocks, (2, 3)):
        plain = ShortGdpaConfig(rows, block_kv, slots)
        finds = _finds_tiles(problem, plain)
        for finds_tiles in (finds, not finds) if not found else (finds,):
            config = _filled(dataclasses.replace(plain, finds_tiles=finds_tiles), problem)
            if config not in found and config.illegal_reason(problem) is None:
                found.add(config)
                yield config


def _tile_rows(problem: Any) -> int:
    queries = longest(problem)[0]
    return next((n for n in TILE_ROWS if queries <= n), WGMMA_M)


def work_items(problem: Any, tile_rows: int) -> float:
    """Estimates the work items: the last tile of each sequence is half full."""
    p, batch = problem, Batch.of(problem)
    if p.broadcast_q:
        tiles = p.batch * -(-p.q_rows // (max(p.batch, 1) * tile_rows))
    elif batch.has_equal_tiles(tile_rows):
        tiles = p.batch
    else:
        tiles = p.q_rows / tile_rows + p.batch / 2
    return float(tiles * p.q_heads)


def _filled(config: ShortGdpaConfig, problem: Any) -> ShortGdpaConfig:
    return dataclasses.replace(config, ctas=max(most_ctas(config, problem), 1))


def _may_find(problem: Any) -> bool:
    return bool(problem.batch == problem.batch_kv and problem.batch <= MOST_FOUND)


def _finds_tiles(problem: Any, plain: ShortGdpaConfig) -> bool:
    """Whether CTAs find their tiles by default."""
    if not _may_find(problem):
        return False
    listed = most_ctas(plain, problem)
    found = most_ctas(dataclasses.replace(plain, finds_tiles=True), problem)
    if found == listed or found >= FULL_CTAS:
        return True
    return found > 0 and work_items(problem, plain.tile_rows) <= FULL_ITEMS * found * NUM_SMS


def _ctas(problem: Any, rows: int, block_kv: int) -> int:
    """Counts the CTAs of an SM by default with these tiles and blocks."""
    plain = ShortGdpaConfig(rows, block_kv)
    config = dataclasses.replace(plain, finds_tiles=_finds_tiles(problem, plain))
    is_spilling = registers(config, problem) > MAX_REGISTERS
    return 0 if is_spilling else most_ctas(config, problem)


def _widest_block(problem: Any) -> int:
    """Finds the widest block with which an SM holds two CTAs; else the narrowest block."""
    rows = _tile_rows(problem)
    fitting = [block for block in BLOCKS if _ctas(problem, rows, block) >= 2]
    return max(fitting, default=BLOCKS[0])


def _default_block(problem: Any, rows: int) -> int:
    """Takes fewest steps for the longest sequence with two CTAs an SM, then the narrowest block.

    Blocks of jagged keys have at least `NARROW_BLOCK`, so that more sequences have one step. And
    they have no more where this saves one step only, and costs a CTA without which some CTAs have a
    second item: 7.7 us with 64 keys, 9.0 with 96 (up to 149 keys, 2.4 items for each SM).
    """
    keys, items = max(longest(problem)[1], 1), work_items(problem, rows)
    widest = _widest_block(problem)
    steps = -(-keys // widest)
    block = next(n for n in BLOCKS if n * steps >= keys)
    is_jagged = problem.kv_rows <= FULL_FRACTION * problem.batch_kv * keys
    if not is_jagged or min(keys, widest) < NARROW_BLOCK:
        return block
    block = max(block, NARROW_BLOCK)

    def is_one_round(block_kv: int) -> bool:
        return items <= _ctas(problem, rows, block_kv) * NUM_SMS

    saves_one = -(-keys // NARROW_BLOCK) <= steps + 1
    prefers_narrow = saves_one and is_one_round(NARROW_BLOCK) and not is_one_round(block)
    return NARROW_BLOCK if prefers_narrow else block
