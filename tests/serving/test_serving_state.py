"""A scorer's state after errors and with weights of other devices, and the inputs it refuses."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving_model as small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from serving_model import TOLERANCE, assert_right

from ikbo_jax import serving

BUCKETS = serving.Buckets((16,), (3,), (3,))


def features_of(keys):
    return {"events": np.stack([small.features(*key)["events"] for key in keys])}


make = functools.partial(small.make, features_of=features_of, buckets=BUCKETS)


@pytest.fixture(scope="module")
def scorer() -> serving.Scorer:
    return make()


def other_places() -> list[Any]:
    mesh = jax.make_mesh((8,), ("x",))
    divided = {"items": P(None, "x"), "key": P("x"), "value": P(), "out": P("x")}
    return [
        jax.devices()[1],
        NamedSharding(mesh, P()),
        {name: NamedSharding(mesh, spec) for name, spec in divided.items()},
    ]


@pytest.mark.parametrize("place", range(3))
def test_weights_on_other_devices_go_to_the_scorer_s(place):
    """A trained model's weights, for example, which are on all devices of a mesh."""
    there = other_places()[place]
    scorer = make(scorer_weights=jax.device_put(small.weights(), there))
    requests = small.random_requests(3)
    assert_right(requests, scorer.rank(requests))
    scorer.set_weights(jax.device_put(small.weights(1), there), 1)
    assert_right(requests, scorer.rank(requests), 1)


def test_a_scorer_stays_on_its_device():
    with jax.default_device(jax.devices()[1]):
        scorer = make()
    requests = small.random_requests(3)
    assert_right(requests, scorer.rank(requests))
    scorer.set_weights(small.weights(1), 1)
    scorer._reset()
    assert_right(requests, scorer.rank(requests), 1)
    arrays = [*scorer._weights, *scorer._pool]
    assert {device for array in arrays for device in array.devices()} == {jax.devices()[1]}


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address at which JAX reads NumPy's memory without a copy of its own."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    found = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def test_weights_are_those_of_the_time_when_they_were_set(scorer):
    weights = {name: aligned(w) for name, w in small.weights(1).items()}
    scorer.set_weights(weights, 1)
    for array in weights.values():
        array[...] = 0
    requests = small.random_requests(3)
    assert_right(requests, scorer.rank(requests), 1)
    scorer.set_weights(small.weights(), 0)


@pytest.mark.parametrize("first", [None, mock.Mock(side_effect=KeyError("no such user"))])
def test_one_request_s_features_serve_the_user_s_other_requests(first):
    scorer = make(features_of=None)
    good = small.request(1, [1, 2])
    requests = [dataclasses.replace(good, features=first), good]
    assert_right(requests, scorer.rank(requests))


def test_an_interrupted_call_leaves_no_state_that_was_not_written(scorer, monkeypatch):
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    requests = small.random_requests(3, seed=5)
    scorer.forget_users()
    for start in (
        lambda: scorer.rank(requests),
        lambda: scorer.start_arrays(
            [requests[0].user], np.array([requests[0].size]), requests[0].candidates
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(scorer._programs, "encode", dict.fromkeys((3,), interrupt))
            with pytest.raises(KeyboardInterrupt):
                start()
        assert_right(requests, scorer.rank(requests))
        scorer.forget_users()


def test_answers_asked_for_again_after_an_error(scorer, monkeypatch):
    requests = [small.request(user, np.arange(12)) for user in range(3)]
    pending = scorer.start(requests)
    fetched, calls = scorer.fetched, []

    def failing(scores):
        calls.append(scores)
        if len(calls) == 2:
            raise RuntimeError("lost")
        return fetched(scores)

    monkeypatch.setattr(scorer, "fetched", failing)
    with pytest.raises(RuntimeError, match="lost"):
        pending.answers()
    assert_right(requests, pending.answers())


@pytest.mark.parametrize("dtype", [np.uint64, np.uint8, np.int8])
@pytest.mark.parametrize("joint", [False, True])
def test_counts_of_any_integers(joint, dtype):
    scorer = make(joint=joint)
    items = np.arange(12, dtype=np.int32)
    counts = np.array([5, 0, 7], dtype)
    (found,) = serving.rank_arrays(scorer, [1, 2, 3], counts, {"item": items})
    assert found[0] == slice(0, 12)
    for user, part in ((1, slice(0, 5)), (3, slice(5, 12))):
        expected = small.oracle(small.request(user, items[part]))
        np.testing.assert_allclose(found[1][part], expected, atol=TOLERANCE, rtol=TOLERANCE)


class OneScore(small.Model):
    def score(self, *arguments):
        return jnp.sum(super().score(*arguments), axis=0, keepdims=True)


class OneForEveryUser(small.Model):
    def score(self, weights, state, candidates, cand_to_user):
        return state["rows"]


class OneState(small.Model):
    def encode_users(self, weights, users):
        states = super().encode_users(weights, users)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0, keepdims=True), states)


class FourStates(small.Model):
    def encode_users(self, weights, users):
        return super().encode_users(weights, users) | {"rows": jnp.zeros(4)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FourStates, r"encode_users returns shape \(4,\).*rows"),
        (OneScore, r"score returns shape \(1, 2\) .* for 16 rows, expected \(16, 2\)"),
        (OneForEveryUser, r"score returns shape \(3, 8\) .* for 16 rows, expected \(16, 8\)"),
        (
            OneState,
            r"encode_users returns shape \(1, 6, 2, 4\) .* for 3 rows\['key'\], expected \(3, ",
        ),
    ],
)
@pytest.mark.parametrize("joint", [False, True])
def test_a_model_returns_a_row_for_each(model, message, joint):
    """One row, for one row, may be a sum over rows; other users' states would be mixed in."""
    with pytest.raises(ValueError, match=message):
        make(model(), joint=joint)


class Ids:
    """Adds ids of 64 bits."""

    def encode_users(self, weights, users):
        return users

    def score(self, weights, state, candidates, cand_to_user):
        return candidates["id"] + state["id"][cand_to_user] + weights["one"]


def ids(user: Any, candidate: Any) -> serving.Scorer:
    specs = ({"id": jax.ShapeDtypeStruct((), dtype)} for dtype in (user, candidate))
    one = {"one": np.ones((), candidate)}
    return serving.Scorer(Ids(), one, *specs, buckets=serving.Buckets((4,), (1,), (1,)))


def test_features_that_jax_would_cut_to_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"user\['id'\] has dtype int64, .* computes in int32"):
        ids(np.int64, np.int32)
    with pytest.raises(ValueError, match=r"candidate\['id'\] has dtype uint64, .* in uint32"):
        ids(np.int32, np.uint64)
    large = np.array([2**40, 7])
    with jax.enable_x64(True):
        (answer,) = ids(np.int64, np.int64).rank(
            [serving.Request(0, 0, lambda: {"id": np.int64(2**41)}, {"id": large})]
        )
    np.testing.assert_array_equal(answer.scores, large + 2**41 + 1)
