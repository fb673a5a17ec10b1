"""Sizes of generalised dot-product attention, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ikbo_jax.problems.problem import (
    Problem,
)

#: Name of the activation that the attention kernel computes.
SOFTMAX = "softmax"
#: Sequences are full if their mean length is more than this fraction of the bound: nearly all tiles
#: are then whole.
FULL_FRACTION = 0.75


@dataclasses.dataclass(frozen=True)
class GdpaSizes(Problem):
    """Sizes of generalised dot-product attention, or of its gradient, known while tracing.

    Attributes:
      batch: number of query sequences; `batch_kv`: of key-value sequences.
      q_rows: rows of the result, including rows outside all sequences; `kv_rows`: of the keys.
      q_heads: N, number of query heads.
      kv_heads: K, number of key heads; divides N.
      head_dim: H, head width.
      dtype: name of the inputs' dtype.
      activations: one name for each head, or one name for all heads.
      approx: name of an approximation, or None.
      broadcast_q: whether all sequences have the same queries.
      max_seqlen_q: bound of the lengths of query sequences, or None; `max_seqlen_kv` likewise.
      mask: which keys a row sees, in words; empty: all. Tables have no rows for masks.
      has_logit_cap: whether scores are capped. Tables have no rows for caps.
    """

    request: ClassVar[tuple[str, ...]] = ("batch", "batch_kv", "q_rows", "kv_rows")

    batch: int
    batch_kv: int
    q_rows: int
    kv_rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    activations: tuple[str, ...]
    approx: str | None
    broadcast_q: bool
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    mask: str = ""
    has_logit_cap: bool = False

    @property
    def is_full(self) -> bool:
        """Whether mean lengths are near their bounds (`FULL_FRACTION`); False without bounds."""
        bounds = [(self.kv_rows, self.batch_kv, self.max_seqlen_kv)]
        if not self.broadcast_q:
            bounds.append((self.q_rows, self.batch, self.max_seqlen_q))
        return all(
            bound is not None and rows > FULL_FRACTION * sequences * bound
            for rows, sequences, bound in bounds
        )

    @property
    def why_not_softmax(self) -> str | None:
        """Why the forward kernels cannot compute the activations; None if they can."""
        if SOFTMAX not in self.activations or set(self.activations) == {SOFTMAX}:
            return None
        return (
            "the kernels support softmax in all heads or in none, "
            f"but the activations are {', '.join(self.activations)}"
        )

    def useful_flops(self, pairs: int) -> int:
        """Counts two FLOPs per multiply-add of both products; `pairs`: query-key pairs a head."""
        return 4 * pairs * self.q_heads * self.head_dim

    def describe(self) -> str:
        """Formats the problem: `batch=8,8 rows=512,640 N=4 K=4 H=64 gelu bfloat16`."""
        limits = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_kv": self.max_seqlen_kv}
        words = [
            f"batch={self.batch},{self.batch_kv} rows={self.q_rows},{self.kv_rows}",
            f"N={self.q_heads} K={self.kv_heads} H={self.head_dim}",
            *(f"{name}={limit}" for name, limit in limits.items() if limit is not None),
            "+".join(self.activations),
            *([] if self.approx is None else [f"approx={self.approx}"]),
            *(["broadcast_q"] if self.broadcast_q else []),
            *([f"mask={self.mask}"] if self.mask else []),
            *(["logit_cap"] if self.has_logit_cap else []),
            self.dtype,
        ]
        return " ".join(words)

    def _mean_lengths(self) -> tuple[float, float]:
        """Returns the mean lengths of the sequences of queries and of keys."""
        return self.q_rows / max(self.batch, 1), self.kv_rows / max(self.batch_kv, 1)
