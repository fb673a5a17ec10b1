"""Problem description of generalised dot-product attention."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GdpaProblem:
    """Sizes of a generalised dot-product attention, as far as they are known while tracing.

    Attributes:
      batch: query sequences.
      batch_kv: key-value sequences.
      q_rows: rows of all queries' results, those of no sequence among them.
      kv_rows: rows of all keys.
      q_heads: N.
      kv_heads: K, divides N.
      head_dim: H.
      dtype: name of the inputs' dtype.
      activations: names, one for each head or one for all of them.
      approx: an approximation's name, or None.
      broadcast_q: that all sequences have the same queries.
      max_seqlen_q: bound of the lengths, or None.
      max_seqlen_kv: bound of the lengths, or None.
    """

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

    def useful_flops(self, pairs: int) -> int:
        """Multiply-adds times two of both products; `pairs` of a query and a key in a sequence."""
        return 4 * pairs * self.q_heads * self.head_dim

    def describe(self) -> str:
        """The problem in one line, e.g. `batch=8,8 rows=512,640 N=4 K=4 H=64 gelu bfloat16`."""
        limits = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_kv": self.max_seqlen_kv}
        words = [
            f"batch={self.batch},{self.batch_kv} rows={self.q_rows},{self.kv_rows}",
            f"N={self.q_heads} K={self.kv_heads} H={self.head_dim}",
            *(f"{name}={limit}" for name, limit in limits.items() if limit is not None),
            "+".join(self.activations),
            *([] if self.approx is None else [f"approx={self.approx}"]),
            *(["broadcast_q"] if self.broadcast_q else []),
            self.dtype,
        ]
        return " ".join(words)
