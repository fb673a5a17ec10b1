"""The kernels of linear compression's gradient compiled for sm_90a without a GPU."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
from test_offline_compile import DEFAULT, NUM_SMS, THREE_LEVELS
from test_offline_compile import launch as forward_launch

from ikbo_jax.ops.linear_compression_backward import kernel_vjp
from ikbo_jax.problems import LinearCompressionBackwardProblem, LinearCompressionProblem, memory
from ikbo_jax.problems import linear_compression_backward as configs
from ikbo_jax.problems.linear_compression_backward import WeightGradientConfig
from ikbo_jax.tuning import table_rows

pytestmark = pytest.mark.slow

PROBLEMS = {
    "default": DEFAULT,
    "a_user_each_f16": dataclasses.replace(DEFAULT, batches=(1024, 1024), dtype="float16"),
    "three_levels": THREE_LEVELS,
    "n_of_72": dataclasses.replace(DEFAULT, n=72),
    "sizes_of_one": LinearCompressionProblem((2, 2), (1, 1), 1, 8, "bfloat16"),
    "one_level_wide": LinearCompressionProblem((64,), (2048,), 2048, 512, "bfloat16"),
}
CONFIGS = {
    "default": WeightGradientConfig(),
    "widest": WeightGradientConfig(configs.MAX_BLOCK_M, 4),
    "narrowest": WeightGradientConfig(8, 2),
}


def launch(problem, config) -> tuple[Any, ...]:
    """The host function, and the shapes it takes for `problem`."""
    _, weights, embeddings, parents = forward_launch(problem, None)
    shape = problem.batches[-1], problem.m, problem.n
    cotangent = jax.ShapeDtypeStruct(shape, jnp.dtype(problem.dtype))
    fn = functools.partial(kernel_vjp, config=config, num_sms=NUM_SMS)
    return fn, weights, embeddings, (None, *parents), cotangent


@pytest.mark.parametrize("name", PROBLEMS)
def test_offline_kernels_are_fit(name: str, compiler: offline.Compiler) -> None:
    problem = PROBLEMS[name]
    assert configs.illegal_reason(problem) is None
    config, levels = configs.default_config(problem), len(problem.ks)
    kernels = compiler.compile_fit(*launch(problem, config))
    found = Counter(kernel.name for kernel in kernels)
    for name in ("ikbo_user_order", "ikbo_segment_sum_shares"):
        found.pop(name, None)
    assert found == Counter(
        {
            "ikbo_linear_compression": levels,
            "ikbo_linear_compression_d_weight": levels,
            "ikbo_segment_sum": levels - 1,
        }
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_offline_weight_kernel_of_every_kind(name: str, compiler: offline.Compiler) -> None:
    problem, config = dataclasses.replace(DEFAULT, batches=(1024,), ks=(866,)), CONFIGS[name]
    assert config.illegal_reason(problem) is None
    kernel, _ = compiler.compile_fit(*launch(problem, config))
    assert kernel.name == "ikbo_linear_compression_d_weight"
    assert kernel.smem_bytes == memory.smem_bytes(config.shared)


def rows_and_candidates() -> dict[str, tuple[LinearCompressionBackwardProblem, Any]]:
    """What `sm90.json` says of the gradient, and the tuner's proposals with another first tile."""
    found = {
        f"row{i}:{row.problem.describe()}": (row.problem, row.config)
        for i, row in enumerate(table_rows.builtin_rows())
        if row.config is not None and isinstance(row.problem, LinearCompressionBackwardProblem)
    }
    problem = LinearCompressionBackwardProblem.of(DEFAULT)
    for config in problem.configs():
        found.setdefault(f"tiles_of_{config.block_m}", (problem, config))
    return found


CHOICES = rows_and_candidates()


@pytest.mark.parametrize("name", CHOICES)
def test_offline_choices_of_table_and_tuner_are_fit(name: str, compiler: offline.Compiler) -> None:
    problem, config = CHOICES[name]
    forward = LinearCompressionProblem(**dataclasses.asdict(problem))
    compiler.compile_fit(*launch(forward, config))
