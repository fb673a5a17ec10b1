"""The benchmark of linear compression's gradient, on shapes for a CPU."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import children, harness, report
from benchmarks import linear_compression_gradient as benchmark

pytestmark = pytest.mark.slow

SHORT = harness.Protocol(window_s=0.001, rounds=2, matmul_size=64)


def tiny(point):
    return point.resized(batches=(3, 7), ks=(12, 9), m=10, n=8)


def test_every_sweep_has_points_that_differ():
    every = [point for sweep in benchmark.SWEEPS for point in benchmark.points(sweep)]
    assert len({point.case for point in every}) == len(every)
    assert {p.problem.batches for p in benchmark.points("ratio")} == {
        (1024, 1024),
        (128, 1024),
        (15, 1024),
        (1, 1024),
    }


def test_all_providers_are_right_and_wrong_ones_are_found():
    (point,) = map(tiny, benchmark.points("dtype"))

    def spoiled(inputs, cotangent):
        (d_user, d_cand), d_embeddings = benchmark.PROVIDERS[-1][2](inputs, cotangent)
        return (d_user, d_cand.at[0, 0].add(jnp.asarray(1, d_cand.dtype))), d_embeddings

    def nan(inputs, cotangent):
        return jax.tree.map(lambda x: x * jnp.asarray(jnp.nan, x.dtype), inputs[:2])

    wrong = (("spoiled", "", spoiled), ("nan", "", nan))
    measured = benchmark.measure_point(point, (*benchmark.PROVIDERS, *wrong), SHORT)
    ok = {record["name"]: record.get("ok") for record in measured["providers"]}
    assert ok == {name: True for name, _, _ in benchmark.PROVIDERS} | {
        "spoiled": False,
        "nan": False,
    }
    assert measured["useful_flops"] == 2 * 2 * 10 * 8 * (3 * 12 + 7 * 9)
    assert np.isnan(next(r for r in measured["providers"] if r["name"] == "nan")["error"])


def test_a_run_in_small_and_its_table(tmp_path, capfd):
    """Two processes compile the point once, before it is timed."""
    out = tmp_path / "gradient.json"
    arguments = ["--out", str(out), "--quick", "--sweep", "dtype", "--jobs", "2"]
    assert benchmark.BENCHMARK.main(arguments) == 0
    said = capfd.readouterr().out
    (compiled,) = re.finditer(r"compiled in \d+ s: dtype float16\n", said)
    assert compiled.end() < said.index("[1/1]")
    results = json.loads(out.read_text())
    assert [len(point["providers"]) for point in results["points"]] == [2]
    results["environment"]["platform"] = "gpu"
    (block,) = report.blocks(results, "docs/performance.md").values()
    assert "\n| dtype: float16 | " in block
    assert "of the time by hand, bar 1.00 |" in block
    assert "ikbo-jax in XLA" in block


def test_points_that_no_process_compiled_are_timed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(children, "command", lambda *args: [sys.executable, "-S", "-c", "raise"])
    monkeypatch.setattr(
        benchmark, "measure_point", lambda point, *_: {**point.entry(), "providers": []}
    )
    out = tmp_path / "gradient.json"
    options = ["--out", str(out), "--quick", "--sweep", "dtype", "--jobs", "2"]
    assert benchmark.BENCHMARK.main(options) == 0
    assert len(json.loads(out.read_text())["points"]) == 1
    assert "2 of 2 compiling processes failed" in capfd.readouterr().err
