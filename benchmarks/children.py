"""Processes that benchmarks start: what they import, how they share work, when they end.

XLA compiles and times dozens of GEMMs for a point, which takes most of a benchmark's time. With
`--jobs`, every process compiles and checks the points that no other one has claimed; the programs
and XLA's choices stay in a folder, where the process that times finds them.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import jax

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


def start(
    module: str, args: Sequence[Sequence[str]], extra: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts processes of a module that share a GPU, one for each list of arguments.

    `extra` are further variables of their environment.
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


def wait(processes: Sequence[subprocess.Popen[bytes]], words: str = "") -> None:
    """Waits for the processes; prints how many failed, and `words`."""
    with ending(processes):
        failed = sum(process.wait() != 0 for process in processes)
    if failed:
        print(f"{failed} of {len(processes)} compiling processes failed{words}", file=sys.stderr)


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


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line (None: this process's), which is also in the field "argv"."""
    given = sys.argv[1:] if argv is None else list(argv)
    return argparse.Namespace(**vars(parser.parse_args(given)), argv=given)


@dataclasses.dataclass(frozen=True)
class Jobs:
    """The processes of a benchmark that compile; `number` 0: points are compiled where timed.

    `arguments` is the benchmark's command line. `shared` is the folder that the compiling processes
    share; None in the process that times.
    """

    number: int = 0
    arguments: Sequence[str] = ()
    shared: pathlib.Path | None = None

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        words = (
            "processes that compile all points before the first is timed; XLA then chooses GEMMs "
            "while others use the device (default: 0, each point is compiled before it is timed)"
        )
        parser.add_argument("--jobs", type=int, default=0, help=words)
        parser.add_argument("--shared", type=pathlib.Path, help=argparse.SUPPRESS)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Reads the options of a command line; no processes if its parser lacks them."""
        return cls(options.jobs, options.argv, options.shared) if "shared" in options else cls()

    @contextlib.contextmanager
    def programs(self, op: str) -> Iterator[None]:
        """Lets other processes compile the programs of `op`; entered before the device is used.

        A process that uses the device keeps most of its memory.
        """
        if self.shared is not None:
            share(self.shared)
            yield
        elif not self.number:
            yield
        else:
            with tempfile.TemporaryDirectory() as folder:
                arguments = [*self.arguments, "--jobs", "0", "--shared", folder]
                processes = start(f"benchmarks.{op}", [arguments] * self.number, GIVING_BACK)
                wait(processes, "; their points are compiled before they are timed")
                share(pathlib.Path(folder))
                yield

    def compile(
        self, todo: Sequence[Any], measure_point: Callable[[Any], dict[str, Any]], until: float
    ) -> None:
        """Compiles the points that no other process has claimed, until a Unix time.

        A point that raises is left to the process that times, which reports it.
        """
        assert self.shared is not None
        for n in claims(self.shared, len(todo), until):
            begin = time.monotonic()
            with contextlib.suppress(Exception):
                measure_point(todo[n])
            print(f"compiled in {time.monotonic() - begin:.0f} s: {todo[n].name}", flush=True)
