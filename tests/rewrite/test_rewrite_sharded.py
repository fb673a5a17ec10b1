"""`rewrite` of models whose arrays are sharded: the original's values, gradients and layouts."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewrite_basics import computed

import ikbo_jax as ikbo
from ikbo_jax.models import ranking
from ikbo_jax.rewrite.report import cost

SIZES = ranking.Sizes(
    candidates=16, users=3, layers=1, width=16, user_dense=16, dense_tokens=4, user_tokens=12,
    pooled=4, cand_tokens=8, history=8, queries=4, heads=2, head_dim=8, compressed=16, hidden=16,
    dtype="float32",
)  # fmt: skip
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def value_and_gradients(fn, argnums=0):
    """What a function returns, and the gradients of the sum of its sines."""

    def loss(*args):
        out = fn(*args)
        return jnp.sum(jnp.sin(out)), out

    def run(*args):
        gradients, out = jax.grad(loss, argnums, has_aux=True)(*args)
        return out, gradients

    return run


def assert_close(found, wanted, atol, rtol=1e-7):
    chex.assert_trees_all_close(*jax.device_get((found, wanted)), rtol=rtol, atol=atol)


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def added(user, index, weight, cand):
    return jax.nn.relu(user[index] @ weight + cand @ weight)


def concatenated(user, index, weight, cand):
    x = jnp.concatenate([user[index], cand], axis=1)
    return jax.nn.relu(x @ jnp.concatenate([weight, weight], axis=0))


#: How user, index, weight and candidates are sharded. Explicit axes refuse `user[index]` where only
#: the index is sharded, in the original too.
LAYOUTS = {
    "weights": ((), (), (None, "x"), ()),
    "candidates": ((), ("x",), (), ("x",)),
    "candidates_alone": ((), (), (), ("x",)),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("auto", "weights"),
        ("auto", "candidates"),
        ("auto", "candidates_alone"),
        ("explicit", "weights"),
    ],
)
@pytest.mark.parametrize("model", [added, concatenated])
def test_values_gradients_and_layouts_are_the_originals(model, layout, kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(KINDS[kind],))
    rng = np.random.default_rng(0)
    user, weight, cand = (rng.normal(size=s).astype(np.float32) for s in ((3, 8), (8, 16), (16, 8)))
    arrays = (user, np.arange(16, dtype=np.int32) % 3, weight, cand)
    args = [put(mesh, x, *spec) for x, spec in zip(arrays, LAYOUTS[layout], strict=True)]

    with jax.set_mesh(mesh):
        expected, found = (
            jax.jit(value_and_gradients(fn, (0, 2)))(*args) for fn in (model, ikbo.rewrite(model))
        )
    assert found[0].sharding.is_equivalent_to(expected[0].sharding, 2)
    assert_close(found, expected, atol=1e-5)


@functools.cache
def of_one_device():
    """The network's result and gradients."""
    with jax.numpy_dtype_promotion("standard"):
        args = ranking.init(SIZES), ranking.make_request(SIZES)
        return computed(value_and_gradients(ranking.co_designed), *args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["co-designed", "rewritten"])
def test_the_network_moves_nothing_but_the_index(name, kind):
    """Candidates divided, users replicated; `gdpa` gathers the index, and nothing else moves."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(KINDS[kind],) * 2)
    params, request = ranking.init(SIZES), ranking.make_request(SIZES)
    fn = ranking.co_designed if name == "co-designed" else ikbo.rewrite(ranking.materialised)

    expected, expected_gradients = of_one_device()
    # JAX's own attention promotes in its gradient.
    with jax.numpy_dtype_promotion("standard"):
        sharded = jax.tree.map(lambda x: put(mesh, x), (params, request))
        params, users = sharded
        request = users._replace(
            cand_tokens=put(mesh, request.cand_tokens, ("x", "y")),
            cand_to_user=put(mesh, request.cand_to_user, ("x", "y")),
        )
        compiled = jax.jit(fn).lower(params, request).compile()
        out, text = compiled(params, request), compiled.as_text()
        # Of each version once, since a program with gradients compiles for twice the time.
        with_gradients = (name == "co-designed") == (kind == "auto")
        if with_gradients:
            _, gradients = jax.jit(value_and_gradients(fn))(params, request)
    assert_close(out, expected, atol=1e-5)
    if with_gradients:
        assert_close(gradients, expected_gradients, atol=1e-4)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(("x", "y"))), out.ndim)
    collective = r" = (\S+) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
    moved = re.findall(collective, text)
    assert all(name == "all-gather" and shape.startswith("s32[16") for shape, name in moved), moved


# Programs that are divided by hand.


def on_two_devices():
    """A mesh, and arrays to divide over it."""
    rng = np.random.default_rng(0)
    user, weight, cand = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 8), (8, 16), (32, 8))
    )
    index = jnp.asarray(rng.integers(0, 3, 32), jnp.int32)
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), user, index, weight, cand


def of_rows(body, mesh, user, index, weight, cand, **options):
    """Divides looked-up rows."""
    specs = {"in_specs": (P("x"), P(), P("x")), "out_specs": P("x")}
    return jax.shard_map(body, mesh=mesh, **specs, **options)(user[index], weight, cand)


def around(body, mesh, user, index, weight, cand, **options):
    """Divides the index, by which every device looks its rows up."""

    def inside(user, index, weight, cand):
        return body(user[index], weight, cand)

    specs = {"in_specs": (P(), P("x"), P(), P("x")), "out_specs": P("x")}
    return jax.shard_map(inside, mesh=mesh, **specs, **options)(user, index, weight, cand)


def shifted(rows, weight, cand):
    tower = jnp.tanh(rows @ weight)
    return tower[:, :8] * cand + tower[:, 8:]


def divided_by_rank(rows, weight, cand):
    """Rows that differ between devices, although they are one user's."""
    return (
        jnp.tanh(rows * (1 + jax.lax.axis_index("x")).astype(rows.dtype)) @ weight + cand @ weight
    )


def centred(rows, weight, cand):
    """Rows that depend on all devices' rows."""
    mean = jax.lax.pmean(jnp.mean(rows, axis=0, keepdims=True), "x")
    return (rows - mean) @ weight + cand @ weight


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("body", [shifted, divided_by_rank, centred])
@pytest.mark.parametrize("place", [of_rows, around])
def test_shard_map(place, body, check):
    mesh, user, index, weight, cand = on_two_devices()

    def fn(user, weight, cand):
        return place(body, mesh, user, index, weight, cand, check_vma=check)

    def run(user, weight, cand):
        each = ikbo.rewrite(fn), fn
        return [value_and_gradients(f, (0, 1, 2))(user, weight, cand) for f in each]

    ours, theirs = jax.jit(run)(user, weight, cand)
    assert_close(ours, theirs, atol=1e-4)
    before, after = (
        cost.program_cost(jax.make_jaxpr(f)(user, weight, cand)).flops
        for f in (fn, ikbo.rewrite(fn))
    )
    assert after < 0.2 * before if body is shifted else after <= before


def test_an_inner_jit_with_shardings():
    mesh, user, index, weight, cand = on_two_devices()
    rows = NamedSharding(mesh, P("x"))
    inner = jax.jit(shifted, in_shardings=(rows, None, rows), out_shardings=rows)

    def fn(user, weight, cand):
        return inner(user[index], weight, cand)

    ours, theirs = (jax.jit(f)(user, weight, cand) for f in (ikbo.rewrite(fn), fn))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert ours.sharding.is_equivalent_to(theirs.sharding, 2)
    (report,) = ikbo.explain(ikbo.rewrite(fn), user, weight, cand).notes
    assert report.changed
