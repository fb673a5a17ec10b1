"""The benchmark of attention's gradient, on shapes for a CPU."""

import dataclasses
import json
import types

import jax.numpy as jnp
import pytest

from benchmarks import attention_gradient as benchmark
from benchmarks import harness, production_providers, report

pytestmark = pytest.mark.slow

SHORT = harness.Protocol(window_s=0.001, rounds=2, matmul_size=64)


def test_every_sweep_has_points_that_differ():
    every = [point for sweep in benchmark.SWEEPS for point in benchmark.points(sweep)]
    assert len({(point.case, point.direction) for point in every}) == len(every)
    assert {p.case.kv_len for p in benchmark.points("s")} == set(benchmark.FRACTION_BARS)
    assert {p.direction for p in benchmark.points("given")} == {"both"}


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_right_versions_are_right_and_wrong_ones_are_found(monkeypatch, direction):
    point = benchmark.BENCHMARK.shrink(next(benchmark.points("index")))
    point = dataclasses.replace(point, direction=direction)
    makers = production_providers.contenders(point.case)

    def spoiled():
        right = makers[0]()
        return right._replace(name="spoiled", fn=lambda *args: 1.1 * right.fn(*args))

    monkeypatch.setattr(benchmark, "contenders", lambda shape: [*makers, spoiled])
    run = types.SimpleNamespace(protocol=SHORT, options=types.SimpleNamespace(quick=False))
    measured = benchmark.measure_point(point, run)
    ok = {record["name"]: record.get("ok") for record in measured["providers"]}
    assert (ok["ikbo"], ok["xla"], ok["spoiled"]) == (True, True, False)
    assert measured["useful_flops"] == harness.ATTENTION_WORK[direction] * point.case.flops
    (grouped,) = (r for r in measured["providers"] if r["name"] == "grouped-cudnn")
    assert "cuDNN needs a GPU" in grouped["skipped"]


def of_no_cost(shape):
    """Three versions that compile fast."""

    def maker(name):
        ones = (jnp.ones((2, 3)),) * 3
        return lambda: production_providers.Contender(name, "", lambda q, k, v: q * k + v, ones)

    return map(maker, ("ikbo", "xla", "grouped-cudnn"))


def test_a_run_in_small_and_its_table(tmp_path, capsys, monkeypatch):
    """With this library and XLA alone."""
    monkeypatch.setattr(benchmark, "contenders", of_no_cost)
    out = tmp_path / "gradient.json"
    assert benchmark.BENCHMARK.main(["--out", str(out), "--quick", "--sweep", "s"]) == 0
    assert "S=8192" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert [len(point["providers"]) for point in results["points"]] == [2] * 5
    results["environment"]["platform"] = "gpu"
    (block,) = report.blocks(results, "docs/performance.md").values()
    assert all(f"\n| s: S={s} | not run | not run | " in block for s in benchmark.FRACTION_BARS)
    assert "cuDNN, queries grouped by hand" in block
