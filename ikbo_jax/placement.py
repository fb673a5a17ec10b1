"""Deals a request's users to devices, each user beside its candidates.

A device that holds whole users and all of their candidates computes its part of a request alone: no
device needs another device's user. `place_users` decides on the host, in NumPy, which user goes
where; `Placement` lays the request's arrays out in that order and brings results back.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Index = npt.NDArray[np.int32]

#: The largest share that needs no search for a better one, as a multiple of the ideal share.
TOLERANCE = 1.05
#: Bounds the search: at every step it looks at all devices. At most 8 ms on one core of a server.
SEARCH_WORK = 80_000


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Which device holds which users and candidates of a request; made by `place_users`.

    Every device has the same number of rows of users, and of candidates; what is missing is
    padding. Rows of several devices follow one another, as in an array that is divided over the
    devices along its first axis.

    Attributes:
      num_users: U, number of users of the request.
      num_candidates: B, number of candidates of the request.
      users: [devices, users_per_device] int32, the user in every row, ascending; -1 is padding.
        Users without candidates are on no device.
      candidates: [devices, cands_per_device] int32, the candidate in every row, its user's
        candidates side by side and in the caller's order; -1 is padding.
      cand_to_user: [devices, cands_per_device] int32, the row of every candidate's user among the
        device's users. It ascends on every device; padding repeats the device's last user.
    """

    num_users: int
    num_candidates: int
    users: Index
    candidates: Index
    cand_to_user: Index

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.users)

    @property
    def shares(self) -> npt.NDArray[np.int64]:
        """Number of candidates of every device, without padding: [devices] int64."""
        return np.sum(self.candidates >= 0, axis=1, dtype=np.int64)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Whether a row holds a candidate, not padding: [devices · cands_per_device] bool."""
        return self.candidates.reshape(-1) >= 0

    @property
    def index(self) -> Index:
        """`cand_to_user` of all devices, in one row: [devices · cands_per_device] int32.

        On every device the index ascends, so that `indices_are_sorted=True` holds there.
        """
        return self.cand_to_user.reshape(-1)

    @property
    def positions(self) -> Index:
        """The candidates on these devices in the caller's order, ascending: [n] int32.

        All B of the request, unless the placement is a part of another one.
        """
        return np.flatnonzero(self._row_of() >= 0).astype(np.int32)

    def on(self, devices: Sequence[int]) -> Placement:
        """The part of the placement on some of the devices, such as those of one process.

        Args:
          devices: different positions of devices, in [0, num_devices).

        Raises:
          ValueError: if there is no device at a position, or a position is there twice.
        """
        for i, position in enumerate(devices):
            if not 0 <= position < self.num_devices:
                raise ValueError(f"devices[{i}] is {position} but there are {self.num_devices}")
            if position in devices[:i]:
                raise ValueError(f"devices[{i}] is {position}, which is there before: {devices}")
        rows = np.asarray(devices, np.intp)
        return dataclasses.replace(
            self,
            users=_frozen(self.users[rows]),
            candidates=_frozen(self.candidates[rows]),
            cand_to_user=_frozen(self.cand_to_user[rows]),
        )

    def lay_out_users(self, array: npt.ArrayLike) -> Array:
        """An array of users in the devices' order; padding is zero.

        Args:
          array: [U, ...], any dtype.

        Returns:
          [devices · users_per_device, ...], the array's dtype.

        Raises:
          ValueError: if the array does not have U rows.
        """
        return _lay_out(array, self.users, self.num_users, "users")

    def lay_out_candidates(self, array: npt.ArrayLike) -> Array:
        """An array of candidates in the devices' order; padding is zero.

        Args:
          array: [B, ...], any dtype.

        Returns:
          [devices · cands_per_device, ...], the array's dtype.

        Raises:
          ValueError: if the array does not have B rows.
        """
        return _lay_out(array, self.candidates, self.num_candidates, "candidates")

    def restore(self, results: npt.ArrayLike) -> Array:
        """Results of candidates without padding, in the caller's order.

        Args:
          results: [devices · cands_per_device, ...] in the devices' order, any dtype.

        Returns:
          [B, ...], the results' dtype. A part of a placement returns the results of its own
          candidates, which `positions` names.

        Raises:
          ValueError: if the results have another number of rows.
        """
        found = np.asarray(results)
        rows = self.candidates.size
        if found.ndim < 1 or len(found) != rows:
            raise ValueError(
                f"results have shape {found.shape} but the placement has {rows} rows of candidates"
            )
        order = self._row_of()
        restored: Array = found[order[order >= 0]]
        return restored

    def _row_of(self) -> npt.NDArray[np.intp]:
        """The row of every candidate of the request; -1 on no device of this part."""
        rows = np.full(self.num_candidates, -1, np.intp)
        rows[self.candidates[self.candidates >= 0]] = np.flatnonzero(self.mask)
        return rows


def place_users(
    cand_to_user: npt.ArrayLike,
    num_users: int,
    num_devices: int,
    *,
    multiple_of: int = 8,
    users_multiple_of: int = 1,
) -> Placement:
    """Deals users to devices, each with all of its candidates, so that devices have equal work.

    The user with the most candidates goes first, each to the device that has the fewest candidates
    so far. If a device's share is then above 1.05 times the ideal, which is the larger of
    ceil(B / devices) and the candidates of one user, a bounded search looks for a better placement.

    Args:
      cand_to_user: [B] integers in [0, num_users), in any order.
      num_users: U, number of users.
      num_devices: number of devices.
      multiple_of: the number of candidates of every device is padded to a multiple of this. Equal
        shapes share a compiled program: a larger multiple compiles fewer programs, and computes
        more padding.
      users_multiple_of: the same for the number of users.

    Returns:
      The placement; equal arguments have equal placements, on every process.

    Raises:
      ValueError: if an argument has the wrong rank, dtype or range.
    """
    index = np.asarray(cand_to_user)
    _check(index, num_users, num_devices, multiple_of, users_multiple_of)
    index = index.astype(np.intp)
    counts = np.bincount(index, minlength=num_users)
    present = np.flatnonzero(counts)
    by_size = present[np.argsort(-counts[present], kind="stable")]
    device_of = np.zeros(num_users, np.intp)
    device_of[by_size] = _deal(counts[by_size].tolist(), num_devices)

    user_order = present[np.argsort(device_of[present], kind="stable")]
    slot_of = np.zeros(num_users, np.intp)
    users, slots = _rows(user_order, device_of[user_order], num_devices, users_multiple_of)
    slot_of[user_order] = slots
    keys = device_of[index] * users.shape[1] + slot_of[index]
    order = np.argsort(keys, kind="stable")
    devices = device_of[index[order]]
    candidates, columns = _rows(order, devices, num_devices, multiple_of)
    last = np.maximum(np.count_nonzero(users >= 0, axis=1) - 1, 0).astype(np.int32)
    local = np.repeat(last[:, None], candidates.shape[1], axis=1)
    local[devices, columns] = slot_of[index[order]]
    return Placement(num_users, len(index), *map(_frozen, (users, candidates, local)))


def _check(
    index: Array, num_users: int, num_devices: int, multiple_of: int, users_multiple_of: int
) -> None:
    if index.ndim != 1:
        raise ValueError(f"cand_to_user has shape {index.shape}, expected one dimension [B]")
    if index.size and not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"cand_to_user has dtype {index.dtype}, expected integers")
    at_least = {
        "num_users": (num_users, 0),
        "num_devices": (num_devices, 1),
        "multiple_of": (multiple_of, 1),
        "users_multiple_of": (users_multiple_of, 1),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    wrong = np.flatnonzero((index < 0) | (index >= num_users))  # type: ignore[operator]
    if wrong.size:
        raise ValueError(
            f"cand_to_user[{wrong[0]}] is {index[wrong[0]]} but num_users is {num_users}"
        )


def _frozen(array: Index) -> Index:
    array.setflags(write=False)
    return array


def _rows(
    items: npt.NDArray[np.intp], devices: npt.NDArray[np.intp], num_devices: int, multiple_of: int
) -> tuple[Index, npt.NDArray[np.intp]]:
    """Items that are sorted by device as [devices, columns], and the column of every item."""
    sizes = np.bincount(devices, minlength=num_devices)
    columns = np.arange(len(items)) - (np.cumsum(sizes) - sizes)[devices]
    # A dimension of size 0 is of no use to a program.
    width = -(-max(int(sizes.max()), 1) // multiple_of) * multiple_of
    rows = np.full((num_devices, width), -1, np.int32)
    rows[devices, columns] = items
    return rows, columns


def _lay_out(array: npt.ArrayLike, rows: Index, size: int, name: str) -> Array:
    found = np.asarray(array)
    if found.ndim < 1 or len(found) != size:
        raise ValueError(f"array has shape {found.shape} but the request has {size} {name}")
    flat = rows.reshape(-1)
    laid_out = np.zeros((len(flat), *found.shape[1:]), found.dtype)
    laid_out[flat >= 0] = found[flat[flat >= 0]]
    return laid_out


def _deal(sizes: list[int], num_devices: int) -> list[int]:
    """The device of every user; `sizes` descend."""
    dealt = _longest_first(sizes, num_devices, [])
    share = _largest_share(sizes, dealt, num_devices)
    mean = sum(sizes) // num_devices
    bound = _lower_bound(sizes, num_devices)
    target = int(TOLERANCE * max(-(-sum(sizes) // num_devices), max(sizes, default=0)))
    if target < bound:
        target = int(TOLERANCE * bound)
    # A user that goes to the device with the smallest share, at most the mean, keeps within the
    # target if it is small. So only large users, fewer than 20 a device, need a search.
    large = sizes[: sum(size > target - mean for size in sizes)]
    for search in (_best_fit, _branch_and_bound):
        if share <= target:
            break
        found = search(large, num_devices, share - 1, target)
        if found is not None:
            found = _longest_first(sizes, num_devices, found)
            found_share = _largest_share(sizes, found, num_devices)
            if found_share < share:
                dealt, share = found, found_share
    return dealt


def _lower_bound(sizes: list[int], num_devices: int) -> int:
    """A number of candidates that no placement's largest share is below; `sizes` descend."""
    sums = [0, *itertools.accumulate(sizes)]
    bound = max(-(-sums[-1] // num_devices), max(sizes, default=0))
    # Of the first k · devices + 1 users, some device has k + 1.
    for k in range(1, (len(sizes) - 1) // num_devices + 1):
        end = k * num_devices + 1
        bound = max(bound, sums[end] - sums[end - k - 1])
    return bound


def _largest_share(sizes: list[int], dealt: list[int], num_devices: int) -> int:
    loads = [0] * num_devices
    for size, device in zip(sizes, dealt, strict=True):
        loads[device] += size
    return max(loads)


def _longest_first(sizes: list[int], num_devices: int, dealt: list[int]) -> list[int]:
    """Gives every user after those `dealt` to the device with the fewest candidates, then users."""
    loads, numbers = [0] * num_devices, [0] * num_devices
    for size, device in zip(sizes, dealt, strict=False):
        loads[device] += size
        numbers[device] += 1
    # One integer orders by load, number of users and device.
    unit = num_devices * (len(sizes) + 1)
    heap = [
        load * unit + number * num_devices + device
        for device, (load, number) in enumerate(zip(loads, numbers, strict=True))
    ]
    heapq.heapify(heap)
    found = list(dealt)
    for size in sizes[len(dealt) :]:
        smallest = heap[0]
        found.append(smallest % num_devices)
        heapq.heapreplace(heap, smallest + size * unit + num_devices)
    return found


def _best_fit(sizes: list[int], num_devices: int, share: int, target: int) -> list[int] | None:
    """The best placement that MULTIFIT finds with shares of at most `share`; ends at the target.

    Bisects the largest share; every user goes to the device that it fills most.

    Source: Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor
    scheduling", 1978.
    """
    best = None
    low, high = target, share
    while low <= high:
        middle = (low + high) // 2
        # One integer holds the room that is left, and the device.
        room = [middle * num_devices + device for device in range(num_devices)]
        dealt = []
        for size in sizes:
            i = bisect_left(room, size * num_devices)
            if i == num_devices:
                break
            left = room.pop(i)
            dealt.append(left % num_devices)
            insort(room, left - size * num_devices)
        if len(dealt) == len(sizes):
            best, high = dealt, middle - 1
        else:
            low = middle + 1
    return best


def _branch_and_bound(
    sizes: list[int], num_devices: int, share: int, target: int
) -> list[int] | None:
    """The best placement that a search finds with shares of at most `share`; ends at the target.

    Depth first; every user tries the devices in the order of their shares (complete greedy).

    Source: Korf, "A complete anytime algorithm for number partitioning", 1998.
    """
    loads = [0] * num_devices
    dealt: list[int] = []
    best = None

    def devices_for(size: int) -> Iterator[int]:
        # Devices with equal shares are alike: one of them is tried.
        alike = {load: device for device, load in enumerate(loads) if load + size <= share}
        return iter([alike[load] for load in sorted(alike)])

    levels = [devices_for(sizes[0])]
    for _ in range(SEARCH_WORK // num_devices):
        if len(dealt) == len(levels):
            # Back from the device that this level tried last.
            loads[dealt[-1]] -= sizes[len(dealt) - 1]
            dealt.pop()
        device = next(levels[-1], None)
        if device is None:
            levels.pop()
            if not levels:
                break
            continue
        size = sizes[len(dealt)]
        if loads[device] + size > share:
            continue
        dealt.append(device)
        loads[device] += size
        if len(dealt) < len(sizes):
            levels.append(devices_for(sizes[len(dealt)]))
            continue
        best, share = list(dealt), max(loads) - 1
        if share < target:
            break
    return best
