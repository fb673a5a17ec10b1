"""Arguments, indices out of bounds in forward mode, checks, and sharding constraints."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import ikbo_jax as ikbo

B, U, D = 16, 3, 8
RNG = np.random.default_rng(0)
USER = problems.random_array(RNG, (U, D), "float32")
CAND = problems.random_array(RNG, (B, D), "float32")
W = problems.random_array(RNG, (D, D), "float32")
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))


# Arguments.


@pytest.mark.parametrize("what", [None, 3, [jnp.sin]])
def test_what_is_no_function_is_refused_at_once(what):
    with pytest.raises(TypeError, match="fn must be a function, but is (None|3|.<)"):
        ikbo.rewrite(what)


def layers(user, count, flag, scale):
    """Needs the values of its last three arguments while it is traced."""
    x = user[INDEX]
    for _ in range(count):
        x = jnp.tanh(x @ W)
    return {"x": x * CAND * scale if flag and scale > 1 else x, "count": count}


SCALARS = (np.int64(2), np.bool_(True), np.float32(1.5))


def test_numpy_scalars_are_passed_as_they_are():
    ours, theirs = ikbo.rewrite(layers)(USER, *SCALARS), layers(USER, *SCALARS)
    np.testing.assert_allclose(ours["x"], theirs["x"], rtol=1e-5)
    assert type(ours["count"]) is np.int64
    ours, theirs = (
        jax.grad(lambda u, fn=fn: fn(u, *SCALARS)["x"].sum())(USER)
        for fn in (ikbo.rewrite(layers), layers)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    (report,) = ikbo.explain(ikbo.rewrite(layers), USER, *SCALARS).notes
    assert report.flops_saved > 0


def test_static_numpy_scalars_of_a_jitted_function():
    jitted = jax.jit(layers, static_argnums=(1, 2), static_argnames="scale")
    ours = ikbo.rewrite(jitted)(USER, *SCALARS[:2], scale=SCALARS[2])["x"]
    np.testing.assert_allclose(ours, layers(USER, *SCALARS)["x"], rtol=1e-5)


def test_numpy_scalars_have_a_derivative_and_arrays_of_rank_0_are_traced():
    def scaled(user, scale):
        seen.append(type(scale))
        return (user[INDEX] @ W * CAND * scale).sum()

    seen = []
    ours, theirs = (jax.grad(f, 1)(USER, np.float32(2)) for f in (ikbo.rewrite(scaled), scaled))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ikbo.rewrite(scaled)(USER, np.array(2, np.float32))
    assert issubclass(seen[-1], jax.core.Tracer)


# Indices out of bounds, in forward mode.

OUTSIDE = jnp.array([0, 3, 1, 1, -4])
MODES: dict[str, dict] = {
    "default": {},
    "no wrap": {"wrap_negative_indices": False},
    "clip": {"mode": "clip"},
    "fill": {"mode": "fill", "fill_value": 2.0},
    "drop": {"mode": "drop", "wrap_negative_indices": False},
}
#: Functions of the users' rows [U, D].
OF_ROWS = {
    "rows": lambda u, how: jnp.sin(u.at[OUTSIDE].get(**how)).sum(axis=1),
    "rows of rows": lambda u, how: jnp.sin(
        u[INDEX[:5]].at[jnp.array([5, 0, -6, 4, 0])].get(**how)
    ).sum(axis=1),
    "pairs": lambda u, how: u.at[OUTSIDE, jnp.array([1, 9, 0, 1, 2])[OUTSIDE]].get(**how),
    "beside rows in bounds": lambda u, how: (
        jnp.tanh(u.at[OUTSIDE].get(**how) @ W) * u.at[OUTSIDE].get(mode="clip")
    ).sum(axis=1),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_derivatives_of_indices_out_of_bounds_are_jaxs(name):
    tangent = jnp.arange(1.0, 1 + USER.size).reshape(USER.shape)

    @jax.jit
    def of_all(user):
        def derivatives(fn):
            value, pushed = jax.jvp(fn, (user,), (tangent,))
            back = jax.vjp(fn, user)[1](jnp.arange(1.0, 6))[0]
            # The gradient of a directional derivative, and the derivative of a gradient.
            mixed = jax.grad(lambda u: jax.jvp(fn, (u,), (tangent,))[1].sum())(user)
            again = jax.jvp(jax.grad(lambda u: jnp.sin(fn(u)).sum()), (user,), (tangent,))[1]
            many = jax.vmap(lambda t: jax.linearize(fn, user)[1](t))(jnp.stack([tangent, user]))
            return value, pushed, back, mixed, again, many

        return {
            mode: [derivatives(f) for f in (ikbo.rewrite(fn), fn)]
            for mode, how in MODES.items()
            for fn in [functools.partial(OF_ROWS[name], how=how)]
        }

    for mode, (ours, theirs) in of_all(USER).items():
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=mode)
