"""What `tests/support/interpreter.py` adds to Pallas' GPU interpreter."""

import contextlib
import functools
import types
from typing import Any

import alignment
import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret import race_detection_state, vector_clock
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mosaic

WARPGROUPS = 2


def _launch(body: Any, rows: jax.ShapeDtypeStruct, threads: int, scratch: Any = ()) -> None:
    """Interprets a launch of one CTA, from ones to an array like them."""
    launch = plgpu.kernel(
        body,
        out_type=rows,
        scratch_types=scratch,
        grid=(1,),
        grid_names=("worker",),
        num_threads=threads,
        thread_name="warpgroup",
        interpret=interpreter.PARAMS,
    )
    jax.block_until_ready(jax.jit(launch)(jnp.ones(rows.shape, rows.dtype)))


def _kernel(source: Any, target: Any) -> None:
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        mosaic.named_barrier("sync", jnp.int32(4), 128 * WARPGROUPS)

    @pl.when(warpgroup == 1)
    def _() -> None:
        # The other warpgroup has come to the barrier long before the last of these reads.
        @pl.loop(0, source.shape[0] + 1)
        def _(i: Any) -> None:
            target[i] = source[i]


# The limit is a hang's: the test itself takes 2 s.
@pytest.mark.time_limit(120)
@pytest.mark.usefixtures("on_cpu")
def test_interpreted_launch_ends_where_one_fails_and_another_waits_at_a_named_barrier() -> None:
    """The failure is a read outside of an array."""
    rows = jax.ShapeDtypeStruct((40,), jnp.float32)
    found = pytest.raises(jax.errors.JaxRuntimeError, match="(?i)out-of-bounds")
    with interpreter.watched(), found:
        _launch(_kernel, rows, WARPGROUPS)


def _copy(first: int, columns: int, source: Any, target: Any, shared: Any, barrier: Any) -> None:
    """By TMA to shared memory and back."""
    part = pl.ds(first, columns)
    plgpu.copy_gmem_to_smem(source.at[:, part], shared.at[:, pl.ds(0, columns)], barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(shared.at[:, pl.ds(0, columns)], target.at[:, part])
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("first", "columns", "total", "reason"),
    [
        (4, 16, 64, None),
        (3, 16, 64, "begins 12 bytes past a multiple of 16"),
        (4, 6, 64, "rows of the copy have 24 bytes"),
        (0, 16, 66, "rows of the array have 264 bytes"),
        (0, 260, 260, "260 elements in a dimension"),
    ],
)
def test_interpreted_copy_that_tma_cannot_make_is_found(first, columns, total, reason) -> None:
    rows = jax.ShapeDtypeStruct((4, total), jnp.float32)
    scratch = plgpu.SMEM((4, columns), jnp.float32), plgpu.Barrier()
    found = (
        pytest.raises(jax.errors.JaxRuntimeError, match=reason)
        if reason
        else contextlib.nullcontext()
    )
    with interpreter.watched(), found:
        _launch(functools.partial(_copy, first, columns), rows, 1, scratch)


def test_copy_to_an_unaligned_place_in_shared_memory_is_found() -> None:
    device, rows = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), slice(0, 4)
    shared = jax.ShapeDtypeStruct((2, 16, 32), jnp.bfloat16)
    columns = slice(0, 32)
    place = (1, slice(2, 6), columns)
    assert alignment.why_not(device, (rows, columns), shared, place) is None
    place = (1, slice(3, 7), columns)
    reason = alignment.why_not(device, (rows, columns), shared, place)
    assert reason == "the copy is at offset 1216 of shared memory, no multiple of 128"


def test_accesses_are_compared_as_jax_compares_them_one_by_one() -> None:
    rng = np.random.default_rng(0)
    accesses, found = interpreter._Accesses(), set()
    for _ in range(200):
        clock = vector_clock.NpVectorClock(3)
        clock.clock[:] = rng.integers(0, 4, 3)
        where = slice(start := int(rng.integers(0, 60)), start + 3), int(rng.integers(0, 3))
        one_by_one = any(
            not earlier.ordered(clock) and race_detection_state._ranges_overlap(where, at)
            for _, earlier, at, _ in accesses
        )
        assert accesses.may_race_with(clock, where) == one_by_one
        found.add(one_by_one)
        accesses.append((None, clock, where, None))
    assert found == {True, False}


def test_races_of_an_early_launch_and_launches_that_never_ran_are_found() -> None:
    launches = interpreter.Launches()
    with pytest.raises(AssertionError, match="0 launches"):
        launches.assert_no_races(1)
    launches.detectors = [types.SimpleNamespace(races_found=found) for found in (True, False)]
    with pytest.raises(AssertionError, match=r"races in launches \[0\]"):
        launches.assert_no_races(2)
