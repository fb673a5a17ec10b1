"""Runs the GPU tests in many processes on every GPU, and says at once what failed.

    python tools/gpu_tests.py                                  # every test of tests/gpu
    python tools/gpu_tests.py --files attention -k gradients   # files by part of the name
    python tools/gpu_tests.py --seconds 540                    # ends in time
    python tools/gpu_tests.py --left                           # what the last run did not reach

pytest-xdist shares the tests out over `--workers` processes on each GPU. The tests with the longest
time limits start first, and those that run compute-sanitizer start last. If a kernel leaves its
process without a usable device, a new process runs the remaining tests of that process
(`tests/support/gpu_session.py`), so only the test with that kernel fails. If pytest itself ends
early, a new session runs what is left.

The folder `--log` holds `failures.log` (each failure as it happens), `pytest.log` (pytest's output)
and `journal.jsonl` (each start and end of a test). The exit status is 0 only if every chosen test
ran and passed. Other options go to pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Most workers on a GPU: on two H200s with 32 cores, 14 on each ran 398 tests in 298 s.
MAX_WORKERS = 14
#: MiB of a GPU's memory for each worker: on an H100 of 80 GB, 14 of them ran out of memory in 18 of
#: 84 tests of users with few queries, and 8 in two.
WORKER_MIB = 13_000
#: Seconds before the end of `--seconds` after which no test starts.
LAST_START_S = 30.0
#: Seconds between lines of progress, and the number of the longest tests in the summary.
PROGRESS_S, LONGEST = 30.0, 10
#: Exit status of pytest after an error of its own.
INTERNAL_ERROR = 3
#: Exit status after an interrupt.
INTERRUPTED = 130


@dataclasses.dataclass
class State:
    """What the journal has said so far; tests by their ids.

    Attributes:
      chosen: all tests, in order.
      started: when a test started, in Unix seconds.
      seconds: how long a finished test took.
      failed: the text of each failure.
      skipped: the reasons of tests that skipped themselves.
      late: tests that did not start because the time was up.
      broken: text for each file that could not be collected.
      status: pytest's exit status, None if it did not end by itself.
    """

    chosen: dict[str, None] = dataclasses.field(default_factory=dict)
    started: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    late: set[str] = dataclasses.field(default_factory=set)
    broken: dict[str, str] = dataclasses.field(default_factory=dict)
    status: int | None = None

    @property
    def not_run(self) -> list[str]:
        """Tests without a result."""
        done = self.seconds.keys() - self.late | self.failed.keys()
        return [test for test in self.chosen if test not in done]

    @property
    def is_complete(self) -> bool:
        """Whether every chosen test ran and passed or skipped itself."""
        return bool(self.chosen) and not (self.not_run or self.failed or self.broken)

    def add(self, event: dict[str, Any]) -> str | None:
        """Takes a line of the journal; returns the id of a test or file that it says failed."""
        if "collected" in event:
            self.chosen |= dict.fromkeys(event["collected"])
        elif "started" in event:
            self.started[event["started"]] = event["at"]
        elif "finished" in event:
            test = event["finished"]
            self.seconds[test] = event["at"] - self.started.get(test, event["at"])
        elif "out_of_time" in event:
            self.late.add(event["out_of_time"])
        elif "skipped" in event:
            self.skipped[event["skipped"]] = event["text"]
        elif "ended" in event:
            self.status = event["ended"]
        elif "failed" in event:
            self.failed.setdefault(event["failed"], []).append(event["text"])
            return str(event["failed"])
        elif "broken" in event and event["broken"] not in self.broken:
            self.broken[event["broken"]] = event["text"]
            return str(event["broken"])
        return None


def gpus_here() -> list[str]:
    """The GPUs that this process may use; empty if there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def workers_here(gpus: int) -> int:
    """Workers for each GPU: a core for each, since compiling takes most of the time, and memory."""
    most = min(MAX_WORKERS, len(os.sched_getaffinity(0)) // gpus - 2)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        found = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        most = min(most, min(map(int, found.split())) // WORKER_MIB)
    return max(1, most)


def left_by(log: pathlib.Path) -> list[str]:
    """Tests that the last run did not run; raises ValueError if there was none, or none is left."""
    state, path = State(), log / "journal.jsonl"
    if path.exists():
        with open(path) as journal:
            for event in _events(journal):
                state.add(event)
    if not state.not_run:
        raise ValueError(f"{path} names no test that did not run")
    return state.not_run


def files_of(folder: pathlib.Path, names: Sequence[str] | None) -> list[str]:
    """The test files in a folder with one of `names` in their names; raises ValueError if none."""
    files = sorted(folder.glob("test_*.py"))
    chosen = [f for f in files if names is None or any(name in f.name for name in names)]
    for name in names or ():
        if not any(name in f.name for f in chosen):
            raise ValueError(f"no file {folder}/test_*.py has {name!r} in its name")
    return list(map(str, chosen))


class Session:
    """Sessions of pytest that share a journal, one after another.

    Args:
      args: the parsed options.
      rest: options for pytest.
    """

    def __init__(self, args: argparse.Namespace, rest: Sequence[str]) -> None:
        self.args, self.rest = args, rest
        self.state = State()
        self.process: subprocess.Popen[bytes] | None = None
        self.begin = time.time()
        self.end = self.begin + args.seconds
        args.log.mkdir(parents=True, exist_ok=True)
        self.journal = args.log / "journal.jsonl"
        for name in ("journal.jsonl", "pytest.log", "failures.log"):
            (args.log / name).write_text("")

    def _command(self, tests: Sequence[str]) -> list[str]:
        workers = [
            f"--tx={self.args.workers}*popen//env:CUDA_VISIBLE_DEVICES={gpu}"
            for gpu in self.args.gpus
        ]
        last_start = self.end - min(LAST_START_S, self.args.seconds / 10)
        limit = [] if self.end == float("inf") else [f"--until={last_start}"]
        chosen = self.args.log / "tests.txt"
        chosen.write_text("\n".join(tests) + "\n")
        return [
            *(sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"),
            # The other ways of `--dist` run a test that ends its process again, without end.
            *("--dist=load", "--maxschedchunk=1", *workers, f"--journal={self.journal}", *limit),
            *(["-k", self.args.keyword] if self.args.keyword else []),
            *(*self.rest, f"@{chosen}"),
        ]

    def run_all(self, tests: Sequence[str]) -> None:
        """Runs test files or ids; if pytest ends early, what is left in a new session."""
        left: list[str] = []
        while True:
            self._run(tests)
            before, left = left, self.state.not_run
            is_whole = self.state.status not in (None, INTERNAL_ERROR)
            if is_whole or not left or left == before or time.time() >= self.end:
                return
            print(f"pytest ended early; {len(left)} tests are left for a new session", flush=True)
            tests = left

    def _run(self, tests: Sequence[str]) -> None:
        # A process gives the memory of deleted arrays back to the GPU that it shares: 12 processes
        # that kept it on an H200 ran out of its 141 GB in 14 of 349 tests.
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        self.state.status = None
        with open(self.args.log / "pytest.log", "a") as log, open(self.journal) as journal:
            journal.seek(0, os.SEEK_END)
            self.process = process = subprocess.Popen(
                self._command(tests),
                cwd=self.args.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                self._follow(process, journal)
            finally:
                _end(process)
                self._read(journal)

    def _follow(self, process: subprocess.Popen[bytes], journal: TextIO) -> None:
        said = time.time()
        while process.poll() is None and time.time() < self.end:
            self._read(journal)
            if time.time() - said > PROGRESS_S:
                said = time.time()
                print(self._progress(), flush=True)
            time.sleep(0.2)

    def _read(self, journal: TextIO) -> None:
        for event in _events(journal):
            failed = self.state.add(event)
            if failed is not None:
                print(f"FAILED {failed}: {_reason(event['text'])}", flush=True)
                with open(self.args.log / "failures.log", "a") as log:
                    log.write(f"==== {failed}\n{event['text']}\n\n")

    def _progress(self) -> str:
        done = len(self.state.chosen) - len(self.state.not_run)
        failed = len(self.state.failed)
        elapsed = time.time() - self.begin
        return f"{elapsed:.0f} s: {done} of {len(self.state.chosen)} done, {failed} failed"

    def summary(self) -> str:
        """Counts, the longest tests, failures, and what did not run, as text."""
        state = self.state
        longest = sorted(state.seconds.items(), key=lambda pair: -pair[1])[:LONGEST]
        lines = ["", "longest:", *(f"  {seconds:6.1f} s  {test}" for test, seconds in longest)]
        for test, text in state.skipped.items():
            lines.append(f"SKIPPED {test}: {_reason(text)}")
        for test in state.not_run:
            is_running = test in state.started and test not in state.late
            lines.append(f"NOT RUN {test}" + (" (did not finish)" if is_running else ""))
        for name, texts in (state.broken | state.failed).items():
            lines.append(f"FAILED {name}: {_reason(texts if isinstance(texts, str) else texts[0])}")
        lines.append(
            f"{len(state.seconds.keys() - state.late - state.failed.keys() - state.skipped.keys())}"
            f" passed, {len(state.failed)} failed, {len(state.broken)} files not collected, "
            f"{len(state.skipped)} skipped, {len(state.not_run)} not run, of {len(state.chosen)}; "
            f"{time.time() - self.begin:.0f} s; {self.args.workers} workers on each of "
            f"{len(self.args.gpus)} GPUs; logs in {self.args.log}"
        )
        return "\n".join(lines)


def _events(journal: TextIO) -> Iterator[dict[str, Any]]:
    """The whole lines that were written since the last call."""
    while True:
        at, line = journal.tell(), journal.readline()
        if not line.endswith("\n"):
            journal.seek(at)
            return
        yield json.loads(line)


def _reason(text: str) -> str:
    """The first line of pytest's explanation of a failure, else its last line."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no text"]
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])[:200]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest's processes and whatever they have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this command, and options for pytest."""
    parser = argparse.ArgumentParser(
        description="Runs the GPU tests in many processes on every GPU.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--files", nargs="+", metavar="NAME", help="files with one of these in their names")
    add("-k", dest="keyword", metavar="EXPRESSION", help="tests that match, as in pytest")
    add("--seconds", type=float, default=float("inf"), help="ends after this time")
    add("--left", action="store_true", help="only what the last run with this --log did not run")
    add("--workers", type=int, help="processes on each GPU (default: by the number of cores)")
    add("--gpus", nargs="+", metavar="GPU", help="values of CUDA_VISIBLE_DEVICES (default: all)")
    add("--log", type=pathlib.Path, default=ROOT / "build" / "gpu-tests", help="folder for logs")
    add("--folder", type=pathlib.Path, default=ROOT / "tests" / "gpu", help="folder of the tests")
    add("--root", type=pathlib.Path, default=ROOT, help="folder in which pytest runs")
    args, rest = parser.parse_known_args(argv)
    args.gpus = args.gpus or gpus_here()
    if not args.gpus:
        parser.error("nvidia-smi finds no GPU")
    args.workers = args.workers or workers_here(len(args.gpus))
    args.log = args.log.resolve()
    return args, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 0 if every chosen test ran and passed."""
    args, rest = parse(sys.argv[1:] if argv is None else argv)
    try:
        tests = left_by(args.log) if args.left else files_of(args.folder, args.files)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    session = Session(args, rest)
    # As for an interrupt: pytest's processes end, and the summary says what ran.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        session.run_all(tests)
        status = 0 if session.state.is_complete else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    print(session.summary(), flush=True)
    if not session.state.chosen:
        output = (args.log / "pytest.log").read_text().splitlines()
        print("no test was found; pytest says:", *output[-20:], sep="\n", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
