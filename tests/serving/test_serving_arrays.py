"""Users in arrays: features of several users at once, ranking without requests, packed inputs."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import serving_model as small
from serving_model import TOLERANCE

from ikbo_jax import serving
from ikbo_jax.serving import programs
from ikbo_jax.serving.batches import Form
from ikbo_jax.serving.packing import Packing, fill


class Table:
    """`features_of` a scorer; keeps what it was asked. Users from 90 on are unknown."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, int]]] = []

    def __call__(self, keys):
        self.asked.append(keys)
        if unknown := [user for user, _ in keys if user >= 90]:
            raise KeyError(f"no user {unknown[0]}")
        rows = [small.features(user, version)["events"] for user, version in keys]
        return {"events": np.stack(rows)}


def emptied(scorer: serving.Scorer) -> Table:
    """Forgets users' states, and returns the scorer's table."""
    scorer.forget_users()
    found: Any = scorer._features._features_of
    found.asked.clear()
    return found


@pytest.fixture(scope="module")
def scorer() -> serving.Scorer:
    return small.make(features_of=Table())


@pytest.fixture(scope="module")
def joint() -> serving.Scorer:
    """A scorer with joint programs."""
    return small.make(features_of=Table(), joint=True)


@pytest.fixture
def table(scorer) -> Table:
    """The table of a scorer without users' states."""
    return emptied(scorer)


def bare(user, items, version=0):
    return serving.Request(user, version, None, {"item": np.asarray(items, np.int32)})


def assert_right(scores, user, items, version=0, seed=0):
    expected = small.oracle(small.request(user, items, version), seed)
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_call_asks_once_for_the_features_of_all_its_users(scorer, table):
    requests = [bare(user, [user, 1], user % 2) for user in (4, 5, 4, 6)]
    small.assert_right(requests, scorer.rank(requests))
    scorer.rank([*requests, bare(7, [1])])
    assert table.asked == [[(4, 0), (5, 1), (6, 0)], [(7, 0)]]


def test_an_unknown_user_leaves_the_others_alone(scorer, table):
    requests = [bare(1, [1]), bare(90, [2]), bare(2, [3]), bare(90, [4])]
    answers = scorer.rank(requests)
    assert_right(answers[0].scores, 1, [1])
    assert_right(answers[2].scores, 2, [3])
    for answer in (answers[1], answers[3]):
        with pytest.raises(KeyError, match="no user 90"):
            raise answer
    assert table.asked == [[(1, 0), (90, 0), (2, 0)], [(1, 0)], [(90, 0)], [(2, 0)]]


def test_features_of_a_request_come_first(scorer, table):
    """A call asks once for users before and after the request that has features."""
    requests = [bare(1, [4]), small.request(3, [1, 2]), bare(5, [7])]
    small.assert_right(requests, scorer.rank(requests))
    assert table.asked == [[(1, 0), (5, 0)]]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            lambda keys: {"events": np.zeros((len(keys), 5, 8), "f4")},
            r"features\['events'\] has .*5",
        ),
        (lambda keys: {"events": np.zeros((9, 6, 8), "f4")}, "returned 9 rows for 1 users"),
        (lambda keys: {}, "features have the structure"),
        (None, r"\(1, 0\) has no features: the request has none, and the scorer has no"),
    ],
)
def test_features_that_do_not_fit(scorer, table, monkeypatch, found, message):
    monkeypatch.setattr(scorer._features, "_features_of", found)
    answers = scorer.rank([bare(1, [1]), small.request(2, [2])])
    assert_right(answers[1].scores, 2, [2])
    with pytest.raises(serving.BadRequestError, match=message):
        raise answers[0]


