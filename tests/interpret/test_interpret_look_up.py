"""The kernels of lookups and segment sums, interpreted on a CPU under a race detector."""

import functools
from typing import Any

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


def check_sums(case: Any, rtol: float, atol: float) -> None:
    """Runs a case, interpreted or emulated."""
    *sizes, config = case
    _, users, _, _, is_sorted, *_ = sizes
    values, index = draw(*sizes)
    kernel = functools.partial(segment_sum_kernel, users=users, config=config, is_sorted=is_sorted)
    found = jax.block_until_ready(jax.jit(kernel)(values, index))
    assert_sums(found, values, index, rtol, atol)


def check_lookups(users: int, batch: int, width: int, dtype: str, config: LookUpConfig) -> None:
    rng = np.random.default_rng(0)
    user = jnp.asarray(rng.normal(size=(users, width)), dtype)
    index = jnp.asarray(rng.integers(-1, users + 1, batch), jnp.int32)
    kernel = functools.partial(look_up_kernel, config=config)
    found = jax.block_until_ready(jax.jit(kernel)(user, index))
    np.testing.assert_array_equal(found, user[jnp.clip(index, 0, users - 1)])


@pytest.mark.parametrize("name", CASES)
def test_interpreted_sums(
    name: str, launches: interpreter.Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_split := name == "long_in_shares":
        monkeypatch.setattr(sums, "STREAMED_BYTES", 0)
    unit = float(jnp.finfo(CASES[name][3]).eps)
    check_sums(CASES[name], unit, unit)
    launches.assert_no_races(1 + is_split)


def test_interpreted_lookups(launches: interpreter.Launches) -> None:
    check_lookups(3, 5, 6, "bfloat16", LookUpConfig(1))
    launches.assert_no_races(1)
