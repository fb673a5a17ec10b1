"""Runs the tests of mutants (tools/mutants.py): which tests, in which order, and where.

Each job has a copy of the tree, in which it changes one line at a time. A test kills a mutant if it
fails with the mutant and passes without it. pytest loads this module as a plugin, too: it runs the
tests of a list, in the order of the list, and notes in a file what each of them does.

A coverage file is an `.npz` with `names` (JSON: ids of tests), `points` (JSON: `[path, line]`, or
`[path, line, next line]` for a branch), `bits` (tests x points, packed along the points), `n` (the
number of points) and `meta` (seconds of each test in column 0).
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tools.mutant_draw import Mutant, Span

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ("ikbo_jax", "tests", "benchmarks", "examples", "tools", "docs", ".ci")
#: If fewer tests run a line, those that run other lines of its function, or file, follow.
FEW = 20
#: Most tests that neither run the mutant's statement nor use what it assigns.
MOST_NEAR = 100
#: Tests of the first pytest process of a mutant. It imports few files; most mutants need no second.
FIRST_BATCH = 24
#: Seconds that a test may take, and that a process may take beyond its budget.
TEST_LIMIT_S, GRACE_S = 60, 150
#: Most seconds of a process.
LONGEST_S = 1800.0
#: Most seconds of a process whose tests run again, without the mutant, before the test that failed.
REPEATED_S = 40.0
#: Names the list of tests for the plugin.
LIST = "IKBO_MUTANT_TESTS"


class Coverage:
    """Which tests run a line, and how long each of them takes."""

    def __init__(self, file: pathlib.Path, root: pathlib.Path = ROOT) -> None:
        data = np.load(file)
        self.names: list[str] = json.loads(str(data["names"]))
        points: list[list[Any]] = json.loads(str(data["points"]))
        bits = np.unpackbits(data["bits"], axis=1, count=int(data["n"]))
        self.by_point = np.ascontiguousarray(bits.T).astype(bool)
        #: A test that takes long, or that runs much of the package, comes late.
        self.cost = data["meta"][:, 0] + bits.sum(axis=1) / 1000
        self._columns: dict[str, dict[int, list[int]]] = {}
        for column, (path, line, *_) in enumerate(points):
            self._columns.setdefault(path, {}).setdefault(line, []).append(column)
        self.bodies: dict[str, list[Span]] = {}
        self.users: dict[str, list[tuple[str, Span]]] = collections.defaultdict(list)
        for path in sorted(self._columns):
            self._read(path, root / path)

    def _read(self, path: str, file: pathlib.Path) -> None:
        """Notes a file's functions, and the names that each of them uses."""
        self.bodies[path] = []
        if not file.exists():
            return
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                span = (node.body[0].lineno, node.end_lineno or node.lineno)
                self.bodies[path].append(span)
                for part in ast.walk(node):
                    if isinstance(part, ast.Name):
                        self.users[part.id].append((path, span))
                    elif isinstance(part, ast.Attribute):
                        self.users[part.attr].append((path, span))

    def running(self, path: str, span: Span) -> np.ndarray:
        """Numbers of the tests that run a line of a function within `span`.

        An import runs the other lines, in whichever test comes first.
        """
        columns = [
            column
            for line, columns in self._columns.get(path, {}).items()
            if span[0] <= line <= span[1] and any(a <= line <= b for a, b in self.bodies[path])
            for column in columns
        ]
        return np.flatnonzero(self.by_point[columns].any(axis=0))

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run a mutant's line, then its statement; if few, also those near it."""
        path = mutant.path
        exact: list[list[tuple[str, Span]]] = [
            [(path, (mutant.line, mutant.line))],
            [(path, mutant.statement)],
        ]
        if mutant.at_import:
            users = [x for name in mutant.names for x in self.users[name]]
            exact = [[x for x in users if x[0] == path], [x for x in users if x[0] != path]]
        near = [(path, span) for span in (*mutant.scopes, (1, sys.maxsize))]
        chosen: dict[int, None] = {}

        def choose(places: list[tuple[str, Span]]) -> None:
            found = itertools.chain.from_iterable(self.running(*place) for place in places)
            chosen.update(dict.fromkeys(self.in_order(found, chosen)))

        for places in exact:
            choose(places)
        most = len(chosen) + MOST_NEAR
        for place in near:
            if len(chosen) < FEW:
                choose([place])
        return [self.names[i] for i in list(chosen)[:most]]

    def in_order(self, tests: Iterable[int], before: Iterable[int]) -> list[int]:
        """Sorts tests by cost: one case of every function, then one more, then twice as many.

        Tests of `before` are left out.
        """
        cases: collections.Counter[str] = collections.Counter()
        keys = {}
        for test in sorted(set(map(int, tests)).difference(before), key=lambda i: self.cost[i]):
            function = self.names[test].partition("[")[0]
            keys[test] = (cases[function].bit_length(), self.cost[test])
            cases[function] += 1
        return sorted(keys, key=lambda i: keys[i])


