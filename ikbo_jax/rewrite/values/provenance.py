"""The producing equation of every value of a rewritten program."""

from __future__ import annotations

from collections.abc import Sequence
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
        # The scopes around this one, from the inside.
        self._outer: tuple[Provenance, ...] = (parent, *parent._outer) if parent else ()
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
        key = id(value)
        for provenance in (self, *self._outer):
            if key in provenance._producers:
                eqn, operands, _ = provenance._producers[key]
                return eqn, operands
            if key in provenance._producer_hidden and (
                names is None or provenance._producer_hidden[key][1] in names
            ):
                provenance.asked_hidden.add(key)
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
        for provenance in (self, *self._outer):
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
