"""What layers share while a program is rewritten is not shared by others that only look alike."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import layout_sequences
import numpy as np
import pytest
from layout_table import S, arrays
from rewrite_basics import ARGS, D, close, report_of

import ikbo_jax as ikbo


def with_slope(slope: float) -> Any:
    """A function with another derivative than its own."""

    @jax.custom_jvp
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    @double.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return double(*primals), tangents[0] * slope

    return double


def with_argument() -> Any:
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def double(x: jax.Array, slope: float) -> jax.Array:
        del slope
        return x * 2

    @double.defjvp
    def derivative(slope: float, primals: Any, tangents: Any) -> Any:
        return double(*primals, slope), tangents[0] * slope

    return lambda slope: lambda x: double(x, slope)


def same(ours: Any, theirs: Any) -> None:
    """Equal up to rounding of the largest element: elements are sums in which terms cancel."""
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("make", [with_slope, with_argument()])
def test_functions_with_other_derivatives(make: Any) -> None:
    three, five = make(3.0), make(5.0)

    def fn(w, user, cand, index):
        users = five(three(three(user[index] @ w[:D])))
        return jnp.sum((users * five(cand @ w[D:])) ** 2)

    assert "work at the smaller batch" in str(report_of(fn, *ARGS).broadcasts[0].became)
    first = jax.jit(lambda *args: [jax.grad(f, (0, 1, 2))(*args) for f in (ikbo.rewrite(fn), fn)])
    same(*first(*ARGS))

    def second(f):
        return jax.jacfwd(jax.grad(f, 1), 1)

    same(*jax.jit(lambda *args: [second(f)(*args) for f in (ikbo.rewrite(fn), fn)])(*ARGS))


def test_one_function_on_two_lookups_and_other_shapes() -> None:
    def fn(w, user, cand, index):
        more = jnp.concatenate([user, 2 * user])
        users, others = jax.nn.relu(user[index] @ w[:D]), jax.nn.relu(more[index[::-1]] @ w[:D])
        wide = jax.nn.relu(user[index] @ jnp.concatenate([w[:D], w[:D] / 2], axis=1))
        return jnp.sum((users + others * 2) ** 2) + jnp.sum(wide**2)

    run = jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (ikbo.rewrite(fn), fn)])
    close(*run(*ARGS))


def test_layers_with_different_masks() -> None:
    length = S + 1
    causal = np.tril(np.ones((length, length), bool))
    window = causal & ~np.tril(np.ones((length, length), bool), -3)
    given = arrays()

    def fn(blocks, long, token, index):
        x = jnp.concatenate([long[index], token[:, None]], axis=1)
        for block, mask in zip(blocks * 2, (causal, window, window, causal), strict=True):
            attend = functools.partial(
                layout_sequences._softmax_attention, mask=jnp.asarray(mask)[None, None]
            )
            x = layout_sequences._block(block, x, attend)
        return x[:, -1]

    args = given["blocks2"], given["long"], given["token"], given["index"]
    assert "attention with own tokens" in str(report_of(fn, *args).broadcasts[0].became)
    ours, theirs = jax.jit(lambda *args: (ikbo.rewrite(fn)(*args), fn(*args)))(*args)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
