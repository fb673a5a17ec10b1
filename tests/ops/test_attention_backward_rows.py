"""Where the query rows of attention's backward kernel are, by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.attention_backward import rows
from ikbo_jax.pallas.attention_backward.statistics import Inputs
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist import rows as worklist
from ikbo_jax.pallas.worklist import work_order
from ikbo_jax.pallas.worklist.numbering import Sizes
from ikbo_jax.problems.hopper import TILE_ROWS

KV_LEN, Q_LEN, GROUP, BLOCK_Q = 300, 3, 2, 32


def sizes_of(batch, users, splits, is_sorted):
    return Sizes(
        batch, users, KV_LEN, Q_LEN, GROUP, BLOCK_Q, splits, is_sorted, tile_rows=TILE_ROWS
    )


def make(index, sizes):
    rng = np.random.default_rng(1)
    lengths = jnp.asarray(rng.integers(-5, KV_LEN + 5, sizes.users), jnp.int32)
    with mosaic.interpreted(True):
        return worklist.by_xla(jnp.asarray(index, jnp.int32), lengths, sizes)


@pytest.mark.parametrize(("batch", "users"), [(1, 1), (50, 7), (9, 40), (200, 1)])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("is_in_range", [True, False])
def test_both_ways_number_the_same_rows(monkeypatch, batch, users, is_sorted, is_in_range):
    splits = 1 if is_sorted == is_in_range else 3
    index = np.random.default_rng(0).integers(is_in_range - 1, users + 1 - is_in_range, batch)
    index = np.sort(index) if is_sorted else index
    sizes = sizes_of(batch, users, splits, is_sorted)
    by_pairs = make(index, sizes)
    monkeypatch.setattr(work_order, "MAX_COMPARED", 0)
    by_sums = make(index, sizes)
    for x, y in zip(*map(jax.tree.leaves, (by_pairs, by_sums)), strict=True):
        np.testing.assert_array_equal(x, y)

    counts = np.bincount(np.clip(index, 0, users - 1), minlength=users) * Q_LEN * GROUP
    np.testing.assert_array_equal(by_pairs.users[:, 1], counts)
    np.testing.assert_array_equal(by_pairs.users[:, 0], np.cumsum(counts) - counts)
    blocks = -(-counts // BLOCK_Q)
    np.testing.assert_array_equal(by_pairs.users[:, 2], (np.cumsum(blocks) - blocks) * BLOCK_Q)
    # Every row of a candidate has a place of its own, inside its user's blocks.
    for numbers in (by_pairs, by_sums):
        targets = np.asarray(numbers.targets(sizes)).reshape(batch, -1)
        first = np.asarray(numbers.users)[np.clip(index, 0, users - 1)]
        assert len(np.unique(targets)) == targets.size
        assert (targets >= first[:, 2:3]).all()
        assert (targets < first[:, 2:3] + first[:, 1:2]).all()
        if numbers.order is not None:
            np.testing.assert_array_equal(numbers.position[numbers.order], np.arange(batch))


def test_tiles_are_of_one_user_and_the_last_entry_counts_them():
    by_pairs = make(np.repeat([0, 1, 3], [50, 1, 30]), sizes_of(81, 5, 1, True))
    tiles = np.asarray(by_pairs.tiles)
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
        sizes = sizes_of(batch, 3, 1, True)
        found = make(np.asarray(index), sizes)
        count = 4 * BLOCK_Q
        inputs = Inputs(out, out, lse, gradient, out)
        statistics = rows.statistics_by_xla(inputs, found, sizes, heads, count)
        assert statistics.shape == (heads, 2, count + TILE_ROWS)
        assert bool(jnp.isnan(statistics).all()) == is_nan
        if not is_nan:
            at = np.asarray(found.targets(sizes)).ravel()
            np.testing.assert_array_equal(statistics[:, 1, at], width - (d_lse or 0.0))
            rest = np.delete(np.asarray(statistics), at, axis=2)
            np.testing.assert_array_equal(rest[:, 0], np.inf)
            np.testing.assert_array_equal(rest[:, 1], 0)
