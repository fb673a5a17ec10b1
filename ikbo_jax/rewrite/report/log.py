"""The events that a rewritten program adds to the report at each of its calls."""

import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import Any

from ikbo_jax.rewrite.report.recorder import Broadcast, Recorder, temporarily
from ikbo_jax.rewrite.report.report import UNKNOWN


@dataclasses.dataclass(eq=False)
class _Call:
    """Holds a call of the program, for which the events are replayed.

    Attributes:
      replaced: by stand-in of the program, this call's broadcasts.
    """

    recorder: Recorder
    equation: Any
    replaced: dict[Any, frozenset]
    materialise: Any

    def __post_init__(self) -> None:
        self._origins_of: dict[frozenset, frozenset] = {}

    def place(self, line: str | None) -> Any:
        """Returns the line of an event, or the equation that calls if the event has no line."""
        return self.equation if line is None else line

    def origins(self, stand_ins: frozenset) -> frozenset:
        """Returns the broadcasts that a value stems from in this call, by its stand-ins."""
        if stand_ins not in self._origins_of:
            replaced = (self.replaced.get(o, (o,)) for o in stand_ins)
            self._origins_of[stand_ins] = frozenset().union(*replaced)
        return self._origins_of[stand_ins]


class Log(Recorder):
    """Keeps all events, to replay them at every call of its program.

    While the program is rewritten, a stand-in (`stand_in`) represents the broadcasts that an
    operand stems from.

    Attributes:
      operands: by identity of a value, its position among the operands of the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operands: dict[int, int] = {}
        self._events: list[Callable[[_Call], None]] = []
        self._key: Any = None
        # The last events of `saved`, since equal ones are one event.
        self._saved: set[Any] = set()

    def stand_in(self) -> Broadcast:
        return Broadcast("", "", False)

    def line(self, eqn: Any) -> Any:
        """Returns the model's line that an equation stems from; None if it is unknown."""
        line = super().line(eqn)
        return None if line == UNKNOWN else line

    def found(self, eqn: Any, what: str, certain: bool) -> Broadcast:
        line, key, stand_in = self.line(eqn), self._key, Broadcast("", what, certain)

        def event(call: _Call) -> None:
            found = call.place(line), what, certain
            if key is None:
                broadcast = call.recorder.found(*found)
            else:
                # All calls have the broadcast in common.
                broadcast = call.recorder.found_once((key, what), *found)
            call.replaced[stand_in] = frozenset([broadcast])

        if not self.muted:
            self._events.append(event)
        return stand_in

    def only_once(self, key: Any) -> contextlib.AbstractContextManager[None]:
        return temporarily(self, "_key", key)

    def confirmed(self, origins: frozenset) -> None:
        self._events.append(lambda call: call.recorder.confirmed(call.origins(origins)))
        self._saved = set()

    def saved(self, eqn: Any, origins: frozenset, became: str, product: bool) -> None:
        line = self.line(eqn) if product else None
        key = (line, origins, became, product)

        def event(call: _Call) -> None:
            call.recorder.saved(call.place(line), call.origins(origins), became, product)

        if not self.muted and key not in self._saved:
            self._saved.add(key)
            self._events.append(event)

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool) -> None:
        if self.muted:
            return
        line, operand, why = self.line(eqn), self.operands.get(id(value)), self.reason or reason
        # An event outlives the trace, so it must not hold the value.
        shape, dtype, origins = tuple(value.shape), value.dtype, value.origins

        def event(call: _Call) -> None:
            place = call.place(line)
            if operand is not None:
                call.materialise(operand, place, why, copied)
                return
            found = call.origins(origins)
            copy = types.SimpleNamespace(shape=shape, dtype=dtype, origins=found)
            call.recorder.wrote(place, copy, why, copied)

        self._events.append(event)

    def replay(
        self, recorder: Recorder, equation: Any, origins: dict[Any, frozenset], materialise: Any
    ) -> _Call:
        """Replays the events for one call; `origins` maps stand-ins to the broadcasts of this call.

        `materialise(operand, place, reason, copied)` materialises an operand.
        """
        call = _Call(recorder, equation, dict(origins), materialise)
        for event in self._events:
            event(call)
        return call
