"""A test that hangs fails, and the output says where every thread was."""

from __future__ import annotations

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
def test_a_hang_fails_with_the_stack_of_every_thread(
    options: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
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
