"""Programs whose equations must run as often, and where, as the original says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from rewrite_basics import A, B, D, report_of, same

import ikbo_jax as ikbo

USER, INDEX = A.user, A.index
CAND, W = jnp.cos(A.user[A.index]), A.w[:D, :D]


def test_random_bits_of_one_key_in_two_ways() -> None:
    def fn(key, user, index):
        with jax.threefry_partitionable(False):
            first = jax.random.bits(key, (B, D))
        with jax.threefry_partitionable(True):
            second = jax.random.bits(key, (B, D))
        return first, second, jnp.sin(user[index])

    same(fn, jax.random.key(0), USER, INDEX)


def test_numbers_drawn_without_a_key() -> None:
    def fn(user, index):
        draw = jax.jit(lambda: lax.rng_uniform(0, 1000, (B, D)))
        return draw(), draw(), jnp.sin(user[index])

    first, second, x = jax.jit(ikbo.rewrite(fn))(USER, INDEX)
    assert (first != second).any()
    np.testing.assert_allclose(x, jnp.sin(USER[INDEX]), rtol=1e-6)
    report = report_of(fn, USER, INDEX)
    assert "without a key" in report.reason
    assert "without a key" in str(report)


def test_a_while_loop_of_every_row() -> None:
    def grown(x):
        step = lambda state: (jnp.tanh(state[0] @ W) + x, state[1] + 1)  # noqa: E731
        return lax.while_loop(lambda state: state[1] < 3 + x[0], step, (x, 0))[0]

    def looped(user, cand, index):
        return lax.map(lambda args: grown(user[args[0]]) * args[1], (index, cand))

    for fn in (lambda user, cand, index: jax.vmap(grown)(jnp.tanh(user[index])) * cand, looped):
        report = same(fn, USER, CAND, INDEX)
        assert "raised" not in str(report)
    endless = jnp.concatenate([USER, jnp.full((1, D), -jnp.inf)])

    def halved(user, cand, index):
        is_large = lambda x: jnp.abs(x).max() > 1e-3  # noqa: E731
        return jax.vmap(lambda x: lax.while_loop(is_large, lambda x: x / 2, x))(user[index]) * cand

    same(halved, endless, CAND, INDEX)


def test_only_a_platform_itself_lowers_its_branch() -> None:
    kernel = pl.pallas_call(lambda x, y: None, out_shape=jax.ShapeDtypeStruct((B, D), "float32"))

    def lowered(user, cand, index):
        x = jnp.tanh(user[index])
        return cand * lax.platform_dependent(x, cuda=kernel, default=lambda x: jnp.sin(x) @ W)

    def differentiated(user, cand, index):
        x = jnp.tanh(user[index])
        y = lax.platform_dependent(x, cuda=jnp.cos, default=lambda x: jnp.sin(x) @ W)
        return lax.platform_dependent(y, cand, cuda=jnp.add, default=jnp.multiply)

    assert same(lowered, USER, CAND, INDEX).changed
    by = [lambda *a, f=f: f(*a).sum() for f in (differentiated, ikbo.rewrite(differentiated))]
    theirs, ours = (jax.jit(jax.grad(f))(USER, CAND, INDEX) for f in by)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_function_that_wraps_one_under_jit_keeps_its_own_work() -> None:
    scored = jax.jit(lambda user, index: jnp.sin(user[index]))

    @functools.wraps(scored)
    def doubled(user, index):
        return 2 * scored(user, index)

    class Scorer:
        @functools.wraps(scored)
        def score(self, user, index):
            return doubled(user, index)

    for fn in (doubled, Scorer().score):
        np.testing.assert_allclose(ikbo.rewrite(fn)(USER, INDEX), fn(USER, INDEX), rtol=1e-6)