@pytest.mark.parametrize("kind", ["scorer", "joint"])
def test_ranking_arrays(request, kind):
    """Users that occur twice, have no candidates, or fill a call alone."""
    scorer = request.getfixturevalue(kind)
    table = emptied(scorer)
    users = [3, 5, 3, 8, 9, 3, 4, 4]
    counts = np.asarray([5, 2, 6, 0, 16, 1, 1, 1])
    items = np.random.default_rng(0).integers(0, small.ITEMS, counts.sum(), np.int32)
    before, found, calls = scorer.metrics, [], []
    for rows, scores in serving.rank_arrays(scorer, users, counts, {"item": items}):
        calls.append((rows.start, rows.stop))
        found.append(scores)
    assert calls == [(0, 13), (13, 29), (29, 32)]
    parts = np.split(np.concatenate(found), np.cumsum(counts)[:-1])
    for user, own, scores in zip(
        users, np.split(items, np.cumsum(counts)[:-1]), parts, strict=True
    ):
        if len(own):
            assert_right(scores, user, own)
    after = scorer.metrics
    assert after.requests - before.requests == 7
    # A user who occurs twice in a call is asked for once. The state of user 3 is kept after the
    # first call, but not by joint programs.
    again = [(3, 0)] if kind == "joint" else []
    assert table.asked == [[(3, 0), (5, 0)], [(9, 0)], [*again, (4, 0)]]
    assert after.misses - before.misses == sum(map(len, table.asked))
    assert after.hits - before.hits == (0 if kind == "joint" else 3)
    assert after.compilations == before.compilations


def test_ranking_arrays_of_other_versions_and_kinds(scorer, table):
    ids = np.asarray([2, 3])
    ((rows, scores),) = serving.rank_arrays(
        *(scorer, ids, [1, 1], {"item": np.asarray([7, 8], np.int32)}), version=1
    )
    assert rows == slice(0, 2)
    assert_right(scores[1:], 3, [8], version=1)
    assert not list(serving.rank_arrays(scorer, [], [], {"item": np.zeros(0, np.int32)}))


