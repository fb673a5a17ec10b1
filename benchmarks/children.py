"""Processes that benchmarks start: what they import, how they share work, when they end.

XLA compiles and times dozens of GEMMs for a point, which takes most of a benchmark's time. With
`--jobs`, every process compiles and checks the points that no other one has claimed; the programs
and XLA's choices stay in a folder, where the process that times finds them.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from examples import several_processes

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Part of the budget after which no further point is compiled before the timing.
COMPILING = 0.45


def command(module: str, *args: str) -> list[str]:
    """Makes the command that runs a module of this tree in another process, started in `ROOT`."""
    return [sys.executable, "-m", module, *args]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Makes the environment of a child process, with which it imports this tree.

    Without the entry in PYTHONPATH, a child of a process that was started in another folder would
    not find `benchmarks`, or would import an installed `ikbo_jax`.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


#: With these variables, a process returns the memory of deleted arrays to the device whenever it
#: waits for the device; otherwise the process keeps it. A call takes 68 us instead of 59.
#: (Five arrays of 4 GiB on an H100 with jax 0.11.2: 591 MiB left instead of 33,329.)
GIVING_BACK = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02",
}


def claims(folder: pathlib.Path, number: int, until: float = float("inf")) -> Iterator[int]:
    """Yields numbers below `number`, each to one of the processes that share a new folder.

    After the Unix time `until`, this process gets no further number.
    """
    for n in range(number):
        if time.time() > until:
            return
        try:
            (folder / f"claimed-{n}").touch(exist_ok=False)
        except FileExistsError:
            continue
        yield n


def share(folder: pathlib.Path) -> None:
    """Lets the processes of a run share compiled programs, and XLA's choices of GEMMs.

    A choice is the fastest one that XLA found on this device; so it is the same code that another
    process would get after it compiled and timed dozens of kernels again. Alternatives of a
    workload, and its two directions, have GEMMs of the same sizes. JAX turns XLA's files on with
    its own cache. The folder is new in every run: no choice of another version is used.
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", str(folder / "compilations"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the number of processes that compile, and the folder that they share."""
    words = (
        "processes that compile all points before the first is timed; XLA then chooses GEMMs "
        "while others use the device (default: 0, each point is compiled before it is timed)"
    )
    parser.add_argument("--jobs", type=int, default=0, help=words)
    parser.add_argument("--shared", type=pathlib.Path, help=argparse.SUPPRESS)


@contextlib.contextmanager
def programs(op: str, options: argparse.Namespace) -> Iterator[None]:
    """Lets other processes compile the programs of `op`; entered before the device is used.

    A process that uses the device keeps most of its memory. A process that compiles has the option
    `shared`: the folder that these processes share.
    """
    if options.shared is not None:
        several_processes.end_with_stdin()
        share(options.shared)
    if options.shared is not None or not options.jobs:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        words = command(f"benchmarks.{op}", *options.argv, "--jobs", "0", "--shared", folder)
        variables = environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **GIVING_BACK})
        options_of_all: Any = {"cwd": ROOT, "env": variables, "stdin": subprocess.PIPE}
        # Each ends when its standard input does: with this block, or with this process.
        with contextlib.ExitStack() as stack:
            processes = (subprocess.Popen(words, **options_of_all) for _ in range(options.jobs))
            started = [*map(stack.enter_context, processes)]
            failed = sum(process.wait() != 0 for process in started)
        if failed:
            print(f"{failed} of {options.jobs} compiling processes failed", file=sys.stderr)
        share(pathlib.Path(folder))
        yield
