"""Rows of the dispatch table: measurements, and the file format that holds them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
from typing import Any, cast

from ikbo_jax.problems import PROBLEMS, Problem
from ikbo_jax.problems.problem import measured, size, typed

#: Version of the file format; a file with another schema is not read.
SCHEMA = 1
#: Parameters of configurations that no longer exist, with the value that rows of older versions may
#: hold of them: the behaviour that remained.
REMOVED = {
    "early_scores": False,
    "adds_by_launch": True,
    "stagger": False,
    "tall": False,
    "chunk": 32,
    "coarse_rows": 48,
    "sum_stages": 12,
}

#: Fields of problems that rows lack: rows are of candidates sorted by user, and of calls without
#: masks, ranges, caps or pages.
NOT_IN_ROWS = ("is_sorted", "mask", "has_ranges", "has_logit_cap", "page", "has_bias")


@dataclasses.dataclass(frozen=True)
class Row:
    """Holds one measurement: the best choice for a problem.

    Attributes:
      config: the best configuration; None if XLA was faster.
      date: ISO date.
      ms: sustained time of the whole op, milliseconds.
      fraction: useful FLOP/s, divided by the FLOP/s of a sustained 8192^3 bf16 matmul in the same
        process.
      xla_ms: time of the XLA path in the same process, milliseconds; None if it was not timed.
    """

    problem: Any
    config: Any
    device: str
    date: str
    jax: str
    ms: float
    fraction: float
    xla_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        config = (
            {"implementation": "xla"} if self.config is None else dataclasses.asdict(self.config)
        )
        problem = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self.problem).items()
            if name not in NOT_IN_ROWS
        }
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        measurement = {k: v for k, v in fields.items() if k not in ("problem", "config")}
        return {"op": self.problem.op, **problem, "config": config, **measurement}

    @classmethod
    def from_json(cls, entry: object) -> Row:
        """Reads a row of a table file; raises ValueError if it is malformed."""
        fields = typed(entry, dict, "row")
        problem_type = problem_type_of(fields.get("op"))
        known = {"op", *(f.name for f in dataclasses.fields(cast(Any, problem_type))), "config"}
        known |= {f.name for f in dataclasses.fields(cls)} - {"problem"}
        if unknown := sorted(fields.keys() - known):
            raise ValueError(f"row has unknown keys {unknown}")
        xla_ms = fields.get("xla_ms")
        return cls(
            problem=problem_type.from_json(fields),
            config=config_from_json(fields.get("config"), problem_type.op),
            device=typed(fields.get("device"), str, "device"),
            date=typed(fields.get("date"), str, "date"),
            jax=typed(fields.get("jax"), str, "jax"),
            ms=measured(fields.get("ms"), "ms"),
            fraction=measured(fields.get("fraction"), "fraction"),
            xla_ms=None if xla_ms is None else measured(xla_ms, "xla_ms"),
        )

    def describe(self) -> str:
        return (
            f"{self.problem.describe()}: {self.ms:.4g} ms, {self.fraction:.2f} of the matmul "
            f"({self.device}, {self.date}, jax {self.jax})"
        )


def config_from_json(entry: object, op: str = "linear_compression") -> Any:
    """Reads a configuration, or None for XLA; raises ValueError if it is malformed."""
    fields = typed(entry, dict, "config")
    if fields == {"implementation": "xla"}:
        return None
    config_type: Any = problem_type_of(op).config_type_of(fields)
    expected = {field.name: field.default for field in dataclasses.fields(config_type)}
    fields = {x: y for x, y in fields.items() if x in expected or (x, y) not in REMOVED.items()}
    # A row that was written before a boolean parameter existed has its default.
    needed = {name for name, default in expected.items() if not isinstance(default, bool)}
    if not needed <= fields.keys() <= expected.keys():
        raise ValueError(f"config has keys {sorted(fields)}, expected {sorted(expected)}")
    values: dict[str, Any] = {
        name: typed(value, type(expected[name]), name)
        if isinstance(expected[name], bool | str)
        else size(value, name)
        for name, value in fields.items()
    }
    return config_type(**values)


def problem_type_of(op: object) -> type[Problem]:
    """Returns the class of an op's problems; raises ValueError for another op."""
    if not isinstance(op, str) or op not in PROBLEMS:
        known = " or ".join(map(repr, PROBLEMS))
        raise ValueError(f"row has op={op!r:.80}, expected {known}")
    return PROBLEMS[op]


def model(device: str) -> str:
    """Shortens `NVIDIA H100 80GB HBM3` to `H100`; keeps a name without this pattern."""
    found = re.search(r"\b[A-Z]+\d+\w*\b", device.removeprefix("NVIDIA "))
    return found[0] if found else device


def entries(text: str) -> list[Any]:
    """Reads the JSON rows of a table file; raises ValueError if the text is no table."""
    content = typed(json.loads(text), dict, "file")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"schema {content.get('schema')!r}, expected {SCHEMA}")
    return typed(content.get("rows"), list, "rows")


def parse(text: str) -> tuple[Row, ...]:
    """Reads a table file; raises ValueError if the text is no table or a row is malformed."""
    return tuple(Row.from_json(entry) for entry in entries(text))


@functools.cache
def builtin_rows() -> tuple[Row, ...]:
    """Reads the rows of the package's `sm90.json`."""
    return parse((importlib.resources.files(__package__) / "sm90.json").read_text("utf-8"))
