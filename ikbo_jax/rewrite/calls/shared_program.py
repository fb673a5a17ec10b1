"""A rewritten program that calls share, and what becomes of its results at each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ikbo_jax.rewrite.report.log import Log
from ikbo_jax.rewrite.values.forms import with_inside
from ikbo_jax.rewrite.values.lineage import Lazy, is_plain


@dataclasses.dataclass(frozen=True)
class Result:
    """Describes a result of a rewritten program, or a value inside a result.

    Attributes:
      value: a skeleton of the value inside the program, whose trace has ended.
      operand: position of the operand's node that is returned as it is; None for other values.
      like: position of the last node of the results that is the same value. All of these become
        one value of the caller, which is materialised once.
      inside: positions of the nodes inside this one.
      number: position among the arrays that the program computes; None for a value with values
        inside, and for one that is returned as it is.
    """

    value: Any
    operand: int | None
    like: int
    inside: range
    number: int | None


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """Holds a rewritten program. It takes operands' arrays, materialised operands, and constants.

    Positions count the operands' nodes as `Nodes` does.

    Attributes:
      params: parameters of the equation that calls it.
      consts: the arrays that it closes over.
      inputs: positions of the arrays and lookups whose arrays or bases it takes.
      materialised: positions of the values that it also takes materialised.
      stand_ins: positions of lookups, each with the stand-in for the lookup's origins.
      results: its results, and the values inside of them.
      count: the number of results.
      log: the events to record at each call.
    """

    params: dict[str, Any]
    consts: list[Any]
    inputs: list[int]
    materialised: list[int]
    stand_ins: list[tuple[int, Any]]
    results: list[Result]
    count: int
    log: Log

    def returned(
        self, nodes: Sequence[Any], arrays: Sequence[Any], origins: Sequence[frozenset]
    ) -> list[Any]:
        """Returns the results of a call.

        `arrays` are what the program computed; `origins` are the broadcasts that each of `results`
        stems from.
        """
        values: list[Any] = [None] * len(self.results)
        for n in range(len(values) - 1, -1, -1):
            result = self.results[n]
            if result.operand is not None:
                values[n] = nodes[result.operand]
            elif result.like > n:
                values[n] = values[result.like]
            elif result.number is not None:
                x, array = result.value, arrays[result.number]
                if not is_plain(x):
                    array = Lazy(array, x.shape, x.lineage, x.axis, origins[n])
                values[n] = array
            else:
                inside = result.inside
                values[n] = with_inside(result.value, values[inside.start : inside.stop])
        return values[: self.count]
