"""Ops on arrays that are sharded over eight devices, under plain jit: results, layouts, traffic."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    CASES,
    CASES_OF_TWO_AXES,
    KINDS,
    B,
    Case,
    U,
    attend,
    check_source_locations,
    collectives,
    draw,
    mesh_of,
    on_mesh,
    reductions,
)

import ikbo_jax as ikbo


def check(case: Case, mesh) -> None:
    arrays = draw(case)
    floats = tuple(name for name, x in arrays.items() if x.dtype == jnp.float32)

    def loss(chosen, rest):
        out = case.op(**chosen, **rest)
        return jnp.sum(jnp.sin(out)), out

    def split(arrays):
        return [
            {name: x for name, x in arrays.items() if (name in floats) is wanted}
            for wanted in (True, False)
        ]

    gradients = jax.value_and_grad(loss, has_aux=True)
    (_, expected), expected_gradients = gradients(*split(arrays))
    sharded = split(on_mesh(mesh, case, arrays))
    step = jax.jit(gradients).lower(*sharded).compile()
    (_, out), found_gradients = step(*sharded)
    chex.assert_trees_all_close(np.asarray(out), np.asarray(expected), atol=1e-5)
    for name in floats:
        np.testing.assert_allclose(
            np.asarray(found_gradients[name]), expected_gradients[name], atol=2e-4, err_msg=name
        )
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, case.out), out.ndim)
    forward = jax.jit(lambda chosen, rest: case.op(**chosen, **rest))
    if case.is_local:
        program = forward.lower(*sharded).compile().as_text()
        check_source_locations(program)
        assert not collectives(program)
        assert collectives(step.as_text()) <= {"all-reduce"}
        assert reductions(step.as_text()) == case.sums


#: Every case on both meshes. Kinds take turns: each case has both.
ON_MESHES = [
    (name, mesh, list(KINDS)[(m + n) % len(KINDS)])
    for n, name in enumerate(CASES)
    for m, mesh in enumerate(("8", "4x2"))
]


@pytest.mark.parametrize(("name", "mesh", "kind"), ON_MESHES)
def test_results_gradients_layouts_and_traffic(name: str, mesh: str, kind: str) -> None:
    check(CASES[name], mesh_of(mesh, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES_OF_TWO_AXES)
def test_two_axes_at_once(name: str, kind: str) -> None:
    check(CASES_OF_TWO_AXES[name], mesh_of("4x2", kind))


@pytest.mark.parametrize("kind", KINDS)
def test_eager_calls(kind: str) -> None:
    """A call outside jit on divided arrays takes the same way."""
    mesh = mesh_of("8", kind)
    for name in ("linear_candidates", "attention_everything", "gdpa_heads"):
        case = CASES[name]
        arrays = draw(case)
        out = case.op(**on_mesh(mesh, case, arrays))
        chex.assert_trees_all_close(np.asarray(out), np.asarray(case.op(**arrays)), atol=1e-5)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, case.out), out.ndim)


def attention_case(kind: str):
    """Attention of divided candidates: a mesh, arrays on it, and arrays on one device."""
    mesh = mesh_of("8", kind)
    case = CASES["attention_candidates"]
    arrays = draw(case)
    return mesh, on_mesh(mesh, case, arrays), arrays


@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind: str) -> None:
    """Over queries and keys, and over queries alone: results stay divided by candidates."""
    mesh, sharded, arrays = attention_case(kind)

    def twice(arrays, axes):
        def stacked(name, x):
            return jnp.stack([x, -x]) if axes[name] == 0 else x

        stack = {name: stacked(name, x) for name, x in arrays.items()}
        one = lambda *xs: attend(**dict(zip(axes, xs, strict=True)))  # noqa: E731
        return jax.vmap(one, tuple(axes.values()))(*(stack[name] for name in axes))

    for keys in (0, None):
        axes = {"query": 0, "key": keys, "value": keys, "index": None}
        out = jax.jit(lambda arrays, axes=axes: twice(arrays, axes))(sharded)
        chex.assert_trees_all_close(np.asarray(out), np.asarray(twice(arrays, axes)), atol=1e-5)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), out.ndim)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind: str) -> None:
    _, sharded, arrays = attention_case(kind)

    def curvature(arrays):
        def slope(query):
            return jnp.sum(
                jax.grad(lambda q: jnp.sum(attend(**(arrays | {"query": q})) ** 2))(query)
            )

        return jax.grad(slope)(arrays["query"])

    chex.assert_trees_all_close(
        np.asarray(jax.jit(curvature)(sharded)), np.asarray(curvature(arrays)), atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_inside_scan_and_checkpoint(kind: str) -> None:
    mesh, sharded, arrays = attention_case(kind)

    def loss(arrays):
        @jax.checkpoint
        def layer(query, _):
            return attend(**(arrays | {"query": query})), None

        out, _ = jax.lax.scan(layer, arrays["query"], length=2)
        return jnp.sum(out**2)

    def gradient(arrays):
        chosen = {name: arrays.pop(name) for name in ("query", "key")}
        return jax.grad(lambda chosen: loss(arrays | chosen))(chosen)

    found, expected = jax.jit(gradient)(dict(sharded)), gradient(dict(arrays))
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), atol=1e-4)
    query = found["query"]
    assert query.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), query.ndim)


def test_gradients_in_bfloat16_are_rounded_once() -> None:
    """Partial sums of eight devices stay in float32: the error is that of one rounding."""
    mesh = mesh_of("8", "explicit")
    case = CASES["linear_candidates"]
    arrays = {
        name: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
        for name, x in draw(case).items()
    }
    exact = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in arrays.items()}
    sharded = on_mesh(mesh, case, arrays)

    def total(w_user, arrays):
        return jnp.sum(case.op(**(arrays | {"w_user": w_user})).astype(jnp.float32))

    gradient = np.asarray(jax.jit(jax.grad(total))(sharded["w_user"], sharded), np.float64)
    users = exact["e_user"][np.asarray(arrays["index"])].sum(axis=(0, 2))
    expected = np.broadcast_to(users, gradient.shape)
    np.testing.assert_allclose(gradient, expected, rtol=2.0**-8, atol=0)


def test_the_gradients_kernel_sums_parts_in_float32(fake_attention) -> None:
    """Each device's kernel returns float32 sums of its candidates, rounded after the sum."""
    mesh = mesh_of("8", "explicit")
    shape = {"query": (B, 3, 2, 64), "key": (U, 5, 2, 64), "value": (U, 5, 2, 64)}
    case = CASES["attention_candidates"]
    case = case._replace(arrays=shape | {"index": (B, -U)})
    drawn = draw(case)
    arrays = {n: x.astype(jnp.bfloat16) if n != "index" else x for n, x in drawn.items()}

    def total(floats, index):
        return jnp.sum(jnp.sin(case.op(**floats, index=index).astype(jnp.float32)))

    def gradients(arrays):
        floats = {name: x for name, x in arrays.items() if name != "index"}
        return jax.jit(jax.grad(total))(floats, arrays["index"])

    found = gradients(on_mesh(mesh, case, arrays))
    asked = {call["dtype"]: call["query"] for call in fake_attention.backward_calls}
    assert asked == {"float32": (B // 8, 3, 2, 64)}
    exact = {n: x.astype(jnp.float32) if n != "index" else x for n, x in arrays.items()}
    for name, want in gradients(exact).items():
        assert found[name].dtype == jnp.bfloat16
        x = np.asarray(found[name], np.float32)
        np.testing.assert_allclose(x, want, rtol=0, atol=0.03 * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_how_a_call_divides_and_what_moves(kind: str) -> None:
    mesh = mesh_of("4x2", kind)
    case = CASES["attention_users"]
    specs = {
        "query": P("x", None, "y"),
        "index": P("x"),
        "key": P("x"),
        "value": P(None, None, "y"),
    }
    shaped = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in draw(case).items()
    }
    (plan,) = ikbo.explain(case.op, **shaped).plans
    text = plan.division
    assert "candidates over 'x' (4 devices)" in text
    assert "heads over 'y' (2 devices)" in text
    assert "gathers key over 'x', 10,240 bytes" in text
    assert "the gradient sums value over 'x', 10,240 bytes" in text
    assert "gathers value" not in text
    assert (plan.problem.batch, plan.problem.q_heads) == (4, 4)


def test_one_device_of_a_large_host_is_not_divided() -> None:
    (plan,) = ikbo.explain(attend, **draw(CASES["attention_candidates"])).plans
    assert plan.division == ""


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_jagged_queries(kind: str) -> None:
    """Sequences that lie on two devices, a bound that cuts one, and a gradient."""
    mesh = mesh_of("8", kind)
    rng = np.random.default_rng(0)
    query = rng.normal(size=(32, 2, 8)).astype(np.float32)
    memory = rng.normal(size=(9, 2, 8)).astype(np.float32)
    offsets, memory_offsets = np.array([0, 3, 3, 20, 27], np.int32), np.array([0, 4, 9], np.int32)
    index = np.array([1, 0, 1, 0], np.int32)

    def loss(query, memory, activation):
        out = ikbo.gdpa(
            query, memory, 2 * memory, offsets, memory_offsets,
            q_to_kv=index, activation=activation, max_seqlen_q=11,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out)), out

    for activation in ("gelu", "softmax"):
        gradients = jax.value_and_grad(
            lambda *x, activation=activation: loss(*x, activation), argnums=(0, 1), has_aux=True
        )
        (_, expected), expected_gradients = gradients(query, memory)
        args = (
            jax.device_put(query, NamedSharding(mesh, P("x"))),
            jax.device_put(memory, NamedSharding(mesh, P())),
        )
        (_, out), found = jax.jit(gradients)(*args)
        chex.assert_trees_all_close(np.asarray(out), np.asarray(expected), atol=1e-5)
        chex.assert_trees_all_close(
            jax.device_get(found), jax.device_get(expected_gradients), atol=1e-4
        )
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), out.ndim)
        assert not np.asarray(out)[14:20].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("offsets", "bound"),
    [
        ([0, 3, 3, 20, 27], 2**31 - 1),
        ([-5, 3, 3, 20, 27], 4),
        ([-(2**31), 3, 2, 20, 2**31 - 1], 9),
        ([-(2**31), 3, 2, 20, 2**31 - 1], None),
    ],
)
def test_rows_of_jagged_queries_with_extreme_bounds(
    offsets: list[int], bound: int | None, kind: str
) -> None:
    """A bound that bounds nothing, and offsets out of range, which are clamped first."""
    rng = np.random.default_rng(0)
    query, memory = (rng.normal(size=(n, 2, 8)).astype(np.float32) for n in (32, 9))
    cu_seqlens = np.array(offsets, np.int32)

    def op(query: jax.Array, memory: jax.Array) -> jax.Array:
        return ikbo.gdpa(
            query, memory, memory, cu_seqlens, np.array([0, 2, 5, 7, 9], np.int32),
            activation="softmax", max_seqlen_q=bound,
        )  # fmt: skip

    mesh = mesh_of("8", kind)
    divided = (
        jax.device_put(query, NamedSharding(mesh, P("x"))),
        jax.device_put(memory, NamedSharding(mesh, P())),
    )
    np.testing.assert_allclose(jax.jit(op)(*divided), op(query, memory), atol=1e-5)
