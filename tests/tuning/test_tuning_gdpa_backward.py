"""The gradient of generalised dot-product attention in the dispatch table and in the autotuner."""

import dataclasses

import pytest
from fake_tuning import HERE, row

from ikbo_jax.autotuner import autotune
from ikbo_jax.autotuner.bench import lower
from ikbo_jax.ops import dispatch
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.problems import GdpaBackwardProblem, GdpaBackwardTuning, GdpaProblem
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.tuning import table

FORWARD = GdpaProblem(
    *(1152, 1152, 1152 * 512, 1152 * 512, 4, 4, 128, "bfloat16"),
    *(("gelu",), None, False, 1024, 1024),
)
DEFAULT = GdpaBackwardProblem.of(FORWARD)
SOFTMAX = dataclasses.replace(DEFAULT, activations=("softmax",))
OTHER = dataclasses.replace(DEFAULT.default_config(), query_block=96, query_stages=2)


@pytest.mark.parametrize("head_dim", configs.HEAD_DIMS)
@pytest.mark.parametrize("activation", ["gelu", "softmax"])
def test_candidates_are_legal_and_begin_with_the_default(head_dim, activation, builtin):
    """Without a row, the kernels run as they did before there was a table."""
    builtin()
    problem = dataclasses.replace(DEFAULT, head_dim=head_dim, activations=(activation,))
    found = list(problem.configs())
    default = configs.default_config(head_dim)
    assert found[0] == problem.default_config() == table.lookup(problem).config
    assert (found[0].query, found[0].key) == (default, default)
    assert len(set(found)) == len(found) > 8
    assert all(config.illegal_reason(problem) is None for config in found)
    for field in dataclasses.fields(GdpaBackwardTuning):
        assert len({getattr(config, field.name) for config in found}) > 1, field.name


def test_narrow_blocks_are_for_short_sequences(builtin):
    short = dataclasses.replace(DEFAULT, q_rows=1152 * 20, kv_rows=1152 * 20)
    narrow = GdpaBackwardTuning(32, 3, 64, 3)
    builtin(row(short, narrow))
    assert table.lookup(dataclasses.replace(short, batch=1100)).config == narrow
    assert table.lookup(DEFAULT).config == DEFAULT.default_config()
    assert table.lookup(SOFTMAX).config == SOFTMAX.default_config()


def test_the_op_takes_the_row_or_xla(monkeypatch, builtin):
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    builtin(row(DEFAULT, OTHER, device=HERE))
    request = dispatch.Request("gdpa", None, None)
    config, reason = op.choose(request, FORWARD)
    assert (config, "sm90.json, batch=1152" in reason) == (OTHER, True)
    builtin(row(DEFAULT, None, device=HERE))
    config, reason = op.choose(request, FORWARD)
    assert (config, "sm90.json, batch=1152" in reason) == (None, True)
    insisting = dispatch.Request("gdpa", "mosaic_gpu", None)
    assert op.choose(insisting, FORWARD)[0] == DEFAULT.default_config()
    builtin()
    assert op.choose(request, FORWARD)[0] == DEFAULT.default_config()


# The tuner.


@pytest.mark.parametrize("activation", ["gelu", "softmax"])
def test_worker_lowers_the_kernels_without_a_device(activation):
    problem = dataclasses.replace(
        DEFAULT, batch=4, batch_kv=4, q_rows=400, kv_rows=400, activations=(activation,)
    )
    assert not isinstance(lower(problem, list(problem.configs())[-1], 132), str)


def test_rows_that_do_not_fill_the_sequences_are_not_tuned():
    with pytest.raises(ValueError, match="do not fill 1152 sequences"):
        autotune.tune(dataclasses.replace(DEFAULT, q_rows=100), run=pytest.fail)
