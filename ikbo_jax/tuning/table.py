"""The dispatch table: chooses a configuration of the kernel, or XLA, for a problem.

`lookup` uses the first of these that exists:

1. the user's cache (written by the autotuner): a row for exactly this problem;
2. `sm90.json`: a row of the same shape class (`Problem.shape_class`) and dtype;
3. `sm90.json`: the nearest row of the op by `distance`, rows of the same dtype first, whose
   configuration is legal for the problem and fits it (`Problem.fits`). A row that prefers XLA is
   used only for the same dtype and within `XLA_MAX_DISTANCE`;
4. XLA if `Problem.why_xla` gives a reason, or `Problem.default_config`, the most promising
   configuration, both by a cost model;
5. XLA, if no configuration of the kernel is legal.

Steps 2 and 3 also search the user's cache if the problem has `user_rows_generalise`: its rows
of the shape class come first, and its rows win ties of distance.

Cards differ in the speed of their memory. So in steps 1 and 2 rows that the card at hand measured
come first, and in step 3 they win ties of distance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import math
import os
import pathlib
import re
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ikbo_jax.problems import PROBLEMS, Config, Problem
from ikbo_jax.problems.problem import measured, size, typed

#: Version of the file format; a file with another schema is not read.
SCHEMA = 1
CACHE_DIR_VARIABLE = "IKBO_JAX_CACHE_DIR"
#: Largest `distance` at which a row that prefers XLA is used, e.g. the finest K times √2.
XLA_MAX_DISTANCE = 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """The table's choice for a problem.

    Attributes:
      config: configuration of the kernel; None if XLA is faster or no configuration is legal.
      source: "user cache", "sm90.json", "default" or "none".
      exact: whether a measured row for this problem or its shape class was found.
      reason: one line of text: which row was used, and where it was measured.
    """

    config: Any
    source: str
    exact: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: the best choice for a problem.

    Attributes:
      problem: sizes and dtype that were measured.
      config: the best configuration; None if XLA was faster.
      device: name of the device.
      date: ISO date.
      jax: version of jax.
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
        }
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        measurement = {k: v for k, v in fields.items() if k not in ("problem", "config")}
        return {"op": self.problem.op, **problem, "config": config, **measurement}

    @classmethod
    def from_json(cls, entry: object) -> Row:
        """Reads a row of a table file; raises ValueError if it is malformed."""
        fields = typed(entry, dict, "row")
        problem_type = _problem_type(fields.get("op"))
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


def problem_from_json(fields: Mapping[str, Any], op: str = "linear_compression") -> Any:
    """Reads a problem from JSON fields; raises ValueError if it is malformed."""
    return _problem_type(op).from_json(fields)


def config_from_json(entry: object, op: str = "linear_compression") -> Any:
    """Reads a configuration, or None for XLA; raises ValueError if it is malformed."""
    fields = typed(entry, dict, "config")
    if fields == {"implementation": "xla"}:
        return None
    config_type: Any = _problem_type(op).config_type_of(fields)
    expected = {field.name: field.default for field in dataclasses.fields(config_type)}
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


def _problem_type(op: object) -> type[Problem]:
    if not isinstance(op, str) or op not in PROBLEMS:
        known = " or ".join(map(repr, PROBLEMS))
        raise ValueError(f"row has op={op!r:.80}, expected {known}")
    return PROBLEMS[op]


def distance(a: Problem, b: Problem) -> float:
    """Distance of two problems in doublings of a size, ignoring dtypes; infinite between ops."""
    return a.distance(b) if isinstance(b, type(a)) else math.inf


def model(device: str) -> str:
    """`H100` for `NVIDIA H100 80GB HBM3`; a name that does not fit this pattern as it is."""
    found = re.search(r"\b[A-Z]+\d+\w*\b", device.removeprefix("NVIDIA "))
    return found[0] if found else device


def devices() -> tuple[str, ...]:
    """Names of the cards that measured rows."""
    return tuple(dict.fromkeys(row.device for row in (*_builtin_rows(), *_user_rows())))


def lookup(problem: Problem, *, device: str = "", with_user_rows: bool = True) -> Choice:
    """Chooses a configuration, or XLA, for `problem`; see the module's docstring for the order.

    Args:
      problem: sizes and dtype.
      device: name of the card at hand; "" prefers no card.
      with_user_rows: whether to search the user's cache.
    """
    user_rows = _user_rows() if with_user_rows else ()
    choice = _lookup(problem, device, user_rows)
    of_problem = [row.config for row in user_rows if row.problem == problem]
    if choice.source == "none" or any(_is_legal(problem, config) for config in of_problem):
        return choice
    # The row of an older version may hold what the kernel has ceased to take.
    for config in of_problem[:1]:
        why = config.illegal_reason(problem)
        reason = f"{choice.reason}; the user cache's row of these sizes is ignored: {why}"
        choice = dataclasses.replace(choice, reason=reason)
    return choice


def _lookup(problem: Problem, device: str, user_rows: tuple[Row, ...]) -> Choice:
    """`lookup` with these rows of the user's cache."""

    def is_other(row: Row) -> bool:
        """Whether another card than that at hand measured a row."""
        return bool(device) and model(row.device) != model(device)

    default_config = problem.default_config()
    if default_config is None:
        reason = problem.config_type().illegal_reason(problem)
        return Choice(None, "none", False, f"no legal configuration of the kernel: {reason}")
    for row in sorted(user_rows, key=is_other):
        if row.problem == problem and _is_legal(problem, row.config):
            return Choice(row.config, "user cache", True, f"user cache, {row.describe()}")
    files = {
        "user cache": user_rows if problem.user_rows_generalise else (),
        "sm90.json": _builtin_rows(),
    }
    op_rows = {
        source: [row for row in rows if isinstance(row.problem, type(problem))]
        for source, rows in files.items()
    }
    for source, rows in op_rows.items():
        same_class = [
            row
            for row in rows
            if row.problem.dtype == problem.dtype
            and row.problem.shape_class() == problem.shape_class()
        ]
        for row in sorted(same_class, key=lambda r: (is_other(r), distance(r.problem, problem))):
            if _is_legal(problem, row.config):
                return Choice(row.config, source, True, f"{source}, {row.describe()}")
    all_rows = [(source, row) for source, rows in op_rows.items() for row in rows]
    all_rows.sort(key=lambda entry: (*_preference(entry[1], problem), is_other(entry[1])))
    for source, row in all_rows:
        if _is_usable(row, problem):
            row_distance = distance(row.problem, problem)
            reason = f"{source}, nearest row at distance {row_distance:.2f}, {row.describe()}"
            config = None if row.config is None else problem.adapt(row.config)
            return Choice(config, source, False, reason)
    if reason := problem.why_xla():
        return Choice(None, "default", False, f"{reason}; no measured row is near")
    rule = problem.default_rule()
    reason = "default configuration: no measured row is near" + (rule and f"; {rule}")
    return Choice(default_config, "default", False, reason)


