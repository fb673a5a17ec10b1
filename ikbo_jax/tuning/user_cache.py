"""The user's tuning cache, or the file of one model: rows that the autotuner writes.

`table.lookup` searches them first.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import stat
import tempfile
import warnings
from collections.abc import Iterator

import jax

from ikbo_jax.tuning.table_rows import SCHEMA, Row, entries, model

CACHE_DIR_VARIABLE = "IKBO_JAX_CACHE_DIR"


# The file that `tuned` names, and when it was written. A part of the keys of JAX's caches, so that
# a function is traced again for other rows.
_current = jax.make_user_context(None)


@contextlib.contextmanager
def tuned(path: str | os.PathLike[str]) -> Iterator[None]:
    """Takes measured configurations from a file in place of the user's cache; a context manager.

        with ikbo_jax.tuned("ranking_model.json"):
            ikbo_jax.tune(model, *arguments)
            scores = jax.jit(model)(*arguments)

    So the measurements of one model can be kept beside it. `ikbo_jax.tune` writes to it. A file
    that does not exist yet holds no measurements. Functions that were traced outside are traced
    again; those traced inside keep their configurations until another `with`.

    Args:
      path: name of the file, in a folder that exists; `~` is expanded.

    Raises:
      ValueError: `path` is no path.
      FileNotFoundError: its folder does not exist.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f"tuned takes the name of a file, but path is {path!r:.80}")
    file = pathlib.Path(os.path.abspath(os.path.expanduser(path)))
    if not file.parent.is_dir():
        raise FileNotFoundError(f"tuned({str(path)!r}): there is no folder {file.parent}")
    with _current((str(file), file.stat().st_mtime_ns if file.exists() else 0)):
        yield


def source_of_user_rows() -> str:
    """Names where `user_rows` come from: "user cache", or the file that `tuned` names."""
    return "user cache" if _current.value is None else user_cache_path().name


def user_cache_path() -> pathlib.Path:
    """Names the file of the user's cache, in $IKBO_JAX_CACHE_DIR if set; expands `~`.

    Inside `tuned`, the file of the model.
    """
    if _current.value is not None:
        return pathlib.Path(_current.value[0])
    if directory := os.environ.get(CACHE_DIR_VARIABLE):
        # pathlib's expanduser raises if the home folder is unknown, and calls of ops come here.
        return pathlib.Path(os.path.expanduser(directory)) / "sm90.json"
    import platformdirs  # Imported here: not needed if the variable is set.

    return pathlib.Path(platformdirs.user_cache_dir("ikbo-jax")) / "sm90.json"


def check_user_cache_writable() -> None:
    """Raises OSError, naming the file and the remedy, if the user's cache cannot be written."""
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
    """Writes a row to the user's cache, in place of a row of the same problem and card.

    The write is atomic. Malformed rows are dropped, each with a UserWarning unless `lookup` has
    warned already. A file that is not a table is renamed to `sm90.json.ignored`, or `.ignored.1`
    and so on. Returns the file; raises OSError if the cache cannot be written.
    """
    path = user_cache_path()
    check_user_cache_writable()
    with _explained_os_errors(path), _locked(_lock_file(path)):
        rows = _rows_to_keep(path)
        replaced = row.problem, model(row.device)
        rows = (*(old for old in rows if (old.problem, model(old.device)) != replaced), row)
        text = json.dumps({"schema": SCHEMA, "rows": [r.to_json() for r in rows]}, indent=2) + "\n"
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete_on_close=False
        ) as file:
            with contextlib.suppress(OSError):
                os.chmod(file.name, _mode_of_table(path))
            file.write(text)
            file.close()
            os.replace(file.name, path)
    return path


def user_rows() -> tuple[Row, ...]:
    """Returns the well-formed rows of the user's cache; none if it cannot be read."""
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
    rows: tuple[Row, ...] = ()
    if kind := _irregular(mode):
        texts = [f"ignoring the tuning cache {path}: it is {kind}, not a regular file"]
    else:
        try:
            rows, faults = _parse_leniently(path.read_text(encoding="utf-8"))
            texts = [f"ignoring the tuning cache's {fault} (in {path})" for fault in faults]
        except OSError as error:
            why = f"which cannot be read: {error.strerror or error}"
            texts = [f"ignoring the tuning cache {path}, {why}"]
        except (ValueError, RecursionError) as error:
            texts = [f"ignoring the tuning cache {path}, which the next tuning renames: {error}"]
    for text in texts:
        warnings.warn(text, UserWarning, stacklevel=4)
    return rows


def _parse_leniently(text: str) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Reads the well-formed rows of a table file; returns also a text about each malformed row.

    Raises ValueError or RecursionError if the file is not a table.
    """
    rows, faults = [], []
    for number, entry in enumerate(entries(text), start=1):
        try:
            rows.append(Row.from_json(entry))
        except (ValueError, RecursionError) as error:
            faults.append(f"row {number} ({_brief(entry)}): {error}")
    return tuple(rows), tuple(faults)


def _brief(entry: object) -> str:
    """Cuts a row's JSON to 120 characters."""
    try:
        text = json.dumps(entry)
    except RecursionError:
        return "lists within lists"
    return text if len(text) <= 120 else f"{text[:120]}…"


def _mode_of_table(path: pathlib.Path) -> int:
    """Returns the old file's permissions, or the umask's default: users may share a folder."""
    for file in (path, _lock_file(path)):  # The lock was just made with the umask's default.
        with contextlib.suppress(FileNotFoundError):
            return stat.S_IMODE(file.stat().st_mode)
    return stat.S_IRUSR | stat.S_IWUSR


def _rows_to_keep(path: pathlib.Path) -> tuple[Row, ...]:
    """Returns the well-formed rows of the file to replace; renames a file that is not a table."""
    try:
        entries(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (ValueError, RecursionError):
        names = (f"{path.name}.ignored" + f".{n}" * (n > 0) for n in itertools.count())
        os.replace(path, next(x for x in map(path.with_name, names) if not x.exists()))
        return ()
    return user_rows()


def _lock_file(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".lock")


def _irregular(mode: int) -> str | None:
    """Names the kind of file with the st_mode `mode`; None for a regular file."""
    kinds = {"-": None, "d": "a directory", "p": "a FIFO", "s": "a socket"}
    # The first letter of what `ls -l` prints; the others are those of devices.
    return kinds.get(stat.filemode(mode)[0], "a device")


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
    import fcntl  # Imported here, since systems that are not POSIX can read a cache, too.

    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
