"""The scorer: merging, padding, the users' cache, other weights; without an engine."""

import concurrent.futures
import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving_model as small
from serving_model import TOLERANCE, assert_right

from ikbo_jax import serving
from ikbo_jax.serving.batches import Checked, fitting_parts, merged

ROW_BYTES = 4 * (2 * small.EVENTS * small.WIDTH + small.WIDTH)


@pytest.fixture(scope="module")
def shared() -> serving.Scorer:
    """A scorer with a user cache that holds all users; tests leave its weights as they are."""
    return small.make()


@pytest.fixture(scope="module")
def tight_scorer() -> serving.Scorer:
    return small.make(user_bytes=5 * ROW_BYTES + 1)


@pytest.fixture
def tight(tight_scorer) -> serving.Scorer:
    """A scorer with the weights 0 and an empty user cache that holds five users."""
    tight_scorer.set_weights(small.weights(), 0)
    return tight_scorer


class Since:
    """The difference of a scorer's counts from those at the start."""

    def __init__(self, scorer: serving.Scorer) -> None:
        self.scorer, self.start = scorer, scorer.metrics

    def __getattr__(self, name: str) -> int:
        return getattr(self.scorer.metrics, name) - getattr(self.start, name)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 15, 16])
def test_every_size_around_a_bucket(shared, count):
    requests = [small.request(2, np.arange(count) % small.ITEMS)]
    since = Since(shared)
    assert_right(requests, shared.rank(requests))
    assert since.padding == (4 if count <= 4 else 16) - count


def test_a_scorer_measures_the_calls_of_every_bucket(shared):
    assert shared.call_seconds.keys() == set(shared.buckets.pairs)
    assert all(seconds > 0 for seconds in shared.call_seconds.values())


def test_one_call_serves_several_requests_of_one_user(shared):
    requests = [small.request(1, [1, 2]), small.request(5, [3]), small.request(1, [4])]
    since = Since(shared)
    assert_right(requests, shared.rank(requests))
    assert (since.calls, since.hits + since.misses) == (1, 2)


def test_padding_changes_nothing(shared, monkeypatch):
    """Whatever stands in the padding, real candidates have the same bits."""
    requests = [small.request(3, [7, 8, 9]), small.request(4, [10, 11])]
    expected = [answer.scores for answer in shared.rank(requests)]

    def poisoned(array, filled):
        largest = array[:filled].max()
        # The last row of users, or another item.
        array[filled:] = largest if largest > 3 else array[filled - 1]

    monkeypatch.setattr("ikbo_jax.serving.packing.pad", poisoned)
    for found, scores in zip(shared.rank(requests), expected, strict=True):
        np.testing.assert_array_equal(found.scores, scores)


def test_no_candidates_no_scores(shared):
    empty, full = shared.rank([small.request(1, []), small.request(1, [1])])
    assert empty.scores.shape == (0, 2)
    assert empty.scores.dtype == full.scores.dtype
    assert shared.rank([]) == []


