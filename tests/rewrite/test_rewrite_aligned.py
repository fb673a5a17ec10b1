"""Linear compression whose K is padded with zeros to a size that tensor cores like."""

import jax
import jax.numpy as jnp
import pytest
from rewrite_basics import became, both, close, embeddings

import ikbo_jax as ikbo

W, E_USER, E_CAND, INDEX = embeddings()
K_USER = E_USER.shape[1]
PADDING = -W.shape[1] % 8


def zeros(x, axis):
    shape = list(x.shape)
    shape[axis] = PADDING
    return jnp.zeros(shape, x.dtype)


def product(w, x):
    return jnp.einsum("mk,bkn->bmn", w, x)


def concatenated(w, e_user, e_cand):
    w_user, w_cand = w[:, :K_USER], w[:, K_USER:]
    weights = jnp.concatenate([w_user, w_cand, zeros(w, 1)], axis=1)
    return product(weights, jnp.concatenate([e_user[INDEX], e_cand, zeros(e_cand, 1)], axis=1))


def weight_concatenated_whole(w, e_user, e_cand):
    weights = jnp.concatenate([w, zeros(w, 1)], axis=1)
    return product(weights, jnp.concatenate([e_user[INDEX], e_cand, zeros(e_cand, 1)], axis=1))


def in_front(w, e_user, e_cand):
    weights = jnp.concatenate([zeros(w, 1), w[:, :K_USER], w[:, K_USER:]], axis=1)
    return product(weights, jnp.concatenate([zeros(e_cand, 1), e_user[INDEX], e_cand], axis=1))


def padded(w, e_user, e_cand):
    x = jnp.concatenate([e_user[INDEX], e_cand], axis=1)
    return product(jnp.pad(w, ((0, 0), (0, PADDING))), jnp.pad(x, ((0, 0), (0, PADDING), (0, 0))))


def padded_first(w, e_user, e_cand):
    """Each side is padded by itself."""
    parts = [jnp.pad(x, ((0, 0), (0, 2), (0, 0))) for x in (e_user[INDEX], e_cand)]
    weights = [jnp.pad(x, ((0, 0), (0, 2))) for x in (w[:, :K_USER], w[:, K_USER:])]
    return product(jnp.concatenate(weights, axis=1), jnp.concatenate(parts, axis=1))


def only_the_embeddings_are_zero(w, e_user, e_cand):
    """The padding of the weight may be NaN, which the product keeps, beside another padding."""
    weights = jnp.concatenate([w, w[:, :PADDING] * jnp.nan, zeros(w, 1)], axis=1)
    padding = [zeros(e_cand, 1)] * 2
    return product(weights, jnp.concatenate([e_user[INDEX], e_cand, *padding], axis=1))


@pytest.mark.parametrize(
    "fn", [concatenated, weight_concatenated_whole, in_front, padded, padded_first]
)
def test_it_becomes_linear_compression(fn) -> None:
    args = W, E_USER, E_CAND
    assert "linear_compression" in became(fn, *args)
    for differentiated in (fn, jax.grad(lambda *x: jnp.sum(jnp.sin(fn(*x))), argnums=(0, 1, 2))):
        close(*both(differentiated, *args))


def test_padding_of_one_side_stays() -> None:
    out = ikbo.rewrite(only_the_embeddings_are_zero)(W, E_USER, E_CAND)
    assert bool(jnp.isnan(out).all())
