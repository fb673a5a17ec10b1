"""`tools/gpu_tests.py` with tests that kill or spoil their process, as a faulty kernel does."""

import pathlib
import signal

import pytest
from processes import ROOT, until

from tools import gpu_tests

# Each session starts several processes of pytest.
pytestmark = pytest.mark.slow

CONFTEST = """
import gpu_session
import time_limit

spoilt = []
gpu_session.device_answers = lambda: not spoilt
gpu_session.fill_free_memory = lambda: None

def pytest_addoption(parser):
    time_limit.pytest_addoption(parser)
    gpu_session.pytest_addoption(parser)

def pytest_configure(config):
    time_limit.pytest_configure(config)
    gpu_session.pytest_configure(config)
"""

FAULTY = """
import os
import signal
import pytest
from conftest import spoilt

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(4))
def test_before(n):
    assert not spoilt

def test_that_spoils_the_device():
    spoilt.append(True)
    assert False, "illegal instruction"

def test_that_spoils_the_device_and_passes():
    spoilt.append(True)

def test_that_kills_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("n", range(8))
def test_after(n):
    assert not spoilt
"""

SOUND = """
import os
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.sanitizer
@pytest.mark.time_limit(200)
def test_sanitizer():
    pass

def test_device():
    assert os.environ["CUDA_VISIBLE_DEVICES"] in ("3", "5")
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "cuda_async"

@pytest.mark.time_limit(100)
def test_long():
    pass

def test_skipped():
    pytest.skip("needs CuPy")
"""

ENDLESS = """
import time
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.time_limit(300)
def test_endless():
    time.sleep(600)

@pytest.mark.parametrize("n", range(3))
def test_waits(n):
    pass
"""

