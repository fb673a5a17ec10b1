"""The benchmark of rewritten models: a run in small, and its report."""

import pytest

from benchmarks import report, rewrite_models, rewrite_programs, timing

pytestmark = pytest.mark.slow


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


def test_programs_in_small(tmp_path):
    out = tmp_path / "programs.json"
    names = ["twin 0 float32 forward", "dlrm 0 float32 forward"]
    assert rewrite_programs.main([*names, "--out", str(out), "--quick", "--jobs", "2"]) == 0
    rewritten, as_it_is = timing.read_results(out)["points"]
    assert rewritten["changed"]
    assert all(p["ok"] and p["median_ms"] > 0 for p in rewritten["providers"])
    # The original runs, so that nothing is timed.
    assert as_it_is["reason"]
    assert not as_it_is["providers"]
