"""Layouts whose batch is a symbolic dimension, as in an exported model: rewritten, or refused."""

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

#: Layouts that do not name the batch, so that it may be symbolic.
NAMES = (
    "dlrm",
    "din",
    "one_hot",
    "filled",
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


def specs(args, constraints):
    (batch,) = export.symbolic_shape("batch", constraints=constraints)

    def of(x):
        shape = tuple(batch if n == B else n for n in x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(of, args)


def report_of_exported(name: str, constraints):
    """Compares a layout that is exported with a symbolic batch; returns the rewrite's report."""
    layout = LAYOUTS[name]
    args = layout.args()
    symbolic = specs(args, constraints)
    exported = export.export(jax.jit(ikbo.rewrite(layout.fn)))(*symbolic)
    expected = computed(layout.fn, *args)
    np.testing.assert_allclose(exported.call(*args), expected, rtol=1e-4, atol=1e-4)
    (report,) = ikbo.explain(ikbo.rewrite(layout.fn), *symbolic).notes
    return report


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_a_bound(name: str) -> None:
    report = report_of_exported(name, [f"batch >= {U * S}"])
    assert report.changed, str(report)
    assert "*batch" in str(report)


@pytest.mark.parametrize("name", ["dlrm", "causal_transformer", "last_item_by_two_indices"])
def test_a_batch_without_a_bound_is_refused(name: str) -> None:
    """A batch of one candidate has fewer rows than there are users."""
    report = report_of_exported(name, [])
    assert not report.changed
    assert "raised" not in str(report)


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
