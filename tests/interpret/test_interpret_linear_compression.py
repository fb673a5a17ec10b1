"""The Hopper kernel's own body, interpreted on a CPU under a race detector.

The interpreter runs one cluster after another, the CTAs of a cluster side by side, and has no
device-wide semaphores: so a single launch is one CTA, or one cluster with counters of its own
(`count_by_barrier`).  Memory starts as NaN, reads outside of an array raise.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import planted
import problems
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.linear_compression import kernel, tiles
from ikbo_jax.problems import LinearCompressionConfig
from ikbo_jax.problems.hopper import NUM_CONSUMERS
from ikbo_jax.reference import linear_compression as reference

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: A small tile: accumulators of [64, 32], two chunks in the epilogue, a ring that wraps at once.
TINY = LinearCompressionConfig(
    block_m=32, num_stages=2, epilogue_rows=16, single_launch=True, cluster=1
)
SEPARATE = dataclasses.replace(TINY, single_launch=False)
#: Six chunks; tiles of the coarser level are not halved, since 24 rows are not whole fragments.
SIX = dataclasses.replace(TINY, block_m=48, epilogue_rows=8)


class Levels(NamedTuple):
    """Arguments of the kernel, coarsest level first."""

    weights: Sequence[jax.Array]
    embeddings: Sequence[jax.Array]
    parents: Sequence[jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Case(problems.CompressionCase):
    """A compression and a config."""

    config: LinearCompressionConfig = TINY
    num_sms: int = 1

    def levels(self, seed: int = 0) -> Levels:
        return Levels(*self.arrays_of_levels(seed))

    @property
    def launches(self) -> int:
        together = self.config.single_launch and len(self.batches) > 1
        return len(self.batches) - together


CASES = {
    # Sizes of M: tiles are 32 rows, whole WGMMA steps 8, stores 16.
    "m_below_8_n_of_8_one_candidate": Case((3, 1), (64, 64), 5, 8, index=(2,)),
    # Sizes of K: a k step is 64, an instruction 16.
    "k_steps_of_levels_differ_many_tiles_of_a_cta": Case((2, 6), (64 * 4 + 3, 131), 60, 64),
    # The last chunk of the last tile is cut as well.
    "one_k_step_and_six_chunks": Case((2, 3), (65, 33), 48 + 41, 64, SIX),
    "block_of_16": Case(
        (2, 3), (64, 72), 41, 64, dataclasses.replace(TINY, block_m=16, epilogue_rows=8)
    ),
    "default_tile": Case(
        (2, 3), (70, 100), 433, 64, LinearCompressionConfig(single_launch=True, cluster=1)
    ),
    # Batches and indices.
    "index_out_of_range": Case((3, 6), (40, 72), 24, 64, index=(-5, 0, 6, 1, -(2**31), 2**31 - 1)),
    # Levels.
    "one_level": Case((3,), (100,), 41, 136),
    "three_levels": Case((2, 3, 4), (40, 33, 72), 41, 64),
    # The other dtype; CTAs of which some have a tile more.
    "f16_three_levels": Case((1, 3, 4), (40, 33, 72), 41, 64, SEPARATE, 3, dtype="float16"),
}


def kernel_of(case: Case) -> Callable[..., jax.Array]:
    return functools.partial(
        kernel.linear_compression_kernel, config=case.config, num_sms=case.num_sms
    )


def interpret(levels: Levels, case: Case) -> jax.Array:
    # One program instead of one for each operation.
    return jax.block_until_ready(jax.jit(kernel_of(case))(*map(tuple, levels)))


# One program instead of one for each operation; its conversions round.
plain = jax.jit(reference.materialised, compiler_options={"xla_allow_excess_precision": False})


def references(levels: Levels) -> tuple[np.ndarray, jax.Array]:
    """The oracle in f64, and what the materialised one makes of the inputs in their own dtype."""
    return problems.numpy_oracle(*levels), plain(*levels)


def assert_correct(out: Any, levels: Levels, where: Any = ...) -> None:
    results = map(np.asarray, (out, *references(levels)))
    problems.assert_within_error_rule(*(result[where] for result in results))


def check(case: Case) -> None:
    """Runs a case, interpreted or emulated, and holds its result to the error rule."""
    assert case.config.illegal_reason(case.problem) is None
    levels = case.levels()
    assert_correct(interpret(levels, case), levels)


def assert_right(case, launches, count) -> None:
    """The case is legal; its `count` launches have no races and the right result."""
    check(case)
    launches.assert_no_races(count)


def assert_non_finite_rows_stay(case, launches, count, column=19) -> tuple[Levels, np.ndarray]:
    """Of three users and four candidates (2, 1, 0, 1), a candidate's NaN in `column`, a user's NaN
    and another's infinity in the next ones reach their own results alone.

    Returns what was multiplied, and the result.
    """
    levels = case.levels()
    of_users, of_cands = (np.array(x) for x in levels.embeddings)
    of_users[1, 69, column + 1], of_users[0, 69, column + 2] = np.nan, -np.inf
    of_cands[1, 39, column] = np.nan
    poisoned = levels._replace(embeddings=(jnp.asarray(of_users), jnp.asarray(of_cands)))
    out = np.asarray(interpret(poisoned, case))
    launches.assert_no_races(count)
    expected = problems.numpy_oracle(*poisoned)
    hit = np.zeros(out.shape, bool)
    hit[[1, 3], :, column + 1] = True
    hit[2, :, column + 2] = True
    hit[1, :, column] = True
    np.testing.assert_array_equal(~np.isfinite(expected), hit)
    np.testing.assert_array_equal(out[hit].astype(float), expected[hit])
    assert_correct(out, levels, ~hit)
    return poisoned, out


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name, launches) -> None:
    assert_right(CASES[name], launches, CASES[name].launches)


def test_interpreted_padded_weights_give_the_same_bits(launches: interpreter.Launches) -> None:
    """A weight with zeros behind its columns stays an operand of its own, beside one without."""
    case = Case((2, 3), (70, 64), 41, 64)
    levels = case.levels()
    user, cand = levels.weights
    padded = levels._replace(weights=(jnp.pad(user, ((0, 0), (0, 128 - 70))), cand))
    out = interpret(padded, case)
    launches.assert_no_races(1)
    expected = interpret(levels, case)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


# Infinity times the zeros that pad M is NaN, in rows that are never stored.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_interpreted_non_finite_rows_reach_their_own_results_alone(launches) -> None:
    """And all results are the same in one launch and in two, with two tiles each way."""
    # The poison lies in the last row of a partial k step, in the second warpgroup's columns.
    case = Case((3, 4), (70, 40), 41, 136, index=(2, 1, 0, 1))
    poisoned, out = assert_non_finite_rows_stay(case, launches, 1, column=69)
    apart = interpret(poisoned, dataclasses.replace(case, config=SEPARATE, num_sms=2))
    launches.assert_no_races(3)
    np.testing.assert_array_equal(out.astype(np.float32), np.asarray(apart).astype(np.float32))


# Two CTAs in a cluster. TMA reads zeros past an array's end, the interpreter is to read NaN.

IN_CLUSTER = dataclasses.replace(interpreter.PARAMS, out_of_bounds_reads="uninitialized")
#: The cluster's other CTA computes a candidate's user; a row lies past the odd batch.
PAIR = Case(
    (2, 3),
    (40, 72),
    16,
    64,
    dataclasses.replace(TINY, block_m=16, epilogue_rows=8, cluster=2),
    num_sms=2,
    index=(1, 0, 1),
)


def count_by_barrier(monkeypatch: pytest.MonkeyPatch, barrier: Any, arrivals: int) -> None:
    """A launch has a counter of its own: `users_ready` is a barrier.

    A wait that is missing is a race: what is added was written by another thread.
    """
    launch, counters = plgpu.kernel, []

    def launch_with_counter(body: Any, *, scratch_types: Any, **rest: Any) -> Any:
        def with_counter(*refs: Any) -> None:
            counters.append(refs[-1])
            body(*refs[:-1])

        return launch(with_counter, scratch_types=(*scratch_types, barrier), **rest)

    def wait(counter: Any, value: int) -> None:
        assert value == arrivals
        plgpu.barrier_wait(counter)

    monkeypatch.setattr(plgpu, "kernel", launch_with_counter)
    monkeypatch.setattr(mosaic, "device_counter", lambda: counters[-1])
    monkeypatch.setattr(mosaic, "signal", plgpu.barrier_arrive)
    monkeypatch.setattr(mosaic, "wait", wait)


def test_interpreted_single_launch_of_a_cluster_waits_for_users_of_its_other_cta(
    launches: interpreter.Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CTA takes every other tile, and awaits users of the other CTA."""
    arrivals = PAIR.batches[0] * NUM_CONSUMERS  # each user is one tile
    barrier = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=arrivals // 2)
    count_by_barrier(monkeypatch, barrier, arrivals)

    def ticket(counter: Any, i: Any) -> Any:
        return 2 * i + jax.lax.axis_index("cluster")

    monkeypatch.setattr(mosaic, "next_ticket", ticket)
    with mosaic.interpreted(IN_CLUSTER):
        assert_right(PAIR, launches, 1)


