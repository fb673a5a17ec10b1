"""A scorer answers batches of requests with programs that were compiled in advance."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ikbo_jax.serving.base import BatchScorer, PendingScores, seconds_of
from ikbo_jax.serving.batches import (
    BadRequestError,
    Batch,
    Buckets,
    Form,
    Tree,
    check_counts,
    check_hashable,
    check_size,
)
from ikbo_jax.serving.packing import Column, fill
from ikbo_jax.serving.programs import Model, Programs, check_finite, specs_of

#: Returns the features of one user; of n keys (user, version), as arrays [n, ...].
Fetch = Callable[[], Tree]
FeaturesOf = Callable[[list[Any]], Tree]


class Features:
    """Fetches and checks users' features; `features_of` as for `Scorer`."""

    def __init__(self, form: Form, features_of: FeaturesOf | None) -> None:
        self._form, self._features_of = form, features_of

    def of(
        self, asked: Mapping[Hashable, Sequence[Fetch]]
    ) -> tuple[list[Column], dict[Hashable, Exception]]:
        """Fetches the features of several users.

        Args:
          asked: for every key, the `features` of its requests that have one.

        Returns:
          For every leaf of the features' tree, its rows in the order of the keys, without the keys
          that failed: an array [n, ...] or a list of n arrays; and the error of every failed key.
        """
        bare = [key for key, fetches in asked.items() if not fetches]
        known: dict[Hashable, list[Any]] = {}
        if len(bare) > 1:
            try:
                columns = self._at_once(bare)
                if len(bare) == len(asked):
                    return list(columns), {}
                known = {key: [c[n] for c in columns] for n, key in enumerate(bare)}
            except Exception:
                # The error may be one user's: below, every user's features are fetched alone.
                pass
        rows: list[list[Any]] = []
        failed: dict[Hashable, Exception] = {}
        for key, fetches in asked.items():
            try:
                rows.append(known[key] if key in known else self._alone(key, fetches))
            except Exception as error:
                failed[key] = error
        return [list(column) for column in zip(*rows, strict=True)], failed

    def of_all(self, keys: Sequence[Hashable]) -> list[Column]:
        """Fetches the features of different keys like `of`; raises the first key's error."""
        # `of` takes a dict of the keys: 30 µs for 160 of them.
        if len(keys) > 1:
            try:
                return list(self._at_once(list(keys)))
            except Exception:
                # `of` finds the user whose error it is.
                pass
        features, failed = self.of(dict.fromkeys(keys, ()))
        for error in failed.values():
            raise error
        return features

    def _alone(self, key: Hashable, fetches: Sequence[Fetch]) -> list[Any]:
        """Fetches the leaves of one user's features, without an axis of users."""
        if not fetches:
            return [array[0] for array in self._at_once([key])]
        errors: list[Exception] = []
        for fetch in fetches:
            try:
                return self._form.leaves_of(fetch(), stacked=False)
            except Exception as error:
                # Another request of the same user and version may have the features.
                errors.append(error)
        raise errors[0]

    def _at_once(self, keys: list[Hashable]) -> list[Any]:
        """Fetches the leaves of several users' features, [n, ...] each."""
        if self._features_of is None:
            raise BadRequestError(
                f"the user and version {keys[0]} has no features: the request has none, and the "
                "scorer has no features_of"
            )
        leaves = self._form.leaves_of(self._features_of(keys), stacked=True)
        if leaves and len(leaves[0]) != len(keys):
            raise BadRequestError(
                f"features_of returned {len(leaves[0])} rows for {len(keys)} users"
            )
        return leaves


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
        check_size("user_bytes", max_bytes, 0)
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


