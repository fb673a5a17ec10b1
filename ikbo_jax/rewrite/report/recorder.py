"""Collects the report of a rewrite while it runs."""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.report.cost import reported_costs
from ikbo_jax.rewrite.report.report import (
    UNKNOWN,
    BothCosts,
    FoundBroadcast,
    Lookup,
    Materialisation,
    RewriteReport,
    source_line,
)
from ikbo_jax.rewrite.values import jaxprs, lineage, staged
from ikbo_jax.rewrite.values.equations import LOOKUPS, is_lookup


@dataclasses.dataclass(eq=False)
class Broadcast:
    """Collects a `FoundBroadcast` that is still being recorded.

    Attributes:
      certain: whether the report lists it. A lookup by an index is always listed. A broadcast
        dimension of size 1, which every bias has, is listed only if it saved a product.
      became, kept: the texts, in the order in which they were recorded.
    """

    line: str
    what: str
    certain: bool
    became: dict[str, None] = dataclasses.field(default_factory=dict)
    kept: dict[str, None] = dataclasses.field(default_factory=dict)

    def freeze(self) -> FoundBroadcast:
        return FoundBroadcast(self.line, self.what, tuple(self.became), tuple(self.kept))


@contextlib.contextmanager
def temporarily(of: Any, name: str, value: Any) -> Iterator[None]:
    """Opens a context in which an attribute has another value."""
    outer = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, outer)