def test_a_bad_request_leaves_the_others_alone(shared):
    broken = mock.Mock(side_effect=KeyError("no such user"))
    good = small.request(1, [1, 2])
    bad = [
        small.request(1, np.zeros(17)),
        dataclasses.replace(good, candidates={"item": np.zeros(2, np.int64)}),
        dataclasses.replace(good, candidates={"item": np.zeros((2, 1), np.int32)}),
        dataclasses.replace(good, candidates={"movie": np.zeros(2, np.int32)}),
        dataclasses.replace(good, candidates={"item": np.int32(1)}),
        dataclasses.replace(good, candidates={"item": np.zeros(2, np.int32), 1: np.zeros(2)}),
        dataclasses.replace(good, candidates={"item": small.Unreadable()}),
        dataclasses.replace(good, candidates={"item": "12"}),
        dataclasses.replace(good, candidates={"item": jax.ShapeDtypeStruct((2,), jnp.int32)}),
        dataclasses.replace(good, candidates={"item": np.ma.masked_equal(np.int32([1, 0]), 0)}),
        dataclasses.replace(good, user=91, features=lambda: {"events": np.zeros((5, 8), "f4")}),
        dataclasses.replace(good, user=92, features=broken),
        dataclasses.replace(good, user=[1]),
        dataclasses.replace(good, features={"events": np.zeros((6, 8), "f4")}),
        None,
    ]
    messages = [
        r"has 17 candidates, at most 16",
        r"candidates\['item'\] has shape \(2,\) and dtype int64, expected \[2\] and int32",
        r"candidates\['item'\] has shape \(2, 1\) and dtype int32, expected \[2\] and int32",
        r"candidates have the structure .*movie.*, expected .*item",
        r"candidates\['item'\] has shape \(\) and dtype int32, expected \[n\] and int32",
        "candidates are no tree .*sorting",
        r"candidates\['item'\] is a Unreadable \(out of memory\), expected .* int32",
        r"candidates\['item'\] has shape \(\) and dtype <U2",
        r"candidates\['item'\] has shape \(\) and dtype object",
        r"candidates\['item'\] is a MaskedArray, expected an array without a mask",
        r"features\['events'\] has shape \(5, 8\) and dtype float32, expected \[6, 8\]",
        r"no such user",
        r"user \[1\] and version 0 must be hashable",
        "features is of dict, expected a function that returns them",
        "a request is None, expected a serving.Request",
    ]
    answers = shared.rank([good, *bad, good])
    assert_right([good, good], [answers[0], answers[-1]])
    for request, answer, message in zip(bad, answers[1:-1], messages, strict=True):
        with pytest.raises((serving.BadRequestError, KeyError), match=message):
            raise answer
        with pytest.raises((serving.BadRequestError, KeyError), match=message):
            list(serving.rank_offline(shared, [good, request]))
    with pytest.raises(serving.BadRequestError, match=messages[0]):
        shared.check(bad[0])
    for requests in (good, None, iter([good])):
        with pytest.raises(TypeError, match="requests is .*, expected a sequence of Request"):
            shared.rank(requests)


def test_a_known_user_is_not_encoded_again(tight):
    since, fetched = Since(tight), []
    for _ in range(3):
        requests = [small.request(user, [1, 2, 3], fetched=fetched) for user in (1, 2)]
        assert_right(requests, tight.rank(requests))
    assert fetched == [1, 2]
    assert (since.hits, since.misses, since.evictions) == (4, 2, 0)
    found = tight.metrics
    assert found.hit_rate == found.hits / (found.hits + found.misses)


def test_a_new_version_of_a_user_is_encoded(tight):
    fetched = []
    for version in (0, 1, 0):
        requests = [small.request(1, [1, 2], version, fetched)]
        assert_right(requests, tight.rank(requests))
    assert len(fetched) == 2
    requests = [small.request(6, [1, 2], version) for version in (0, 1, 0)]
    assert_right(requests, tight.rank(requests))


def test_more_new_users_than_one_encoder_takes(tight):
    requests = [small.request(user, [user]) for user in range(20, 23)]
    since = Since(tight)
    assert_right(requests, tight.rank(requests))
    assert (since.calls, since.misses) == (1, 3)


def test_states_are_evicted_within_the_bound(tight):
    since = Since(tight)
    requests = small.random_requests(60, seed=1, users=12)
    for start in range(0, 60, 5):
        assert_right(requests[start : start + 5], tight.rank(requests[start : start + 5]))
    assert since.evictions == since.misses - 5 > 0
    assert since.hits > 0


def test_other_weights_replace_all_states(tight):
    since, requests = Since(tight), small.random_requests(6)
    assert_right(requests, tight.rank(requests))
    started = tight.start(requests)
    tight.set_weights(small.weights(1), "new")
    answers = started.answers()
    assert_right(requests, answers)
    assert {answer.weights for answer in answers} == {0}
    answers = tight.rank(requests)
    assert_right(requests, answers, seed=1)
    assert {answer.weights for answer in answers} == {tight.metrics.weights} == {"new"}
    assert since.compilations == 0