def test_interpreted_cluster_stores_no_row_past_an_odd_batch(launches, monkeypatch) -> None:
    """Neither of the users' results nor of the output.

    The interpreter drops rows past the batch.  The device does not in a batch of one: Mosaic GPU
    leaves axes of size one out of TMA's descriptors, so every row is the first.
    """
    rows: set[int] = set()
    copy = gpu_callbacks.copy_smem_to_gmem

    def noted(**kwargs: Any) -> Any:
        (indexer,) = kwargs["dst_transforms"]
        rows.add(int(indexer.indices[0]))
        return copy(**kwargs)

    monkeypatch.setattr(gpu_callbacks, "copy_smem_to_gmem", noted)
    config = dataclasses.replace(PAIR.config, single_launch=False)
    case = dataclasses.replace(PAIR, batches=(1, 1), index=(0,), config=config)
    with mosaic.interpreted(IN_CLUSTER):
        assert_right(case, launches, 2)
    assert rows == {0}


# The checks themselves: each of them must be able to fail.


def plant(monkeypatch: pytest.MonkeyPatch, name: str, unless: Callable[..., bool]) -> None:
    """Leaves out the calls of `plgpu.<name>` for whose arguments `unless` is false."""
    real = getattr(plgpu, name)

    def call_or_not(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if unless(*args) else None

    monkeypatch.setattr(plgpu, name, call_or_not)


def assert_found(case: Case, launches: interpreter.Launches, match: str = "races in") -> None:
    """Not as one program: a launch is traced when those before it have run."""
    kernel, levels = kernel_of(case), map(tuple, case.levels())
    planted.assert_found(lambda: kernel(*levels), launches, case.launches, match)


def test_interpreted_producer_that_does_not_wait_is_found(monkeypatch, launches) -> None:
    plant(monkeypatch, "barrier_wait", lambda ref: not planted.is_handed_back(ref))
    assert_found(Case((1,), (300,), 64, 64), launches)


@pytest.mark.parametrize("config", [TINY, SIX], ids=["two_chunks", "six_chunks"])
def test_interpreted_race_is_found_without_waiting_for_a_staging_buffer(
    config: LinearCompressionConfig, monkeypatch: pytest.MonkeyPatch, launches: interpreter.Launches
) -> None:
    plant(monkeypatch, "wait_smem_to_gmem", lambda n: n == 0)
    case = Case((3,), (100,), config.block_m, 64, config)
    assert_found(case, launches)


def test_wrong_user_is_found() -> None:
    case = Case((3, 4), (40, 40), 24, 16, index=(0, 1, 2, 0))
    levels = case.levels()
    mistaken = dataclasses.replace(case, index=(0, 1, 2, 1)).levels()
    _, out = references(mistaken)
    with pytest.raises(AssertionError, match="largest error"):
        assert_correct(out, levels)


def test_a_user_level_of_few_tiles_has_halves() -> None:
    """Up to four tiles an SM."""
    plain = {"k": 64, "m": 64, "n": 64, "block_m": 64, "k_offset": 0, "cluster": 1}
    for batch, block_m in ((39, 32), (40, 64)):
        phase = tiles.Phase(batch, from_fragments=False, **plain)
        assert kernel._halved(phase, num_sms=10).block_m == block_m
