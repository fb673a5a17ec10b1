"""Draws mutants of `ikbo_jax/`, each with one line changed, and counts how many of them tests kill.

    python -m tools.mutants draw --seed 1                 # prints the mutants that a seed draws
    python -m tools.mutants run --seed 1 --coverage cov.npz --short short.txt --out mutants.jsonl
    python -m tools.mutants report mutants.jsonl          # prints the table of docs/testing.md

A seed draws 150 lines: 60 of `ikbo_jax/pallas/`, and 90 of the other files. Every line that can be
changed is equally likely, and so is every change of a line: a number, a comparison, an operator, a
statement that is dropped, or two arguments that are swapped.

`run` (tools/mutant_runs.py) starts the tests that run a mutant's line, until one fails that passes
without the mutant. `--short` names a file with the tests that `make test` runs; they come first.
Results go to `--out`, so that the same command continues after an interruption. `--seconds` ends a
run in time.

`tools/equivalent_mutants.txt` lists mutants that compute the same as the original: the mutant, a
tab and the reason. `run` and `report` leave them out.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Container, Sequence
from typing import Any

from tools import mutant_runs
from tools.mutant_draw import ROOT, Mutant, draw

EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"
#: Seconds before the end of `--seconds` after which no mutant starts.
START_S = 30.0


def equivalent() -> dict[str, str]:
    """Reads the mutants that are set aside, with the reasons."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = (x.partition("\t") for x in lines if x and not x.startswith("#"))
    return {mutant: reason for mutant, _, reason in pairs}


def read_results(file: pathlib.Path) -> tuple[list[str], dict[str, dict[str, Any]], set[str]]:
    """The mutants that were drawn, their last results, and tests that fail without a mutant."""
    drawn: list[str] = []
    results: dict[str, dict[str, Any]] = {}
    failing: set[str] = set()
    for record in map(json.loads, file.read_text().splitlines()) if file.exists() else ():
        drawn = record.get("drawn", drawn)
        failing.update(record.get("failing", ()))
        if "mutant" in record:
            results[record["mutant"]] = record
    return drawn, results, failing


def is_done(record: dict[str, Any] | None, budget: float) -> bool:
    """Whether a mutant needs no other run; False if it ran out of a smaller budget."""
    if record is None or record["state"] == "stopped":
        return False
    return record["state"] != "out of time" or record["budget"] >= budget


def run(options: argparse.Namespace) -> int:
    """Runs the drawn mutants that have no result yet."""
    mutant_runs.Tree.deadline = deadline = time.monotonic() + (options.seconds or 1e9)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    mutants = draw(options.seed, options.count, options.kernels)
    drawn, results, failing = read_results(options.out)
    if drawn and drawn != [m.id for m in mutants]:
        print(f"{options.out} holds other mutants: the seed or the package is another one")
        return 2
    left_out = equivalent()
    waiting = [m for m in mutants if m.id not in left_out]
    waiting = [m for m in waiting if not is_done(results.get(m.id), options.budget)]
    if options.only:
        waiting = [m for m in waiting if any(word in m.id for word in options.only)]
    failing.update(_read_lines(options.failing))
    coverage = mutant_runs.Coverage(options.coverage)
    rest = _read_lines(options.rest)
    if options.short:
        rest |= set(coverage.names) - _read_lines(options.short)
    lists = {m.id: coverage.tests(m) for m in waiting}
    del coverage
    lock, written = threading.Lock(), set(failing)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        options.out.open("a") as out,
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        if not drawn:
            out.write(json.dumps({"seed": options.seed, "drawn": [m.id for m in mutants]}) + "\n")
        trees: queue.SimpleQueue[mutant_runs.Tree] = queue.SimpleQueue()
        for number in range(min(options.jobs, len(waiting))):
            trees.put(mutant_runs.Tree(pathlib.Path(folder) / str(number)))

        def judge(mutant: Mutant) -> None:
            if time.monotonic() > deadline - START_S:
                return
            tests = lists[mutant.id]
            parts = {"short": [x for x in tests if x not in rest]}
            parts["rest"] = [x for x in tests if x in rest]
            passed = results.get(mutant.id, {}).get("passed", [])
            tree = trees.get()
            try:
                record = mutant_runs.judge(
                    *(mutant, parts, tree),
                    **{"budget": options.budget, "failing": failing, "passed": passed},
                )
            finally:
                trees.put(tree)
            with lock:
                record["failing"] = sorted(failing - written)
                written.update(record["failing"])
                out.write(json.dumps(record) + "\n")
                out.flush()
                results[mutant.id] = record
            verdict = f"{record['state']} {record.get('suite', '')}"
            told = f"{record.get('killer', '')} {record.get('why', '')}"
            print(f"{verdict:14} {record['seconds']:6.1f} s  {mutant.id}  {told}", flush=True)

        try:
            for _ in pool.map(judge, waiting):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            mutant_runs.Tree.end_all()
            raise
    left = [m for m in waiting if not is_done(results.get(m.id), options.budget)]
    print(f"{len(waiting) - len(left)} mutants have a result; {len(left)} are left")
    return 1 if left else 0


