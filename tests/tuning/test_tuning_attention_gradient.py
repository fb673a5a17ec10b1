"""Which launches compute the gradient of attention, against times of kernels.

The facts are us of the gradient's kernels by CUPTI on an H100, median of 10, 2026-11-27: of each
way, the fastest two configurations that were timed. Heads of 192 and 256 columns have the fastest
two stored ones and the fastest launch, with all that the device did.
"""

from __future__ import annotations

import pytest

from ikbo_jax.problems import AttentionBackwardProblem
from ikbo_jax.problems.attention_backward_cost import small_configs
from ikbo_jax.tuning import table

LAUNCH, STORED, PARTS, TALL = "launch", "stored", "parts", True
#: Of users, rows of a user, heads, keys and columns: times by d_query, block_q, stages, kv_slots.
TIMED = {
    (128, 8, 4, 4096, 64): {
        (STORED, 16, 2, 2): 528.1,
        (LAUNCH, 16, 3, 2): 562.3,
        (LAUNCH, 16, 2, 2): 562.9,
        (STORED, 32, 2, 2): 577.7,
    },
    (40, 24, 8, 1500, 64): {
        (STORED, 16, 2, 2): 155.6,
        (STORED, 32, 2, 2): 156.2,
        (LAUNCH, 32, 3, 2): 156.6,
        (LAUNCH, 32, 2, 2): 156.8,
    },
    (256, 40, 4, 2048, 64): {
        (LAUNCH, 64, 3, 2): 590.8,
        (LAUNCH, 64, 2, 2): 593.2,
        (STORED, 32, 2, 2): 675.6,
        (STORED, 16, 2, 2): 733.4,
    },
    (512, 40, 4, 1000, 64): {
        (PARTS, 32, 3, 2): 554.0,
        (PARTS, 32, 2, 2): 568.6,
        (LAUNCH, 64, 3, 2): 609.9,
        (LAUNCH, 32, 3, 2): 613.2,
    },
    (512, 64, 4, 512, 64): {
        (LAUNCH, 64, 3, 2): 344.4,
        (PARTS, 32, 3, 2): 345.8,
        (LAUNCH, 32, 3, 2): 349.7,
        (PARTS, 64, 2, 2): 353.5,
    },
    (512, 96, 4, 1536, 64): {
        (LAUNCH, 64, 4, 2): 1026.7,
        (LAUNCH, 64, 3, 2): 1027.8,
        (STORED, 64, 2, 2): 1381.2,
        (STORED, 128, 3, 1): 1689.1,
    },
    (16, 128, 4, 1024, 64): {
        (STORED, 64, 2, 2): 39.0,
        (LAUNCH, 64, 3, 2): 39.2,
        (LAUNCH, 64, 2, 2): 39.4,
        (STORED, 128, 3, 1): 48.1,
    },
    (128, 128, 8, 2048, 64): {
        (LAUNCH, 64, 4, 2): 791.1,
        (LAUNCH, 64, 3, 2): 792.4,
        (STORED, 64, 2, 2): 1034.5,
        (STORED, 128, 3, 1): 1238.8,
    },
    (64, 128, 4, 1024, 64): {
        (LAUNCH, 64, 3, 2): 120.7,
        (LAUNCH, 128, 2, 2): 127.7,
        (STORED, 64, 2, 2): 138.2,
        (STORED, 128, 3, 1): 168.1,
    },
    (367, 240, 8, 2501, 64): {
        (LAUNCH, 64, 3, 2): 4154.9,
        (LAUNCH, 64, 2, 2): 4178.3,
        (STORED, 64, 2, 2): 8149.0,
        (STORED, 128, 3, 1): 8363.0,
    },
    (8, 256, 4, 1024, 64): {
        (STORED, 64, 2, 2): 32.0,
        (STORED, 128, 3, 1): 33.6,
        (LAUNCH, 64, 2, 2): 34.4,
        (LAUNCH, 64, 3, 2): 34.7,
    },
    (24, 256, 4, 1024, 64): {
        (LAUNCH, 64, 3, 2): 78.0,
        (LAUNCH, 128, 2, 2): 80.5,
        (STORED, 64, 2, 2): 92.0,
        (STORED, 128, 3, 1): 96.3,
    },
    (4, 472, 8, 628, 64): {
        (LAUNCH, 96, 2, 2): 34.5,
        (STORED, 128, 3, 1): 34.6,
        (LAUNCH, 128, 2, 2): 34.7,
        (STORED, 64, 2, 2): 37.2,
    },
    (35, 563, 4, 2640, 64): {
        (LAUNCH, 96, 2, 2): 443.2,
        (LAUNCH, 128, 2, 2): 444.9,
        (STORED, 128, 3, 1): 500.4,
        (STORED, 64, 2, 2): 554.0,
    },
    (8, 1024, 4, 2048, 64): {
        (LAUNCH, 128, 2, 2): 152.6,
        (LAUNCH, 96, 2, 2): 156.5,
        (STORED, 128, 3, 1): 158.4,
        (STORED, 64, 2, 2): 185.3,
    },
    (32, 4096, 2, 2048, 64): {
        (LAUNCH, 128, 3, 1): 857.0,
        (LAUNCH, 128, 2, 2): 859.3,
        (STORED, 128, 3, 1): 950.4,
        (STORED, 64, 2, 2): 1303.5,
    },
    (128, 200, 4, 2048, 96): {
        (LAUNCH, 64, 2, 2): 719.0,
        (STORED, 64, 2, 2, TALL): 837.0,
        (STORED, 64, 2, 2): 847.3,
    },
    (113, 54, 4, 3982, 128): {
        (LAUNCH, 32, 3, 2): 1009.4,
        (LAUNCH, 64, 2, 2): 1011.3,
        (STORED, 32, 3, 2): 1013.1,
        (STORED, 32, 2, 2): 1014.1,
    },
    (256, 80, 8, 2048, 128): {
        (LAUNCH, 64, 2, 2): 2313.3,
        (STORED, 48, 2, 2): 2505.4,
        (STORED, 64, 2, 2, TALL): 2540.5,
    },
    (256, 128, 2, 1024, 128): {
        (LAUNCH, 64, 2, 2): 368.3,
        (STORED, 48, 2, 2): 390.4,
        (STORED, 64, 2, 2, TALL): 395.3,
    },
    (128, 128, 8, 2048, 128): {
        (LAUNCH, 64, 2, 2): 1296.6,
        (STORED, 64, 2, 2, TALL): 1455.8,
        (STORED, 64, 2, 2): 1476.9,
    },
    (128, 240, 8, 2500, 128): {
        (LAUNCH, 64, 2, 2): 2284.5,
        (STORED, 64, 2, 2, TALL): 2447.1,
        (STORED, 64, 2, 2): 2510.5,
    },
    (32, 512, 4, 1024, 128): {
        (STORED, 64, 3, 1): 246.5,
        (STORED, 64, 2, 2): 248.4,
        (STORED, 64, 3, 1, TALL): 250.4,
        (LAUNCH, 64, 2, 2): 256.0,
    },
    (6, 816, 4, 888, 128): {
        (STORED, 64, 2, 2, TALL): 80.5,
        (STORED, 64, 3, 1, TALL): 80.7,
        (STORED, 64, 3, 1): 80.9,
        (LAUNCH, 64, 2, 2): 92.4,
    },
    (16, 1024, 4, 2048, 128): {
        (STORED, 64, 3, 1): 393.4,
        (STORED, 64, 3, 1, TALL): 398.2,
        (LAUNCH, 64, 2, 2): 432.8,
    },
    (32, 4096, 2, 2048, 128): {
        (STORED, 64, 3, 1): 1292.5,
        (STORED, 64, 3, 1, TALL): 1302.6,
        (LAUNCH, 64, 2, 2): 1434.8,
    },
    (32, 4096, 2, 2048, 192): {
        (STORED, 64, 2, 1): 2044.6,
        (STORED, 48, 2, 1): 2183.4,
        (LAUNCH, 64, 2, 1): 2612.9,
    },
    (32, 4096, 2, 2048, 256): {
        (STORED, 48, 2, 1): 2410.4,
        (STORED, 32, 2, 1): 2793.9,
        (LAUNCH, 48, 2, 1): 3612.8,
    },
    (128, 240, 4, 2000, 192): {
        (STORED, 64, 2, 1): 1638.8,
        (STORED, 32, 3, 1): 1657.2,
        (LAUNCH, 64, 2, 1): 1939.1,
    },
    (128, 240, 4, 2000, 256): {
        (STORED, 48, 2, 1): 1921.9,
        (STORED, 32, 2, 1): 2073.2,
        (LAUNCH, 32, 3, 1): 2476.0,
    },
    (64, 600, 4, 1024, 192): {
        (STORED, 64, 2, 1): 810.7,
        (STORED, 48, 2, 1): 846.8,
        (LAUNCH, 64, 2, 1): 1011.5,
    },
    (64, 600, 4, 1024, 256): {
        (STORED, 48, 2, 1): 959.1,
        (STORED, 32, 2, 1): 1065.6,
        (LAUNCH, 48, 2, 1): 1313.1,
    },
    (32, 4096, 2, 512, 192): {
        (STORED, 64, 2, 1): 665.1,
        (STORED, 48, 2, 1): 707.4,
        (LAUNCH, 64, 2, 1): 844.0,
    },
    (32, 4096, 2, 512, 256): {
        (STORED, 48, 2, 1): 794.0,
        (STORED, 32, 2, 1): 903.3,
        (LAUNCH, 48, 2, 1): 1119.2,
    },
    (512, 40, 4, 1024, 192): {
        (STORED, 32, 3, 1): 1722.0,
        (STORED, 64, 2, 1): 1760.6,
        (LAUNCH, 64, 2, 1): 2306.0,
    },
    (512, 40, 4, 1024, 256): {
        (STORED, 48, 2, 1): 2179.5,
        (STORED, 32, 2, 1): 2217.4,
        (LAUNCH, 32, 3, 1): 2779.0,
    },
    (2048, 8, 4, 256, 192): {
        (STORED, 32, 3, 1): 1473.0,
        (STORED, 64, 2, 1): 1605.9,
        (LAUNCH, 64, 2, 1): 2169.3,
    },
    (2048, 8, 4, 256, 256): {
        (STORED, 32, 2, 1): 1919.6,
        (STORED, 48, 2, 1): 1976.3,
        (LAUNCH, 32, 3, 1): 2532.1,
    },
    (8, 300, 4, 600, 192): {
        (STORED, 64, 2, 1): 61.0,
        (STORED, 48, 2, 1): 66.5,
        (LAUNCH, 64, 2, 1): 77.7,
    },
    (8, 300, 4, 600, 256): {
        (STORED, 48, 2, 1): 79.6,
        (STORED, 32, 2, 1): 83.2,
        (LAUNCH, 32, 3, 1): 102.3,
    },
}
#: A choice may take this many times as long as the fastest configuration that was timed.
MARGIN = 1.02


