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

from ikbo_jax.integers import integer

Array = npt.NDArray[np.generic]
Index = npt.NDArray[np.int32]

#: The largest share that needs no search for a better one, as a multiple of the ideal share.
TOLERANCE = 1.05
#: Rows of int32 users and candidates that a placement may have with padding: 1 GiB each.
MOST_ROWS = 1 << 28
#: Larger than any mesh, and few enough to deal to within a tenth of a second.
MOST_DEVICES = 1 << 16
#: Where ids of users are larger, only the users that occur are numbered: a sort, 6 ms for 100,000.
DENSE_USERS = 1 << 20
#: Bounds the steps of a search times its large users. The worst of 1,400 requests of 10 to 64 users
#: on 2 to 16 devices took 8 ms on one core of a server.
SEARCH_WORK = 80_000


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Assigns users and candidates of a request to devices; made by `place_users`.

    Every device has the same number of rows of users, and of candidates; missing rows are padding.
    Rows of the devices follow one another, as in an array that is divided along its first axis.

    Attributes:
      num_users: U, number of users of the request.
      num_candidates: B, number of candidates of the request.
      users: [devices, users_per_device] int32, the user in every row, ascending; -1 is padding.
        Users without candidates are on no device.
      candidates: [devices, cands_per_device] int32, the candidate in every row; -1 is padding. A
        user's candidates are side by side, in the caller's order.
      cand_to_user: [devices, cands_per_device] int32, the row of every candidate's user among the
        device's users. It ascends on every device; padding repeats the device's last user.
    """

    num_users: int
    num_candidates: int
    users: Index
    candidates: Index
    cand_to_user: Index

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
        """Candidates on these devices, ascending: [n] int32; all B unless `on` chose devices."""
        return np.flatnonzero(self._row_of() >= 0).astype(np.int32)

    def on(self, devices: Sequence[int]) -> Placement:
        """Returns the part of the placement on some devices, such as the devices of one process.

        Raises ValueError if there is no device at a position, or a position occurs twice.
        """
        for position, device in enumerate(devices):
            integer(f"devices[{position}]", device, 0, len(self.users) - 1)
        if len(set(devices)) < len(devices):
            raise ValueError(f"devices are {list(devices)}, expected different ones")
        rows = np.asarray(devices, np.intp)
        return dataclasses.replace(
            self,
            users=_frozen(self.users[rows]),
            candidates=_frozen(self.candidates[rows]),
            cand_to_user=_frozen(self.cand_to_user[rows]),
        )

    def lay_out_users(self, array: npt.ArrayLike) -> Array:
        """Lays an array [U, ...] of users out in the devices' order; padding is zero.

        Returns [devices · users_per_device, ...]; raises ValueError unless the array has U rows.
        """
        return _lay_out(array, self.users, self.num_users, "users")

    def lay_out_candidates(self, array: npt.ArrayLike) -> Array:
        """Lays an array [B, ...] of candidates out in the devices' order; padding is zero.

        Returns [devices · cands_per_device, ...]; raises ValueError unless the array has B rows.
        """
        return _lay_out(array, self.candidates, self.num_candidates, "candidates")

    def restore(self, results: npt.ArrayLike) -> Array:
        """Removes padding from candidates' results and restores the caller's order.

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
        """Finds the row of every candidate of the request; -1 without a device of this part."""
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
      ValueError: if an argument has the wrong rank, dtype or range, the index is a masked array, or
        the placement would have more than 2**28 rows with its padding.
    """
    if isinstance(cand_to_user, np.ma.MaskedArray):
        raise ValueError("cand_to_user is a masked array, expected an array without a mask")
    index = np.asarray(cand_to_user)
    _check(index, num_users, num_devices, multiple_of, users_multiple_of)
    index, names = index.astype(np.intp), None
    if index.size and index.max() >= DENSE_USERS:
        names, index = np.unique(index, return_inverse=True)
    counts = np.bincount(index)
    present = np.flatnonzero(counts)
    by_size = present[np.argsort(-counts[present], kind="stable")]
    device_of = np.zeros(len(counts), np.intp)
    device_of[by_size] = _deal(counts[by_size].tolist(), num_devices)

    user_order = present[np.argsort(device_of[present], kind="stable")]
    slot_of = np.zeros(len(counts), np.intp)
    users, slots = _rows(user_order, device_of[user_order], num_devices, users_multiple_of)
    slot_of[user_order] = slots
    keys = device_of[index] * users.shape[1] + slot_of[index]
    order = _stable_order(keys)
    devices = device_of[index[order]]
    candidates, columns = _rows(order, devices, num_devices, multiple_of)
    last = np.maximum(np.count_nonzero(users >= 0, axis=1) - 1, 0).astype(np.int32)
    local = np.repeat(last[:, None], candidates.shape[1], axis=1)
    local[devices, columns] = slot_of[index[order]]
    if names is not None:
        users[users >= 0] = names[users[users >= 0]]
    return Placement(num_users, len(index), *map(_frozen, (users, candidates, local)))


def _check(
    index: Array, num_users: int, num_devices: int, multiple_of: int, users_multiple_of: int
) -> None:
    if index.ndim != 1:
        raise ValueError(f"cand_to_user has shape {index.shape}, expected one dimension [B]")
    if index.size and not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"cand_to_user has dtype {index.dtype}, expected integers")
    # The placement names users, and counts rows, in int32.
    integer("num_users", num_users, 0, np.iinfo(np.int32).max)
    integer("num_devices", num_devices, 1, MOST_DEVICES)
    for name, value in (("multiple_of", multiple_of), ("users_multiple_of", users_multiple_of)):
        integer(name, value, 1, MOST_ROWS // num_devices)
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
    """Lays items, sorted by device, out as [devices, columns]; returns also each item's column."""
    sizes = np.bincount(devices, minlength=num_devices)
    columns = np.arange(len(items)) - (np.cumsum(sizes) - sizes)[devices]
    # A program cannot use a dimension of size 0.
    width = -(-max(int(sizes.max()), 1) // multiple_of) * multiple_of
    if num_devices * width > MOST_ROWS:
        raise ValueError(
            f"{num_devices} devices with {width} rows each, as the largest needs, are "
            f"{num_devices * width} rows, expected at most {MOST_ROWS}"
        )
    rows = np.full((num_devices, width), -1, np.int32)
    rows[devices, columns] = items
    return rows, columns


def _stable_order(keys: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Sorts keys of at least 0 stably, by 16 bits: 1 ms, not 6, for 100,000 keys."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    high = keys[order] >> 16
    return order[_stable_order(high)] if high.any() else order


def _lay_out(array: npt.ArrayLike, rows: Index, size: int, name: str) -> Array:
    found = np.asarray(array)
    if found.ndim < 1 or len(found) != size:
        raise ValueError(f"array has shape {found.shape} but the request has {size} {name}")
    flat = rows.reshape(-1)
    if size == 0:
        return np.zeros((len(flat), *found.shape[1:]), found.dtype)
    # One pass: 100,000 rows of 256 bytes take 4 ms, two copies 18 ms.
    laid_out: Array = np.take(found, np.maximum(flat, 0), axis=0)
    laid_out[flat < 0] = 0
    return laid_out


def _deal(sizes: list[int], num_devices: int) -> list[int]:
    """Chooses the device of every user; `sizes` descend."""
    dealt = _longest_first(sizes, num_devices, [])
    share = _largest_share(sizes, dealt, num_devices)
    mean = sum(sizes) // num_devices
    bound = _lower_bound(sizes, num_devices)
    target = int(TOLERANCE * max(-(-sum(sizes) // num_devices), max(sizes, default=0)))
    if target < bound:
        target = int(TOLERANCE * bound)
    # The smallest share is at most the mean, so a small user fits there within the target. Only
    # large users, about 20 a device at most, need a search.
    large = sizes[: sum(size > target - mean for size in sizes)]
    # MULTIFIT: bisects the largest share, after the target itself.
    low, middle, high = target, target, share - 1
    while low <= high:
        found = _best_fit(large, num_devices, middle) or _fill(large, num_devices, middle)
        if found is None:
            low = middle + 1
        else:
            found = _longest_first(sizes, num_devices, found)
            share, dealt = min((share, dealt), (_largest_share(sizes, found, num_devices), found))
            high = min(middle, share) - 1
        middle = (low + high) // 2
    return dealt


def _lower_bound(sizes: list[int], num_devices: int) -> int:
    """Bounds the largest share of any placement from below; `sizes` descend."""
    sums = [0, *itertools.accumulate(sizes)]
    bound = max(-(-sums[-1] // num_devices), max(sizes, default=0))
    # Some device has k + 1 of the first k · devices + 1 users.
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
    """Gives every user that is not `dealt` to the device with the fewest candidates, then users."""
    # One integer orders by share, number of users and device.
    unit = num_devices * (len(sizes) + 1)
    heap = list(range(num_devices))
    for size, device in zip(sizes, dealt, strict=False):
        heap[device] += size * unit + num_devices
    heapq.heapify(heap)
    found = list(dealt)
    for size in sizes[len(dealt) :]:
        smallest = heap[0]
        found.append(smallest % num_devices)
        heapq.heapreplace(heap, smallest + size * unit + num_devices)
    return found


def _best_fit(sizes: list[int], num_devices: int, share: int) -> list[int] | None:
    """Places users with shares of at most `share`, each on the device that it fills most.

    Source: Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor
    scheduling", 1978.
    """
    # One integer holds the remaining room and the device.
    room = [share * num_devices + device for device in range(num_devices)]
    dealt = []
    for size in sizes:
        i = bisect_left(room, size * num_devices)
        if i == num_devices:
            return None
        left = room.pop(i)
        dealt.append(left % num_devices)
        insort(room, left - size * num_devices)
    return dealt


def _fill(sizes: list[int], num_devices: int, share: int) -> list[int] | None:
    """Places users with shares of at most `share`, by a depth-first search of bounded length.

    Fills one device after the other, each with the largest remaining user and with users that fit
    beside it, until no user fits. The room that stays empty on all devices together is known.

    Source: Korf, "A new algorithm for optimal bin packing", 2002 (bin completion).
    """
    dealt = [-1] * len(sizes)

    def options(
        last: int, device: int, room: int, empty: int
    ) -> Iterator[tuple[int, int, int, int]]:
        left = [user for user, of in enumerate(dealt) if of < 0]
        fitting = [user for user in left if sizes[user] <= room]
        if fitting:
            # One user of each size is enough; users up to `last` were tried on an earlier branch.
            alike = {sizes[user]: user for user in reversed(fitting) if user > last}
            for size, user in reversed(alike.items()):
                yield user, device, room - size, empty
        elif room <= empty:
            yield left[0], device + 1, share - sizes[left[0]], empty - room

    levels = [iter([(0, 0, share - sizes[0], share * num_devices - sum(sizes))])]
    placed: list[int] = []
    for _ in range(SEARCH_WORK // len(sizes)):
        if len(placed) == len(levels):
            dealt[placed.pop()] = -1
        option = next(levels[-1], None)
        if option is None:
            levels.pop()
            if not levels:
                break
            continue
        user, device, room, empty = option
        dealt[user] = device
        placed.append(user)
        if len(placed) == len(sizes):
            return dealt
        levels.append(options(user, device, room, empty))
    return None
