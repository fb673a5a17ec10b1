"""Processes that benchmarks start: what they import, how they share work, when they end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

ROOT = pathlib.Path(__file__).resolve().parent.parent


def command(module: str, *args: str) -> list[str]:
    """The command that runs a module of this tree in another process; start it in `ROOT`."""
    return [sys.executable, "-m", module, *args]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with which a child imports this tree.

    Without the entry in PYTHONPATH, a child of a process that was started in another folder would
    not find `benchmarks`, or would import an installed `ikbo_jax`.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def start(module: str, args: Sequence[Sequence[str]]) -> list[subprocess.Popen[bytes]]:
    """Starts processes that share a GPU: the module with each of the lists of arguments."""
    shared = environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    return [subprocess.Popen(command(module, *x), cwd=ROOT, env=shared) for x in args]


@contextlib.contextmanager
def ending(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ends the processes when the block ends, also by an exception or SIGTERM."""

    def end(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            process.kill()
            process.wait()


def claims(
    folder: pathlib.Path,
    number: int,
    until: float = float("inf"),
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[int]:
    """Yields numbers below `number`, each to one of the processes that share a folder.

    Args:
      folder: a folder of its own for each piece of work.
      number: the end of the range.
      until: time, in Unix seconds, after which this process gets no further number.
      go_on: called before each claim; if it returns False, this process gets no further number.
    """
    for n in range(number):
        if time.time() > until or not go_on():
            return
        try:
            (folder / f"claimed-{n}").touch(exist_ok=False)
        except FileExistsError:
            continue
        yield n
