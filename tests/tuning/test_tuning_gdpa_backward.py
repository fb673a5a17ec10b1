"""The gradient of generalised dot-product attention in the dispatch table and in the autotuner."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.autotuner import autotune
from ikbo_jax.autotuner.bench import Task, lower, measure
from ikbo_jax.cases import gdpa_backward
from ikbo_jax.ops import dispatch
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.problems import GdpaBackwardProblem, GdpaBackwardTuning, GdpaProblem
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.tuning import table, table_rows

FORWARD = GdpaProblem(
    *(1152, 1152, 1152 * 512, 1152 * 512, 4, 4, 128, "bfloat16"),
    *(("gelu",), None, False, 1024, 1024),
)
DEFAULT = GdpaBackwardProblem.of(FORWARD)
SOFTMAX = dataclasses.replace(DEFAULT, activations=("softmax",))
TINY = GdpaBackwardProblem(*(4, 4, 20, 24, 2, 1, 8, "float32"), *(("silu",), None, False, 9, None))
OTHER = dataclasses.replace(DEFAULT.default_config(), query_block=96, query_stages=2)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path / "cache"))


def row(problem, config):
    return table_rows.Row(problem, config, "NVIDIA H200", "2026-11-24", "0.11.2", 1.0, 0.5)


@pytest.fixture
def builtin(monkeypatch):
    return lambda *rows: monkeypatch.setattr(table, "builtin_rows", lambda: rows)


@pytest.mark.parametrize("head_dim", configs.HEAD_DIMS)
@pytest.mark.parametrize("activation", ["gelu", "softmax"])
def test_candidates_are_legal_and_begin_with_the_default(head_dim, activation, builtin):
    """Without a row, the kernels run as they did before there was a table."""
    builtin()
    problem = dataclasses.replace(DEFAULT, head_dim=head_dim, activations=(activation,))
    found = list(problem.candidate_configs())
    default = configs.default_config(head_dim)
    assert found[0] == problem.default_config() == table.lookup(problem).config
    assert (found[0].query, found[0].key) == (default, default)
    assert len(set(found)) == len(found) > 8
    assert all(config.illegal_reason(problem) is None for config in found)
    for field in dataclasses.fields(GdpaBackwardTuning):
        assert len({getattr(config, field.name) for config in found}) > 1, field.name


def test_rows_of_one_direction_say_nothing_about_the_other(builtin):
    builtin(row(FORWARD, FORWARD.default_config()), row(DEFAULT, OTHER))
    assert table.lookup(DEFAULT).config == OTHER
    assert table.lookup(FORWARD).config == FORWARD.default_config()
    assert table.distance(FORWARD, DEFAULT) == float("inf")
    builtin(row(FORWARD, FORWARD.default_config()))
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.source) == (DEFAULT.default_config(), "default")


def test_narrow_blocks_are_for_short_sequences(builtin):
    short = dataclasses.replace(DEFAULT, q_rows=1152 * 20, kv_rows=1152 * 20)
    narrow = GdpaBackwardTuning(32, 3, 32, 3)
    builtin(row(short, narrow))
    assert table.lookup(dataclasses.replace(short, batch=1100)).config == narrow
    assert table.lookup(DEFAULT).config == DEFAULT.default_config()
    assert table.lookup(SOFTMAX).config == SOFTMAX.default_config()


@pytest.mark.parametrize("config", [OTHER, None], ids=["kernels", "xla"])
def test_rows_survive_json(config):
    original = row(DEFAULT, config)
    assert table_rows.Row.from_json(json.loads(json.dumps(original.to_json()))) == original


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "but the inputs are float32"),
        ({"head_dim": 256}, "H=256"),
        ({"activations": ("softmax", "gelu", "gelu", "gelu")}, "softmax in all heads or in none"),
        ({"kv_rows": 0}, "need a query, a key and a sequence"),
    ],
)
def test_without_a_legal_configuration_xla_runs(changes, message):
    problem = dataclasses.replace(DEFAULT, **changes)
    assert list(problem.candidate_configs()) == []
    choice = table.lookup(problem)
    assert choice.config is None
    assert message in choice.reason


def test_the_op_takes_the_row_or_xla(monkeypatch, builtin):
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    builtin(row(DEFAULT, OTHER))
    request = dispatch.Request("gdpa", None, None)
    config, reason = op.choose(request, FORWARD)
    assert (config, "sm90.json, batch=1152" in reason) == (OTHER, True)
    builtin(row(DEFAULT, None))
    config, reason = op.choose(request, FORWARD)
    assert (config, "sm90.json, batch=1152" in reason) == (None, True)
    insisting = dispatch.Request("gdpa", "mosaic_gpu", None)
    assert op.choose(insisting, FORWARD)[0] == DEFAULT.default_config()
    builtin()
    assert op.choose(request, FORWARD)[0] == DEFAULT.default_config()


# The tuner.


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_worker_measures_the_gradient_on_this_machine(activation):
    problem = dataclasses.replace(TINY, activations=(activation,))
    task = Task(problem, (None,), window_s=0.002, windows=2, matmul_size=64)
    found = measure(Task.from_json(task.to_json()))
    assert "failure" not in found["results"][0], found
    assert found["results"][0]["error"] <= found["results"][0]["bound"]


@pytest.mark.parametrize("activation", ["gelu", "softmax"])
def test_worker_lowers_the_kernels_without_a_device(activation):
    problem = dataclasses.replace(
        DEFAULT, batch=4, batch_kv=4, q_rows=400, kv_rows=400, activations=(activation,)
    )
    assert not isinstance(lower(problem, list(problem.candidate_configs())[-1], 132), str)


def test_tuning_writes_the_winner():
    def run(task):
        times = [0.5 if config == OTHER else 1.0 for config in task.contenders]
        return {
            "device": "NVIDIA H100",
            "compute_capability": "9.0",
            "jax": "0.11.2",
            "matmul_ms": [1.6, 1.7, 1.8],
            "results": [{"ms": [ms, 1.001 * ms]} for ms in times],
        }

    autotune.tune_gdpa_backward(DEFAULT, run=run)
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.source) == (OTHER, "user cache")
    assert DEFAULT.useful_flops(10) == 2.5 * FORWARD.useful_flops(10)
    with pytest.raises(ValueError, match="do not fill 1152 sequences"):
        autotune.tune_gdpa_backward(dataclasses.replace(DEFAULT, q_rows=100), run=run)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_check_admits_the_right_gradients_and_no_other(dtype):
    case = gdpa_backward.Case(dataclasses.replace(TINY, dtype=dtype))
    inputs = case.inputs()
    right = case.runner(None)(*inputs)
    assert case.check(right, inputs).ok
    for which, bad in itertools.product(range(3), (3.0, np.nan)):
        wrong = [np.array(x) for x in right]
        wrong[which][1, 0, 3] += np.asarray(bad, dtype)
        assert not case.check(tuple(map(jnp.asarray, wrong)), inputs).ok


def test_the_kernels_gradients_have_the_shapes_of_xlas():
    problem = dataclasses.replace(TINY, dtype="bfloat16", head_dim=64)
    case = gdpa_backward.Case(problem)
    inputs = jax.eval_shape(case.inputs)
    kernels = jax.eval_shape(case.runner(problem.default_config(), num_sms=132), *inputs)
    by_xla = jax.eval_shape(case.runner(None), *inputs)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), found) for found in (kernels, by_xla)]
    assert shapes[0] == shapes[1]
