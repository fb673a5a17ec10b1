"""Records which lines and branches of the project each test runs: a plugin of pytest.

    LINES_OF_TESTS=build/lines PYTHONPATH=tools/lines_of_tests \
      python -m pytest -p lines_of_tests -n 16

Each process writes a file into the folder `LINES_OF_TESTS`; `tools/choose_tests.py` reads them.
`sitecustomize.py` beside this file records in the Python processes that a test starts.

Python's `sys.monitoring` reports the first time that a line runs in a test, and nothing after it,
so tests take 1.2 times as long (5,246 tests, 16 processes). It also reports from XLA's threads, in
which interpreted kernels run. coverage.py has no contexts with `sys.monitoring` and sees no foreign
threads, and its tracer slows down Python, which is half of the suite's time.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import resource
import sys
import time
import types
import uuid
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

#: A line is (path, line), a branch (path, line it leaves, line it goes to).
Point = tuple[str, int] | tuple[str, int, int]

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("ikbo_jax", "benchmarks", "examples", "tools")
FOLDER_VARIABLE = "LINES_OF_TESTS"

_monitoring = sys.monitoring
_TOOL = _monitoring.COVERAGE_ID


class Record(NamedTuple):
    """What one test took and ran; `points` number the points of its process."""

    test: str
    seconds: float
    processor_seconds: float
    memory_kib: int
    points: list[int]


class Recorder:
    """Collects the points that run, test by test."""

    def __init__(self) -> None:
        self.numbers: dict[Point, int] = {}
        self.records: list[Record] = []
        self._running: set[Point] = set()
        self._taken: dict[tuple[types.CodeType, int], set[int]] = {}
        self._paths: dict[str, str | None] = {}

    def start(self) -> None:
        """Begins to record in this process."""
        _monitoring.use_tool_id(_TOOL, "lines_of_tests")
        events = _monitoring.events
        _monitoring.register_callback(_TOOL, events.LINE, self._on_line)
        _monitoring.register_callback(_TOOL, events.BRANCH, self._on_branch)
        _monitoring.set_events(_TOOL, events.LINE | events.BRANCH)

    def begin(self) -> None:
        """Forgets what ran so far, so that it is reported again."""
        self._running.clear()
        self._taken.clear()
        _monitoring.restart_events()

    def end(self, test: str, seconds: float, processor_seconds: float) -> None:
        """Records what has run since `begin` as the test's."""
        points = [self.numbers.setdefault(x, len(self.numbers)) for x in list(self._running)]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.records.append(Record(test, seconds, processor_seconds, memory, points))

    def write(self) -> None:
        """Ends, and writes this process's records into the folder that the environment names."""
        _monitoring.set_events(_TOOL, 0)
        folder = pathlib.Path(os.environ[FOLDER_VARIABLE])
        folder.mkdir(parents=True, exist_ok=True)
        content = pickle.dumps((list(self.numbers), [tuple(x) for x in self.records]))
        (folder / f"{uuid.uuid4().hex}.lines").write_bytes(zlib.compress(content, 3))

    def _path(self, code: types.CodeType) -> str | None:
        """The path of a function's file below the root; None outside the project."""
        name = code.co_filename
        if name not in self._paths:
            path = pathlib.Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
            self._paths[name] = path.relative_to(ROOT).as_posix() if inside else None
        return self._paths[name]

    def _on_line(self, code: types.CodeType, line: int) -> Any:
        if path := self._path(code):
            self._running.add((path, line))
        return _monitoring.DISABLE

    def _on_branch(self, code: types.CodeType, offset: int, target: int) -> Any:
        path = self._path(code)
        if path is None:
            return _monitoring.DISABLE
        taken = self._taken.setdefault((code, offset), set())
        if target not in taken:
            taken.add(target)
            self._running.add((path, _line_at(code, offset), _line_at(code, target)))
        # Python 3.12 cannot switch off one of the two ways alone.
        return _monitoring.DISABLE if len(taken) > 1 else None


def _line_at(code: types.CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end:
            return line or 0
    return 0


_recorder = Recorder()


def record_until_exit(test: str) -> None:
    """Records what this process, which the test has started, runs from now on."""
    import atexit

    _recorder.start()

    def write() -> None:
        _recorder.end(test, 0.0, 0.0)
        _recorder.write()

    atexit.register(write)


if __name__ == "lines_of_tests" and "pytest" in sys.modules:
    import pytest

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
        """Records what a test runs, with its fixtures."""
        if _monitoring.get_tool(_TOOL) is None:
            _recorder.start()
        _recorder.begin()
        start, processor_start = time.perf_counter(), time.process_time()
        try:
            return (yield)
        finally:
            spent = time.process_time() - processor_start
            _recorder.end(item.nodeid, time.perf_counter() - start, spent)

    def pytest_unconfigure() -> None:
        """Writes the records; the process that only hands out tests has none."""
        if _recorder.records:
            _recorder.write()
