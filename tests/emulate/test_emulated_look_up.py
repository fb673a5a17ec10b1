"""The PTX of the kernels of lookups and segment sums, executed on a CPU."""

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems_look_up import assert_sums, draw

from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.problems.look_up import LookUpConfig, SegmentSumConfig

#: Candidates, users, width, dtype, whether sorted, configuration.
CASES = {
    "shared": (90, 17, 24, "float32", False, SegmentSumConfig(4, 2, 2)),
    # A user's end lies further away than the first search looks.
    "many_candidates_of_a_user": (1900, 2, 8, "bfloat16", True, SegmentSumConfig(2, 2, 4)),
    "four_warpgroups": (120, 50, 50, "float16", True, SegmentSumConfig(3, 1, 2, 4)),
    "users_without_candidates": (20, 300, 16, "bfloat16", True, SegmentSumConfig(2, 4, 2)),
    "listed": (150, 9, 20, "bfloat16", False, SegmentSumConfig(2, 1, 2, users=1)),
    "listed_in_parts": (900, 9, 20, "bfloat16", False, SegmentSumConfig(2, 1, 2, 1, 4, 3)),
    # A warp sorts more candidates than it has lanes.
    "listed_by_warpgroups": (700, 3, 6, "float32", False, SegmentSumConfig(3, 1, 4, 2, 2)),
    "listed_odd_width": (140, 2, 5, "float16", False, SegmentSumConfig(4, 1, 2, users=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_sums(name: str, sm90: emulator.Emulator) -> None:
    *sizes, config = CASES[name]
    _, users, _, dtype, is_sorted = sizes
    values, index = draw(*sizes)
    with sm90.emulated(0) as launched:
        found = segment_sum_kernel(values, index, users, config=config, is_sorted=is_sorted)
    orders = ["user_order"] * (not is_sorted and not config.users)
    assert launched == [f"ikbo_{x}_mosaic_gpu_kernel" for x in (*orders, "segment_sum")]
    unit = max(float(jnp.finfo(dtype).eps) / 2, 1e-5)
    assert_sums(found, values, index, unit, 1e-5)


def test_emulated_index_that_is_not_sorted_as_promised(sm90: emulator.Emulator) -> None:
    """Sums are unspecified, but nothing is read or written outside of arrays."""
    rng = np.random.default_rng(0)
    index = jnp.asarray(rng.integers(-5, 12, 100), jnp.int32)
    values = jnp.asarray(rng.normal(size=(100, 8)), jnp.float32)
    with sm90.emulated(0):
        found = segment_sum_kernel(values, index, 7, config=SegmentSumConfig(2, 2), is_sorted=True)
    assert found.shape == (7, 8)


@pytest.mark.parametrize(("width", "dtype"), [(24, "bfloat16"), (6, "float16"), (1, "float32")])
def test_emulated_lookups(width: int, dtype: str, sm90: emulator.Emulator) -> None:
    rng = np.random.default_rng(0)
    user = jnp.asarray(rng.normal(size=(7, width)), dtype)
    index = jnp.asarray(rng.integers(-1, 8, 90), jnp.int32)
    with sm90.emulated(0) as launched:
        found = look_up_kernel(user, index, config=LookUpConfig(2, streams=True))
    assert launched == ["ikbo_look_up_mosaic_gpu_kernel"]
    np.testing.assert_array_equal(found, user[jnp.clip(index, 0, 6)])
    assert isinstance(found, jax.Array)
