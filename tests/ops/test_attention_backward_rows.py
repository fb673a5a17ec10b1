"""Where the query rows of attention's backward kernel are, by comparing pairs and by sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.attention_backward import rows
from ikbo_jax.pallas.flash import work_order
from ikbo_jax.problems.hopper import TILE_ROWS

KV_LEN, Q_LEN, GROUP, BLOCK_Q = 300, 3, 2, 32


def make(index, users, splits, is_sorted):
    lengths = jnp.asarray(np.random.default_rng(1).integers(-5, KV_LEN + 5, users), jnp.int32)
    sizes = {"users": users, "kv_len": KV_LEN, "q_len": Q_LEN, "group": GROUP}
    cut = {"block_q": BLOCK_Q, "splits": splits, "is_sorted": is_sorted}
    return rows.make_rows(jnp.asarray(index, jnp.int32), lengths, **sizes, **cut)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("batch", "users"), [(1, 1), (50, 7), (9, 40), (200, 1)])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_both_ways_number_the_same_rows(monkeypatch, batch, users, splits, is_sorted):
    index = np.random.default_rng(0).integers(-1, users + 1, batch)
    index = np.sort(index) if is_sorted else index
    by_pairs = make(index, users, splits, is_sorted)
    tiles = rows.query_tiles(by_pairs.users, batch * Q_LEN * GROUP)
    monkeypatch.setattr(rows, "MAX_PAIRS", 0)
    monkeypatch.setattr(work_order, "MAX_COMPARED", 0)
    by_sums = make(index, users, splits, is_sorted)
    for x, y in zip(jax.tree.leaves(by_pairs), jax.tree.leaves(by_sums), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(tiles, rows.query_tiles(by_sums.users, batch * Q_LEN * GROUP))

    counts = np.bincount(np.clip(index, 0, users - 1), minlength=users) * Q_LEN * GROUP
    np.testing.assert_array_equal(by_pairs.users[:, 1], counts)
    np.testing.assert_array_equal(by_pairs.users[:, 0], np.cumsum(counts) - counts)
    blocks = -(-counts // BLOCK_Q)
    np.testing.assert_array_equal(by_pairs.users[:, 2], (np.cumsum(blocks) - blocks) * BLOCK_Q)
    # Every row of a candidate has a place of its own, inside its user's blocks.
    targets = np.asarray(by_pairs.targets).reshape(batch, -1)
    first = np.asarray(by_pairs.users)[np.clip(index, 0, users - 1)]
    assert len(np.unique(targets)) == targets.size
    assert (targets >= first[:, 2:3]).all()
    assert (targets < first[:, 2:3] + first[:, 1:2]).all()


def test_tiles_are_of_one_user_and_the_last_entry_counts_them():
    by_pairs = make(np.repeat([0, 1, 3], [50, 1, 30]), 5, 1, True)
    tiles = np.asarray(rows.query_tiles(by_pairs.users, 81 * Q_LEN * GROUP))
    number = int(tiles[-1, 0])
    of_users = [(user, int(n)) for user, n in enumerate(by_pairs.users[:, 1]) if n]
    want = [
        (user, min(TILE_ROWS, n - begin))
        for user, n in of_users
        for begin in range(0, n, TILE_ROWS)
    ]
    assert [(int(user), int(count)) for _, count, user, *_ in tiles[:number]] == want
    starts = np.cumsum([0, *(count for _, count in want)])[:-1]
    np.testing.assert_array_equal(tiles[:number, 0], starts)
    assert number <= len(tiles) - 1


@pytest.mark.parametrize("d_lse", [None, 0.5])
def test_statistics_are_nan_where_a_promised_order_is_wrong(d_lse):
    batch, heads, width = 4, 2, 8
    out = jnp.ones((batch, Q_LEN, heads * GROUP, width), jnp.float32)
    lse = jnp.zeros(out.shape[:-1], jnp.float32)
    gradient = None if d_lse is None else jnp.full_like(lse, d_lse)
    for index, is_nan in (([0, 0, 1, 2], False), ([1, 0, 1, 2], True)):
        found = make(np.asarray(index), 3, 1, True)
        count = 4 * BLOCK_Q
        statistics = rows.statistics(out, lse, out, gradient, found, heads, count, interpret=True)
        assert statistics.shape == (heads, 2, count + TILE_ROWS)
        assert bool(jnp.isnan(statistics).all()) == is_nan
        if not is_nan:
            at = np.asarray(found.targets).ravel()
            np.testing.assert_array_equal(statistics[:, 1, at], width - (d_lse or 0.0))
            rest = np.delete(np.asarray(statistics), at, axis=2)
            np.testing.assert_array_equal(rest[:, 0], np.inf)
            np.testing.assert_array_equal(rest[:, 1], 0)
