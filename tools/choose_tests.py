"""Chooses the tests of the short suite, and divides the others into shares.

    python tools/choose_tests.py merge build/lines.npz build/lines     # after a recorded run
    python tools/choose_tests.py choose build/lines.npz

`merge` joins what the processes of recorded runs wrote (`tools/lines_of_tests`), each into a
folder; a test's record in a later folder, or in a file of an earlier `merge`, replaces others.
`choose` writes `tests/shares.txt`: the tests that `make test` leaves out. The short suite has, in
this order,

1. tests that run the lines and branches that each group of folders runs: the cheapest set that a
   greedy search finds. A test that adds fewer than `--rate` of them a second is left to the shares:
   at 4, a third of the time goes, and one line in 150. The last group, whose tests run whole
   commands, runs only what the others do not run.
2. the tests that `tools/killing_tests.txt` names: those that alone killed a mutant.
3. the cheapest case of each test function, from the cheapest function on, while `--seconds` last.
4. every test of less than 0.05 s.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import json
import pathlib
import pickle
import sys
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
SHARES = ROOT / "tests" / "shares.txt"
KILLING = ROOT / "tools" / "killing_tests.txt"

#: Folders whose tests find the same kind of fault: each group but the last runs every point that it
#: reaches.
GROUPS = (
    ("interpret", "emulate"),
    ("offline",),
    ("ops", "reference"),
    ("rewrite",),
    ("tuning",),
    ("benchmarks", "examples", "packaging", "serving"),
)
#: A test below this many seconds always belongs to the short suite: all of them take 40 s.
CHEAP = 0.05

HEADER = """\
# Tests that the short suite leaves out, in shares of about the same time. Made by
# `python tools/choose_tests.py choose`; docs/testing.md describes how. Do not edit by hand.
"""


class Measured(NamedTuple):
    """What each test runs and takes."""

    names: list[str]
    points: list[list]  # [path, line], or [path, line, next line] for a branch
    runs: np.ndarray  # [tests, points] bool
    costs: np.ndarray  # [tests, 3]: seconds, processor seconds, memory in KiB

    @property
    def seconds(self) -> np.ndarray:
        return self.costs[:, 0]


def merge(sources: Sequence[pathlib.Path]) -> Measured:
    """Joins recorded runs, of which later ones replace the records of their tests."""
    runs = [recorded(x) if x.is_dir() else load(x) for x in sources]
    last = {name: (run, row) for run in runs for row, name in enumerate(run.names)}
    numbers: dict[tuple, int] = {}
    for run in runs:
        for point in run.points:
            numbers.setdefault(tuple(point), len(numbers))
    columns = {id(run): [numbers[tuple(point)] for point in run.points] for run in runs}
    ran = np.zeros((len(last), len(numbers)), bool)
    for row, (run, source) in enumerate(last.values()):
        ran[row, columns[id(run)]] = run.runs[source]
    costs = np.array([run.costs[row] for run, row in last.values()])
    return Measured(list(last), [list(x) for x in numbers], ran, costs)


def recorded(folder: pathlib.Path) -> Measured:
    """Reads the records of all processes of a run; a test's own processes add to its points."""
    numbers: dict[tuple, int] = {}
    points: dict[str, set[int]] = collections.defaultdict(set)
    costs: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for path in sorted(folder.glob("*.lines")):
        found, records = pickle.loads(zlib.decompress(path.read_bytes()))
        number = [numbers.setdefault(x, len(numbers)) for x in found]
        for name, seconds, processor_seconds, memory, ran in records:
            points[name].update(number[x] for x in ran)
            cost = costs[name]
            costs[name] = [cost[0] + seconds, cost[1] + processor_seconds, max(cost[2], memory)]
    names = sorted(points)
    runs = np.zeros((len(names), len(numbers)), bool)
    for row, name in enumerate(names):
        runs[row, list(points[name])] = True
    return Measured(names, [list(x) for x in numbers], runs, np.array([costs[n] for n in names]))


def save(measured: Measured, path: pathlib.Path) -> None:
    """Writes what was measured, a bit for each test and point."""
    np.savez_compressed(
        path,
        bits=np.packbits(measured.runs, axis=1),
        n=len(measured.points),
        points=np.array(json.dumps(measured.points)),
        names=np.array(json.dumps(measured.names)),
        meta=measured.costs,
    )


def load(path: pathlib.Path) -> Measured:
    """Reads what `save` wrote."""
    with np.load(path) as file:
        points = json.loads(str(file["points"]))
        runs = np.unpackbits(file["bits"], axis=1, count=len(points)).astype(bool)
        return Measured(json.loads(str(file["names"])), points, runs, file["meta"])


