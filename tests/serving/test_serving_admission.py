"""Admission: requests that would wait too long are refused before they wait."""

import collections

import pytest

from ikbo_jax import serving

BUCKETS = serving.Buckets((100, 200), (4,), (4,))
SECONDS = {(100, 4): 0.06, (200, 4): 0.1}


def admission(concurrent: int = 1) -> serving.Admission:
    return serving.Admission(BUCKETS, SECONDS, concurrent)


@pytest.mark.parametrize("wrong", [None, 0.0, -1.0, "1", float("nan"), float("inf")])
def test_every_bucket_has_its_seconds(wrong):
    message = rf"the seconds of bucket \(100, 4\) are {wrong!r}, expected a number above 0"
    with pytest.raises(ValueError, match=message):
        serving.Admission(BUCKETS, SECONDS | {(100, 4): wrong})
    with pytest.raises(ValueError, match=r"seconds of bucket \(200, 4\) are None"):
        serving.Admission(BUCKETS, {(100, 4): 0.06})


@pytest.mark.parametrize("wrong", [2.0**20, "1 GB", None, True])
def test_calls_side_by_side_are_counted(wrong):
    with pytest.raises(ValueError, match=f"concurrent is {wrong!r}, expected an integer"):
        admission(wrong)


def test_an_idle_scorer_admits_every_request():
    found = admission()
    for _ in range(3):
        assert found.admit(200, left=1e-9) == 0
        found.done(200)


def test_a_request_is_refused_if_it_would_wait_for_half_of_its_time():
    found = admission()
    # 10 full calls are a second of work, which is half of what is left beside the request's call.
    admitted = [found.admit(200, left=2.1) for _ in range(13)]
    assert [seconds == 0 for seconds in admitted] == [True] * 11 + [False] * 2
    assert admitted[-1] == pytest.approx(0.1)
    # A request with less time is refused sooner, one with more time later.
    assert found.admit(200, left=1) > 0.5
    assert found.admit(200, left=3) == 0


def test_calls_side_by_side_halve_the_wait():
    one, two = admission(1), admission(2)
    for _ in range(6):
        one.admit(200, left=10)
        two.admit(200, left=10)
    assert one.wait == pytest.approx(2 * two.wait)


def test_a_user_takes_a_part_of_a_call_however_few_its_candidates():
    found = admission()
    for _ in range(8):
        found.admit(1, left=10)
    assert found.wait == pytest.approx(2 * 0.1)


def test_the_wait_follows_the_measured_times():
    found = admission()
    found.admit(200, left=10)
    assert found.wait == pytest.approx(0.1)
    for _ in range(60):
        found.measured([100, 50], 0.3)
    # 0.075 s of work took 0.3 s.
    assert found.wait == pytest.approx(0.4, rel=0.01)
    # A stall of a minute does not close the service for the calls after it.
    found.measured([100, 50], 60.0)
    assert found.wait < 2
    for _ in range(60):
        found.measured([100, 100], 0.1)
    assert found.wait == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("overload", [1.5, 3.0])
def test_goodput_does_not_fall_in_a_simulated_queue(overload):
    """One server takes 0.05 s a request, twice what the times of full calls say."""
    found, deadline, service = admission(), 2.0, 0.05
    queue: collections.deque[tuple[float, int]] = collections.deque()
    clock, answered, late, refused = 0.0, 0, 0, 0
    for n in range(int(60 * overload / service)):
        arrival = n * service / overload
        while queue and clock + service <= arrival:
            since, size = queue.popleft()
            clock = max(clock, since) + service
            found.measured([size], service)
            found.done(size)
            answered, late = answered + (clock - since <= deadline), late + (clock - since > 2)
        if found.admit(50, left=deadline) == 0:
            queue.append((arrival, 50))
        else:
            refused += 1
    assert answered >= 0.9 * 60 / service
    assert late == 0
    assert refused > 0


def test_nothing_is_left_of_the_sums_of_fractions():
    found = admission()
    for size in (7, 33, 91):
        found.admit(size, left=10)
    for size in (91, 7, 33):
        found.done(size)
    assert found.wait == 0
