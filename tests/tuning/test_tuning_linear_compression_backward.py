"""The gradient of linear compression in the dispatch table and in the autotuner."""

from __future__ import annotations

import dataclasses
import itertools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ikbo_jax as ikbo
from ikbo_jax.autotuner import autotune
from ikbo_jax.autotuner.bench import Task, measure
from ikbo_jax.cases import linear_compression_backward
from ikbo_jax.ops import dispatch
from ikbo_jax.ops import linear_compression_backward as op
from ikbo_jax.problems import (
    LinearCompressionBackwardProblem,
    LinearCompressionBackwardTuning,
    LinearCompressionProblem,
)
from ikbo_jax.problems import linear_compression_backward as configs
from ikbo_jax.tuning import table, table_rows

FORWARD = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
DEFAULT = LinearCompressionBackwardProblem.of(FORWARD)
TINY = LinearCompressionBackwardProblem((3, 20), (9, 7), 6, 8, "float32")
OTHER = dataclasses.replace(DEFAULT.default_config(), weight_stages=4)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path / "cache"))


def row(problem, config):
    return table_rows.Row(problem, config, "NVIDIA H200", "2026-11-24", "0.11.2", 1.0, 0.5)


@pytest.fixture
def builtin(monkeypatch):
    return lambda *rows: monkeypatch.setattr(table, "builtin_rows", lambda: rows)


@hypothesis.given(
    m=st.integers(1, 3000),
    n=st.integers(1, 100).map(lambda eighth: 8 * eighth),
    ks=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_a_row_holds_all_of_the_default_configuration(m, n, ks, dtype):
    """Without a row, the kernels run as they did before there was a table."""
    forward = LinearCompressionProblem(tuple(range(1, len(ks) + 1)), tuple(ks), m, n, dtype)
    problem = LinearCompressionBackwardProblem.of(forward)
    default = problem.default_config()
    assert default is not None
    assert default.kernels(problem) == configs.default_config(forward)
    assert next(problem.candidate_configs()) == default


def test_candidates_are_legal_and_differ_in_every_parameter():
    for problem in (
        DEFAULT,
        dataclasses.replace(DEFAULT, batches=(1024,), ks=(300,), m=64),
        dataclasses.replace(DEFAULT, batches=(3, 30, 300), ks=(64, 40, 70)),
    ):
        found = list(problem.candidate_configs())
        assert found[0] == problem.default_config()
        assert len(set(found)) == len(found)
        assert 10 < len(found) <= 120
        assert all(config.illegal_reason(problem) is None for config in found)
    of_default = list(DEFAULT.candidate_configs())
    for field in dataclasses.fields(LinearCompressionBackwardTuning):
        assert len({getattr(config, field.name) for config in of_default}) > 1, field.name
    one_level = dataclasses.replace(DEFAULT, batches=(64,), ks=(300,))
    assert len({config.sum_stages for config in one_level.candidate_configs()}) == 1


def test_rows_of_one_direction_say_nothing_about_the_other(builtin):
    builtin(row(FORWARD, FORWARD.default_config()), row(DEFAULT, OTHER))
    assert table.lookup(DEFAULT).config == OTHER
    assert table.lookup(FORWARD).config == FORWARD.default_config()
    assert table.distance(FORWARD, DEFAULT) == float("inf")
    builtin(row(FORWARD, FORWARD.default_config()))
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.source) == (DEFAULT.default_config(), "default")


def test_a_near_row_is_used_unless_its_tiles_pad_too_much(builtin):
    builtin(row(DEFAULT, OTHER))
    near = dataclasses.replace(DEFAULT, batches=(20, 900), n=192)
    choice = table.lookup(near)
    assert (choice.config, choice.exact) == (OTHER, False)
    assert "sm90.json, nearest row" in choice.reason
    narrow = dataclasses.replace(DEFAULT, m=40)
    assert table.lookup(narrow).config == narrow.default_config()
    few_k = dataclasses.replace(DEFAULT, ks=(1178, 20))
    assert table.lookup(few_k).config == few_k.default_config()


@pytest.mark.parametrize("config", [OTHER, None], ids=["kernels", "xla"])
def test_rows_survive_json(config):
    original = row(DEFAULT, config)
    assert table_rows.Row.from_json(json.loads(json.dumps(original.to_json()))) == original


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dtype": "float32"}, "but the inputs are float32"), ({"m": 0}, "sizes of at least 1")],
)
def test_without_a_legal_configuration_xla_runs(changes, message):
    problem = dataclasses.replace(DEFAULT, **changes)
    assert list(problem.candidate_configs()) == []
    choice = table.lookup(problem)
    assert choice.config is None
    assert message in choice.reason


