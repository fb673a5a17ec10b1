"""What a rewrite saves, in numbers and in words."""

from __future__ import annotations

import dataclasses

from ikbo_jax.rewrite.report.cost import Cost
from ikbo_jax.rewrite.values import lineage


@dataclasses.dataclass(frozen=True)
class BothCosts:
    """Holds the costs of the original and of the rewritten program."""

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
