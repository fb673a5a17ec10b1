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


#: With these variables, a process gives memory of arrays that are gone back to the device whenever
#: it waits for the device; otherwise it keeps what it once had. A call takes 68 us instead of 59.
#: (Five arrays of 4 GiB on an H100 with jax 0.11.2: 591 MiB left instead of 33,329.)
GIVING_BACK = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02",
}


def start(
    module: str, args: Sequence[Sequence[str]], extra: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts processes that share a GPU.

    Args:
      module: what they run.
      args: a list of arguments for each process.
      extra: further variables of their environment.
    """
    shared = environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(extra or {})})
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
