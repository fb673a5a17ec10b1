"""Users are dealt to devices with all of their candidates: balance, layout, and a use of it."""

import math
import re
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import ikbo_jax as ikbo
from ikbo_jax import placement as module

#: Users' numbers of candidates.
counts_of_users = st.lists(st.integers(0, 12), max_size=30)


def index_of(counts, seed: int = 0) -> np.ndarray:
    """An unsorted index of users with these numbers of candidates."""
    index = np.repeat(np.arange(len(counts), dtype=np.int32), np.asarray(counts, int))
    return np.random.default_rng(seed).permutation(index)


def ideal_share(counts, num_devices: int) -> int:
    return max(math.ceil(sum(counts) / num_devices), max(counts))


def smallest_share(counts, num_devices: int) -> int:
    """The largest share of the best of all placements."""
    loads = {(0,) * num_devices}
    for count in counts:
        loads = {
            tuple(sorted((*load[:device], load[device] + count, *load[device + 1 :])))
            for load in loads
            for device in range(num_devices)
        }
    return min(map(max, loads))


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    counts=counts_of_users,
    num_devices=st.integers(1, 9),
    multiple_of=st.integers(1, 9),
    users_multiple_of=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_layout(counts, num_devices, multiple_of, users_multiple_of, seed):
    index = index_of(counts, seed)
    placed = ikbo.place_users(
        index,
        len(counts),
        num_devices,
        multiple_of=multiple_of,
        users_multiple_of=users_multiple_of,
    )
    # Every candidate once, every user with candidates once: whole users are on one device.
    real_users, real_cands = placed.users >= 0, placed.candidates >= 0
    assert sorted(placed.candidates[real_cands]) == list(range(len(index)))
    assert sorted(placed.users[real_users]) == list(np.unique(index))
    # A candidate's row among its device's users holds its user; padding is at the end.
    of_cands = np.take_along_axis(placed.users, placed.cand_to_user, axis=1)
    np.testing.assert_array_equal(of_cands[real_cands], index[placed.candidates[real_cands]])
    for rows in (real_users, real_cands):
        assert np.all(rows[:, :-1] >= rows[:, 1:])
    both = real_users[:, :-1] & real_users[:, 1:]
    assert np.all(np.diff(placed.users, axis=1)[both] > 0)
    # The index is in range, ascends on a device, and has no user for padding alone.
    assert np.all(np.diff(placed.cand_to_user, axis=1) >= 0)
    assert np.all(placed.cand_to_user >= 0)
    last = np.maximum(real_users.sum(axis=1) - 1, 0)
    np.testing.assert_array_equal(placed.cand_to_user.max(axis=1), last)
    # As many rows as are needed, and no more than padding to the multiple adds.
    for rows, multiple in ((real_cands, multiple_of), (real_users, users_multiple_of)):
        assert rows.shape[0] == num_devices
        assert rows.shape[1] % multiple == 0
        assert rows.shape[1] - multiple < max(rows.sum(axis=1).max(), 1) <= rows.shape[1]
    np.testing.assert_array_equal(placed.mask, real_cands.reshape(-1))
    np.testing.assert_array_equal(placed.shares, real_cands.sum(axis=1))
    # The caller's order within a user.
    for user, row in enumerate(counts):
        (mine,) = np.nonzero(real_cands.reshape(-1) & (of_cands.reshape(-1) == user))
        assert len(mine) == row
        assert np.all(np.diff(placed.candidates.reshape(-1)[mine]) > 0)


