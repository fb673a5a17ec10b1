"""Faults that Pallas' interpreter does not see are found by the emulator: each is planted here."""

import functools
from collections.abc import Callable
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sm90_arithmetic
import test_emulated_kernels as kernels
import test_interpret_attention_backward as backward
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.attention_backward import store
from ikbo_jax.pallas.hopper import launch, mosaic, stores, turns
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig as Config
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

ROWS, COLUMNS = 16, 32
FLOATS = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)


def run(sm90: emulator.Emulator, body: Callable[..., None], source: Any, seed: int = 0) -> Any:
    """body(source, target, shared memory, barrier) on one warpgroup; the target is as `FLOATS`."""
    with sm90.emulated(seed):
        launched = mosaic.kernel(
            body,
            out_type=FLOATS,
            scratch_types=(plgpu.SMEM(FLOATS.shape, jnp.float32), plgpu.Barrier()),
            grid=(1,),
            grid_names=("worker",),
            num_threads=1,
            thread_name="warpgroup",
            compiler_params=mosaic.compiler_params(),
        )
        return np.asarray(jax.block_until_ready(launched(source)))


def numbers(columns: int = COLUMNS) -> jax.Array:
    return jnp.arange(ROWS * columns, dtype=jnp.float32).reshape(ROWS, columns)


def copy_from(first: int, source: Any, target: Any, shared: Any, barrier: Any) -> None:
    """By TMA to shared memory and back, columns from `first` on."""
    begin = first + 0 * lax.axis_index("worker")
    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(begin, COLUMNS)], shared, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(shared, target)
    plgpu.wait_smem_to_gmem(0)


def test_copies_read_zeros_past_the_end_and_begin_at_16_bytes(sm90: emulator.Emulator) -> None:
    out = run(sm90, functools.partial(copy_from, 24), numbers(40))
    np.testing.assert_array_equal(out[:, :16], numbers(40)[:, 24:])
    np.testing.assert_array_equal(out[:, 16:], 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="begins 12 bytes past a multiple of 16"):
        run(sm90, functools.partial(copy_from, 3), numbers(64))


def double(source: Any, target: Any, shared: Any, _: Any, *, fence: Any, wait: bool) -> None:
    """Doubles the source, through shared memory that threads write and TMA reads."""
    shared[...] = 2 * plgpu.load(source, layout=plgpu.Layout.WG_STRIDED((ROWS, COLUMNS), 1))
    fence()
    plgpu.copy_smem_to_gmem(shared, target)
    if wait:
        plgpu.wait_smem_to_gmem(0)


def test_store_by_tma_of_what_threads_wrote(sm90: emulator.Emulator) -> None:
    body = functools.partial(double, fence=plgpu.commit_smem, wait=True)
    np.testing.assert_array_equal(run(sm90, body, numbers()), 2 * numbers())


def test_missing_proxy_fence_or_barrier_of_a_warpgroup_is_found(sm90: emulator.Emulator) -> None:
    """One thread issues the copy, while other warps may not have written yet."""
    barrier = lambda: mosaic.named_barrier("sync", jnp.int32(4), WARPGROUP_SIZE)  # noqa: E731
    body = functools.partial(double, fence=barrier, wait=True)
    assert np.isnan(run(sm90, body, numbers())).all()
    body = functools.partial(double, fence=mosaic.fence_accesses, wait=True)
    assert any(np.isnan(run(sm90, body, numbers(), seed)).any() for seed in range(4))


def test_exit_before_tma_has_read_traps(sm90: emulator.Emulator) -> None:
    body = functools.partial(double, fence=plgpu.commit_smem, wait=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ends before TMA has read"):
        run(sm90, body, numbers())


def test_wait_for_what_never_comes_traps(sm90: emulator.Emulator) -> None:
    def body(source: Any, target: Any, shared: Any, barrier: Any) -> None:
        copy_from(0, source, target, shared, barrier)
        plgpu.barrier_wait(barrier)

    with pytest.raises(jax.errors.JaxRuntimeError, match="all warps wait"):
        run(sm90, body, numbers())


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.uint32, np.uint64])
def test_upper_half_of_a_product(dtype: Any) -> None:
    """Compilers divide by 48 and 96 so; 16 bits were once taken for 32."""
    info = np.iinfo(dtype)
    a = np.asarray([info.min, -3 % (info.max + 1), 10923, info.max], dtype)
    b = np.asarray([info.max, 7, 60, info.max], dtype)
    want = [int(x) * int(y) >> info.bits for x, y in zip(a, b, strict=True)]
    assert sm90_arithmetic._high(a, b).tolist() == want


# Faults in a real kernel.

CASE = backward.Case(backward.AttentionShape(1, 2, 32, 129, 1, 1, 64), Config(32))


def is_right(sm90: emulator.Emulator, case: backward.Case = CASE, seed: int = 0) -> bool:
    """Whether all thread blocks at the same time compute the gradients."""
    try:
        with sm90.emulated(seed):
            kernels.check_backward(case, num_sms=4)
    except AssertionError:
        return False
    return True


def test_kernel_without_a_fault_is_right(sm90: emulator.Emulator) -> None:
    assert is_right(sm90)


def test_wrong_swizzle_of_a_store_is_found(monkeypatch, sm90) -> None:
    """The interpreter has no swizzles."""
    parts = store.digits
    monkeypatch.setattr(store, "digits", lambda *args: [*parts(*args)[:-1], parts(*args)[0]])
    assert not is_right(sm90)


def test_store_out_of_bounds_traps(monkeypatch, sm90) -> None:
    """f32 gradients of keys go to rows of all users: past the last, out of the array."""
    true = lambda *_: mgpu.c(1, ir.IntegerType.get_signless(1))  # noqa: E731
    monkeypatch.setattr(stores, "within", true)
    case = backward.Case(CASE.shape, CASE.config, sum_dtype="float32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of bounds"):
        is_right(sm90, case)


def test_more_registers_than_there_are_traps(monkeypatch, sm90) -> None:
    roles = launch.Roles
    monkeypatch.setattr(
        "ikbo_jax.pallas.attention_backward.kernel.Roles",
        functools.partial(roles, registers=(240, 32)),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="all warps wait.*setmaxnreg"):
        is_right(sm90)


def test_missing_barrier_between_consumers_is_found(monkeypatch, sm90) -> None:
    monkeypatch.setattr(turns, "synchronise_consumers", lambda: None)
    assert not all(is_right(sm90, seed=seed) for seed in range(4))