@dataclasses.dataclass
class Outcome:
    """What a pytest process did.

    Attributes:
      passed: tests that passed, or skipped themselves, in order.
      failed: the test that failed, crashed or took too long; None if none did.
      why: the first line of its error.
      is_cut: whether the time for the tests was up.
      is_stopped: whether the time of the whole run was up.
    """

    passed: list[str]
    failed: str | None = None
    why: str = ""
    is_cut: bool = False
    is_stopped: bool = False


class Tree:
    """A copy of the tree, in which tests run."""

    #: Processes of all trees, to be ended with the run.
    processes: set[subprocess.Popen[bytes]] = set()

    #: When all of them end, on the monotonic clock.
    deadline = float("inf")

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.root = folder, folder / "tree"
        self.edits = 0
        (folder / "tmp").mkdir(parents=True)
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.root / name, ignore=ignore)
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy2(file, self.root)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Changes the mutant's line until the context ends."""
        path = self.root / mutant.path
        source, status = path.read_text(), path.stat()
        # Python would take the compiled file of a version with the same size and time.
        self.edits += 1
        path.write_text(mutant.apply(source))
        os.utime(path, (status.st_mtime, status.st_mtime + 10 * self.edits))
        try:
            yield
        finally:
            path.write_text(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, tests: Sequence[str], seconds: float) -> Outcome:
        """Runs tests in this order until one fails; starts none after `seconds`."""
        journal, listed = self.folder / "journal.jsonl", self.folder / "tests.json"
        journal.write_text("")
        order = {"tests": tests, "journal": str(journal), "seconds": seconds}
        listed.write_text(json.dumps(order))
        named = dict.fromkeys(test.partition("::")[0] for test in tests)
        if not (files := [f for f in named if (self.root / f).exists()]):
            return Outcome([])
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=short"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tools.mutant_runs"),
            *("-o", f"time_limit={TEST_LIMIT_S}", f"--rootdir={self.root}"),
            *files,
        ]
        paths = (str(self.root), os.environ.get("PYTHONPATH"))
        environment = {
            **os.environ,
            **{"JAX_PLATFORMS": "cpu", LIST: str(listed)},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **{"TMPDIR": str(self.folder / "tmp"), "XDG_CACHE_HOME": str(self.folder / "tmp")},
        }
        if (left := self.deadline - time.monotonic()) <= 0:
            return Outcome([], is_stopped=True)
        with (self.folder / "pytest.log").open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, start_new_session=True, **streams
            )
            self.processes.add(process)
            try:
                status = process.wait(min(left, seconds + GRACE_S, LONGEST_S))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self.end(process)
        if status is None and time.monotonic() >= self.deadline:
            return dataclasses.replace(_read_journal(journal, tests, 0), is_stopped=True)
        return _read_journal(journal, tests, status)

    @classmethod
    def end(cls, process: subprocess.Popen[bytes]) -> None:
        """Ends a process with its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        cls.processes.discard(process)

    @classmethod
    def end_all(cls) -> None:
        """Ends all processes, and lets no other one start."""
        cls.deadline = 0.0
        for process in list(cls.processes):
            cls.end(process)


def _read_journal(journal: pathlib.Path, tests: Sequence[str], status: int | None) -> Outcome:
    """What a process noted before it ended with a status; None if it had to be ended."""
    outcome, running, is_collected = Outcome([]), None, False
    for event in map(json.loads, journal.read_text().splitlines()):
        name = event.get("test")
        match event["event"]:
            case "wrong tree":
                raise RuntimeError(f"pytest imported {event['file']}")
            case "collected":
                is_collected = True
            case "broken":
                named = (x for x in tests if x.startswith(event["file"]))
                return Outcome([], next(named, tests[0]), f"not imported: {event['why']}")
            case "start":
                running = name
            case "passed":
                outcome.passed.append(name)
                running = None
            case "failed":
                outcome.failed, outcome.why = name, event["why"]
                return outcome
            case "cut":
                outcome.is_cut = True
    if running is not None and status != 0:
        outcome.failed, outcome.why = running, f"ended the process, or hung (status {status})"
    elif not is_collected and status != 0:
        log = (journal.parent / "pytest.log").read_text(errors="replace").splitlines()
        lines = [x for x in log if x.startswith(("E ", "ERROR"))] or log[-1:] or [""]
        outcome.failed, outcome.why = tests[0], f"no test ran (status {status}): {lines[-1]}"
    return outcome


def judge(
    mutant: Mutant,
    parts: dict[str, list[str]],
    tree: Tree,
    *,
    budget: float,
    failing: set[str],
    passed: list[str],
) -> dict[str, Any]:
    """Runs tests until one kills the mutant; the result's record.

    `parts` holds the tests of each suite; each part has `budget` seconds. Tests that fail without
    the mutant, too, are added to `failing`. Tests that `passed` in an earlier run are left out.
    """
    start = time.monotonic()
    record: dict[str, Any] = {"mutant": mutant.id, "budget": budget}
    record["tests"] = sum(map(len, parts.values()))
    passed, missing = list(passed), 0

    def result(state: str, **rest: str) -> dict[str, Any]:
        seconds = round(time.monotonic() - start, 1)
        record.update(rest, state=state, seconds=seconds, missing=missing, passed=passed)
        return record

    state, record["cut"] = "survived", []
    for suite, tests in parts.items():
        end = time.monotonic() + budget
        size = FIRST_BATCH
        while rest := [x for x in tests if x not in failing and x not in passed]:
            left = end - time.monotonic()
            if left <= 0:
                state = "out of time"
                record["cut"].append(suite)
                break
            batch = rest[:size]
            began = time.monotonic()
            with tree.mutated(mutant):
                outcome = tree.run(batch, left)
            took = time.monotonic() - began
            if outcome.failed is not None and not outcome.is_stopped:
                # The tests before it may be the reason why it fails.
                before = outcome.passed if took < REPEATED_S else []
                again = tree.run([*before, outcome.failed], sys.maxsize)
                if again.is_stopped:
                    return result("stopped")
                if again.failed is None and outcome.failed in again.passed:
                    passed += outcome.passed
                    return result("killed", suite=suite, killer=outcome.failed, why=outcome.why)
                failing.add(again.failed or outcome.failed)
            passed += outcome.passed
            if outcome.is_stopped:
                return result("stopped")
            if outcome.is_cut:
                end = 0.0
            elif outcome.failed is None:
                # Tests that are in the coverage file, and no longer in the tree.
                gone = [x for x in batch if x not in outcome.passed]
                missing += len(gone)
                passed += gone
                size = sys.maxsize
    return result(state)


# The plugin.

_order: dict[str, Any] = {}


def _note(event: str, **rest: object) -> None:
    with pathlib.Path(_order["journal"]).open("a") as file:
        file.write(json.dumps({"event": event, **rest}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Reads the list of tests."""
    _order.update(json.loads(pathlib.Path(os.environ[LIST]).read_text()))
    _order["failed"] = False


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Notes a file that cannot be imported."""
    if report.failed:
        _note("broken", file=report.nodeid, why=_first_line(report))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Keeps the tests of the list, in its order, also those that options leave out."""
    import ikbo_jax

    if not pathlib.Path(ikbo_jax.__file__).is_relative_to(config.rootpath):
        _note("wrong tree", file=ikbo_jax.__file__)
    found = {item.nodeid: item for item in items}
    yield
    items[:] = [found[test] for test in _order["tests"] if test in found]
    _note("collected")
    _order["end"] = time.monotonic() + _order["seconds"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Starts no test after the end."""
    _note("start", test=item.nodeid)
    _order["failed"] = False
    result = yield
    if not _order["failed"]:
        _note("passed", test=item.nodeid)
        if time.monotonic() > _order["end"]:
            _note("cut")
            item.session.shouldstop = "the time is up"
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes the first failure of a test."""
    if report.failed and not _order["failed"]:
        _order["failed"] = True
        _note("failed", test=report.nodeid, why=_first_line(report))


def _first_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return (lines or [""])[0 if crash else -1][:200]
