"""Which spellings of attention with an activation become `ikbo.gdpa`, and that the others stay."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

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


def attention(act, dtype=jnp.float32):
    """A model: einsum, activation, einsum, with a scale before and one after."""

    def fn(query, key, value):
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key[INDEX]) * 0.3
        return jnp.einsum("bnts,bsnh->btnh", act(scores) / S, value[INDEX])

    return fn


def gelu_by_hand(x):
    return 0.5 * x * (1.0 + jax.lax.erf(x / math.sqrt(2)))


def swish_by_hand(x):
    return x / (1.0 + jnp.exp(-x))


SPELLINGS = {
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), gelu_by_hand),
    "gelu_tanh": (jax.nn.gelu,),
    "silu": (jax.nn.silu, swish_by_hand, lambda x: jax.nn.sigmoid(x) * x),
    "relu": (jax.nn.relu, lambda x: jnp.maximum(x, 0)),
    "relu_squared": (lambda x: jax.nn.relu(x) ** 2, lambda x: jnp.square(jax.nn.relu(x))),
    "leaky_relu": (jax.nn.leaky_relu,),
    "hardswish": (jax.nn.hard_swish,),
}


def report_and_op(fn):
    explanation = ikbo.explain(ikbo.rewrite(fn), *ARGS)
    (report,) = explanation.notes
    return report, [plan.problem.activations for plan in explanation.plans]


@pytest.mark.parametrize(("name", "spellings"), SPELLINGS.items(), ids=list(SPELLINGS))
def test_recognised(name: str, spellings) -> None:
    for act in spellings:
        report, activations = report_and_op(attention(act))
        assert activations == [(name,)]
        assert report.materialised == ()
        became = [text for found in report.broadcasts for text in found.became]
        assert any(text.startswith("gdpa, test_rewrite_activations.py") for text in became)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_recognised_in_half_precision(name: str) -> None:
    _, activations = report_and_op(attention(SPELLINGS[name][0], jnp.bfloat16))
    # In bfloat16 the two forms of gelu are one.
    assert activations in ([(name,)], [("gelu",)], [("gelu_tanh",)])
    assert ("gelu" in name) == ("gelu" in activations[0][0])


@pytest.mark.slow
def test_results_and_gradients_agree() -> None:
    def fn(query, key, value):
        out = attention(gelu_by_hand)(query, key, value)
        # Queries before heads, and no heads at all.
        scores = jax.nn.silu(query[:, :, 0] @ key[:, :, 1][INDEX].swapaxes(1, 2))
        return out, scores @ value[:, :, 0][INDEX]

    assert len(report_and_op(fn)[1]) == 2

    def with_gradients(fn):
        def loss(*args):
            outs = fn(*args)
            return sum(jnp.sum(jnp.sin(x)) for x in outs), outs

        return jax.grad(loss, (0, 1, 2), has_aux=True)

    fns = ikbo.rewrite(fn), fn
    ours, theirs = jax.jit(lambda *args: [with_gradients(f)(*args) for f in fns])(*ARGS)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-5)


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

    report, activations = report_and_op(every)
    assert activations == []
    assert len(report.materialised) >= 2 * len(OTHERS)
    ours, theirs = jax.jit(lambda *args: (ikbo.rewrite(every)(*args), every(*args)))(*ARGS)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-5)


def test_every_activation_is_known_to_the_rewrite() -> None:
    assert {*KNOWN, SOFTMAX, "identity"} == set(ACTIVATIONS)
