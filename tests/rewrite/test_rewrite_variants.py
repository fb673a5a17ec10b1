"""The variants of a rewritten program, for values and for derivatives; dead equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import lax
from rewrite_basics import (
    add_rule_whose_fast_form_has_another_derivative,
    check,
    close,
    computed,
    loss,
)

import ikbo_jax as ikbo

B, U, D = 12, 3, 5
_, USER, CAND, W, INDEX = problems.vectors(U, B, D)


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[bool]:
    return add_rule_whose_fast_form_has_another_derivative(monkeypatch)


def activation(x):
    return jnp.atan(x) @ W


def in_a_scan(x):
    return lax.scan(lambda c, w: (activation(c) * w, None), x, jnp.ones(2))[0]


@jax.custom_jvp
def with_its_own_derivative(x):
    return activation(x)


with_its_own_derivative.defjvp(
    lambda primals, tangents: (activation(*primals), jnp.cos(primals[0]) * tangents[0] @ W)
)

#: How the function with the rule is called.
CALLS = {
    "plain": activation,
    "jit": lambda x: jax.jit(activation)(x),
    "jit_again": lambda x: functools.reduce(lambda x, _: repeated(x), range(3), x),
    "checkpoint": lambda x: jax.checkpoint(activation)(x),
    "scan": in_a_scan,
    "cond": lambda x: lax.cond(W[0, 0] > 0, activation, jnp.sin, x),
    "custom_jvp": with_its_own_derivative,
    "custom_jvp_in_a_jit": lambda x: jax.jit(with_its_own_derivative)(x),
}


@jax.jit
def repeated(x):
    x = x * 0.5 + 1
    return jnp.sin(activation(x)) * 0.5 - 1


def model(call, user, cand, index):
    return jnp.sum(jnp.tanh(call(user[index]) * cand), axis=1)


#: What is made of the rewritten function, and of the function itself.
TRANSFORMATIONS = {
    "values": lambda f: f,
    "grad": lambda f: jax.grad(loss(f), (0, 1)),
    "grad_of_jit": lambda f: jax.grad(loss(jax.jit(f)), (0, 1)),
    "jit_of_grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1))),
    "second": lambda f: jax.grad(lambda *x: jnp.sum(jax.grad(loss(f))(*x) ** 2), (0, 1)),
    "hessian": lambda f: jax.hessian(loss(f)),
    "jvp": lambda f: lambda u, c, i: jax.jvp(lambda u: f(u, c, i), (u,), (u + 1,)),
    "vmap_of_grad": lambda f: (
        lambda u, c, i: jax.vmap(jax.grad(loss(f)), (0, None, None))(jnp.stack([u, -u]), c, i)
    ),
    "in_a_scan": lambda f: jax.grad(
        lambda u, c, i: lax.scan(lambda t, _: (t + jnp.sum(f(u * t, c, i)), None), 1.0, length=2)[0]
    ),
    "closed_over": lambda f: (
        lambda u, c, i: jax.grad(lambda u: jnp.sum(ikbo_or_itself(f)(lambda c: f(u, c, i))(c)))(u)
    ),
}


def ikbo_or_itself(f):
    """Rewrites what closes over tracers if `f` is a rewritten function."""
    return ikbo.rewrite if getattr(f, "_ikbo_rewritten", False) else lambda g: g


#: Those of them for all calls.
FEW = ("grad", "jit_of_grad", "grad_of_jit", "vmap_of_grad", "second")


@pytest.mark.parametrize("call", CALLS)
def test_values_and_derivatives(call: str) -> None:
    fn = functools.partial(model, CALLS[call])
    for name in TRANSFORMATIONS if call == "plain" else FEW:
        check(TRANSFORMATIONS[name], fn, USER, CAND, INDEX, bound=5e-6)
    slope, _ = computed(TRANSFORMATIONS["grad"](fn), USER, CAND, INDEX)
    assert np.abs(slope).max() > 1e-2


def test_each_variant_is_traced_where_it_is_needed(calls: list[bool]) -> None:
    rewritten = ikbo.rewrite(functools.partial(model, activation))
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
    assert "ikbo_rewritten" in str(
        jax.make_jaxpr(ikbo.rewrite(functools.partial(model, activation)))(USER, CAND, INDEX)
    )


def test_integers_flags_and_keys_pass_through() -> None:
    def fn(user, cand, index, flag, key):
        out = (
            model(activation, user, cand, index)
            * jax.random.uniform(key)
            * flag.astype(jnp.float32)
        )
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


@pytest.mark.usefixtures("new_objects_alone")
@pytest.mark.parametrize("call", CALLS)
def test_no_variant_holds_tracers(call: str) -> None:
    fn = functools.partial(model, CALLS[call])
    for name in ("values", "grad", "jvp", "closed_over"):
        with jax.checking_leaks():
            jax.make_jaxpr(TRANSFORMATIONS[name](ikbo.rewrite(fn)))(USER, CAND, INDEX)
