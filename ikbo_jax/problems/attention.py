"""Broadcast attention: its problems, and the configurations of its kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from ikbo_jax.problems import hopper
from ikbo_jax.problems.hopper import SMEM_ALIGNMENT, TILE_ROWS
from ikbo_jax.problems.problem import (
    Config,
    Problem,
    attention_distance,
    octave,
    sizes_from_json,
    typed,
)

#: Largest block_kv by head width (width 96 is padded to 128 in shared memory). With larger blocks
#: accumulator, scores and probabilities exceed a consumer thread's 240 registers and spill.
MAX_BLOCK_KV = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
HEAD_DIMS = tuple(MAX_BLOCK_KV)


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Config):
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
        row = hopper.row_bytes(head_dim)
        queries = self.q_slots * TILE_ROWS * row
        ring = (self.k_stages + self.v_stages) * self.block_kv * row
        return queries + ring + 3 * SMEM_ALIGNMENT

    def illegal_reason(self, problem: AttentionProblem) -> str | None:
        """Why the kernel cannot run `problem` with this configuration; None if it can."""
        if reason := hopper.why_not_dtype(problem.dtype):
            return reason
        if reason := hopper.why_not_head_dim(problem.head_dim, HEAD_DIMS):
            return reason
        if problem.kv_len < 1 or problem.users < 1:
            return (
                f"the kernel needs a user and a key, but U={problem.users} and S={problem.kv_len}"
            )
        if problem.q_heads % problem.kv_heads:
            return (
                f"the kernel needs N to be a multiple of K, "
                f"but N={problem.q_heads} and K={problem.kv_heads}"
            )
        widest, operands = MAX_BLOCK_KV[problem.head_dim], "scores and accumulator"
        if reason := hopper.why_not_block(
            "block_kv", self.block_kv, widest, problem.head_dim, operands
        ):
            return reason
        if reason := hopper.why_not_rings(self.k_stages, self.v_stages, self.q_slots):
            return reason
        if self.chunk < 1:
            return f"chunk must be at least 1, but is {self.chunk}"
        stages = min(self.k_stages, self.v_stages)
        if self.reuse and problem.kv_len > stages * self.block_kv:
            return (
                f"reuse needs all keys to fit k_stages and v_stages, but S={problem.kv_len} and "
                f"{stages} stages hold {stages * self.block_kv}"
            )
        return hopper.why_not_smem(self, self.smem_bytes(problem.head_dim), problem.head_dim)


@dataclasses.dataclass(frozen=True)
class AttentionProblem(Problem):
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

    op: ClassVar[str] = "attention"
    config_type: ClassVar[type] = AttentionConfig

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

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        dtype = typed(fields.get("dtype"), str, "dtype")
        return cls(**sizes_from_json(cls, fields), dtype=dtype)

    def describe(self) -> str:
        p = self
        return (
            f"B={p.batch} U={p.users} T={p.q_len} S={p.kv_len} N={p.q_heads} K={p.kv_heads} "
            f"H={p.head_dim} {p.dtype}"
        )

    def shape_class(self) -> str:
        """H exactly, every other size by octave."""
        p = self
        return (
            f"attention h={p.head_dim} s=2^{octave(p.kv_len)} t=2^{octave(p.q_len)} "
            f"b=2^{octave(p.batch)} ratio=2^{octave(p.batch / max(p.users, 1))} "
            f"n=2^{octave(p.q_heads)} k=2^{octave(p.kv_heads)}"
        )

    def distance(self, other: AttentionProblem) -> float:
        """Infinite if H, and so the tiles, differ; see `ATTENTION_DISTANCE_WEIGHTS`."""
        if self.head_dim != other.head_dim:
            return math.inf
        return attention_distance(self._sizes(), other._sizes())

    def candidate_configs(self) -> Iterator[AttentionConfig]:
        """Yields the legal configurations worth timing, the most promising first."""
        # (k_stages, v_stages, q_slots). Three query slots were fastest up to 256 keys: on an H200
        # 0.053 ms instead of 0.076 ms at S = 128, but 0.134 ms instead of 0.123 ms at S = 512.
        rings = [(2, 3, 2), (3, 3, 1), (3, 3, 2), (4, 4, 1), (2, 2, 3), (2, 2, 2), (2, 2, 1)]
        if self.kv_len <= 256:
            rings.sort(key=lambda ring: ring != (2, 2, 3))
        for block_kv in (128, 64):
            for k_stages, v_stages, q_slots in rings:
                config = AttentionConfig(block_kv, k_stages, v_stages, q_slots)
                # reuse: 0.074 ms instead of 0.082 ms at S = 256 and 64 candidates a user in one
                # measurement, 0.086 ms instead of 0.089 ms in another.
                for variant in (config, dataclasses.replace(config, reuse=True)):
                    if variant.illegal_reason(self) is None:
                        yield variant

    def _sizes(self) -> dict[str, float]:
        return {
            "kv_len": self.kv_len,
            "q_len": self.q_len,
            "tiles": self.batch * self.q_len * self.q_heads,
            "ratio": self.batch / max(self.users, 1),
            "heads": self.q_heads / self.kv_heads,
        }
