"""The benchmarks of gradients of attention and linear compression, on shapes for a CPU."""

import dataclasses
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    children,
    harness,
    linear_compression,
    production_providers,
    report,
)

pytestmark = pytest.mark.slow

SHORT = types.SimpleNamespace(
    protocol=harness.Protocol(window_s=0.001, rounds=2, matmul_size=64),
    options=types.SimpleNamespace(quick=False),
)


def backward(module, sweep: str) -> list[harness.Point]:
    options = ["--out", "x", "--direction", "backward", "--sweep", sweep]
    return module.BENCHMARK.todo(module.BENCHMARK.parse(options))


def test_sizes_and_directions_of_sweeps():
    of_s = backward(attention, "s")
    assert {p.case.kv_len for p in of_s} == set(attention.GRADIENT_BARS)
    assert {p.direction for p in of_s} == {"backward"}
    batches = {p.problem.batches for p in backward(linear_compression, "ratio")}
    assert batches == {(1024, 1024), (128, 1024), (15, 1024), (1, 1024)}


def test_right_versions_are_right_and_wrong_ones_are_found(monkeypatch):
    point = harness.shrink(backward(attention, "h")[0])
    makers = production_providers.contenders(point.case)

    def spoiled():
        right = makers[0]()
        return right._replace(name="spoiled", fn=lambda *args: 1.1 * right.fn(*args))

    monkeypatch.setattr(attention, "contenders", lambda shape: [*makers, spoiled])
    measured = attention.measure_point(point, SHORT)
    ok = {record["name"]: record.get("ok") for record in measured["providers"]}
    assert (ok["ikbo"], ok["xla"], ok["spoiled"]) == (True, True, False)
    assert measured["useful_flops"] == harness.ATTENTION_WORK["backward"] * point.case.flops
    (grouped,) = (r for r in measured["providers"] if r["name"] == "grouped-cudnn")
    assert "cuDNN needs a GPU" in grouped["skipped"]


OPTIONS = ("--quick", "--direction", "backward", "--sweep", "dtype", "--jobs", "2")


def tiny(point):
    sizes = {"batches": (3, 7), "ks": (12, 9), "m": 10, "n": 8}
    problem = dataclasses.replace(point.problem, **sizes)
    return dataclasses.replace(point, case=dataclasses.replace(point.case, problem=problem))


def test_all_providers_are_right_and_wrong_ones_are_found():
    (point,) = map(tiny, backward(linear_compression, "dtype"))

    def wrong(change):
        """This library's result, with other gradients."""
        op = jax.custom_vjp(linear_compression.OURS[1])

        def backward(pull, cotangent):
            (d_user, d_cand), d_embeddings, _ = pull(cotangent)
            return (d_user, change(d_cand)), d_embeddings, None

        op.defvjp(lambda *inputs: jax.vjp(linear_compression.OURS[1], *inputs), backward)
        return "", op

    spoiled = wrong(lambda x: x.at[0, 0].add(jnp.asarray(1, x.dtype)))
    nan = wrong(lambda x: x * jnp.asarray(jnp.nan, x.dtype))
    versions = {**linear_compression.GRADIENTS, "spoiled": spoiled, "nan": nan}
    measured = linear_compression.measure_versions(point, versions, SHORT)
    ok = {record["name"]: record.get("ok") for record in measured["providers"]}
    assert ok == {name: name not in ("spoiled", "nan") for name in versions}
    assert measured["useful_flops"] == 2 * 2 * 10 * 8 * (3 * 12 + 7 * 9)
    assert np.isnan(next(r for r in measured["providers"] if r["name"] == "nan")["error"])


def test_a_run_in_small_and_its_table(tmp_path, capfd):
    """Two processes compile the point once, before it is timed."""
    out = tmp_path / "gradient.json"
    arguments = ["--out", str(out), *OPTIONS]
    assert linear_compression.BENCHMARK.main(arguments) == 0
    said = capfd.readouterr().out
    (compiled,) = re.finditer(r"compiled in \d+ s: dtype float16\n", said)
    assert compiled.end() < said.index("[1/1]")
    results = json.loads(out.read_text())
    assert [len(point["providers"]) for point in results["points"]] == [3]
    results["environment"]["platform"] = "gpu"
    block = report.blocks(results, "docs/performance.md")["linear-compression-gradient"]
    assert "\n| dtype: float16 | " in block
    assert "of the time by hand, bar 1.00 |" in block
    assert "ikbo-jax in XLA" in block


def test_points_that_no_process_compiled_are_timed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(children, "command", lambda *args: [sys.executable, "-S", "-c", "raise"])
    nothing = lambda *_: {"providers": []}  # noqa: E731
    monkeypatch.setattr(linear_compression, "measure_versions", nothing)
    out = tmp_path / "gradient.json"
    assert linear_compression.BENCHMARK.main(["--out", str(out), *OPTIONS]) == 0
    assert len(json.loads(out.read_text())["points"]) == 1
    assert "2 of 2 compiling processes failed" in capfd.readouterr().err