def user_cache_path() -> pathlib.Path:
    """File of the user's cache, in $IKBO_JAX_CACHE_DIR if that is set; `~` is expanded."""
    if directory := os.environ.get(CACHE_DIR_VARIABLE):
        # pathlib's expanduser raises if the home folder is unknown, and calls of ops come here.
        return pathlib.Path(os.path.expanduser(directory)) / "sm90.json"
    import platformdirs  # Imported here, so that it is not needed if the variable is set.

    return pathlib.Path(platformdirs.user_cache_dir("ikbo-jax")) / "sm90.json"


def check_user_cache_writable() -> None:
    """Raises OSError, naming the file and the remedy, if the user's cache cannot be written.

    Opens regular files only, since a FIFO would block.
    """
    path = user_cache_path()
    with _explained_os_errors(path):
        if path.parts[0].startswith("~"):
            raise OSError(f"{path.parts[0]} is the home of no known user")
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, access in ((path, os.R_OK), (_lock_file(path), os.W_OK)):
            with contextlib.suppress(FileNotFoundError):
                if kind := _irregular(file.stat().st_mode):
                    raise OSError(f"{file} is {kind}, not a regular file")
                if not os.access(file, access):
                    raise PermissionError(f"no permission to use {file}")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write_user_row(row: Row) -> pathlib.Path:
    """Writes a row to the user's cache, replacing one of the same problem and card.

    The write is atomic: a new file is renamed to the old name. Malformed rows are dropped, each
    with a UserWarning unless `lookup` has warned already. A file that is not a table is renamed to
    `sm90.json.ignored`, or `.ignored.1` and so on.

    Returns:
      The file.

    Raises:
      OSError: the cache cannot be written.
    """
    path = user_cache_path()
    check_user_cache_writable()
    with _explained_os_errors(path), _locked(_lock_file(path)):
        rows = _rows_to_keep(path)
        replaced = row.problem, model(row.device)
        rows = (*(old for old in rows if (old.problem, model(old.device)) != replaced), row)
        text = json.dumps({"schema": SCHEMA, "rows": [r.to_json() for r in rows]}, indent=2) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with contextlib.suppress(OSError):
                os.chmod(temporary, _mode_of_table(path))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    return path


def _mode_of_table(path: pathlib.Path) -> int:
    """Permissions of the new file: the old file's; without an old file, the umask's default.

    `tempfile` makes files that only their owner reads, but users may share a cache's folder.
    """
    for file in (path, _lock_file(path)):  # The lock was just made with the umask's default.
        with contextlib.suppress(FileNotFoundError):
            return stat.S_IMODE(file.stat().st_mode)
    return stat.S_IRUSR | stat.S_IWUSR


