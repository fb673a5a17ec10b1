"""Linear compression whose K is padded with zeros to a size that tensor cores like."""

import functools

import jax
import jax.numpy as jnp
import pytest
from rewrite_basics import became, both, close, embeddings

import ikbo_jax as ikbo

W, E_USER, E_CAND, INDEX = embeddings()
K_USER = E_USER.shape[1]
PADDING = -W.shape[1] % 8
joined = functools.partial(jnp.concatenate, axis=1)


def zeros(x):
    return jnp.zeros((len(x), PADDING, *x.shape[2:]), x.dtype)


def product(w, x):
    return jnp.einsum("mk,bkn->bmn", w, x)


def pad(x, count):
    return jnp.pad(x, ((0, 0), (0, count), (0, 0))[: x.ndim])


#: The padded weight and the padded rows, of a weight and of rows of users and candidates.
PADDED = {
    "concatenated": lambda w, u, c: (
        joined([w[:, :K_USER], w[:, K_USER:], zeros(w)]),
        joined([u, c, zeros(c)]),
    ),
    "weight_concatenated_whole": lambda w, u, c: (joined([w, zeros(w)]), joined([u, c, zeros(c)])),
    "in_front": lambda w, u, c: (
        joined([zeros(w), w[:, :K_USER], w[:, K_USER:]]),
        joined([zeros(c), u, c]),
    ),
    "padded": lambda w, u, c: (pad(w, PADDING), pad(joined([u, c]), PADDING)),
    # Each side is padded by itself.
    "padded_first": lambda w, u, c: (
        joined([pad(x, 2) for x in (w[:, :K_USER], w[:, K_USER:])]),
        joined([pad(x, 2) for x in (u, c)]),
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_it_becomes_linear_compression(name) -> None:
    def fn(w, e_user, e_cand):
        return product(*PADDED[name](w, e_user[INDEX], e_cand))

    args = W, E_USER, E_CAND
    assert "linear_compression" in became(fn, *args)
    for differentiated in (fn, jax.grad(lambda *x: jnp.sum(jnp.sin(fn(*x))), argnums=(0, 1, 2))):
        close(*both(differentiated, *args))


def test_padding_of_one_side_stays() -> None:
    """The padding of the weight may be NaN, which the product keeps, beside another padding."""

    def fn(w, e_user, e_cand):
        weights = joined([w, w[:, :PADDING] * jnp.nan, zeros(w)])
        return product(weights, joined([e_user[INDEX], e_cand, zeros(e_cand), zeros(e_cand)]))

    assert jnp.isnan(ikbo.rewrite(fn)(W, E_USER, E_CAND)).all()