def gradients(implementation=None):
    def loss(*arrays):
        index = jnp.asarray([1, 0, 2, 1], jnp.int32)
        out = ikbo.linear_compression(*arrays, index, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2, 3))


def arrays():
    shapes = ((16, 7), (16, 9), (4, 7, 8), (3, 9, 8))
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


PROBLEM = LinearCompressionBackwardProblem((3, 4), (9, 7), 16, 8, "bfloat16")


def test_the_op_takes_the_row_and_explains_it(fake_hopper, builtin):
    tuned = dataclasses.replace(PROBLEM.default_config(), weight_stages=3, sum_stages=5)
    builtin(row(PROBLEM, tuned))
    plan = ikbo.explain(gradients(), *arrays()).plans[0]
    assert plan.backward_config == tuned
    assert f"{tuned}; sm90.json, B=3,4" in plan.backward
    gradients()(*arrays())
    used = [call["config"] for call in fake_hopper.calls]
    kernels = tuned.kernels(PROBLEM)
    assert {kernels.weights[0], kernels.sums, *kernels.embeddings} <= set(used)


def test_a_row_may_prefer_xla_and_the_caller_may_not(fake_hopper, builtin):
    builtin(row(PROBLEM, None))
    plan = ikbo.explain(gradients(), *arrays()).plans[0]
    assert (plan.implementation, plan.backward_config) == ("mosaic_gpu", None)
    assert plan.backward.startswith("XLA, at user and candidate batch size: sm90.json")
    by_xla = gradients()(*arrays())
    assert not [c for c in fake_hopper.calls if isinstance(c["config"], configs.SumConfig)]
    plan = ikbo.explain(gradients("mosaic_gpu"), *arrays()).plans[0]
    assert plan.backward_config == PROBLEM.default_config()
    for found, expected in zip(gradients("mosaic_gpu")(*arrays()), by_xla, strict=True):
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


def test_a_folded_problem_has_a_choice_of_its_own(fake_hopper, builtin):
    folded = dataclasses.replace(PROBLEM, batches=(3 * 5, 4 * 5))
    tuned = dataclasses.replace(folded.default_config(), weight_stages=3)
    builtin(row(folded, tuned), row(PROBLEM, PROBLEM.default_config()))
    request = dispatch.Request("linear_compression", None, None)
    assert op.choose(request, LinearCompressionProblem(**dataclasses.asdict(folded)))[0] == tuned
    w_cand, w_user, e_cand, e_user = arrays()
    many = [jnp.stack([x] * 5) for x in (e_cand, e_user)]
    fake_hopper.calls.clear()
    jax.vmap(gradients(), (None, None, 0, 0))(w_cand, w_user, *many)
    used = {call["config"] for call in fake_hopper.calls}
    assert tuned.kernels(folded).weights[0] in used


# The tuner.


def test_worker_measures_the_gradient_on_this_machine():
    task = Task(TINY, (None,), window_s=0.002, windows=2, matmul_size=64)
    found = measure(Task.from_json(task.to_json()))
    assert "failure" not in found["results"][0], found
    assert found["results"][0]["error"] <= found["results"][0]["bound"]


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

    autotune.tune_linear_compression_backward(DEFAULT, run=run)
    choice = table.lookup(DEFAULT)
    assert (choice.config, choice.source) == (OTHER, "user cache")
    assert DEFAULT.useful_flops == 2 * FORWARD.useful_flops


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_check_admits_the_right_gradients_and_no_other(dtype):
    case = linear_compression_backward.Case(dataclasses.replace(TINY, dtype=dtype), "unsorted")
    inputs = case.inputs()
    right = case.runner(None)(*inputs)
    assert case.check(right, inputs).ok
    for which, bad in itertools.product(range(4), (3.0, np.nan)):
        leaves, treedef = jax.tree.flatten(right)
        wrong = np.array(leaves[which])
        wrong[-1, -1] += np.asarray(bad, dtype)
        leaves[which] = jnp.asarray(wrong)
        assert not case.check(jax.tree.unflatten(treedef, leaves), inputs).ok


def test_the_kernels_gradients_have_the_shapes_of_xlas():
    problem = dataclasses.replace(TINY, dtype="bfloat16")
    case = linear_compression_backward.Case(problem)
    inputs = jax.eval_shape(case.inputs)
    config = problem.default_config()
    kernels = jax.eval_shape(case.runner(config, num_sms=132), *inputs)
    by_xla = jax.eval_shape(case.runner(None), *inputs)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), found) for found in (kernels, by_xla)]
    assert shapes[0] == shapes[1]