@hypothesis.settings(max_examples=60)
@hypothesis.given(counts=counts_of_users, num_devices=st.integers(1, 6), data=st.data())
def test_round_trip_of_all_devices_and_of_a_part(counts, num_devices, data):
    index = index_of(counts)
    placed = ikbo.place_users(index, len(counts), num_devices)
    users = np.random.default_rng(1).normal(size=(len(counts), 2)).astype(np.float16)
    cands = np.random.default_rng(2).normal(size=(len(index), 3, 1)).astype(np.float32)
    laid_out, user_rows = placed.lay_out_candidates(cands), placed.lay_out_users(users)
    assert (laid_out.dtype, user_rows.dtype) == (cands.dtype, users.dtype)
    assert np.all(laid_out[~placed.mask] == 0)
    assert np.all(user_rows[placed.users.reshape(-1) < 0] == 0)
    # What padding holds never comes back.
    laid_out[~placed.mask] = np.nan
    np.testing.assert_array_equal(placed.restore(laid_out), cands)
    np.testing.assert_array_equal(placed.positions, np.arange(len(index)))
    # Candidates meet their users.
    joined = user_rows.reshape(num_devices, -1, 2)[
        np.arange(num_devices)[:, None], placed.cand_to_user
    ]
    np.testing.assert_array_equal(placed.restore(joined.reshape(-1, 2)), users[index])

    part = data.draw(st.lists(st.sampled_from(range(num_devices)), unique=True))
    mine, rows = placed.on(part), np.asarray(part, int)
    assert len(mine.users) == len(part)
    for whole, own in (
        (laid_out, mine.lay_out_candidates(cands)),
        (user_rows, mine.lay_out_users(users)),
        (placed.index, mine.index),
        (placed.mask, mine.mask),
    ):
        divided = whole.reshape(num_devices, -1, *whole.shape[1:])[rows]
        np.testing.assert_array_equal(np.nan_to_num(divided.reshape(own.shape)), own)
    assert set(mine.positions) == set(placed.candidates[rows].reshape(-1)) - {-1}
    np.testing.assert_array_equal(
        mine.restore(mine.lay_out_candidates(cands)), cands[mine.positions]
    )


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=7), num_devices=st.integers(1, 4)
)
def test_shares_are_near_the_ideal_where_that_is_possible(counts, num_devices):
    placed = ikbo.place_users(index_of(counts), len(counts), num_devices)
    best, ideal = smallest_share(counts, num_devices), ideal_share(counts, num_devices)
    if best <= 1.05 * ideal:
        assert placed.shares.max() <= 1.05 * ideal
    else:
        assert placed.shares.max() <= 1.05 * best


@pytest.mark.parametrize(
    ("counts", "num_devices", "first", "share"),
    [
        # Graham's: longest first takes 11/9 of the best. Best fit finds the best.
        ([5, 5, 4, 4, 3, 3, 3], 3, 11, 9),
        # Best fit finds 46 at best; 45 is within 1.05 of the ideal, 43.
        ([26, 14, 14, 13, 11, 8], 2, 47, 45),
        # The ideal is 51, but two of the three smallest users share a device with another one.
        ([26, 21, 20, 18, 17], 2, 58, 55),
        # The search deals the large users, and the others fill up.
        ([294, 275, 171, 149, 145, 18, 12, 9, 6, 5], 2, 588, 569),
        ([213, 196, 191, 182, 173, 19, 16, 15, 13, 12, 12], 2, 560, 547),
    ],
)
def test_a_search_improves_on_longest_first(counts, num_devices, first, share):
    dealt = module._longest_first(counts, num_devices, [])
    assert module._largest_share(counts, dealt, num_devices) == first
    assert ikbo.place_users(index_of(counts), len(counts), num_devices).shares.max() <= share


@pytest.mark.parametrize(
    ("num_users", "most"), [(15, 1.15), (20, 1.05), (30, 1.05), (40, 1.05), (1000, 1.05)]
)
def test_requests_of_seventy_candidates_a_user(num_users, most):
    """On eight devices; two whole users each cannot be within 5 %."""
    rng = np.random.default_rng(num_users)
    for _ in range(5):
        popularity = rng.uniform(0.5, 1.5, num_users)
        counts = rng.multinomial(70 * num_users, popularity / popularity.sum())
        placed = ikbo.place_users(index_of(counts), num_users, 8)
        by_size = sorted(counts.tolist(), reverse=True)
        first = module._longest_first(by_size, 8, [])
        bound = module._lower_bound(by_size, 8)
        assert placed.shares.max() <= module._largest_share(by_size, first, 8)
        assert bound <= placed.shares.max() <= most * max(bound, ideal_share(counts, 8))


