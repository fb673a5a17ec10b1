"""The producing equation of every value of a rewritten program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core


class Provenance:
    """The producing equations of one scope's values; enclosing scopes are searched next.

    Attributes:
      asked_hidden_producer: whether a rule asked for the producing equation of a value whose
        producing equation is hidden from this scope (`hide`).
    """

    def __init__(self, parent: Provenance | None = None) -> None:
        self.asked_hidden_producer = False
        self._parent = parent
        # By identity of the result; entries hold the result, so that its identity stays unique.
        self._producers: dict[int, tuple[core.JaxprEqn, Sequence[Any], Any]] = {}
        self._producer_hidden: dict[int, Any] = {}

    def producer(self, value: Any) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """The producing equation of a value, and its operands; None if unknown."""
        for provenance in self._chain():
            if id(value) in provenance._producers:
                eqn, operands, _ = provenance._producers[id(value)]
                return eqn, operands
            provenance.asked_hidden_producer |= id(value) in provenance._producer_hidden
        return None

    def visible_producer(self, value: Any) -> tuple[core.JaxprEqn, Sequence[Any]] | None:
        """`producer`, for rules that do without a producing equation that is hidden."""
        asked = [(p, p.asked_hidden_producer) for p in self._chain()]
        produced = self.producer(value)
        for provenance, before in asked:
            provenance.asked_hidden_producer = before
        return produced

    def record(self, eqn: core.JaxprEqn, result: Any, operands: Sequence[Any] = ()) -> None:
        """Records the producing equation of a value, unless one is recorded already.

        So the producing equation of a call's result is the equation inside the call.
        """
        if id(result) not in self._producers:
            self._producers[id(result)] = (eqn, operands, result)

    def hide(self, value: Any) -> None:
        """Records that a value has a producing equation outside, which this scope does not see."""
        self._producer_hidden[id(value)] = value

    def has_producer(self, value: Any) -> bool:
        """Whether a value has a producing equation, hidden or not."""
        return any(
            id(value) in p._producers or id(value) in p._producer_hidden for p in self._chain()
        )

    def _chain(self) -> Iterator[Provenance]:
        provenance: Provenance | None = self
        while provenance is not None:
            yield provenance
            provenance = provenance._parent