def test_weights_of_another_shape_are_refused(shared):
    wrong = small.weights() | {"out": np.zeros((24, 3), np.float32)}
    with pytest.raises(ValueError, match=r"out'\] has shape \(24, 3\).*expected \[24, 2\]"):
        shared.set_weights(wrong, 1)
    with pytest.raises(ValueError, match="structure"):
        shared.set_weights({}, 1)


def test_threads_and_swaps_give_no_wrong_answer(tight):
    """Every answer is that of the weights that it names, and nothing compiles."""
    since = Since(tight)

    def work(seed):
        requests = small.random_requests(30, seed=seed)
        wrong = 0
        for start in range(0, 30, 3):
            part = requests[start : start + 3]
            for request, answer in zip(part, tight.rank(part), strict=True):
                expected = small.oracle(request, answer.weights)
                wrong += not np.allclose(answer.scores, expected, atol=TOLERANCE, rtol=TOLERANCE)
        return wrong

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        counts = [threads.submit(work, seed) for seed in range(4)]
        for version in range(1, 20):
            tight.set_weights(small.weights(version % 2), version % 2)
        assert [count.result() for count in counts] == [0] * 4
    tight.rank(small.random_requests(20, users=40))
    tight.forget_users()
    tight.rank(small.random_requests(3))
    assert since.compilations == 0
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert since.compilations > 0, "the counter does not see a compilation"


def test_users_are_forgotten_without_a_transfer(tight):
    """A new pool would have the next call wait until all its bytes are on the device."""
    requests = small.random_requests(3)
    tight.rank(requests)
    since, pool = Since(tight), tight._pool
    tight.forget_users()
    assert tight._pool is pool
    assert_right(requests, tight.rank(requests))
    assert (since.hits, since.misses > 0) == (0, True)


def test_scores_that_fail_cost_the_pool(tight):
    """The states that the failed call should have written are not in the cache any more."""
    requests = small.random_requests(3)
    tight.rank(requests)
    for array in tight._pool:
        array.delete()

    with pytest.raises(RuntimeError, match="out of memory"):
        tight.fetched(small.Unreadable())
    assert_right(requests, tight.rank(requests))


