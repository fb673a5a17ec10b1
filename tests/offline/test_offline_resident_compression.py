"""The linear-compression kernel whose CTAs keep their weights, compiled without a GPU."""

from __future__ import annotations

import offline
import pytest
from test_offline_compile import launch

from ikbo_jax.problems import (
    LinearCompressionProblem,
    ResidentCompressionConfig,
    memory,
    resident_cost,
)

pytestmark = pytest.mark.slow


def problem(
    batches: tuple[int, ...], ks: tuple[int, ...], m: int, n: int, dtype: str = "bfloat16"
) -> LinearCompressionProblem:
    return LinearCompressionProblem(batches, ks, m, n, dtype)


Config = ResidentCompressionConfig
#: A problem, its configuration, and CTAs of the last level that an SM must have registers for.
CASES = {
    "n32_four_accumulators": (problem((100, 8192), (200, 40), 16, 32), Config(4, 16, 2, 3), 3),
    "n16_five_parts_long_users": (
        problem((29, 8367), (1116, 22), 233, 16, "float16"),
        Config(1, 48, 2, 4, coarse_k=1280),
        4,
    ),
    "n96_three_accumulators": (problem((547, 3829), (225, 27), 32, 96), Config(3, 32, 1, 2), 2),
    "n128_gathered_odd_k": (
        problem((200, 601), (121, 138), 48, 128),
        Config(1, 48, 2, 2, gathers=True),
        2,
    ),
    "n64_gathered_four_accumulators": (
        problem((10095, 10095), (24, 136), 8, 64, "float16"),
        Config(4, 16, 1, 2, gathers=True),
        2,
    ),
    "n32_one_user": (problem((1, 602), (480, 20), 15, 32), Config(1, 16, 2, 2, gathers=True), 2),
    "n512_two_splits": (problem((1, 118), (1160, 111), 20, 512), Config(1, 32, 2, 5), 5),
    "three_levels": (problem((7, 100, 8192), (40, 40, 200), 60, 48), Config(2, 32, 1, 2), 2),
    "one_level": (problem((8192,), (300,), 64, 32), Config(1, 64, 2, 2), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_offline_resident_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    problem, config, ctas = CASES[name]
    assert config.illegal_reason(problem) is None
    kernels = compiler.compile(*launch(problem, config))
    *_, last = levels = config.levels(problem)
    for compiled, level in zip(kernels, levels, strict=True):
        assert not compiled.faults
        shared = config.layout(problem, level).shared(problem.n, stores=level == last)
        assert compiled.smem_bytes == memory.smem_bytes(shared) <= config.smem_bytes(problem)
    assert kernels[-1].ptxas.registers <= 65536 // (128 * ctas)


def test_offline_resident_configurations_of_the_model_are_fit(compiler: offline.Compiler) -> None:
    """What the model puts first: several parts, groups, odd K, gathered users, one user."""
    for sizes in (
        ((29, 8367), (1116, 22), 233, 16),
        ((11, 1033), (982, 250), 240, 16),
        ((149, 2549), (17, 35), 199, 32),
        ((10095, 10095), (24, 136), 8, 64),
        ((1, 602), (480, 20), 15, 32),
        ((1, 719), (20, 49), 13, 96),
        ((2, 518), (783, 189), 80, 64),
        ((12, 1631), (1157, 18), 32, 256),
        ((1376, 1376), (105, 98), 510, 64),
        ((13, 96), (886, 55), 532, 32),
        ((8, 830), (72, 211), 859, 64),
        ((1, 79), (117, 275), 1006, 64),
    ):
        *_, m, _ = sizes
        assert resident_cost.is_preferred(problem(*sizes)) == (m not in (532, 859, 1006))
        chosen = resident_cost.candidate_configs(problem(*sizes))[0]
        kernels = compiler.compile(*launch(problem(*sizes), chosen))
        for compiled in kernels:
            assert not compiled.faults
        assert kernels[-1].ptxas.registers <= 65536 // (128 * chosen.ctas)