def cover(
    runs: np.ndarray, seconds: np.ndarray, needed: np.ndarray, rate: float = 0.0
) -> list[int]:
    """Chooses tests until one runs each point that is needed: the most new points a second first.

    A test's gain only falls while others are chosen, so a heap of old gains finds the next one.
    Tests with fewer than `rate` new points a second are not chosen.
    """
    needed = needed & runs.any(0)
    cost = np.maximum(seconds, 0.02)  # a test costs its collection and report, too
    heap = [
        (-(needed[run] > 0).sum() / c, i) for i, (run, c) in enumerate(zip(runs, cost, strict=True))
    ]
    heapq.heapify(heap)
    chosen = []
    while heap and needed.any():
        _, test = heapq.heappop(heap)
        gain = needed[runs[test]].sum() / cost[test]
        if gain and heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, test))
        elif gain and gain >= rate:
            chosen.append(test)
            needed &= ~runs[test]
    return chosen


def choose(
    measured: Measured, keep: set[str], limit: float, rate: float = 0.0
) -> dict[str, set[int]]:
    """Returns the tests of the short suite by the reason for which they are in it."""
    names, seconds = measured.names, measured.seconds
    folders = [name.split("/")[1] for name in names]
    chosen: set[int] = set()
    reasons: dict[str, set[int]] = {}

    def add(reason: str, tests: set[int]) -> None:
        reasons[reason] = tests - chosen
        chosen.update(tests)

    for group in GROUPS:
        tests = np.array([i for i, folder in enumerate(folders) if folder in group], int)
        if tests.size:
            is_run = measured.runs[list(chosen if group is GROUPS[-1] else ())].any(0)
            found = cover(measured.runs[tests], seconds[tests], ~is_run, rate)
            add("lines and branches of " + ", ".join(group), set(tests[found].tolist()))
    add("alone kills a mutant", {i for i, name in enumerate(names) if name in keep})
    cases: dict[str, int] = {}
    for test in np.argsort(seconds, kind="stable").tolist():
        cases.setdefault(names[test].partition("[")[0], test)
    cheap = {i for i in range(len(names)) if seconds[i] < CHEAP}
    spent = sum(seconds[list(chosen | cheap)])
    represented = {names[i].partition("[")[0] for i in chosen | cheap}
    firsts = set()
    for function, test in cases.items():
        if function not in represented and spent + seconds[test] <= limit:
            firsts.add(test)
            spent += seconds[test]
    add("a case of each function", firsts)
    add(f"under {CHEAP} s", cheap)
    return reasons


def shares(measured: Measured, left_out: list[int], count: int) -> list[list[str]]:
    """Divides tests into shares of about the same time, all cases of a function in the same one."""
    functions: dict[str, list[int]] = collections.defaultdict(list)
    for test in left_out:
        functions[measured.names[test].partition("[")[0]].append(test)
    cost = {name: float(measured.seconds[tests].sum()) for name, tests in functions.items()}
    heap = [(0.0, share) for share in range(count)]
    found: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(functions, key=lambda x: (-cost[x], x)):
        spent, share = heapq.heappop(heap)
        found[share] += [measured.names[test] for test in functions[name]]
        heapq.heappush(heap, (spent + cost[name], share))
    return [sorted(names) for names in found]


def table(measured: Measured, reasons: dict[str, set[int]]) -> list[str]:
    """Lines about the tests of each reason and their seconds."""
    lines = [f"{'seconds':>9}  tests  in the short suite for"]
    for reason, tests in reasons.items():
        lines.append(f"{measured.seconds[list(tests)].sum():9.0f}  {len(tests):5}  {reason}")
    everyone = {i for tests in reasons.values() for i in tests}
    spent = measured.seconds[list(everyone)].sum()
    lines.append(f"{spent:9.0f}  {len(everyone):5}  together")
    lines.append(f"{measured.seconds.sum():9.0f}  {len(measured.names):5}  whole suite")
    return lines


def main(arguments: list[str]) -> int:
    """Runs the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="join what the processes of a run recorded")
    merging.add_argument("file", type=pathlib.Path)
    merging.add_argument("sources", type=pathlib.Path, nargs="+")
    choosing = commands.add_parser("choose", help="write tests/shares.txt")
    choosing.add_argument("file", type=pathlib.Path)
    choosing.add_argument("--seconds", type=float, default=450.0, help="of the short suite's tests")
    choosing.add_argument("--rate", type=float, default=12.0, help="least lines a second of a test")
    choosing.add_argument("--shares", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.command == "merge":
        measured = merge(options.sources)
        save(measured, options.file)
        print(f"{len(measured.names)} tests run {len(measured.points)} lines and branches")
        return 0
    measured = load(options.file)
    reasons = choose(measured, set(KILLING.read_text().splitlines()), options.seconds, options.rate)
    short = {i for tests in reasons.values() for i in tests}
    left_out = [i for i in range(len(measured.names)) if i not in short]
    text = HEADER
    for number, names in enumerate(shares(measured, left_out, options.shares), 1):
        text += "\n".join(["", f"[{number}]", *names]) + "\n"
    SHARES.write_text(text)
    print("\n".join(table(measured, reasons)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
