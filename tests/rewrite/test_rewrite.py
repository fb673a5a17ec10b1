"""The rewrite as a transformation: what it composes with, and rules of a user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from rewrite_basics import (
    ARGS,
    A,
    H,
    became,
    both,
    close,
    computed,
    embed,
    embeddings,
    model,
    report_of,
)

import ikbo_jax as ikbo
from ikbo_jax.rewrite import NotCovered, register_rule


def test_runs_without_jit_and_keeps_the_functions_name() -> None:
    rewritten = ikbo.rewrite(model)
    assert rewritten.__name__ == "model"
    close(rewritten(*ARGS), model(*ARGS))


def test_rewriting_twice_changes_nothing() -> None:
    once = ikbo.rewrite(model)
    assert ikbo.rewrite(once) is once
    wrapped = ikbo.rewrite(lambda *args: jax.jit(once)(*args))
    text = str(jax.make_jaxpr(wrapped)(*ARGS))
    assert text.count("dot_general") == str(jax.make_jaxpr(once)(*ARGS)).count("dot_general") == 2
    close(computed(wrapped, *ARGS), computed(model, *ARGS))


def test_an_op_that_is_there_already_stays() -> None:
    once = ikbo.rewrite(embed)
    args = embeddings()
    twice = ikbo.rewrite(lambda *args: jax.jit(once)(*args))
    plans = [ikbo.explain(fn, *args).plans for fn in (once, twice)]
    assert [plan.op for plan in plans[0]] == ["linear_compression"]
    assert plans[0] == plans[1]
    close(computed(twice, *args), computed(embed, *args))


def test_rewriting_a_gradient_is_right() -> None:
    grad = jax.grad(lambda *args: jnp.sum(model(*args) ** 2), argnums=(0, 1, 2))
    close(*both(grad, *ARGS))


def test_pytrees_static_arguments_keywords_and_results_that_are_no_arrays() -> None:
    def tower(params, batch, activation, *, layers=1, scale=None):
        users = batch["user"][batch["index"]]
        x = jnp.concatenate([users, batch["cand"]], axis=1) @ params[0]
        for _ in range(layers):
            x = activation(x)
        x = x if scale is None else x * scale
        return {"out": x, "name": "tower", "layers": layers, "nothing": None}

    batch = {"user": A.user, "cand": A.cand, "index": A.index}
    rewritten = ikbo.rewrite(tower)
    ours = rewritten((A.w,), batch, jnp.tanh, layers=2)
    theirs = tower((A.w,), batch, jnp.tanh, layers=2)
    assert (ours["name"], ours["layers"], ours["nothing"]) == ("tower", 2, None)
    close(ours["out"], theirs["out"])
    jitted = jax.jit(lambda *a, **k: rewritten(*a, **k)["out"], static_argnums=2)
    scaled = tower((A.w,), batch, jnp.tanh, scale=jnp.float32(2))["out"]
    close(jitted((A.w,), batch, jnp.tanh, scale=jnp.float32(2)), scaled)


def test_arguments_may_be_numpy_s_dtypes_or_closed_over_and_need_not_be_arrays() -> None:
    def closed(user):
        return jnp.concatenate([user[np.asarray(A.index)], A.cand], axis=1) @ A.w

    close(ikbo.rewrite(closed)(np.asarray(A.user)), closed(A.user))
    assert "product by parts" in became(closed, A.user)

    def cast(user, index, dtype):
        return (user[index] @ A.w_user).astype(dtype)

    assert ikbo.rewrite(cast)(A.user, A.index, np.float16).dtype == np.float16
    assert ikbo.rewrite(lambda x: {"x": x})("a") == {"x": "a"}


def double_p() -> Primitive:
    primitive = Primitive("test_double")
    primitive.def_impl(lambda x: x * 2)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    ad.deflinear2(primitive, lambda ct, _: [primitive.bind(ct)])
    return primitive


@pytest.mark.parametrize("wrong", [jax.lax.sin, jnp.sin, None, [jax.lax.sin_p]])
def test_a_rule_is_of_a_primitive(wrong: object) -> None:
    """Under the name of a function, it would never run."""
    with pytest.raises(TypeError, match=r"primitive must be a jax.extend.core.Primitive or its na"):
        register_rule(wrong)
    with pytest.raises(TypeError, match="rule must be a function, but is 3"):
        register_rule("my_primitive", 3)


def test_a_primitive_without_a_rule_is_right_and_a_rule_can_be_added(monkeypatch) -> None:
    from ikbo_jax.rewrite.values import registry

    monkeypatch.setitem(registry._RULES, "lazy", dict(registry._RULES["lazy"]))
    primitive = double_p()

    def fn(user, index):
        return primitive.bind(user[index] @ A.w_user) @ jnp.ones((H, 3))

    expected = fn(A.user, A.index)
    close(ikbo.rewrite(fn)(A.user, A.index), expected)
    (place,) = report_of(fn, A.user, A.index).materialised
    assert place.reason == "no rule for test_double"

    @register_rule(primitive)
    def rule(ctx, eqn, x):
        if len(x.shape) != 2:
            raise NotCovered("only of two dimensions")
        return x.__class__(ctx.bind(eqn, x.base), x.shape, x.lineage, x.axis, x.origins)

    assert report_of(fn, A.user, A.index).materialised[0].line == "the function's result"
    close(ikbo.rewrite(fn)(A.user, A.index), expected)

    def refused(user, index):
        return primitive.bind((user[index] @ A.w_user)[None])

    assert report_of(refused, A.user, A.index).materialised[0].reason == "only of two dimensions"
