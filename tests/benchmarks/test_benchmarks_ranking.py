"""The benchmark of the ranking network, with versions that cost nothing."""

import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_array

from benchmarks import harness, ranking, records, report, timing
from benchmarks.harness import Point
from benchmarks.records import provider_of
from ikbo_jax import demo_ranking
from ikbo_jax.cases import ranking as cases
from ikbo_jax.models import ranking as ranking_model

pytestmark = pytest.mark.slow

REAL_INPUTS = ranking.inputs_of
SHORT = harness.Protocol(window_s=0.001, rounds=1, matmul_size=0)
SIZES = demo_ranking.sizes_of(
    candidates=12, users=3, layers=1, compressed=9, width=8, cand_tokens=7, user_rows=11
)


@functools.cache
def inputs_of(sizes: ranking_model.Sizes):
    """As the benchmark makes them, but in one program, which draws nothing."""
    rng = np.random.default_rng(0)
    with mock.patch.object(jax.random, "normal", lambda _, *args: random_array(rng, *args)):
        return jax.jit(lambda: REAL_INPUTS(sizes))()


def score(params, request, wrong: float = 0.0):
    logit = jnp.sum(request.cand_tokens, axis=(1, 2)) + wrong
    return jnp.stack([logit, -logit], axis=1)


def provider(name: str, wrong: float = 0.0, error: Exception | None = None) -> ranking.Version:
    def fn(params, request):
        if error is not None:
            raise error
        return score(params, request, wrong)

    return ranking.Version(name, "a stage", lambda sizes: fn)


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(ranking, "DEFAULT", SIZES)
    monkeypatch.setattr(ranking, "small", lambda sizes: SIZES)
    monkeypatch.setattr(cases, "oracle", lambda *inputs: score(*inputs))
    monkeypatch.setattr(ranking, "ALL", tuple(provider(p.name) for p in ranking.ALL))
    # Parameters that are prepared in another way, so that the score tells.
    served = provider("served")._replace(
        make=lambda sizes: lambda doubled, request: score(None, request, doubled[0] - 2.0),
        prepare=lambda params: (jnp.float32(2.0), params),
        options=ranking.SERVED.options,
    )
    monkeypatch.setattr(ranking, "SERVED", served)
    monkeypatch.setattr(ranking, "inputs_of", inputs_of)
    quick = functools.partial(harness.interleaved_ms, window_s=0.001, rounds=2)
    monkeypatch.setattr(harness, "interleaved_ms", lambda thunks, **_: quick(thunks))


def test_run_writes_what_it_measured_and_the_report_reads_it(tmp_path, capsys):
    path = tmp_path / "ranking.json"
    names = ["default", "ratio 10:1", "ratio 1000:1", "candidates B=256", "candidates B=8192"]
    assert ranking.BENCHMARK.main(["--out", str(path), "--points", *names]) == 0
    results = timing.read_results(path)
    assert len(results["points"]) == len(names)
    assert "B=8192" in capsys.readouterr().out
    for record in results["points"][0]["providers"]:
        assert record["ok"]
        assert len(record["ms"]) == 2
        assert record["us_per_candidate"] == pytest.approx(record["median_ms"] * 1e3 / 12)
    blocks = report.blocks(results, "docs/performance.md")
    assert {"ranking-table", "ranking-ratio", "ranking-candidates"} <= blocks.keys()
    # No results that the documents show have this column.
    assert "parameters prepared, concurrent graphs, ms" in blocks["ranking-candidates"]
    for point in results["points"]:
        of_served = provider_of(point, "served")
        assert (of_served is not None) == (point["sweep"] == "candidates")
        assert of_served is None or of_served["ok"]


def test_wrong_results_failures_and_what_does_not_fit(monkeypatch):
    point = Point("default", "B=12", SIZES)
    providers = (
        provider("wrong", wrong=0.5),
        provider("broken", error=TypeError("no such thing")),
        provider("large", error=MemoryError("RESOURCE_EXHAUSTED: 1 TB")),
        provider(ranking.COPIES.name),
    )
    monkeypatch.setattr(ranking, "ALL", providers)
    measured = ranking.measure_point(point, types.SimpleNamespace(protocol=SHORT))
    wrong, broken, large, copies = measured["providers"]
    assert (wrong["ok"], copies["ok"]) == (False, True)
    assert "no such thing" in broken["failure"]
    assert "1 TB" in large["skipped"]
    assert len(records.wrong({"points": [point.entry() | measured]})) == 2


def test_full_points_hold_the_ratios(monkeypatch):
    monkeypatch.undo()
    (default,) = (p for p in ranking.POINTS if p.sweep == "default")
    assert (default.case.candidates, default.case.users) == (1024, 15)
    users = {p.label: p.case.users for p in ranking.POINTS if p.sweep == "ratio"}
    assert users == {"10:1": 102, "70:1": 15, "300:1": 3, "1000:1": 1}
    of_candidates = [p.case.candidates for p in ranking.POINTS if p.sweep == "candidates"]
    assert of_candidates == [256, 512, 1024, 2048, 4096, 8192]
    small = ranking.small(default.case)
    assert small.candidates == 64
    assert small.users == 1


def test_oracle_scores_a_part_at_a_time(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cases, "ORACLE_BATCH", 5)
    monkeypatch.setattr(cases.ranking, "materialised", score)
    params, request = inputs_of(SIZES)
    np.testing.assert_allclose(cases.oracle(params, request), score(params, request), rtol=1e-5)