PARENT = """
import os
import pathlib
import signal
import time
import pytest

pytestmark = pytest.mark.gpu

def test_passes():
    pass

@pytest.mark.time_limit(0)
def test_that_kills_pytest_once():
    flag = pathlib.Path(__file__).with_suffix(".killed")
    if not flag.exists():
        flag.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Writes files and runs the command; returns status, output and the folder of the logs."""
    # A process of pytest-xdist that starts another pytest must not pass on that it is one.
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    # Their plugins, which these tests do not use, are 0.9 of the 1.1 s in which pytest starts.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def run_them(files: dict[str, str], *options: str, workers: int = 1, gpus=("3",)):
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        log = tmp_path / "log"
        status = gpu_tests.main(
            [
                *("--folder", str(tmp_path), "--root", str(tmp_path), "--log", str(log)),
                *("--workers", str(workers), "--gpus", *gpus, *options),
                *(f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={tmp_path}"),
            ]
        )
        return status, capfd.readouterr().out, log

    return run_them


def lines(output: str, word: str) -> list[str]:
    """What follows `word` in the summary, without reasons."""
    summary = output[output.index("longest:") :]
    found = [line for line in summary.splitlines() if line.startswith(word + " ")]
    return sorted(line.removeprefix(word + " ").split(":  ")[0].split(": ")[0] for line in found)


def test_only_guilty_tests_fail(run):
    status, output, log = run({"test_faulty.py": FAULTY, "test_sound.py": SOUND}, gpus=("3", "5"))
    assert status == 1
    assert lines(output, "FAILED") == [
        "test_faulty.py::test_that_kills_its_process",
        "test_faulty.py::test_that_spoils_the_device",
        "test_faulty.py::test_that_spoils_the_device_and_passes",
    ], output
    assert lines(output, "NOT RUN") == []
    assert lines(output, "SKIPPED") == ["test_sound.py::test_skipped"]
    assert "15 passed, 3 failed, 0 files not collected, 1 skipped, 0 not run, of 19" in output
    # Failures are printed and kept as they come, with their texts.
    first = output[: output.index("longest:")]
    assert "FAILED test_faulty.py::test_that_spoils_the_device: AssertionError: illegal" in first
    failures = (log / "failures.log").read_text()
    assert failures.count("==== test_faulty.py::test_that_kills_its_process\n") == 1
    assert "crashed while running 'test_faulty.py::test_that_spoils_the_device_and" in failures


def test_long_tests_start_first_and_the_sanitizer_last(run):
    files = {"test_faulty.py": FAULTY, "test_sound.py": SOUND}
    status, output, log = run(files, "--files", "soun", "-k", "long or device or sanitizer")
    assert status == 0, output
    assert "3 passed" in output
    journal = (log / "journal.jsonl").read_text()
    order = ["test_long", "test_device", "test_sanitizer"]
    places = [journal.index(f'"started": "test_sound.py::{name}"') for name in order]
    assert places == sorted(places)


def once_a_test_runs(monkeypatch, do) -> None:
    """Calls `do` with the session as soon as a test has started."""

    def progress(session):
        if session.state.started:
            do(session)
        return ""

    monkeypatch.setattr(gpu_tests, "PROGRESS_S", 0.0)
    monkeypatch.setattr(gpu_tests.Session, "_progress", progress)


def running(group: int) -> list[str]:
    """The processes of a group that have not ended."""
    stats = (path.read_text() for path in pathlib.Path("/proc").glob("[0-9]*/stat"))
    fields = (stat[stat.rindex(")") + 2 :].split() for stat in stats)
    return [state for state, _, pgrp, *_ in fields if int(pgrp) == group and state != "Z"]


def test_what_did_not_run_in_time_is_named(run, monkeypatch):
    once_a_test_runs(monkeypatch, lambda session: setattr(session, "end", 0.0))
    status, output, _ = run({"test_endless.py": ENDLESS}, "--seconds", "1000")
    assert status == 1
    assert lines(output, "NOT RUN") == [
        "test_endless.py::test_endless (did not finish)",
        *(f"test_endless.py::test_waits[{n}]" for n in range(3)),
    ], output
    status, output, _ = run({}, "--left", "-k", "waits")
    assert status == 0, output
    assert "3 passed" in output
    assert run({}, "--left")[0] == 2  # nothing is left


def test_no_test_starts_late(run):
    status, output, _ = run({"test_sound.py": SOUND}, "--until=0")
    assert status == 1
    names = ("device", "long", "sanitizer", "skipped")
    assert lines(output, "NOT RUN") == [f"test_sound.py::test_{name}" for name in names], output


def test_a_signal_ends_everything_and_says_what_ran(run, monkeypatch):
    groups = []

    def end(session):
        groups.append(session.process.pid)
        signal.raise_signal(signal.SIGTERM)

    once_a_test_runs(monkeypatch, end)
    status, output, _ = run({"test_endless.py": ENDLESS})
    assert status == gpu_tests.INTERRUPTED
    assert "NOT RUN test_endless.py::test_endless (did not finish)" in output
    # Workers of pytest-xdist end, too, but nobody waits for them.
    assert until(lambda: not running(groups[0]), 60), running(groups[0])


def test_a_new_session_runs_what_is_left_if_pytest_ends(run):
    status, output, _ = run({"test_parent.py": PARENT})
    assert status == 0, output
    assert "pytest ended early; " in output
    assert "2 passed, 0 failed" in output


def test_nothing_to_run_is_no_success(run):
    assert run({"test_sound.py": SOUND}, "--files", "gdpa")[0] == 2
    assert not gpu_tests.State().is_complete


def test_a_file_that_cannot_be_imported_is_named(run):
    files = {"test_sound.py": SOUND, "test_broken.py": "import no_such_module\n"}
    status, output, _ = run(files)
    assert status == 1
    assert lines(output, "FAILED") == ["test_broken.py"], output
    assert "no_such_module" in output


def test_gpus_and_workers_of_this_machine(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,7")
    assert gpu_tests.gpus_here() == ["2", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_tests.gpus_here() == []
    monkeypatch.setattr(gpu_tests.os, "sched_getaffinity", lambda pid: set(range(32)))
    # Without nvidia-smi, which would tell how much memory the processes of a GPU share.
    monkeypatch.setenv("PATH", "")
    assert [gpu_tests.workers_here(n) for n in (1, 2, 8, 32)] == [14, 14, 2, 1]
