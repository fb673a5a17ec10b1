"""The benchmarks of attention and of generalised dot-product attention, on shapes for a CPU."""

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    gdpa,
    harness,
    linear_compression,
    look_up,
    production,
    production_providers,
    ranking,
    timing,
    training,
)
from benchmarks.gdpa import Sizes
from benchmarks.harness import Point
from benchmarks.production_draws import AttentionShape
from benchmarks.production_providers import contenders
from ikbo_jax.cases import gdpa as cases
from ikbo_jax.cases import gdpa_backward

pytestmark = pytest.mark.slow

TINY_ATTENTION = AttentionShape(9, 3, 4, 16, 4, 2, 8, "bfloat16", "even", has_lengths=False)
TINY = Sizes(3, 6, 6, 2, 8)
SHORT = harness.Protocol(window_s=0.001, rounds=2, matmul_size=64)
OPS = (attention, gdpa, linear_compression)


def points_of(module, *options: str) -> list[Point]:
    return module.BENCHMARK.todo(module.BENCHMARK.parse(["--out", os.devnull, *options]))


BACKWARD = ("--direction", "backward")


@pytest.mark.parametrize(
    ("module", "options"),
    [
        *((module, ()) for module in (*OPS, look_up, ranking, training)),
        *((module, BACKWARD) for module in (attention, linear_compression)),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else x.__name__,
)
def test_every_sweep_has_points_that_differ_and_shrink(module, options):
    every = points_of(module, *options)
    assert every
    assert len({(p.sweep, p.label) for p in every}) == len(every)
    for p in every:
        small = module.BENCHMARK.shrink(p)
        assert (small.sweep, small.label, type(small.case)) == (p.sweep, p.label, type(p.case))
        assert small.case != p.case


@pytest.mark.parametrize(
    ("module", "options"), [(attention, BACKWARD), (linear_compression, BACKWARD), (training, ())]
)
def test_no_two_points_are_of_the_same_sizes(module, options):
    every = points_of(module, *options)
    assert len({(p.case, p.direction) for p in every}) == len(every)


def test_points_of_attention():
    every = points_of(attention)
    assert {label.split(" S=")[0] for label in attention.RELATIVE_BARS} <= {p.label for p in every}
    for p in every:
        small = harness.shrink(p).case
        assert small.flops < p.case.flops / 1000
        assert small.q_heads % small.kv_heads == 0
    (seventy,) = (p.case for p in every if p.label == "70:1")
    assert seventy.batch == 70 * seventy.users


@pytest.mark.parametrize("index", ["even", "ragged", "unsorted"])
@pytest.mark.parametrize("lengths", ["full", "half"])
def test_inputs_are_what_the_point_of_attention_says(index: str, lengths: str):
    fields = {"index": index, "has_lengths": lengths == "half", "shortest": 8}
    shape = dataclasses.replace(TINY_ATTENTION, **fields)
    inputs = shape.inputs()
    users = np.asarray(inputs.cand_to_user)
    assert inputs.query.shape == (9, 4, 4, 8)
    assert users.min() >= 0
    assert users.max() < 3
    assert shape.is_sorted == bool(np.all(np.diff(users) >= 0)) == (index != "unsorted")
    if lengths == "full":
        assert inputs.lengths is None
        assert shape.flops == 4 * 9 * 4 * 4 * 8 * 16
    else:
        seen = np.asarray(inputs.lengths)
        assert np.all((seen >= 8) & (seen <= 16))
        assert shape.flops == 4 * 4 * 4 * 8 * seen[users].sum()


@pytest.mark.parametrize("index", ["ragged", "unsorted"])
def test_grouping_by_hand_and_back(monkeypatch, index: str):
    def attend(query, key, value, *, key_value_seq_lengths):
        assert query.shape[0] == key.shape[0] == 3
        assert key_value_seq_lengths is None
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(query, key, value, implementation="xla")

    monkeypatch.setattr(production_providers, "cudnn", lambda: attend)
    shape = dataclasses.replace(TINY_ATTENTION, index=index)
    found = production.checked(contenders(shape, is_drawn=False)[:3], "forward")
    assert found[2].record["name"] == "grouped-cudnn"
    assert found[2].record["ok"]


def attend_in_f32(query, key, value):
    """Cheaper to compile than what the benchmark has, for a CPU."""
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    scores = jnp.float32(q.shape[-1] ** -0.5) * jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v).astype(query.dtype)


def contender_of(name: str, sizes: Sizes, arrays: Any = None) -> production_providers.Contender:
    point, arrays = Point("full", "", sizes), arrays or sizes.case.inputs()
    makers = {x.__name__: x for x in gdpa.contenders(point, arrays)}
    return makers[name]()


def test_points_of_gdpa():
    every = points_of(gdpa)
    names = {gdpa.name_of(p) for p in every if p.sweep == "activations"}
    assert {*gdpa.RELATIVE_BARS, *(name for name, _ in gdpa.RELATIVE_BARS.values())} <= names
    for sweep, direction in gdpa.FRACTION_BARS:
        lengths = [p.case.q_len for p in every if (p.sweep, p.direction) == (sweep, direction)]
        assert lengths == list(gdpa.LENGTHS)
    for p in every:
        small = harness.shrink(p).case
        pairs, of_point = (x.batch * x.q_len * x.kv_len for x in (small, p.case))
        assert 1000 * pairs < of_point
        assert min(small.batch, small.q_len, small.kv_len, small.head_dim) > 1


