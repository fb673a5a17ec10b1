"""Sizes, memory and barriers of the generalised attention's kernel for short sequences."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.worklist.segments import SegmentContext
from ikbo_jax.pallas.worklist.segments import Shape as Segments


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch.

    `activation` is None for a softmax; `segments`, for found tiles, is None if they are listed.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    workers: int
    activation: ActivationSpec | None
    log2_scale: float
    output_scale: float
    segments: Segments | None


class Operands(NamedTuple):
    """Device memory."""

    query: Any  # [q_rows, N, H]
    key: Any  # [kv_rows, K, H]
    value: Any  # [kv_rows, K, H]
    words: Any  # [most tiles, lists.TILE_WORDS] int32; None if tiles are found
    counts: Any  # [2] int32; likewise
    cu_seqlens_q: Any  # of `Offsets`; None if tiles are listed
    cu_seqlens_kv: Any  # likewise
    q_to_kv: None = None


class Outputs(NamedTuple):
    """Device memory that a launch fills."""

    out: Any  # [rows, N, H]
    lse: Any  # [rows, N] f32, or None


class Item(NamedTuple):
    """One head of a tile."""

    source: Any  # first row of the queries
    target: Any  # first row of the result
    rows: Any
    first_key: Any
    length: Any  # number of keys
    head: Any


class Context(WarpgroupContext):
    """The context of the CTA's warpgroup."""

    @property
    def spare(self) -> int:
        """Steps, and items, that are loaded before they are computed."""
        slots: int = self.config.slots - 1
        return slots

    @property
    def segments(self) -> SegmentContext:
        """The context in which the CTA finds its tiles."""
        found, outputs = self.shared.found, self.outputs
        return SegmentContext(
            self.shape.segments, None, found, self.operands, outputs, self.interpret, self.worker
        )
