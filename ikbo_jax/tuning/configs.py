"""Problem descriptions, kernel configurations, and the rules that say which of them are legal.

The dispatch table, the autotuner and the kernels' host code all call `illegal_reason` or
`attention_illegal_reason`; no other code decides whether a configuration may run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

#: Bytes of shared memory that one CTA may use on Hopper (227 KiB of the SM's 256 KiB).
MAX_SMEM_BYTES = 227 * 1024
#: Alignment of every shared memory allocation in bytes; TMA and WGMMA swizzles need it.
SMEM_ALIGNMENT = 1024
#: Rows of one consumer warpgroup's tile: the m of a WGMMA instruction.
WGMMA_M = 64
#: The k of one WGMMA instruction on 16-bit operands.
WGMMA_K = 16
#: Number of consumer warpgroups, which multiply; one producer warpgroup loads their operands.
NUM_CONSUMERS = 2
#: Embedding rows of a pipeline stage: one swizzled row of shared memory, 128 bytes.
BLOCK_K = 64
#: Staging buffers of a consumer warpgroup: it writes one while TMA stores the other.
STAGING_SLOTS = 2
#: Largest block_m without register spills: at 224, accumulator and fragment take 196 of a consumer
#: thread's 240 registers.
MAX_BLOCK_M = 224
#: Dtypes that the kernels accept.
KERNEL_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LinearCompressionProblem:
    """Sizes of a (multi-level) linear compression; levels are ordered from coarsest to finest.

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


