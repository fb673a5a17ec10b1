"""What the work on each broadcast's values costs, before and after the rewrite.

While a program is rewritten, `Work.own` records the broadcasts that each equation's operands and
results stem from. Equations of the rewritten program have the traceback of the equation that they
replace, so `Work` adds up the costs of both programs by traceback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ikbo_jax.rewrite.cost import Cost, total

_Costs = Mapping[int | None, Cost]


@dataclasses.dataclass(frozen=True)
class Owned:
    """Equations with one traceback that compute with the values of broadcasts.

    Attributes:
      tracebacks: this traceback, and the tracebacks of the equations that call their program,
        innermost first.
      origins: the broadcasts.
    """

    tracebacks: tuple[Any, ...]
    origins: frozenset


@dataclasses.dataclass(frozen=True)
class BothCosts:
    """What the same work costs before and after the rewrite.

    Attributes:
      original: its cost in the original program.
      rewritten: its cost in the rewritten program.
    """

    original: Cost = Cost()
    rewritten: Cost = Cost()

    @property
    def flops_saved(self) -> int:
        return self.original.flops - self.rewritten.flops

    @property
    def bytes_saved(self) -> int:
        return self.original.nbytes - self.rewritten.nbytes

    def __add__(self, other: BothCosts) -> BothCosts:
        return BothCosts(self.original + other.original, self.rewritten + other.rewritten)

    def __sub__(self, other: BothCosts) -> BothCosts:
        return BothCosts(self.original - other.original, self.rewritten - other.rewritten)

    def __str__(self) -> str:
        """What is saved, of how much; or that more bytes are moved than before."""
        text = _saved(self.flops_saved, self.original.flops, "FLOP")
        if self.bytes_saved >= 0:
            return f"{text}, {_saved(self.bytes_saved, self.original.nbytes, 'B')}"
        moved = (f"{count(x.nbytes)}B" for x in (self.rewritten, self.original))
        return f"{text}, but moves {' instead of '.join(moved)}"

    @property
    def before_and_after(self) -> str:
        """Both costs, such as `84 MFLOP -> 67 MFLOP, 1.2 MB -> 800 kB`."""
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
    """A number with three digits and the prefix of its unit, such as `1.23 M`."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} "


class Work:
    """The equations that compute with the values of broadcasts, and their costs.

    Attributes:
      owned: by identity of a traceback, the equations that have it.
    """

    def __init__(self) -> None:
        self.owned: dict[int, Owned] = {}
        self._costs: tuple[_Costs, _Costs] = {}, {}

    def own(self, eqn: Any, calls: Sequence[Any], origins: frozenset) -> None:
        """Records that an equation of the original program computes with values of broadcasts.

        Equations that share a traceback, as in a function that JAX traced once, count for the
        broadcasts of the first of them.
        """
        traceback = eqn.source_info.traceback
        if id(traceback) not in self.owned and traceback is not None:
            callers = (x.source_info.traceback for x in reversed(calls) if x is not None)
            self.owned[id(traceback)] = Owned((traceback, *callers), origins)

    def own_all(self, other: Work, origins_of: Callable[[frozenset], frozenset]) -> None:
        """Records the equations of a called program; `origins_of` replaces its stand-ins."""
        for source, owned in other.owned.items():
            if source not in self.owned:
                self.owned[source] = Owned(owned.tracebacks, origins_of(owned.origins))

    def settle(self, original: _Costs, rewritten: _Costs) -> None:
        """Sets the costs of both programs, by traceback (`cost.cost_by_source`)."""
        self._costs = original, rewritten

    def whole(self) -> BothCosts:
        """The costs of the whole programs."""
        return BothCosts(total(self._costs[0]), total(self._costs[1]))

    def by_owner(self, owner_of: Callable[[frozenset], Any]) -> dict[Any, BothCosts]:
        """The costs of the equations of every broadcast.

        Args:
          owner_of: of the broadcasts that an equation's values stem from, the one that the
            equation counts for.

        Returns:
          Costs by broadcast. Equations of no broadcast, or for which `owner_of` returns None, are
          left out.
        """
        return _sums((owner_of(self.owned[source].origins), x) for source, x in self._both())

    def by_traceback(self) -> tuple[tuple[tuple[Any, ...], BothCosts], ...]:
        """The tracebacks of the equations, each with its costs; see `Owned.tracebacks`."""
        return tuple((self.owned[source].tracebacks, x) for source, x in self._both())

    def _both(self) -> Iterator[tuple[int, BothCosts]]:
        original, rewritten = self._costs
        for source in self.owned:
            costs = BothCosts(original.get(source, Cost()), rewritten.get(source, Cost()))
            if costs != BothCosts():
                yield source, costs


def _sums(entries: Iterable[tuple[Any, BothCosts]]) -> dict[Any, BothCosts]:
    sums: dict[Any, BothCosts] = {}
    for key, costs in entries:
        if key is not None:
            sums[key] = sums.get(key, BothCosts()) + costs
    return sums
