"""The benchmark of drawn workloads: its draws, its summary, a run in small."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    children,
    harness,
    production,
    production_draws,
    production_providers,
    report,
    yardsticks,
)
from benchmarks import production_bounds as bounds
from benchmarks import production_programs as programs
from benchmarks.harness import Point
from benchmarks.production_draws import (
    DRAWS,
    MAX_BYTES,
    MAX_FLOPS,
    AttentionShape,
    CompressionShape,
    GdpaShape,
)
from ikbo_jax.cases.error_rule import Check

#: Sizes at which copies of keys, and scores, are far larger than the L2 cache.
LARGE = AttentionShape(4096, 64, 16, 1024, 2, 2, 128, "bfloat16", "even", has_lengths=False)


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


def _check_with_another_scale(contender, direction, exact):
    """The contender's results are right; those of a function with another scale are wrong."""
    fn, args = programs.in_direction(contender, direction)
    results = jax.jit(fn)(*args)
    assert programs.compare(contender, direction, exact, results).ok
    scaled = [jax.device_put(np.asarray(x) * x.dtype.type(1.1)) for x in results]
    assert not programs.compare(contender, direction, exact, scaled).ok


def test_a_wrong_result_is_found():
    """In the result, and in the gradients."""
    shape = production_draws.shrink(production_draws.shapes("linear_compression", 1)[0])
    ours, *_, by_hand, _ = production_providers.contenders(shape)
    assert by_hand().name == "xla-by-hand"
    for direction in ("forward", "both", "backward"):
        exact = programs.exact_results(by_hand(), direction)
        _check_with_another_scale(ours(), direction, exact)


@pytest.mark.parametrize(("batch", "users"), [(60, 2), (4617, 1)])
def test_gradients_that_xla_adds_in_bfloat16_are_right(batch, users):
    """A rounding for each candidate of a user is what a model written by hand has."""
    shape = CompressionShape(batch, users, 6, 16, 20, 9, "bfloat16", "ragged")
    _, exact_form, _, *by_hand = production_providers.contenders(shape)
    by_hand = [make() for make in by_hand]
    assert [contender.name for contender in by_hand] == ["xla-by-hand", "copies"]
    exact = programs.exact_results(exact_form(), "both")
    for contender in by_hand:
        _check_with_another_scale(contender, "both", exact)


@pytest.mark.parametrize("op", ["attention", "linear_compression", "gdpa"])
def test_programs_take_indices_and_lengths_as_arguments(op):
    """As a constant, XLA would sort an index while it compiles.

    With "both", the programs have the forward pass and its gradients. Of two shapes of attention,
    one has lengths.
    """
    for shape in map(production_draws.shrink, production_draws.shapes(op, 2)):
        for make in production_providers.contenders(shape)[:2]:  # the library's op, and in XLA
            fn, args = programs.in_direction(make(), "both")
            assert any(x.dtype == np.int32 for x in args)
            consts = jax.make_jaxpr(fn)(*args).consts
            assert not [c for c in consts if np.issubdtype(c.dtype, np.integer) and c.size > 1]


@pytest.mark.parametrize("has_lengths", [False, True])
def test_keys_padded_to_an_even_number_change_nothing(monkeypatch, has_lengths):
    monkeypatch.setattr(yardsticks, "cudnn", lambda: jax.nn.dot_product_attention)
    shape = AttentionShape(9, 3, 3, 41, 4, 2, 16, "float32", "ragged", has_lengths)
    xla, _, even, _ = production_providers.contenders(shape)[1:]
    assert even().name == "grouped-cudnn-even"
    assert {x.shape[1] % 2 for x in even().args} == {0}
    exact = programs.exact_results(xla(), "both")
    fn, args = programs.in_direction(even(), "both")
    assert programs.compare(even(), "both", exact, fn(*args)).ok
    *_, same, _ = production_providers.contenders(dataclasses.replace(shape, kv_len=42))
    with pytest.raises(NotImplementedError, match="S is even"):
        same()


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


def test_a_process_that_fails_ends_the_run(tmp_path, capsys, monkeypatch):
    """What is missing is said, and the status is 1."""
    monkeypatch.setattr(children, "command", lambda *args: [sys.executable, "-S", "-c", "raise"])
    monkeypatch.setattr(production.harness, "print_results", lambda results, lines: 0)
    out = tmp_path / "production.json"
    args = ["--out", str(out), "--quick", "--number", "1", "--jobs", "2"]
    assert production.main([*args, "--sweep", "attention forward"]) == 1
    error = capsys.readouterr().err
    assert "2 of 2 processes failed" in error
    assert "1 points are missing" in error
    (left_out,) = json.loads(out.read_text())["left_out"]
    assert left_out.startswith("attention forward B=")


def _run_here(module, arguments, extra):
    """Instead of `children.start`: the processes' work, done by this process before it goes on."""
    for each in arguments:
        production.main(each)
    return [subprocess.Popen([sys.executable, "-S", "-c", ""]) for _ in arguments]


