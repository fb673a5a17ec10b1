"""The arrays and lineages that a rewritten program has made, scope by scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ikbo_jax.rewrite.lineage import Lineage, take_rows


class Scope:
    """What the function itself, or the body of a loop or branch in it, has computed.

    An inner scope may use what the scopes around it have computed, but not the other way round: an
    array of a loop's body does not exist outside of the body.

    Entries are keyed by the identity of values, and hold the values, so that no identity is used
    for another object.

    Attributes:
      parent: the scope around this one; None for the function's.
      outlives: whether this scope computes when the trace of the scopes around it has ended. Then
        their arrays are no values any more, and it shares none of them.
      outer_arrays: by the identity of a deferred value, the array that the caller has already
        materialised for it.
      programs: by the key of a call, the rewritten program that holds arrays of this scope.
    """

    def __init__(self, parent: Scope | None = None, *, outlives: bool = False) -> None:
        self.parent = parent
        self.outlives = outlives
        self.outer_arrays: dict[int, jax.Array] = {}
        self.programs: dict[Any, Any] = {}
        self._built: dict[int, tuple[Any, jax.Array]] = {}
        self._results: dict[Any, tuple[Any, list[Any]]] = {}
        self._lineages: dict[Any, tuple[Any, Lineage]] = {}

    def chain(self) -> Iterator[Scope]:
        """This scope and the scopes around it whose arrays it may use, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = None if scope.outlives else scope.parent

    # Arrays of deferred values.

    def array(self, value: Any, build: Callable[[], jax.Array]) -> jax.Array:
        """The array of a deferred value; `build` computes it at the first call."""
        for scope in self.chain():
            if id(value) in scope._built:
                return scope._built[id(value)][1]
        array = self.outer_arrays.get(id(value))
        array = build() if array is None else array
        self._built[id(value)] = (value, array)
        return array

    def built(self) -> set[int]:
        """Identities of the values that were materialised in this scope."""
        return set(self._built)

    def is_built(self, value: Any) -> bool:
        """Whether a value was materialised in this scope or one around it."""
        return any(id(value) in scope._built for scope in self.chain())

    # Results of equations that are computed once.

    def results(self, key: Any) -> list[Any] | None:
        """The results of an earlier equation with this key; None if there was none."""
        for scope in self.chain():
            if key in scope._results:
                return scope._results[key][1]
        return None

    def keep_results(self, key: Any, operands: Sequence[Any], results: list[Any]) -> None:
        """Keeps the results of an equation, whose key holds the identities of its operands."""
        self._results[key] = (operands, results)

    # Lineages.

    def lineage(
        self,
        key: Any,
        users: int,
        batch: int,
        make_index: Callable[[], Any],
        nearest: Lineage | None = None,
    ) -> Lineage:
        """The lineage with this key, made by `make_index` at the first call.

        Args:
          key: what makes an index the same as another: hashable, with objects by identity.
          users: rows of the smaller batch.
          batch: rows of the larger one.
          make_index: returns the [batch] int32 index, values in [0, users).
          nearest: see `Lineage`.
        """
        full_key = (*(k if isinstance(k, (str, int)) else id(k) for k in key), users)
        if (known := self._known_lineage(full_key)) is not None:
            return known
        made = Lineage(make_index(), users, batch, nearest=nearest)
        self._lineages[full_key] = (key, made)
        return made

    def compose(self, coarse: Lineage, fine: Lineage) -> Lineage:
        """The lineage of rows looked up by `fine` in what was looked up by `coarse`."""
        steps = (*coarse.steps, *fine.steps)
        made = self._known_lineage(("composed", *map(id, steps)))
        if made is None:
            index = take_rows(coarse.index, fine.index, 0)
            made = Lineage(index, coarse.users, fine.batch, steps)
            self._lineages["composed", *map(id, steps)] = (steps, made)
        return made

    def has_lineages(self) -> bool:
        """Whether a lineage was made in this scope."""
        return bool(self._lineages)

    def lineages(self) -> set[int]:
        """Identities of the lineages of this scope and the scopes around it."""
        outer = self.parent.lineages() if self.parent is not None else set()
        return outer | {id(made) for _, made in self._lineages.values()}

    def _known_lineage(self, key: Any) -> Lineage | None:
        for scope in self.chain():
            if key in scope._lineages:
                return scope._lineages[key][1]
        return None
