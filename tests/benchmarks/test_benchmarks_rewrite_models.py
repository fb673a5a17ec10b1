"""The benchmark of rewritten models: a run in small, its report, and models that fail."""

from __future__ import annotations

import pytest

from benchmarks import report, rewrite_models, timing

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_the_command_sets_it(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def test_a_run_in_small_and_its_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "models.json"
    assert rewrite_models.main(["din", "--out", str(out), "--quick"]) == 0
    results = timing.read_results(out)
    (point,) = results["points"]
    assert [p["name"] for p in point["providers"]] == ["original", "rewritten", "by-hand"]
    assert all(p["ok"] and p["median_ms"] > 0 for p in point["providers"])
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(
        "<!-- begin generated: rewrite-models -->\n<!-- end generated: rewrite-models -->\n"
    )
    assert report.main([str(out), "--root", str(tmp_path)]) == 0
    assert "| DIN | " in page.read_text()


def _point(original: float, rewritten: float, by_hand: float) -> dict:
    times = {"original": original, "rewritten": rewritten, "by-hand": by_hand}
    providers = [{"name": n, "median_ms": ms, "ok": True} for n, ms in times.items()]
    return {"sweep": "models", "label": "din", "providers": providers}


def test_ratios_and_bars():
    assert rewrite_models.ratios(_point(6.0, 3.0, 2.0)) == (1.5, 2.0)
    text = rewrite_models.bars(_point(6.0, 3.0, 2.0))
    assert text == "1.500 of by hand, bar 1.1; 2.00 x the original, bar 1.0"


def test_a_model_that_fails_is_named(tmp_path, monkeypatch):
    def one(name, seconds, *, quick):
        if name == "din":
            raise RuntimeError("no room")
        return _point(3.0, 2.0, 2.0)

    monkeypatch.setattr(rewrite_models, "_in_a_process", one)
    out = tmp_path / "models.json"
    assert rewrite_models.main(["din", "transformer", "--out", str(out)]) == 1
    results = timing.read_results(out)
    assert results["failed"] == ["models din: RuntimeError: no room"]
    assert len(results["points"]) == 1


def test_a_budget_that_is_spent_leaves_models_out(tmp_path):
    out = tmp_path / "models.json"
    assert rewrite_models.main(["din", "--out", str(out), "--budget-s", "-1"]) == 1
    assert timing.read_results(out)["left_out"] == ["models din"]
