"""The gradient of linear compression in the dispatch table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from fake_tuning import HERE, row

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch
from ikbo_jax.ops import linear_compression_backward as op
from ikbo_jax.problems import (
    LinearCompressionBackwardProblem,
    LinearCompressionBackwardTuning,
    LinearCompressionProblem,
)
from ikbo_jax.problems import linear_compression_backward as configs
from ikbo_jax.tuning import table

FORWARD = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
DEFAULT = LinearCompressionBackwardProblem.of(FORWARD)
OTHER = dataclasses.replace(DEFAULT.default_config(), weight_stages=4)


def test_candidates_are_legal_and_differ_in_every_parameter():
    for problem in (
        DEFAULT,
        dataclasses.replace(DEFAULT, batches=(1024,), ks=(300,), m=64),
        dataclasses.replace(DEFAULT, batches=(3, 30, 300), ks=(64, 40, 70)),
    ):
        found = list(problem.configs())
        assert found[0] == problem.default_config()
        assert len(set(found)) == len(found)
        assert 10 < len(found) <= 120
        assert all(config.illegal_reason(problem) is None for config in found)
    of_default = list(DEFAULT.configs())
    for field in dataclasses.fields(LinearCompressionBackwardTuning):
        assert len({getattr(config, field.name) for config in of_default}) > 1, field.name


def test_a_near_row_is_used_unless_its_tiles_pad_too_much(builtin):
    builtin(row(DEFAULT, OTHER))
    near = dataclasses.replace(DEFAULT, batches=(18, 900), n=224)
    choice = table.lookup(near)
    assert (choice.config, choice.exact) == (OTHER, False)
    assert "sm90.json, nearest row" in choice.reason
    narrow = dataclasses.replace(DEFAULT, m=40)
    assert table.lookup(narrow).config == narrow.default_config()
    few_k = dataclasses.replace(DEFAULT, ks=(1178, 20))
    assert table.lookup(few_k).config == few_k.default_config()


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
    tuned = dataclasses.replace(PROBLEM.default_config(), weight_stages=3)
    builtin(row(PROBLEM, tuned, device=HERE))
    plan = ikbo.explain(gradients(), *arrays()).plans[0]
    assert plan.backward_config == tuned
    assert f"{tuned}; sm90.json, B=3,4" in plan.backward
    gradients()(*arrays())
    used = [call["config"] for call in fake_hopper.calls]
    kernels = tuned.kernels(PROBLEM)
    assert {kernels.weights[0], *kernels.embeddings} <= set(used)


def test_a_row_may_prefer_xla_and_the_caller_may_not(fake_hopper, builtin):
    builtin(row(PROBLEM, None, device=HERE))
    plan = ikbo.explain(gradients(), *arrays()).plans[0]
    assert (plan.implementation, plan.backward_config) == ("mosaic_gpu", None)
    assert plan.backward.startswith("XLA, at user and candidate batch size: sm90.json")
    by_xla = gradients()(*arrays())
    assert not [
        c for c in fake_hopper.calls if isinstance(c["config"], configs.WeightGradientConfig)
    ]
    plan = ikbo.explain(gradients("mosaic_gpu"), *arrays()).plans[0]
    assert plan.backward_config == PROBLEM.default_config()
    for found, expected in zip(gradients("mosaic_gpu")(*arrays()), by_xla, strict=True):
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


def test_a_folded_problem_has_a_choice_of_its_own(fake_hopper, builtin):
    folded = dataclasses.replace(PROBLEM, batches=(3 * 5, 4 * 5))
    tuned = dataclasses.replace(folded.default_config(), weight_stages=3)
    builtin(row(folded, tuned, device=HERE), row(PROBLEM, device=HERE))
    request = dispatch.Request("linear_compression", None, None)
    assert op.choose(request, LinearCompressionProblem(**dataclasses.asdict(folded)))[0] == tuned
    w_cand, w_user, e_cand, e_user = arrays()
    many = [jnp.stack([x] * 5) for x in (e_cand, e_user)]
    fake_hopper.calls.clear()
    jax.vmap(gradients(), (None, None, 0, 0))(w_cand, w_user, *many)
    used = {call["config"] for call in fake_hopper.calls}
    assert tuned.kernels(folded).weights[0] in used