@pytest.mark.parametrize(
    ("users", "counts", "items", "message"),
    [
        ([1, 2], [1, 2], np.zeros(4, np.int32), "there are 4 candidates, but the counts sum to 3"),
        ([1], [1, 2], np.zeros(3, np.int32), r"counts has shape \(2,\).*expected .*shape \(1,\)"),
        ([1, 2], [[1], [1]], np.zeros(2, np.int32), r"counts has shape \(2, 1\)"),
        ([1], [1.0], np.zeros(1, np.int32), r"float64, expected integers of shape \(1,\)"),
        ([1, 2], [1, 17], np.zeros(18, np.int32), r"counts\[1\] is 17, expected 0 to 16"),
        ([1, 2], [3, -1], np.zeros(2, np.int32), r"counts\[1\] is -1, expected 0 to 16"),
        ([1], [2], np.zeros(2, np.int64), "dtype int64, expected .*int32"),
        ([[1, 2], [3, 4]], [1, 1], np.zeros(2, np.int32), r"user \[1, 2\] .* must be hashable"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_the_first_call(
    scorer, joint, users, counts, items, message
):
    for one in (scorer, joint):
        calls, given = one.metrics.calls, {"item": items}
        with pytest.raises(serving.BadRequestError, match=message):
            list(serving.rank_arrays(one, np.asarray(users), counts, given))
        with pytest.raises(serving.BadRequestError, match=message):
            one.start_arrays(users, np.asarray(counts), given)
        assert one.metrics.calls == calls


@pytest.mark.parametrize("kind", ["scorer", "joint"])
def test_one_call_of_arrays_that_fails_costs_no_later_call(request, kind):
    scorer = request.getfixturevalue(kind)
    emptied(scorer)
    item = {"item": np.zeros(2, np.int32)}
    with pytest.raises(ValueError, match="2 candidates of 4 users but the largest bucket has"):
        scorer.start_arrays([1] * 4, np.array([1, 1, 0, 0]), item)
    with pytest.raises(KeyError, match="no user 91"):
        scorer.start_arrays([1, 91], np.ones(2, int), item)
    pending = scorer.start_arrays([1, 2], np.ones(2, int), {"item": np.asarray([5, 6], np.int32)})
    assert_right(pending.scores()[1:], 2, [6])


def test_joint_programs_score_as_the_other_two(scorer, joint):
    """In every bucket, with users that occur twice; the user cache stays as it is."""
    assert set(joint._programs.joint) == set(joint._programs.score)
    assert not scorer._programs.joint
    cached = small.request(1, [1, 2])
    joint.rank([cached])
    before = joint.metrics
    for users, counts in (([1], [2]), ([2], [9]), ([1, 2], [1, 2]), ([5, 6, 5], [3, 4, 9])):
        items = np.random.default_rng(0).integers(0, small.ITEMS, sum(counts), np.int32)
        both = [
            one.start_arrays(users, np.asarray(counts), {"item": items}).scores()
            for one in (scorer, joint)
        ]
        np.testing.assert_allclose(*both, atol=TOLERANCE, rtol=TOLERANCE)
    joint.rank([cached])
    after = joint.metrics
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 6)
    assert after.compilations == before.compilations  # of the process: other scorers count, too


def test_joint_programs_use_new_weights(joint):
    try:
        joint.set_weights(small.weights(1), 1)
        found = joint.start_arrays([2], np.ones(1, int), {"item": np.ones(1, np.int32)}).scores()
    finally:
        joint.set_weights(small.weights(), 0)
    assert_right(found, 2, [1], seed=1)


def test_a_scorer_waits_for_all_calls(scorer):
    requests = small.random_requests(9, seed=5)
    pending = [scorer.start(requests) for _ in range(3)]
    scorer.wait()
    assert all(one.ready() for one in pending)
    # Nothing is under way, and what has been waited for is not kept.
    scorer.wait()
    assert scorer._newest is None
    pending = scorer.start(requests)
    pending.wait()
    assert pending.ready()
    small.assert_right(requests, pending.answers())
    # A call that fails does not keep a process from ending.
    scorer._newest = small.Unreadable()
    scorer.wait()
    assert scorer._newest is None


def test_packed_arrays_of_one_dtype_start_at_multiples_of_256_bytes():
    shapes = [((3,), np.int32), ((2, 2), np.float32), ((), np.int32), ((4, 1), np.int32)]
    packing = Packing([jax.ShapeDtypeStruct(*one) for one in shapes])
    assert [(spec.shape, spec.dtype) for spec in packing.packed] == [((132,), "i4"), ((4,), "f4")]
    assert not np.shares_memory(packing.empty()[0][0], packing.empty()[0][0])


def test_states_have_one_scatter_for_each_dtype():
    """Whatever the number of a state's leaves; and one gather."""

    class Model:
        def encode_users(self, weights, users):
            rows = users["a"] * weights
            return [rows, rows + 1, rows.sum(1), users["b"], -users["b"]]

        def score(self, weights, state, candidates, cand_to_user):
            return sum(leaf.sum().astype(np.float32) for leaf in state) + candidates["item"]

    spec = jax.ShapeDtypeStruct
    user = {"a": spec((3,), np.float32), "b": spec((), np.int32)}
    one = spec((), np.float32)
    specs = programs.specs_of(Model(), one, user, {"item": one})
    found = programs.Programs(Model(), specs, serving.Buckets((4,), (2,), (2,)), 9)
    assert [(leaf.shape, leaf.dtype) for leaf in found.pool] == [((9, 7), "f4"), ((9, 2), "i4")]
    for function, inputs, kind in (
        (found._encode, found.encode_inputs[2], "scatter"),
        (found._score, found.score_inputs[4, 2], "gather"),
    ):
        traced = functools.partial(function, inputs)
        text = str(jax.make_jaxpr(traced)([one], found.pool, inputs.packed))
        assert text.count(f" {kind}[") == 2, text


def test_rows_are_padded_with_the_last_one():
    array = np.zeros((4, 2), np.int32)
    fill(array, np.int32([[1, 2], [5, 6]]))
    assert array.tolist() == [[1, 2], [5, 6], [5, 6], [5, 6]]


def test_leaves_without_a_dtype_are_converted():
    """As Python's numbers are; the quick check knows arrays alone."""
    form = Form({"a": jax.ShapeDtypeStruct((), np.float64)}, "features")
    (leaf,) = form.leaves_of({"a": 3.0}, stacked=False)
    assert isinstance(leaf, np.ndarray)
    with pytest.raises(serving.BadRequestError, match="dtype int64, expected .* float64"):
        form.leaves_of({"a": 3}, stacked=False)
