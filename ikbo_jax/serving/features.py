"""Users' features, from requests or from a function that takes several users."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ikbo_jax.serving.batches import BadRequestError, Form, Tree
from ikbo_jax.serving.packing import Column

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
