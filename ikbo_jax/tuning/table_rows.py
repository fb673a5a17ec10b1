"""Rows of the dispatch table: measurements, and the file format that holds them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
import typing
from typing import Any

from ikbo_jax.problems import PROBLEMS, Problem

#: Version of the file format; a file with another schema is not read.
SCHEMA = 1
#: Fields of problems that rows lack: rows are of candidates sorted by user, and of calls without
#: masks, ranges, caps or pages.
NOT_IN_ROWS = ("is_sorted", "mask", "has_ranges", "has_logit_cap", "page", "has_bias")

_hints: Any = functools.cache(typing.get_type_hints)


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
        fields = dict(read(entry, dict, "row"))
        op = fields.pop("op", None)
        config = config_from_json(fields.pop("config", None), op)
        own = {x.name: fields.pop(x.name, None) for x in dataclasses.fields(cls)[2:]}
        hints = _hints(cls)
        measurement = {name: read(value, hints[name], name) for name, value in own.items()}
        return cls(problem_from_json(fields, op), config, **measurement)

    def describe(self) -> str:
        return (
            f"{self.problem.describe()}: {self.ms:.4g} ms, {self.fraction:.2f} of the matmul "
            f"({self.device}, {self.date}, jax {self.jax})"
        )


def read(value: Any, kind: Any, name: str) -> Any:
    """Reads a JSON value of a type; raises ValueError if it is of another or negative."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(read(x, parts[0], name) for x in read(value, list, name))
    if type(None) in parts:
        return None if value is None else read(value, parts[0], name)
    is_right = isinstance(value, (int, float) if kind is float else kind)
    if kind in (int, float):
        is_right = is_right and not isinstance(value, bool) and 0 <= value < 2**63
    if not is_right:
        raise ValueError(f"{name} is {value!r:.80}, expected a {kind.__name__}")
    return float(value) if kind is float else value


def _read_fields(fields: dict[str, Any], kind: Any, name: str) -> Any:
    """Reads a dataclass; fields may be missing in rows that were written before they existed."""
    known = {x.name: x.default for x in dataclasses.fields(kind)}
    needed = {x for x, y in known.items() if not isinstance(y, bool) and x not in NOT_IN_ROWS}
    if not needed <= fields.keys() <= known.keys():
        raise ValueError(f"{name} has keys {sorted(fields)}, expected {sorted(known)}")
    hints = _hints(kind)
    return kind(**{name: read(value, hints[name], name) for name, value in fields.items()})


def problem_from_json(fields: dict[str, Any], op: object) -> Any:
    """Reads a problem; raises ValueError if it is malformed, or a size of the model is 0."""
    kind: Any = problem_type_of(op)
    found = _read_fields(fields, kind, "problem")
    levels = {name: len(value) for name, value in fields.items() if isinstance(value, list)}
    if len({*levels.values()}) > 1:
        raise ValueError(" and ".join(f"{count} {name}" for name, count in levels.items()))
    for name, value in fields.items():
        may_be_0 = name in (*kind.request, *NOT_IN_ROWS)
        if not may_be_0 and type(value) is int and value == 0:
            raise ValueError(f"{name} is 0, expected at least 1")
    return found


def config_from_json(entry: object, op: object = "linear_compression") -> Any:
    """Reads a configuration, or None for XLA; raises ValueError if it is malformed."""
    kind = problem_type_of(op)
    fields = read(entry, dict, "config")
    if fields == {"implementation": "xla"}:
        return None
    config_type: Any = kind.config_type_of(fields)
    return _read_fields(fields, config_type, "config")


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
    content = read(json.loads(text), dict, "file")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"schema {content.get('schema')!r}, expected {SCHEMA}")
    found: list[Any] = read(content.get("rows"), list, "rows")
    return found


def parse(text: str) -> tuple[Row, ...]:
    """Reads a table file; raises ValueError if the text is no table or a row is malformed."""
    return tuple(Row.from_json(entry) for entry in entries(text))


@functools.cache
def builtin_rows() -> tuple[Row, ...]:
    """Reads the rows of the package's `sm90.json`."""
    return parse((importlib.resources.files(__package__) / "sm90.json").read_text("utf-8"))
