"""Layouts with symbolic numbers of users and candidates, as in an exported model."""

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  These fill the table.
import layout_positions  # noqa: F401
import layout_sequences  # noqa: F401
import numpy as np
import pytest
from jax import export
from layout_table import LAYOUTS, B, S, U
from rewrite_basics import computed

import ikbo_jax as ikbo
from ikbo_jax.rewrite.report import cost
from ikbo_jax.rewrite.values import lineage

#: Layouts that do not name users and batch, so that they may be symbolic.
NAMES = (
    "dlrm",
    "din",
    "filled",
    "one_hot",
    "searchsorted",
    "gru_by_vmap",
    "last_item_by_two_indices",
    "last_item_taken_along_the_axis",
    "best_items",
    "column_set_to_the_candidates",
    "interpolated_features",
    "attention_with_a_bias_of_the_user",
    "causal_transformer",
    "hstu",
)


def report_of_exported(fn, args, *sizes: str, constraints=()):
    """Compares a function that is exported with symbolic sizes; returns the rewrite's report.

    `sizes` are the names of the sizes B and U; U stays a number without a name.
    """
    symbols = export.symbolic_shape(", ".join(sizes), constraints=constraints)
    symbols = dict(zip((B, U), symbols, strict=False))

    def of(x):
        return jax.ShapeDtypeStruct(tuple(symbols.get(n, n) for n in x.shape), x.dtype)

    symbolic = jax.tree.map(of, args)
    exported = export.export(jax.jit(ikbo.rewrite(fn)))(*symbolic)
    expected = computed(fn, *args)
    np.testing.assert_allclose(exported.call(*args), expected, rtol=1e-4, atol=1e-4)
    (report,) = ikbo.explain(ikbo.rewrite(fn), *symbolic).notes
    assert "raised" not in str(report)
    return report


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_a_bound(name: str) -> None:
    fn, args = LAYOUTS[name].fn, LAYOUTS[name].args()
    sizes, bound = ("batch", "users"), f"batch >= {S}*users"
    if name == "one_hot":  # Its model names the number of users.
        sizes, bound = ("batch",), f"batch >= {U * S}"
    report = report_of_exported(fn, args, *sizes, constraints=[bound])
    assert report.changed, str(report)
    assert "*batch" in str(report)


@pytest.mark.parametrize("name", ["dlrm", "causal_transformer", "last_item_by_two_indices"])
def test_a_batch_without_a_bound_is_refused(name: str) -> None:
    """A batch of one candidate has fewer rows than there are users."""
    assert not report_of_exported(LAYOUTS[name].fn, LAYOUTS[name].args(), "batch").changed


def _broadcast(users, slots):
    return jnp.broadcast_to(users[:, None], (users.shape[0], slots, users.shape[1]))


#: Spellings of a grid [users, slots] of candidates.
GRIDS = {
    "broadcast": _broadcast,
    "broadcast and merged": lambda u, n: _broadcast(u, n).reshape(u.shape[0] * n, -1),
    "repeat": lambda u, n: jnp.repeat(u, n, axis=0),
    "tile": lambda u, n: jnp.tile(u[:, None], (1, n, 1)),
    "number divided": lambda u, n: u[jnp.arange(u.shape[0] * n) // n],
    "index of the grid": lambda u, n: u[
        jnp.broadcast_to(jnp.arange(u.shape[0])[:, None], (u.shape[0], n))
    ],
    "repeated index": lambda u, n: jnp.take(u, jnp.repeat(jnp.arange(u.shape[0]), n), axis=0),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_of_users_and_slots(name: str) -> None:
    """Its products of sizes are compared by a bound of the product; without one, nothing runs."""

    def model(users, cands, w):
        copies = GRIDS[name](users, cands.shape[1])
        cands = cands.reshape(*copies.shape[:-1], cands.shape[-1])
        return jnp.concatenate([copies, cands], axis=-1) @ w

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((U, 64), (U, B, 33), (97, 128))]
    bound = [f"slots*users >= {S}*users"]
    assert report_of_exported(model, args, "slots", "users", constraints=bound).changed
    assert not report_of_exported(model, args, "slots", "users").changed


def test_sizes_are_compared_for_every_value_of_a_dimension() -> None:
    (batch,) = export.symbolic_shape("batch", constraints=["batch >= 8"])
    assert lineage.is_at_least(batch, 8)
    assert not lineage.is_at_least(batch, 9)
    assert lineage.is_at_least(3 * batch, batch + 16)
    assert not lineage.is_at_least(16, batch)
    assert lineage.is_at_least(2, 2)
    assert not lineage.is_at_least(1, 2)


def test_one_of_branches_whose_order_is_unknown_counts() -> None:
    (batch,) = export.symbolic_shape("batch", constraints=["batch >= 8"])
    args = [jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (batch, 64)]
    program = jax.make_jaxpr(
        lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x + (w @ w).sum())
    )(*args)
    for found in (cost.program_cost(program), *cost.decisive_costs(program, program)):
        assert found.flops in (2 * 64 * 64 * batch, 2 * 64 * 64 * 64)


def test_a_program_that_may_cost_more_is_refused() -> None:
    (batch,) = export.symbolic_shape("batch", constraints=["batch >= 8"])
    row, rows = (jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (64, batch))
    original, grown = (
        cost.program_cost(jax.make_jaxpr(lambda x: x @ jnp.ones((512, 512)))(x).jaxpr)
        for x in (row, rows)
    )
    assert "batch" in cost.refusal(grown, original)
    assert not cost.refusal(grown, cost.Cost(2 * grown.flops, 2 * grown.nbytes))
