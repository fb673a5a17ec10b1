"""The variants of a rewritten program, for values and for derivatives; dead equations.

`test_rewrite_compositions` compares their values and derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import lax
from rewrite_basics import add_rule_whose_fast_form_has_another_derivative, close, loss

import ikbo_jax as ikbo

B, U, D = 12, 3, 5
_, USER, CAND, W, INDEX = problems.vectors(U, B, D)


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[bool]:
    return add_rule_whose_fast_form_has_another_derivative(monkeypatch)


def activation(x):
    return jnp.atan(x) @ W


def model(user, cand, index):
    return jnp.sum(jnp.tanh(activation(user[index]) * cand), axis=1)


def test_each_variant_is_traced_where_it_is_needed(calls: list[bool]) -> None:
    rewritten = ikbo.rewrite(model)
    jax.make_jaxpr(rewritten)(USER, CAND, INDEX)
    assert calls == [False]
    calls.clear()
    jax.make_jaxpr(jax.grad(loss(rewritten)))(USER, CAND, INDEX)
    assert calls == [False, True]


def test_a_program_without_such_a_rule_stays_flat() -> None:
    def fn(user):
        return jnp.tanh(jnp.repeat(user, 4, axis=0)) @ W

    text = str(jax.make_jaxpr(ikbo.rewrite(fn))(USER))
    assert "ikbo_rewritten" not in text
    assert "ikbo_rewritten" in str(jax.make_jaxpr(ikbo.rewrite(model))(USER, CAND, INDEX))


def test_integers_flags_and_keys_pass_through() -> None:
    def fn(user, cand, index, flag, key):
        out = model(user, cand, index) * jax.random.uniform(key) * flag.astype(jnp.float32)
        return {"key": key, "index": index + 1, "flag": ~flag, "out": out}

    args = USER, CAND, INDEX, jnp.asarray(True), jax.random.key(0)

    def with_aux(f):
        def of(*args):
            results = f(*args)
            return jnp.sum(results["out"]), results

        return jax.value_and_grad(of, (0, 1), has_aux=True)

    for of in (with_aux, lambda f: jax.jit(with_aux(f)), lambda f: with_aux(jax.jit(f))):
        ours, theirs = of(ikbo.rewrite(fn))(*args), of(fn)(*args)
        assert ours[0][1]["key"] == theirs[0][1]["key"]
        for results in (ours, theirs):
            del results[0][1]["key"]
        close(ours, theirs)
    tangent = np.zeros(B, jax.dtypes.float0)

    def alone(f):
        return lambda user, index: f(user, CAND, index, *args[3:])["out"]

    both = [jax.jvp(alone(f), (USER, INDEX), (USER, tangent)) for f in (ikbo.rewrite(fn), fn)]
    close(*both)


def test_effects_keep_order_and_number_and_the_derivative_is_right() -> None:
    seen: list[float] = []

    def fn(user, cand, index):
        users = activation(user[index])
        jax.debug.callback(lambda x: seen.append(float(x)), users[0, 0], ordered=True)
        jax.debug.callback(lambda x: seen.append(float(x)), users[1, 0] + 1, ordered=True)
        return jnp.sum(users * cand, axis=1)

    def observed(f):
        seen.clear()
        out = f(USER, CAND, INDEX)
        jax.effects_barrier()
        return out, list(seen)

    for of in (
        lambda f: f,
        jax.jit,
        lambda f: jax.grad(loss(f)),
        lambda f: jax.grad(jax.jit(loss(f))),
    ):
        (ours, printed), (theirs, expected) = (observed(of(f)) for f in (ikbo.rewrite(fn), fn))
        close(ours, theirs)
        close(printed, expected)


# Dead equations.


def test_equations_that_nothing_needs_are_gone() -> None:
    def fn(user, cand, index):
        jnp.cosh(user[index])
        users = jnp.sin(user[index])
        jax.jit(lambda x: (jnp.sinh(x), x))(cand)
        both = jax.jit(lambda x: (jnp.sinh(x), jnp.tanh(x)))(cand)
        lax.scan(lambda c, w: (jnp.asinh(c) * w, c), users, W[0])
        return jnp.concatenate([users, both[1]], axis=1) @ jnp.concatenate([W, W])

    text = str(jax.make_jaxpr(ikbo.rewrite(fn))(USER, CAND, INDEX))
    assert [name for name in ("cosh", "sinh", "asinh", "scan") if f" {name} " in text] == []
    assert text.count("ikbo_rows[") == 1
    close(ikbo.rewrite(fn)(USER, CAND, INDEX), fn(USER, CAND, INDEX))


def test_what_a_trial_traced_is_gone() -> None:
    def fn(user, cand, index):
        def body(carry, w):
            return (carry[0] * w, jnp.tanh(carry[1] + cand * w)), None

        return lax.scan(body, (user[index], user[index]), W[0])[0]

    jaxpr = jax.make_jaxpr(ikbo.rewrite(fn))(USER, CAND, INDEX)
    used = {v for e in jaxpr.eqns for v in e.invars if not hasattr(v, "val")} | set(jaxpr.outvars)
    assert [e for e in jaxpr.eqns if not e.effects and used.isdisjoint(e.outvars)] == []
    close(ikbo.rewrite(fn)(USER, CAND, INDEX), fn(USER, CAND, INDEX))