def test_the_budget_leaves_points_out_and_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(production.harness, "print_results", lambda results, lines: 0)
    monkeypatch.setattr(children, "start", _run_here)
    out = tmp_path / "production.json"
    args = ["--out", str(out), "--quick", "--number", "2", "--budget-s", "0"]
    assert production.main([*args, "--sweep", "gdpa both"]) == 1
    results = json.loads(out.read_text())
    assert results["points"] == []
    assert len(results["left_out"]) == 2
    # Another run measures them, and no other points.
    results["left_out"].pop(0)
    out.write_text(json.dumps(results))
    chosen = []
    monkeypatch.setattr(
        production, "_measure_all", lambda args, *_: chosen.extend(production._todo(args)) or True
    )
    rest = tmp_path / "rest.json"
    args = ["--out", str(rest), "--quick", "--number", "3", "--left", str(out)]
    production.main([*args, "--sweep", "gdpa both"])
    assert [f"{p.sweep} {p.label}" for p in chosen] == results["left_out"]


def test_sweeps_take_turns_and_directions_of_a_workload_stay_together():
    todo = production.points(production_draws.SWEEPS, 2, 0)
    assert [point.sweep for point in todo] == [*production_draws.SWEEPS, *production_draws.SWEEPS]
    groups = production.workloads(todo)
    assert sorted(n for group in groups for n in group) == list(range(len(todo)))
    assert [len(group) for group in groups] == [2, 2, 2, 1] * 2
    assert all(len({todo[n].case for n in group}) == 1 for group in groups)


def test_no_point_is_compiled_that_could_not_be_timed(tmp_path, monkeypatch):
    small = Point("", "", production_draws.shrink(LARGE), "both")
    assert production.timing_s(small) == production.SHORT_TIMING_S < production.TIMING_S
    now = production.time.time()
    monkeypatch.setattr(production.time, "time", lambda: now)
    point = Point("", "", LARGE)
    assert production.timing_s(point) == production.TIMING_S
    seconds = production.COMPILING_S + 3 * production.TIMING_S
    budget = production.Budget(tmp_path, now + seconds + 1)
    for number in range(3):
        assert budget.has_time(point)
        (tmp_path / f"begun-{production.device()}-{number}-{production.timing_s(point)}").touch()
    assert not budget.has_time(point)
    assert not budget.has_time()


def test_ceilings_are_measured_once(tmp_path, monkeypatch):
    quick = functools.partial(production.timing.copy_ceiling, window_s=0.001, rounds=1)
    monkeypatch.setattr(production.timing, "copy_ceiling", quick)
    found = production.ceilings(tmp_path)
    assert found.copy_tb_per_s > 0
    monkeypatch.setattr(production.timing, "copy_ceiling", None)  # it is not called again
    assert production.ceilings(tmp_path) == found
    with pytest.raises(TypeError):
        production.ceilings(tmp_path / "another run")


def test_bounds_count_only_what_certainly_leaves_the_cache():
    rates = bounds.Peaks(1e12, 1e15)
    copies = 4096 * 1024 * 2 * 2 * 2 * 128 - bounds.L2_BYTES  # bytes of keys and values
    work = bounds.attention_copies(LARGE)
    forward_ms = bounds.least_ms(work, "forward", rates)
    assert forward_ms == pytest.approx(2 * copies / 1e12 * 1e3)
    # Read again for the gradients; their own copies are written and read.
    both_ms = bounds.least_ms(work, "both", rates)
    assert both_ms == pytest.approx(5 * copies / 1e12 * 1e3)
    # With few FLOPs per second, the product takes longer than reading the copies.
    slow = bounds.Peaks(1e12, 1e12)
    expected = copies / 1e12 + LARGE.flops / 1e12
    assert bounds.least_ms(work, "forward", slow) == pytest.approx(expected * 1e3)


def test_small_arrays_may_stay_in_the_cache():
    small = production_draws.shrink(LARGE)
    rates = bounds.Peaks(1e3, 1e30)
    for work in (bounds.attention_copies(small), bounds.attention_by_xla(small)):
        assert bounds.least_ms(work, "both", rates) == pytest.approx(0, abs=1e-9)
    assert bounds.least_ms(bounds.attention_by_xla(LARGE), "forward", rates) > 0
    assert bounds.least_ms(bounds.Work(), "both", rates) == 0
    assert bounds.peaks() is None  # without a Hopper GPU


def test_an_alternative_is_left_out_only_beyond_the_margin():
    assert programs.why_not_best(1.2, "grouped-cudnn", 0.3) == (
        "cannot be the best: its copies, scores and FLOPs alone take 1.2 ms, grouped-cudnn took "
        "0.3 ms"
    )
    assert programs.why_not_best(0.3 * programs.MARGIN, "grouped-cudnn", 0.3) == ""
    assert programs.why_not_best(0.0, "grouped-cudnn", 0.3) == ""
    untuned, cublas = programs.TUNINGS
    assert cublas.note(0.3 * programs.FAR, "xla-by-hand", 0.3) == ""
    note = "GEMMs by cuBLAS alone: 1.2 ms beside 0.3 ms of xla-by-hand"
    assert cublas.note(1.2, "xla-by-hand", 0.3) == note
    assert untuned.note(1.2, "xla-by-hand", 0.3) == ""
    note = "GEMMs not tuned: 2.5 ms beside 0.3 ms of xla-by-hand"
    assert untuned.note(2.5, "xla-by-hand", 0.3) == note


