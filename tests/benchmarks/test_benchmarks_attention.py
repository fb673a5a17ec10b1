"""The attention benchmark, on shapes for a CPU."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import attention, harness, production, production_providers, timing
from benchmarks.production_draws import AttentionShape
from benchmarks.production_providers import contenders

pytestmark = pytest.mark.slow

TINY = AttentionShape(9, 3, 4, 16, 4, 2, 8, "bfloat16", "even", has_lengths=False)


def test_every_sweep_has_points_that_differ_and_shrink():
    every = [p for sweep in attention.SWEEPS for p in attention.points(sweep)]
    assert len({(p.sweep, p.label) for p in every}) == len(every)
    assert {label.split(" S=")[0] for label in attention.RELATIVE_BARS} <= {p.label for p in every}
    for p in every:
        small = attention.shrink(p).case
        assert small.flops < p.case.flops / 1000
        assert small.q_heads % small.kv_heads == 0
    (seventy,) = (p.case for p in attention.points("ratio") if p.label == "70:1")
    assert seventy.batch == 70 * seventy.users


@pytest.mark.parametrize("index", ["even", "ragged", "unsorted"])
@pytest.mark.parametrize("lengths", ["full", "half"])
def test_inputs_are_what_the_point_says(index: str, lengths: str):
    kind = AttentionShape if lengths == "full" else attention.LongLengths
    fields = {"index": index, "has_lengths": lengths == "half"}
    shape = kind(**dataclasses.asdict(TINY) | fields)
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
    shape = dataclasses.replace(TINY, index=index)
    found = production.checked(contenders(shape, is_drawn=False)[:3], "forward")
    assert found[2].record["name"] == "grouped-cudnn"
    assert found[2].record["ok"]


def test_run_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    benchmark = dataclasses.replace(
        attention.BENCHMARK,
        points=lambda options: [harness.Point("s", "S=16", TINY)],
        shrink=lambda point: point,
    )
    path = tmp_path / "run.json"
    short = harness.Protocol(window_s=0.002, rounds=2, matmul_size=64)
    monkeypatch.setattr(harness.Protocol, "for_device", lambda **_: short)
    assert benchmark.main(["--out", str(path)]) == 0
    results = timing.read_results(path)
    (measured,) = results["points"]
    by_name = {p["name"]: p for p in measured["providers"]}
    for name in ("xla", "ikbo"):
        assert by_name[name]["ok"]
        assert len(by_name[name]["ms"]) == 2
    if jax.default_backend() == "cpu":
        assert "needs a GPU" in by_name["copies-cudnn"]["skipped"]
    assert "S=16" in capsys.readouterr().out
