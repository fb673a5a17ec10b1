"""Requests, their checks, and how several requests become one call; on the host, in NumPy."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.packing import Column

#: A nest of dicts, tuples and lists with arrays as leaves.
Tree = Any


class BadRequestError(ValueError):
    """Reports that a request does not fit the scorer; the message names both values."""


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_size(name: str, size: Any, least: int = 1) -> None:
    """Raises ValueError unless a size is an integer of at least `least`."""
    if not is_integer(size) or size < least:
        raise ValueError(f"{name} is {size!r}, expected an integer of at least {least}")


@dataclasses.dataclass(frozen=True)
class Request:
    """Holds one user and the candidates to score for this user.

    Attributes:
      user: the user's id.
      version: the version of the user's features. States are kept by id and version, so features
        that change need a new version.
      features: returns the user's features, a tree of arrays without an axis of users. It is called
        only if the state of this version is not in the cache. If None, the scorer's `features_of`
        is called once for all such users of a call.
      candidates: a tree of arrays with a first axis of n candidates.
    """

    user: Hashable
    version: Hashable
    features: Callable[[], Tree] | None
    candidates: Tree

    @property
    def key(self) -> tuple[Hashable, Hashable]:
        """Key of the user's state."""
        return self.user, self.version

    # Cached: ten computations a request took a tenth of the host's time of ranking offline.
    @functools.cached_property
    def size(self) -> int:
        """Number of candidates."""
        leaves = jax.tree.leaves(self.candidates)
        return int(np.shape(leaves[0])[0]) if leaves and np.ndim(leaves[0]) else 0


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Lists the sizes that programs are compiled for, ascending.

    Attributes:
      candidates: numbers of candidates of a call; smaller calls are padded.
      users: numbers of users of a call. Every pair with at least as many candidates as users has a
        program. One number is often enough, since looking up unused states costs little.
      new_users: numbers of users that one program encodes; more users take several programs.
    """

    candidates: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    users: tuple[int, ...] = (16,)
    new_users: tuple[int, ...] = (1, 4, 16)

    def __post_init__(self) -> None:
        for name in ("candidates", "users", "new_users"):
            sizes = getattr(self, name)
            are_integers = isinstance(sizes, Sequence) and all(map(is_integer, sizes))
            if not are_integers or not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} is {sizes}, expected ascending sizes of at least 1")
        if self.candidates[-1] < self.users[-1]:
            raise ValueError(
                f"the largest bucket has {self.candidates[-1]} candidates, fewer than its "
                f"{self.users[-1]} users"
            )

    @classmethod
    def checked(cls, buckets: Buckets | None) -> Buckets:
        """Returns `buckets`, or the default for None; raises ValueError for anything else."""
        if not isinstance(buckets, Buckets | None):
            raise ValueError(f"buckets is {buckets!r:.80}, expected a Buckets")
        return cls() if buckets is None else buckets

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Sizes (candidates, users) of all programs that score."""
        return [
            (cands, users) for cands in self.candidates for users in self.users if users <= cands
        ]

    @property
    def largest(self) -> tuple[int, int]:
        """Largest number of candidates, and of users, of one call."""
        return self.candidates[-1], self.users[-1]

    def fitting(self, candidates: int, users: int) -> tuple[int, int]:
        """Returns the smallest bucket for so many candidates and users; ValueError without one."""
        most_candidates, most_users = self.largest
        if candidates > most_candidates or users > most_users:
            raise ValueError(
                f"a call has {candidates} candidates of {users} users but the largest bucket has "
                f"{most_candidates} candidates and {most_users} users"
            )
        bucket_users = self.users[bisect.bisect_left(self.users, users)]
        least = max(candidates, bucket_users)
        return self.candidates[bisect.bisect_left(self.candidates, least)], bucket_users


class Checked(NamedTuple):
    """Holds a request that fits the model, and the leaves [size, ...] of its candidates."""

    key: Hashable
    size: int
    leaves: list[Any]
    features: Callable[[], Tree] | None


class Batch(NamedTuple):
    """Holds the inputs of one call.

    Attributes:
      keys: the user and version of every row of the call's users.
      features: for every key, the `features` of its requests that have one.
      rows: the row of every request, ascending.
      sizes: number of candidates of every request.
      columns: the leaves of the candidates' tree, each an array of all candidates in the order of
        the requests, or a list of arrays.
      filled: number of candidates.
      bucket: (candidates, users) of the program.
      positions: the requests' positions in the caller's sequence.
    """

    keys: Sequence[Hashable]
    features: Sequence[Sequence[Callable[[], Tree]]]
    rows: Sequence[int] | npt.NDArray[np.integer]
    sizes: Sequence[int] | npt.NDArray[np.integer]
    columns: Sequence[Column]
    filled: int
    bucket: tuple[int, int]
    positions: Sequence[int] | npt.NDArray[np.integer]


def fitting_parts[Entry: (Request, Checked)](
    requests: Iterable[tuple[int, Entry]], buckets: Buckets
) -> Iterator[list[tuple[int, Entry]]]:
    """Cuts requests, each with its position and at least one candidate, to the largest bucket."""
    most_candidates, most_users = buckets.largest
    chosen: list[tuple[int, Entry]] = []
    candidates, users = 0, set[Hashable]()
    for entry in requests:
        key, size = entry[1].key, entry[1].size
        full = candidates + size > most_candidates
        if chosen and (full or (len(users) == most_users and key not in users)):
            yield chosen
            chosen, candidates, users = [], 0, set()
        chosen.append(entry)
        candidates += size
        users.add(key)
    if chosen:
        yield chosen