class Recorder:
    """Collects the report of one rewrite."""

    def __init__(self, *, muted: bool = False) -> None:
        self.broadcasts: list[Broadcast] = []
        self.materialised: list[Materialisation] = []
        self.changed = False
        # Whether a rule took a form with another derivative than the original.
        self.gradient_differs = False
        # Whether values of the rewritten program have the original's derivative.
        self.gradient_is_as_written = False
        # Whether the rewritten program, whose values do not run, takes longer than the original.
        self.takes_longer = False
        self.muted = muted
        # The original and the rewritten program, which hold no tracers. What XLA counted of them.
        self.programs: tuple[Any, ...] = ()
        self.counted: dict[Any, Any] = {}
        self.reason = ""
        # The equations that call the program being interpreted, outermost first. If an equation was
        # traced inside a jitted library function, its line may be unknown; then the line of the
        # innermost call with a line is used.
        self.calls: tuple[Any, ...] = ()
        # Broadcasts that several calls have in common.
        self._once: dict[Any, Broadcast] = {}
        # Why the original runs although broadcasts were found.
        self.refusal = ""
        # What became an op at whatever batch it is computed, by line.
        self.layers: list[str] = []
        # The outcomes of the original's lookups, by the identity of their equations.
        self._lookups: dict[int, Lookup] = {}
        # Whether XLA adds gradients of lookups by scatters; by one that adds many narrow numbers.
        self.has_gathers = self.sums_are_narrow = False

    def list_lookups(
        self, program: Any, inside: str = "the function", seen: set[int] | None = None
    ) -> None:
        """Lists all lookups of the original program, including those that no rule is called for.

        `seen` are the identities of the programs that were searched.
        """
        seen = set() if seen is None else seen
        for eqn in program.eqns:
            if eqn.primitive.name in LOOKUPS and is_lookup(eqn):
                what = _lookup_text(eqn)
                reason = f"it is inside {inside}, which stays as it is"
                self._lookups[id(eqn)] = Lookup(self.line(eqn), what, "kept", reason)
                table: Any = eqn.invars[0].aval
                result: Any = eqn.outvars[0].aval
                if eqn.primitive.name == "gather":
                    self.has_gathers = True
                    self.sums_are_narrow |= staged.is_narrow_dtype(
                        table.dtype
                    ) and not lineage.is_at_least(table.size, result.size)
                continue
            if eqn.primitive.name in explain.WITHOUT_PROGRAMS:
                continue
            for inner in jaxprs.inner_programs(eqn):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    with self.inside(eqn):
                        self.list_lookups(inner, eqn.primitive.name, seen)

    def looked_up(self, eqn: Any, outcome: str, reason: str) -> None:
        """Records the outcome of a lookup of the original; the last of several calls counts."""
        if id(eqn) in self._lookups:
            lookup = self._lookups[id(eqn)]
            self._lookups[id(eqn)] = dataclasses.replace(lookup, outcome=outcome, reason=reason)

    def inside(self, eqn: Any) -> contextlib.AbstractContextManager[None]:
        """Opens a context for the interpretation of the program that an equation calls."""
        return temporarily(self, "calls", (*self.calls, eqn))

    def because(self, reason: str) -> contextlib.AbstractContextManager[None]:
        """Opens a context that sets the reason of all values materialised in it.

        The outermost reason counts.
        """
        return temporarily(self, "reason", self.reason or reason)

    def line(self, eqn: Any) -> str:
        """Returns the model's line that an equation stems from; a string unchanged."""
        if eqn is None:
            return "the function's result"
        if isinstance(eqn, str):
            return eqn
        lines = (source_line(e) for e in (eqn, *reversed(self.calls)) if e is not None)
        return next((line for line in lines if line), UNKNOWN)

    def found(self, eqn: Any, what: str, certain: bool) -> Broadcast:
        broadcast = Broadcast(self.line(eqn), what, certain)
        if not self.muted:
            self.broadcasts.append(broadcast)
        return broadcast

    def found_once(self, key: Any, *args: Any) -> Broadcast:
        """Does what `found` does, with the same broadcast for every call with this key."""
        broadcast = self._once.get(key) or self.found(*args)
        if not self.muted:
            self._once[key] = broadcast
        return broadcast

    def only_once(self, key: Any) -> contextlib.AbstractContextManager[None]:
        """Opens a context for an equation that several calls of a program would repeat.

        `key` is equal for equal equations. This recorder ignores it, since it has no calls.
        """
        return contextlib.nullcontext()

    def confirmed(self, origins: frozenset) -> None:
        """Records that broadcasts are lookups, so that the report lists them."""
        for origin in origins:
            origin.certain = True

    def saved(self, eqn: Any, origins: frozenset, became: str, product: bool) -> None:
        """Records work done at the smaller batch instead of the larger one.

        `became` says what replaced the equation. The line of a product is reported.
        """
        if self.muted or not origins:
            return
        text = f"{became}, {self.line(eqn)}" if product else became
        for origin in origins:
            origin.certain |= product
            origin.became[text] = None
            self.changed |= origin.certain

    def layer(self, what: str, eqn: Any) -> None:
        """Records what became an op although no broadcast takes part in it, by its equation."""
        if not self.muted:
            self.layers.append(f"{self.line(eqn)}: {what}")

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool) -> None:
        """Records that a value was materialised; `copied` is False if XLA fuses the lookup."""
        reason = self.reason or reason
        origins = [origin for origin in value.origins if origin.certain]
        if self.muted or not origins:
            return
        size = lineage.bytes_of(value.shape, value.dtype)
        for origin in origins:
            text = f"{'materialised' if copied else 'looked up in place'}, {self.line(eqn)}"
            origin.became[text] = None
        if copied:
            place = Materialisation(self.line(eqn), lineage.text(value), reason, size)
            self.materialised.append(place)
            for origin in origins:
                origin.kept[str(place)] = None

    def report(self) -> RewriteReport:
        changed = self.changed and not self.refusal
        broadcasts = tuple(b.freeze() for b in self.broadcasts if b.certain)
        costs = reported_costs(*self.programs, known=self.counted) if changed else ()
        lookups = tuple(self._lookups.values())
        if not changed:
            why = self.refusal or "nothing is gained by it"
            kept = {"outcome": "kept", "reason": why}
            lookups = tuple(
                dataclasses.replace(x, **kept) if x.outcome == "removed" else x for x in lookups
            )
        return RewriteReport(
            changed,
            broadcasts,
            tuple(self.materialised) if broadcasts else (),
            lookups,
            sum(not b.certain for b in self.broadcasts),
            self.refusal,
            BothCosts(*costs),
            tuple(self.layers),
        )


def _lookup_text(eqn: Any) -> str:
    operand, result = (v.aval.str_short() for v in (eqn.invars[0], eqn.outvars[0]))
    if len(eqn.invars) == 1:
        return f"{operand} tiled -> {result}"
    indices = eqn.invars[1].aval.shape
    count = math.prod(indices[:-1] if eqn.primitive.name == "gather" else indices)
    return f"{operand} looked up by {count} indices -> {result}"


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
    _origins_of: dict[frozenset, frozenset] = dataclasses.field(default_factory=dict)

    def place(self, line: str) -> Any:
        """Returns the line of an event, or the equation that calls if the line is unknown."""
        return self.equation if line == UNKNOWN else line

    def origins(self, stand_ins: frozenset) -> frozenset:
        """Returns the broadcasts that a value stems from in this call, by its stand-ins."""
        if stand_ins not in self._origins_of:
            replaced = (self.replaced.get(o, (o,)) for o in stand_ins)
            self._origins_of[stand_ins] = frozenset().union(*replaced)
        return self._origins_of[stand_ins]


class Log(Recorder):
    """Keeps all events of a rewritten program, to replay them at each of its calls.

    While the program is rewritten, a `Broadcast` without texts stands in for the broadcasts that an
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
        line = self.line(eqn) if product else UNKNOWN
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
