"""The command `ikbo-jax tune`: arguments, messages and exit statuses."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest
from processes import heeding_interrupts

from ikbo_jax import cli
from ikbo_jax.autotuner import autotune
from ikbo_jax.ops import dispatch
from ikbo_jax.problems import (
    AttentionBackwardProblem,
    AttentionProblem,
    GdpaBackwardProblem,
    GdpaProblem,
    LinearCompressionBackwardProblem,
    LinearCompressionProblem,
)

SIZES = ["--m", "9", "--n", "8", "--k-cand", "7", "--k-user", "11"]
TUNE = ["tune", "linear-compression", "--b", "24", "--u", "5", *SIZES]
HEADS = ["--n", "4", "--k", "2", "--h", "64"]
ATTENTION = ["tune", "attention", "--b", "24", "--u", "5", "--t", "4", "--s", "32", *HEADS]
GDPA = ["tune", "gdpa", "--b", "24", "--s", "32", *HEADS]
LINEAR_PROBLEM = LinearCompressionProblem((5, 24), (11, 7), 9, 8, "bfloat16")
GDPA_PROBLEM = GdpaProblem(
    *(24, 24, 24 * 100, 24 * 32, 4, 2, 64, "bfloat16"), ("gelu",), None, False, 100, 32
)


@pytest.fixture(autouse=True)
def _on_a_hopper_machine(seems_hopper, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tune sets it: restore it


DEMO_SIZES = ("--candidates", "--users", "--m", "--n", "--k-cand", "--k-user")


@pytest.mark.parametrize(
    ("value", "reason", "of_seed"),
    [
        ("abc", "'abc' is not a whole number", "'abc' is not a whole number"),
        ("1.5", "'1.5' is not a whole number", "'1.5' is not a whole number"),
        ("", "'' is not a whole number", "'' is not a whole number"),
        ("-3", "-3 is not a positive number", "-3 is negative"),
        ("0", "0 is not a positive number", None),
        ("3000000000", "3000000000 is more than 2147483647", None),
    ],
)
@pytest.mark.parametrize(
    ("command", "flag"), [*((["demo"], flag) for flag in (*DEMO_SIZES, "--seed")), (TUNE, "--m")]
)
def test_a_number_that_is_none_is_named(capsys, command, flag, value, reason, of_seed):
    reason = of_seed if flag == "--seed" else reason
    if reason is not None:
        with pytest.raises(SystemExit) as exit_info:
            cli.main([*command, f"{flag}={value}"])
        assert exit_info.value.code == cli.UNUSABLE
        err = capsys.readouterr().err
        assert re.search(rf"argument [-/\w]*{flag}[-/\w]*: {re.escape(reason)}", err)
        assert "invalid" not in err


TUNING = (autotune, "tune")
#: JAX is imported then.
LOOKING = (dispatch, "hopper_unavailable_reason")


@pytest.mark.parametrize(
    ("place", "error", "status", "sentence"),
    [
        (TUNING, KeyboardInterrupt("interrupted; best: 1"), 130, ": interrupted; best: 1"),
        (TUNING, KeyboardInterrupt(), 130, ": interrupted"),
        (LOOKING, KeyboardInterrupt(), 130, ": interrupted"),
        (TUNING, OSError("the cache is read-only"), cli.UNUSABLE, " tune: the cache is read-only"),
        (TUNING, RuntimeError("no XLA"), cli.UNUSABLE, " tune: no XLA"),
    ],
)
def test_what_stops_a_tuning_is_told_in_a_sentence(
    monkeypatch, capsys, place, error, status, sentence
):
    monkeypatch.setattr(*place, mock.Mock(side_effect=error))
    assert cli.main(TUNE) == status
    assert capsys.readouterr().err == f"ikbo-jax{sentence}\n"


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
        heeding_interrupts(command),
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


def test_tune_off_hopper_exits_2_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: "this is a toaster")
    assert cli.main(TUNE) == cli.UNUSABLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "ikbo-jax tune: this is a toaster\n"


HALF = ["--q-mean", "50", "--kv-mean", "16", "--dtype", "float16"]
PMA = ["--seeds", "8", "--batch-kv", "3", "--activation", "silu", "--approx", "tanh"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (TUNE, LINEAR_PROBLEM),
        ([*TUNE, "--dtype", "float16"], dataclasses.replace(LINEAR_PROBLEM, dtype="float16")),
        (
            ["tune", "linear-compression-backward", *TUNE[2:]],
            LinearCompressionBackwardProblem.of(LINEAR_PROBLEM),
        ),
        ([*ATTENTION, "--dtype", "float16"], AttentionProblem(24, 5, 4, 32, 4, 2, 64, "float16")),
        (
            ["tune", "attention-backward", *ATTENTION[2:]],
            AttentionBackwardProblem(24, 5, 4, 32, 4, 2, 64, "bfloat16"),
        ),
        ([*GDPA, "--t", "100"], GDPA_PROBLEM),
        (
            [*GDPA, "--t", "100", *HALF],
            dataclasses.replace(GDPA_PROBLEM, q_rows=24 * 50, kv_rows=24 * 16, dtype="float16"),
        ),
        (
            [*GDPA, *PMA],
            GdpaProblem(
                *(24, 3, 24 * 8, 3 * 32, 4, 2, 64, "bfloat16"), ("silu",), "tanh", True, None, 32
            ),
        ),
        (["tune", "gdpa-backward", *GDPA[2:], "--t", "100"], GdpaBackwardProblem.of(GDPA_PROBLEM)),
    ],
    ids=lambda x: x.op if hasattr(x, "op") else "",
)
@pytest.mark.parametrize("limit", [None, 3])
def test_tune_passes_the_problem_on_and_prints_the_result(
    words, problem, limit, monkeypatch, capsys
):
    asked = []

    def tune(problem, *, progress, limit):
        asked.append((problem, limit))
        progress(1, 2, "tile one")
        return {"ms": 0.5, "fraction": 0.75}

    monkeypatch.setattr(autotune, "tune", tune)
    assert cli.main([*words, *([] if limit is None else [f"--limit={limit}"])]) == cli.OK
    assert asked == [(problem, limit)]
    out = capsys.readouterr().out
    assert "tile one" in out
    assert "0.5 ms, 0.750 of the 8192x8192x8192 bfloat16 matmul" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (TUNE[:2] + TUNE[4:], "arguments are required"),  # without --b
        (TUNE[:4] + TUNE[6:], "arguments are required"),  # without --u
        ([*ATTENTION, "--n", "3"], "--q-heads 3 is not a multiple of --kv-heads 2"),
        ([*GDPA, "--t", "100", "--k", "3"], "--q-heads 4 is not a multiple of --kv-heads 3"),
        ([*GDPA, "--t", "100", "--q-mean", "101"], "--q-mean 101 is more than --q-len 100"),
        ([*GDPA, "--t", "100", "--kv-mean", "33"], "--kv-mean 33 is more than --kv-len 32"),
        ([*GDPA, "--seeds", "8", "--q-mean", "5"], "--seeds 8 excludes --q-mean, but it is 5"),
        ([*GDPA, "--t", "100", "--activation", "elu"], "unknown activation 'elu'"),
        ([*GDPA, "--t", "100", "--approx", "tanh"], "approx='tanh' applies to gelu_tanh and silu"),
        ([*GDPA, "--t=100", "--batch-kv=101", "--kv-mean=40"], "--kv-mean 40 is more than"),
        ([*GDPA, "--t", "100", "--h", "80"], "64, 96, 128, 256, but H=80"),
        ([*GDPA, "--t", "100", "--seeds", "8"], "not allowed with"),
        (GDPA, "one of the arguments --q-len/--t --seeds is required"),
    ],
)
def test_tune_says_what_does_not_fit(arguments, reason, capsys):
    try:
        status = cli.main(arguments)
    except SystemExit as exit_info:
        status = exit_info.code
    assert status == cli.UNUSABLE
    assert reason in capsys.readouterr().err
