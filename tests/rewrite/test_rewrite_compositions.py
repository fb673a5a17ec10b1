"""Rewritten functions under JAX's transformations, in any order."""

from __future__ import annotations

import functools
import itertools
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

import ikbo_jax as ikbo
from ikbo_jax.rewrite import Lazy, register_rule, registry

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
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    @register_rule("atan")
    def rule(ctx, eqn, x):
        base = ctx.bind(eqn, x.base)
        if not ctx.differentiated:
            ctx.gradient_differs()
            base = lax.stop_gradient(base)
        return Lazy(base, x.shape, x.lineage, x.axis, x.origins)


OPS = {"compression": compression, "attention": attention}
MODELS = {**OPS, "by_its_own_rule": by_its_own_rule}


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))


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


def check(model: str, order: tuple[str, ...], dtype: str = "float32") -> None:
    """Compares a rewritten function and the function, after transformations in this order."""
    transformations = TRANSFORMATIONS | FORWARD
    fn, args = MODELS[model], arguments(dtype)

    def of(fn: Callable[..., Any]) -> Any:
        return functools.reduce(lambda fn, name: transformations[name](fn), order, fn)(*args)

    program = jax.make_jaxpr(ikbo.rewrite(fn))(*args)
    assert "ikbo_rewritten" in str(program), "this model does not test the primitive"
    bound = 2e-5 if dtype == "float32" else 1e-12
    for ours, theirs in zip(
        jax.tree.leaves(of(ikbo.rewrite(fn))), jax.tree.leaves(of(fn)), strict=True
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * np.abs(theirs).max())


def pairs() -> Iterator[tuple[str, str, str]]:
    """All pairs of transformations; models take turns, two of them if a rule of theirs runs."""
    models, each = [*MODELS], enumerate(TRANSFORMATIONS)
    for (m, inner), (n, outer) in itertools.product(each, repeat=2):
        has_rule = not {"vmap", "grad"}.isdisjoint((inner, outer))
        for turn in range(1 + has_rule):
            yield inner, outer, models[(m + n + turn) % len(models)]


@pytest.mark.parametrize(("inner", "outer", "model"), [*pairs()])
def test_two(inner: str, outer: str, model: str) -> None:
    check(model, (inner, outer))


#: `grad` of `vmap`, of functions that hide the rewritten function from it.
OF_VMAP = [("jit", "vmap", "grad"), ("vmap", "jit", "grad"), ("checkpoint", "vmap", "grad")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "order",
    [
        *OF_VMAP,
        ("cond", "vmap", "grad"),
        ("scan", "vmap", "grad"),
        ("vmap", "scan", "grad"),
        ("jit", "checkpoint", "grad"),
        ("jit", "grad", "vmap"),
        ("jit", "grad", "grad"),
    ],
)
def test_three(order: tuple[str, ...], model: str) -> None:
    check(model, order)


@pytest.mark.parametrize(
    "order",
    [
        *itertools.product(("jit", "vmap", "scan"), FORWARD),
        *itertools.product(FORWARD, ("jit", "vmap", "grad")),
        ("jit", "vmap", "jvp"),
        ("grad", "jvp"),
    ],
)
def test_forward_mode(order: tuple[str, ...]) -> None:
    check("by_its_own_rule", order)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [("grad",), ("grad", "vmap"), *OF_VMAP])
@pytest.mark.parametrize("model", MODELS)
def test_float64(model: str, order: tuple[str, ...]) -> None:
    with jax.enable_x64(True):
        check(model, order, "float64")


def both(transformed: Callable[..., Any], model: str, *args: Any, rtol: float = 1e-4) -> None:
    results = (
        jax.tree.leaves(transformed(f)(*args)) for f in (ikbo.rewrite(MODELS[model]), MODELS[model])
    )
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * np.abs(theirs).max())


@pytest.mark.parametrize("model", OPS)
def test_batch_axes(model: str) -> None:
    """Other batch axes, batched indices, nested and named axes, and operands without an axis."""
    w, user, cand, index = arguments()
    users, cands = jnp.stack([user, user * 2], 1), jnp.stack([cand, cand / 2], 2)

    def gradient(fn):
        return jax.grad(loss(fn), (0, 1, 2))

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

    both(at_other_axes, model, w, users, cands, index)
    both(by_index, model, w, user, cand, jnp.stack([index, index[::-1]]))
    both(nested, model, jnp.stack([w, w * 2]), user, cands, index)
    both(summed, model, w, users, cands, index)
    both(of_nothing, model, w, user, cand, index)


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
    both(mapped, model, w, users, cands, index)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def divided(fn):
        batched = jax.vmap(jax.jit(fn), (None, 0, 0, None))
        return jax.jit(jax.grad(loss(batched), (0, 1, 2)))

    with jax.set_mesh(mesh):
        by_request = NamedSharding(mesh, P("x"))
        w, index = jax.device_put((w, index), NamedSharding(mesh, P()))
        users, cands = jax.device_put((users, cands), by_request)
        both(divided, model, w, users, cands, index)


def test_the_fast_form_runs_under_vmap() -> None:
    """The variant for derivatives computes values only where something differentiates."""
    fn = TRANSFORMATIONS["vmap"](jax.jit(ikbo.rewrite(by_its_own_rule)))
    assert "ikbo_rewritten" in str(jax.make_jaxpr(fn)(*arguments()))
    assert "ikbo_rewritten" not in str(jax.make_jaxpr(jax.grad(loss(fn)))(*arguments()))


def test_a_linear_function_is_transposed() -> None:
    args = arguments()

    def transposed(fn):
        def of(weight, user, cand, index):
            linear = jax.jit(lambda user: fn(weight, user, jnp.zeros_like(cand), index))
            return jax.linear_transpose(linear, user)(cand)

        return of

    both(transposed, "compression", *args)


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

    both(around, model, *args)


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
@pytest.mark.parametrize("order", OF_VMAP)
@pytest.mark.parametrize("model", MODELS)
def test_no_variant_holds_tracers(model: str, order: tuple[str, ...]) -> None:
    fn = functools.partial(MODELS[model])
    whole = functools.reduce(lambda fn, name: TRANSFORMATIONS[name](fn), order, ikbo.rewrite(fn))
    with jax.checking_leaks():
        jax.make_jaxpr(whole)(*arguments())
