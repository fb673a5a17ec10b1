"""Collects the report of a rewrite while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Any

from ikbo_jax.ops import explain
from ikbo_jax.rewrite.report.report import (
    UNKNOWN,
    FoundBroadcast,
    Lookup,
    Materialisation,
    RewriteReport,
    source_line,
)
from ikbo_jax.rewrite.report.work import BothCosts, Work
from ikbo_jax.rewrite.values import jaxprs, lineage


def _with_times(texts: dict[str, int]) -> tuple[str, ...]:
    return tuple(text if n == 1 else f"{text} ({n} times)" for text, n in texts.items())


class Broadcast:
    """A `FoundBroadcast` that is still being recorded."""

    def __init__(self, line: str, what: str, certain: bool) -> None:
        self.line = line
        self.what = what
        # Whether the report lists it. A lookup by an index is always listed. A broadcast dimension
        # of size 1, which every bias has, is listed only if it saved a product.
        self.certain = certain
        self.became: dict[str, int] = {}
        self.kept: dict[str, int] = {}

    def freeze(self, costs: BothCosts | None) -> FoundBroadcast:
        texts = _with_times(self.became), _with_times(self.kept)
        return FoundBroadcast(self.line, self.what, texts[0], costs, texts[1])


@dataclasses.dataclass
class _Repeated:
    """Calls that record the same as an earlier call; `record(times)` records all of them.

    `origins` are the broadcasts that each result of these calls stems from.
    """

    origins: Any
    record: Callable[[int], None]
    times: int = 0


class Recorder:
    """Collects the report of one rewrite."""

    def __init__(self) -> None:
        self.broadcasts: list[Broadcast] = []
        self.materialised: list[Materialisation] = []
        self.changed = False
        # Whether a rule took a form with another derivative than the original.
        self.gradient_differs = False
        self.muted = 0
        self.work = Work()
        self.reason = ""
        # The equations that call the program being interpreted, outermost first. If an equation was
        # traced inside a jitted library function, its line may be unknown; then the line of the
        # innermost call with a line is used.
        self.calls: list[Any] = []
        self._repeated: dict[Any, _Repeated] = {}
        # Broadcasts that several calls have in common.
        self._once: dict[Any, Broadcast] = {}
        # Why the original runs although broadcasts were found.
        self.refusal = ""
        # The outcomes of the original's lookups, by the identity of their equations.
        self._lookups: dict[int, Lookup] = {}

    def list_lookups(self, program: Any, names: Container[str]) -> None:
        """Lists all lookups of the original program, including those that no rule is called for.

        `names` are the names of the primitives that look up.
        """
        self._list_lookups(program, names, "the function", set())

    def _list_lookups(
        self, program: Any, names: Container[str], inside: str, seen: set[int]
    ) -> None:
        """`list_lookups`, where `seen` are the identities of the programs that were searched."""
        for eqn in program.eqns:
            if eqn.primitive.name in names:
                what = _lookup_text(eqn)
                reason = f"it is inside {inside}, which stays as it is"
                self._lookups[id(eqn)] = Lookup(self.line(eqn), what, "kept", reason)
            if eqn.primitive.name in explain.WITHOUT_PROGRAMS:
                continue
            for inner in jaxprs.inner_programs(eqn):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    with self.inside(eqn):
                        self._list_lookups(inner, names, eqn.primitive.name, seen)

    def looked_up(self, eqn: Any, outcome: str, reason: str) -> None:
        """Records the outcome of a lookup of the original; the last of several calls counts."""
        if id(eqn) in self._lookups:
            lookup = self._lookups[id(eqn)]
            self._lookups[id(eqn)] = dataclasses.replace(lookup, outcome=outcome, reason=reason)

    @contextlib.contextmanager
    def inside(self, eqn: Any) -> Iterator[None]:
        """A context manager for the interpretation of the program that an equation calls."""
        self.calls.append(eqn)
        try:
            yield
        finally:
            self.calls.pop()

    @contextlib.contextmanager
    def because(self, reason: str) -> Iterator[None]:
        """A context manager that sets the reason of all values materialised in it.

        The outermost reason counts.
        """
        outer, self.reason = self.reason, self.reason or reason
        try:
            yield
        finally:
            self.reason = outer

    def line(self, eqn: Any) -> str:
        """The model's line that an equation stems from; a string unchanged."""
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
        """`found`, but the same broadcast for every call with this key."""
        broadcast = self._once.get(key) or self.found(*args)
        if not self.muted:
            self._once[key] = broadcast
        return broadcast

    @contextlib.contextmanager
    def only_once(self, key: Any) -> Iterator[None]:
        """A context manager for an equation that several calls of a program would repeat.

        `key` is equal for equal equations. This recorder ignores it, since it has no calls.
        """
        yield

    def computed(self, eqn: Any, origins: frozenset) -> None:
        """Records the broadcasts that the operands and results of an equation stem from."""
        if origins and not self.muted:
            self.work.own(eqn, self.calls, origins)

    def confirmed(self, origins: frozenset) -> None:
        """Records that broadcasts are lookups, so that the report lists them."""
        for origin in origins:
            origin.certain = True

    def saved(
        self, eqn: Any, origins: frozenset, became: str, product: bool, times: int = 1
    ) -> None:
        """Records work done at the smaller batch instead of the larger one.

        Args:
          eqn: the equation of the original program.
          origins: the broadcasts that its operands stem from.
          became: what replaced the equation.
          product: whether it is a product, whose line is reported; other work is only counted.
          times: how often this was recorded.
        """
        if self.muted or not origins:
            return
        text = f"{became}, {self.line(eqn)}" if product else became
        for origin in origins:
            origin.certain |= product
            origin.became[text] = origin.became.get(text, 0) + times
            self.changed |= origin.certain

    def wrote(self, eqn: Any, value: Any, reason: str, copied: bool, times: int = 1) -> None:
        """Records that a value was materialised; `copied` is False if XLA fuses the lookup."""
        reason = self.reason or reason
        origins = [origin for origin in value.origins if origin.certain]
        if self.muted or not origins:
            return
        size = lineage.nbytes(value.shape, value.dtype)
        for origin in origins:
            text = f"{'materialised' if copied else 'looked up in place'}, {self.line(eqn)}"
            origin.became[text] = origin.became.get(text, 0) + times
        if copied:
            place = Materialisation(self.line(eqn), lineage.text(value), reason, size)
            self.materialised += [place] * times
            for origin in origins:
                origin.kept[str(place)] = origin.kept.get(str(place), 0) + times

    def remember(self, key: Any, origins: Any, record: Callable[[int], None]) -> None:
        """Prepares `again`, by which calls that record the same are recorded together at the end.

        Args:
          key: equal for calls that record the same.
          origins: what `again` returns for such a call.
          record: records a number of such calls.
        """
        if not self.muted:
            self._repeated[key] = _Repeated(origins, record)

    def again(self, key: Any, times: int = 1) -> Any:
        """Counts calls with this key and returns their origins; None if it is not remembered."""
        repeated = None if self.muted else self._repeated.get(key)
        if repeated is None:
            return None
        repeated.times += times
        return repeated.origins

    def record_repeated(self) -> None:
        """Records the calls that `again` has counted."""
        for repeated in self._repeated.values():
            if repeated.times:
                repeated.record(repeated.times)
        # What records them holds tracers.
        self._repeated.clear()

    def report(self) -> RewriteReport:
        self.record_repeated()
        changed = self.changed and not self.refusal
        numbers = {b: n for n, b in enumerate(self.broadcasts) if b.certain}

        def first(origins: frozenset) -> Any:
            return min((x for x in origins if x in numbers), key=numbers.__getitem__, default=None)

        costs = self.work.by_owner(first)
        broadcasts = tuple(
            b.freeze(costs.get(b, BothCosts()) if changed else None) for b in numbers
        )
        lookups = tuple(self._lookups.values())
        if not changed:
            why = self.refusal or "nothing is gained by it"
            lookups = tuple(
                dataclasses.replace(x, outcome="kept", reason=why) if x.outcome == "removed" else x
                for x in lookups
            )
        return RewriteReport(
            changed,
            broadcasts,
            tuple(self.materialised) if broadcasts else (),
            lookups,
            sum(not b.certain for b in self.broadcasts),
            self.refusal,
            self.work.whole if changed else BothCosts(),
            self.work,
        )


def _lookup_text(eqn: Any) -> str:
    """A lookup in words, as in the report of a broadcast."""
    operand, result = (v.aval.str_short() for v in (eqn.invars[0], eqn.outvars[0]))
    if len(eqn.invars) == 1:
        return f"{operand} tiled -> {result}"
    count = lineage.size_of(eqn.invars[1].aval.shape[:-1])
    return f"{operand} looked up by {count} indices -> {result}"
