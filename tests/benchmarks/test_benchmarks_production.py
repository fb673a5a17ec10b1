"""The benchmark of drawn workloads: its draws, its summary, a run in small."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import production, production_draws, report
from benchmarks import production_directions as directions
from benchmarks.production_draws import DRAWS, MAX_BYTES, MAX_FLOPS, AttentionShape, GdpaShape
from ikbo_jax.cases.error_rule import Check


@pytest.mark.parametrize("op", DRAWS)
def test_draws_repeat_and_a_larger_number_adds_to_them(op):
    few, many = production_draws.shapes(op, 5), production_draws.shapes(op, 60)
    assert many[:5] == few
    assert production_draws.shapes(op, 5, seed=1) != few
    assert len(set(many)) == len(many)
    assert all(s.num_bytes <= MAX_BYTES and s.flops <= MAX_FLOPS for s in many)


def test_draws_reach_the_shapes_that_rankers_have():
    drawn = [s for s in production_draws.shapes("attention", 300) if isinstance(s, AttentionShape)]
    assert any(s.users == 1 for s in drawn)
    assert any(s.users == s.batch for s in drawn)
    assert 0.4 < np.mean([s.q_len == 1 for s in drawn]) < 0.6
    assert any(s.kv_len % 2 for s in drawn)
    assert any(s.kv_heads < s.q_heads for s in drawn)
    assert {s.head_dim for s in drawn} == {64, 96, 128, 192, 256}
    jagged = [s for s in production_draws.shapes("gdpa", 100) if isinstance(s, GdpaShape)]
    assert {s.lengths for s in jagged} == {"log-normal", "uniform", "short", "pffn", "pma"}


def test_work_counts_keys_within_the_lengths():
    full = AttentionShape(4, 2, 3, 100, 2, 1, 64, "bfloat16", "even", has_lengths=False)
    assert full.flops == 4 * 4 * 3 * 2 * 100 * 64
    assert full.num_bytes == 2 * 64 * (4 * 3 * 2 * 2 + 2 * 100 * 2)
    short = AttentionShape(4, 2, 3, 100, 2, 1, 64, "bfloat16", "even", has_lengths=True)
    keys = short.lengths[short.cand_to_user].sum()
    assert short.flops == 4 * 3 * 2 * 64 * keys < full.flops


def _point(label: str, ours: float, other: float) -> dict:
    providers = [
        {"name": "ikbo", "median_ms": ours, "fraction": 0.5, "tflops": 1.0},
        {"name": "slow", "median_ms": 9.0, "fraction": 0.1, "tflops": 1.0},
        {"name": "xla", "median_ms": other, "fraction": 0.1, "tflops": 1.0},
        {"name": "copies", "skipped": "too large"},
    ]
    return {"sweep": "gdpa forward", "label": label, "providers": providers}


def test_summary_names_the_points_that_lose():
    points = [_point("wins", 1.0, 4.0), _point("loses", 2.0, 1.0), _point("ties", 1.0, 0.98)]
    text = production.summary({"points": points})
    assert "3 points, 0.50 of the roofline (bar 0.62)" in text
    assert "1.25 x the best alternative (bar 2.5), 1 slower (bar 0)" in text
    assert text.splitlines()[1].strip() == "0.50 x xla: loses"
    assert production.bars(points[1], points) == "0.50 x xla, bar 0.97"
    assert production.bars(points[2], points) == "0.98 x xla"


def _scaled(fn):
    return lambda *args: 1.1 * fn(*args)


def test_a_wrong_result_is_found():
    """A contender with another scale is wrong in its result and in its gradients."""
    shape = production_draws.shrink(production_draws.shapes("linear_compression", 1)[0])
    ours, _, by_hand, *_ = (make for make in production.contenders(shape))
    for direction in (*production.DIRECTIONS, "backward"):
        exact = directions.exact_results(by_hand(), direction)
        right = ours()
        wrong = right._replace(fn=_scaled(right.fn))
        for contender, is_right in ((right, True), (wrong, False)):
            fn, args = directions.in_direction(contender, direction)
            assert directions.compare(contender, direction, exact, fn(*args)).ok == is_right


def test_a_run_in_small(tmp_path, capsys):
    out = tmp_path / "production.json"
    args = ["--out", str(out), "--quick", "--number", "1", "--jobs", "2"]
    assert production.main([*args, "--sweep", "linear_compression both", "attention forward"]) == 0
    points = json.loads(out.read_text())["points"]
    assert [p["sweep"] for p in points] == ["attention forward", "linear_compression both"]
    for point in points:
        timed = [p for p in point["providers"] if "median_ms" in p]
        assert {"ikbo", "xla"} <= {p["name"] for p in timed}
        assert all(p["ok"] and p["fraction"] > 0 for p in timed)
    assert "the best alternative" in capsys.readouterr().out
    _check_report(out, tmp_path)


@pytest.fixture(autouse=True)
def with_this_environment(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as the command sets it


def test_a_process_that_fails_ends_the_run(tmp_path, capsys, monkeypatch):
    """What is missing is said, and the status is 1."""
    monkeypatch.setenv("JAX_PLATFORMS", "no such platform")  # this process has read its value
    monkeypatch.setattr(production.harness, "print_lines", lambda results, lines: 0)
    out = tmp_path / "production.json"
    args = ["--out", str(out), "--quick", "--number", "1", "--jobs", "2"]
    assert production.main([*args, "--sweep", "attention forward"]) == 1
    error = capsys.readouterr().err
    assert "2 of 2 processes failed" in error
    assert "1 points are missing" in error
    (left_out,) = json.loads(out.read_text())["left_out"]
    assert left_out.startswith("attention forward B=")


def test_the_budget_leaves_points_out_and_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(production.harness, "print_lines", lambda results, lines: 0)
    out = tmp_path / "production.json"
    args = ["--out", str(out), "--quick", "--number", "2", "--budget-s", "0"]
    assert production.main([*args, "--sweep", "gdpa both"]) == 1
    results = json.loads(out.read_text())
    assert results["points"] == []
    assert len(results["left_out"]) == 2


def test_sweeps_take_turns():
    sweeps = [point.sweep for point in production.points(production.SWEEPS, 2, 0)]
    assert sweeps == [*production.SWEEPS, *production.SWEEPS]


@pytest.mark.parametrize(
    ("error", "bound", "ratio"),
    [(1.0, 2.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, np.inf), (np.nan, 1.0, np.inf)],
)
def test_zeros_and_nan_have_a_ratio(error, bound, ratio):
    assert directions.ratio(Check(error, bound)) == ratio


def _check_report(results, root):
    page = root / "docs" / "performance.md"
    page.parent.mkdir()
    names = ("production-table", "production-worst", "production-table-plot")
    blocks = (f"<!-- begin generated: {n} -->\n<!-- end generated: {n} -->\n" for n in names)
    page.write_text("".join(blocks))
    assert report.main([str(results), "--root", str(root)]) == 0
    text = page.read_text()
    assert "| attention forward | 1 |" in text
    assert "| linear compression with gradients | 1 |" in text
    assert "| linear compression both, B=" in text
    assert "(images/production.svg)" in text
    assert (root / "docs" / "images" / "production.svg").stat().st_size > 0
