"""Rings of slots in shared memory, between the producer and the consumers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """A ring in a kernel, as `problems.memory.Ring` declares it.

    A slot is used for every `number` of its remainder: of an item, of a block, or of a k step.
    """

    tiles: Any  # (view for WGMMA, view for TMA) of all slots' operand tiles
    words: Any  # [slots, words] int32
    ready: Any
    free: Any

    @property
    def slots(self) -> int:
        return int(self.ready.shape[0])

    def slot(self, number: Any) -> Any:
        return lax.rem(number, self.slots)

    def matrix(self, number: Any) -> Any:
        """The operand tiles of a slot, as WGMMA and stores from registers see them."""
        return self.tiles[0].at[self.slot(number)]

    def copied(self, number: Any) -> Any:
        """The operand tiles of a slot, as TMA sees them."""
        return self.tiles[1].at[self.slot(number)]

    def ready_at(self, number: Any) -> Any:
        """The barrier that completes when a slot is filled."""
        return self.ready.at[self.slot(number)]

    def free_at(self, number: Any) -> Any:
        """The barrier that completes when the consumers have read a slot."""
        return self.free.at[self.slot(number)]

    def word(self, number: Any, i: int) -> Any:
        return self.words[self.slot(number), i]

    def await_ready(self, number: Any) -> None:
        plgpu.barrier_wait(self.ready_at(number))

    def await_free(self, number: Any) -> None:
        plgpu.barrier_wait(self.free_at(number))

    def await_reuse(self, number: Any) -> None:
        """Waits like `await_free`, but not for a slot's first use: no consumer calls `release_all`.

        So the first loads of a CTA need not wait until its consumers run.
        """
        pl.when(number >= self.slots)(functools.partial(self.await_free, number))

    def release(self, number: Any) -> None:
        """Tells the producer that a consumer has read the slot."""
        plgpu.barrier_arrive(self.free_at(number))

    def skip(self, number: Any) -> None:
        """Frees a filled slot that a consumer does not read."""
        self.await_ready(number)
        self.release(number)

    def send_words(self, number: Any, words: Sequence[Any], after: Ring | None = None) -> None:
        """Writes a slot's first words when the slot of ring `after` is free, and arrives."""
        free = None if after is None else after.free_at(number)
        slot = self.slot(number)
        if free is not None:
            plgpu.barrier_wait(free)
        for i, word in enumerate(words):
            self.words[slot, i] = word
        plgpu.barrier_arrive(self.ready.at[slot])

    def release_all(self) -> None:
        """Frees all slots for a consumer, before its first read or after its last one."""
        for slot in range(self.slots):
            plgpu.barrier_arrive(self.free.at[slot])

    def drain_uses(self, uses: Any) -> None:
        """`drain` if no consumer calls `release_all`; `uses`: numbers that were used, from 0 on."""
        for slot in range(self.slots):
            pl.when(slot < uses)(functools.partial(plgpu.barrier_wait, self.free.at[slot]))

    def drain(self) -> None:
        """Waits until all slots are free: arrivals must precede the release of barriers' memory."""
        for slot in range(self.slots):
            plgpu.barrier_wait(self.free.at[slot])
