"""Rewritten functions under JAX's transformations, in any order."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewrite_basics import (
    add_rule_whose_fast_form_has_another_derivative,
    assert_same_up_to_rounding,
    check,
    loss,
)

import ikbo_jax as ikbo

U, B, S, D = 3, 12, 4, 8


def arguments(dtype: str = "float32", candidates: int = B) -> tuple[Any, ...]:
    """Weight, users, candidates and index."""
    rng = np.random.default_rng(0)
    shapes = ((2 * S, S), (U, S, D), (candidates, S, D))
    arrays = [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]
    return *arrays, jnp.asarray(rng.integers(0, U, candidates), jnp.int32)


def compression(weight, user, cand, index):
    """Becomes an op, which has no derivative in forward mode."""
    fields = jnp.concatenate([user[index], cand], axis=1)
    return jnp.einsum("mk,bkn->bmn", weight.T, fields)


def attention(weight, user, cand, index):
    """Becomes an op, too."""
    keys = user[index]
    logits = jnp.einsum("bqd,bkd->bqk", cand, keys) / np.sqrt(D)
    weights = jax.nn.softmax(jnp.where(jnp.arange(S) < 3, logits, -1e9), axis=-1)
    return jnp.einsum("bqk,bkd->bqd", weights, jnp.tanh(keys)) * jnp.sum(weight)


def by_its_own_rule(weight, user, cand, index):
    """`atan` of looked-up values; the derivative of its fast form is 0."""
    x = jnp.atan(user[index].sum(axis=1)) @ jnp.ones((D, D), user.dtype)
    return jnp.tanh(x * cand.sum(axis=1)) * weight[0, 0]


@pytest.fixture(autouse=True)
def a_rule_whose_fast_form_has_another_derivative(monkeypatch) -> None:
    add_rule_whose_fast_form_has_another_derivative(monkeypatch)


OPS = {"compression": compression, "attention": attention}
MODELS = {**OPS, "by_its_own_rule": by_its_own_rule}


def activation(x):
    return jnp.atan(x) @ jnp.linspace(-1, 1, D * D, dtype=x.dtype).reshape(D, D)


@jax.jit
def repeated(x):
    return jnp.sin(activation(x * 0.5 + 1)) * 0.5 - 1


@jax.custom_jvp
def with_its_own_derivative(x):
    return activation(x)


with_its_own_derivative.defjvp(
    lambda primals, tangents: (
        activation(*primals),
        jax.jvp(activation, (primals[0],), (jnp.cos(primals[0]) * tangents[0],))[1],
    )
)

#: How a model calls the function that has the rule.
CALLS: dict[str, Callable[..., Any]] = {
    "in_jit": jax.jit(activation),
    "in_jit_again": lambda x: repeated(repeated(repeated(x))),
    "in_checkpoint": jax.checkpoint(activation),
    "in_scan": lambda x: lax.scan(lambda c, w: (activation(c) * w, None), x, jnp.ones(2, x.dtype))[
        0
    ],
    "in_cond": lambda x: lax.cond(x[0, 0] > -100, activation, jnp.sin, x),
    "in_custom_jvp": with_its_own_derivative,
    "in_custom_jvp_in_jit": jax.jit(with_its_own_derivative),
}


def calling(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weight, user, cand, index: (
        jnp.tanh(call(user[index].sum(axis=1)) * cand.sum(axis=1)) * weight[0, 0]
    )


OF_CALLS = {name: calling(call) for name, call in CALLS.items()}
EVERY = {**MODELS, **OF_CALLS}


def zeros_like_results(fn: Callable[..., Any]) -> Callable[..., Any]:
    def zeros(*args: Any) -> Any:
        like = jax.eval_shape(fn, *args)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    return zeros


def in_a_scan(fn: Callable[..., Any]) -> Callable[..., Any]:
    def scanned(weight, user, cand, index):
        def body(carry, x):
            return carry * 1.5, fn(weight * carry, user * x, cand, index)

        one = jnp.ones((), user.dtype)
        return lax.scan(body, one, jnp.stack([one, one / 2]))[1]

    return scanned


#: Each takes a function of weight, users, candidates and index, and returns another.
TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda fn: (
        lambda w, user, cand, index: jax.vmap(fn, (None, 0, 0, None))(
            w, jnp.stack([user, user * 2]), jnp.stack([cand, cand / 2]), index
        )
    ),
    "scan": in_a_scan,
    "cond": lambda fn: (
        lambda *args: lax.cond(args[0][0, 0] > -100, fn, zeros_like_results(fn), *args)
    ),
    "grad": lambda fn: lambda *args: jax.grad(loss(fn), (0, 1, 2))(*args),
}
FORWARD: dict[str, Callable[..., Any]] = {
    "jvp": lambda fn: (
        lambda w, user, cand, index: jax.jvp(
            lambda *args: fn(*args, index), (w, user, cand), (w + 1, user + 1, cand * 2)
        )[1]
    ),
    "linearize": lambda fn: (
        lambda w, user, cand, index: jax.linearize(lambda *args: fn(*args, index), w, user, cand)[
            1
        ](w + 1, user + 1, cand * 2)
    ),
}


def check_order(model: str, order: tuple[str, ...], dtype: str = "float32") -> None:
    """Compares a rewritten function and the function, after transformations in this order."""
    transformations = TRANSFORMATIONS | FORWARD

    def of(fn: Callable[..., Any]) -> Any:
        return functools.reduce(lambda fn, name: transformations[name](fn), order, fn)

    check(of, EVERY[model], *arguments(dtype), bound=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_tests_the_primitive(model: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        args = arguments("float64" if x64 else "float32")
        assert "ikbo_rewritten" in str(jax.make_jaxpr(ikbo.rewrite(MODELS[model]))(*args))


def pairs() -> Iterator[tuple[str, tuple[str, str]]]:
    """All pairs of transformations; models take turns, two of them if a rule of theirs runs."""
    models, each = [*MODELS], enumerate(TRANSFORMATIONS)
    for (m, inner), (n, outer) in itertools.product(each, repeat=2):
        has_rule = not {"vmap", "grad"}.isdisjoint((inner, outer))
        for turn in range(1 + has_rule):
            yield models[(m + n + turn) % len(models)], (inner, outer)


#: `grad` of `vmap`, of functions that hide the rewritten function from it.
OF_VMAP = [("jit", "vmap", "grad"), ("vmap", "jit", "grad"), ("checkpoint", "vmap", "grad")]


THREE = [
    *OF_VMAP,
    ("cond", "vmap", "grad"),
    ("scan", "vmap", "grad"),
    ("vmap", "scan", "grad"),
    ("jit", "checkpoint", "grad"),
    ("jit", "grad", "vmap"),
    ("jit", "grad", "grad"),
]
FORWARD_MODE = [
    *itertools.product(("jit", "vmap", "scan"), FORWARD),
    *itertools.product(FORWARD, ("jit", "vmap", "grad")),
    ("jit", "vmap", "jvp"),
    ("grad", "jvp"),
]
OF_EACH_CALL = [("grad",), ("jit", "grad"), ("grad", "jit"), ("grad", "vmap"), ("grad", "grad")]
ORDERS = [
    *pairs(),
    *itertools.product(MODELS, THREE),
    *(("by_its_own_rule", order) for order in FORWARD_MODE),
    *itertools.product(OF_CALLS, OF_EACH_CALL),
]


@pytest.mark.parametrize(("model", "order"), ORDERS, ids=lambda x: x if x in EVERY else "-".join(x))
def test_values(model: str, order: tuple[str, ...]) -> None:
    check_order(model, order)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [("grad",), ("grad", "vmap"), *OF_VMAP])
@pytest.mark.parametrize("model", MODELS)
def test_float64(model: str, order: tuple[str, ...]) -> None:
    with jax.enable_x64(True):
        check_order(model, order, "float64")


@pytest.mark.parametrize("model", OPS)
def test_batch_axes(model: str) -> None:
    """Other batch axes, batched indices, nested and named axes, and operands without an axis."""
    w, user, cand, index = arguments()
    users, cands = jnp.stack([user, user * 2], 1), jnp.stack([cand, cand / 2], 2)

    gradient = TRANSFORMATIONS["grad"]

    def at_other_axes(fn):
        return gradient(jax.vmap(jax.jit(fn), (None, 1, 2, None), out_axes=1))

    def by_index(fn):
        return gradient(jax.vmap(jax.jit(fn), (None, None, None, 0)))

    def nested(fn):
        inner = jax.vmap(jax.jit(fn), (None, None, 2, None))
        return gradient(jax.vmap(jax.jit(inner), (0, None, None, None)))

    def summed(fn):
        def total(*args):
            return lax.psum(fn(*args), "requests")

        batched = jax.vmap(jax.jit(total), (None, 1, 2, None), axis_name="requests")
        return gradient(batched)

    def of_nothing(fn):
        def one(weight, args):
            return jnp.sum(jax.jit(fn)(*args)) * weight

        return jax.grad(
            lambda *args: jnp.sum(jax.vmap(one, (0, None))(jnp.ones(2), args)), (0, 1, 2)
        )

    check(at_other_axes, MODELS[model], w, users, cands, index)
    check(by_index, MODELS[model], w, user, cand, jnp.stack([index, index[::-1]]))
    check(nested, MODELS[model], jnp.stack([w, w * 2]), user, cands, index)
    check(summed, MODELS[model], w, users, cands, index)
    check(of_nothing, MODELS[model], w, user, cand, index)


def check_compiled(of: Callable[..., Any], model: str, *args: Any) -> None:
    found, wanted = (of(f)(*args) for f in (ikbo.rewrite(MODELS[model]), MODELS[model]))
    assert_same_up_to_rounding(found, wanted)


@pytest.mark.parametrize("model", OPS)
def test_over_devices(model: str) -> None:
    """Inside `shard_map` under `vmap`, and over a batch that Explicit axes divide."""
    w, user, cand, index = arguments(candidates=64)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def mapped(fn):
        specs = (P(), P(), P("x"), P("x"))
        sharded = jax.shard_map(jax.jit(fn), mesh=mesh, in_specs=specs, out_specs=P("x"))
        batched = jax.vmap(jax.jit(sharded), (None, 0, 0, None))
        return jax.grad(loss(batched), (0, 1, 2))

    users, cands = jnp.stack([user, user * 2]), jnp.stack([cand, cand / 2])
    check_compiled(mapped, model, w, users, cands, index)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def divided(fn):
        batched = jax.vmap(jax.jit(fn), (None, 0, 0, None))
        return jax.jit(jax.grad(loss(batched), (0, 1, 2)))

    with jax.set_mesh(mesh):
        by_request = NamedSharding(mesh, P("x"))
        w, index = jax.device_put((w, index), NamedSharding(mesh, P()))
        users, cands = jax.device_put((users, cands), by_request)
        check_compiled(divided, model, w, users, cands, index)


def test_the_fast_form_runs_under_vmap() -> None:
    """The variant for derivatives computes values only where something differentiates."""
    fn = TRANSFORMATIONS["vmap"](jax.jit(ikbo.rewrite(by_its_own_rule)))
    # Others are of integers.
    of_floats = re.compile(r"f32\S* = ikbo_rewritten")
    assert of_floats.search(str(jax.make_jaxpr(fn)(*arguments())))
    assert not of_floats.search(str(jax.make_jaxpr(jax.grad(loss(fn)))(*arguments())))


def test_a_linear_function_is_transposed() -> None:
    args = arguments()

    def transposed(fn):
        def of(weight, user, cand, index):
            linear = jax.jit(lambda user: fn(weight, user, jnp.zeros_like(cand), index))
            return jax.linear_transpose(linear, user)(cand)

        return of

    check(transposed, compression, *args)


@pytest.mark.parametrize("model", MODELS)
def test_a_rewritten_function_in_a_rewritten_function(model: str) -> None:
    args = arguments()

    def around(fn):
        outer = ikbo.rewrite if getattr(fn, "_ikbo_rewritten", False) else lambda fn: fn

        @outer
        def whole(weight, user, cand, index):
            # The inner function's users are looked up by the outer function.
            return jax.jit(fn)(weight, user[index], cand, jnp.arange(len(index)))

        return jax.grad(loss(whole), (0, 1, 2))

    check_compiled(around, model, *args)


def test_a_rewritten_function_closes_over_tracers() -> None:
    def around(fn):
        rewrite = ikbo.rewrite if getattr(fn, "_ikbo_rewritten", False) else lambda fn: fn

        def whole(weight, user, cand, index):
            return jnp.sum(rewrite(lambda cand: fn(weight, user, cand, index))(cand))

        return jax.grad(whole, 1)

    args = arguments()
    check_compiled(around, "by_its_own_rule", *args)
    with jax.checking_leaks():
        jax.make_jaxpr(around(ikbo.rewrite(functools.partial(by_its_own_rule))))(*args)


@pytest.mark.parametrize("outer", [jax.jit, lambda fn: fn, TRANSFORMATIONS["vmap"]])
def test_checks_see_the_program(outer: Callable[..., Any]) -> None:
    """`checkify` checks the equations of the original."""

    def model(weight, user, cand, index):
        return compression(weight, jnp.log(user), cand, index)

    def message(fn):
        checked = checkify.checkify(outer(fn), errors=checkify.float_checks)
        return checked(*arguments())[0].get()

    assert "ikbo_rewritten" in str(jax.make_jaxpr(ikbo.rewrite(model))(*arguments()))
    assert message(model)
    assert message(ikbo.rewrite(model)) == message(model)


@pytest.mark.usefixtures("new_objects_alone")
@pytest.mark.parametrize(
    ("model", "order"),
    [*itertools.product(MODELS, OF_VMAP), *itertools.product(OF_CALLS, [(), ("grad",), ("jvp",)])],
)
def test_no_variant_holds_tracers(model: str, order: tuple[str, ...]) -> None:
    fn = functools.partial(EVERY[model])
    of_each = TRANSFORMATIONS | FORWARD
    whole = functools.reduce(lambda fn, name: of_each[name](fn), order, ikbo.rewrite(fn))
    with jax.checking_leaks():
        jax.make_jaxpr(whole)(*arguments())
