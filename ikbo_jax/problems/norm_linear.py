"""The linear layers around attention: their problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from ikbo_jax.problems.problem import Config, Problem, Ranked


@dataclasses.dataclass(frozen=True)
class LinearConfig(Config):
    """Stands for the tuning parameters of kernels that do not exist yet."""

    def illegal_reason(self, problem: Problem | None = None) -> str | None:
        return "the linear layers around attention have no kernel yet"


@dataclasses.dataclass(frozen=True)
class LinearProblem(Problem):
    """Holds the sizes of a `norm_linear` or a `gated_linear`.

    Attributes:
      features: columns of the token that comes in (`norm_linear`) or goes out (`gated_linear`).
      columns: columns of every group of columns.
      details: the other options in words.
    """

    rows: int
    features: int
    columns: tuple[int, ...]
    norm: str
    dtype: str
    details: str

    op: ClassVar[str] = "linear"
    config_type: ClassVar[type[Config]] = LinearConfig

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        raise ValueError(f"no table row can hold {fields!r:.80}: {LinearConfig().illegal_reason()}")

    def describe(self) -> str:
        columns = "+".join(map(str, self.columns))
        sizes = f"rows={self.rows} F={self.features} columns={columns} {self.dtype}"
        return f"{sizes} {self.norm} norm, {self.details}"

    def distance(self, other: Any) -> float:
        return 0.0 if self == other else float("inf")

    def rank(self) -> Iterator[Ranked]:
        """Yields no configuration: there is no kernel yet."""
        return iter(())
