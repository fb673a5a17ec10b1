"""`rewrite` of models whose arrays are sharded: the original's values, gradients and layouts."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ikbo_jax as ikbo
from ikbo_jax.models import ranking

SIZES = ranking.Sizes(
    candidates=16, users=3, layers=1, width=16, user_dense=16, dense_tokens=4, user_tokens=12,
    pooled=4, cand_tokens=8, history=8, queries=4, heads=2, head_dim=8, compressed=16, hidden=16,
    dtype="float32",
)  # fmt: skip
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


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

    def both(fn):
        def loss(user, weight):
            out = fn(user, args[1], weight, args[3])
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    with jax.set_mesh(mesh):
        (_, expected), expected_gradients = both(model)(args[0], args[2])
        (_, out), gradients = both(ikbo.rewrite(model))(args[0], args[2])
    assert out.sharding.is_equivalent_to(expected.sharding, out.ndim)
    for found, wanted in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["co-designed", "rewritten"])
def test_the_network_moves_nothing_but_the_index(name, kind):
    """Candidates divided, users replicated; `gdpa` gathers the index, and nothing else moves."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(KINDS[kind],) * 2)
    params, request = ranking.init(SIZES), ranking.make_request(SIZES)
    fn = ranking.co_designed if name == "co-designed" else ikbo.rewrite(ranking.materialised)

    def both(fn):
        def loss(params, request):
            out = fn(params, request)
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(loss, has_aux=True)

    # JAX's own attention promotes in its gradient.
    with jax.numpy_dtype_promotion("standard"):
        (_, expected), expected_gradients = jax.jit(both(ranking.co_designed))(params, request)
        sharded = jax.tree.map(lambda x: put(mesh, x), (params, request))
        params, users = sharded
        request = users._replace(
            cand_tokens=put(mesh, request.cand_tokens, ("x", "y")),
            cand_to_user=put(mesh, request.cand_to_user, ("x", "y")),
        )
        (_, out), gradients = jax.jit(both(fn))(params, request)
        text = jax.jit(fn).lower(params, request).compile().as_text()
    np.testing.assert_allclose(np.asarray(out), np.asarray(expected), atol=1e-5)
    jax.tree.map(
        lambda found, wanted: np.testing.assert_allclose(
            np.asarray(found), np.asarray(wanted), atol=1e-4
        ),
        gradients,
        expected_gradients,
    )
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(("x", "y"))), out.ndim)
    collective = r" = (\S+) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
    moved = re.findall(collective, text)
    assert all(name == "all-gather" and shape.startswith("s32[16") for shape, name in moved), moved