class Scorer(BatchScorer):
    """Scores requests of several users in one call, with programs that are compiled in advance.

    A call's requests are padded to a bucket of candidates and users; scores of padding are dropped.
    Users' states stay on the device, in a pool of slots, and a user whose state is there is not
    encoded again. All methods may be called from several threads.

    Args:
      model: two functions, see `Model`.
      weights: a tree of arrays. They go to the device that the programs are compiled for, JAX's
        default device. Arrays on this device are not copied: donate none of them.
      user: a user's features as a tree of `jax.ShapeDtypeStruct`, without an axis of users.
      candidate: a candidate's features in the same form.
      buckets: the sizes that programs are compiled for.
      user_bytes: bytes of the pool of users' states.
      version: a name of the weights, in every answer.
      features_of: returns the features of users whose requests have no `features`, a tree of arrays
        [n, ...]. It takes the n different keys (user, version) of one call whose states are not in
        the cache. If it raises, it is called again for every one of these users alone, so that only
        their requests get the error.
      joint: also compiles, for every bucket, a joint program: it encodes the users of a call and
        scores its candidates. `start_arrays` and `rank_arrays` then use these programs instead of
        the pool. Off by default: joint programs compile longer than the other programs.

    Attributes:
      call_seconds: by bucket (candidates, users), the seconds of one call that scores, with nothing
        beside it; measured once, before the scorer is ready.

    Raises:
      ValueError: if `buckets`, `joint` or `features_of` has another type, the states of the largest
        bucket's users take more than `user_bytes`, a weight is not an array or not finite, a
        candidate has no array, JAX would cut a feature to another dtype (64 bits without
        jax_enable_x64), `score` returns anything but one array, or a result of the model has
        another first axis than its inputs.
    """

    def __init__(
        self,
        model: Model,
        weights: Tree,
        user: Tree,
        candidate: Tree,
        *,
        buckets: Buckets | None = None,
        user_bytes: int = 1 << 28,
        version: Hashable = 0,
        features_of: FeaturesOf | None = None,
        joint: bool = False,
    ) -> None:
        buckets = Buckets.checked(buckets)
        if not isinstance(joint, bool):
            raise ValueError(f"joint is {joint!r:.80}, expected a bool")
        if features_of is not None and not callable(features_of):
            raise ValueError(f"features_of is {features_of!r:.80}, expected a function")
        specs = specs_of(model, weights, user, candidate)
        check_finite(weights)
        state = jax.tree.leaves(specs.state)
        row_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
        self._users = UserCache(user_bytes, row_bytes, buckets.largest[1])
        self._features = Features(Form(user, "features"), features_of)
        self._programs = Programs(model, specs, buckets, self._users.slots, joint=joint)
        super().__init__(specs, weights, buckets, self._programs.device, version)
        self._pool = self._empty_pool()
        self._run_every_program()
        self._ready()

    def _empty_pool(self) -> list[jax.Array]:
        # From NumPy arrays, since `jnp.zeros` would compile.
        pool = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._programs.pool]
        # Not committed to the device, like a program's result: JAX would look the first call with a
        # committed pool up in Python.
        with jax.default_device(self._programs.device):
            return [jax.device_put(array) for array in pool]

    def _run_every_program(self) -> None:
        """Runs every program once, so that no request waits for what a first run allocates."""
        for users, encode in self._programs.encode.items():
            packed, (at, *_) = self._programs.encode_inputs[users].empty(np.zeros)
            self._written_nowhere(at)
            self._pool = encode(self._weights, self._pool, packed)
        for bucket, score in self._programs.score.items():
            packed, _ = self._programs.score_inputs[bucket].empty(np.zeros)
            self.call_seconds[bucket] = seconds_of(score, self._weights, self._pool, packed)
        for bucket, joint in self._programs.joint.items():
            packed, _ = self._programs.joint_inputs[bucket].empty(np.zeros)
            np.asarray(joint(self._weights, packed))

    def _written_nowhere(self, at: npt.NDArray[np.int32]) -> None:
        """Fills `at` with different slots past the end of the pool."""
        at[:] = np.arange(self._users.slots, self._users.slots + len(at))

    def _users_counts(self) -> dict[str, int]:
        users = self._users
        return {"hits": users.hits, "misses": users.misses, "evictions": users.evictions}

    def _forget(self) -> None:
        # The pool stays: the next call would wait for the transfer of a new pool.
        self._users.clear()

    def _reset(self) -> None:
        self._users.clear()
        self._pool = self._empty_pool()

    def start_arrays(
        self,
        users: Sequence[Hashable],
        counts: npt.NDArray[np.integer],
        candidates: Tree,
        *,
        version: Hashable = 0,
    ) -> PendingScores:
        """Starts one call for several users, with the arguments and errors of `rank_arrays`.

        Raises:
          ValueError: if no bucket has so many candidates, or users.
          BadRequestError: also if there are no candidates.
        """
        columns = self._candidate_form.leaves_of(candidates, stacked=True)
        keys = [(user, version) for user in users]
        counts = np.asarray(counts)
        filled = len(columns[0])
        check_counts(counts, len(keys), filled, self.buckets)
        check_hashable(keys)
        if not filled:
            raise BadRequestError("there are 0 candidates")
        counts = counts.astype(np.int64)  # NumPy repeats no row an unsigned number of times
        rows, bucket = np.arange(len(keys)), self.buckets.fitting(filled, len(keys))
        batch = Batch(keys, [()] * len(keys), rows, counts, columns, filled, bucket, rows)
        with self._lock:
            if self._programs.joint:
                return PendingScores(self, self._joint_call(batch), filled)
            features, failed = self._inputs_for(batch)
            for error in failed.values():
                raise error
            try:
                return PendingScores(self, self._call(batch, features), filled)
            except BaseException:
                self._reset()
                raise

    def _inputs_for(self, batch: Batch) -> tuple[list[Column], dict[Hashable, Exception]]:
        missing = self._users.missing(batch.keys)
        return self._features.of({batch.keys[row]: batch.features[row] for row in missing})

    def _call(self, batch: Batch, features: list[Column]) -> jax.Array:
        """Starts the programs of one batch; does not wait for the device."""
        slots, missing = self._users.slots_of(batch.keys)
        if missing:
            self._encode([slots[row] for row in missing], features)
        packed, (at, cand_to_user, *columns) = self._programs.score_inputs[batch.bucket].empty()
        fill(at, np.asarray(slots))
        fill(cand_to_user, np.repeat(batch.rows, batch.sizes))
        for array, column in zip(columns, batch.columns, strict=True):
            fill(array, column)
        scores = self._programs.score[batch.bucket](self._weights, self._pool, packed)
        return self._counted(batch, scores)

    def _joint_call(self, batch: Batch) -> jax.Array:
        """Starts the program that encodes a batch's users and scores its candidates."""
        keys, rows = batch.keys, None
        if len(set(keys)) < len(keys):
            # A user who occurs several times has several rows; its features are fetched once.
            row_of = {key: row for row, key in enumerate(dict.fromkeys(keys))}
            keys, rows = list(row_of), [row_of[key] for key in keys]
        features = self._features.of_all(keys)
        packed, (cand_to_user, *arrays) = self._programs.joint_inputs[batch.bucket].empty()
        fill(cand_to_user, np.repeat(batch.rows, batch.sizes))
        users, candidates = arrays[: len(features)], arrays[len(features) :]
        for array, column in zip(users, features, strict=True):
            fill(array, column if rows is None else np.asarray(column)[rows], stack=True)
        for array, column in zip(candidates, batch.columns, strict=True):
            fill(array, column)
        self._users.misses += len(keys)
        scores = self._programs.joint[batch.bucket](self._weights, packed)
        return self._counted(batch, scores)

    def _encode(self, slots: list[int], features: list[Column]) -> None:
        sizes = self.buckets.new_users
        for start in range(0, len(slots), sizes[-1]):
            part = slots[start : start + sizes[-1]]
            bucket = sizes[bisect.bisect_left(sizes, len(part))]
            packed, (at, *columns) = self._programs.encode_inputs[bucket].empty()
            self._written_nowhere(at)
            at[: len(part)] = part
            for array, column in zip(columns, features, strict=True):
                fill(array, column[start : start + len(part)], stack=True)
            self._pool = self._programs.encode[bucket](self._weights, self._pool, packed)
