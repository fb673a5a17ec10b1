"""Linear compression's kernels for small sizes compiled for sm_90a without a GPU.

Tiles span candidates (packed), or CTAs keep their weights (resident).
"""

from typing import Any

import offline
import pytest
from test_offline_compile import assert_launches_fit, launch

from ikbo_jax.problems import LinearCompressionProblem, memory, packed_cost, resident_cost
from ikbo_jax.problems import PackedCompressionConfig as PackedConfig
from ikbo_jax.problems import ResidentCompressionConfig as ResidentConfig

pytestmark = pytest.mark.slow


def packed(m, n, ks, dtype="bfloat16") -> LinearCompressionProblem:
    batches = (7, 100, 8192)[-len(ks) :]
    return LinearCompressionProblem(batches, ks, m, n, dtype)


def resident(batches, ks, m, n, dtype="bfloat16") -> LinearCompressionProblem:
    return LinearCompressionProblem(batches, ks, m, n, dtype)


#: Sizes and a configuration.
PACKED: dict[str, tuple[Any, PackedConfig]] = {
    # Every width of blocks; several accumulators; one k step, and many.
    "n32_four_accumulators": ((16, 32, (200, 40)), PackedConfig(512, 16, 3, 16)),
    "n16_six_accumulators_of_32": ((32, 16, (200, 866)), PackedConfig(768, 32, 2, 16, cluster=2)),
    "n64_most_rows": ((433, 64, (1178, 866)), PackedConfig(128, 224, 4, 56)),
    "n96_f16_two_accumulators_of_112": (
        (112, 96, (300, 1178), "float16"),
        PackedConfig(256, 112, 3, 56),
    ),
    "n128_two_launches": ((33, 128, (40, 72)), PackedConfig(256, 48, 4, 24, single_launch=False)),
    "three_levels_n48": ((60, 48, (40, 40, 200)), PackedConfig(384, 64, 3, 32)),
    "n16_shared_columns": ((267, 16, (54, 1393)), PackedConfig(64, 96, 8, 24)),
    "n32_shared_columns_most_rows": (
        (433, 32, (72, 866), "float16"),
        PackedConfig(64, 448, 3, 56, cluster=2),
    ),
    "n64_shared_columns_two_launches": (
        (100, 64, (72, 866)),
        PackedConfig(64, 64, 8, 16, single_launch=False, cluster=2),
    ),
    "one_level_n32": ((64, 32, (128,)), PackedConfig(256, 64, 4, 64, False)),
}

#: Sizes, a configuration, and CTAs of the last level that an SM must have registers for.
RESIDENT: dict[str, tuple[Any, ResidentConfig, int]] = {
    "n32_four_accumulators": (((100, 8192), (200, 40), 16, 32), ResidentConfig(4, 16, 2, 3), 3),
    "n16_five_parts_long_users": (
        ((29, 8367), (1116, 22), 233, 16, "float16"),
        ResidentConfig(1, 48, 2, 4, coarse_k=1280),
        4,
    ),
    "n96_three_accumulators": (((547, 3829), (225, 27), 32, 96), ResidentConfig(3, 32, 1, 2), 2),
    "n128_gathered_odd_k": (
        ((200, 601), (121, 138), 48, 128),
        ResidentConfig(1, 48, 2, 2, gathers=True),
        2,
    ),
    "n64_gathered_four_accumulators": (
        ((10095, 10095), (24, 136), 8, 64, "float16"),
        ResidentConfig(4, 16, 1, 2, gathers=True),
        2,
    ),
    "n32_one_user": (((1, 602), (480, 20), 15, 32), ResidentConfig(1, 16, 2, 2, gathers=True), 2),
    "n512_two_splits": (((1, 118), (1160, 111), 20, 512), ResidentConfig(1, 32, 2, 5), 5),
    "three_levels": (((7, 100, 8192), (40, 40, 200), 60, 48), ResidentConfig(2, 32, 1, 2), 2),
    "one_level": (((8192,), (300,), 64, 32), ResidentConfig(1, 64, 2, 2), 2),
}


@pytest.mark.parametrize("name", PACKED)
def test_offline_packed_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    sizes, config = PACKED[name]
    problem = packed(*sizes)
    assert_launches_fit(problem, config, compiler, n=problem.n)


def test_offline_packed_defaults_are_fit(compiler: offline.Compiler) -> None:
    """The most promising ones for sizes that a ranking team has, in clusters and of one CTA."""
    for m, n, ks in (
        (16, 32, (200, 40)),
        (351, 64, (225, 27)),
        (64, 48, (640, 300)),
        (171, 80, (640, 300)),
        (96, 112, (300, 640)),
    ):
        found = [x.config for x in packed_cost.ranked_configs(packed(m, n, ks))]
        for cluster in (1, 2):
            chosen = next((x for x in found if x.cluster == cluster), found[0])
            compiler.compile_fit(*launch(packed(m, n, ks), chosen))


@pytest.mark.parametrize("name", RESIDENT)
def test_offline_resident_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    sizes, config, ctas = RESIDENT[name]
    problem = resident(*sizes)
    assert config.illegal_reason(problem) is None
    kernels = compiler.compile_fit(*launch(problem, config))
    *_, last = levels = config.levels(problem)
    for compiled, level in zip(kernels, levels, strict=True):
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
        is_default = isinstance(resident(*sizes).default_config(), ResidentConfig)
        assert is_default == (m not in (532, 859, 1006))
        chosen = resident_cost.ranked_configs(resident(*sizes))[0].config
        kernels = compiler.compile_fit(*launch(resident(*sizes), chosen))
        assert kernels[-1].ptxas.registers <= 65536 // (128 * chosen.ctas)
