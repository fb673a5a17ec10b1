"""`make serve` ends at a signal with status 0, and leaves no process and no folder."""

import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time

import pytest
from processes import ROOT, child_environment, heeding_interrupts, processes_with, until

MARK = "IKBO_SERVING_END"
COMMAND = (sys.executable, "-m", "examples.serving", "serve", "--source", "tiny", "--port", "0")

pytestmark = [pytest.mark.time_limit(300), pytest.mark.slow]


def commands(mark: str) -> str:
    """The commands of the service's processes."""
    return "\n".join(processes_with(MARK, mark).values())


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, "Ray starts"),
        (signal.SIGINT, "a replica starts"),
        (signal.SIGTERM, "serving"),
    ],
)
def test_a_signal_ends_the_service_at_any_moment(tmp_path, number, moment):
    mark = secrets.token_hex(8)
    environment = child_environment(ROOT, **{MARK: mark, "JAX_PLATFORMS": "cpu"})
    command = heeding_interrupts([*COMMAND, "--cache", str(tmp_path / "cache")])
    out = tmp_path / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        assert until(
            {
                "Ray starts": lambda: "gcs_server" in commands(mark),
                "a replica starts": lambda: "ray::ServeReplica" in commands(mark),
                "serving": lambda: "serving at" in out.read_text(),
            }[moment],
            120,
        )
        (folder,) = set(re.findall(r"/tmp/ray-\w+", commands(mark)))
        process.send_signal(number)
        # Who waits in vain sends another one.
        time.sleep(1)
        process.send_signal(number)
        assert process.wait(timeout=60) == 0, out.read_text()
        assert until(lambda: not processes_with(MARK, mark), 20)
        assert not pathlib.Path(folder).exists()
    finally:
        for pid in processes_with(MARK, mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
    assert "Traceback" not in out.read_text()
