"""Attention in the dispatch table and in the autotuner."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
from fake_tuning import ATTENTION as DEFAULT
from fake_tuning import row
from hypothesis import given
from hypothesis import strategies as st

from ikbo_jax.problems import (
    AttentionBackwardProblem,
    AttentionConfig,
    AttentionProblem,
    FewQueriesConfig,
)
from ikbo_jax.problems.attention import HEAD_DIMS
from ikbo_jax.problems.attention_backward import HEAD_DIMS as BACKWARD_HEAD_DIMS
from ikbo_jax.problems.attention_backward import MAX_BOTH_SUMS
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig as BackwardConfig
from ikbo_jax.tuning import table, table_rows

BACKWARD = AttentionBackwardProblem.of(DEFAULT)


def other() -> AttentionConfig:
    """A legal configuration that is not the default one."""
    return list(DEFAULT.configs())[1]


def at(**changes: Any) -> AttentionProblem:
    return dataclasses.replace(DEFAULT, **changes)


@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    q_len=st.integers(1, 256),
    kv_len=st.integers(1, 20_000),
    batch=st.integers(1, 40_000),
    users=st.integers(1, 5_000),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 2), (16, 1)]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_every_size_the_kernel_takes_has_a_configuration(heads, **sizes):
    problem = at(q_heads=heads[0], kv_heads=heads[1], **sizes)
    candidates = list(problem.configs())
    assert len(candidates) == len(set(candidates))
    assert all(config.illegal_reason(problem) is None for config in candidates)
    chosen = table.lookup(problem).config
    assert chosen is not None
    assert chosen.illegal_reason(problem) is None


@pytest.mark.parametrize("name", ["batch", "users", "q_len", "kv_len", "q_heads"])
def test_sizes_of_nothing_have_no_configuration_or_a_legal_one(name):
    for sizes in (DEFAULT, dataclasses.replace(DEFAULT, q_len=1)):
        problem = dataclasses.replace(sizes, **{name: 0})
        for config in problem.configs():
            assert config.illegal_reason(problem) is None


def test_row_of_another_head_width_says_nothing(builtin):
    builtin(row(at(head_dim=64), other()))
    asked = at(head_dim=192)
    assert table.distance(at(head_dim=64), asked) == float("inf")
    choice = table.lookup(asked)
    assert (choice.config, choice.source) == (asked.default_config(), "default")


@given(
    head_dim=st.sampled_from(BACKWARD_HEAD_DIMS),
    q_len=st.integers(1, 256),
    kv_len=st.integers(1, 20_000),
    users=st.integers(1, 5_000),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_every_gradient_that_the_kernel_takes_has_a_configuration(
    head_dim, q_len, kv_len, users, dtype
):
    changes = {"head_dim": head_dim, "q_len": q_len, "kv_len": kv_len, "dtype": dtype}
    problem = dataclasses.replace(BACKWARD, users=users, **changes)
    candidates = list(problem.configs())
    assert len(candidates) == len(set(candidates)) > 3
    assert all(config.illegal_reason(problem) is None for config in candidates)
    assert problem.default_config() == candidates[0]


def test_the_gradient_of_wide_heads_needs_a_launch_for_d_query():
    wide = dataclasses.replace(BACKWARD, head_dim=192)
    assert BackwardConfig(64).illegal_reason(BACKWARD) is None
    assert BackwardConfig(32).illegal_reason(wide) == (
        "d_query must be launch or stored for heads wider than 128, but is parts at H=192"
    )
    for kv_len, users in itertools.product((100, 20_000), (1, 3000)):
        few = dataclasses.replace(wide, head_dim=256, q_len=1, kv_len=kv_len, users=users)
        config = table.lookup(few).config
        assert config is not None
        assert config.illegal_reason(few) is None


FEW = AttentionProblem(1024, 16, 1, 512, 4, 4, 64, "bfloat16")


def test_few_queries_take_their_own_kernel():
    config = FEW.default_config()
    assert isinstance(config, FewQueriesConfig)
    choice = table.lookup(FEW, with_user_rows=False)
    assert (choice.config, choice.source) == (config, "default")
    assert not isinstance(dataclasses.replace(FEW, q_len=64).default_config(), FewQueriesConfig)
    one_user = dataclasses.replace(FEW, batch=2000, users=1, q_heads=1, kv_heads=1, kv_len=16384)
    assert one_user.default_config().splits > config.splits == 1
    several = {type(config) for config in FEW.configs()}
    assert several == {AttentionConfig, FewQueriesConfig}


def test_row_of_either_kernel_is_read_back(builtin):
    for config in (FewQueriesConfig(splits=3), AttentionConfig()):
        read = table_rows.Row.from_json(json.loads(json.dumps(row(FEW, config).to_json())))
        assert read == row(FEW, config)
        builtin(read)
        assert table.lookup(FEW).config == config


def test_row_of_few_queries_serves_near_problems_only(builtin):
    builtin(row(FEW, FewQueriesConfig(splits=3)))
    asked = dataclasses.replace(FEW, kv_len=4096)
    assert table.lookup(asked).config == asked.default_config()
    tiles = dataclasses.replace(FEW, q_len=64)
    assert isinstance(table.lookup(tiles).config, AttentionConfig)


@pytest.mark.parametrize("head_dim", BACKWARD_HEAD_DIMS)
def test_small_gradients_have_candidates_whose_parts_a_launch_adds(head_dim):
    """Where tiles of keys occupy the device, there are none; else they are the default."""
    small = AttentionBackwardProblem(230, 6, 5, 273, 1, 1, head_dim, "bfloat16")
    large = dataclasses.replace(small, kv_len=8192)
    of_small, of_large = (
        [config for config in problem.configs() if config.adds_by_launch]
        for problem in (small, large)
    )
    assert bool(of_small) == (head_dim <= MAX_BOTH_SUMS)
    assert not of_large
    assert small.default_config().adds_by_launch == bool(of_small)
    assert table.lookup(small, with_user_rows=False).config.adds_by_launch == bool(of_small)
    for config in of_small:
        assert small.items * config.splits <= 132
