"""The command `ikbo-jax tune`: arguments, messages and exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from ikbo_jax import cli
from ikbo_jax.autotuner import autotune
from ikbo_jax.ops import dispatch

SIZES = ["--m", "9", "--n", "8", "--k-cand", "7", "--k-user", "11"]
TUNE = ["tune", "linear-compression", "--b", "24", "--u", "5", *SIZES]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("abc", "'abc' is not a whole number"),
        ("1.5", "'1.5' is not a whole number"),
        ("", "'' is not a whole number"),
        ("-3", "-3 is not a positive number"),
        ("3000000000", "3000000000 is more than 2147483647"),
    ],
)
@pytest.mark.parametrize("command", ["demo", "tune"])
def test_a_size_that_is_none_is_named(capsys, command, value, reason):
    arguments = {"demo": ["demo"], "tune": TUNE}[command]
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*arguments, f"--m={value}"])
    assert exit_info.value.code == cli.UNUSABLE
    err = capsys.readouterr().err
    assert f"argument --m: {reason}" in err
    assert "_positive" not in err


@pytest.mark.parametrize(
    ("stop", "sentence"),
    [
        (KeyboardInterrupt("interrupted; so far nothing"), "interrupted; so far nothing"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_interrupted_tuning_exits_130_with_a_sentence(monkeypatch, capsys, stop, sentence):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tune sets it: restore it

    def tune(problem, *, progress, limit):
        raise stop

    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(autotune, "tune_linear_compression", tune)
    assert cli.main(TUNE) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err == f"ikbo-jax: {sentence}\n"


def test_interruption_while_jax_is_imported_has_no_traceback(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", interrupted)
    assert cli.main(TUNE) == cli.INTERRUPTED
    assert capsys.readouterr().err == "ikbo-jax: interrupted\n"


#: `ikbo-jax tune` on a machine that seems to have a Hopper GPU. The worker's windows of the last
#: candidate beat the table's choice; then it hangs.
INTERRUPTED = """
import sys
from ikbo_jax import cli
from ikbo_jax.ops import dispatch
from ikbo_jax.autotuner import session

WORKER = '''
import json, sys, time
def say(**event):
    print("ikbo-autotune " + json.dumps(event), flush=True)
every = json.loads(json.loads(sys.stdin.readline())["task"])["contenders"]
for line in sys.stdin:
    task = json.loads(line)
    ms = [2.0 - every.index(candidate) / 10 for candidate in task["contenders"]]
    for _ in range(2):
        say(event="matmul", ms=1.5)
        for candidate, x in zip(task["contenders"], ms):
            say(event="sample", contender=every.index(candidate), ms=x)
    if len(ms) > 1:
        print("hanging", file=sys.stderr)
        say(event="checked", contender=1)
        time.sleep(100)
    say(event="answer", answer={"matmul_ms": [1.5], "results": [{"ms": ms}], "device": "a fake",
        "compute_capability": "9.0", "jax": "0"})
'''
session.COMMAND = (sys.executable, "-S", "-c", WORKER)
dispatch.hopper_unavailable_reason = lambda: None
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_tuning_with_what_was_measured_written(tmp_path):
    command = [sys.executable, "-u", "-c", INTERRUPTED, *TUNE, "--limit", "3"]
    env = os.environ | {"IKBO_JAX_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "checked" in line:
            break
    # As a terminal does it: to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (sentence,) = err.splitlines()
    assert sentence.startswith("ikbo-jax: interrupted; so far best: block_m")
    assert sentence.endswith(f"written to {tmp_path / 'sm90.json'}")
    (row,) = json.loads((tmp_path / "sm90.json").read_text())["rows"]
    assert row["ms"] == 1.7
    assert any("XLA: 2 ms" in line for line in lines)
