"""The producing equation of every value of a rewritten program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core


class Provenance:
    """Records the producing equations of one scope's values, and searches enclosing scopes next.

    Attributes:
      asked_hidden: the identities of the values for whose producing equation a rule asked although
        it is hidden from this scope (`hide`).
    """

    def __init__(self, parent: Provenance | None = None) -> None:
        self.asked_hidden: set[int] = set()
        self._parent = parent
        # By identity of the result; entries hold the result, so that its identity stays unique.
        self._producers: dict[int, tuple[core.JaxprEqn, Sequence[Any], Any]] = {}
        self._producer_hidden: dict[int, tuple[Any, str]] = {}

    def producer(self, value: Any) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """Returns the producing equation of a value, and its operands; None if unknown."""
        return self._search(value, None)

    def visible_producer(
        self, value: Any, names: Sequence[str]
    ) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """Returns `producer` if it is an equation of a primitive in `names`.

        Rules call it that do without a hidden producing equation, unless `hide` says that the
        equation is one of a primitive in `names`.
        """
        produced = self._search(value, names)
        return produced if produced is not None and produced[0].primitive.name in names else None

    def _search(
        self, value: Any, names: Sequence[str] | None
    ) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """Finds the producer; records a request for a hidden producer, by `names` unless None."""
        for provenance in self._chain():
            if id(value) in provenance._producers:
                eqn, operands, _ = provenance._producers[id(value)]
                return eqn, operands
            hidden = provenance._producer_hidden.get(id(value))
            if hidden is not None and (names is None or hidden[1] in names):
                provenance.asked_hidden.add(id(value))
        return None

    def cast_mask(self, value: Any) -> Any:
        """Returns the booleans that a value of floating-point numbers is the cast of, or None."""
        produced = self.visible_producer(value, ("convert_element_type",))
        if produced is None or getattr(produced[1][0], "dtype", None) != np.bool_:
            return None
        return produced[1][0] if jnp.issubdtype(value.dtype, jnp.floating) else None

    def primitive(self, value: Any) -> str | None:
        """Names the primitive that computes a value, also if its producing equation is hidden.

        "" if `hide` does not name it; None if the value has no producing equation.
        """
        for provenance in self._chain():
            if id(value) in provenance._producers:
                return provenance._producers[id(value)][0].primitive.name
            if id(value) in provenance._producer_hidden:
                return provenance._producer_hidden[id(value)][1]
        return None

    def record(
        self, eqn: core.JaxprEqn, results: Sequence[Any], operands: Sequence[Any] = ()
    ) -> None:
        """Records the producing equation of values that have none yet.

        So the producing equation of a call's result is the equation inside the call.
        """
        for result in results:
            key = id(result)
            if key not in self._producers:
                self._producers[key] = (eqn, operands, result)

    def hide(self, value: Any, name: str = "") -> None:
        """Records that a value has a producing equation outside, which this scope does not see.

        `name` is the primitive of this equation, if `visible_producer` must count as asking for it.
        """
        self._producer_hidden[id(value)] = value, name

    def _chain(self) -> Iterator[Provenance]:
        provenance: Provenance | None = self
        while provenance is not None:
            yield provenance
            provenance = provenance._parent
