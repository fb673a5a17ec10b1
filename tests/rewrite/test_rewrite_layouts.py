"""Layouts that ranking teams write: values, gradients, and the share of products removed.

`layout_table` holds every model with its form by hand. The share removed is how many of the FLOPs
that the form by hand saves `rewrite` saves, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  These fill the table.
import layout_modules
import layout_positions  # noqa: F401
import layout_sequences  # noqa: F401
import numpy as np
import pytest
from layout_table import LAYOUTS, Layout

import ikbo_jax as ikbo
from ikbo_jax.rewrite import cost, jaxprs


def flops(fn, args) -> int:
    return cost.program_cost(jax.make_jaxpr(fn)(*args)).flops


def share_removed(layout: Layout) -> float:
    args = layout.args()
    original, by_hand = flops(layout.fn, args), flops(layout.hand, args)
    assert by_hand < original
    return (original - flops(ikbo.rewrite(layout.fn), args)) / (original - by_hand)


#: Layouts without a rule yet.
PENDING = {}


def _named(names):
    mark = pytest.mark.xfail(strict=True, raises=AssertionError)
    return [pytest.param(x, marks=mark) if x in PENDING else x for x in names]


@pytest.mark.parametrize("name", _named(LAYOUTS))
def test_share_removed(name: str) -> None:
    layout = LAYOUTS[name]
    share = share_removed(layout)
    assert share >= layout.bar, f"{name}: {share:.2f} of the products are removed"


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(name: str) -> None:
    layout = LAYOUTS[name]
    args = layout.args()
    floating = [n for n, x in enumerate(args) if _is_floating(x)]

    def loss(fn):
        def of(*values):
            merged = list(args)
            for n, x in zip(floating, values, strict=True):
                merged[n] = x
            out = fn(*merged)
            return jnp.sum(jnp.sin(out)), out

        if "while_loop" in name:  # It has no gradient.
            return of
        return jax.grad(of, argnums=tuple(range(len(floating))), has_aux=True)

    values = [args[n] for n in floating]

    @jax.jit
    def run(*values):
        return [loss(f)(*values) for f in (layout.fn, ikbo.rewrite(layout.fn), layout.hand)]

    theirs, *others = run(*values)
    for ours in others:
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            scale = np.max(np.abs(y), initial=1.0)
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("name", _named(name for name, x in LAYOUTS.items() if x.never))
def test_no_copy_of_the_history(name: str) -> None:
    layout = LAYOUTS[name]
    shapes = set(_shapes(jax.make_jaxpr(ikbo.rewrite(layout.fn))(*layout.args()).jaxpr))
    assert not shapes.intersection(layout.never)


def test_rewritten_layers_grow_linearly() -> None:
    layout = LAYOUTS["causal_transformer_of_8_layers"]
    blocks, *rest = layout.args()

    def equations(layers: int) -> int:
        program = jax.make_jaxpr(ikbo.rewrite(layout.fn))(blocks[:layers], *rest)
        return sum(1 for _ in _shapes(program.jaxpr))

    two, four, eight = map(equations, (2, 4, 8))
    assert eight - four == 2 * (four - two)


def test_comparisons_that_are_no_lookups() -> None:
    def at(positions, compare=jnp.equal):
        def fn(user, index):
            return compare(index[:, None], positions).astype(user.dtype) @ user

        return fn

    def shuffled(user, index):
        """The index is shuffled by a transpose of two dimensions that it has in between."""
        column = index.reshape(2, -1).T.reshape(-1, 1)
        return (column == jnp.arange(len(user))[None]).astype(user.dtype) @ user

    user, index = LAYOUTS["one_hot"].args()[:1] + LAYOUTS["one_hot"].args()[2:3]
    positions = jnp.arange(user.shape[0])[None]
    assert user.shape[0] % 2 == 0
    assert index.shape[0] % 2 == 0
    pairs = positions.reshape(2, -1).T.reshape(1, -1)
    for fn in (shuffled, at(pairs)):
        ours, theirs = jax.jit(lambda *x, fn=fn: (ikbo.rewrite(fn)(*x), fn(*x)))(user, index)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for fn in (at(positions[:, ::-1]), at(positions + 1), at(positions, jnp.less), at(positions)):
        ours, theirs = jax.jit(lambda *x, fn=fn: (ikbo.rewrite(fn)(*x), fn(*x)))(user, index - 1)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def modules():
    return layout_modules.models()


@pytest.mark.parametrize(
    ("name", "bar"),
    [
        ("linen_fields", 0.9),
        ("nnx_fields", 0.9),
        ("linen_transformer", 0.8),
        ("nnx_transformer", 0.8),
    ],
)
def test_modules_of_flax(modules, name: str, bar: float) -> None:
    fn, (params, *request), by_hand = modules[name]
    original, ours = (flops(f, (params, *request)) for f in (fn, ikbo.rewrite(fn)))
    assert (original - ours) / (original - by_hand) >= bar

    def loss(fn):
        def of(params):
            out = fn(params, *request)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(of, has_aux=True)

    with jax.numpy_rank_promotion("allow"):
        ours, theirs = jax.jit(lambda params: [loss(f)(params) for f in (ikbo.rewrite(fn), fn)])(
            params
        )
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.max(np.abs(y), initial=1.0))


def _is_floating(x) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x))


def _shapes(program):
    for eqn in program.eqns:
        # The op's XLA path, which runs on CPUs, may hold them.
        if eqn.params.get("name") in ("_attention", "_gdpa"):
            continue
        yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
        for inner in jaxprs.inner_programs(eqn):
            yield from _shapes(inner)
