"""The kernels of lookups and segment sums, interpreted on a CPU under a race detector."""

import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems_look_up import assert_sums, draw

from ikbo_jax.pallas.look_up import sums
from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.problems.look_up import LookUpConfig, SegmentSumConfig

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Candidates, users, width, dtype, whether sorted, configuration.
CASES = {
    "one": (1, 1, 2, "float32", True, SegmentSumConfig(2, 2, 1)),
    # CTAs begin within users, a lane holds several users, a user several lanes.
    "shared": (11, 4, 16, "bfloat16", False, SegmentSumConfig(1, 1, 2)),
    # One user fills the parts of several CTAs, which share its columns.
    "long": (70, 6, 56, "float16", False, True, SegmentSumConfig(8, 1, 2)),
    "long_in_shares": (70, 6, 56, "float16", False, True, SegmentSumConfig(8, 1, 2)),
    "odd_width": (6, 3, 3, "float16", True, SegmentSumConfig(2, 1, 1)),
    "users_without_candidates": (3, 9, 8, "bfloat16", True, SegmentSumConfig(2, 2, 1)),
    "listed": (9, 3, 16, "float16", False, SegmentSumConfig(2, 1, 2, users=1)),
    # Lanes of one user alone, users without candidates, and a part without candidates.
    "listed_in_parts": (9, 5, 6, "float16", False, SegmentSumConfig(2, 1, 1, users=2, parts=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_sums(
    name: str, launches: interpreter.Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    *sizes, config = CASES[name]
    if is_split := name == "long_in_shares":
        monkeypatch.setattr(sums, "STREAMED_BYTES", 0)
    _, users, _, dtype, is_sorted, *_ = sizes
    values, index = draw(*sizes)
    kernel = functools.partial(segment_sum_kernel, users=users, config=config, is_sorted=is_sorted)
    found = jax.block_until_ready(jax.jit(kernel)(values, index))
    launches.assert_no_races(1 + is_split)
    unit = float(jnp.finfo(dtype).eps)
    assert_sums(found, values, index, unit, unit)


def test_interpreted_lookups(launches: interpreter.Launches) -> None:
    rng = np.random.default_rng(0)
    user = jnp.asarray(rng.normal(size=(3, 6)), jnp.bfloat16)
    index = jnp.asarray(rng.integers(-1, 4, 5), jnp.int32)
    kernel = functools.partial(look_up_kernel, config=LookUpConfig(1))
    found = jax.block_until_ready(jax.jit(kernel)(user, index))
    launches.assert_no_races(1)
    np.testing.assert_array_equal(found, user[jnp.clip(index, 0, 2)])
