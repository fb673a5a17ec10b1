"""The shared memory and the barriers of one CTA, as a kernel's configuration declares them.

A configuration's `shared` is a tuple of the declarations below. The launch makes the kernel's
scratch of it, and `smem_bytes` adds it up: what is legal and what is launched cannot differ.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from ikbo_jax.problems.hopper import NUM_CONSUMERS, SMEM_ALIGNMENT

#: Bytes of a barrier.
BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Operand tiles [..., rows, 64] of the inputs' dtype; see `mosaic.operand_tile`."""

    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Column blocks [..., rows, width] of the inputs' dtype, for TMA and WGMMA.

    The width is 16, 32 or 64; memory is swizzled within a row of a block.
    """

    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows [..., rows, width] of the inputs' dtype, as they lie in device memory."""

    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Words:
    """Integers of 32 bits."""

    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Floats:
    """f32 numbers; with `is_swizzled`, rows of 32 for TMA, swizzled like operand tiles."""

    shape: tuple[int, ...]
    is_swizzled: bool = False


@dataclasses.dataclass(frozen=True)
class Staging:
    """Memory that only an interpreted kernel has; without a dtype, it has the inputs' dtype."""

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Barriers:
    """`count` barriers that complete after `arrivals` arrivals each, of all CTAs of a cluster if
    `is_clustered`."""

    count: int
    arrivals: int
    is_clustered: bool = False


class Ring(NamedTuple):
    """Slots that the producer fills, and both consumers free; None for what it lacks.

    In a kernel, the fields hold references: see `hopper.rings.Ring`.
    """

    tiles: Any  # [slots, ...]
    words: Any  # [slots, ...]: descriptors
    ready: Any  # completes when a slot is filled
    free: Any  # completes when the consumers have read a slot


def barriers(slots: int, ready: int, free: Any = None) -> Ring:
    """Declares a ring's barriers; `ready` arrivals fill a slot, whose operands stand elsewhere."""
    return Ring(None, None, Barriers(slots, ready), free or Barriers(slots, NUM_CONSUMERS))


def ring(slots: int, *, ready: int, tiles: tuple[int, ...], words: int | None = None) -> Ring:
    """Declares a ring of operand tiles and descriptors; `ready` arrivals fill a slot."""
    return Ring(
        Tiles((slots, *tiles)),
        None if words is None else Words((slots, words)),
        Barriers(slots, ready),
        Barriers(slots, NUM_CONSUMERS),
    )


def descriptors(slots: int, words: int, *, spare: int = 0) -> Ring:
    """Declares a ring of descriptors alone, whose slots no barrier frees.

    `spare`: descriptors beyond the slots, which no barrier belongs to.
    """
    return Ring(None, Words((slots + spare, words)), Barriers(slots, 1), None)


def smem_bytes(shared: Any) -> int:
    """Adds up the bytes of one CTA's shared memory, a declaration or a tuple of them."""
    if isinstance(shared, tuple):
        return sum(map(smem_bytes, shared))
    if isinstance(shared, Barriers):
        return shared.count * BARRIER_BYTES
    if isinstance(shared, Tiles | Blocks | Rows | Words | Floats):
        size = math.prod(shared.shape) * (2 if isinstance(shared, Tiles | Blocks | Rows) else 4)
        return -(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    return 0
