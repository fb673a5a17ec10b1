"""Layouts that ranking teams write: values, gradients, and the share of products removed.

`layout_table` holds every model with its form by hand. The share removed is how many of the FLOPs
that the form by hand saves `rewrite` saves, too.
"""

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  These fill the table.
import layout_modules
import layout_positions  # noqa: F401
import layout_sequences  # noqa: F401
import numpy as np
import pytest
from layout_table import LAYOUTS
from rewrite_basics import assert_same_up_to_rounding, both, close, computed, gradients_by_all, loss

import ikbo_jax as ikbo
from ikbo_jax.rewrite.report import cost
from ikbo_jax.rewrite.values import jaxprs


def flops(fn, args) -> int:
    return cost.program_cost(jax.make_jaxpr(fn)(*args)).flops


@pytest.mark.parametrize("name", LAYOUTS)
def test_share_removed(name: str) -> None:
    """Asserts as well that no array is a copy, of a shape that the layout must never hold."""
    layout = LAYOUTS[name]
    args = layout.args()
    original, by_hand = flops(layout.fn, args), flops(layout.hand, args)
    assert by_hand < original
    program = jax.make_jaxpr(ikbo.rewrite(layout.fn))(*args)
    share = (original - cost.program_cost(program).flops) / (original - by_hand)
    assert share >= layout.bar, f"{name}: {share:.2f} of the products are removed"
    assert not set(_shapes(program.jaxpr)).intersection(layout.never)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients(name: str) -> None:
    layout = LAYOUTS[name]
    args = layout.args()
    # A while loop has no gradient.
    of = loss if "while_loop" in name else gradients_by_all(args)
    for each in (lambda fn: fn, of):
        theirs, ours, by_hand = (
            computed(each(fn), *args) for fn in (layout.fn, ikbo.rewrite(layout.fn), layout.hand)
        )
        assert_same_up_to_rounding(ours, theirs)
        assert_same_up_to_rounding(by_hand, theirs)


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
        close(*both(fn, user, index))
    for fn in (at(positions[:, ::-1]), at(positions + 1), at(positions, jnp.less), at(positions)):
        close(*both(fn, user, index - 1))


@pytest.fixture(scope="module")
def modules():
    return layout_modules.models()


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_modules_of_flax(modules, name: str) -> None:
    fn, (params, *request), by_hand = modules[name]
    original, ours = (flops(f, (params, *request)) for f in (fn, ikbo.rewrite(fn)))
    assert (original - ours) / (original - by_hand) >= 0.8

    with jax.numpy_rank_promotion("allow"):
        for of in (lambda fn: fn, lambda fn: jax.grad(loss(fn))):
            ours, theirs = (computed(of(f), params, *request) for f in (ikbo.rewrite(fn), fn))
            # The bias of keys has no gradient but for roundings.
            for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                scale = np.max(np.abs(y), initial=1.0)
                np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * scale)


def _shapes(program):
    for eqn in program.eqns:
        # The op's XLA path, which runs on CPUs, may hold them.
        if eqn.params.get("name") in ("_attention", "_gdpa"):
            continue
        yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
        for inner in jaxprs.inner_programs(eqn):
            yield from _shapes(inner)