def problem_of(users: int, rows: int, heads: int, kv_len: int, head_dim: int):
    q_len = 4 if rows < 64 else 16
    sizes = (users * rows // q_len, users, q_len, kv_len, heads, heads, head_dim)
    return AttentionBackwardProblem(*sizes, "bfloat16")


@pytest.mark.parametrize("sizes", TIMED, ids=lambda sizes: "_".join(map(str, sizes)))
def test_the_choice_is_as_fast_as_what_was_timed(sizes):
    problem = problem_of(*sizes)
    assert not small_configs(problem)  # those have a model
    config = table.lookup(problem, device="NVIDIA H100", with_user_rows=False).config
    tall = (True,) if config.tall else ()
    chosen = TIMED[sizes][config.d_query, config.block_q, config.stages, config.kv_slots, *tall]
    assert chosen <= MARGIN * min(TIMED[sizes].values())


def test_a_row_of_many_rows_does_not_speak_for_few():
    many, few = problem_of(32, 4096, 2, 2048, 64), problem_of(128, 128, 2, 2048, 64)
    for problem, other in ((many, few), (few, many)):
        config = problem.default_config()
        assert problem.fits(config)
        assert not other.fits(config)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [8, 40, 128, 383, 384, 4096])
@pytest.mark.parametrize("kv_len", [128, 2048])
def test_the_default_fits(head_dim, rows, kv_len):
    problem = problem_of(512, rows, 4, kv_len, head_dim)
    assert problem.fits(problem.default_config())
