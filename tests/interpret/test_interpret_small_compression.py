"""Linear compression's kernels for small sizes, under a race detector.

Tiles span candidates (packed), or CTAs keep their weights (resident).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import interpreter
import pytest
import test_interpret_linear_compression as linear_compression
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_interpret_linear_compression import (
    Case,
    assert_found,
    assert_non_finite_rows_stay,
    assert_right,
)

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems import (
    LinearCompressionProblem,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: A small tile: two accumulators of [64, 16], one chunk each, a ring that wraps at once.
TINY = PackedCompressionConfig(
    block_n=256, block_m=16, num_stages=2, epilogue_rows=16, single_launch=True, cluster=1
)
#: One accumulator, two chunks, of which the last ends with half a stmatrix.
NARROW = dataclasses.replace(TINY, block_n=128, block_m=48, epilogue_rows=24)
SEPARATE = dataclasses.replace(NARROW, single_launch=False)
#: Consumers that share 64 columns, each with half of the compressed rows, in two chunks.
SHARED = dataclasses.replace(TINY, block_n=64, block_m=64)
#: More rows than registers hold beside the fragments: these are loaded after the last product.
LATE = dataclasses.replace(TINY, block_m=80, epilogue_rows=40)


#: Users of six candidates, of which there are three.
OUT_OF_RANGE = (-5, 0, 6, 1, -(2**31), 2**31 - 1)
PACKED = {
    # Widths of blocks: a row of the batch is one block of 16, 32 or 64 columns, or several.
    "n16_ragged_last_tile": Case((3, 19), (40, 40), 16, 16, TINY),
    "n32_batch_below_a_tile": Case((3, 2), (72, 33), 10, 32, TINY),
    "n48_three_blocks": Case((2, 7), (40, 72), 41, 48, NARROW),
    "n64_two_m_tiles_many_k_steps": Case((2, 5), (65, 260), 90, 64, NARROW),
    "n96_blocks_cross_tiles": Case((2, 7), (20, 33), 13, 96, TINY),
    "n128_fragments_late": Case((2, 3), (40, 40), 77, 128, LATE),
    # Consumers with the same columns; the second one's rows end before M, or begin after it.
    "n16_shared_ragged": Case((3, 19), (40, 140), 90, 16, SHARED),
    "n32_shared_one_m_tile": Case((2, 7), (72, 33), 50, 32, SHARED),
    "n48_shared_rows_of_one_consumer": Case((2, 5), (40, 72), 10, 48, SHARED),
    "n64_shared_separate": Case(
        (2, 3), (65, 260), 130, 64, dataclasses.replace(SHARED, single_launch=False), index="gaps"
    ),
    "n96_shared_three_levels_f16": Case((2, 3, 5), (40, 33, 72), 70, 96, SHARED, dtype="float16"),
    # Batches and indices.
    "one_user_last_users_columns_alone": Case((1, 6), (40, 40), 16, 16, TINY),
    "users_without_candidates": Case((7, 5), (40, 40), 16, 32, TINY, index="gaps"),
    "index_out_of_range": Case((3, 6), (40, 72), 24, 32, NARROW, index=OUT_OF_RANGE),
    # Levels and launches.
    "one_level": Case((9,), (100,), 41, 32, NARROW),
    "three_levels": Case((2, 3, 9), (40, 33, 72), 41, 32, NARROW),
    "three_levels_n96": Case((2, 3, 5), (40, 33, 72), 16, 96, TINY),
    "f16_separate_launches_three_ctas": Case(
        (2, 11), (33, 72), 41, 32, SEPARATE, 3, dtype="float16"
    ),
}


@pytest.fixture
def count_users(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    """Called with a case, makes `users_ready` a barrier of the CTA.

    A consumer adds fragments that the other one has stored. Without the wait, that is a race.
    """

    def model(case: Case) -> None:
        if case.launches < len(case.batches):
            columns = min(TILE_ROWS, case.config.block_n)
            tiles = -(-case.batches[-2] * case.n // columns) * -(-case.m // case.config.block_m)
            arrivals = tiles * NUM_CONSUMERS
            barrier = plgpu.Barrier(num_arrivals=arrivals)
            linear_compression.count_by_barrier(monkeypatch, barrier, arrivals)

    return model


@pytest.mark.parametrize("name", PACKED)
def test_interpreted_packed_kernel_is_right_and_free_of_races(name, launches, count_users) -> None:
    case = PACKED[name]
    count_users(case)
    assert_right(case, launches, case.launches)


#: The second CTA's tile lies past the batch.
PAIR = Case(
    (2, 5), (40, 72), 16, 16, dataclasses.replace(TINY, cluster=2, single_launch=False), num_sms=2
)


def test_interpreted_packed_cluster_shares_weights(launches: interpreter.Launches) -> None:
    with mosaic.interpreted(linear_compression.IN_CLUSTER):
        assert_right(PAIR, launches, 2)


# The checks themselves: each of them must be able to fail.


def test_interpreted_packed_fragments_that_are_not_awaited_are_found(
    monkeypatch: pytest.MonkeyPatch,
    launches: interpreter.Launches,
    count_users: Callable[[Case], None],
) -> None:
    case = Case((9, 19), (40, 40), 16, 16, TINY)
    count_users(case)
    monkeypatch.setattr(mosaic, "wait", lambda *args, **options: None)
    assert_found(case, launches)


TWO = ResidentCompressionConfig(accumulators=2, block_m=16, num_stages=2, ctas=1)
GATHER = dataclasses.replace(TWO, gathers=True)
GATHER_GROUPS = dataclasses.replace(GATHER, groups=2)
ONE = dataclasses.replace(TWO, accumulators=1, num_stages=1)
ONE_GATHER = dataclasses.replace(ONE, gathers=True)

RESIDENT = {
    # Widths of blocks: a row of the batch is one block of 16, 32 or 64 columns, or several.
    "n16_three_parts_ragged_last_tile": Case((3, 19), (40, 22), 41, 16, TWO),
    "n32_batch_below_a_tile": Case((3, 2), (72, 33), 10, 32, TWO),
    "n48_three_blocks_two_ctas_odd_k": Case((2, 7), (41, 73), 16, 48, ONE, 2),
    "n64_two_k_steps": Case((2, 5), (65, 260), 24, 64, ONE),
    "n96_blocks_cross_tiles": Case((2, 7), (20, 33), 13, 96, TWO),
    "n128_one_stage": Case((2, 3), (40, 40), 33, 128, dataclasses.replace(TWO, num_stages=1)),
    # Batches, indices and levels.
    "users_without_candidates": Case((7, 5), (40, 40), 16, 32, TWO, index="gaps"),
    "index_out_of_range": Case((3, 6), (40, 72), 24, 32, TWO, index=OUT_OF_RANGE),
    "gathered_n32_index_out_of_range": Case(
        (3, 9), (72, 40), 20, 32, GATHER, 2, index=(*OUT_OF_RANGE, 2, 1, 0)
    ),
    "gathered_n128_two_k_steps_three_parts": Case((3, 3), (260, 70), 40, 128, ONE_GATHER),
    "two_groups_of_two_parts_and_a_part_past_m": Case(
        (3, 7), (40, 22), 33, 16, dataclasses.replace(TWO, groups=2), 2
    ),
    "one_user_gathered_n96": Case(
        (1, 5), (72, 40), 13, 96, dataclasses.replace(ONE_GATHER, accumulators=3), 2
    ),
    "one_user_gathered_n64_two_groups": Case((1, 5), (72, 40), 31, 64, GATHER_GROUPS, 2),
    "one_user_gathered_n16": Case((1, 9), (72, 40), 13, 16, GATHER, 2),
    "one_user_gathered_strips": Case((1, 5), (72, 40), 16, 128, ONE_GATHER, 3),
    "gathered_n96": Case((3, 5), (33, 20), 13, 96, GATHER),
    # Weights whose last element is in a vector that ends past them: 1, 3, 5 and 7 elements of it;
    # rows that begin at every element of a vector, at even ones, and one row shorter than a vector.
    "k_odd_three_of_a_last_vector": Case((2, 5), (131, 67), 9, 16, TWO),
    "k_even_two_k_steps_of_parts": Case((2, 5), (90, 262), 41, 32, TWO),
    "k_3_and_1_gathered": Case((3, 9), (1, 3), 17, 32, GATHER),
    "k_odd_two_groups_past_m": Case((2, 5), (71, 77), 35, 16, GATHER_GROUPS, 2),
    "coarse_tiles_of_48_rows_six_groups": Case(
        (3, 7), (150, 22), 102, 16, dataclasses.replace(ONE, num_stages=2, coarse_k=80, groups=6), 3
    ),
    # K and the compressed rows of both coarser levels are divided by two.
    "three_levels_in_splits_and_groups": Case(
        (2, 3, 9), (100, 80, 33), 20, 32, dataclasses.replace(TWO, coarse_k=64)
    ),
    "one_level": Case((9,), (100,), 20, 32, TWO),
    "three_levels_f16": Case((2, 3, 9), (40, 33, 72), 20, 32, TWO, 3, dtype="float16"),
}


@pytest.mark.parametrize("name", RESIDENT)
def test_interpreted_resident_kernel_is_right_and_free_of_races(name, launches) -> None:
    case = RESIDENT[name]
    problem = LinearCompressionProblem(case.batches, case.ks, case.m, case.n, case.dtype)
    assert_right(case, launches, len(case.config.levels(problem)))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(("config", "count"), [(TINY, 1), (TWO, 2)], ids=["packed", "resident"])
def test_interpreted_small_non_finite_rows_reach_their_own_results_alone(
    config: Any, count: int, launches: interpreter.Launches, count_users: Callable[[Case], None]
) -> None:
    # Neighbours in a tile are other candidates, with other users.
    case = Case((3, 4), (70, 40), 13, 32, config, index=(2, 1, 0, 1))
    if config is TINY:
        count_users(case)
    assert_non_finite_rows_stay(case, launches, count)
