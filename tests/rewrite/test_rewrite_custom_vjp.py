"""Functions with their own backward pass: at user batch if it is linear and works row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import rewrite_basics
from rewrite_basics import check_values_and_gradients, report_of, share_saved

import ikbo_jax as ikbo
from ikbo_jax.rewrite.values import linear

B, U, S, D = 48, 6, 8, 16
_, USER, CAND, W, INDEX = problems.vectors(U, B, D)
F8 = jnp.float8_e5m2


def with_backward(fn, backward, forward=None):
    made = jax.custom_vjp(fn)
    made.defvjp(forward or (lambda x: (fn(x), x)), backward)
    return made


def same(x):
    return x * 1.0


def norm(x):
    return jnp.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, factor):
    return x * 1.0


scaled.defvjp(lambda x, _: (x * 1.0, None), lambda factor, _, g: (g * factor,))
times = jax.custom_vjp(lambda x, y: x * y)
times.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (g * r[1], 2 * g * r[0]))
product = jax.custom_vjp(lambda x, w: x @ w)
product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, 3 * r[0].T @ g))


#: Functions of rows whose backward pass is linear and works row by row.
LINEAR = {
    "doubled": with_backward(jnp.sin, lambda x, g: (2 * g * jnp.cos(x),)),
    "reversed": with_backward(same, lambda x, g: (-0.5 * g,)),
    "straight through": with_backward(lambda x: jnp.round(x), lambda x, g: (g,)),
    "where": with_backward(jnp.sign, lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0.0),)),
    "stopped": with_backward(same, lambda x, g: (jnp.zeros_like(x),)),
    "norm": with_backward(
        lambda x: x / norm(x),
        lambda x, g: ((g - (g * x).sum(axis=-1, keepdims=True) * x) / norm(x),),
    ),
    "moved": with_backward(same, lambda x, g: ((g.T * 2).T.reshape(B, 4, 4).reshape(B, D),)),
    "product": with_backward(
        lambda x: jnp.tanh(x @ W), lambda x, g: ((g * (1 - jnp.tanh(x @ W) ** 2)) @ W.T,)
    ),
    # The forward pass returns another value than the function.
    "other forward pass": with_backward(jnp.sin, lambda x, g: (g,), lambda x: (jnp.cos(x), x)),
    "a factor that is no array of the program": lambda x: scaled(x, 0.3),
    "two values of one lookup": lambda x: times(x, jnp.sin(x)),
    "of a statistic": with_backward(same, lambda x, g: (g * (x * x).mean(axis=0, keepdims=True),)),
}
#: Functions whose backward pass at user batch would be another one.
REFUSED = {
    "clipped": lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),),
    "normalised": lambda x, g: (g / norm(g),),
    "affine": lambda x, g: (g + 1.0,),
    "constant": lambda x, g: (jnp.ones_like(x),),
    "squared": lambda x, g: (g * g,),
    "rounded": lambda x, g: (jnp.round(g * 8) / 8,),
    "of its sign": lambda x, g: (jnp.where(g > 0, x, 0.0),),
    "centred over the batch": lambda x, g: (g - g.mean(axis=0, keepdims=True),),
    "summed over the batch": lambda x, g: (0.5 * jnp.broadcast_to(g.sum(0), g.shape),),
    "by position": lambda x, g: (g * jnp.arange(B, dtype=g.dtype)[:, None],),
    "other order": lambda x, g: (g[::-1],),
    "running sum": lambda x, g: (jnp.cumsum(g, axis=0),),
    "mixed rows": lambda x, g: (g.reshape(D, B).T,),
    # Linear within the range of a dtype.
    "float8": lambda x, g: (g.astype(jnp.float8_e4m3fn).astype(g.dtype),),
    "float8, under jit": lambda x, g: (jax.jit(lambda g: g.astype(F8).astype(g.dtype))(g),),
    "float16": lambda x, g: (g.astype(jnp.float16).astype(g.dtype),),
    "float16 after bfloat16": lambda x, g: (
        g.astype(jnp.bfloat16).astype(jnp.float16).astype(g.dtype),
    ),
    "float16 by a product": lambda x, g: (
        jnp.matmul(g, W, preferred_element_type=jnp.float16).astype(g.dtype),
    ),
}


def model(fn):
    return lambda user, cand, w: jnp.tanh(fn(user[INDEX] @ w) @ w) * cand


def check(fn, *args):
    """Compares values and gradients; returns the report."""
    check_values_and_gradients(fn, *args)
    return report_of(fn, *args)


@pytest.mark.parametrize("name", LINEAR)
def test_runs_at_user_batch(name):
    report = check(model(LINEAR[name]), USER, CAND, W)
    assert not report.materialised or name == "of a statistic", report
    assert share_saved(model(LINEAR[name]), USER, CAND, W) >= (B - U) / B


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fn = model(with_backward(jnp.sin, REFUSED[name]))
    report = check(fn, USER, CAND, W)
    assert "custom_vjp whose backward pass is not linear, or mixes rows" in str(report)
    assert share_saved(fn, USER, CAND, W) == (B - U) / B / 2


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float16])
def test_a_sum_of_gradients_beyond_a_dtype_that_the_backward_pass_casts_to(dtype):
    cast = with_backward(same, lambda x, g: (g.astype(dtype).astype(g.dtype),))
    index = jnp.arange(400) % 2
    large = {jnp.float8_e4m3fn: 300.0, jnp.float16: 5e4}[dtype]
    for size in (large, 1e-8):

        def loss(user, cand, size=size):
            return (cast(jnp.sin(user)[index]) * cand * size).sum()

        args = jnp.zeros((2, 3)), jnp.ones((400, 3))
        ours, theirs = (jax.grad(fn)(*args) for fn in (ikbo.rewrite(loss), loss))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_products_whose_algorithm_may_cast():
    def product(precision):
        return jax.make_jaxpr(lambda g, w: jax.lax.dot(g, w, precision=precision))(USER, W)

    presets = jax.lax.DotAlgorithmPreset
    found = [
        linear.is_linear_by_row(product(precision), [0, None], [0])
        for precision in ("highest", presets.F16_F16_F32, presets.ANY_F8_ANY_F8_F32)
    ]
    assert found == [True, False, False]


def test_casts_that_keep_the_range():
    """bfloat16 has float32's exponents."""
    fn = with_backward(same, lambda x, g: (2 * g.astype(jnp.bfloat16).astype(g.dtype),))
    assert not report_of(model(fn), USER, CAND, W).materialised