def test_equal_requests_have_equal_placements():
    index = index_of([9, 1, 4, 4, 4, 2, 7] * 5)
    first, second = (ikbo.place_users(index, 35, 4) for _ in range(2))
    np.testing.assert_array_equal(first.users, second.users)
    np.testing.assert_array_equal(first.candidates, second.candidates)
    with pytest.raises(ValueError, match="read-only"):
        first.users[0, 0] = 1
    # A list without elements is an index, too.
    assert ikbo.place_users([], 5, 3).shares.sum() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cand_to_user": [[0]]}, r"cand_to_user has shape \(1, 1\), expected one dimension"),
        ({"cand_to_user": 0}, r"cand_to_user has shape \(\), expected one dimension"),
        ({"cand_to_user": np.ma.masked_equal([0, 1], 1)}, "cand_to_user is a masked array"),
        ({"cand_to_user": [0.0]}, "cand_to_user has dtype float64, expected integers"),
        ({"cand_to_user": [0, 1, 3]}, r"cand_to_user\[2\] is 3 but num_users is 3"),
        ({"cand_to_user": [0, -1]}, r"cand_to_user\[1\] is -1 but num_users is 3"),
        (
            {"num_devices": 0},
            "num_devices must be an integer of at least 1 and at most 65536, but is 0",
        ),
        (
            {"num_users": -1},
            "num_users must be an integer of at least 0 and at most 2147483647, but is -1",
        ),
        ({"multiple_of": 0}, "but is 0"),
        ({"multiple_of": 2.5}, "multiple_of must be an integer"),
        ({"num_devices": None}, "but is None"),
        ({"users_multiple_of": -8}, "users_multiple_of must be an integer of at least 1"),
        ({"num_users": 10**10}, "at most 2147483647, but is 10000000000"),
        ({"num_users": True}, "but is True"),
        ({"num_devices": 10**8}, "at most 65536, but is 100000000"),
        ({"multiple_of": 1 << 30}, "at most 134217728, but is 1073741824"),
        ({"users_multiple_of": 1 << 30}, "at most 134217728, but is 1073741824"),
        (
            {"num_devices": 1 << 16, "cand_to_user": [0] * 5000},
            "65536 devices with 5000 rows each, as the largest needs, are 327680000 rows",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ikbo.place_users(**({"cand_to_user": [0, 1], "num_users": 3, "num_devices": 2} | arguments))


def test_ids_of_users_may_be_large():
    """Memory and time follow the candidates, not the number of users."""
    most = 2**31 - 1
    index = np.array([most - 1, 5, most - 1, 1 << 20, 5, 5])
    found = ikbo.place_users(index, most, 2)
    small = ikbo.place_users([2, 0, 2, 1, 0, 0], 3, 2)
    names = np.array([5, 1 << 20, most - 1])
    np.testing.assert_array_equal(found.users, np.where(small.users < 0, -1, names[small.users]))
    np.testing.assert_array_equal(found.candidates, small.candidates)
    np.testing.assert_array_equal(found.cand_to_user, small.cand_to_user)


def test_wrong_arrays():
    placed = ikbo.place_users([0, 1, 1], 2, 2)
    with pytest.raises(ValueError, match=r"shape \(3, 1\) but the request has 2 users"):
        placed.lay_out_users(np.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"shape \(2,\) but the request has 3 candidates"):
        placed.lay_out_candidates(np.zeros(2))
    with pytest.raises(ValueError, match=r"shape \(3,\) but the placement has 16 rows"):
        placed.restore(np.zeros(3))
    of_two = "must be an integer of at least 0 and at most 1, but is"
    for devices, message in (
        ([0, 2], f"devices[1] {of_two} 2"),
        ([-1], f"devices[0] {of_two} -1"),
        ([0, 0], "devices are [0, 0], expected different ones"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            placed.on(devices)
    for device in (1.0, True, "0"):
        with pytest.raises(ValueError, match=rf"devices\[1\] must be .* but is {device!r}"):
            placed.on([0, device])


def test_a_large_request_takes_milliseconds():
    """100,000 candidates of 10,000 users: 8 ms on an idle core of a server."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, 10_000, 100_000)
    times = []
    for num_devices in (8, 8, 8, 1000):
        start = time.process_time()
        placed = ikbo.place_users(index, 10_000, num_devices)
        times.append(time.process_time() - start)
        assert placed.shares.max() <= 1.05 * 100_000 / num_devices
    assert min(times[:3]) < 0.1
    assert times[3] < 0.2
    # Two or three users on each device: the search cannot reach 1.05, and ends all the same.
    for num_devices in (16, 1000):
        num_users = num_devices * 5 // 2
        index = np.repeat(np.arange(num_users), rng.integers(50, 90, num_users))
        start = time.process_time()
        placed = ikbo.place_users(index, num_users, num_devices)
        assert time.process_time() - start < 0.3
        counts = sorted(np.bincount(index).tolist(), reverse=True)
        first = module._longest_first(counts, num_devices, [])
        first_share = module._largest_share(counts, first, num_devices)
        assert 1.05 * ideal_share(counts, num_devices) < placed.shares.max() < first_share
