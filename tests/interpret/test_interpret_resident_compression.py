"""The linear-compression kernel whose CTAs keep their weights, under a race detector."""

import dataclasses

import interpreter
import pytest
from test_interpret_linear_compression import (
    Case,
    assert_non_finite_rows_stay,
    assert_right,
    case_of_neighbours,
)

from ikbo_jax.problems import LinearCompressionProblem, ResidentCompressionConfig

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

TINY = ResidentCompressionConfig(accumulators=2, block_m=16, num_stages=2, ctas=1)
GATHER = dataclasses.replace(TINY, gathers=True)
ONE = dataclasses.replace(TINY, accumulators=1, num_stages=1)

CASES = {
    # Widths of blocks: a row of the batch is one block of 16, 32 or 64 columns, or several.
    "n16_three_parts_ragged_last_tile": Case((3, 19), (40, 22), 41, 16, TINY),
    "n32_batch_below_a_tile": Case((3, 2), (72, 33), 10, 32, TINY),
    "n48_three_blocks_two_ctas_odd_k": Case((2, 7), (41, 73), 16, 48, ONE, 2),
    "n64_two_k_steps": Case((2, 5), (65, 260), 24, 64, ONE),
    "n96_blocks_cross_tiles": Case((2, 7), (20, 33), 13, 96, TINY),
    "n128_one_stage": Case((2, 3), (40, 40), 33, 128, dataclasses.replace(TINY, num_stages=1)),
    # Batches, indices and levels.
    "users_without_candidates": Case((7, 5), (40, 40), 16, 32, TINY, index="gaps"),
    "index_out_of_range": Case(
        (3, 6), (40, 72), 24, 32, TINY, index=(-5, 0, 6, 1, -(2**31), 2**31 - 1)
    ),
    "gathered_n32_index_out_of_range": Case(
        (3, 9), (72, 40), 20, 32, GATHER, 2, index=(-5, 0, 6, 1, -(2**31), 2**31 - 1, 2, 1, 0)
    ),
    "gathered_n128_two_k_steps_three_parts": Case(
        (3, 3), (260, 70), 40, 128, dataclasses.replace(ONE, gathers=True)
    ),
    "two_groups_of_two_parts_and_a_part_past_m": Case(
        (3, 7), (40, 22), 33, 16, dataclasses.replace(TINY, groups=2), 2
    ),
    "one_user_gathered_n96": Case(
        (1, 5), (72, 40), 13, 96, dataclasses.replace(ONE, accumulators=3, gathers=True), 2
    ),
    "one_user_gathered_n64_two_groups": Case(
        (1, 5), (72, 40), 31, 64, dataclasses.replace(GATHER, groups=2), 2
    ),
    "one_user_gathered_n16": Case((1, 9), (72, 40), 13, 16, GATHER, 2),
    "one_user_gathered_strips": Case(
        (1, 5), (72, 40), 16, 128, dataclasses.replace(ONE, gathers=True), 3
    ),
    "gathered_n96": Case((3, 5), (33, 20), 13, 96, GATHER),
    # Weights whose last element is in a vector that ends past them: 1, 3, 5 and 7 elements of it;
    # rows that begin at every element of a vector, at even ones, and one row shorter than a vector.
    "k_odd_three_of_a_last_vector": Case((2, 5), (131, 67), 9, 16, TINY),
    "k_even_two_k_steps_of_parts": Case((2, 5), (90, 262), 41, 32, TINY),
    "k_3_and_1_gathered": Case((3, 9), (1, 3), 17, 32, GATHER),
    "k_odd_two_groups_past_m": Case(
        (2, 5), (71, 77), 35, 16, dataclasses.replace(GATHER, groups=2), 2
    ),
    "coarse_tiles_of_48_rows_six_groups": Case(
        (3, 7), (150, 22), 102, 16, dataclasses.replace(ONE, num_stages=2, coarse_k=80, groups=6), 3
    ),
    # K and the compressed rows of both coarser levels are divided by two.
    "three_levels_in_splits_and_groups": Case(
        (2, 3, 9), (100, 80, 33), 20, 32, dataclasses.replace(TINY, coarse_k=64)
    ),
    "one_level": Case((9,), (100,), 20, 32, TINY),
    "three_levels_f16": Case((2, 3, 9), (40, 33, 72), 20, 32, TINY, 3, dtype="float16"),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_resident_kernel_is_right_and_free_of_races(
    name: str, launches: interpreter.Launches
) -> None:
    case = CASES[name]
    problem = LinearCompressionProblem(case.batches, case.ks, case.m, case.n, case.dtype)
    assert_right(case, launches, len(case.config.levels(problem)))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_interpreted_resident_non_finite_rows_reach_their_own_results_alone(
    launches: interpreter.Launches,
) -> None:
    assert_non_finite_rows_stay(case_of_neighbours(TINY), launches, 2)
