"""The order of work: runs and cuts, against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.worklist import work_order

run_ends = jax.jit(work_order.run_ends)
cuts_of = jax.jit(work_order.cuts, static_argnums=1)

INDICES = {
    "one": [3],
    "sorted": [0, 0, 1, 1, 1, 4],
    "alternating": [1, 0, 1, 0, 1],
    "drawn": np.random.default_rng(0).integers(0, 40, 301),
}


@pytest.mark.parametrize("name", INDICES)
def test_run_ends(name: str) -> None:
    users = np.asarray(INDICES[name], np.int32)
    expected = [
        next((j for j in range(i, users.size) if users[j] != users[i]), users.size)
        for i in range(users.size)
    ]
    np.testing.assert_array_equal(run_ends(jnp.asarray(users)), expected)


@pytest.mark.parametrize("tiles_each", [1, 3])
@pytest.mark.parametrize("name", INDICES)
def test_cuts_make_pairs_of_one_user(name: str, tiles_each: int) -> None:
    users = np.asarray(INDICES[name], np.int32)
    cuts, counts = cuts_of(jnp.asarray(users), tiles_each)
    of_tile = np.repeat(users, tiles_each)
    expected = [i for i in range(of_tile.size) if i % 2 == 0 or of_tile[i] != of_tile[i - 1]]
    assert counts[-1] == len(expected)
    padding = [of_tile.size] * (of_tile.size + 1 - len(expected))
    np.testing.assert_array_equal(cuts, expected + padding)
