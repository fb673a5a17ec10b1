"""Arguments, indices out of bounds in forward mode, checks, and sharding constraints."""

from __future__ import annotations

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
