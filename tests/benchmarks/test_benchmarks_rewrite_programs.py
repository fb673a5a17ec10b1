"""The benchmark of rewritten models: a run in small, its report, and the forms by hand."""

import pytest

from benchmarks import report, rewrite_programs, tables_networks, timing
from examples import ranking_models
from ikbo_jax.rewrite.report import cost

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ranking_models.BY_HAND)
def test_models_of_a_real_size_in_small_and_their_report(tmp_path, monkeypatch, model):
    """The original of the transformer scores a part."""
    monkeypatch.setattr(ranking_models, "LAYERS", 1)
    out = tmp_path / "models.json"
    options = ("--out", str(out), "--quick")
    # Without an oracle, the forms are compared with the original.
    assert rewrite_programs.BENCHMARK.main([*options, "--points", f"{model} 3"]) == 0
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
    assert f"| {tables_networks.MODELS[model]} | " in page.read_text()


@pytest.mark.parametrize("reason", ["", "it takes as long"])
def test_programs_in_small(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(cost, "refusal", lambda *_: reason)
    out = tmp_path / "programs.json"
    options = ("--out", str(out), "--quick", "--points", "twin 0 float32 forward")
    assert rewrite_programs.BENCHMARK.main(options) == 0
    (point,) = timing.read_results(out)["points"]
    assert (point["changed"], point["reason"]) == (not reason, reason)
    # If the original runs, nothing is timed.
    assert [p["ok"] and p["median_ms"] > 0 for p in point["providers"]] == [True] * 2 * (not reason)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_gradient_is_wrong_if_it_is_beyond_its_bound_on_most_draws(shift):
    program = ranking_models.Program("twin", ranking_models.SMALL, "float32")
    runs = [lambda *args, n=n: args[1][0] + n for n in (0, shift, 0)]
    check = rewrite_programs._on_draws(program, {"error": 2.0, "bound": 1.0}, runs)
    assert check.ok == (not shift)
