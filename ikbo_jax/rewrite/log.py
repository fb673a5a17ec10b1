"""What a rewritten program does at each of its calls, kept to be recorded once a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ikbo_jax.rewrite.report import Broadcast, Recorder


@dataclasses.dataclass(frozen=True)
class _Copy:
    """What the report tells of a value that was materialised."""

    shape: tuple[int, ...]
    dtype: Any
    origins: frozenset


class Log(Recorder):
    """A recorder that hands on what it was told, as often as its program is called.

    While the program is rewritten, broadcasts that its operands stem from are stood for by others,
    of `stand_in`.

    Attributes:
      operands: positions of values that are operands of the call, by identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operands: dict[int, int] = {}
        self._events: list[tuple[Any, ...]] = []
        # Positions of events that only count, so that equal ones are added up.
        self._counts: dict[Any, int] = {}

    def stand_in(self) -> Broadcast:
        """What stands for the broadcasts that an operand stems from."""
        return Broadcast("", "", 0, False)

    def line(self, eqn: Any) -> Any:
        """The user's line; None if the program's equations know none."""
        known = super().line(eqn)
        return None if known == self.UNKNOWN else known

    def found(self, eqn: Any, what: str, copy_bytes: int, certain: bool) -> Broadcast:
        broadcast = Broadcast("", what, copy_bytes, certain)
        if not self.muted:
            self._events.append(("found", self.line(eqn), broadcast, what, copy_bytes, certain))
        return broadcast

    def confirmed(self, origins: frozenset) -> None:
        self._events.append(("confirmed", None, origins))
        self._counts.clear()

    def saved(
        self,
        eqn: Any,
        origins: frozenset,
        became: str,
        flops: int,
        product: bool,
        times: int = 1,
    ) -> None:
        if self.muted:
            return
        line = self.line(eqn) if product else None
        key = (line, origins, became, product)
        if key in self._counts:
            at = self._counts[key]
            kind, *same, flops_before, times_before = self._events[at]
            self._events[at] = (kind, *same, flops_before + flops, times_before + times)
        else:
            self._counts[key] = len(self._events)
            self._events.append(("saved", line, origins, became, product, flops, times))

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool, times: int = 1) -> None:
        if self.muted:
            return
        operand = self.operands.get(id(value))
        copy = _Copy(tuple(value.shape), value.dtype, value.origins)
        reason = self.reason or reason
        event = ("wrote", self.line(eqn), operand, copy, reason, copied)
        self._events += [event] * times

    def remember(self, key: Any, known: Any, record: Callable[[int], None]) -> None:
        """Nothing: what is recorded here is recorded again elsewhere, and in order."""

    def replay(
        self, recorder: Recorder, call: Any, origins: dict[Any, frozenset], materialise: Any
    ) -> Callable[[frozenset], frozenset]:
        """Records a call.

        Args:
          recorder: of the program that calls.
          call: the equation that calls.
          origins: what each stand-in stands for here.
          materialise: materialises an operand, as `materialise(operand, place, reason, copied)`.

        Returns:
          The broadcasts that a value of the program stems from here, given those it stems from
          there.
        """
        origins = dict(origins)
        known: dict[frozenset, frozenset] = {}

        def here(there: frozenset) -> frozenset:
            if there not in known:
                known[there] = frozenset().union(*(origins.get(o, (o,)) for o in there))
            return known[there]

        for kind, line, *rest in self._events:
            place = call if line is None else line
            if kind == "saved":
                there, became, product, flops, times = rest
                recorder.saved(place, here(there), became, flops, product, times)
            elif kind == "found":
                stand_in, *what = rest
                origins[stand_in] = frozenset([recorder.found(place, *what)])
            elif kind == "confirmed":
                recorder.confirmed(here(*rest))
            else:
                operand, copy, reason, copied = rest
                if operand is not None:
                    materialise(operand, place, reason, copied)
                else:
                    copy = dataclasses.replace(copy, origins=here(copy.origins))
                    recorder.wrote(place, copy, reason, copied)
        return here

    def is_same_everywhere(self) -> bool:
        """Whether a call on values of the same origins records what the one before did.

        So it is unless it finds a broadcast of its own or makes a copy, of which each is listed by
        itself, or if what it does is told by the line of the call.
        """
        for kind, line, *rest in self._events:
            if kind == "found":
                return False
            if kind == "saved":
                _, _, product, _, _ = rest
                if product and line is None:
                    return False
            elif kind == "wrote":
                operand, _, _, copied = rest
                if operand is not None or copied or line is None:
                    return False
        return True

    def repeat(
        self, recorder: Recorder, here: Callable[[frozenset], frozenset], times: int
    ) -> None:
        """Records further calls that are the same as the one `here` is of."""
        for kind, line, *rest in self._events:
            if kind == "saved":
                there, became, product, flops, once = rest
                recorder.saved(line, here(there), became, flops * times, product, once * times)
            elif kind == "wrote":
                _, copy, reason, copied = rest
                copy = dataclasses.replace(copy, origins=here(copy.origins))
                recorder.wrote(line, copy, reason, copied, times)