@pytest.mark.parametrize(
    "sizes",
    [
        TINY,
        dataclasses.replace(TINY, lengths="half", batch=40),
        dataclasses.replace(TINY, q_len=2, broadcast_q=True),
    ],
)
def test_inputs_are_what_the_sizes_say(sizes: Sizes):
    query, key, value, cu_q, cu_kv, *_ = sizes.case.inputs()
    lengths = np.diff(cu_kv)
    assert key.shape == value.shape == (lengths.sum(), 2, 8)
    assert len(lengths) == sizes.batch
    assert (lengths.min(), lengths.max()) == ((1, 6) if sizes.lengths == "half" else (6, 6))
    if sizes.broadcast_q:
        assert cu_q is None
        assert query.shape[0] == 2
    else:
        np.testing.assert_array_equal(cu_q, cu_kv)
        assert query.shape == key.shape
    q_lengths = 2 if sizes.broadcast_q else lengths
    assert sizes.case.pairs == (q_lengths * lengths).sum()


@pytest.mark.parametrize(
    ("name", "cudnn", "sizes", "direction"),
    [
        ("xla", None, dataclasses.replace(TINY, lengths="half"), "both"),
        # Another function than the sizes': its results are compared with its own oracle.
        (
            "cudnn_softmax",
            lambda: attend_in_f32,
            dataclasses.replace(TINY, q_len=2, broadcast_q=True),
            "backward",
        ),
        (
            "cudnn_softmax",
            lambda: jax.nn.dot_product_attention,
            dataclasses.replace(TINY, lengths="half").with_softmax(),
            "both",
        ),
    ],
    ids=["xla", "dense", "padded"],
)
def test_oracle_admits_the_right_result_and_no_other(
    name: str, cudnn: Any, sizes: Sizes, direction: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(production_providers, "cudnn", cudnn)
    arrays = sizes.case.inputs()
    contender = contender_of(name, sizes, arrays)
    check = functools.partial(gdpa.check_of(Point("", "", sizes, direction), arrays), contender)
    fn, args = production.in_direction(contender, direction)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's gradient needs it
        out = jax.jit(fn)(*args)
    error, bound = check(out)
    assert 0 < error <= bound < 0.05
    for number, array in enumerate(map(np.asarray, out)):
        for wrong in (np.full_like(array, np.nan), array * array.dtype.type(1.1)):
            results = (*out[:number], wrong, *out[number + 1 :])
            error, bound = check(results)
            assert not error <= bound, (number, error, bound)


def test_oracle_finds_a_fault_that_the_xla_path_has_too(monkeypatch: pytest.MonkeyPatch):
    arrays = TINY.case.inputs()
    contender = contender_of("xla", TINY, arrays)
    fn, args = production.in_direction(contender, "both")
    out, *gradients = (x * x.dtype.type(1.1) for x in jax.jit(fn)(*args))
    by_xla, gradients_by_xla = cases._xla_runner(TINY.case), gdpa_backward._by_xla
    monkeypatch.setattr(cases, "_xla_runner", lambda _: lambda *x: by_xla(*x) * 1.1)
    monkeypatch.setattr(
        gdpa_backward, "_by_xla", lambda *x: tuple(g * 1.1 for g in gradients_by_xla(*x))
    )
    for direction, results in (("forward", (out,)), ("backward", gradients)):
        error, bound = gdpa.check_of(Point("", "", TINY, direction), arrays)(contender, results)
        assert not error <= bound, (direction, error, bound)


@pytest.mark.parametrize(
    ("module", "point", "flops"),
    [
        (attention, Point("s", "S=16", TINY_ATTENTION), TINY_ATTENTION.flops),
        (gdpa, Point("full", "max=256 forward", TINY.with_softmax()), 4 * 3 * 6 * 6 * 2 * 8),
    ],
)
def test_run_writes_what_it_measured(module, point, flops, tmp_path, monkeypatch, capsys):
    benchmark = dataclasses.replace(module.BENCHMARK, points=[point], shrink=lambda point: point)
    monkeypatch.setattr(harness.Protocol, "for_device", lambda **_: SHORT)
    path = tmp_path / "run.json"
    assert benchmark.main(["--out", str(path), "--sweep", point.sweep]) == 0
    (measured,) = timing.read_results(path)["points"]
    assert measured["useful_flops"] == flops
    by_name = {p["name"]: p for p in measured["providers"]}
    for name in ("xla", "ikbo") if module is attention else ("ikbo-attention",):
        assert by_name[name]["ok"]
        assert len(by_name[name]["ms"]) == 2
    if jax.default_backend() == "cpu":
        cudnn = "copies-cudnn" if module is attention else "cudnn-softmax"
        assert "needs a GPU" in by_name[cudnn]["skipped"]
        assert module is attention or "mosaic_gpu" in by_name["ikbo"]["skipped"]
    printed = capsys.readouterr().out
    assert point.name in printed
    if module is gdpa:
        assert by_name.keys() == {"ikbo", "xla", "cudnn-softmax", "ikbo-attention"}


def test_what_is_too_long_for_xla_is_skipped(monkeypatch):
    monkeypatch.setattr(gdpa, "MAX_XLA_PAIRS", 107)
    with pytest.raises(NotImplementedError, match="too long"):
        contender_of("xla", TINY)
