"""The benchmark of drawn workloads: its draws, its summary, a run in small."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    harness,
    production,
    production_draws,
    production_providers,
    report,
    tables_networks,
    timing,
)
from benchmarks.production_draws import (
    KINDS,
    MAX_BYTES,
    MAX_FLOPS,
    AttentionShape,
    CompressionShape,
    GdpaShape,
)
from ikbo_jax.problems import LinearCompressionProblem


@pytest.mark.parametrize("op", KINDS)
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
    return {"sweep": "gdpa forward", "label": label, "roofline_ms": 0.1, "providers": providers}


def test_tables_name_the_points_that_lose():
    points = [_point("wins", 1.0, 4.0), _point("loses", 2.0, 1.0), _point("ties", 1.0, 0.98)]
    environment = {"device": "Card", "driver": "", "jax": "1", "commit": "ab", "date": "2026-01-02"}
    protocol = {"window_s": 0.2, "rounds": 3}
    results = {"environment": environment, "protocol": protocol, "points": points}
    means, worst = tables_networks.production(results).values()
    assert "| gdpa forward | 3 | 0.50 | 1.25× | 1 | 0.62, 2.5×, none slower |" in means
    assert "| gdpa forward, loses | xla |" in worst.splitlines()[4]


@pytest.mark.parametrize(("batch", "users"), [(60, 2), (4617, 1)])
def test_gradients_that_xla_adds_in_bfloat16_are_right(batch, users):
    """A rounding for each candidate of a user is what a model written by hand has; another scale is
    wrong."""
    shape = CompressionShape(LinearCompressionProblem((users, batch), (9, 20), 6, 16, "bfloat16"))
    _, exact_form, _, *by_hand = production_providers.contenders(shape)
    by_hand = [make() for make in by_hand]
    assert [contender.name for contender in by_hand] == ["xla-by-hand", "copies"]
    exact = production.exact_results(exact_form(), "both")
    for contender in by_hand:
        fn, args = production.in_direction(contender, "both")
        results = jax.jit(fn)(*args)
        assert production.compare(contender, "both", exact, results).ok
        scaled = [jax.device_put(np.asarray(x) * x.dtype.type(1.1)) for x in results]
        assert not production.compare(contender, "both", exact, scaled).ok


@pytest.mark.parametrize("op", ["attention", "linear_compression", "gdpa"])
def test_programs_take_indices_and_lengths_as_arguments(op):
    """As a constant, XLA would sort an index while it compiles.

    With "both", the programs have the forward pass and its gradients. Of two shapes of attention,
    one has lengths.
    """
    for shape in production_draws.shapes(op, 2):
        small = harness.shrink(harness.Point("", "", shape)).case
        for make in production_providers.contenders(small)[:2]:  # the library's op, and in XLA
            fn, args = production.in_direction(make(), "both")
            assert any(x.dtype == np.int32 for x in args)
            consts = jax.make_jaxpr(fn)(*args).consts
            assert not [c for c in consts if np.issubdtype(c.dtype, np.integer) and c.size > 1]


@pytest.mark.parametrize("has_lengths", [False, True])
def test_keys_padded_to_an_even_number_change_nothing(monkeypatch, has_lengths):
    monkeypatch.setattr(production_providers, "cudnn", lambda: jax.nn.dot_product_attention)
    shape = AttentionShape(9, 3, 3, 41, 4, 2, 16, "float32", "ragged", has_lengths)
    xla, _, even, _ = production_providers.contenders(shape)[1:]
    assert even().name == "grouped-cudnn-even"
    assert {x.shape[1] % 2 for x in even().args} == {0}
    exact = production.exact_results(xla(), "both")
    fn, args = production.in_direction(even(), "both")
    assert production.compare(even(), "both", exact, fn(*args)).ok
    *_, same, _ = production_providers.contenders(dataclasses.replace(shape, kv_len=42))
    with pytest.raises(NotImplementedError, match="S is even"):
        same()


def test_a_run_in_small(tmp_path, capsys):
    out = tmp_path / "production.json"
    args = ["--out", str(out), "--quick", "--number", "1", "--jobs", "2"]
    assert (
        production.BENCHMARK.main(
            [*args, "--sweep", "linear_compression both", "attention forward"]
        )
        == 0
    )
    points = json.loads(out.read_text())["points"]
    assert [p["sweep"] for p in points] == ["attention forward", "linear_compression both"]
    for point in points:
        timed = [p for p in point["providers"] if "median_ms" in p]
        assert {"ikbo", "xla"} <= {p["name"] for p in timed}
        assert all(p["ok"] and p["fraction"] > 0 for p in timed)
    assert "best alternative" in capsys.readouterr().out

    page = tmp_path / "docs/performance.md"
    page.parent.mkdir()
    names = ("production-table", "production-worst", "production-table-plot")
    blocks = (f"<!-- begin generated: {n} -->\n<!-- end generated: {n} -->\n" for n in names)
    page.write_text("".join(blocks))
    assert report.main([str(out), "--root", str(tmp_path)]) == 0
    text = page.read_text()
    assert "| attention forward | 1 |" in text
    assert "| linear compression with gradients | 1 |" in text
    assert "| linear compression both, B=" in text
    assert "(images/production.svg)" in text
    assert (tmp_path / "docs/images/production.svg").stat().st_size > 0


def _options(*args):
    return production.BENCHMARK.parse(["--out", os.devnull, *args])


def test_sweeps_take_turns_and_what_a_run_left_out_is_measured_by_another(tmp_path, capsys):
    options = ("--number", "2")
    todo = production.BENCHMARK.todo(_options(*options))
    assert [point.sweep for point in todo] == [*production_draws.SWEEPS, *production_draws.SWEEPS]
    out = tmp_path / "production.json"
    command = ["--out", str(out), *options, "--budget-s", "-1"]
    assert production.BENCHMARK.main(command) == 1
    results = timing.read_results(out)
    assert results["points"] == []
    assert results["left_out"] == [point.name for point in todo]
    names = results["left_out"][3:5]
    left = production.BENCHMARK.todo(_options("--number", "3", "--points", *names))
    assert [point.name for point in left] == names
    assert production.BENCHMARK.main([*command, "--points", "gdpa empty"]) == 2
    assert "no point 'gdpa empty'" in capsys.readouterr().err


@pytest.mark.parametrize(("far", "compilations"), [(np.inf, 1), (1e9, 2), (0.0, 1)])
def test_xla_is_compiled_with_its_defaults_unless_it_is_far(monkeypatch, far, compilations):
    def maker(name, is_xla=False):
        contender = production_providers.Contender(name, "", jnp.sin, (jnp.zeros(1),))
        return lambda: contender._replace(is_xla=is_xla)

    options, compile_and_check = [], harness.compile_and_check

    def count(*args):
        options.append((args[0], args[4]))
        return compile_and_check(*args)

    monkeypatch.setattr(harness, "compile_and_check", count)
    makers = [maker("ikbo"), maker("xla", is_xla=True), maker("quick")]
    found = production.checked(makers, "forward", far)
    assert [contender.record["name"] for contender in found] == ["ikbo", "xla", "quick"]
    expected = [production.UNTIMED] * (far < np.inf) + [None] * (far > 0)
    assert len(expected) == compilations
    assert options == [("ikbo", None), ("quick", None), *(("xla", x) for x in expected)]
    assert ("note" in found[1].record) == (far == 0)


def test_what_cannot_run_is_left_out_and_this_library_fails():
    def refused():
        raise RuntimeError("refused")

    def broken(x):
        raise RuntimeError("broken")

    def sine(name, fn=jnp.sin):
        return lambda: production_providers.Contender(name, "", fn, (jnp.zeros(1),))

    def another():
        return sine("another")()._replace(other="no cosine")

    makers = [sine("ikbo", broken), sine("xla"), refused, sine("other", broken), another]
    found = [contender.record for contender in production.checked(makers, "forward")]
    assert found[0]["failure"] == "RuntimeError: broken"
    assert found[1]["ok"]
    assert found[2] == {"name": "refused", "stage": "-", "skipped": "RuntimeError: refused"}
    assert found[3]["skipped"] == "RuntimeError: broken"
    assert found[4]["note"] == "another function: no cosine"
