"""The dispatch table: which configuration, or XLA, runs for a given problem.

`lookup` asks, in this order:

1. the user's cache (written by the autotuner): a row of exactly this problem;
2. `sm90.json`: a row of the same shape class (`shape_class`);
3. `sm90.json`: the nearest row by `distance`, same dtype before other dtypes, whose configuration
   is legal here and pads M hardly more than the best tile would. A row that prefers XLA speaks for
   a problem of its own dtype within `XLA_REACH` only;
4. `default_config`, the likeliest configuration by a cost model;
5. XLA, where no configuration of the kernel is legal.
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
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ikbo_jax.tuning import configs
from ikbo_jax.tuning.configs import LinearCompressionConfig, LinearCompressionProblem

#: Format of table files; a file of another schema is foreign.
SCHEMA = 1
OP = "linear_compression"
CACHE_DIR_VARIABLE = "IKBO_JAX_CACHE_DIR"
#: How far (see `distance`) a row that prefers XLA reaches: half a doubling of the finest K, say.
XLA_REACH = 0.5
#: A nearby row's tile may pad M to at most this multiple of what the best tile pads it to.
MAX_EXTRA_PADDING = 1.125
#: Weights of `distance`. M decides how tiles fit and counts most; the coarse levels do little work.
DISTANCE_WEIGHTS = {
    "m": 2.0,
    "n": 1.0,
    "k_fine": 1.0,
    "b_fine": 1.0,
    "k_coarse": 0.25,
    "ratio": 0.25,
}
#: Distance for every level that one problem has and the other has not.
LEVEL_DISTANCE = 2.0


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the table says about a problem.

    Attributes:
      config: configuration of the kernel, or None: XLA is faster here, or no one is legal.
      source: "user cache", "sm90.json", "default" or "none".
      exact: whether a measured row of this very problem or of its shape class was found.
      note: one line for people: which row was used and where it was measured.
    """

    config: LinearCompressionConfig | None
    source: str
    exact: bool
    note: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: the best choice for a problem.

    Attributes:
      problem: the sizes it was measured at.
      config: the best configuration; None: XLA was faster.
      device: name of the device that measured it.
      date: ISO date.
      jax: version of jax.
      ms: sustained milliseconds of the whole op.
      fraction: useful FLOP/s over those of the sustained 8192^3 bf16 matmul of the same process.
      xla_ms: the XLA path beside it, milliseconds, if it was timed.
    """

    problem: LinearCompressionProblem
    config: LinearCompressionConfig | None
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
        problem = dataclasses.asdict(self.problem)
        problem |= {"batches": list(self.problem.batches), "ks": list(self.problem.ks)}
        measured = {
            "device": self.device,
            "date": self.date,
            "jax": self.jax,
            "ms": self.ms,
            "fraction": self.fraction,
            "xla_ms": self.xla_ms,
        }
        return {"op": OP, **problem, "config": config, **measured}

    @classmethod
    def from_json(cls, entry: object) -> Row:
        """Reads a row of a table file; raises ValueError saying what is wrong with it."""
        fields = _typed(entry, dict, "row")
        if fields.get("op") != OP:
            raise ValueError(f"row has op={fields.get('op')!r}, expected {OP!r}")
        known = {"op", *(f.name for f in dataclasses.fields(LinearCompressionProblem)), "config"}
        known |= {f.name for f in dataclasses.fields(cls)} - {"problem"}
        if unknown := sorted(fields.keys() - known):
            raise ValueError(f"row has unknown keys {unknown}")
        xla_ms = fields.get("xla_ms")
        return cls(
            problem=problem_from_json(fields),
            config=config_from_json(fields.get("config")),
            device=_typed(fields.get("device"), str, "device"),
            date=_typed(fields.get("date"), str, "date"),
            jax=_typed(fields.get("jax"), str, "jax"),
            ms=_positive(fields.get("ms"), "ms"),
            fraction=_positive(fields.get("fraction"), "fraction"),
            xla_ms=None if xla_ms is None else _positive(xla_ms, "xla_ms"),
        )

    def describe(self) -> str:
        return (
            f"{describe(self.problem)}: {self.ms:.4g} ms, {self.fraction:.2f} of the matmul "
            f"({self.device}, {self.date}, jax {self.jax})"
        )


def problem_from_json(fields: Mapping[str, Any]) -> LinearCompressionProblem:
    """Reads a problem from JSON fields; raises ValueError saying what is wrong with it."""
    batches = tuple(_size(b, "batches") for b in _typed(fields.get("batches"), list, "batches"))
    ks = tuple(_size(k, "ks") for k in _typed(fields.get("ks"), list, "ks"))
    if not batches or len(batches) != len(ks):
        raise ValueError(f"row has {len(batches)} batches and {len(ks)} ks")
    dtype = _typed(fields.get("dtype"), str, "dtype")
    return LinearCompressionProblem(
        batches, ks, _size(fields.get("m"), "m"), _size(fields.get("n"), "n"), dtype
    )


def config_from_json(entry: object) -> LinearCompressionConfig | None:
    """Reads a configuration, or None for XLA; raises ValueError saying what is wrong with it."""
    fields = _typed(entry, dict, "config")
    if fields == {"implementation": "xla"}:
        return None
    expected = {field.name for field in dataclasses.fields(LinearCompressionConfig)}
    if fields.keys() != expected:
        raise ValueError(f"config has keys {sorted(fields)}, expected {sorted(expected)}")
    values: dict[str, Any] = {
        field.name: _typed(fields[field.name], bool, field.name)
        if isinstance(field.default, bool)
        else _size(fields[field.name], field.name)
        for field in dataclasses.fields(LinearCompressionConfig)
    }
    return LinearCompressionConfig(**values)


def describe(problem: LinearCompressionProblem) -> str:
    """The problem in one line, e.g. `B=15,1024 K=1178,866 M=433 N=256 bfloat16`."""
    batches = ",".join(map(str, problem.batches))
    ks = ",".join(map(str, problem.ks))
    return f"B={batches} K={ks} M={problem.m} N={problem.n} {problem.dtype}"


def shape_class(problem: LinearCompressionProblem) -> str:
    """Problems of one class share a row.

    Batches, their ratios and K count by the nearest power of two; M by 16 rows, the step of a tile;
    N by 128 columns, the width of a tile.
    """
    batches = problem.batches
    ratios = [_octave(fine / max(coarse, 1)) for coarse, fine in _neighbours(batches)]
    return (
        f"{OP} b=2^{_octave(batches[-1])} ratio={','.join(f'2^{r}' for r in ratios) or '-'} "
        f"k={','.join(f'2^{_octave(k)}' for k in problem.ks)} "
        f"m={-(-problem.m // 16) * 16} n={-(-problem.n // 128) * 128}"
    )


def distance(a: LinearCompressionProblem, b: LinearCompressionProblem) -> float:
    """Weighted sum of |log2| of the sizes' ratios, levels paired from the finest; dtype aside.

    See `DISTANCE_WEIGHTS`; "ratio" is a level's batch over that of the level before it.
    """
    weights = DISTANCE_WEIGHTS
    total = weights["m"] * _doublings(a.m, b.m) + weights["n"] * _doublings(a.n, b.n)
    total += weights["k_fine"] * _doublings(a.ks[-1], b.ks[-1])
    total += weights["b_fine"] * _doublings(a.batches[-1], b.batches[-1])
    for k_a, k_b in zip(a.ks[-2::-1], b.ks[-2::-1], strict=False):
        total += weights["k_coarse"] * _doublings(k_a, k_b)
    ratios_a = [fine / max(coarse, 1) for coarse, fine in _neighbours(a.batches)]
    ratios_b = [fine / max(coarse, 1) for coarse, fine in _neighbours(b.batches)]
    for r_a, r_b in zip(ratios_a[::-1], ratios_b[::-1], strict=False):
        total += weights["ratio"] * abs(math.log2(max(r_a, 1e-6) / max(r_b, 1e-6)))
    return total + LEVEL_DISTANCE * abs(len(a.batches) - len(b.batches))


@functools.lru_cache(maxsize=1024)
def default_config(problem: LinearCompressionProblem) -> LinearCompressionConfig | None:
    """The likeliest configuration without a measurement; None if no configuration is legal."""
    return next(configs.candidate_configs(problem), None)


def lookup(problem: LinearCompressionProblem) -> Choice:
    """Chooses a configuration, or XLA, for `problem`; see the module's docstring for the order."""
    fallback = default_config(problem)
    if fallback is None:
        reason = configs.illegal_reason(problem, LinearCompressionConfig())
        return Choice(None, "none", False, f"no legal configuration of the kernel: {reason}")
    for row in _user_rows():
        if row.problem == problem and _is_legal(problem, row.config):
            return Choice(row.config, "user cache", True, f"user cache, {row.describe()}")
    rows = _builtin_rows()
    same_class = [
        row
        for row in rows
        if row.problem.dtype == problem.dtype and shape_class(row.problem) == shape_class(problem)
    ]
    for row in sorted(same_class, key=lambda row: distance(row.problem, problem)):
        if _is_legal(problem, row.config):
            return Choice(row.config, "sm90.json", True, f"sm90.json, {row.describe()}")
    for row in sorted(rows, key=lambda row: _preference(row, problem)):
        if _speaks_for(row, problem, fallback):
            away = distance(row.problem, problem)
            note = f"sm90.json, nearest row at distance {away:.2f}, {row.describe()}"
            return Choice(row.config, "sm90.json", False, note)
    return Choice(fallback, "default", False, "default configuration: no measured row is near")


