"""The cache of users' states: assigns slots of the pool to users."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence


class UserCache:
    """Assigns slots to users' states; evicts the least recently used state first.

    Args:
      max_bytes: bytes that all states may take.
      row_bytes: bytes of one user's state; 0 if the model keeps no state.
      least: number of users of the largest call, which all need a slot; ValueError if fewer fit.

    Attributes:
      slots: number of states that fit.
      hits, misses: number of users whose state was found, and was not found.
      evictions: number of states that made room for another state.
    """

    def __init__(self, max_bytes: int, row_bytes: int, least: int) -> None:
        self.slots = max_bytes // row_bytes if row_bytes else least
        if self.slots < least:
            raise ValueError(
                f"the user cache has {max_bytes} bytes but the states of a call's {least} users "
                f"take {least * row_bytes}"
            )
        self.hits = self.misses = self.evictions = 0
        self.clear()

    def __len__(self) -> int:
        return len(self._slot_of)

    def clear(self) -> None:
        """Forgets all states; the counts stay."""
        # The least recently used state is the first.
        self._slot_of: collections.OrderedDict[Hashable, int] = collections.OrderedDict()

    def missing(self, keys: Sequence[Hashable]) -> list[int]:
        """Returns the positions of keys without a state, each key once; counts nothing."""
        absent: dict[Hashable, int] = {}
        for position, key in enumerate(keys):
            if key not in self._slot_of:
                absent.setdefault(key, position)
        return list(absent.values())

    def slots_of(self, keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
        """Assigns slots to keys, of which at most `slots` differ.

        Returns:
          The slot of every key, and the positions of the keys whose states have to be written.
        """
        slot_of, missing = self._slot_of, self.missing(keys)
        # Keys that are found become the most recently used: no key of this call is evicted.
        for key in keys:
            if key in slot_of:
                slot_of.move_to_end(key)
        for position in missing:
            if len(slot_of) < self.slots:  # Slots are freed only by eviction.
                slot = len(slot_of)
            else:
                _, slot = slot_of.popitem(last=False)
                self.evictions += 1
            slot_of[keys[position]] = slot
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        return [slot_of[key] for key in keys], missing
