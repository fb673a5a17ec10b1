"""The linear-compression kernel whose tiles span candidates, compiled for sm_90a without a GPU."""

from __future__ import annotations

import offline
import pytest
from test_offline_compile import launch

from ikbo_jax.problems import (
    LinearCompressionProblem,
    PackedCompressionConfig,
    memory,
    packed_cost,
)

pytestmark = pytest.mark.slow


def problem(
    m: int, n: int, ks: tuple[int, ...], dtype: str = "bfloat16"
) -> LinearCompressionProblem:
    batches = (7, 100, 8192)[-len(ks) :]
    return LinearCompressionProblem(batches, ks, m, n, dtype)


CASES = {
    # Every width of blocks; several accumulators; one k step, and many.
    "n32_four_accumulators": (problem(16, 32, (200, 40)), PackedCompressionConfig(512, 16, 3, 16)),
    "n16_six_accumulators_of_32": (
        problem(32, 16, (200, 866)),
        PackedCompressionConfig(768, 32, 2, 16, cluster=2),
    ),
    "n64_most_rows": (problem(433, 64, (1178, 866)), PackedCompressionConfig(128, 224, 4, 56)),
    "n96_f16_two_accumulators_of_112": (
        problem(112, 96, (300, 1178), "float16"),
        PackedCompressionConfig(256, 112, 3, 56),
    ),
    "n128_two_launches": (
        problem(33, 128, (40, 72)),
        PackedCompressionConfig(256, 48, 4, 24, single_launch=False),
    ),
    "three_levels_n48": (problem(60, 48, (40, 40, 200)), PackedCompressionConfig(384, 64, 3, 32)),
    "n16_shared_columns": (problem(267, 16, (54, 1393)), PackedCompressionConfig(64, 96, 8, 24)),
    "n32_shared_columns_most_rows": (
        problem(433, 32, (72, 866), "float16"),
        PackedCompressionConfig(64, 448, 3, 56, cluster=2),
    ),
    "n64_shared_columns_two_launches": (
        problem(100, 64, (72, 866)),
        PackedCompressionConfig(64, 64, 8, 16, single_launch=False, cluster=2),
    ),
    "one_level_n32": (problem(64, 32, (128,)), PackedCompressionConfig(256, 64, 4, 64, False)),
}


@pytest.mark.parametrize("name", CASES)
def test_offline_packed_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    problem, config = CASES[name]
    assert config.illegal_reason(problem) is None
    kernels = compiler.compile(*launch(problem, config))
    levels = len(problem.batches)
    single = config.single_launch and levels > 1
    assert len(kernels) == levels - single
    with_claims = [False] * (len(kernels) - 1) + [single]
    for compiled, has_claims in zip(kernels, with_claims, strict=True):
        assert not compiled.faults
        shared = config.shared(with_claims=has_claims, n=problem.n)
        assert compiled.smem_bytes == memory.smem_bytes(shared) <= config.smem_bytes


def test_offline_packed_defaults_are_fit(compiler: offline.Compiler) -> None:
    """The most promising ones for sizes that a ranking team has, in clusters and of one CTA."""
    for m, n, ks in (
        (16, 32, (200, 40)),
        (351, 64, (225, 27)),
        (64, 48, (640, 300)),
        (171, 80, (640, 300)),
        (96, 112, (300, 640)),
    ):
        found = list(packed_cost.candidate_configs(problem(m, n, ks)))
        for cluster in (1, 2):
            chosen = next((x for x in found if x.cluster == cluster), found[0])
            for compiled in compiler.compile(*launch(problem(m, n, ks), chosen)):
                assert not compiled.faults
