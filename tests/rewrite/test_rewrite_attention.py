"""Which spellings of attention are recognised, and that the others stay right.

More spellings stand in `test_rewrite_recognised` and in `test_rewrite_weights`.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import became, both, check, computed, gradients_by_all, report_of

import ikbo_jax as ikbo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("models_may_promote")]

B, U, T, S, N, H = 20, 4, 3, 7, 2, 8
RNG = np.random.default_rng(0)
QUERY = problems.random_array(RNG, (B, T, N, H), "float32")
KEY = problems.random_array(RNG, (U, S, N, H), "float32")
VALUE = problems.random_array(RNG, (U, S, N, H), "float32")
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
LENGTHS = jnp.asarray([3, 0, 7, 1], jnp.int32)
KEPT = RNG.integers(0, 2, (U, S)).astype(bool)
KEPT[1:3] = [[False], [True]]
KEPT = jnp.asarray(KEPT)
ARGS = (QUERY, KEY, VALUE)


def logits(query, key):
    return jnp.einsum("btnh,bsnh->bnts", query, key[INDEX]) * H**-0.5


def weighted(scores, value):
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value[INDEX])


def by_user(mask):
    return mask[INDEX][:, None, None, :]


def masked_the_other_way_round(query, key, value):
    return weighted(jnp.where(~by_user(KEPT), -1e9, logits(query, key)), value)


def by_lengths(query, key, value):
    mask = jnp.arange(S)[None] < LENGTHS[INDEX][:, None]
    return weighted(jnp.where(mask[:, None, None], logits(query, key), -1e30), value)


def in_bfloat16(query, key, value):
    half = jnp.bfloat16
    scores = logits(query.astype(half), key.astype(half)).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(half)
    return jnp.einsum("bnts,bsnh->btnh", weights, value.astype(half)[INDEX])


def several_query_heads_a_key_head(query, key, value):
    return jax.nn.dot_product_attention(query, key[INDEX][:, :, :1], value[INDEX][:, :, :1])


def of_several_tasks_under_vmap(query, key, value):
    """The tasks have their own queries and keys, of one head each, and share the values."""

    def task(query, key):
        scores = jnp.einsum("bth,bsh->bts", query, key[INDEX])
        return jax.nn.softmax(scores, axis=-1) @ value[INDEX][:, :, 0]

    return jax.vmap(task, in_axes=(2, 2), out_axes=2)(query, key)


def under_vmap(query, key, value):
    def one(query, user):
        scores = jnp.einsum("tnh,snh->nts", query, key[user]) / H**0.5
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1), value[user])

    return jax.vmap(one)(query, INDEX)


def of_one_user(query, key, value):
    key, value = (jnp.broadcast_to(x[:1], (B, S, N, H)) for x in (key, value))
    return jax.nn.dot_product_attention(query, key, value)


RECOGNISED = [
    of_one_user,
    masked_the_other_way_round,
    by_lengths,
    in_bfloat16,
    several_query_heads_a_key_head,
    under_vmap,
    of_several_tasks_under_vmap,
]


def maximum_of_other_logits(query, key, value):
    scores = logits(query, key)
    weights = jnp.exp(scores - jnp.max(scores * 2, axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", weights, value[INDEX])


def heads_merged_first(query, key, value):
    weights = jax.nn.softmax(logits(query, key), axis=-1).reshape(B, N * T, S)
    return jnp.einsum("bms,bsh->bmh", weights, value[INDEX].sum(2))


def rounded_scores(query, key, value):
    return weighted(logits(query, key).astype(jnp.int32).astype(jnp.float32), value)


# More of these, with their reasons, stand in `test_rewrite_decisions`.
NOT_RECOGNISED = [
    maximum_of_other_logits,
    heads_merged_first,
    rounded_scores,
]


def weights_also_returned(query, key, value):
    scores = logits(query, key)
    return weighted(scores, value), scores


#: Of what is not recognised, what differs in the gradient from all others.
WITH_GRADIENT = (weights_also_returned,)


def assert_agree(fn, *, with_gradient: bool = True) -> None:
    found, wanted = both(fn, *ARGS)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, rtol=1e-6, atol=2e-2 if fn is in_bfloat16 else 2e-5)
    if with_gradient:
        of = gradients_by_all(ARGS)
        found, wanted = (computed(of(f), *ARGS) for f in (ikbo.rewrite(fn), fn))
        chex.assert_trees_all_close(found, wanted, rtol=1e-6, atol=5e-5)


@pytest.mark.parametrize("fn", RECOGNISED)
def test_recognised(fn) -> None:
    # Gradients of bfloat16 are rounded otherwise.
    assert_agree(fn, with_gradient=fn is not in_bfloat16)
    assert re.search("^attention, test_rewrite_attention.py", became(fn, *ARGS), re.MULTILINE)
    assert report_of(fn, *ARGS).materialised == ()


@pytest.mark.parametrize("fn", [*NOT_RECOGNISED, weights_also_returned])
def test_not_recognised_and_right_and_the_report_says_why(fn) -> None:
    assert_agree(fn, with_gradient=fn in WITH_GRADIENT)
    places = report_of(fn, *ARGS).materialised
    assert any(f"float32[{B},{S},{N},{H}]" in place.what for place in places)
    reasons = [place.reason for place in places]
    is_named = any("attention is not recognised: " in reason for reason in reasons)
    assert is_named or fn is weights_also_returned, reasons


@pytest.mark.parametrize(("fn", "sorts"), [(by_lengths, 0), (masked_the_other_way_round, 1)])
def test_keys_are_put_in_order_only_if_the_mask_is_no_length(fn, sorts: int) -> None:
    text = str(jax.make_jaxpr(ikbo.rewrite(fn))(*ARGS))
    of_the_op = str(jax.make_jaxpr(ikbo.attention)(*ARGS, INDEX)).count(" sort[")
    assert of_the_op == 1  # of the candidates, by user
    assert text.count(" sort[") == sorts + of_the_op


def activated(act):
    """A model whose scores meet a function instead of the softmax."""

    def fn(query, key, value):
        return jnp.einsum("bnts,bsnh->btnh", act(logits(query, key)) / S, value[INDEX])

    return fn


def gate_by_other_scores(query, key, value):
    scores, other = logits(query, key), logits(query + 1, key)
    return jnp.einsum("bnts,bsnh->btnh", scores * jax.nn.sigmoid(other), value[INDEX])


def masked_before_relu(query, key, value):
    scores = jnp.where(key[INDEX][:, None, None, :, 0, 0] > 0, logits(query, key), -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.relu(scores), value[INDEX])


NO_ACTIVATION = [
    activated(jax.nn.sigmoid),
    activated(jnp.tanh),
    activated(jax.nn.elu),
    activated(lambda x: jax.nn.gelu(x + 0.1)),
    activated(lambda x: jax.nn.relu(x.astype(jnp.int32).astype(x.dtype))),
    activated(lambda x: x * jax.nn.sigmoid(x.max(axis=-1, keepdims=True))),
    gate_by_other_scores,
    masked_before_relu,
]


def test_functions_that_are_no_activation_of_the_op() -> None:
    """What becomes `ikbo.gdpa` stands in `test_rewrite_recognised`."""

    def every(*args):
        return [fn(*args) for fn in NO_ACTIVATION]

    explanation = ikbo.explain(ikbo.rewrite(every), *ARGS)
    assert explanation.plans == ()
    assert len(explanation.notes[0].materialised) >= 2 * len(NO_ACTIVATION)
    check(lambda f: f, every, *ARGS)


def test_rows_out_of_bounds_are_nan() -> None:
    outside = np.array(INDEX)
    outside[[3, 5]] = U + 2, -U - 1

    def fn(query, key, value):
        keys, values = (jnp.take(x, outside, axis=0) for x in (key, value))
        return jax.nn.dot_product_attention(query, keys, values)

    assert_agree(fn, with_gradient=False)
    assert np.isnan(computed(fn, *ARGS)[3]).all()
    assert "attention" in became(fn, *ARGS)
