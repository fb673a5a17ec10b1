"""Gradients of programs with float32 parameters that compute in another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookalikes import mixed
from rounding_rule import assert_same

import ikbo_jax as ikbo

BF16, F16 = jnp.bfloat16, jnp.float16
U, D = 2, 8
#: `mixed`'s names; h is a history.
PROGRAMS = {
    "cast": "x = u.astype(f32)[i] * c; x = F(x)",
    "gate": "x = F(u[i]) * nn.sigmoid(F(c))",
    "sum and layer": "x = nn.relu((F(u[i]) + F(c)) @ F(w))",
    "concatenated and squared": "x = jnp.square(jnp.concatenate([F(u)[i], F(c)], 1)) @ F(w2)",
    "product": "x = jnp.einsum('bd,bd,de->be', F(u[i]), F(c), F(w))",
    "layer of the user": "x = nn.relu(F(u[i]) @ F(w)) * F(c)",
    "norm": "x = F(u[i]); x = x * F(lax.rsqrt(jnp.square(x.astype(f32)).mean(-1, keepdims=True)))",
    "sigmoid attention": "h = F((u[:, None] * w2)[i]); x = jnp.einsum('bsd,bd->bs', h, F(c)); "
    "x = jnp.einsum('bs,bsd->bd', nn.sigmoid(x), h)",
    "pooled": "h = F((u[:, None] * w2)[i]); x = h.mean(1) * F(c)",
    "pooled by a candidate": "h = F((u[:, None] * w2)[i]); x = (h * F(c)[:, None]).sum(1)",
    "row beside a matrix": "x = F(u[i])[:, None] * F(w2) * F(c)[:, None]; x = x.sum(1)",
    "checkpoint": "x = jax.checkpoint(lambda x, c: jnp.tanh(x @ F(w)) * c)(F(u[i]), F(c))",
    "scan": "x = lax.scan(lambda x, c: (jnp.tanh(x + c @ F(w)), None), F(u[i]), F(c)[None])[0]",
}


@pytest.mark.parametrize(
    ("dtype", "scale", "candidates"),
    [
        *(("bfloat16", 1.0, n) for n in (1, 4096)),
        ("float16", 1024.0, 256),
        ("float8_e4m3fn", 1024.0, 256),
    ],
)
def test_the_rounding_rule(dtype, scale, candidates):
    """Values and gradients, compiled: NumPy rounds a sum once, but XLA adds in bfloat16."""
    cases = []
    for name, text in PROGRAMS.items():
        lines = text.split("; ")
        if dtype.startswith("float8"):
            # Products of operands in float8 are in float32.
            lines.insert(0, "narrow, F = F, lambda x: narrow(x).astype(f32)")
        lines.append("out = s * jnp.logaddexp(0, x.astype(f32).sum(-1)).mean()")
        cases.append(mixed("\n".join(lines), dtype, candidates, scale, "reverse", f"{name}, "))
    assert_same(cases, compiled=True)


@pytest.mark.parametrize(
    ("dtype", "scale", "count"), [(F16, 1024.0, 200), (jnp.float8_e4m3fn, 384.0, 200)]
)
def test_a_sum_beyond_the_dtype_is_finite(dtype, scale, count):
    """Every candidate's gradient is finite."""
    index = jnp.zeros(count, jnp.int32)
    user, cand = jnp.full((U, D), 0.5), jnp.ones((count, D))

    def loss(user):
        gated = user[index].astype(dtype).astype(F16) * cand.astype(F16)
        return (gated.astype(jnp.float32) * scale).sum()

    found, expected = jax.grad(ikbo.rewrite(loss))(user), jax.grad(loss)(user)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_gradients_of_looked_up_float8_rows_are_summed_in_float32() -> None:
    """In float8, a sum of sixteenths ends at 1. The tower is what the rewrite gains."""
    index, cand = jnp.zeros(512, jnp.int32), jnp.full((512, D), 1 / 16)

    def loss(user, w):
        tower = jnp.tanh(user[index] @ w) * 0
        kept = user.astype(jnp.float8_e4m3fn)[index] * cand.astype(jnp.float8_e4m3fn)
        return (tower + kept.astype(jnp.float32)).sum()

    args = jnp.ones((U, D)), jnp.eye(D)
    (report,) = ikbo.explain(ikbo.rewrite(loss), *args).notes
    assert report.changed
    found = jax.jit(jax.grad(ikbo.rewrite(loss)))(*args)
    np.testing.assert_array_equal(found, [[32] * D, [0] * D])


def test_fields_by_transposed_weights_run_on_a_cpu() -> None:
    """XLA has no kernel there for 16-bit products with a float32 result in this order."""
    rng = np.random.default_rng(0)
    w, user, cand = (
        jnp.asarray(rng.normal(size=x), BF16) for x in ((5, 6), (U, 3, 4, D), (64, 2, 4, D))
    )
    index = jnp.arange(64, dtype=jnp.int32) % U

    def fn(w, user, cand):
        return jnp.einsum("fk,bfde->kbde", w, jnp.concatenate([user[index], cand], axis=1))

    (report,) = ikbo.explain(ikbo.rewrite(fn), w, user, cand).notes
    assert report.changed
    assert "product by parts" in report.details
    found = jax.jit(ikbo.rewrite(fn))(w, user, cand)
    exact = fn(*(x.astype(jnp.float32) for x in (w, user, cand)))
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0.01, atol=0.02)