def _read_lines(file: pathlib.Path | None) -> set[str]:
    return set(file.read_text().splitlines()) if file else set()


def room(mutant: str) -> str:
    """The folder of a mutant, below the package; folders of `pallas/` count one by one."""
    folders = mutant.partition(":")[0].split("/")[1:-1]
    return "/".join(folders[: 2 if folders[:1] == ["pallas"] else 1]) or "command line, demo"


def table(
    drawn: Sequence[str], results: dict[str, dict[str, Any]], left_out: Container[str]
) -> str:
    """Counts mutants by folder, in Markdown."""
    counts: dict[str, collections.Counter[str]] = {}
    for mutant in drawn:
        suite = results.get(mutant, {}).get("suite")
        for name in (room(mutant), "all"):
            count = counts.setdefault(name, collections.Counter())
            count["drawn"] += 1
            count["equivalent"] += mutant in left_out
            count["short"] += mutant not in left_out and suite == "short"
            count["killed"] += mutant not in left_out and suite is not None
    rows = [
        "| folder | mutants | equivalent | killed by `make test` | killed by `make test-all` |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[name]
        judged = count["drawn"] - count["equivalent"]
        shares = [
            f"{count[key]} ({count[key] / judged:.0%})" if judged else "-"
            for key in ("short", "killed")
        ]
        text = name if name.startswith(("all", "command")) else f"`{name}`"
        rows.append(f"| {text} | {count['drawn']} | {count['equivalent']} | {' | '.join(shares)} |")
    return "\n".join(rows)


def report(options: argparse.Namespace) -> int:
    """Prints the table, and then the mutants that no test of a suite killed."""
    drawn, results, _ = read_results(options.results)
    left_out = equivalent()
    print(table(drawn, results, left_out))
    if waiting := [x for x in drawn if x not in left_out and not is_done(results.get(x), 0.0)]:
        print(f"\n{len(waiting)} of them did not run, or not to the end")
    for mutant in drawn if options.survivors else ():
        record = results.get(mutant, {"state": "not run"})
        if mutant not in left_out and record.get("suite") != "short":
            tests = f"{len(record.get('passed', []))} of {record.get('tests', 0)} tests passed"
            print(f"{record['state']}: {mutant} ({record.get('killer') or tests})")
    return 0


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("draw", "run"):
        command = commands.add_parser(name)
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--count", type=int, default=150, help="mutants to draw (150)")
        command.add_argument("--kernels", type=int, default=60, help="in ikbo_jax/pallas/ (60)")
    command.add_argument("--coverage", type=pathlib.Path, required=True)
    command.add_argument("--out", type=pathlib.Path, required=True, help="results, JSON lines")
    command.add_argument("--short", type=pathlib.Path, help="tests that make test runs, by line")
    command.add_argument("--rest", type=pathlib.Path, help="tests that make test leaves out")
    command.add_argument("--failing", type=pathlib.Path, help="tests that fail without a mutant")
    command.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    command.add_argument(
        "--budget", type=float, default=120.0, help="seconds of a mutant in each suite (120)"
    )
    command.add_argument("--seconds", type=float, help="ends the run in time; run again to go on")
    command.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="mutants with one of these words"
    )
    command = commands.add_parser("report")
    command.add_argument("results", type=pathlib.Path)
    command.add_argument("--survivors", action="store_true", help="also lists them")
    options = parser.parse_args()
    if options.command == "draw":
        for mutant in draw(options.seed, options.count, options.kernels):
            print(mutant.id)
        return 0
    return run(options) if options.command == "run" else report(options)


if __name__ == "__main__":
    sys.exit(main())
