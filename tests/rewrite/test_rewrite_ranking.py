"""The models of `ranking_models`: values, gradients, and the work that the rewrite saves."""

import jax
import numpy as np
import pytest
from ranking_models import MODELS, arrays
from rewrite_basics import assert_same_up_to_rounding, computed, loss, report_of

import ikbo_jax as ikbo


@pytest.fixture(autouse=True)
def models_may_promote_as_people_do():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_rewritten_models_agree_and_save_work(name):
    model, args = MODELS[name], arrays()

    for of in (lambda fn: fn, lambda fn: jax.grad(loss(fn))):
        rewritten, original = (computed(of(fn), args) for fn in (ikbo.rewrite(model.fn), model.fn))
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(original))
        assert_same_up_to_rounding(rewritten, original, 5e-5)
    report = report_of(model.fn, args)
    assert report.changed, report
    assert report.flops_saved >= model.flops * report.costs.original.flops, report
    assert report.bytes_saved >= model.nbytes * report.costs.original.nbytes, report