def user_cache_path() -> pathlib.Path:
    """File of the user's own rows, in $IKBO_JAX_CACHE_DIR if that is set."""
    if directory := os.environ.get(CACHE_DIR_VARIABLE):
        return pathlib.Path(directory) / "sm90.json"
    import platformdirs  # Here, so that the variable spares the dependency.

    return pathlib.Path(platformdirs.user_cache_dir("ikbo-jax")) / "sm90.json"


def check_user_cache_writable() -> None:
    """Raises OSError, naming the file and the way out, if the user's cache cannot be written."""
    path = user_cache_path()
    with _explained_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write_user_row(row: Row) -> pathlib.Path:
    """Puts a row into the user's cache, in place of one of the same problem; returns the file.

    Readers see the old file or the new one, never a part: the new one is renamed into place. A file
    that cannot be read is kept beside it as `sm90.json.ignored`.

    Raises:
      OSError: the cache cannot be written.
    """
    path = user_cache_path()
    check_user_cache_writable()
    with _explained_os_errors(path), _locked(path.with_suffix(".lock")):
        try:
            rows = _parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            rows = ()
        except (ValueError, RecursionError):
            rows = ()
            os.replace(path, path.with_name(path.name + ".ignored"))
        rows = (*(old for old in rows if old.problem != row.problem), row)
        text = json.dumps({"schema": SCHEMA, "rows": [r.to_json() for r in rows]}, indent=2) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    return path


