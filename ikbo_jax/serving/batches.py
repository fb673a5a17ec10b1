"""Requests, and how several of them become the arrays of one call; on the host, in NumPy."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

#: A nest of dicts, tuples and lists with arrays as leaves.
Tree = Any
Index = npt.NDArray[np.int32]


class BadRequestError(ValueError):
    """A request that does not fit the scorer; the message names both values."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One user and the candidates to score for this user.

    Attributes:
      user: the user's id.
      version: the version of the user's features. Features that change need a new version: a user's
        state is kept by id and version.
      features: returns the user's features, a tree of arrays without an axis of users. It is called
        only if the state of this version is not in the cache.
      candidates: a tree of arrays with a first axis of n candidates.
    """

    user: Hashable
    version: Hashable
    features: Callable[[], Tree]
    candidates: Tree

    @property
    def key(self) -> tuple[Hashable, Hashable]:
        """What the user's state is kept by."""
        return self.user, self.version

    # Asked ten times for every request, which was a tenth of the host's part of ranking offline.
    @functools.cached_property
    def size(self) -> int:
        """n, number of candidates."""
        leaves = jax.tree.leaves(self.candidates)
        return int(np.shape(leaves[0])[0]) if leaves and np.ndim(leaves[0]) else 0


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes that programs are compiled for, ascending.

    Attributes:
      candidates: numbers of candidates of a call; smaller calls are padded.
      users: numbers of users of a call. Every pair with at least as many candidates as users has a
        program. Looking up the states of more users than a call has costs little, so that one
        number is often enough.
      new_users: numbers of users that are encoded at once; of more, several programs run.
    """

    candidates: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    users: tuple[int, ...] = (16,)
    new_users: tuple[int, ...] = (1, 4, 16)

    def __post_init__(self) -> None:
        for name in ("candidates", "users", "new_users"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} is {sizes}, expected ascending sizes of at least 1")
        if self.candidates[-1] < self.users[-1]:
            raise ValueError(
                f"the largest bucket has {self.candidates[-1]} candidates, fewer than its "
                f"{self.users[-1]} users"
            )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The sizes (candidates, users) of all programs that score."""
        return [
            (cands, users) for cands in self.candidates for users in self.users if users <= cands
        ]

    @property
    def largest(self) -> tuple[int, int]:
        """The largest number of candidates, and of users, that one call can have."""
        return self.candidates[-1], self.users[-1]

    def fitting(self, candidates: int, users: int) -> tuple[int, int]:
        """The smallest bucket for so many candidates and users.

        Raises:
          ValueError: if there is none.
        """
        most_candidates, most_users = self.largest
        if candidates > most_candidates or users > most_users:
            raise ValueError(
                f"a call has {candidates} candidates of {users} users but the largest bucket has "
                f"{most_candidates} candidates and {most_users} users"
            )
        bucket_users = self.users[bisect.bisect_left(self.users, users)]
        least = max(candidates, bucket_users)
        return self.candidates[bisect.bisect_left(self.candidates, least)], bucket_users


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that one call answers.

    Attributes:
      requests: the requests; requests of one user and version follow one another.
      positions: their positions in the caller's sequence.
      keys: the different users and versions.
      rows: the row in `keys` of every request, ascending.
      bucket: (candidates, users) of the program.
    """

    requests: list[Request]
    positions: list[int]
    keys: list[Hashable]
    rows: list[int]
    bucket: tuple[int, int]

    @property
    def sizes(self) -> list[int]:
        """Number of candidates of every request."""
        return [request.size for request in self.requests]

    def candidates(self) -> tuple[Tree, Index]:
        """The candidates of all requests, padded, and `cand_to_user`, which ascends.

        Padding repeats the last candidate: whatever a program does with a candidate is legal for
        padding, too.
        """
        rows, bucket = np.repeat(np.asarray(self.rows, np.int32), self.sizes), self.bucket[0]
        trees = [request.candidates for request in self.requests]
        return jax.tree.map(lambda *parts: padded(np.concatenate(parts), bucket), *trees), padded(
            rows, bucket
        )


#: Requests and their positions in the caller's sequence.
Numbered = list[tuple[int, Request]]


def fitting_parts(requests: Iterable[tuple[int, Request]], buckets: Buckets) -> Iterator[Numbered]:
    """Cuts requests, each with at least one candidate, to parts that fit the largest bucket."""
    most_candidates, most_users = buckets.largest
    chosen: Numbered = []
    candidates, users = 0, set[Hashable]()
    for position, request in requests:
        new = request.key not in users
        if chosen and (
            candidates + request.size > most_candidates or len(users) + new > most_users
        ):
            yield chosen
            chosen, candidates, users = [], 0, set()
        chosen.append((position, request))
        candidates += request.size
        users.add(request.key)
    if chosen:
        yield chosen


def merged(chosen: Numbered, buckets: Buckets) -> Batch:
    """The requests of one part as a batch; those of one user and version follow one another."""
    users: dict[Hashable, int] = {}
    for _, request in chosen:
        users.setdefault(request.key, len(users))
    ordered = sorted(chosen, key=lambda entry: users[entry[1].key])
    rows = [users[request.key] for _, request in ordered]
    return Batch(
        requests=[request for _, request in ordered],
        positions=[position for position, _ in ordered],
        keys=list(users),
        rows=rows,
        bucket=buckets.fitting(sum(request.size for _, request in chosen), len(users)),
    )


def padded(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """`array` with its last row repeated until it has `size` rows."""
    out = np.empty((size, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    out[len(array) :] = array[-1]
    return out


def stacked(trees: Sequence[Tree], size: int) -> Tree:
    """Trees of one structure, stacked along a new first axis and padded to `size` rows."""
    return jax.tree.map(lambda *leaves: padded(np.stack(leaves), size), *trees)


def check(tree: Tree, rows: Tree, name: str, *, stacked: bool) -> Tree:
    """The tree with arrays as leaves, if its rows are like `rows`.

    Args:
      tree: a tree of arrays.
      rows: a tree of `jax.ShapeDtypeStruct`, one row of every array.
      name: what the tree is called in errors.
      stacked: every array has a first axis of n rows, and n is the same for all.

    Raises:
      BadRequestError: if structure, shape or dtype differ; the message names both.
    """
    expected, wanted = jax.tree_util.tree_flatten_with_path(rows)
    found: list[Any] = jax.tree.leaves(tree)
    structure: Any = jax.tree.structure(tree)
    if structure != wanted:
        raise BadRequestError(f"{name} have the structure {structure}, expected {wanted}")
    arrays = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in found]
    count = arrays[0].shape[:1] if stacked else ()
    for (path, row), array in zip(expected, arrays, strict=True):
        if array.shape != (*count, *row.shape) or array.dtype != row.dtype or stacked > array.ndim:
            shape = ", ".join(str(size) for size in (*(count or ["n"] * stacked), *row.shape))
            raise BadRequestError(
                f"{name}{jax.tree_util.keystr(path)} has shape {array.shape} and dtype "
                f"{array.dtype}, expected [{shape}] and {row.dtype}"
            )
    return jax.tree.unflatten(structure, arrays)
