"""Attention with a function that is no activation of `ikbo.gdpa` stays as it is.

What becomes `ikbo.gdpa` stands in `test_rewrite_recognised`.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import check

import ikbo_jax as ikbo
from ikbo_jax.reference.activations import ACTIVATIONS, SOFTMAX
from ikbo_jax.rewrite.activations import KNOWN

B, U, T, S, N, H = 12, 3, 2, 5, 2, 4
RNG = np.random.default_rng(0)
QUERY = problems.random_array(RNG, (B, T, N, H), "float32")
KEY = problems.random_array(RNG, (U, S, N, H), "float32")
VALUE = problems.random_array(RNG, (U, S, N, H), "float32")
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
ARGS = (QUERY, KEY, VALUE)


@pytest.fixture(autouse=True)
def models_may_promote_as_people_do() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def attention(act):
    """A model: einsum, activation, einsum, with a scale before and one after."""

    def fn(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key[INDEX]) * 0.3
        return jnp.einsum("bnts,bsnh->btnh", act(scores) / S, value[INDEX])

    return fn


def gate_by_other_scores(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key[INDEX])
    other = jnp.einsum("btnh,bsnh->bnts", query + 1, key[INDEX])
    return jnp.einsum("bnts,bsnh->btnh", scores * jax.nn.sigmoid(other), value[INDEX])


def gate_by_the_largest(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key[INDEX])
    scores = scores * jax.nn.sigmoid(scores.max(axis=-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", scores, value[INDEX])


def masked(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key[INDEX])
    scores = jnp.where(key[INDEX][:, None, None, :, 0, 0] > 0, scores, -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.relu(scores), value[INDEX])


OTHERS = [
    attention(jax.nn.sigmoid),
    attention(jnp.tanh),
    attention(jax.nn.elu),
    attention(lambda x: jax.nn.gelu(x + 0.1)),
    attention(lambda x: jax.nn.relu(x.astype(jnp.int32).astype(x.dtype))),
    gate_by_other_scores,
    gate_by_the_largest,
    masked,
]


def test_others_stay_as_they_are() -> None:
    def every(*args):
        return [fn(*args) for fn in OTHERS]

    explanation = ikbo.explain(ikbo.rewrite(every), *ARGS)
    assert explanation.plans == ()
    assert len(explanation.notes[0].materialised) >= 2 * len(OTHERS)
    check(lambda f: f, every, *ARGS)


def test_every_activation_is_known_to_the_rewrite() -> None:
    assert {*KNOWN, SOFTMAX, "identity"} == set(ACTIVATIONS)
