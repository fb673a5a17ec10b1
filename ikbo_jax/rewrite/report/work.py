"""What the work on each broadcast's values costs, before and after the rewrite.

While a program is rewritten, `Work.own` records the broadcasts that each equation's operands and
results stem from. Equations of the rewritten program have the traceback of the equation that they
replace, so `Work` adds up the costs of both programs by traceback.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ikbo_jax.rewrite.report.cost import Cost, cost_by_source, decisive_costs
from ikbo_jax.rewrite.values import lineage


class _Program(NamedTuple):
    """Holds what the cost of a program depends on; not its constants, which may be tracers."""

    eqns: Sequence[Any]
    outvars: Sequence[Any]


class Owned(NamedTuple):
    """Holds equations with one traceback that compute with the values of broadcasts.

    Attributes:
      traceback: this traceback.
      calls: the equations that call their program, outermost first; None stands for an unknown one.
      origins: the broadcasts.
    """

    traceback: Any
    calls: tuple[Any, ...]
    origins: frozenset

    @property
    def tracebacks(self) -> tuple[Any, ...]:
        """Tracebacks of the equation and of the calls, innermost first."""
        callers = (x.source_info.traceback for x in reversed(self.calls) if x is not None)
        return (self.traceback, *callers)


@dataclasses.dataclass(frozen=True)
class BothCosts:
    """Holds the costs of the same work in the original and in the rewritten program."""

    original: Cost = Cost()
    rewritten: Cost = Cost()

    @property
    def flops_saved(self) -> int:
        return self.original.flops - self.rewritten.flops

    @property
    def bytes_saved(self) -> int:
        return self.original.nbytes - self.rewritten.nbytes

    def __str__(self) -> str:
        """Says what is saved, of how much; or that more bytes are moved than before."""
        text = _saved(self.flops_saved, self.original.flops, "FLOP")
        if lineage.is_at_least(self.bytes_saved, 0):
            return f"{text}, {_saved(self.bytes_saved, self.original.nbytes, 'B')}"
        moved = (f"{count(x.nbytes)}B" for x in (self.rewritten, self.original))
        return f"{text}, but moves {' instead of '.join(moved)}"

    @property
    def before_and_after(self) -> str:
        """Text of both costs, such as `84 MFLOP -> 67 MFLOP, 1.2 MB -> 800 kB`."""
        both = self.original, self.rewritten
        texts = [" -> ".join(f"{count(x.nbytes)}B" for x in both)]
        if any(x.flops for x in both):
            texts.insert(0, " -> ".join(f"{count(x.flops)}FLOP" for x in both))
        return ", ".join(texts)


def _saved(amount: int, whole: int, unit: str) -> str:
    if amount == whole:
        return f"all {count(whole)}{unit}" if whole else f"0 {unit}"
    return f"{count(amount)}{unit} of {count(whole)}{unit}"


def count(number: int) -> str:
    """Formats a number with three digits and the prefix of its unit, such as `1.23 M`.

    Expressions of symbolic dimensions, which no unit is known to fit, stay as they are.
    """
    if not isinstance(number, int):
        return f"({number}) "
    if number < 0:
        return f"-{count(-number)}"
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} "


class Work:
    """Collects the equations that compute with the values of broadcasts, and their costs.

    Attributes:
      owned: by identity of a traceback, the equations that have it.
    """

    def __init__(self) -> None:
        self.owned: dict[int | None, Owned] = {}
        self._programs: tuple[_Program, ...] = 2 * (_Program((), ()),)
        # Called programs whose equations are in `owned`, by identity.
        self._taken: dict[int, Work] = {}

    def own(self, eqn: Any, calls: Sequence[Any], origins: frozenset) -> None:
        """Records that an equation of the original program computes with values of broadcasts.

        Equations that share a traceback, as in a function that JAX traced once, count for the
        broadcasts of the first of them.
        """
        traceback = eqn.source_info.traceback
        key = id(traceback)
        if key not in self.owned and traceback is not None:
            self.owned[key] = Owned(traceback, tuple(calls), origins)

    def own_all(
        self, other: Work, calls: Sequence[Any], origins_of: Callable[[frozenset], frozenset]
    ) -> None:
        """Records the equations of a called program; `origins_of` replaces its stand-ins."""
        if id(other) in self._taken:
            return
        self._taken[id(other)] = other
        for source, owned in other.owned.items():
            if source not in self.owned:
                within = (*calls, *owned.calls)
                self.owned[source] = Owned(owned.traceback, within, origins_of(owned.origins))

    def settle(self, original: core.Jaxpr, rewritten: core.Jaxpr) -> BothCosts:
        """Keeps both programs, and returns the costs that decide which one runs."""
        self._programs = tuple(_Program(x.eqns, x.outvars) for x in (original, rewritten))
        return BothCosts(*decisive_costs(original, rewritten))

    @functools.cached_property
    def _settled(self) -> list[tuple[Owned | None, BothCosts]]:
        """Costs of the equations with each traceback, and of all others. Counting takes long."""
        before, after = (cost_by_source(x, self.owned) for x in self._programs)
        return [
            (
                self.owned.get(source),
                BothCosts(before.get(source, Cost()), after.get(source, Cost())),
            )
            for source in (*self.owned, None)
            if source in before or source in after
        ]

    @property
    def whole(self) -> BothCosts:
        """Costs of both programs, once `settle` has been called."""
        return _sums((True, costs) for _, costs in self._settled).get(True, BothCosts())

    def by_owner(self, owner_of: Callable[[frozenset], Any]) -> dict[Any, BothCosts]:
        """Computes the costs of the equations of every broadcast.

        Of the broadcasts that an equation's values stem from, `owner_of` returns the one that the
        equation counts for; equations for which it returns None are left out.
        """
        # Most equations stem from the same broadcasts.
        owners = {x.origins: owner_of(x.origins) for x, _ in self._settled if x}
        return _sums((owners[x.origins], costs) for x, costs in self._settled if x)

    def by_line(self, line_of: Callable[[tuple[Any, ...]], str]) -> dict[str, BothCosts]:
        """Computes the costs of the model's lines; `line_of` finds a line by `Owned.tracebacks`.

        The last entry, "all other lines", is the rest of the program.
        """
        rest = "all other lines"
        return _sums((line_of(x.tracebacks) if x else rest, costs) for x, costs in self._settled)


def _sums(entries: Iterable[tuple[Any, BothCosts]]) -> dict[Any, BothCosts]:
    sums: dict[Any, list[int]] = collections.defaultdict(lambda: 6 * [0])
    for key, x in entries:
        if key is not None:
            sums[key] = list(map(operator.add, sums[key], (*x.original, *x.rewritten)))
    return {key: BothCosts(Cost(*x[:3]), Cost(*x[3:])) for key, x in sums.items()}
