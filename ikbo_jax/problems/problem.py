"""What every op's problems and configurations have, and how far two problems are apart."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self


@dataclasses.dataclass(frozen=True)
class Config(abc.ABC):
    """Tuning parameters of a kernel."""

    @abc.abstractmethod
    def illegal_reason(self, problem: Any) -> str | None:
        """Says why the kernel cannot run `problem` with this configuration; None if it can."""


class Ranked(NamedTuple):
    """One way to run a problem.

    Attributes:
      us: estimate of its time in microseconds; None where a rule orders, not a cost model.
      config: the kernel's configuration; None: XLA.
      why: the kernel, or XLA, in words: what `explain` says of the first one.
    """

    us: float | None
    config: Any
    why: str = ""


class Problem(abc.ABC):
    """The sizes and the dtype of a call of an op: a frozen dataclass.

    Attributes:
      op: the op's name in table rows.
      config_type: class of the kernel's configurations.
      request: fields that differ from request to request of one model.
      dtype: name of the inputs' dtype.
    """

    op: ClassVar[str]
    config_type: ClassVar[type[Config]]
    request: ClassVar[tuple[str, ...]] = ()
    dtype: str

    @classmethod
    def of(cls, other: Problem) -> Self:
        """Makes a problem with the sizes of another op's, such as a gradient's of the forward's."""
        kind: Any = cls
        return kind(**{x.name: getattr(other, x.name) for x in dataclasses.fields(kind)})

    @classmethod
    def config_type_of(cls, fields: Mapping[str, Any]) -> type[Config]:
        """Returns the class of the configuration with these JSON fields."""
        del fields
        return cls.config_type

    @abc.abstractmethod
    def describe(self) -> str:
        """Formats the problem as one line of text."""

    def distance(self, other: Problem) -> float:
        """Finds the most doublings of a size of the request.

        Infinite if anything else differs: a row for one problem says nothing about the other.
        """
        if type(self) is not type(other):
            return math.inf
        away = 0.0
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in self.request:
                away = away if ours == theirs else math.inf
                continue
            levels = (ours, theirs) if isinstance(ours, tuple) else ((ours,), (theirs,))
            if len(levels[0]) != len(levels[1]):
                return math.inf
            for a, b in zip(*levels, strict=True):
                away = max(away, abs(math.log2(max(a, 1) / max(b, 1))))
        return away

    @abc.abstractmethod
    def rank(self) -> Iterable[Ranked]:
        """Yields the legal ways worth timing, the most promising first; call `ranked` instead."""

    def configs(self) -> tuple[Any, ...]:
        """Lists the kernels' configurations among `ranked`."""
        return tuple(x.config for x in ranked(self) if x.config is not None)

    def default_config(self) -> Any:
        """Returns the most promising configuration of a kernel; None if none is legal."""
        return next(iter(self.configs()), None)


@functools.lru_cache(maxsize=4096)
def ranked(problem: Problem) -> tuple[Ranked, ...]:
    """Lists the legal ways to run a problem that are worth timing, the most promising first.

    The first one is the default; the autotuner times all of them. Computed once for each problem.
    """
    return tuple(problem.rank())


def by_rule(configs: Iterable[Config], why: str = "") -> Iterator[Ranked]:
    """Yields configurations that a rule has put into an order."""
    return (Ranked(None, config, why) for config in configs)
