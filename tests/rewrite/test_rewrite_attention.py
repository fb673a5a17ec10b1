"""Which spellings of attention are recognised, and that the others stay right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from batches import some_at_once
from flax import linen, nnx

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

B, U, T, S, N, H = 20, 4, 3, 7, 2, 8
RNG = np.random.default_rng(0)
QUERY = problems.random_array(RNG, (B, T, N, H), "float32")
KEY = problems.random_array(RNG, (U, S, N, H), "float32")
VALUE = problems.random_array(RNG, (U, S, N, H), "float32")
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
OTHER = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
LENGTHS = jnp.asarray([3, 0, 7, 1], jnp.int32)
KEPT = RNG.integers(0, 2, (U, S)).astype(bool)
KEPT[1:3] = [[False], [True]]
KEPT = jnp.asarray(KEPT)
ARGS = (QUERY, KEY, VALUE)


@pytest.fixture(autouse=True)
def models_may_promote_as_people_do() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def logits(query, key):
    return jnp.einsum("btnh,bsnh->bnts", query, key[INDEX]) * H**-0.5


def weighted(scores, value):
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value[INDEX])


def by_user(mask):
    return mask[INDEX][:, None, None, :]


def masked_with_minus_infinity(query, key, value):
    return weighted(jnp.where(by_user(KEPT), logits(query, key), -jnp.inf), value)


def masked_the_other_way_round(query, key, value):
    return weighted(jnp.where(~by_user(KEPT), -1e9, logits(query, key)), value)


def masked_by_adding(query, key, value):
    return weighted(logits(query, key) + (1.0 - by_user(KEPT).astype(jnp.float32)) * -1e9, value)


def masked_by_adding_what_is_looked_up(query, key, value):
    bias = jnp.where(KEPT, 0.0, -1e9)
    return weighted(logits(query, key) + bias[INDEX][:, None, None, :], value)


def masked_by_adding_a_little(query, key, value):
    return weighted(logits(query, key) + jnp.where(by_user(KEPT), 0.0, -1e4), value)


def masked_twice(query, key, value):
    scores = jnp.where(by_user(KEPT), logits(query, key), -1e9)
    return weighted(jnp.where(by_user(jnp.arange(S) < LENGTHS[:, None]), scores, -1e9), value)


def masked_for_all_users_alike(query, key, value):
    return weighted(jnp.where(jnp.arange(S) < 5, logits(query, key), -1e9), value)


def by_lengths(query, key, value):
    mask = jnp.arange(S)[None] < LENGTHS[INDEX][:, None]
    return weighted(jnp.where(mask[:, None, None], logits(query, key), -1e30), value)


def by_lengths_the_other_way_round(query, key, value):
    mask = LENGTHS[INDEX][:, None] > jnp.arange(S)[None]
    return weighted(jnp.where(mask[:, None, None], logits(query, key), -1e30), value)


def softmax_by_hand(query, key, value):
    weights = jnp.exp(logits(query, key).astype(jnp.float32))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", weights, value[INDEX])


def in_bfloat16(query, key, value):
    half = jnp.bfloat16
    scores = logits(query.astype(half), key.astype(half)).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(half)
    return jnp.einsum("bnts,bsnh->btnh", weights, value.astype(half)[INDEX])


def several_query_heads_a_key_head(query, key, value):
    return jax.nn.dot_product_attention(query, key[INDEX][:, :, :1], value[INDEX][:, :, :1])


def under_vmap(query, key, value):
    def one(query, user):
        scores = jnp.einsum("tnh,snh->nts", query, key[user]) / H**0.5
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1), value[user])

    return jax.vmap(one)(query, INDEX)


def without_heads(query, key, value):
    scores = query[:, :, 0] @ key[:, :, 0][INDEX].swapaxes(1, 2) / jnp.sqrt(H)
    return jax.nn.softmax(scores, axis=-1) @ value[:, :, 0][INDEX]


def module_of_nnx(query, key, value):
    layer = nnx.MultiHeadAttention(
        num_heads=N, in_features=N * H, qkv_features=N * H, decode=False, rngs=nnx.Rngs(0)
    )
    tokens = key.reshape(U, S, N * H)[INDEX]
    return layer(query.reshape(B, T, N * H), tokens, mask=by_user(KEPT))


LINEN = linen.MultiHeadDotProductAttention(num_heads=N)
LINEN_PARAMS = jax.jit(LINEN.init)(
    jax.random.key(0), np.ones((1, T, N * H), np.float32), np.ones((1, S, N * H), np.float32)
)


def module_of_linen(query, key, value):
    tokens = key.reshape(U, S, N * H)[INDEX]
    return LINEN.apply(LINEN_PARAMS, query.reshape(B, T, N * H), tokens)


def of_one_user(query, key, value):
    key, value = (jnp.broadcast_to(x[:1], (B, S, N, H)) for x in (key, value))
    return jax.nn.dot_product_attention(query, key, value)


RECOGNISED = [
    of_one_user,
    masked_with_minus_infinity,
    masked_the_other_way_round,
    masked_by_adding,
    masked_by_adding_what_is_looked_up,
    masked_by_adding_a_little,
    masked_twice,
    masked_for_all_users_alike,
    by_lengths,
    by_lengths_the_other_way_round,
    softmax_by_hand,
    in_bfloat16,
    several_query_heads_a_key_head,
    under_vmap,
    without_heads,
    module_of_nnx,
    module_of_linen,
]


def masked_by_candidate(query, key, value):
    mask = (query[:, 0, 0, :1] > jnp.linspace(-1, 1, S))[:, None, None]
    return weighted(jnp.where(mask, logits(query, key), -1e9), value)


def causal(query, key, value):
    mask = jnp.arange(T)[:, None] >= jnp.arange(S)[None]
    return weighted(jnp.where(mask, logits(query, key), -1e9), value)


def with_a_bias(query, key, value):
    return weighted(logits(query, key) + key.sum((2, 3))[INDEX][:, None, None], value)


def with_a_softcap(query, key, value):
    return weighted(jnp.tanh(logits(query, key)), value)


def values_looked_up_otherwise(query, key, value):
    weights = jax.nn.softmax(logits(query, key), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value[OTHER])


def softmax_over_the_queries(query, key, value):
    weights = jax.nn.softmax(logits(query, key), axis=2)
    return jnp.einsum("bnts,bsnh->btnh", weights, value[INDEX])


def maximum_of_other_logits(query, key, value):
    scores = logits(query, key)
    weights = jnp.exp(scores - jnp.max(scores * 2, axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", weights, value[INDEX])


def masked_with_a_small_number(query, key, value):
    return weighted(jnp.where(by_user(KEPT), logits(query, key), -2.0), value)


def heads_merged_first(query, key, value):
    weights = jax.nn.softmax(logits(query, key), axis=-1).reshape(B, N * T, S)
    return jnp.einsum("bms,bsh->bmh", weights, value[INDEX].sum(2))


def rounded_scores(query, key, value):
    return weighted(logits(query, key).astype(jnp.int32).astype(jnp.float32), value)


NOT_RECOGNISED = [
    masked_by_candidate,
    causal,
    with_a_bias,
    with_a_softcap,
    values_looked_up_otherwise,
    softmax_over_the_queries,
    maximum_of_other_logits,
    masked_with_a_small_number,
    heads_merged_first,
    rounded_scores,
]


def weights_also_returned(query, key, value):
    scores = logits(query, key)
    return weighted(scores, value), scores


def report_of(fn):
    (report,) = ikbo.explain(ikbo.rewrite(fn), *ARGS).notes
    return report


#: Their originals round more, to bfloat16 and near 1e4: atol of the values.
ROUNDED = {in_bfloat16: 2e-2, masked_by_adding_a_little: 1e-3}


#: Of what is not recognised, what differs in the gradient from all others.
WITH_GRADIENT = (causal, weights_also_returned)
# Gradients of bfloat16 are rounded otherwise; minus infinity has NaN by design.
WITHOUT_GRADIENT = (
    in_bfloat16,
    masked_with_minus_infinity,
    # They become the same ops as others do whose gradients are compared.
    masked_by_adding_what_is_looked_up,
    masked_by_adding_a_little,
    masked_for_all_users_alike,
    by_lengths_the_other_way_round,
    module_of_linen,
)


def assert_agree(fns, *, without_gradient: Collection[Callable] = ()) -> None:
    """Values and gradients, of functions and of their rewrites, all in one program."""

    def of(original, fn):
        # Without a key left the original's gradient is that of logits lost in rounding; ours is 0.
        lost = original is masked_by_adding
        user = np.asarray(INDEX) != 1 if lost else np.ones(B, bool)

        def loss(*args):
            results = fn(*args)
            return sum(jnp.sum(jnp.sin(x[user])) for x in jax.tree.leaves(results)), results

        if original in without_gradient:
            return lambda *args: (None, fn(*args))
        return jax.grad(loss, (0, 1, 2), has_aux=True)

    each = jax.jit(lambda *args: [[of(fn, x)(*args) for x in (ikbo.rewrite(fn), fn)] for fn in fns])
    for fn, found in zip(fns, each(*ARGS), strict=True):
        (our_gradients, ours), (their_gradients, theirs) = found
        atol = ROUNDED.get(fn, 2e-5)
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        for x, y in pairs:
            assert (x.shape, x.dtype) == (y.shape, y.dtype), fn
            x, y = (np.asarray(z, np.float32) for z in (x, y))
            np.testing.assert_allclose(x, y, atol=atol, err_msg=fn.__name__)
        pairs = zip(jax.tree.leaves(our_gradients), jax.tree.leaves(their_gradients), strict=True)
        for x, y in pairs:
            np.testing.assert_allclose(x, y, atol=5e-5, err_msg=fn.__name__)


@some_at_once("fns", RECOGNISED, 6, lambda fn: fn.__name__)
def test_recognised(fns) -> None:
    assert_agree(fns, without_gradient=WITHOUT_GRADIENT)
    for fn in fns:
        report = report_of(fn)
        became = [text for found in report.broadcasts for text in found.became]
        assert any(text.startswith("attention, test_rewrite_attention.py") for text in became), fn
        assert report.materialised == (), fn


@some_at_once("fns", [*NOT_RECOGNISED, weights_also_returned], 6, lambda fn: fn.__name__)
def test_not_recognised_and_right_and_the_report_says_why(fns) -> None:
    assert_agree(fns, without_gradient=[fn for fn in fns if fn not in WITH_GRADIENT])
    for fn in fns:
        places = report_of(fn).materialised
        assert any(f"float32[{B},{S},{N},{H}]" in place.what for place in places), fn
        reasons = [place.reason for place in places]
        is_named = any("attention is not recognised: " in reason for reason in reasons)
        assert is_named or fn is weights_also_returned, (fn, reasons)


@pytest.mark.parametrize(
    ("fn", "sorts"),
    [(by_lengths, 0), (by_lengths_the_other_way_round, 0), (masked_the_other_way_round, 1)],
)
def test_keys_are_put_in_order_only_if_the_mask_is_no_length(fn, sorts: int) -> None:
    text = str(jax.make_jaxpr(ikbo.rewrite(fn))(*ARGS))
    of_the_op = str(jax.make_jaxpr(ikbo.attention)(*ARGS, INDEX)).count(" sort[")
    assert of_the_op == 1  # of the candidates, by user
    assert text.count(" sort[") == sorts + of_the_op


def test_rows_out_of_bounds_are_nan() -> None:
    outside = np.array(INDEX)
    outside[[3, 5]] = U + 2, -U - 1

    def fn(query, key, value):
        keys, values = (jnp.take(x, outside, axis=0) for x in (key, value))
        return jax.nn.dot_product_attention(query, keys, values)

    assert_agree([fn], without_gradient=[fn])
    assert np.isnan(jax.jit(fn)(*ARGS)[3]).all()
    assert any("attention" in text for found in report_of(fn).broadcasts for text in found.became)
