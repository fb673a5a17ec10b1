"""The benchmark, on shapes for a CPU, and the report that it makes."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, linear_compression, records, report, tables, timing
from benchmarks.records import OUR_NAME
from ikbo_jax._timing import interleaved_ms
from ikbo_jax.cases.linear_compression import Case, oracle_of_rows
from ikbo_jax.problems import LinearCompressionProblem

pytestmark = pytest.mark.slow

SHORT = types.SimpleNamespace(
    protocol=harness.Protocol(window_s=0.001, rounds=1, matmul_size=16),
    options=types.SimpleNamespace(quick=False),
)
TINY = LinearCompressionProblem((2, 6), (7, 5), 9, 16, "bfloat16")


def point(sweep: str, dtype: str = "bfloat16", index: str = "ragged") -> harness.Point:
    problem = dataclasses.replace(TINY, dtype=dtype)
    return harness.Point(sweep, "tiny", Case(problem, index))


# Timing.


def test_by_turns_alternates_and_gives_one_sample_a_round():
    order = []

    def thunk(name: str):
        def run() -> jax.Array:
            if not order or order[-1] != name:
                order.append(name)
            return jnp.zeros(())

        return run

    found = interleaved_ms({"a": thunk("a"), "b": thunk("b")}, window_s=0.001, rounds=3)
    assert order == ["a", "b"] * 3
    assert {name: len(ms) for name, ms in found.items()} == {"a": 3, "b": 3}
    assert all(ms > 0 for samples in found.values() for ms in samples)


def test_rates():
    assert timing.tflops(2e12, 1.0) == pytest.approx(2000)
    assert timing.matmul_tflops(1.0, 1000) == pytest.approx(2.0)
    copy = timing.copy_ceiling(0.001, 1)
    assert copy["bytes"] == 2**12
    assert copy["tb_per_s"] == pytest.approx(2 * 2**12 / copy["ms"][0] / 1e9)


def test_commit_can_be_given_and_is_found(monkeypatch):
    assert timing.commit() == "0123456789abcdef"
    monkeypatch.delenv(timing.COMMIT_VARIABLE)
    assert timing.commit()


def test_results_round_trip_and_foreign_schema(tmp_path, capsys):
    path = tmp_path / "new" / "folder" / "x.json"
    content = {"a": [1.5, 2.5] * 40, "b": {"c": None, "d": [{"e": []}, {}]}}
    timing.write_results(path, content)
    assert f"made the folder {path.parent}" in capsys.readouterr().err
    timing.write_results(path, content)
    assert capsys.readouterr().err == ""
    assert timing.read_results(path) == {"schema": timing.SCHEMA, **content}
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="schema 99, expected 1"):
        timing.read_results(path)


# The benchmark.


def test_sweeps_hold_the_shapes_that_bars_speak_of():
    todo = linear_compression.BENCHMARK.todo(linear_compression.BENCHMARK.parse(["--out", "x"]))
    sweeps = {name: [p for p in todo if p.sweep == name] for name in linear_compression.SWEEPS}
    assert sweeps["default"][0].problem == linear_compression.DEFAULT
    assert [p.problem.m for p in sweeps["m"]] == [128, 256, 512, 1024]
    assert [p.problem.ks[1] for p in sweeps["k"]] == [256, 1024, 2048]
    assert [p.problem.n for p in sweeps["n"]] == [128, 256, 512]
    assert [p.problem.batches[1] for p in sweeps["batch"]] == [256, 512, 1024, 2048, 4096]
    assert [p.problem.batches for p in sweeps["batch"]][2] == (15, 1024)
    users = [p.problem.batches[0] for p in sweeps["ratio"]]
    assert users == [1024, 512, 103, 15, 2, 1]
    assert sweeps["ratio"][-1].problem.batches == (1, 10_000)
    assert [p.case.index for p in sweeps["index"]] == ["unsorted"]


def test_inputs_follow_the_point():
    arguments = point("default").case.inputs().arguments
    assert [array.shape for array in arguments] == [(9, 5), (9, 7), (6, 5, 16), (2, 7, 16), (6,)]
    assert sorted(arguments[4].tolist()) == arguments[4].tolist()
    *_, index = point("index", index="unsorted").case.inputs().arguments
    assert sorted(index.tolist()) != index.tolist()
    assert sorted(index.tolist()) == arguments[4].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_provider_agrees_with_the_oracle_or_says_why_not(dtype):
    stages = linear_compression.stages(dataclasses.replace(TINY, dtype=dtype))
    measured = linear_compression.measure_versions(point("default", dtype), stages, SHORT)
    records = {record["name"]: record for record in measured["providers"]}
    expected = {"materialised", "materialised-aligned", "xla", "ikbo"}
    assert expected <= records.keys()
    assert ("single-launch" in records) == (dtype != "float32")
    for name, record in records.items():
        assert "failure" not in record, record
        if name in ("fused", "single-launch"):
            assert "Hopper" in record["skipped"]
            continue
        assert record["ok"], record
        rate = timing.tflops(measured["useful_flops"], record["median_ms"])
        assert record["tflops"] == pytest.approx(rate)
        assert record["fraction"] == pytest.approx(rate / measured["matmul_tflops"])
        assert len(record["ms"]) == 1


def test_a_wrong_provider_is_caught_and_a_failing_one_recorded():
    xla = point("default").case.contender("decomposed")

    def wrong(*inputs: jax.Array) -> jax.Array:
        return xla(*inputs) + jnp.bfloat16(0.5)

    def nan(*inputs: jax.Array) -> jax.Array:
        return xla(*inputs) * jnp.bfloat16(jnp.nan)

    def failing(*inputs: jax.Array) -> jax.Array:
        raise RuntimeError("broken")

    versions = {OUR_NAME: ("", failing), "xla": linear_compression.XLA}
    versions |= {fn.__name__: ("", fn) for fn in (wrong, nan)}
    found = linear_compression.measure_versions(point("default"), versions, SHORT)
    ok = [record.get("ok") for record in found["providers"]]
    assert ok == [None, True, False, False]
    assert found["providers"][0]["failure"] == "RuntimeError: broken"
    measured = {"sweep": "m", "label": "tiny"} | found
    names = [f"m tiny, {name}" for name in (OUR_NAME, "wrong", "nan")]
    assert records.wrong({"points": [measured]}) == names
    assert records.format_point(measured, linear_compression.bars).count("WRONG RESULT") == 2


def test_the_oracle_is_the_equation():
    inputs = point("default", "float32").case.inputs()
    exact = oracle_of_rows(inputs, jnp.asarray([0, 5]))
    w_cand, w_user, e_cand, e_user, index = map(np.asarray, inputs.arguments)
    by_hand = w_cand @ e_cand[5] + w_user @ e_user[index[5]]
    np.testing.assert_allclose(exact[1], by_hand, atol=1e-5)


def run(path, *options: str, **changes) -> dict:
    """Runs the benchmark with --quick and other points."""
    benchmark = dataclasses.replace(linear_compression.BENCHMARK, **changes)
    return benchmark.run(benchmark.parse(["--out", str(path), "--quick", *options]))


def test_run_writes_every_point_and_the_report_reads_it(tmp_path, monkeypatch):
    path = tmp_path / "results" / "run.json"
    sweeps = ("default", "m", "ratio")
    run(path, points=[*map(point, sweeps)], shrink=lambda point: point)
    assert not path.with_name("run.json.tmp").exists()
    results = timing.read_results(path)
    assert [p["sweep"] for p in results["points"]] == ["default", "m", "ratio"]
    assert results["protocol"]["rounds"] == 1
    assert not records.wrong(results)
    assert results["points"][0]["problem"]["batches"] == [2, 6]
    environment = results["environment"]
    assert environment["commit"] == "0123456789abcdef"
    assert environment["device"] == jax.devices()[0].device_kind
    assert environment["jax"] == jax.__version__
    assert (environment["platform"], environment["driver"]) == ("cpu", None)
    for body in report.blocks(results, "README.md").values():
        assert body.endswith("\n")
    assert "tiny" in tables.linear_compression_sweeps(results)


def record(name: str, ms: float, fraction: float) -> dict:
    return {
        "name": name,
        "stage": name,
        "ms": [ms],
        "median_ms": ms,
        "tflops": 1.0,
        "fraction": fraction,
        "temp_bytes": 2**20,
        "error": 0.5,
        "bound": 1.0,
        "ok": True,
    }


def synthetic() -> dict:
    """Results with made-up figures: every stage at the default shape, two sweeps."""

    def at(sweep: str, label: str, *records: dict, config: dict | None = None) -> dict:
        return {
            "sweep": sweep,
            "label": label,
            "index": "ragged",
            "problem": {
                "batches": [15, 1024], "ks": [1178, 866], "m": 433, "n": 256, "dtype": "bfloat16"
            },
            "useful_flops": 1,
            "user_result_bytes": 2**20,
            "table": {"config": config, "note": ""},
            "matmul_ms": [1.0],
            "matmul_tflops": 600.0,
            "providers": list(records),
        }  # fmt: skip

    default = at(
        "default",
        "bfloat16",
        record("materialised", 4.0, 0.1),
        record("xla", 2.0, 0.2),
        record("single-launch", 0.5, 0.8),
        record("ikbo", 0.5, 0.8),
        {"name": "torch", "stage": "PyTorch", "skipped": "no PyTorch"},
        config={},
    )
    m = at("m", "M=128", record("xla", 1.0, 0.3), record("ikbo", 1.01, 0.3))
    b = at("batch", "B=256", record("xla", 1.0, 0.3), record("ikbo", 0.5, 0.6), config={})
    return {
        "schema": timing.SCHEMA,
        "op": "linear_compression",
        "environment": {
            "device": "Card", "platform": "gpu", "driver": "1.2", "jax": "0.11.2",
            "commit": "0123456789abcdef", "date": "2026-01-02T03:04:05+00:00",
        },
        "protocol": {"window_s": 0.2, "rounds": 3, "matmul_size": 8192},
        "copy": {"tb_per_s": 4.25},
        "points": [default, m, b],
        "left_out": [],
    }  # fmt: skip


def test_bars_stand_beside_what_was_reached():
    text = records.format_point(synthetic()["points"][0], linear_compression.bars)
    assert "fraction 0.800, bar 0.82" in text
    assert "skipped: no PyTorch" in text


# The report.


def test_blocks_are_replaced_and_others_kept():
    text = (
        "before\n<!-- begin generated: a -->\nold\n<!-- end generated: a -->\nbetween\n"
        "<!-- begin generated: b -->\nkept\n<!-- end generated: b -->\nafter\n"
    )
    found = report.replace_blocks(text, {"a": "new\n", "c": "nowhere\n"})
    assert found == text.replace("old", "new")
    assert report.replace_blocks(found, {"a": "new\n"}) == found
    with pytest.raises(ValueError, match="1 generated blocks begin and 0 end"):
        report.replace_blocks("<!-- begin generated: a -->\nold\n", {})
    with pytest.raises(ValueError, match="names differ"):
        report.replace_blocks(text.replace("end generated: b", "end generated: c"), {})


def test_report_writes_documents_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = sorted(report.blocks(synthetic(), "README.md"))
    body = "".join(f"<!-- begin generated: {n} -->\n<!-- end generated: {n} -->\n" for n in names)
    (tmp_path / "docs").mkdir()
    for document in report.DOCUMENTS:
        (tmp_path / document).write_text(body)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(synthetic()))
    arguments = [str(file), "--root", str(tmp_path)]
    assert report.main([*arguments, "--check"]) == 1
    assert (tmp_path / "README.md").read_text() == body
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    readme, page = ((tmp_path / name).read_text() for name in ("README.md", "docs/performance.md"))
    assert "| single launch | 0.500 | 8.0× | 0.80 |" in readme
    assert "(docs/images/linear_compression_stages.svg)" in readme
    assert "(images/linear_compression_stages.svg)" in page
    assert "commit `0123456789ab`, 2026-01-02" in readme
    assert "| m: M=128 | 1.0100 | 1.0000 | 0.300 | XLA | 1.010 of XLA's time, bar 1.02 |" in page
    assert "| torch | PyTorch | not run: no PyTorch |" in page
    assert "4.25 TB/s" in page
    first = {path.name: path.read_bytes() for path in (tmp_path / "docs/images").iterdir()}
    assert sorted(first) == ["linear_compression_stages.svg", "linear_compression_sweeps.svg"]
    assert all(b"<svg" in drawing for drawing in first.values())
    assert report.main(arguments) == 0
    again = {path.name: path.read_bytes() for path in (tmp_path / "docs/images").iterdir()}
    assert first == again, "the same results make the same files"
    capsys.readouterr()


@pytest.mark.parametrize("document", report.DOCUMENTS)
def test_own_documents_have_sound_blocks_of_known_names(document):
    text = (report.ROOT / document).read_text(encoding="utf-8")
    assert report.replace_blocks(text, {}) == text
    files = sorted((report.ROOT / "benchmarks/results").glob("*.json"))
    known = {name for file in files for name in report.blocks(timing.read_results(file), document)}
    known.add("headline")  # `benchmarks.headline` makes it
    assert {match["name"] for match in report._BLOCK.finditer(text)} <= known


def test_a_point_that_raises_does_not_end_the_run(tmp_path, capsys):
    """The points after it are measured, the file names it, and the run is no success."""

    def measure(point, run):
        if point.label == "large":
            raise MemoryError("no room")
        return {"providers": []}

    out = tmp_path / "some.json"
    points = [harness.Point("sweep", label, None) for label in ("large", "small")]
    benchmark = harness.Benchmark("some", points, measure, shrink=lambda p: p)
    assert benchmark.main(["--quick", "--out", str(out)]) == 1
    results = timing.read_results(out)
    assert [p["label"] for p in results["points"]] == ["small"]
    assert results["failed"] == ["sweep large: MemoryError: no room"]
    assert "FAILED: sweep large" in capsys.readouterr().out
