"""Changes one line of `ikbo_jax/rewrite/` at a time, on purpose, and tells whether a test fails.

    python tools/mutate_rewrite.py              # every mutant, two at a time
    python tools/mutate_rewrite.py sign bounds  # those whose names contain a word
    python tools/mutate_rewrite.py --list       # checks that every mutant's text is there

Each mutant of `rewrite_mutants.py` names the few tests that should fail with it; only if these
pass, `WIDE` run. A mutant is caught if a test fails that passes without it, and survives if all
pass. Each is applied in a temporary copy of the tree. Ends with 1 if one survived or its text was
not found.
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

from rewrite_mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).resolve().parent.parent

#: What runs, file by file, for a mutant that its own tests do not catch.
WIDE = (
    "tests/test_rewrite_facts.py",
    "tests/test_rewrite_decisions.py",
    "tests/test_rewrite_attention.py",
    "tests/test_rewrite_recognised.py",
    "tests/test_rewrite_rules.py",
    "tests/test_rewrite_seen.py",
    "tests/test_rewrite_activations.py",
    "tests/test_rewrite.py",
    "tests/test_rewrite_lookalikes.py",
)


def check(mutant: Mutant, root: pathlib.Path) -> str:
    """Why a mutant cannot be applied; "" if it can."""
    text = (root / "ikbo_jax" / "rewrite" / mutant.file).read_text()
    count = text.count(mutant.old)
    return "" if count == 1 else f"its text stands in {mutant.file} {count} times"


def first_failure(mutant: Mutant | None, tests: tuple[str, ...]) -> str:
    """The first of the tests that fails with a mutant, or with none; "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("ikbo_jax", "tests"):
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
    """Whether tests pass without a mutant, so that a failure is the mutant's."""
    return not first_failure(None, tests)


def verdict(mutant: Mutant, wide: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a mutant is caught, and what to print."""
    start = time.monotonic()
    problem = check(mutant, ROOT)
    if problem:
        return False, f"NOT APPLIED: {problem}"
    for tests in (mutant.tests, *((file,) for file in wide)):
        by = first_failure(mutant, tests)
        if by and passes_without(tests):
            wider = "" if tests == mutant.tests else " (not by its own tests)"
            name = by.removeprefix("FAILED tests/").split(" - ")[0]
            return True, f"caught by {name}{wider} ({time.monotonic() - start:.0f} s)"
        if by:
            return False, f"NOT TRIED: fails without it, too: {by}"
    return False, f"SURVIVED ({time.monotonic() - start:.0f} s)"


def main() -> int:
    """Runs the chosen mutants; 1 if one survived or could not be applied."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="mutants whose names contain one of them")
    parser.add_argument("--list", action="store_true", help="runs no test")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--narrow", action="store_true", help="runs the mutants' own tests alone")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.name for w in options.words)]

    def applies(mutant: Mutant) -> tuple[bool, str]:
        problem = check(mutant, ROOT)
        return not problem, problem or "applies"

    judged = functools.partial(verdict, wide=() if options.narrow else WIDE)
    own = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    if not options.list and (failure := first_failure(None, own)):
        print(f"the mutants' own tests fail without any mutant: {failure}")
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
    """Where a mutant's text begins; 0 if it is not there."""
    text = (ROOT / "ikbo_jax" / "rewrite" / mutant.file).read_text()
    before, found, _ = text.partition(mutant.old)
    return before.count("\n") + 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
