"""The short suite and the shares of the rest together are the whole suite; costs are printed."""

import collections
import pathlib
import subprocess
import sys

import pytest
import session_costs
import suites
from processes import child_environment

ROOT = pathlib.Path(__file__).parents[2]

TESTS = """
import pytest

@pytest.mark.parametrize("x", range(4))
def test_of_cases(x):
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("x", range(4))
def test_sampled(x):
    pass
"""

SHARES = """# Two shares.

[1]
tests/test_sample.py::test_of_cases[1]

[2]
tests/test_sample.py::test_of_cases[0]
tests/test_sample.py::test_sampled[2]
tests/test_sample.py::test_removed
"""


def run(folder: pathlib.Path, *options: str) -> tuple[int, list[str], str]:
    """Runs pytest on a suite of two shares: exit status, names of the tests, and output."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "test_sample.py").write_text(TESTS)
    (tests / "shares.txt").write_text(SHARES)
    plugins = [x for name in ("time_limit", "case_sample", "session_costs") for x in ("-p", name)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", f"--config-file={ROOT / 'pyproject.toml'}"]
        + [f"--rootdir={folder}", "-v", *plugins, "-p", "no:hypothesispytest", *options],
        cwd=folder,
        env=child_environment(ROOT / "tests" / "support", without="PYTEST_"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    passed = [line.split()[0] for line in result.stdout.splitlines() if " PASSED " in line]
    names = [name.removeprefix("tests/test_sample.py::test_") for name in passed]
    return result.returncode, names, result.stdout


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--short"], ["of_cases[2]", "of_cases[3]", "sampled[0]"]),
        (["--share=1/2"], ["of_cases[1]"]),
        (["--share=2/2"], ["of_cases[0]", "sampled[2]"]),
        # Whoever names tests gets all of them.
        (["--short", "-k", "of_cases[0] or of_cases[3]"], ["of_cases[0]", "of_cases[3]"]),
    ],
)
def test_parts_of_the_suite(tmp_path: pathlib.Path, options: list[str], names: list[str]) -> None:
    status, found, output = run(tmp_path, *options)
    assert (status, found) == (0, names), output
    assert f" s in {len(names)} tests:\n" in output
    assert "largest process: this process, " in output
    assert ("SHARE=" in output) == options[0].startswith("--share")


def test_a_wrong_part_is_refused(tmp_path: pathlib.Path) -> None:
    status, names, output = run(tmp_path, "--share=3/2")
    assert (status, names) == (4, [])
    assert "--share is 3/2, expected 1/2 to 2/2" in output
    for text in ("0/2", "1/10", "1", "", "1/2/2"):
        with pytest.raises(pytest.UsageError, match=f"--share is {text}, expected 1/2 to 2/2"):
            suites.numbered_share(text, 2)


def test_the_shares_of_this_suite_overlap_nowhere() -> None:
    names = [name for share in suites.read_shares(ROOT / suites.SHARES) for name in share]
    assert [x for x, count in collections.Counter(names).items() if count > 1] == []


def test_costs_by_folder() -> None:
    seconds = {
        "tests/ops/test_a.py::test_x[1]": 2.0,
        "tests/ops/test_a.py::test_y": 0.5,
        "tests/rewrite/test_b.py::test_z": 4.0,
    }
    assert session_costs.described(seconds, {"gw0": 2 * 10**9, "gw1": 10**9}) == [
        "6 s in 3 tests:",
        "      4.0 s  rewrite, 1 tests",
        "      2.5 s  ops, 2 tests",
        "slowest:",
        "      4.0 s  tests/rewrite/test_b.py::test_z",
        "      2.0 s  tests/ops/test_a.py::test_x[1]",
        "largest process: gw0, 2.00 GB",
    ]
