"""The command `ikbo-jax tune`: arguments, messages and exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

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
ATTENTION = ["tune", "attention", "--b", "24", "--u", "5", "--t", "4", "--s", "32", "--h", "64"]
GDPA = ["tune", "gdpa", "--b", "24", "--s", "32", "--n", "4", "--k", "2", "--h", "64"]
GDPA_PROBLEM = GdpaProblem(
    *(24, 24, 24 * 100, 24 * 32, 4, 2, 64, "bfloat16"), ("gelu",), None, False, 100, 32
)


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
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tune sets it: restore it
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: "this is a toaster")
    assert cli.main(TUNE) == cli.UNUSABLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "ikbo-jax tune: this is a toaster\n"


@pytest.fixture
def tuned_by(monkeypatch):
    """Puts a stand-in in a tuner's place; returns the list of problems and limits it is asked."""

    def replace(name, *, line="XLA: 1 ms", ms=0.25, fraction=0.5):
        asked = []

        def tune(problem, *, progress, limit):
            asked.append((problem, limit))
            progress(1, 2, line)
            return {"ms": ms, "fraction": fraction}

        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # tune sets it: restore it
        monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
        monkeypatch.setattr(autotune, name, tune)
        return asked

    return replace


def test_tune_passes_the_problem_on_and_prints_the_result(tuned_by, capsys):
    asked = tuned_by("tune_linear_compression", line="tile one", ms=0.5, fraction=0.75)
    assert cli.main([*TUNE, "--dtype", "float16", "--limit", "3"]) == cli.OK
    assert cli.main(TUNE) == cli.OK
    problem = LinearCompressionProblem((5, 24), (11, 7), 9, 8, "float16")
    assert asked == [(problem, 3), (dataclasses.replace(problem, dtype="bfloat16"), None)]
    out = capsys.readouterr().out
    assert "tile one" in out
    assert "0.5 ms, 0.750 of the" in out.splitlines()[-1]


@pytest.mark.parametrize("error", [OSError("the cache is read-only"), RuntimeError("no XLA")])
def test_tune_reports_what_stopped_it(monkeypatch, capsys, error):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def tune(problem, *, progress, limit):
        raise error

    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(autotune, "tune_linear_compression", tune)
    assert cli.main(TUNE) == cli.UNUSABLE
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--b", "--u"])
def test_tune_needs_every_size(capsys, missing):
    at = TUNE.index(missing)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(TUNE[:at] + TUNE[at + 2 :])
    assert exit_info.value.code == cli.UNUSABLE


def test_tune_attention_passes_the_sizes_on(tuned_by, capsys):
    found = tuned_by("tune_attention")
    heads = ["--n", "4", "--k", "2", "--dtype", "float16", "--limit", "3"]
    assert cli.main([*ATTENTION, *heads]) == cli.OK
    assert found == [(AttentionProblem(24, 5, 4, 32, 4, 2, 64, "float16"), 3)]
    assert "0.25 ms, 0.500 of the 8192x8192x8192 bfloat16 matmul" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["attention-backward", *ATTENTION[2:], "--n", "4", "--k", "2"],
            AttentionBackwardProblem(24, 5, 4, 32, 4, 2, 64, "bfloat16"),
        ),
        (
            ["linear-compression-backward", *TUNE[2:]],
            LinearCompressionBackwardProblem((5, 24), (11, 7), 9, 8, "bfloat16"),
        ),
        (["gdpa-backward", *GDPA[2:], "--t", "100"], GdpaBackwardProblem.of(GDPA_PROBLEM)),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_tune_passes_the_sizes_of_a_gradient_on(words, problem, tuned_by):
    found = tuned_by(f"tune_{words[0].replace('-', '_')}")
    assert cli.main(["tune", *words]) == cli.OK
    assert found == [(problem, None)]


def test_tune_attention_off_hopper_and_with_wrong_heads(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: "this is a toaster")
    assert cli.main([*ATTENTION, "--n", "4", "--k", "2"]) == cli.UNUSABLE
    assert "this is a toaster" in capsys.readouterr().err
    assert cli.main([*ATTENTION, "--n", "3", "--k", "2"]) == cli.UNUSABLE
    assert "--q-heads 3 is not a multiple of --kv-heads 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--t", "100"], {}),
        (
            ["--t", "100", "--q-mean", "50", "--kv-mean", "16", "--dtype", "float16"],
            {"q_rows": 24 * 50, "kv_rows": 24 * 16, "dtype": "float16"},
        ),
        (
            ["--seeds", "8", "--batch-kv", "3", "--activation", "silu", "--approx", "tanh"],
            {
                "q_rows": 24 * 8,
                "batch_kv": 3,
                "kv_rows": 3 * 32,
                "broadcast_q": True,
                "max_seqlen_q": None,
                "activations": ("silu",),
                "approx": "tanh",
            },
        ),
    ],
    ids=["full", "half", "pma"],
)
def test_tune_gdpa_passes_the_sizes_on(arguments, changes, tuned_by, capsys):
    found = tuned_by("tune_gdpa")
    assert cli.main([*GDPA, *arguments, "--limit", "3"]) == cli.OK
    assert found == [(dataclasses.replace(GDPA_PROBLEM, **changes), 3)]
    out = capsys.readouterr().out
    assert "XLA: 1 ms" in out
    assert "0.25 ms, 0.500 of the 8192x8192x8192 bfloat16 matmul" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--t", "100", "--k", "3"], "--q-heads 4 is not a multiple of --kv-heads 3"),
        (["--t", "100", "--q-mean", "101"], "--q-mean 101 is more than --q-len 100"),
        (["--t", "100", "--kv-mean", "33"], "--kv-mean 33 is more than --kv-len 32"),
        (["--seeds", "8", "--q-mean", "5"], "--seeds 8 excludes --q-mean, but it is 5"),
        (["--t", "100", "--activation", "elu"], "unknown activation 'elu'"),
        (["--t", "100", "--approx", "tanh"], "approx='tanh' applies to gelu_tanh and silu"),
        (["--t", "100", "--batch-kv", "101", "--kv-mean", "40"], "--kv-mean 40 is more than"),
        (["--t", "100", "--h", "80"], "64, 96, 128, 256, but H=80"),
        (["--t", "100", "--seeds", "8"], "not allowed with"),
        ([], "one of the arguments --q-len/--t --seeds is required"),
    ],
)
def test_tune_gdpa_says_what_does_not_fit(arguments, reason, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    try:
        status = cli.main([*GDPA, *arguments])
    except SystemExit as exit_info:
        status = exit_info.code
    assert status == cli.UNUSABLE
    assert reason in capsys.readouterr().err
