"""The pool of pages: histories that grow, and eviction."""

import collections

import jax
import numpy as np
import pytest

from ikbo_jax import serving

PAGE, MOST, HEADS, WIDTH = 4, 3, 2, 8
HEAD = jax.ShapeDtypeStruct((HEADS, WIDTH), np.float32)
PAGE_BYTES = PAGE * 2 * HEADS * WIDTH * 4


def pool(pages: int = 6, **options: int) -> serving.PagePool:
    chosen = {"page": PAGE, "most": MOST, **options}
    return serving.PagePool({"key": HEAD, "value": HEAD}, pages * PAGE_BYTES + 1, **chosen)


def test_histories_grow_and_the_least_recently_used_leave():
    """Random growth, against lists; no page is ever shared, and none is lost."""
    found, rng = pool(8), np.random.default_rng(1)
    expected: dict[int, int] = {}
    tables: dict[int, list[int]] = {}
    for _ in range(120):
        users = rng.permutation(6)[: rng.integers(1, 3)].tolist()
        lengths = found.lengths(users)
        assert lengths == [expected.get(user, 0) for user in users]
        counts = [int(rng.integers(0, min(6, MOST * PAGE - n) + 1)) for n in lengths]
        found.reserve(users, counts)
        for user, length, count in zip(users, lengths, counts, strict=True):
            expected.pop(user, None)
            expected[user] = length + count
        expected = {user: length for user, length in expected.items() if length}
        there = list(found._histories)
        # Whoever left was used before everyone who stayed, and none of this step's users left.
        assert list(expected)[-len(there) :] == there
        assert expected.keys() & set(users) <= set(there)
        expected = {user: expected[user] for user in there}
        held = [page for history in found._histories.values() for page in history.pages]
        assert sorted(held + found._free) == list(range(found.pages))
        assert found.metrics.pages_in_use == len(held)
        # A history that grows keeps its pages, in their order.
        table, lengths = found.table(there)
        assert lengths.tolist() == list(expected.values())
        kept = {
            user: row[: -(-length // PAGE)].tolist()
            for user, row, length in zip(there, table, lengths, strict=True)
        }
        for user in tables.keys() & kept.keys() - set(users):
            assert kept[user] == tables[user]
        tables = kept
    metrics = found.metrics
    assert metrics.evictions > 5
    assert 0 < metrics.hit_rate < 1


def test_users_without_events_take_no_memory():
    found = pool()
    for user in range(100):
        found.reserve([user], [0])
    assert found.metrics.users == 0
    assert found.table([7])[1].tolist() == [0]


def test_making_room_looks_at_no_more_histories_than_it_drops():
    """In a pool of 100,000 histories, making room for one took 8 ms."""

    class Counted(collections.OrderedDict):
        looked = 0

        def __iter__(self):
            for key in super().__iter__():
                self.looked += 1
                yield key

    found = pool(100)
    found.reserve(range(100), [1] * 100)
    found._histories = counted = Counted(found._histories)
    # The two least recently used users stay: their histories grow.
    found.reserve([0, 1, 100], [1, 1, 1])
    assert counted.looked <= 4
    assert list(counted) == [*range(3, 100), 0, 1, 100]


def test_three_times_as_many_users_with_log_normal_histories_fit_as_in_fixed_rows():
    """Users with 300 events in the median, and at most 4,096, until the first one has to leave."""
    fixed, most = 100, 4096
    row = jax.ShapeDtypeStruct((), np.int8)
    found = serving.PagePool(row, fixed * most, page=128, most=32)
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1, 4000).clip(1, most).astype(int)
    for user, length in enumerate(lengths.tolist()):
        found.reserve([user], [length])
        if found.metrics.evictions:
            break
    assert user >= 3 * fixed


@pytest.mark.parametrize(
    ("keys", "counts", "error", "message"),
    [
        ([1, 1], [1, 1], serving.BadRequestError, "2 users, of which 1 differ"),
        ([1], [1, 1], serving.BadRequestError, "1 users, .* and 2 counts"),
        ([1, 2], [4, -1], ValueError, r"counts\[1\] is -1, expected an integer of at least 0"),
        ([1], [1.5], ValueError, r"counts\[0\] is 1.5, expected an integer"),
        ([1], [13], serving.BadRequestError, "would have 13 positions, at most 12"),
        ([1, 2, 3], [12] * 3, ValueError, "need 9 pages but the pool has 6"),
    ],
)
def test_growth_that_does_not_fit_changes_nothing(keys, counts, error, message):
    found = pool()
    found.reserve([1], [0])
    before = found.metrics, found.table([1, 2, 3])
    with pytest.raises(error, match=message):
        found.reserve(keys, counts)
    after = found.metrics, found.table([1, 2, 3])
    assert after[0] == before[0]
    for a, b in zip(after[1], before[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrong_sizes_are_refused():
    for page in (0, "64", None, True):
        with pytest.raises(ValueError, match=f"page is {page!r}, expected an integer of"):
            pool(page=page)
    for rows in (None, jax.ShapeDtypeStruct((2, 0), np.float32)):
        with pytest.raises(ValueError, match="rows are .*, expected at least 1 array"):
            serving.PagePool(rows, 10**6)
    message = f"{2 * PAGE_BYTES + 1} bytes but the 3 pages of one user take {3 * PAGE_BYTES}"
    with pytest.raises(ValueError, match=message):
        pool(2)
