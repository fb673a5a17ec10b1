"""Processes that compile a benchmark's points side by side, before one process times them.

XLA compiles and times dozens of GEMMs for a point, which takes most of a benchmark's time. With
`--jobs`, every process compiles and checks the points that no other one has claimed; the programs
and XLA's choices stay in a folder, where the process that times finds them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import children


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
    """Adds the options of `Jobs`."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes that compile all points before the first is timed; XLA then chooses GEMMs "
        "while others use the device (default: 0, each point is compiled before it is timed)",
    )
    parser.add_argument("--shared", type=pathlib.Path, help=argparse.SUPPRESS)


@dataclasses.dataclass(frozen=True)
class Jobs:
    """The processes of a benchmark that compile.

    Attributes:
      number: how many; 0 if points are compiled where they are timed.
      arguments: the benchmark's command line, with which they are started.
      shared: in such a process, the folder that they share; None in the one that times.
    """

    number: int = 0
    arguments: Sequence[str] = ()
    shared: pathlib.Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, argv: Sequence[str] | None) -> Jobs:
        """Of parsed arguments; `argv`: what was parsed, None for the command line."""
        return cls(args.jobs, sys.argv[1:] if argv is None else argv, args.shared)

    @contextlib.contextmanager
    def programs(self, op: str) -> Iterator[None]:
        """Has the programs of the benchmark `op` compiled; to be entered before the device is used.

        A process that uses the device keeps most of its memory.
        """
        if self.shared is not None:
            share(self.shared)
            yield
        elif not self.number:
            yield
        else:
            with tempfile.TemporaryDirectory() as folder:
                self._run(op, folder)
                share(pathlib.Path(folder))
                yield

    def _run(self, op: str, folder: str) -> None:
        arguments = [*self.arguments, "--jobs", "0", "--shared", folder]
        processes = children.start(
            f"benchmarks.{op}", [arguments] * self.number, children.GIVING_BACK
        )
        with children.ending(processes):
            failed = sum(process.wait() != 0 for process in processes)
        if failed:
            print(
                f"{failed} of {self.number} compiling processes failed; their points are compiled "
                "before they are timed",
                file=sys.stderr,
            )

    def compile(
        self, todo: Sequence[Any], measure_point: Callable[[Any], dict[str, Any]], until: float
    ) -> None:
        """Compiles the points that no other process has claimed, until a Unix time.

        A point that raises is left to the process that times, which reports it.
        """
        assert self.shared is not None
        for n in children.claims(self.shared, len(todo), until):
            begin = time.monotonic()
            with contextlib.suppress(Exception):
                measure_point(todo[n])
            seconds = time.monotonic() - begin
            print(f"compiled in {seconds:.0f} s: {todo[n].sweep} {todo[n].label}", flush=True)
