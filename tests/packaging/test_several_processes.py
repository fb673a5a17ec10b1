"""The example of several processes: it runs, its processes agree, a failing one ends the others."""

import pathlib
import re
import subprocess
import sys
import time

import pytest
from processes import ROOT, child_environment, heeding_interrupts, is_alive, until

from examples import several_processes as example

COMMAND = [sys.executable, str(ROOT / "examples" / "several_processes.py")]
#: A process that writes its id to the file that it is given, and then sleeps.
SLEEP = (
    "import os, pathlib, sys, time; path = pathlib.Path(sys.argv[1]); "
    "path.with_suffix('.new').write_text(str(os.getpid())); path.with_suffix('.new').rename(path); "
    "time.sleep(600)"
)
#: A process that fails as soon as the other one has written its id.
FAIL = (
    "import pathlib, sys, time\n"
    "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.02)\n"
    "sys.exit(3)"
)


def environment() -> dict[str, str]:
    return child_environment(ROOT, without="JAX_", JAX_PLATFORMS="cpu")


@pytest.mark.time_limit(260)
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        pytest.param((), "{'device': 2} of 2 cpu devices", id="one device each"),
        pytest.param(
            ("--devices", "2", "--two-level"),
            "{'host': 2, 'device': 2} of 4 cpu devices",
            id="two devices each, mesh of two levels",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes(options, mesh):
    done = subprocess.run(
        heeding_interrupts([*COMMAND, "--time-limit", "200", "--steps", "3", *options]),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # What every process says: subjects and what it found.
    found: dict[int, dict[str, str]] = {}
    # Gloo writes to the same output, and the ends of its lines apart from the lines.
    line = re.compile(r"\[(\d+)\] ([^:\[\]\n]*): (.*)$", re.MULTILINE)
    for number, subject, text in line.findall(done.stdout):
        found.setdefault(int(number), {})[subject] = text
    assert sorted(found) == [0, 1]
    # No communication in the forward pass; in a step, the gradients of all parameters, once each.
    assert found[0]["collectives of the forward pass"] == "none"
    parameters = found[0]["parameters"]
    assert found[0]["collectives of a training step"] == f"all-reduce of {parameters}"
    assert re.fullmatch(r"[1-9]\d* arrays, [1-9][\d,]* bytes", parameters)
    # One device's result is the same.
    assert float(found[0]["largest difference from one device's result"]) < 1e-4
    for subject in ("losses", "digest of the trained parameters"):
        assert len({found[number][subject] for number in found}) == 1, found
    losses = [float(loss) for loss in found[0]["losses"].split()]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert found[0]["mesh"] == f"{mesh}, 2 processes"


def wait_for(path: pathlib.Path) -> int:
    assert until(path.exists, 30)
    return int(path.read_text())


@pytest.mark.parametrize(
    ("second", "time_limit", "said"),
    [
        pytest.param(FAIL, 60, "process 1 failed with status 3\n", id="failure"),
        pytest.param(SLEEP, 2, "not finished after 2 seconds\n", id="time limit"),
    ],
)
def test_a_failure_or_the_time_limit_ends_all(second, time_limit, said, tmp_path, capfd):
    pids = [tmp_path / name for name in ("first", "second")]
    codes = [SLEEP, second]
    commands = [
        [sys.executable, "-c", code, str(pid), str(pids[0])]
        for code, pid in zip(codes, pids, strict=True)
    ]
    start = time.monotonic()
    assert example.run_together(commands, time_limit=time_limit) == 1
    assert time.monotonic() - start < 30
    assert capfd.readouterr().out == said
    sleeping = [pid for code, pid in zip(codes, pids, strict=True) if code is SLEEP]
    assert not any(is_alive(wait_for(pid)) for pid in sleeping)


def test_a_process_ends_with_the_command_that_started_it(tmp_path):
    """Its standard input ends then, however the command ended."""
    pid = tmp_path / "pid"
    code = f"from examples import several_processes as x; x.end_with_stdin(); {SLEEP}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(pid)], stdin=subprocess.PIPE, env=environment()
    )
    try:
        wait_for(pid)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=30) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--coordinator", "127.0.0.1:1"], "--coordinator and --process-id belong together"),
        (["--process-id", "0"], "--coordinator and --process-id belong together"),
        (["--coordinator", "a:1", "--process-id", "0"], "--coordinator needs --processes"),
        (["--devices", "0"], "argument --devices: 0 is not a positive number"),
        (["--processes", "0"], "argument --processes: 0 is not a positive number"),
    ],
)
def test_options_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        example.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_collectives_are_found_with_what_they_move():
    class Compiled:
        def as_text(self) -> str:
            return """
  %all-reduce.1 = (f32[4,8]{1,0}, f32[]) all-reduce(%a, %b), channel_id=1
  ROOT %all-gather-start = bf16[16]{0} all-gather-start(%c), dimensions={0}
  %all-gather-done = bf16[16]{0} all-gather-done(%all-gather-start)
  %all-reduce.2 = f32[2]{0:T(128)} all-reduce(%all-reduce.1), channel_id=2
"""

    assert example.collectives(Compiled()) == (
        "all-reduce of 3 arrays, 140 bytes, all-gather of 1 arrays, 32 bytes"
    )
