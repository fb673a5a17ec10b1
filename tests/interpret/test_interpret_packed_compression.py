"""The linear-compression kernel whose tiles span candidates, interpreted under a race detector."""

import dataclasses
from collections.abc import Callable

import interpreter
import pytest
import test_interpret_linear_compression as linear_compression
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_interpret_linear_compression import (
    Case,
    assert_found,
    assert_non_finite_rows_stay,
    assert_right,
    case_of_neighbours,
)

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems import PackedCompressionConfig
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


CASES = {
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
    "index_out_of_range": Case(
        (3, 6), (40, 72), 24, 32, NARROW, index=(-5, 0, 6, 1, -(2**31), 2**31 - 1)
    ),
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


@pytest.mark.parametrize("name", CASES)
def test_interpreted_packed_kernel_is_right_and_free_of_races(
    name: str, launches: interpreter.Launches, count_users: Callable[[Case], None]
) -> None:
    case = CASES[name]
    count_users(case)
    assert_right(case, launches, case.launches)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_interpreted_packed_non_finite_rows_reach_their_own_results_alone(
    launches: interpreter.Launches, count_users: Callable[[Case], None]
) -> None:
    case = case_of_neighbours(TINY)
    count_users(case)
    assert_non_finite_rows_stay(case, launches, 1)


#: The second CTA's tile lies past the batch.
PAIR = Case(
    (2, 5), (40, 72), 16, 16, dataclasses.replace(TINY, cluster=2, single_launch=False), num_sms=2
)


def test_interpreted_packed_cluster_shares_weights(launches: interpreter.Launches) -> None:
    assert_right(PAIR, launches, 2, linear_compression.IN_CLUSTER)


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
