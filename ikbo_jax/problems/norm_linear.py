"""The linear layers around attention: their problems."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from ikbo_jax.problems.problem import Config, Problem, Ranked, doublings


@dataclasses.dataclass(frozen=True)
class LinearConfig(Config):
    """Stands for the tuning parameters of kernels that do not exist yet."""

    def illegal_reason(self, problem: Problem | None = None) -> str | None:
        return "the linear layers around attention have no kernel yet"


@dataclasses.dataclass(frozen=True)
class LinearProblem(Problem):
    """Holds what both problems have.

    Attributes:
      rows: rows of tokens.
      features: columns of the token that comes in (`norm_linear`) or goes out (`gated_linear`).
      columns: columns of every other array of rows.
      norm: kind of the norm.
      dtype: name of the rows' dtype.
    """

    rows: int
    features: int
    columns: tuple[int, ...]
    norm: str
    dtype: str

    config_type: ClassVar[type[Config]] = LinearConfig

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        raise ValueError(f"{cls.op} has no table rows: {LinearConfig().illegal_reason()}")

    def describe(self) -> str:
        columns = "+".join(map(str, self.columns))
        return f"rows={self.rows} F={self.features} columns={columns} {self.dtype} {self.norm} norm"

    def distance(self, other: Any) -> float:
        def without_sizes(problem: LinearProblem) -> LinearProblem:
            return dataclasses.replace(problem, rows=0, features=0, columns=())

        if without_sizes(self) != without_sizes(other):
            return math.inf
        pairs = ((self.rows, other.rows), (self.features, other.features))
        return sum(doublings(a, b) for a, b in (*pairs, (sum(self.columns), sum(other.columns))))

    def rank(self) -> Iterator[Ranked]:
        """Yields no configuration: there is no kernel yet."""
        return iter(())


@dataclasses.dataclass(frozen=True)
class NormLinearProblem(LinearProblem):
    """Holds the sizes of a `norm_linear`, and the activation of every group of columns."""

    activations: tuple[str, ...]

    op: ClassVar[str] = "norm_linear"

    def describe(self) -> str:
        return f"{super().describe()} {'+'.join(self.activations)}"


@dataclasses.dataclass(frozen=True)
class GatedLinearProblem(LinearProblem):
    """Holds the sizes of a `gated_linear`.

    Attributes:
      groups: groups of columns that are normalised on their own.
      concat: whether the rows that are multiplied hold the two inputs, too.
      has_dropout: whether numbers of these rows are dropped.
    """

    groups: int = 1
    concat: bool = False
    has_dropout: bool = False

    op: ClassVar[str] = "gated_linear"

    def describe(self) -> str:
        words = [super().describe(), f"groups={self.groups}"]
        words += ["concat"] * self.concat + ["dropout"] * self.has_dropout
        return " ".join(words)
