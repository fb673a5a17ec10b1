"""Hooks of the suite: tests that hang fail with all stacks, samples leave out cases of a test."""

import pathlib
import re
import subprocess
import sys

import pytest
from processes import child_environment

pytestmark = pytest.mark.slow

TESTS_FOLDER = pathlib.Path(__file__).resolve().parents[1]
CONFIG = TESTS_FOLDER.parent / "pyproject.toml"

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


def run(folder: pathlib.Path, tests: str, *options: str) -> tuple[int, str]:
    """Exit status and output of pytest on a file, with the project's configuration."""
    (folder / "test_sample.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", f"--config-file={CONFIG}", f"--rootdir={folder}"]
    command += ["-p", "time_limit", "-p", "no:cacheprovider", *options, "test_sample.py"]
    # These plugins, which the sample does not use, are 0.9 of the 1.1 s in which pytest starts.
    command += ["-p", "no:hypothesispytest", "-p", "no:anyio"]
    result = subprocess.run(
        command,
        cwd=folder,
        # A process of pytest-xdist that starts another pytest must not pass on that it is one.
        env=child_environment(TESTS_FOLDER / "support", without="PYTEST_"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return result.returncode, result.stdout


def test_there_is_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("time_limit")) <= 600


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
        assert "FAILED test_sample.py::test_that_hangs" in output
        assert "1 failed, 1 passed" in output


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
    status, output = run(tmp_path, CASES, "-p", "case_sample", "-v", *options.split())
    assert status == 0, output
    names = [x.split(" ")[0].partition("::")[2] for x in output.splitlines() if "::" in x]
    assert names == [
        *(f"test_of_cases[{y}[1]-{x}]" for y, x in cases),
        "test_alone",
        *(f"test_sampled[{x}]" for x in sampled),
    ]
    left_out = 14 + 5 - len(cases) - len(sampled)
    assert (f"{left_out} deselected" in output) == (left_out > 0)


def test_a_chosen_case_runs(tmp_path: pathlib.Path) -> None:
    status, output = run(tmp_path, CASES, "-p", "case_sample", "-v", "-k", "test_sampled and 1]")
    assert status == 0, output
    assert "test_sampled[1] PASSED" in output


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_count_below_one_is_refused(tmp_path: pathlib.Path, count: str) -> None:
    status, output = run(tmp_path, CASES, "-p", "case_sample", f"--one-in={count}")
    assert status == 4
    assert f"--one-in is {count}, expected at least 1" in output
