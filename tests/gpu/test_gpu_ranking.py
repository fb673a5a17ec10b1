"""The ranking network on a Hopper GPU: all versions agree, and the library's run the kernels."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ikbo_jax as ikbo
from ikbo_jax.cases import ranking as cases
from ikbo_jax.models import ranking

pytestmark = pytest.mark.gpu

SIZES = ranking.Sizes(candidates=301, users=7, layers=2)
MOST = int(ranking.candidate_counts(SIZES).max())
VERSIONS = {
    "co_designed": ranking.co_designed,
    "rewritten": ikbo.rewrite(ranking.materialised),
    "hand_optimised": functools.partial(ranking.hand_optimised, most=MOST),
    "tuned": functools.partial(ranking.materialised, tuned=True),
}


def test_versions_agree_in_bfloat16():
    inputs = (ranking.init(SIZES), ranking.make_request(SIZES))
    exact = np.asarray(cases.oracle(*inputs), np.float64)
    errors = {
        name: np.max(np.abs(np.asarray(jax.jit(version)(*inputs), np.float64) - exact))
        for name, version in {"materialised": ranking.materialised, **VERSIONS}.items()
    }
    bound = cases.tolerance(SIZES, errors["materialised"], float(np.max(np.abs(exact))))
    assert {name: error for name, error in errors.items() if not error <= bound} == {}


@pytest.mark.parametrize("name", ["co_designed", "rewritten"])
def test_every_op_runs_its_kernel(name):
    inputs = (ranking.init(SIZES), ranking.make_request(SIZES))
    text = jax.jit(VERSIONS[name]).lower(*inputs).as_text()
    for kernel in ("ikbo_linear_compression", "ikbo_attention", "ikbo_gdpa_forward"):
        assert kernel in text, kernel