@dataclasses.dataclass(frozen=True)
class LinearCompressionConfig:
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

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: ring, staging buffers, tickets and barriers."""
        row = BLOCK_K * 2  # bytes of one row of a tile: 64 elements of 16 bits
        ring = self.num_stages * (self.block_m + NUM_CONSUMERS * BLOCK_K) * row
        staging = NUM_CONSUMERS * STAGING_SLOTS * self.epilogue_rows * row
        return ring + -(-staging // SMEM_ALIGNMENT) * SMEM_ALIGNMENT + 2 * SMEM_ALIGNMENT


def illegal_reason(
    problem: LinearCompressionProblem, config: LinearCompressionConfig
) -> str | None:
    """Why the kernel cannot run `problem` with `config`; None if it can."""
    if problem.dtype not in KERNEL_DTYPES:
        return f"the kernel takes {' and '.join(KERNEL_DTYPES)}, but the inputs are {problem.dtype}"
    if problem.n % 8:
        return f"the kernel needs N to be a multiple of 8 (16 bytes, for TMA), but N={problem.n}"
    if min(problem.ks) < 1:
        return f"the kernel needs K of at least 1 at every level, but K={problem.ks}"
    if config.block_m % 16 or not 16 <= config.block_m <= MAX_BLOCK_M:
        return (
            f"block_m must be a multiple of 16 from 16 to {MAX_BLOCK_M}, so that accumulators and "
            f"a finished tile fit the registers, but is {config.block_m}"
        )
    if (
        config.epilogue_rows < 8
        or config.epilogue_rows % 8
        or config.block_m % config.epilogue_rows
    ):
        return (
            f"epilogue_rows must be a multiple of 8 that divides block_m={config.block_m}, "
            f"but is {config.epilogue_rows}"
        )
    if (config.block_m // config.epilogue_rows) % STAGING_SLOTS:
        return (
            f"block_m / epilogue_rows must be a multiple of {STAGING_SLOTS}, so that every tile "
            f"starts with the staging buffer whose store was issued first, but is "
            f"{config.block_m} / {config.epilogue_rows}"
        )
    if config.num_stages < 2:
        return f"num_stages must be at least 2, but is {config.num_stages}"
    if config.cluster not in (1, 2):
        return f"cluster must be 1 or 2, but is {config.cluster}"
    if config.smem_bytes > MAX_SMEM_BYTES:
        return (
            f"{config} needs {config.smem_bytes} bytes of shared memory, "
            f"but a CTA has {MAX_SMEM_BYTES}"
        )
    return None


def candidate_configs(problem: LinearCompressionProblem) -> Iterator[LinearCompressionConfig]:
    """Yields the legal configurations worth timing for `problem`, the most promising first.

    The first one is the default configuration; the autotuner times them in this order.
    Configurations that differ from the first in one parameter precede those that differ in two.
    """

    # A k-step of 16 reads its 64 x 16 embedding operand from shared memory in 16 cycles, in which
    # the tensor core could multiply 32 rows of M. So a tile costs block_m + 32 rows.
    def cost(block_m: int) -> int:
        return -(-problem.m // block_m) * (block_m + 32)

    block_ms = sorted(
        range(16, MAX_BLOCK_M + 1, 16), key=lambda block_m: (cost(block_m), -block_m)
    )[:3]
    stages = (4, 5, 3)
    single_launches = (True, False) if len(problem.batches) > 1 else (False,)
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
        legal = [config for config in configs if illegal_reason(problem, config) is None]
        ranked.extend((i + j + k + c + rank, config) for rank, config in enumerate(legal[:2]))
        if legal and problem.m > block_m and problem.m % block_m:
            ranked.append((i + j + k + c + 1, dataclasses.replace(legal[0], trim=True)))
    ranked.sort(key=lambda entry: entry[0])
    yield from (config for _, config in ranked)


#: Largest block_kv by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: accumulator, scores and probabilities exceed a consumer thread's 240 registers and spill.
ATTENTION_MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
ATTENTION_HEAD_DIMS = tuple(ATTENTION_MAX_BLOCK_KV)
#: Query rows of a CTA tile: consecutive rows of one query head, of one or more candidates.
ATTENTION_TILE_ROWS = NUM_CONSUMERS * WGMMA_M


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Sizes of a broadcast attention.

    Attributes:
      batch: B, number of candidates.
      users: U, number of users.
      q_len: T, queries of a candidate.
      kv_len: S, keys of a user.
      q_heads: N, number of query heads.
      kv_heads: K, number of key heads; divides N.
      head_dim: H, head width.
      dtype: name of the inputs' dtype.
    """

    batch: int
    users: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def useful_flops(self) -> int:
        """Two FLOPs per multiply-add of both products, all keys valid; no padding, no softmax."""
        return 4 * self.batch * self.q_len * self.q_heads * self.kv_len * self.head_dim


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Tuning parameters of the attention kernel.

    Attributes:
      block_kv: keys of a block, which fills a pipeline stage; a multiple of 16.
      k_stages: stages of the ring of key blocks.
      v_stages: stages of the ring of value blocks.
      q_slots: number of query slots. With 2 or 3, the queries of the next tiles are loaded early,
        and TMA stores the output from the slot of the finished tile. With 1, the kernel uses 32 KiB
        less shared memory at H = 128 but stores the output from registers, which costs short
        sequences more than further stages gain. 3 is for one or two blocks of keys, where a tile
        is finished before the queries of the next one have arrived.
      chunk: number of consecutive tiles of one head in the schedule, which find their user's keys
        in L2.
      reuse: whether a CTA processes neighbouring tiles, ignoring `chunk`, and keeps keys and values
        in shared memory between tiles of the same user; needs all keys to fit the stages.
      balance: whether tiles are split where users end, if T is an odd multiple of 64. A tile that
        holds two candidates of different users is then two work items instead of one long one.
      early_scores: whether the scores of a pass's second block are computed while the preceding
        pass stores its output; takes effect if T is a multiple of 64, H at most 128 and q_slots 2
        or 3.
      late_turns: whether a consumer warpgroup lets the other one issue its products only after its
        own scores have arrived, and not already after it has issued its own products; so the two
        compute exponentials at different times.
    """

    block_kv: int = 128
    k_stages: int = 2
    v_stages: int = 3
    q_slots: int = 2
    chunk: int = 32
    reuse: bool = False
    balance: bool = False
    early_scores: bool = False
    late_turns: bool = False

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of one CTA: query slots, both rings, tile descriptors, flags, barriers."""
        row = -(-head_dim // BLOCK_K) * BLOCK_K * 2
        queries = self.q_slots * ATTENTION_TILE_ROWS * row
        ring = (self.k_stages + self.v_stages) * self.block_kv * row
        return queries + ring + 3 * SMEM_ALIGNMENT


def attention_illegal_reason(problem: AttentionProblem, config: AttentionConfig) -> str | None:
    """Why the attention kernel cannot run `problem` with `config`; None if it can."""
    if problem.dtype not in KERNEL_DTYPES:
        return f"the kernel takes {' and '.join(KERNEL_DTYPES)}, but the inputs are {problem.dtype}"
    if problem.head_dim not in ATTENTION_HEAD_DIMS:
        return (
            f"the kernel takes head widths {', '.join(map(str, ATTENTION_HEAD_DIMS))}, "
            f"but H={problem.head_dim}"
        )
    if problem.kv_len < 1 or problem.users < 1:
        return f"the kernel needs a user and a key, but U={problem.users} and S={problem.kv_len}"
    if problem.q_heads % problem.kv_heads:
        return (
            f"the kernel needs N to be a multiple of K, "
            f"but N={problem.q_heads} and K={problem.kv_heads}"
        )
    widest = ATTENTION_MAX_BLOCK_KV[problem.head_dim]
    if config.block_kv % WGMMA_K or not WGMMA_K <= config.block_kv <= widest:
        return (
            f"block_kv must be a multiple of {WGMMA_K} from {WGMMA_K} to {widest}, so that scores "
            f"and accumulator fit the registers at H={problem.head_dim}, but is {config.block_kv}"
        )
    if min(config.k_stages, config.v_stages) < 2:
        return (
            f"k_stages and v_stages must be at least 2, "
            f"but are {config.k_stages} and {config.v_stages}"
        )
    if config.q_slots not in (1, 2, 3):
        return f"q_slots must be 1, 2 or 3, but is {config.q_slots}"
    if config.chunk < 1:
        return f"chunk must be at least 1, but is {config.chunk}"
    stages = min(config.k_stages, config.v_stages)
    if config.reuse and problem.kv_len > stages * config.block_kv:
        return (
            f"reuse needs all keys to fit k_stages and v_stages, but S={problem.kv_len} and "
            f"{stages} stages hold {stages * config.block_kv}"
        )
    smem_bytes = config.smem_bytes(problem.head_dim)
    if smem_bytes > MAX_SMEM_BYTES:
        return (
            f"{config} needs {smem_bytes} bytes of shared memory at H={problem.head_dim}, "
            f"but a CTA has {MAX_SMEM_BYTES}"
        )
    return None


def attention_candidate_configs(problem: AttentionProblem) -> Iterator[AttentionConfig]:
    """Yields the legal configurations worth timing for `problem`, the most promising first."""
    # (k_stages, v_stages, q_slots). Three query slots were fastest up to 256 keys: on an H200
    # 0.053 ms instead of 0.076 ms at S = 128, but 0.134 ms instead of 0.123 ms at S = 512.
    rings = [(2, 3, 2), (3, 3, 1), (3, 3, 2), (4, 4, 1), (2, 2, 3), (2, 2, 2), (2, 2, 1)]
    if problem.kv_len <= 256:
        rings.sort(key=lambda ring: ring != (2, 2, 3))
    for block_kv in (128, 64):
        for k_stages, v_stages, q_slots in rings:
            config = AttentionConfig(block_kv, k_stages, v_stages, q_slots)
            # reuse: 0.074 ms instead of 0.082 ms at S = 256 and 64 candidates a user in one
            # measurement, 0.086 ms instead of 0.089 ms in another.
            for variant in (config, dataclasses.replace(config, reuse=True)):
                if attention_illegal_reason(problem, variant) is None:
                    yield variant


def default_attention_config(problem: AttentionProblem) -> AttentionConfig | None:
    """The configuration without a measured row nearby; None if no configuration is legal."""
    return next(attention_candidate_configs(problem), None)
