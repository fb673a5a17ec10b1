"""The host's part of a call, counted in calls of functions: a count does not depend on the machine.

A call of a function of Python takes 0.05 to 0.2 µs, one of NumPy 0.3 to 3 µs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import function_calls
import jax
import numpy as np
import pytest
from jax._src import stages

from ikbo_jax import serving

#: Calls of functions for one more request of a known user, and of a new user whose request brings
#: the features; for one more user in arrays, and in arrays with a joint program; and for a call
#: beside that.
REQUEST, NEW_USER, ARRAY_USER, JOINT_USER, CALL = 20, 32, 4, 1, 90
#: Sizes of the two calls whose difference counts.
FEW, MANY = 4, 24


@jax.tree_util.register_pytree_node_class
class Variable:
    """A leaf that is flattened by a function in Python, as Flax's variables are."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def tree_flatten(self) -> Any:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Variable:
        return cls(*children)


class Model:
    """No computation to speak of."""

    def encode_users(self, weights: Any, users: Any) -> Any:
        return {"sum": users["a"].sum(1) + users["b"] + weights[0].array}

    def score(self, weights: Any, state: Any, candidates: Any, cand_to_user: Any) -> Any:
        return state["sum"][cand_to_user] + candidates["item"] + weights[-1].array


def features_of(keys: list[Any]) -> Any:
    users = np.asarray([user for user, _ in keys], np.int32)
    return {"a": np.repeat(users[:, None], 3, 1), "b": users}


def scorer_of(leaves: int, *, joint: bool = False) -> serving.Scorer:
    return serving.Scorer(
        Model(),
        [Variable(np.int32(0)) for _ in range(leaves)],
        {"a": jax.ShapeDtypeStruct((3,), np.int32), "b": jax.ShapeDtypeStruct((), np.int32)},
        {"item": jax.ShapeDtypeStruct((), np.int32)},
        buckets=serving.Buckets((64,), (32,), (32,)),
        user_bytes=1 << 12,
        features_of=features_of,
        joint=joint,
    )


@pytest.fixture(scope="module")
def scorer() -> serving.Scorer:
    return scorer_of(2)


@pytest.fixture(scope="module")
def joint() -> serving.Scorer:
    return scorer_of(2, joint=True)


def calls(work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> int:
    """The number of calls, of Python's functions and others, after a first time."""

    def prepared() -> Callable[[], Any]:
        prepare()
        return work

    return function_calls.count(prepared)


def requests(number: int, *, bring: bool = False) -> list[serving.Request]:
    def fetch(user: int) -> Callable[[], Any]:
        found = jax.tree.map(lambda leaf: leaf[0], features_of([(user, 0)]))
        return lambda: found

    return [
        serving.Request(
            *(user, 0, fetch(user) if bring else None), {"item": np.arange(2, dtype=np.int32)}
        )
        for user in range(number)
    ]


@pytest.mark.parametrize(("bring", "most"), [(False, REQUEST), (True, NEW_USER)])
def test_a_request_of_a_known_and_of_a_new_user(scorer, bring, most):
    def counted(number: int) -> int:
        rank = functools.partial(scorer.rank, requests(number, bring=bring))
        return calls(rank, scorer.forget_users if bring else lambda: None)

    few, many = counted(FEW), counted(MANY)
    assert (many - few) / (MANY - FEW) <= most
    assert bring or few - FEW * most <= CALL


def of_arrays(scorer: serving.Scorer, number: int, *, known: bool = False) -> int:
    """Calls of functions for so many users in arrays, in one call."""
    users, counts = np.arange(number), np.full(number, 2)
    items = {"item": np.zeros(2 * number, np.int32)}
    return calls(
        lambda: list(serving.rank_arrays(scorer, users, counts, items)),
        (lambda: None) if known else scorer.forget_users,
    )


@pytest.mark.parametrize("known", [False, True])
def test_a_user_in_arrays(scorer, known):
    few, many = (of_arrays(scorer, number, known=known) for number in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= ARRAY_USER


def test_a_user_in_a_joint_call(scorer, joint):
    few, many = (of_arrays(joint, number) for number in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= JOINT_USER
    # One program is started instead of two.
    assert few < of_arrays(scorer, FEW)


def test_programs_are_started_without_python(scorer, joint, monkeypatch):
    """Only a program's first call, before the scorer is ready, goes through JAX's Python."""
    slow = []
    monkeypatch.setattr(stages.Compiled, "call", lambda *given: slow.append(given))
    for number in (1, FEW, MANY):
        scorer.rank(requests(number))
        of_arrays(joint, number)
    # Also with a pool, and with weights, that no program has returned.
    scorer._reset()
    scorer.rank(requests(FEW))
    scorer.set_weights([Variable(np.int32(1)) for _ in range(2)], 1)
    scorer.rank(requests(FEW))
    scorer.set_weights([Variable(np.int32(0)) for _ in range(2)], 0)
    assert not slow


def test_weights_cost_a_call_nothing_in_python(scorer):
    asked = requests(FEW)

    def counted(scorer: serving.Scorer) -> int:
        return calls(lambda: scorer.rank(asked), scorer.forget_users)

    assert counted(scorer_of(20)) == counted(scorer)
