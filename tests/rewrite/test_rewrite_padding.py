"""Padded histories and biases of attention, in programs that hold little else."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import check_values_and_gradients, largest_outside_ops, report_of

import ikbo_jax as ikbo

B, U, S, N, H = 256, 8, 16, 4, 8
D = N * H
RNG = np.random.default_rng(0)
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
LENGTHS = jnp.asarray(RNG.integers(0, S + 1, U), jnp.int32).at[0].set(0)
POSITIONS = jnp.arange(S)[None]


def random(*shape):
    return problems.random_array(RNG, shape, "float32") / 2


CAND, HISTORY = random(B, D), random(U, S, D)
W_KEY, W_VALUE = random(D, D) / 4, random(D, D) / 4


def pooled(cand, history, mask):
    logits = jnp.einsum("bd,bsd->bs", cand, history[INDEX]) / 8
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(mask(logits), axis=-1), history[INDEX])


def mask_of_candidates():
    return LENGTHS[INDEX][:, None] > POSITIONS


def mask_of_users():
    return (LENGTHS[:, None] > POSITIONS)[INDEX]


def floats():
    return (LENGTHS[:, None] > POSITIONS).astype(jnp.float32)[INDEX]


MASKS = {
    "where -1e9": lambda x: jnp.where(mask_of_candidates(), x, -1e9),
    "where -inf": lambda x: jnp.where(mask_of_users(), x, -jnp.inf),
    "where min": lambda x: jnp.where(mask_of_users(), x, jnp.finfo(x.dtype).min),
    "added -1e9": lambda x: x + jnp.where(mask_of_candidates(), 0.0, -1e9),
    "added -1e9 at user batch": lambda x: (
        x + jnp.where(LENGTHS[:, None] > POSITIONS, 0, -1e9)[INDEX]
    ),
    "added min": lambda x: x + jnp.where(mask_of_users(), 0, jnp.finfo(x.dtype).min),
    "(1 - mask) * -1e9": lambda x: x + (1.0 - floats()) * -1e9,
}


@pytest.mark.parametrize("name", MASKS)
def test_padding_attends_by_the_op(name):
    def fn(cand, history):
        return pooled(cand, history, MASKS[name])

    check_values_and_gradients(fn, CAND, HISTORY)
    report = report_of(fn, CAND, HISTORY)
    assert report.changed, report
    assert largest_outside_ops(fn, CAND, HISTORY) < B * S * D
    assert f"attention: B={B} U={U}" in str(ikbo.explain(ikbo.rewrite(fn), CAND, HISTORY))


def with_bias(bias, mask=None):
    def fn(cand, history, w_key, w_value):
        heads = (B, S, N, H)
        key, value = ((history[INDEX] @ w).reshape(heads) for w in (w_key, w_value))
        query = cand.reshape(B, 1, N, H)
        return jax.nn.dot_product_attention(query, key, value, bias=bias(), mask=mask and mask())

    return fn


PER_USER, PER_HEAD = random(U, N, 1, S), random(N, 1, S)
BIASES = {
    "positions": (lambda: PER_HEAD[0, 0][None, None, None], None),
    "heads": (lambda: PER_HEAD[None], None),
    "users": (lambda: PER_USER[INDEX], None),
    "users and a mask": (lambda: PER_USER[INDEX], lambda: mask_of_users()[:, None, None]),
}


@pytest.mark.parametrize("name", BIASES)
def test_biased_attention_is_at_user_batch(name):
    fn = with_bias(*BIASES[name])
    args = CAND, HISTORY, W_KEY, W_VALUE
    check_values_and_gradients(fn, *args)
    report = report_of(fn, *args)
    assert report.changed
    # Of masked keys, the mean of the values is a product of its own, for users.
    projections, mean = 2 * 2 * B * S * D * D, 2 * U * S * D if "mask" in name else 0
    assert report.flops_saved == projections * (B - U) // B - mean
    assert f"attention: B={B}" in str(ikbo.explain(ikbo.rewrite(fn), *args))
