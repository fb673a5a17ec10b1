"""Runs mutants of `ikbo_jax/rewrite/`, each with one line changed, and expects a test to fail.

    python tools/mutate_rewrite.py              # every mutant, two at a time
    python tools/mutate_rewrite.py sign bounds  # mutants whose names contain a word
    python tools/mutate_rewrite.py --list       # checks that every mutant can be applied

Each mutant of `rewrite_mutants.py`, `rewrite_layout_mutants.py` and `rewrite_choice_mutants.py`
names the few tests that should fail with it; if these pass, the tests in `WIDE` run. A mutant is
caught if a test fails that passes without it, and survives if all tests pass. Each mutant is
applied in a temporary copy of the tree.
The exit status is 1 if a mutant survives or cannot be applied.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from rewrite_choice_mutants import CHOICE_MUTANTS
from rewrite_gradient_mutants import GRADIENT_MUTANTS
from rewrite_layout_mutants import LAYOUT_MUTANTS
from rewrite_mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).resolve().parent.parent

#: Tests that run, file by file, for a mutant that the tests it names do not catch.
WIDE = (
    "tests/rewrite/test_rewrite_facts.py",
    "tests/rewrite/test_rewrite_decisions.py",
    "tests/rewrite/test_rewrite_recognised.py",
    "tests/rewrite/test_rewrite_rules.py",
    "tests/rewrite/test_rewrite_seen.py",
    "tests/rewrite/test_rewrite_seen_weights.py",
    "tests/rewrite/test_rewrite.py",
    "tests/rewrite/test_rewrite_calls.py",
    "tests/rewrite/test_rewrite_report.py",
    "tests/rewrite/test_rewrite_layouts.py",
    "tests/rewrite/test_rewrite_blocks.py",
    "tests/rewrite/test_rewrite_lookalikes.py",
)


def check(mutant: Mutant, root: pathlib.Path) -> str:
    """Why a mutant cannot be applied; "" if it can."""
    text = (root / "ikbo_jax" / "rewrite" / mutant.file).read_text()
    count = text.count(mutant.old)
    return "" if count == 1 else f"its text occurs in {mutant.file} {count} times"


def first_failure(mutant: Mutant | None, tests: tuple[str, ...]) -> str:
    """The first test that fails with a mutant, or without any if None; "" if all tests pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("ikbo_jax", "tests", "examples", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            path = copy / "ikbo_jax" / "rewrite" / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": folder}
        options = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[0] if failed else ""


@functools.cache
def passes_without(tests: tuple[str, ...]) -> bool:
    """Whether tests pass without a mutant, so that a mutant causes their failure."""
    return not first_failure(None, tests)


def verdict(mutant: Mutant, wide: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a mutant is caught, and the text to print."""
    start = time.monotonic()
    problem = check(mutant, ROOT)
    if problem:
        return False, f"NOT APPLIED: {problem}"
    for tests in (mutant.tests, *((file,) for file in wide)):
        failure = first_failure(mutant, tests)
        if failure and passes_without(tests):
            wider = "" if tests == mutant.tests else " (not by the tests it names)"
            name = failure.removeprefix("FAILED tests/").split(" - ")[0]
            return True, f"caught by {name}{wider} ({time.monotonic() - start:.0f} s)"
        if failure:
            return False, f"NOT TRIED: fails without the mutant, too: {failure}"
    return False, f"SURVIVED ({time.monotonic() - start:.0f} s)"


def main() -> int:
    """Runs the chosen mutants; returns 1 if one survives or cannot be applied."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="run mutants whose names contain a word")
    parser.add_argument("--list", action="store_true", help="run no test")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to run at a time")
    parser.add_argument(
        "--narrow", action="store_true", help="run only the tests that mutants name"
    )
    options = parser.parse_args()
    mutants = (*MUTANTS, *GRADIENT_MUTANTS, *LAYOUT_MUTANTS, *CHOICE_MUTANTS)
    chosen = [m for m in mutants if not options.words or any(w in m.name for w in options.words)]
    if not chosen:
        parser.error(f"no mutant's name contains {' or '.join(options.words)}")

    def applies(mutant: Mutant) -> tuple[bool, str]:
        problem = check(mutant, ROOT)
        return not problem, problem or "applies"

    judged = functools.partial(verdict, wide=() if options.narrow else WIDE)
    named = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    if not options.list and (failure := first_failure(None, named)):
        print(f"the tests that mutants name fail without any mutant: {failure}")
        return 1
    caught = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(applies if options.list else judged, chosen)
        for mutant, (good, text) in zip(chosen, results, strict=True):
            line = _line(mutant)
            print(f"{mutant.file}:{line:<5} {mutant.name:48} {text}", flush=True)
            caught += good
    print(f"{caught} of {len(chosen)}")
    return 0 if caught == len(chosen) else 1


def _line(mutant: Mutant) -> int:
    """The line at which a mutant's text begins; 0 if the file lacks it."""
    text = (ROOT / "ikbo_jax" / "rewrite" / mutant.file).read_text()
    before, found, _ = text.partition(mutant.old)
    return before.count("\n") + 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