def merged(part: Sequence[tuple[int, Checked]], buckets: Buckets) -> Batch:
    """Makes one part a batch; requests of one user and version follow one another."""
    users: dict[Hashable, list[tuple[int, Checked]]] = {}
    for entry in part:
        users.setdefault(entry[1].key, []).append(entry)
    ordered = [entry for entries in users.values() for entry in entries]
    sizes = [request.size for _, request in ordered]
    filled = sum(sizes)
    return Batch(
        keys=list(users),
        features=[
            [one.features for _, one in entries if one.features is not None]
            for entries in users.values()
        ],
        rows=[row for row, entries in enumerate(users.values()) for _ in entries],
        sizes=sizes,
        columns=[list(arrays) for arrays in zip(*(one.leaves for _, one in ordered), strict=True)],
        filled=filled,
        bucket=buckets.fitting(filled, len(users)),
        positions=[position for position, _ in ordered],
    )


def check_counts(counts: npt.NDArray[Any], users: int, candidates: int, buckets: Buckets) -> None:
    """Raises BadRequestError unless every user has a count, and the counts sum to `candidates`."""
    numbers = np.issubdtype(counts.dtype, np.integer) or not counts.size
    if counts.shape != (users,) or not numbers:
        raise BadRequestError(
            f"counts has shape {counts.shape} and dtype {counts.dtype}, expected integers of shape "
            f"{(users,)}, one for every user"
        )
    most = buckets.candidates[-1]
    wrong = np.flatnonzero((counts < 0) | (counts > most))
    if wrong.size:
        raise BadRequestError(f"counts[{wrong[0]}] is {counts[wrong[0]]}, expected 0 to {most}")
    if candidates != counts.sum():
        raise BadRequestError(
            f"there are {candidates} candidates, but the counts sum to {counts.sum()}"
        )


def check_hashable(keys: Sequence[tuple[Hashable, Hashable]]) -> None:
    """Raises BadRequestError unless all users and versions are hashable."""
    try:
        hash(tuple(keys))
        return
    except Exception:
        # The loop finds the key to name; hashing all at once needs no Python call for each key.
        pass
    for user, version in keys:
        try:
            hash((user, version))
        except Exception as error:
            raise BadRequestError(
                f"user {user!r:.80} and version {version!r:.80} must be hashable, but: {error}"
            ) from error


class Form:
    """Checks trees of arrays.

    Args:
      rows: a tree of `jax.ShapeDtypeStruct`, one row of every array.
      name: the tree's name in errors.
    """

    def __init__(self, rows: Tree, name: str) -> None:
        self.rows, self.name = rows, name
        self.leaves, self.structure = jax.tree.flatten(rows)
        self._expected = [(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def leaves_of(self, tree: Tree, *, stacked: bool) -> list[Any]:
        """Returns the leaves of a tree of arrays whose rows are like `rows`.

        With `stacked`, every array has a first axis of n rows, and n is the same for all. Raises
        BadRequestError if structure, shape or dtype differ; the message names both.
        """
        leaves: list[Any]
        structure: Any
        # This is enough for a request that fits; `check` words the error of another one.
        try:
            leaves, structure = jax.tree.flatten(tree)
            count = leaves[0].shape[:1] if stacked else ()
            fits = structure == self.structure and len(count) == stacked
            for leaf, (shape, dtype) in zip(leaves, self._expected, strict=False):
                fits = fits and leaf.shape == count + shape and leaf.dtype == dtype
                fits = fits and leaf.__array__ is not None  # a ShapeDtypeStruct has none
                fits = fits and leaf.__class__ is not np.ma.MaskedArray
        except Exception:
            # Objects of other libraries may raise anything; unsortable keys of a dict, ValueError.
            fits = False
        return leaves if fits else check(tree, self.rows, self.name, stacked=stacked)


def check(tree: Tree, rows: Tree, name: str, *, stacked: bool) -> list[Any]:
    """Returns the leaves, or raises the error, that `Form.leaves_of` documents."""
    expected, wanted = jax.tree_util.tree_flatten_with_path(rows)
    found: list[Any]
    structure: Any
    try:
        found, structure = jax.tree.flatten(tree)
    except Exception as error:
        raise BadRequestError(f"{name} are no tree ({error}), expected {wanted}") from error
    if structure != wanted:
        raise BadRequestError(f"{name} have the structure {structure}, expected {wanted}")
    arrays = []
    for (path, row), leaf in zip(expected, found, strict=True):
        try:
            is_array = all(hasattr(leaf, x) for x in ("shape", "dtype", "__array__"))
            arrays.append(leaf if is_array else np.asarray(leaf))
        except Exception as error:
            raise BadRequestError(
                f"{name}{jax.tree_util.keystr(path)} is a {type(leaf).__name__} ({error}), "
                f"expected an array of {row.dtype}"
            ) from error
    count = arrays[0].shape[:1] if stacked and arrays else ()
    for (path, row), array in zip(expected, arrays, strict=True):
        if isinstance(array, np.ma.MaskedArray):
            raise BadRequestError(
                f"{name}{jax.tree_util.keystr(path)} is a MaskedArray, expected an array without a "
                "mask"
            )
        if array.shape != (*count, *row.shape) or array.dtype != row.dtype or stacked > array.ndim:
            shape = ", ".join(str(size) for size in (*(count or ["n"] * stacked), *row.shape))
            raise BadRequestError(
                f"{name}{jax.tree_util.keystr(path)} has shape {array.shape} and dtype "
                f"{array.dtype}, expected [{shape}] and {row.dtype}"
            )
    return arrays
