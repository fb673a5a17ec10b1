"""Lower bounds of the time of an alternative, from work that its form cannot avoid.

A bound decides whether an alternative is compiled at all, so it must hold for every code that XLA
or cuDNN may choose. Therefore:

- Rates are those of the data sheet of the fastest card. A measured rate would be too low while
  other processes use the device, and the bound too high.
- Only arrays that exist as a whole between two kernels count: copies, gradients of copies, scores.
  Between the two kernels, the L2 cache may hold `L2_BYTES` of the array. Only the rest is certainly
  written to device memory and read from it.
- Kernels of one program run one after another, so their times add; the two limits of one kernel
  may overlap, so the larger one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from benchmarks.production_draws import AttentionShape, CompressionShape
from ikbo_jax.reference.attention_grouped import blocking

#: L2 cache of an H100 and of an H200, rounded up; no array keeps more of itself there.
L2_BYTES = 60e6


class Peaks(NamedTuple):
    """Rates that no program exceeds.

    Attributes:
      num_bytes: bytes per second, read and written.
      flops: dense bfloat16 FLOP/s.
    """

    num_bytes: float
    flops: float


#: Of an H200 (4.8 TB/s) and of a GH200 (4.9 TB/s): the fastest cards of compute capability 9.0.
HOPPER = Peaks(4.9e12, 990e12)


class Stage(NamedTuple):
    """Work of one kernel, or of several that run one after another."""

    num_bytes: float = 0.0
    flops: float = 0.0


class Work(NamedTuple):
    """What a program certainly does, in order; `backward` is added for gradients."""

    forward: tuple[Stage, ...] = ()
    backward: tuple[Stage, ...] = ()


def peaks() -> Peaks | None:
    """Rates of the default device; None if they are not known, so that no bound holds."""
    device = jax.devices()[0]
    is_hopper = str(getattr(device, "compute_capability", "")) == "9.0"
    return HOPPER if device.platform == "gpu" and is_hopper else None


def least_ms(work: Work, direction: str, rates: Peaks) -> float:
    """Milliseconds that a program needs at least."""
    stages: Sequence[Stage] = work.forward if direction == "forward" else sum(work, ())
    return 1e3 * sum(max(s.num_bytes / rates.num_bytes, s.flops / rates.flops) for s in stages)


def beyond_l2(num_bytes: float) -> float:
    """Bytes of an array between two kernels that pass through device memory, in each direction."""
    return max(0.0, num_bytes - L2_BYTES)


def attention_copies(shape: AttentionShape) -> Work:
    """Keys and values are copied for every candidate, and gradients of the copies are added."""
    key_bytes = 2 * 2 * shape.kv_heads * shape.head_dim
    copies = beyond_l2(float(shape.batch) * shape.kv_len * key_bytes)
    # The attention may leave out keys past the lengths, but the copies have them.
    keys = shape.lengths[shape.cand_to_user].sum(dtype="int64")
    read = beyond_l2(float(keys) * key_bytes)
    return Work(
        (Stage(copies), Stage(read, shape.flops)),
        (Stage(read + copies, 2.5 * shape.flops), Stage(copies)),
    )


def attention_by_xla(shape: AttentionShape) -> Work:
    """Every step of the XLA path has scores in f32, and then exponentials in 16 bits.

    A product writes the scores; the maximum of a row is known only after all of its scores are
    read. The exponentials are either written and read, or the scores are read again, which is more.
    """
    s = shape
    blocks = blocking(s.batch, s.users, s.q_len, s.kv_len, s.q_heads, s.kv_heads, s.head_dim)
    served = min(s.batch, s.users)
    groups = served + (s.batch - served) // blocks.group
    steps = -(-groups // blocks.groups) * -(-s.kv_len // blocks.keys)
    scores = float(blocks.groups) * blocks.group * s.q_len * s.q_heads * blocks.keys
    flops, wide, narrow = 2 * scores * s.head_dim, beyond_l2(4 * scores), beyond_l2(2 * scores)
    stages = (Stage(wide, flops), Stage(wide + narrow), Stage(narrow, flops))
    forward = tuple(Stage(x * steps, y * steps) for x, y in stages)
    # The gradient's five products; what is written between them depends on how XLA fuses.
    return Work(forward, (Stage(flops=5 * flops * steps),))


def compression_copies(shape: CompressionShape) -> Work:
    """Users' embeddings are copied for every candidate, and gradients of the copies are added."""
    s = shape
    copies = beyond_l2(2.0 * s.batch * s.k_user * s.n)
    product = 2.0 * s.m * s.n * s.batch * (s.k_cand + s.k_user)
    return Work(
        (Stage(copies), Stage(copies, product)),
        (Stage(copies, product), Stage(copies, product), Stage(copies)),
    )