def _parse(text: str) -> tuple[Row, ...]:
    """Reads a table file; raises ValueError (JSON and Unicode errors are some) if it is not one."""
    content = _typed(json.loads(text), dict, "file")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"schema {content.get('schema')!r}, expected {SCHEMA}")
    return tuple(Row.from_json(entry) for entry in _typed(content.get("rows"), list, "rows"))


@functools.cache
def _builtin_rows() -> tuple[Row, ...]:
    return _parse((importlib.resources.files(__package__) / "sm90.json").read_text("utf-8"))


def _user_rows() -> tuple[Row, ...]:
    path = user_cache_path()
    try:
        stat = path.stat()
    except OSError:  # No cache, or none that we may look at.
        return ()
    return _read_user_rows(path, stat.st_mtime_ns, stat.st_ino, stat.st_size)


@functools.lru_cache(maxsize=8)
def _read_user_rows(path: pathlib.Path, mtime: int, inode: int, size: int) -> tuple[Row, ...]:
    """Reads the user's cache once for every state of the file, so that it also warns once."""
    del mtime, inode, size  # Only keys of the cache: a new file has others.
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"ignoring the tuning cache {path}: {error}", UserWarning, stacklevel=4)
        return ()


def _is_legal(problem: LinearCompressionProblem, config: LinearCompressionConfig | None) -> bool:
    return config is None or configs.illegal_reason(problem, config) is None


def _preference(row: Row, problem: LinearCompressionProblem) -> tuple[bool, float]:
    return row.problem.dtype != problem.dtype, distance(row.problem, problem)


def _speaks_for(
    row: Row, problem: LinearCompressionProblem, fallback: LinearCompressionConfig
) -> bool:
    """Whether a row of another shape class may decide for `problem`."""
    if row.config is None:
        same_dtype = row.problem.dtype == problem.dtype
        return same_dtype and distance(row.problem, problem) <= XLA_REACH
    padded = -(-problem.m // row.config.block_m) * row.config.block_m
    least = -(-problem.m // fallback.block_m) * fallback.block_m
    return _is_legal(problem, row.config) and padded <= MAX_EXTRA_PADDING * least


def _neighbours(batches: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(batches[:-1], batches[1:], strict=True))


def _octave(size: float) -> int:
    return round(math.log2(max(size, 1e-6)))


def _doublings(a: int, b: int) -> float:
    return abs(math.log2(max(a, 1) / max(b, 1)))


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}, expected a {kind.__name__}")
    return value


def _size(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} holds {value!r:.80}, expected an integer of at least 0")
    return value


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r:.80}, expected a positive number")
    return float(value)


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
    """Keeps writers of one machine apart, so that none loses another's row."""
    try:
        import fcntl
    except ImportError:  # Not a POSIX system; the rename still keeps the file whole.
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