def test_a_program_that_fails_costs_one_batch(tight):
    requests = small.random_requests(3)
    tight.rank(requests)
    score = dict(tight._programs.score)
    failing = mock.Mock(side_effect=RuntimeError("out of memory"))
    tight._programs.score = dict.fromkeys(score, failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        tight.rank(requests)
    tight._programs.score = score
    assert_right(requests, tight.rank(requests))


def test_ranking_answers_every_request_once_offline_too(shared):
    requests = small.random_requests(50, seed=3)
    since = Since(shared)
    found = dict(serving.rank_offline(shared, iter(requests)))
    assert sorted(found) == list(range(50))
    assert_right(requests, [found[position] for position in range(50)])
    # Batches are fuller than one request each.
    assert since.calls < 50
    since = Since(shared)
    assert_right(requests, shared.rank(requests))
    assert since.calls < since.requests == 50
    assert since.candidates == sum(request.size for request in requests)


def test_parts_fill_the_largest_bucket():
    sizes = [10, 6, 1, 16, 3, 3, 3, 3]
    requests = [small.request(user, np.zeros(size)) for user, size in enumerate(sizes)]
    parts = list(fitting_parts(enumerate(requests), small.BUCKETS))
    positions = [[position for position, _ in part] for part in parts]
    assert positions == [[0, 1], [2], [3], [4, 5, 6], [7]]
    checked = [
        [
            (position, Checked(one.key, one.size, [one.candidates["item"]], None))
            for position, one in part
        ]
        for part in parts
    ]
    buckets = [merged(part, small.BUCKETS).bucket for part in checked]
    assert buckets == [(16, 3), (4, 1), (16, 1), (16, 3), (4, 1)]


@pytest.mark.parametrize(
    ("candidates", "users", "message"),
    [
        ((), (1,), r"candidates is \(\)"),
        ((4, 2), (1,), r"candidates is \(4, 2\)"),
        ((4, 4), (1,), r"candidates is \(4, 4\)"),
        ((4,), (0, 1), r"users is \(0, 1\)"),
        ((4, 32), (1, 9), r"new_users is \(0,\)"),
        ((4, 8), (1, 9), "has 8 candidates, fewer than its 9 users"),
        ((8.5, 16), (1,), r"candidates is \(8.5, 16\)"),
        (8, (1,), "candidates is 8"),
        ((True, 16), (1,), r"candidates is \(True, 16\)"),
    ],
)
def test_buckets_that_make_no_sense(candidates, users, message):
    with pytest.raises(ValueError, match=message):
        serving.Buckets(candidates, users, (0,) if candidates == (4, 32) else (1,))


def test_no_program_has_more_users_than_candidates():
    buckets = serving.Buckets((2, 8), (1, 4))
    assert buckets.pairs == [(2, 1), (8, 1), (8, 4)]
    assert buckets.fitting(2, 2) == (8, 4)
    with pytest.raises(ValueError, match="9 candidates of 1 users but the largest bucket has 8"):
        buckets.fitting(9, 1)


@pytest.mark.parametrize("results", [tuple, list, lambda both: {"a": both[0], "b": both[1]}])
def test_a_model_returns_one_array_of_scores(results):
    class Two(small.Model):
        def score(self, *args):
            scores = super().score(*args)
            return results([scores, scores])

    with pytest.raises(ValueError, match=r"score returns .*, expected one array"):
        small.make(Two())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scorer_weights": {"out": 2.0}}, "weights['out'] must be an array, but is a float, 2.0"),
        ({"user": (5, 8)}, "user[0] must be an array or a jax.ShapeDtypeStruct, but is a int, 5"),
        ({"candidate": {}}, "candidate is {}, expected at least 1 array"),
        ({"user_bytes": 100}, "has 100 bytes but the states of a call's 3 users take"),
        *(
            ({"user_bytes": size}, f"user_bytes is {size!r}, expected an integer")
            for size in (2.0**20, "1 GB", None, True)
        ),
        *(
            ({"buckets": wrong}, f"buckets is {wrong!r}, expected a Bu")
            for wrong in ((8, 16), (), {"candidates": (8,)})
        ),
        ({"joint": "no"}, "joint is 'no', expected a bool"),
        ({"features_of": [1]}, "features_of is [1], expected a function"),
    ],
)
def test_a_scorer_checks_its_arguments(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        small.make(**options)


@pytest.mark.parametrize("wrong", [-1, 1.5, None, True])
def test_calls_ahead_are_a_number(shared, wrong):
    with pytest.raises(ValueError, match=f"ahead is {wrong!r}, expected an integer of at least 0"):
        list(serving.rank_offline(shared, [small.request(1, [1, 2])], ahead=wrong))


@pytest.mark.parametrize("folder", ["", None, 3, b"programs"])
def test_a_cache_folder_has_a_name(folder):
    with pytest.raises(ValueError, match="folder is .*, expected the name of a folder"):
        serving.use_cache_folder(folder)


def test_a_model_may_keep_no_state():
    class Stateless(small.Model):
        def encode_users(self, weights, users):
            return {}

        def score(self, weights, state, candidates, cand_to_user):
            return weights["items"][candidates["item"]] @ weights["key"]

    weights, requests = small.weights(), [small.request(n, [n, n + 1]) for n in range(5)]
    for request, answer in zip(requests, small.make(Stateless()).rank(requests), strict=True):
        expected = weights["items"][request.candidates["item"]] @ weights["key"]
        np.testing.assert_allclose(answer.scores, expected, atol=TOLERANCE)
