"""The events that a rewritten program adds to the report at each of its calls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ikbo_jax.rewrite.report.recorder import Broadcast, Recorder
from ikbo_jax.rewrite.report.report import UNKNOWN


@dataclasses.dataclass(frozen=True)
class _Copy:
    """The properties of a materialised value that the report needs."""

    shape: tuple[int, ...]
    dtype: Any
    origins: frozenset


class _Call:
    """A call of the program, for which the events are replayed.

    Attributes:
      recorder: the recorder of the calling program.
      equation: the equation that calls; its line is used for events without a line.
      materialise: materialises an operand, as `materialise(operand, place, reason, copied)`.
    """

    def __init__(
        self, recorder: Recorder, equation: Any, origins: dict[Any, frozenset], materialise: Any
    ) -> None:
        self.recorder = recorder
        self.equation = equation
        self.materialise = materialise
        self._origins = dict(origins)
        self._origins_of: dict[frozenset, frozenset] = {}

    def place(self, line: str | None) -> Any:
        """The line of an event, or the equation that calls if the event has no line."""
        return self.equation if line is None else line

    def replace(self, stand_in: Broadcast, broadcast: Broadcast) -> None:
        """Replaces a stand-in of the program by this call's broadcast."""
        self._origins[stand_in] = frozenset([broadcast])

    def origins(self, stand_ins: frozenset) -> frozenset:
        """The broadcasts that a value stems from in this call, by its stand-ins."""
        if stand_ins not in self._origins_of:
            replaced = (self._origins.get(o, (o,)) for o in stand_ins)
            self._origins_of[stand_ins] = frozenset().union(*replaced)
        return self._origins_of[stand_ins]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A broadcast was found; it is the same broadcast in every call if `key` is not None."""

    line: str | None
    stand_in: Broadcast
    what: str
    certain: bool
    key: Any

    def replay(self, call: _Call) -> None:
        found = call.place(self.line), self.what, self.certain
        if self.key is None:
            broadcast = call.recorder.found(*found)
        else:
            broadcast = call.recorder.found_once((self.key, self.what), *found)
        call.replace(self.stand_in, broadcast)

    def repeat(self, call: _Call, times: int) -> None:
        """Does nothing: the first call has found the broadcast."""

    def is_same_everywhere(self) -> bool:
        return self.key is not None


@dataclasses.dataclass(frozen=True)
class _Confirmed:
    """Broadcasts proved to be lookups."""

    origins: frozenset

    def replay(self, call: _Call) -> None:
        call.recorder.confirmed(call.origins(self.origins))

    def repeat(self, call: _Call, times: int) -> None:
        """Does nothing: one record suffices for all calls."""

    def is_same_everywhere(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class _Saved:
    """Work was done at the smaller batch."""

    line: str | None
    origins: frozenset
    became: str
    product: bool
    times: int

    def replay(self, call: _Call) -> None:
        self.repeat(call, 1)

    def repeat(self, call: _Call, times: int) -> None:
        place, origins = call.place(self.line), call.origins(self.origins)
        call.recorder.saved(place, origins, self.became, self.product, self.times * times)

    def is_same_everywhere(self) -> bool:
        return not self.product or self.line is not None


@dataclasses.dataclass(frozen=True)
class _Wrote:
    """A value was materialised; `operand` is its position if it is an operand of the call."""

    line: str | None
    operand: int | None
    copy: _Copy
    reason: str
    copied: bool

    def replay(self, call: _Call) -> None:
        if self.operand is None:
            self.repeat(call, 1)
        else:
            call.materialise(self.operand, call.place(self.line), self.reason, self.copied)

    def repeat(self, call: _Call, times: int) -> None:
        copy = dataclasses.replace(self.copy, origins=call.origins(self.copy.origins))
        call.recorder.wrote(call.place(self.line), copy, self.reason, self.copied, times)

    def is_same_everywhere(self) -> bool:
        return self.operand is None and not self.copied and self.line is not None


class Log(Recorder):
    """A recorder that keeps all events, to replay them at every call of its program.

    While the program is rewritten, a stand-in (`stand_in`) represents the broadcasts that an
    operand stems from.

    Attributes:
      operands: by identity of a value, its position among the operands of the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operands: dict[int, int] = {}
        self._events: list[Any] = []
        self._key: Any = None
        # Positions of `_Saved` events in the list, so that later equal events are added to them.
        self._positions: dict[Any, int] = {}

    def stand_in(self) -> Broadcast:
        """A new stand-in for the broadcasts that an operand stems from."""
        return Broadcast("", "", False)

    def line(self, eqn: Any) -> Any:
        """The model's line that an equation stems from; None if it is unknown."""
        line = super().line(eqn)
        return None if line == UNKNOWN else line

    def found(self, eqn: Any, what: str, certain: bool) -> Broadcast:
        broadcast = Broadcast("", what, certain)
        if not self.muted:
            event = _Found(self.line(eqn), broadcast, what, certain, self._key)
            self._events.append(event)
        return broadcast

    @contextlib.contextmanager
    def only_once(self, key: Any) -> Iterator[None]:
        outer, self._key = self._key, key
        try:
            yield
        finally:
            self._key = outer

    def confirmed(self, origins: frozenset) -> None:
        self._events.append(_Confirmed(origins))
        self._positions.clear()

    def saved(
        self, eqn: Any, origins: frozenset, became: str, product: bool, times: int = 1
    ) -> None:
        if self.muted:
            return
        line = self.line(eqn) if product else None
        event = _Saved(line, origins, became, product, times)
        key = (line, origins, became, product)
        if key in self._positions:
            before = self._events[self._positions[key]]
            self._events[self._positions[key]] = dataclasses.replace(
                event, times=before.times + times
            )
        else:
            self._positions[key] = len(self._events)
            self._events.append(event)

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool, times: int = 1) -> None:
        if self.muted:
            return
        operand = self.operands.get(id(value))
        copy = _Copy(tuple(value.shape), value.dtype, value.origins)
        event = _Wrote(self.line(eqn), operand, copy, self.reason or reason, copied)
        self._events += [event] * times

    def remember(self, key: Any, origins: Any, record: Callable[[int], None]) -> None:
        """Does nothing: the events of every call are kept, in order, and replayed later."""

    def replay(
        self, recorder: Recorder, equation: Any, origins: dict[Any, frozenset], materialise: Any
    ) -> _Call:
        """Replays the events for one call.

        Args:
          recorder: the recorder of the calling program.
          equation: the equation that calls.
          origins: by stand-in, the broadcasts that it represents in this call.
          materialise: materialises an operand, as `materialise(operand, place, reason, copied)`.

        Returns:
          The call; its method `origins` maps stand-ins to broadcasts.
        """
        call = _Call(recorder, equation, origins, materialise)
        for event in self._events:
            event.replay(call)
        if not recorder.muted:
            # Last, when the call knows the broadcasts of all stand-ins.
            recorder.work.own_all(self.work, recorder.calls, call.origins)
        return call

    def is_same_everywhere(self) -> bool:
        """Whether all calls on values with the same origins record the same events.

        This is not so if a call finds a broadcast or copies a value, since the report lists each of
        them, or if an event has the line of the equation that calls.
        """
        return all(event.is_same_everywhere() for event in self._events)

    def repeat(self, call: _Call, times: int) -> None:
        """Records further calls that are the same as `call`."""
        for event in self._events:
            event.repeat(call, times)