def test_several_results():
    fn = jax.custom_vjp(lambda x: (jnp.sin(x), x.sum(axis=-1)))
    fn.defvjp(lambda x: (fn(x), x), lambda x, g: (g[0] * jnp.cos(x) + g[1][:, None],))

    def scores(user, cand, w):
        rows, sums = fn(user[INDEX])
        return rows @ w * cand + sums[:, None]

    assert not check(scores, USER, CAND, W).materialised


def test_a_gradient_that_mixes_a_broadcast_axis():
    # Every position of the broadcast axis gets the first position's gradient.
    fn = with_backward(same, lambda x, g: (jnp.broadcast_to(g[:, :1], g.shape),))
    weights = jnp.arange(1.0, S + 1)[None, :, None]

    def scores(user, cand):
        rows = jnp.broadcast_to(user[INDEX][:, None], (B, S, D))
        return (fn(rows) * weights).sum(axis=1) * cand

    check(scores, USER, CAND)


@pytest.mark.parametrize(
    "fn", [lambda x, cand, w: product(jnp.tanh(x), w) * cand, lambda x, cand, w: times(x, cand)]
)
def test_operands_that_are_not_looked_up_are_refused(fn):
    report = check(lambda user, cand, w: fn(user[INDEX] @ w, cand, w), USER, CAND, W)
    assert "custom_vjp with operands that are not looked up, such as weights" in str(report)


def test_second_derivative():
    def second(fn):
        return jax.grad(lambda user: (jax.grad(fn)(user) ** 2).sum())

    rewrite_basics.check(second, lambda user: model(LINEAR["doubled"])(user, CAND, W).sum(), USER)


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_effects_of_a_function_are_not_repeated(kind):
    calls = []

    def traced(x):
        jax.debug.callback(lambda _: calls.append(1), x.sum())
        return jnp.sin(x)

    if kind == "custom_vjp":
        fn = with_backward(traced, lambda x, g: (g * jnp.cos(x),))
    else:
        fn = jax.custom_jvp(traced)
        fn.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] * jnp.cos(x[0])))
    jax.block_until_ready(jax.jit(ikbo.rewrite(model(fn)))(USER, CAND, W))
    jax.effects_barrier()
    assert len(calls) == 1
    assert f"{kind} with effects" in str(report_of(model(fn), USER, CAND, W))
