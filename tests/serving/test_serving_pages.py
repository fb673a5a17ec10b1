"""The pool of pages: histories that grow, eviction, and attention to what the pool holds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ikbo_jax as ikbo
from ikbo_jax import serving
from ikbo_jax.serving.programs import compilations

PAGE, MOST, HEADS, WIDTH = 4, 3, 2, 8
ROW = {
    "key": jax.ShapeDtypeStruct((HEADS, WIDTH), np.float32),
    "value": jax.ShapeDtypeStruct((HEADS, WIDTH), np.float32),
}
PAGE_BYTES = PAGE * 2 * HEADS * WIDTH * 4


def pool(pages: int = 6, **options: Any) -> serving.PagePool:
    chosen = {"page": PAGE, "most": MOST, "appended": (2, 8), **options}
    return serving.PagePool(ROW, pages * PAGE_BYTES + 1, **chosen)


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal((count, *leaf.shape)).astype(np.float32)
        for name, leaf in ROW.items()
    }


def contents(found: serving.PagePool, key: Any) -> dict[str, np.ndarray]:
    """A user's history as one array."""
    table, (length,) = found.table([key])
    return {
        name: np.asarray(pages)[table[0]].reshape(-1, HEADS, WIDTH)[:length]
        for name, pages in found.arrays.items()
    }


def test_histories_grow_and_the_least_recently_used_leave():
    """Random appends, against lists; no page is ever shared, and none is lost."""
    found, rng = pool(8), np.random.default_rng(1)
    expected: dict[int, dict[str, np.ndarray]] = {}
    order: list[int] = []
    for step in range(120):
        users = rng.permutation(6)[: rng.integers(1, 3)].tolist()
        lengths = found.lengths(users)
        assert lengths == [len(expected[u]["key"]) if u in expected else 0 for u in users]
        counts = [int(rng.integers(0, min(6, MOST * PAGE - n) + 1)) for n in lengths]
        new = rows(sum(counts), step)
        found.append(users, counts, new)
        for user, part in zip(
            users, np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1]), strict=True
        ):
            old = expected.get(user, rows(0))
            expected[user] = {name: np.concatenate([old[name], new[name][part]]) for name in ROW}
            order = [u for u in order if u != user] + [user]
        there = {u for u in order if u in found._histories}
        # Whoever left was used before everyone who stayed, and none of this step's users left.
        gone = [u for u in order if u not in there]
        assert set(users) <= there
        assert order[: len(gone)] == gone
        for user in gone:
            del expected[user]
        order = order[len(gone) :]
        held = [page for history in found._histories.values() for page in history.pages]
        assert sorted(held + found._free) == list(range(found.pages))
        assert found.metrics.pages_in_use == len(held)
        for user in order:
            for name, array in contents(found, user).items():
                np.testing.assert_array_equal(array, expected[user][name])
        order = list(found._histories)
    metrics = found.metrics
    assert metrics.evictions > 5
    assert 0 < metrics.hit_rate < 1


def test_attention_reads_what_the_pool_holds():
    found = pool(8)
    lengths = [5, 12, 1]
    whole = [rows(n, seed=n) for n in lengths]
    # Events arrive one after another, for all users at once.
    for event in range(max(lengths)):
        users = [u for u, n in enumerate(lengths) if event < n]
        new = {name: np.stack([whole[u][name][event] for u in users]) for name in ROW}
        found.append(users, [1] * len(users), new)
    table, counted = found.table([2, 0, 1, "nobody"])
    rng = np.random.default_rng(5)
    query = jnp.asarray(rng.standard_normal((6, 1, HEADS, WIDTH)), jnp.float32)
    index = jnp.asarray([0, 1, 2, 3, 1, 2], jnp.int32)
    out = jax.jit(functools.partial(ikbo.attention, indices_are_sorted=False))(
        query,
        **found.arrays,
        cand_to_user=index,
        page_table=jnp.asarray(table),
        key_value_seq_lengths=jnp.asarray(counted),
    )
    padded = {name: np.zeros((4, 12, HEADS, WIDTH), np.float32) for name in ROW}
    for row, user in enumerate((2, 0, 1)):
        for name in ROW:
            padded[name][row, : lengths[user]] = whole[user][name]
    expected = ikbo.attention(
        query,
        **jax.tree.map(jnp.asarray, padded),
        cand_to_user=index,
        key_value_seq_lengths=jnp.asarray([1, 5, 12, 0], jnp.int32),
    )
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert np.all(np.asarray(out[3]) == 0), "a user without a history"


def test_three_times_as_many_users_with_log_normal_histories_fit_as_in_fixed_rows():
    """Users with 300 events in the median, and at most 4,096, until the first one has to leave."""
    fixed, most = 100, 4096
    row = jax.ShapeDtypeStruct((), np.int8)
    found = serving.PagePool(row, fixed * most, page=128, most=32, appended=())
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1, 4000).clip(1, most).astype(int)
    for user, length in enumerate(lengths.tolist()):
        found.reserve([user], [length])
        if found.metrics.evictions:
            break
    assert user >= 3 * fixed


def test_nothing_compiles_once_a_pool_is_ready():
    found = pool(8)
    found.append(["a"], [3], rows(3))
    before = compilations()
    for count in (0, 1, 2, 5, 12):
        found.append([count], [count], rows(count))
    assert compilations() == before


@pytest.mark.parametrize(
    ("keys", "counts", "new", "error", "message"),
    [
        ([1, 1], [1, 1], rows(2), serving.BadRequestError, "2 users, of which 1 differ"),
        ([1], [1, 1], rows(2), serving.BadRequestError, "1 users, .* and 2 counts"),
        ([1], [2], rows(3), serving.BadRequestError, r"3 rows, but the counts are \[2\]"),
        ([1, 2], [4, -1], rows(3), serving.BadRequestError, r"the counts are \[4, -1\]"),
        ([1], [13], rows(13), serving.BadRequestError, "would have 13 positions, at most 12"),
        ([1], [1], {"key": rows(1)["key"]}, serving.BadRequestError, "rows have the structure"),
        ([1, 2, 3], [12] * 3, rows(36), ValueError, "need 9 pages but the pool has 6"),
    ],
)
def test_an_append_that_does_not_fit_changes_nothing(keys, counts, new, error, message):
    found = pool()
    found.append([1], [0], rows(0))
    before = found.metrics, found.table([1, 2, 3])
    with pytest.raises(error, match=message):
        found.append(keys, counts, new)
    after = found.metrics, found.table([1, 2, 3])
    assert after[0] == before[0]
    for a, b in zip(after[1], before[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="page is 0, expected at least 1"):
        pool(page=0)
    message = f"{2 * PAGE_BYTES + 1} bytes but the 3 pages of one user take {3 * PAGE_BYTES}"
    with pytest.raises(ValueError, match=message):
        pool(2)
