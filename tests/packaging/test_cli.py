"""The command `ikbo-jax`: what it prints, and its exit status."""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax import _timing, cases, cli, cli_demo, demo, demo_attention, demo_ranking, terminal
from ikbo_jax._timing import programs, sustained_ms
from ikbo_jax.ops import dispatch
from ikbo_jax.problems import LinearCompressionConfig

SIZES = ["--m", "9", "--n", "8", "--k-cand", "7", "--k-user", "11"]
TINY = ["demo", "--candidates", "24", "--users", "5", *SIZES, "--layers", "1", "--explain"]
TINY_SIZES = demo_ranking.sizes_of(
    candidates=24, users=5, layers=1, compressed=9, width=8, cand_tokens=7, user_rows=11
)
RUN_EVERYWHERE = ["1  materialised", "1b aligned K", "2  decomposed"]
KERNELS = ["3 fused", "4 single launch"]
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The demo keeps what it compiles; not in the cache of whoever runs the tests."""
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path / "cache"))


RUN = {demo: demo.run, demo_attention: demo_attention.run}


@functools.cache
def report_of(module, sizes, seed):
    """What a part of the demo reports, computed once for the tests that leave it as it is."""
    return programs.run_parts([RUN[module](sizes, seed)])[0]


@pytest.fixture
def untimed(monkeypatch):
    """Timing and the network are the slow parts of the demo; most tests ask for neither."""
    monkeypatch.setattr(_timing, "sustained_ms", lambda fn, *args, **kwargs: [1.0])
    monkeypatch.setattr(demo_ranking, "run", lambda *args, **_: as_part(network_report(*args)))


@pytest.fixture
def attention_as_it_is(untimed, monkeypatch):
    ran = functools.partial(report_of, demo_attention)
    monkeypatch.setattr(demo_attention, "run", lambda *asked, **_: as_part(ran(*asked)))


@pytest.fixture
def compression_as_it_is(untimed, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *asked, **_: as_part(report_of(demo, *asked)))


def run_once(fn, *args, **kwargs):
    jax.block_until_ready(fn(*args))
    return [1.0]


def as_part(report):
    """A part of the demo that compiles nothing."""
    yield programs.Programs(lambda text: None)
    return report


def network_report(sizes, seed, *, wrong=False):
    names = ("materialised", "co-designed", "rewritten")
    stages = [demo.Stage(name, None) for name in names]
    measured = tuple(demo.Measured(stage, 1.0, 8, 0.0, not wrong) for stage in stages)
    top = (demo_ranking.Scored(3, 1, (0.5, -0.25)),)
    return demo_ranking.Report(sizes, measured, (), 1e-5, top)


class Ran(NamedTuple):
    """What a run of the demo printed, and what has been done by its end."""

    out: str
    progress: str
    lowered: int
    kept: list[pathlib.Path]


@pytest.fixture(scope="module")
def demo_twice(tmp_path_factory):
    """Two runs of the whole demo with one cache of programs, from which the second one loads."""
    folder, lowered = tmp_path_factory.mktemp("demo"), []
    lower = jax.stages.Traced.lower

    def counted_lower(self, *args, **kwargs):
        # On a CPU, the report of `rewrite` counts programs that no cache keeps.
        lowered.extend([self.fun_name] * (self.fun_name != "jaxpr_as_fun"))
        return lower(self, *args, **kwargs)

    runs = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("IKBO_JAX_CACHE_DIR", str(folder))
        patched.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        # Each round once: that they fill their windows is a test of its own.
        patched.setattr(_timing, "sustained_ms", run_once)
        patched.setattr(jax.stages.Traced, "lower", counted_lower)
        for _ in range(2):
            # What was compiled before is in memory, and not in the folder.
            jax.clear_caches()
            out, progress = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(progress):
                assert cli.main([*TINY, "--dtype", "bfloat16", "--seed", "0"]) == cli.OK
            kept = sorted((folder / "programs").iterdir())
            texts = out.getvalue(), progress.getvalue()
            runs.append(Ran(*texts, len(lowered), kept))
    return runs


@pytest.mark.slow
def test_demo_runs_every_stage_in_a_pipe(demo_twice):
    out, progress = demo_twice[0][:2]
    lines = out.splitlines()
    assert ESCAPE not in out + progress
    for doing in ("compiling", "timing"):
        for stage in ("1 materialised", "1b aligned K", "2 decomposed"):
            assert f"s] linear compression: {doing} {stage}" in progress
        for stage in ("materialised", "co-designed", "rewritten"):
            assert f"s] network: {doing} {stage}" in progress
        for stage in ("1 materialised", "2 decomposed"):
            assert f"s] attention: {doing} {stage}" in progress
    assert "24 candidates of 5 users" in lines[1]
    for name in RUN_EVERYWHERE:
        assert any(line.startswith(name) for line in lines), out
    assert all(name in out for name in ("fused", "single launch"))
    assert any(line.startswith("4.8 candidates per user: all stages agree") for line in lines)
    for start in ("co-designed", "rewritten", "network: all versions agree", "rewrite: "):
        assert any(line.startswith(start) for line in lines), out
    assert "top candidate  user  logit 0  logit 1" in lines
    assert "materialised:" not in lines
    assert lines[-1].startswith("attention: all stages agree")


@pytest.mark.slow
def test_a_second_demo_lowers_no_program_and_compiles_nothing(demo_twice):
    first, second = demo_twice
    assert first.lowered > 10
    assert len(first.kept) > 10
    assert second.lowered == first.lowered
    assert second.kept == first.kept
    assert "compiling" in first.progress
    assert "compiling" not in second.progress
    assert first.out == second.out


def test_a_planted_disagreement_of_the_network_fails(
    attention_as_it_is, compression_as_it_is, monkeypatch, capsys
):
    wrong = functools.partial(network_report, wrong=True)
    monkeypatch.setattr(demo_ranking, "run", lambda *args, **_: as_part(wrong(*args)))
    assert cli.main(TINY) == cli.DISAGREES
    assert "network: DISAGREEMENT: materialised, co-designed, rewr" in capsys.readouterr().out


def test_the_network_is_held_to_its_oracle(untimed, monkeypatch):
    monkeypatch.undo()
    outs = {"rewritten": 1.0, "materialised": 1.0 + 1e-7, "wrong": 1.1, "nan": np.nan}
    versions = {
        name: lambda params, request, out=out: jnp.full((24, 2), out, jnp.float32)
        for name, out in outs.items()
    }
    monkeypatch.setattr(_timing, "sustained_ms", lambda fn, *args, **kwargs: [1.0])
    monkeypatch.setattr(demo_ranking, "versions", lambda: versions)
    monkeypatch.setattr(demo_ranking, "oracle", lambda *inputs: jnp.ones((24, 2)))
    (report,) = programs.run_parts([demo_ranking.run(TINY_SIZES, 0)])
    agrees = dict(zip(outs, (True, True, False, False), strict=True))
    assert {m.stage.name: m.agrees for m in report.measured} == agrees
    assert len(report.top) == demo_ranking.NUM_SHOWN


@pytest.mark.parametrize("k_user", [1, 2, 3, 11, 295, 1178])
def test_the_network_takes_any_rows_of_a_user(k_user: int) -> None:
    sizes = demo_ranking.sizes_of(user_rows=k_user)
    assert sizes.user_rows == k_user
    assert sizes.pooled >= 1
    assert min(sizes.user_tokens, sizes.dense_tokens) >= 0


def test_plot_draws_the_sweep(
    attention_as_it_is, compression_as_it_is, monkeypatch, tmp_path, capsys
):
    points = [demo_ranking.Point(r, {"a": 1.0}, {"a": 10**6}) for r in (10, 70)]
    monkeypatch.setattr(demo_ranking, "sweep", lambda *args, **kwargs: as_part(points))
    path = tmp_path / "out.svg"
    assert cli.main([*TINY, "--plot", str(path)]) == cli.OK
    assert f"wrote {path}" in capsys.readouterr().out
    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("out.doc", "writes .png"),
        ("missing/out.png", "there is no folder"),
        ("folder.png", "is something else"),
        ("out.png", "no permission to write"),
    ],
)
def test_plot_refuses_before_it_runs(file: str, reason: str, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(cli.os, "access", lambda *_: False)
    assert cli.main([*TINY, "--plot", str(tmp_path / file)]) == cli.UNUSABLE
    assert reason in capsys.readouterr().err


def test_output_that_the_encoding_lacks_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path / "é"))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert cli.main(["info"]) == cli.OK
    assert rb"\xe9" in printed.getvalue()


def test_module_is_the_command_and_the_reader_of_its_output_may_go():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ikbo_jax", "info"]
    with os.fdopen(writing, "wb") as stdout:
        result = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, timeout=300, check=False
        )
    assert result.returncode == cli.UNREAD
    assert b"BrokenPipe" not in result.stderr


def test_demo_says_why_the_kernels_did_not_run(attention_as_it_is, monkeypatch, capsys):
    monkeypatch.setattr(demo, "hopper_unavailable_reason", lambda: "this is a toaster")
    assert cli.main(TINY) == cli.OK
    assert f"not run: {', '.join(KERNELS)}: this is a toaster" in capsys.readouterr().out


def test_demo_says_what_the_kernel_cannot_do(attention_as_it_is, monkeypatch, capsys):
    real = cases.linear_compression.linear_compression

    def refuses(*args, implementation=None, **kwargs):
        if implementation == "mosaic_gpu":
            raise NotImplementedError("no such tile")
        return real(*args, implementation=implementation, **kwargs)

    monkeypatch.setattr(demo, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(LinearCompressionConfig, "illegal_reason", lambda config, problem: None)
    monkeypatch.setattr(cases.linear_compression, "linear_compression", refuses)
    assert cli.main(TINY) == cli.OK
    assert f"not run: {', '.join(KERNELS)}: no such tile" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [1.0, float("nan")], ids=["off by one", "nan"])
@pytest.mark.parametrize(
    ("op", "other", "said"),
    [
        ("linear_compression", "attention", "WRONG"),
        ("attention", "compression", "all stages agree; decomposed"),
    ],
)
def test_a_planted_disagreement_fails(op, other, said, wrong, request, monkeypatch, capsys):
    request.getfixturevalue(f"{other}_as_it_is")
    module = getattr(cases, op)
    real = getattr(module, op)
    monkeypatch.setattr(
        module, op, lambda *args, **kwargs: real(*args, **kwargs).at[0, 2].add(wrong)
    )
    assert cli.main(TINY) == cli.DISAGREES
    out = capsys.readouterr().out
    assert said in out
    conclusion = "DISAGREEMENT: decomposed outside the allowed error"
    assert conclusion in out
    assert (out.splitlines()[-1] == f"attention: {conclusion}") == (op == "attention")


def test_a_wrong_baseline_cannot_vouch_for_itself(attention_as_it_is, monkeypatch, capsys):
    reference = cases.linear_compression.reference
    real = reference.materialised

    def wrong_unless_oracle(*args, **kwargs):
        return real(*args, **kwargs) + (100 if "align_k" in kwargs else 0)

    monkeypatch.setattr(reference, "materialised", wrong_unless_oracle)
    assert cli.main(TINY) == cli.DISAGREES
    assert "DISAGREEMENT" in capsys.readouterr().out


def test_demo_on_a_terminal_draws_a_table(
    attention_as_it_is, compression_as_it_is, monkeypatch, capsys
):
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    assert cli.main(TINY) == cli.OK
    out = capsys.readouterr().out
    assert "─" in out
    assert all(name in out for name in RUN_EVERYWHERE)


@pytest.mark.parametrize("columns", [10, 30, 38, 60, 200])
def test_a_narrow_terminal_cuts_no_number(columns, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("1  materialised", "0.598 ms", "2.1e-07", "words " * 12), ("2", "0.1 ms", "", "")]
    terminal.print_table(("stage", "time", "max error", ""), rows, numbers=frozenset({1, 2}))
    out = capsys.readouterr().out
    assert all(cell in out for cell in ("1  materialised", "0.598 ms", "2.1e-07", "max error"))
    assert ("─" in out) == (columns >= 60)


def test_without_explain_a_part_is_a_table_and_a_sentence(
    attention_as_it_is, compression_as_it_is, capsys
):
    assert cli.main(TINY[:-1]) == cli.OK
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 32
    for word in ("moved", "path", "allowed", "implementation=None", "top candidate", "rewrite: "):
        assert word not in out
    assert out.count("1  materialised") + out.count("1b ") == 2
    assert out.count("2  decomposed") == 2
    assert out.count("all stages agree; ") == 2
    assert out.splitlines()[-1].endswith("ikbo-jax demo --explain")


def test_progress_on_a_terminal_is_one_line(monkeypatch):
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    err = io.StringIO()
    with contextlib.redirect_stderr(err), terminal.progress() as log:
        for number in range(5):
            log(f"step {number}")
    assert err.getvalue().count("\n") <= 1


@pytest.mark.parametrize(
    ("counts", "said"), [([24], "(all of one user)"), ([20, 4], "(4 to 20 per user)")]
)
def test_a_request_is_described_by_its_candidates_per_user(counts, said, capsys):
    cli_demo.print_request(dataclasses.replace(TINY_SIZES, users=len(counts)), 0, counts)
    assert said in capsys.readouterr().out


def test_info_names_device_versions_kernels_and_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path))
    assert cli.main(["info"]) == cli.OK
    out = capsys.readouterr().out
    assert ESCAPE not in out
    assert jax.__version__ in out
    assert cli.__version__ in out
    assert jax.devices()[0].platform in out
    assert str(tmp_path) in out
    for op in ("look_up", "segment_sum", "linear_compression", "attention", "gdpa", "norm_linear",
               "gated_linear"):  # fmt: skip
        assert f"{op}, mosaic_gpu" in out
        assert f"{op}, xla" in out
    reason = dispatch.hopper_unavailable_reason()
    assert ("not usable: " + reason if reason else "mosaic_gpu  usable") in out


def test_sustained_ms_fills_its_windows():
    calls = 0

    def fn(x):
        nonlocal calls
        calls += 1
        return x

    samples = sustained_ms(fn, jnp.zeros(()), window_s=0.02, windows=2)
    assert len(samples) == 2
    assert all(sample > 0 for sample in samples)
    # A window is full: its calls, at the time each took, make up at least 20 ms.
    assert calls * max(samples) >= 2 * 20


@pytest.mark.gpu
def test_demo_runs_the_kernels(capsys):
    sizes = ["--m", "65", "--n", "128", "--k-cand", "66", "--k-user", "130"]
    assert cli.main(["demo", "--candidates", "40", "--users", "3", *sizes]) == cli.OK
    out = capsys.readouterr().out
    assert "not run" not in out
    assert "4  single launch" in out
    assert "3  fused" in out


def test_attention_runs_the_kernel_where_it_can(untimed, monkeypatch, fake_attention):
    monkeypatch.setattr(demo_attention, "hopper_unavailable_reason", lambda: None)
    # There is no cuDNN beside the fake kernel.
    materialised = cases.attention.materialised
    monkeypatch.setattr(cases.attention, "materialised_cudnn", materialised)
    sizes = dataclasses.replace(TINY_SIZES, queries=2, history=16, head_dim=64, dtype="float16")
    (report,) = programs.run_parts([demo_attention.run(sizes, 0)])
    assert report.agree
    assert [m.stage.name[:2] for m in report.measured] == ["1 ", "1b", "2 ", "3 "]
    assert report.not_run == ()
    assert fake_attention.calls
