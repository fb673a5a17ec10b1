"""Hooks of the suite: limits of time, samples of cases, the short suite and its shares."""

import collections
import pathlib
import re
import subprocess
import sys

import case_sample
import pytest
from processes import child_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]

TESTS = """
import threading
import pytest

never = threading.Event()

def wait_in_another_thread():
    never.wait()

@pytest.mark.time_limit(2)
def test_that_hangs():
    thread = threading.Thread(target=wait_in_another_thread, daemon=True)
    thread.start()
    thread.join()

def test_that_passes():
    pass
"""


SHARES = """# Two shares.

[1]
tests/test_sample.py::test_of_cases[a[1]-1]

[2]
tests/test_sample.py::test_of_cases[b[1]-6]
tests/test_sample.py::test_sampled[2]
tests/test_sample.py::test_removed
"""


def run(folder: pathlib.Path, tests: str, *options: str) -> tuple[int, str]:
    """Exit status and output of pytest on a file, with the project's configuration and plugins."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_sample.py").write_text(tests)
    (folder / "tests" / "shares.txt").write_text(SHARES)
    command = [sys.executable, "-m", "pytest", f"--config-file={ROOT / 'pyproject.toml'}"]
    command += [f"--rootdir={folder}", "-p", "no:cacheprovider", "-v", *options]
    command += [x for name in ("time_limit", "case_sample") for x in ("-p", name)]
    # These plugins, which the sample does not use, are 0.9 of the 1.1 s in which pytest starts.
    command += ["-p", "no:hypothesispytest", "-p", "no:anyio"]
    result = subprocess.run(
        command,
        cwd=folder,
        # A process of pytest-xdist that starts another pytest must not pass on that it is one.
        env=child_environment(ROOT / "tests" / "support", without="PYTEST_"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return result.returncode, result.stdout


def passed(output: str) -> list[str]:
    """The names of the tests that passed, without `test_`."""
    return re.findall(r"^tests/test_sample\.py::test_(\S+) PASSED", output, re.MULTILINE)


def test_there_is_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("time_limit")) <= 600


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_hang_fails_with_the_stack_of_every_thread(options, tmp_path) -> None:
    if options:
        pytest.importorskip("xdist")
    status, output = run(tmp_path, TESTS, *options)
    assert status == 1, output
    assert "Timeout (0:00:02)!" in output
    for function in ("wait_in_another_thread", "test_that_hangs"):
        assert re.search(rf"test_sample.py\", line \d+ in {function}\n", output), output
    if options:  # the other test goes on in a new process
        assert "FAILED tests/test_sample.py::test_that_hangs" in output
        assert "1 failed, 1 passed" in output


@pytest.mark.slow
def test_a_mark_takes_the_place_of_the_limit(tmp_path: pathlib.Path) -> None:
    tests = (
        "import pytest, time\n\n@pytest.mark.time_limit(0)\ndef test_long():\n    time.sleep(2)\n"
    )
    status, output = run(tmp_path, tests, "--override-ini=time_limit=1")
    assert status == 0, output


CASES = """
import pytest

@pytest.mark.parametrize("x", range(7))
@pytest.mark.parametrize("y", ["a[1]", "b[1]"])
def test_of_cases(x, y):
    pass

def test_alone():
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("x", range(5))
def test_sampled(x):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cases", "sampled"),
    [
        ("", [(y, x) for y in "ab" for x in range(7)], [0, 2, 4]),
        ("--one-in 1 --all-cases", [(y, x) for y in "ab" for x in range(7)], range(5)),
        ("--one-in 4", [("a", 0), ("a", 4), ("b", 1), ("b", 5)], [0, 4]),
        # Cases that -k leaves out are not counted.
        ("--one-in 4 -k not(a[1])", [("b", 0), ("b", 4)], [0, 4]),
        ("--one-in 100 --all-cases", [("a", 0)], [0]),
    ],
)
def test_every_test_has_its_first_case(tmp_path, options, cases, sampled) -> None:
    status, output = run(tmp_path, CASES, *options.split())
    assert status == 0, output
    assert passed(output) == [
        *(f"of_cases[{y}[1]-{x}]" for y, x in cases),
        "alone",
        *(f"sampled[{x}]" for x in sampled),
    ]
    left_out = 14 + 5 - len(cases) - len(sampled)
    assert (f"{left_out} deselected" in output) == (left_out > 0)


def test_a_chosen_case_runs(tmp_path: pathlib.Path) -> None:
    status, output = run(tmp_path, CASES, "-k", "test_sampled and 1]")
    assert (status, passed(output)) == (0, ["sampled[1]"]), output


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_count_below_one_is_refused(tmp_path: pathlib.Path, count: str) -> None:
    status, output = run(tmp_path, CASES, f"--one-in={count}")
    assert status == 4
    assert f"--one-in is {count}, expected at least 1" in output


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            ["--short"],
            [f"of_cases[{y}[1]-{x}]" for y in "ab" for x in range(7) if f"{y}{x}" not in "a1 b6"]
            + ["alone", "sampled[0]", "sampled[4]"],
        ),
        (["--share=1/2"], ["of_cases[a[1]-1]"]),
        (["--share=2/2"], ["of_cases[b[1]-6]", "sampled[2]"]),
        # Whoever names tests gets all of them.
        (["--short", "-k", "a[1]-1 or b[1]-3"], ["of_cases[a[1]-1]", "of_cases[b[1]-3]"]),
    ],
    ids=["short", "first", "second", "named"],
)
def test_parts_of_the_suite(tmp_path: pathlib.Path, options: list[str], names: list[str]) -> None:
    status, output = run(tmp_path, CASES, *options)
    assert (status, passed(output)) == (0, names), output


def test_a_wrong_part_is_refused(tmp_path: pathlib.Path) -> None:
    status, output = run(tmp_path, CASES, "--share=3/2")
    assert (status, passed(output)) == (4, [])
    assert "--share is 3/2, expected 1/2 to 2/2" in output
    for text in ("0/2", "1/10", "1", "", "1/2/2"):
        with pytest.raises(pytest.UsageError, match=f"--share is {text}, expected 1/2 to 2/2"):
            case_sample.numbered_share(text, 2)


def test_the_shares_of_this_suite_overlap_nowhere() -> None:
    names = [name for share in case_sample.read_shares(ROOT / case_sample.SHARES) for name in share]
    assert [x for x, count in collections.Counter(names).items() if count > 1] == []