def _rows_to_keep(path: pathlib.Path) -> tuple[Row, ...]:
    """Well-formed rows of the file to replace; renames a file that is not a table."""
    try:
        _entries(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (ValueError, RecursionError):
        number = 0
        while (aside := _aside(path, number)).exists():
            number += 1
        os.replace(path, aside)
        return ()
    return _user_rows()


def _aside(path: pathlib.Path, number: int) -> pathlib.Path:
    return path.with_name(f"{path.name}.ignored" + (f".{number}" if number else ""))


def _lock_file(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".lock")


def _irregular(mode: int) -> str | None:
    """The kind of file with the st_mode `mode`, as text; None for a regular file."""
    kinds = {
        stat.S_ISDIR: "a directory",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    if stat.S_ISREG(mode):
        return None
    return next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "something else")


def _entries(text: str) -> list[Any]:
    """The JSON rows of a table file; raises ValueError (also for bad JSON) if it is not one."""
    content = typed(json.loads(text), dict, "file")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"schema {content.get('schema')!r}, expected {SCHEMA}")
    entries: list[Any] = typed(content.get("rows"), list, "rows")
    return entries


def _parse(text: str) -> tuple[Row, ...]:
    """Reads a table file; raises ValueError if it is not one, or if a row is malformed."""
    return tuple(Row.from_json(entry) for entry in _entries(text))


def _parse_leniently(text: str) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The well-formed rows of a table file, and a text about each malformed row.

    Raises ValueError or RecursionError if the file is not a table.
    """
    rows, faults = [], []
    for number, entry in enumerate(_entries(text), start=1):
        try:
            rows.append(Row.from_json(entry))
        except (ValueError, RecursionError) as error:
            faults.append(f"row {number} ({_brief(entry)}): {error}")
    return tuple(rows), tuple(faults)


def _brief(entry: object) -> str:
    """The first 120 characters of a row's JSON."""
    try:
        text = json.dumps(entry)
    except RecursionError:
        return "lists within lists"
    return text if len(text) <= 120 else f"{text[:120]}…"


@functools.cache
def _builtin_rows() -> tuple[Row, ...]:
    return _parse((importlib.resources.files(__package__) / "sm90.json").read_text("utf-8"))


def _user_rows() -> tuple[Row, ...]:
    path = user_cache_path()
    try:
        state = path.stat()
    except OSError:  # There is no cache, or no permission to read it.
        return ()
    return _read_user_rows(path, state.st_mode, state.st_mtime_ns, state.st_ino, state.st_size)


@functools.lru_cache(maxsize=8)
def _read_user_rows(
    path: pathlib.Path, mode: int, mtime: int, inode: int, size: int
) -> tuple[Row, ...]:
    """Reads the user's cache once for every state of the file, so that it also warns once."""
    del mtime, inode, size  # These only form the key of `lru_cache`.
    if kind := _irregular(mode):
        text = f"ignoring the tuning cache {path}: it is {kind}, not a regular file"
        warnings.warn(text, UserWarning, stacklevel=4)
        return ()
    try:
        rows, faults = _parse_leniently(path.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"ignoring the tuning cache {path}, which cannot be read: {error.strerror or error}"
        warnings.warn(text, UserWarning, stacklevel=4)
        return ()
    except (ValueError, RecursionError) as error:
        text = f"ignoring the tuning cache {path}, which the next tuning renames: {error}"
        warnings.warn(text, UserWarning, stacklevel=4)
        return ()
    for fault in faults:
        text = f"ignoring the tuning cache's {fault} (in {path})"
        warnings.warn(text, UserWarning, stacklevel=4)
    return rows


def _is_legal(problem: Problem, config: Config | None) -> bool:
    return config is None or config.illegal_reason(problem) is None


def _preference(row: Row, problem: Problem) -> tuple[bool, float]:
    return row.problem.dtype != problem.dtype, distance(row.problem, problem)


def _is_usable(row: Row, problem: Problem) -> bool:
    """Whether a row of another shape class may be used for `problem`."""
    row_distance = distance(row.problem, problem)
    if row.config is None:
        return row.problem.dtype == problem.dtype and row_distance <= XLA_MAX_DISTANCE
    is_comparable = row_distance < math.inf and _is_legal(problem, row.config)
    return is_comparable and problem.fits(row.config)


@contextlib.contextmanager
def _explained_os_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write the tuning cache {path}: {error.strerror or error}; "
            f"set {CACHE_DIR_VARIABLE} to a writable directory"
        ) from error


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds a file lock, so that concurrent writers on one machine lose no rows."""
    try:
        import fcntl
    except ImportError:  # Not a POSIX system; the rename alone keeps the file well-formed.
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
