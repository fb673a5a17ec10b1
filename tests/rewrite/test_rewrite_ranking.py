"""The models of `ranking_models`: values, gradients, and the work that the rewrite saves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranking_models import MODELS, arrays
from rewrite_basics import both, report_of

import ikbo_jax as ikbo


@pytest.fixture(autouse=True)
def models_may_promote_as_people_do():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_rewritten_models_agree_and_save_work(name):
    model, args = MODELS[name], arrays()

    def gradients(fn, args):
        return jax.grad(lambda a: sum(jnp.sin(x).sum() for x in jax.tree.leaves(fn(a))))(args)

    @jax.jit
    def of_both(args):
        return [gradients(fn, args) for fn in (ikbo.rewrite(model.fn), model.fn)]

    for rewritten, original in (both(model.fn, args), of_both(args)):
        for x, y in zip(jax.tree.leaves(rewritten), jax.tree.leaves(original), strict=True):
            assert not np.isnan(y).any()
            largest = np.abs(y).max(initial=1e-6)
            np.testing.assert_allclose(x / largest, y / largest, rtol=0, atol=1e-4)
    report = report_of(model.fn, args)
    assert report.changed, report
    assert report.flops_saved >= model.flops * report.costs.original.flops, report
    assert report.bytes_saved >= model.nbytes * report.costs.original.nbytes, report