def _slow_copies(shape, stages):
    """A maker of the contender "copies" with another bound of its time."""

    def copies():
        (found,) = (m for m in production_providers.contenders(shape) if m.__name__ == "copies")
        return found()._replace(work=bounds.Work(stages))

    return copies


@pytest.mark.parametrize(("seconds", "is_left_out"), [(1e3, True), (1e-9, False)])
def test_what_is_left_out_is_in_the_results(monkeypatch, seconds, is_left_out):
    shape = production_draws.shrink(production_draws.shapes("linear_compression", 1)[0])
    makes = [*production_providers.contenders(shape)[:-1]]
    rates = bounds.Peaks(1.0, 1e30)
    makes.append(_slow_copies(shape, (bounds.Stage(seconds),)))
    monkeypatch.setattr(programs, "contenders", lambda shape: makes)
    changed = [x._replace(far=1e9) for x in programs.TUNINGS]
    monkeypatch.setattr(programs, "TUNINGS", changed)
    found = programs.compiled(shape, "forward", rates)
    (copies,) = (p for p in found if p.record["name"] == "copies")
    if is_left_out:
        assert copies.compiled is None
        assert copies.record["least_ms"] == pytest.approx(1e6)
        assert "copies, scores and FLOPs alone take 1e+06 ms, xla-" in copies.record["skipped"]
    else:
        assert copies.record["ok"]
    assert found[0].record["name"] == "ikbo"
    assert found[-1].record["name"] == "xla"


@pytest.mark.parametrize(("fars", "tunings"), [((1e9, 1e9), 3), ((1e9, 0.0), 2), ((0.0, 1e9), 1)])
def test_xla_is_compiled_with_its_defaults_unless_it_is_far(monkeypatch, fars, tunings):
    shape = production_draws.shrink(production_draws.shapes("linear_compression", 1)[0])

    def maker(name, is_xla=False):
        contender = production_providers.Contender(name, "", jnp.sin, (jnp.zeros(1),))
        return lambda: contender._replace(is_xla=is_xla)

    options = []
    checked = programs._checked

    def count(contender, *args):
        options.append((contender.name, args[-1]))
        return checked(contender, *args)

    makers = [maker("ikbo"), maker("xla", is_xla=True), maker("quick")]
    monkeypatch.setattr(programs, "contenders", lambda shape: makers)
    monkeypatch.setattr(programs, "_checked", count)
    changed = [x._replace(far=far) for x, far in zip(programs.TUNINGS, fars, strict=True)]
    monkeypatch.setattr(programs, "TUNINGS", changed)
    found = programs.compiled(shape, "forward", bounds.Peaks(1e30, 1e30))
    expected = [programs.UNTIMED, programs.NETWORK_ON_GPU, None][:tunings]
    assert options == [("ikbo", None), ("quick", None), *(("xla", x) for x in expected)]
    assert ("note" in found[-1].record) == (tunings < 3)
    # Without known rates, everything is compiled once, with XLA's defaults.
    options.clear()
    programs.compiled(shape, "forward", None)
    assert options == [("ikbo", None), ("quick", None), ("xla", None)]


def test_slow_alternatives_are_not_timed_exactly(monkeypatch):
    times = {"ikbo": 9.0, "cudnn": 2.0, "near": 5.9, "far": 6.1, "small": 0.9}
    monkeypatch.setattr(programs, "by_turns_ms", lambda thunk: [times[thunk()]])

    def contender(name):
        return harness.Contender({"name": name, "error": 0.0}, lambda: name, compiled=name)

    skipped = harness.Contender({"name": "refused", "skipped": "why"})
    found = [*map(contender, ("ikbo", "cudnn", "near", "far")), skipped]
    kept = programs.leave_out_slow(found)
    assert [c.record["name"] for c in kept] == ["ikbo", "cudnn", "near", "refused"]
    assert found[3].record["rough_ms"] == 6.1
    assert found[3].record["skipped"] == "cannot be the best: a call takes 6.1 ms, cudnn 2 ms"
    # A call of less than a millisecond may take longer in Python than on the device.
    times["cudnn"] = 0.1
    assert programs.leave_out_slow([*map(contender, ("cudnn", "small"))])[1].record == {
        "name": "small",
        "error": 0.0,
    }


@pytest.mark.parametrize(
    ("error", "bound", "ratio"),
    [(1.0, 2.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, np.inf), (np.nan, 1.0, np.inf)],
)
def test_zeros_and_nan_have_a_ratio(error, bound, ratio):
    assert programs.ratio(Check(error, bound)) == ratio
