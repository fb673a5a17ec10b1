"""Configurations of linear compression's gradient: legality, and how the batch is split."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from ikbo_jax.problems import (
    LinearCompressionBackwardProblem,
    LinearCompressionConfig,
    LinearCompressionProblem,
    memory,
)
from ikbo_jax.problems import linear_compression_backward as configs
from ikbo_jax.problems.hopper import MAX_SMEM_BYTES
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig

DEFAULT = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")


@hypothesis.given(
    m=st.integers(1, 5000),
    n=st.integers(1, 100).map(lambda eighth: 8 * eighth),
    ks=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_the_default_configuration_is_legal(m: int, n: int, ks: list[int], dtype: str) -> None:
    """It is what runs without a row of the dispatch table."""
    problem = LinearCompressionProblem(tuple(range(1, len(ks) + 1)), tuple(ks), m, n, dtype)
    assert configs.illegal_reason(problem) is None
    config = configs.default_config(problem)
    gradient = LinearCompressionBackwardProblem.of(problem)
    default = gradient.default_config()
    assert default is not None
    assert default.kernels(gradient) == config
    assert gradient.default_config() == default
    for weight in config.weights:
        assert weight.stages == configs.MAX_STAGES or (
            memory.smem_bytes(dataclasses.replace(weight, stages=weight.stages + 1).shared)
            > MAX_SMEM_BYTES
        )
        # Tiles cover M with no more padding than one tile less would need.
        tiles = -(-m // weight.block_m)
        assert tiles * weight.block_m < m + 8 * tiles


@hypothesis.given(
    batch=st.integers(1, 20_000),
    k=st.integers(1, 4000),
    m=st.integers(1, 2000),
    problems=st.integers(1, 40),
)
def test_every_part_of_a_batch_has_an_entry(batch: int, k: int, m: int, problems: int) -> None:
    config = WeightGradientConfig()
    splits = config.splits(batch, k, m, 256, problems=problems, num_sms=132)
    assert 1 <= splits <= batch


def test_parts_of_the_default_sizes_fill_the_sms() -> None:
    config = configs.default_config(DEFAULT).weights[-1]
    assert config.block_m == 224
    tiles = 2 * 7  # of 224 x 128
    splits = config.splits(1024, 866, 433, 256, problems=1, num_sms=132)
    assert tiles * splits <= 132 < tiles * (splits + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16 and float16, but the inputs are float32"),
        ({"n": 250}, "N to be a multiple of 8 .*, but N=250"),
        ({"ks": (0, 866)}, r"sizes of at least 1, but .* K=\(0, 866\)"),
        ({"batches": (15, 0)}, r"sizes of at least 1, but B=\(15, 0\)"),
        ({"m": 0}, "sizes of at least 1, but .* M=0"),
    ],
)
def test_refusals_name_the_values(changes: dict, message: str) -> None:
    assert re.search(message, str(configs.illegal_reason(dataclasses.replace(DEFAULT, **changes))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": (WeightGradientConfig(260),) * 2},
            "a multiple of 8 from 8 to 256, but is 260",
        ),
        ({"weights": (WeightGradientConfig(20),) * 2}, "a multiple of 8 from 8 to 256, but is 20"),
        ({"weights": (WeightGradientConfig(stages=1),) * 2}, "at least 2, but is 1"),
        ({"weights": (WeightGradientConfig(256, 5),) * 2}, "but a CTA has 232448"),
        ({"weights": (WeightGradientConfig(),)}, "for 2 and 1 levels, but the problem has 2"),
        (
            {"embeddings": (LinearCompressionConfig(230, single_launch=False),) * 2},
            "block_m must be a multiple of 16",
        ),
    ],
)
def test_illegal_configurations_are_refused(changes: dict, message: str) -> None:
    config = dataclasses.replace(configs.default_config(DEFAULT), **changes)
    assert message in str(config.illegal_reason(DEFAULT))
