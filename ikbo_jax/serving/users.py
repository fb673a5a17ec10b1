"""Which slot of the pool holds which user's state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import cachetools


class _Slots(cachetools.LRUCache[Hashable, int]):
    """Calls `free` with the slot of every entry that it evicts."""

    def __init__(self, maxsize: int, row_bytes: int, free: Callable[[int], None]) -> None:
        super().__init__(maxsize, getsizeof=lambda slot: row_bytes)
        self._free = free

    def popitem(self) -> tuple[Hashable, int]:
        key, slot = super().popitem()
        self._free(slot)
        return key, slot


class UserCache:
    """The slots of users' states; the least recently used state is evicted first.

    Args:
      max_bytes: bytes that all states may take.
      row_bytes: bytes of one user's state.
      least: number of slots that are needed; a call's users all need one.

    Raises:
      ValueError: if fewer states fit.

    Attributes:
      slots: number of states that fit.
      hits: number of users that were found.
      misses: number of users that were not found.
      evictions: number of states that made room for others.
    """

    def __init__(self, max_bytes: int, row_bytes: int, least: int) -> None:
        self.slots = max_bytes // row_bytes
        if self.slots < least:
            raise ValueError(
                f"the user cache has {max_bytes} bytes but the states of a call's {least} users "
                f"take {least * row_bytes}"
            )
        self.hits = self.misses = self.evictions = 0
        self._max_bytes, self._row_bytes = max_bytes, row_bytes
        self.clear()

    def __len__(self) -> int:
        return len(self._slot_of)

    def clear(self) -> None:
        """Forgets all states; the counts stay."""
        self._unused = list(reversed(range(self.slots)))
        self._slot_of = _Slots(self._max_bytes, self._row_bytes, self._evicted)

    def _evicted(self, slot: int) -> None:
        self.evictions += 1
        self._unused.append(slot)

    def missing(self, keys: Sequence[Hashable]) -> list[int]:
        """The positions of keys whose states are not there; counts nothing."""
        return [position for position, key in enumerate(keys) if key not in self._slot_of]

    def slots_of(self, keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
        """The slots of different users, and which of them have to be written.

        Args:
          keys: at most `slots` different keys.

        Returns:
          The slot of every key, and the positions of the keys whose states are not there yet.
        """
        # Looking a key up makes it the most recently used: none of these is evicted for another.
        found = [self._slot_of.get(key) for key in keys]
        missing = [position for position, slot in enumerate(found) if slot is None]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        for position in missing:
            if not self._unused:
                self._slot_of.popitem()
            found[position] = self._slot_of[keys[position]] = self._unused.pop()
        return [slot for slot in found if slot is not None], missing
