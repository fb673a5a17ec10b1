"""Candidates in the order of users, by launches on a Hopper GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.flash import counted_order, pack

pytestmark = pytest.mark.gpu

#: Candidates, users, their distribution, and [T, N, H].
CASES = {
    "compared": (4096, 300, "uniform", (1, 2, 64)),
    "large_queries": (2000, 30, "beyond", (64, 4, 128)),
    "one_more": (4097, 4096, "uniform", (1, 1, 64)),
    "zipf": (10985, 700, "zipf", (1, 4, 64)),
    "one_user": (16381, 1, "uniform", (3, 1, 64)),
    "beyond": (16384, 4096, "beyond", (2, 2, 128)),
    "distinct": (counted_order.MOST_USERS, counted_order.MOST_USERS, "distinct", (1, 1, 96)),
    "most": (counted_order.MOST_CANDIDATES, counted_order.MOST_USERS, "beyond", (1, 1, 64)),
    "most_of_one": (counted_order.MOST_CANDIDATES, 2, "zipf", (1, 4, 128)),
    "by_xla": (counted_order.MOST_CANDIDATES + 1, 900, "uniform", (1, 1, 64)),
}


def make(name: str) -> tuple[jax.Array, np.ndarray, int]:
    batch, users, kind, shape = CASES[name]
    rng = np.random.default_rng(0)
    match kind:
        case "uniform":
            index = rng.integers(0, users, batch)
        case "beyond":
            index = rng.integers(-3, users + 3, batch)
        case "zipf":
            index = (rng.zipf(1.3, batch) - 1) % users
        case _:
            index = rng.permutation(users)[:batch]
    query = jax.random.normal(jax.random.key(0), (batch, *shape), jnp.bfloat16)
    return query, index.astype(np.int32), users


@pytest.mark.parametrize("name", CASES)
def test_packed_candidates_are_the_stable_sort_s(name: str) -> None:
    query, index, users = make(name)
    run = jax.jit(lambda query, index: pack.pack(query, index, users))
    user = np.clip(index, 0, users - 1)
    order = np.argsort(user, stable=True)
    copied = np.asarray(query)[order].view(np.uint16)
    for _ in range(10):
        found = run(query, jnp.asarray(index))
        np.testing.assert_array_equal(found.order, order)
        np.testing.assert_array_equal(found.user, user[order])
        np.testing.assert_array_equal(np.asarray(found.query).view(np.uint16), copied)


@pytest.mark.parametrize("name", ["one_more", "zipf", "most"])
def test_order_without_queries(name: str) -> None:
    _, index, users = make(name)
    run = jax.jit(lambda index: counted_order.count_order(None, index, users, has_position=True))
    found = run(jnp.asarray(index))
    user = np.clip(index, 0, users - 1)
    order = np.argsort(user, stable=True)
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.user, user[order])
    np.testing.assert_array_equal(np.asarray(found.position)[order], np.arange(len(order)))
