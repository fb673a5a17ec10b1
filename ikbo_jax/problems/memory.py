"""The shared memory and the barriers of one CTA, as a kernel's configuration declares them.

The launch makes a kernel's scratch of them, and `smem_bytes` adds them up.
"""

import dataclasses
import functools
import math
from collections import namedtuple
from typing import Any, ClassVar, NamedTuple

from ikbo_jax.problems.hopper import NUM_CONSUMERS, SMEM_ALIGNMENT

#: Bytes of a barrier.
BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array; ranking adds up the bytes of thousands, so that there is no chain of tests."""

    itemsize: ClassVar[int] = 2
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = math.prod(self.shape) * self.itemsize
        return -(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


class Tiles(_Array):
    """Operand tiles [..., rows, 64] of the inputs' dtype; see `mosaic.operand_tile`."""


class Blocks(_Array):
    """Column blocks [..., rows, width: 16, 32 or 64] for TMA and WGMMA, swizzled by row."""


class Rows(_Array):
    """Rows [..., rows, width] of the inputs' dtype, as they lie in device memory."""


class Words(_Array):
    """Integers of 32 bits."""

    itemsize = 4


@dataclasses.dataclass(frozen=True)
class Floats(_Array):
    """f32 numbers; with `is_swizzled`, rows of 32 for TMA, swizzled like operand tiles."""

    itemsize = 4
    is_swizzled: bool = False


class Staging(_Array):
    """Memory of the inputs' dtype that only an interpreted kernel has."""

    itemsize = 0


@dataclasses.dataclass(frozen=True)
class Barriers:
    """`count` barriers of `arrivals` arrivals, of all CTAs of a cluster if `is_clustered`."""

    count: int
    arrivals: int
    is_clustered: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * BARRIER_BYTES


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
    """Declares a ring of descriptors, whose slots no barrier frees, and `spare` ones beyond."""
    return Ring(None, Words((slots + spare, words)), Barriers(slots, 1), None)


@functools.cache
def _tuple_type(*fields: str) -> Any:
    return namedtuple("Shared", fields)


def shared(**declared: Any) -> Any:
    """Declares what a CTA has: a named tuple, whose fields the kernel reads as references to it.

    The fields' order is that of the scratch. A field is None where a kernel lacks it.
    """
    return _tuple_type(*declared)(**declared)


def smem_bytes(shared: Any) -> int:
    """Adds up the bytes of one CTA's shared memory, a declaration or a tuple of them."""
    if isinstance(shared, tuple):
        return sum(map(smem_bytes, shared))
    return 0 if shared is None else int(shared.nbytes)
