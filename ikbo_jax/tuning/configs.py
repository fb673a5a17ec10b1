"""Problem descriptions, kernel configurations, and the one rule that says which of them are legal.

The dispatch table, the autotuner and the kernels' host side all ask `illegal_reason`; nothing else
decides whether a configuration may run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

#: Shared memory one CTA may use on Hopper, bytes (227 KiB of the SM's 256 KiB).
MAX_SMEM_BYTES = 227 * 1024
#: Every shared memory allocation starts at a multiple of this, which TMA and WGMMA swizzles need.
SMEM_ALIGNMENT = 1024
#: Rows of one consumer warpgroup's tile: the m of a WGMMA instruction.
WGMMA_M = 64
#: The k of one WGMMA instruction on 16-bit operands.
WGMMA_K = 16
#: Warpgroups that multiply; one more feeds them.
NUM_CONSUMERS = 2
#: Embedding rows of a pipeline stage: one swizzled row of shared memory, 128 bytes.
BLOCK_K = 64
#: Staging buffers of a consumer warpgroup: one is written while the other is on its way out.
STAGING_SLOTS = 2
#: Wider tiles spill: accumulator and fragment take 196 of a consumer thread's 240 registers at 224.
MAX_BLOCK_M = 224
KERNEL_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LinearCompressionProblem:
    """Sizes of a (multi-level) linear compression; levels run from coarsest to finest.

    Attributes:
      batches: rows of every level, e.g. (U, B).
      ks: embedding rows K of every level, e.g. (K_user, K_cand).
      m: compressed rows.
      n: embedding width.
      dtype: name of the inputs' dtype.
    """

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    m: int
    n: int
    dtype: str

    @property
    def useful_flops(self) -> int:
        """Multiply-adds times two, every level at its own batch: no padding, no copies."""
        return sum(2 * b * k * self.m * self.n for b, k in zip(self.batches, self.ks, strict=True))


@dataclasses.dataclass(frozen=True)
class LinearCompressionConfig:
    """Tuning parameters of the linear-compression kernel.

    Attributes:
      block_m: compressed rows of a CTA tile, the n of a WGMMA instruction; a multiple of 16.
      num_stages: stages of the shared memory ring, each 64 embedding rows deep.
      epilogue_rows: compressed rows that leave in one store; divides block_m.
      single_launch: computes the last two levels in one launch instead of one launch a level.
      cluster: CTAs that share weight tiles through multicast, 1 or 2.
      trim: multiplies only those rows of the last M tile that exist, in a second copy of the main
        loop; for most shapes that spills registers, for M = 433 and long K it saves 1.8 %.
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
        row = BLOCK_K * 2  # bytes of a row of any tile, 64 elements of 16 bits
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
            f"block_m must be a multiple of 16 from 16 to {MAX_BLOCK_M}, where accumulators and a "
            f"finished tile still fit the registers, but is {config.block_m}"
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
            f"block_m / epilogue_rows must be a multiple of {STAGING_SLOTS}, so that a tile begins "
            f"with the staging buffer that has been free for longest, but is "
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
    """Yields the legal configurations worth timing for `problem`, the likeliest best first.

    The first one is what runs where nothing was measured nearby; the autotuner times them in this
    order. Configurations that differ from the first in one respect come before those that differ
    in two.
    """

    # A k-step of 16 reads its 64 x 16 embedding operand from shared memory in the 16 cycles that
    # the tensor core needs for 32 rows of M, so a tile costs about 32 rows more than it has.
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
        divisors.sort(key=lambda rows: max(rows / 56, 56 / rows))  # 56 was best beside 224
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


#: Head widths of the attention kernel (96 is padded to 128 in shared memory), and the widest blocks
#: of keys beside which a consumer thread's accumulator, scores and weights fit its 240 registers:
#: more spills.
ATTENTION_MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
ATTENTION_HEAD_DIMS = tuple(ATTENTION_MAX_BLOCK_KV)
#: Rows of a CTA tile: of one query head, of candidates that follow one another.
ATTENTION_TILE_ROWS = NUM_CONSUMERS * WGMMA_M


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Sizes of a broadcast attention.

    Attributes:
      batch: candidates B.
      users: U.
      q_len: queries T of a candidate.
      kv_len: keys S of a user.
      q_heads: N.
      kv_heads: K, divides N.
      head_dim: H.
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
        """Multiply-adds times two of both products, every key valid: no padding, no softmax."""
        return 4 * self.batch * self.q_len * self.q_heads * self.kv_len * self.head_dim


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Tuning parameters of the attention kernel.

    Attributes:
      block_kv: keys of a pipeline stage; a multiple of 16.
      k_stages: stages of the ring of key blocks.
      v_stages: stages of the ring of value blocks.
      q_slots: 2 or 3: the next tiles' queries arrive early and the output leaves through the
        finished tile's slot by TMA; 1: 32 KiB less shared memory at H = 128, but the output leaves
        from registers, which costs short sequences more than stages bring. 3 are for one or two
        blocks of keys, where a tile is done before the next one's queries have come.
      chunk: tiles of one head that are worked on next to one another, so that they find their
        user's keys in L2.
      reuse: a CTA works on neighbouring tiles, whatever `chunk` is, and keeps keys and values from
        one tile to the next of the same user; for keys that all fit the stages.
      balance: with T an odd multiple of 64, tiles are cut where users end, so that a tile of two
        candidates with different users is two units of work, not a long one.
      early_scores: the second block of a pass is multiplied while the pass before is stored; acts
        with T a multiple of 64, H up to 128 and two or three query slots.
      late_turns: a consumer lets the other one issue its products when its own scores are there,
        not when it has issued its own; so the two take exponentials at different times.
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
            f"block_kv must be a multiple of {WGMMA_K} from {WGMMA_K} to {widest}, where scores "
            f"and accumulator of H={problem.head_dim} fit the registers, but is {config.block_kv}"
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
    """Yields the legal configurations worth timing for `problem`, the likeliest best first."""
    # (k_stages, v_stages, q_slots); three slots were best up to 256 keys: 0.053 instead of 0.076 ms
    # at S = 128 on an H200, but 0.134 instead of 0.123 at S = 512.
    rings = [(2, 3, 2), (3, 3, 1), (3, 3, 2), (4, 4, 1), (2, 2, 3), (2, 2, 2), (2, 2, 1)]
    if problem.kv_len <= 256:
        rings.sort(key=lambda ring: ring != (2, 2, 3))
    for block_kv in (128, 64):
        for k_stages, v_stages, q_slots in rings:
            config = AttentionConfig(block_kv, k_stages, v_stages, q_slots)
            # Keys that stay: 0.074 instead of 0.082 ms at S = 256, 64 candidates a user, in one
            # run, 0.086 instead of 0.089 in another.
            for candidate in (config, dataclasses.replace(config, reuse=True)):
                if attention_illegal_reason(problem, candidate) is None:
                    yield candidate


def default_attention_config(problem: AttentionProblem) -> AttentionConfig | None:
    """What runs where nothing was measured nearby; None if no configuration is legal."""
    return next(attention_candidate_configs(problem), None)
