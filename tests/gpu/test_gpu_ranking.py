"""The ranking network on a Hopper GPU: versions agree, run the kernels, and learn alike."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from training_runs import assert_learnt_alike, curves, versions

import ikbo_jax as ikbo
from benchmarks import ranking_by_hand
from ikbo_jax.cases import ranking as cases
from ikbo_jax.models import ranking

pytestmark = pytest.mark.gpu

SIZES = ranking.Sizes(candidates=301, users=7, layers=2)
MOST = int(ranking.candidate_counts(SIZES).max())
VERSIONS = {
    "co_designed": ranking.co_designed,
    "rewritten": ikbo.rewrite(ranking.materialised),
    "hand_optimised": functools.partial(ranking_by_hand.hand_optimised, most=MOST),
    "tuned": ranking_by_hand.tuned_copies,
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


TRAINED_SIZES = ranking.Sizes(
    **{"candidates": 512, "users": 8, "layers": 2, "width": 128, "user_dense": 64},
    **{"dense_tokens": 8, "user_tokens": 120, "pooled": 64, "cand_tokens": 108, "history": 256},
    **{"queries": 16, "heads": 2, "head_dim": 128, "compressed": 96, "hidden": 128},
)
SEEDS, STEPS = 3, 300


@functools.cache
def losses(name: str, dtype: str) -> np.ndarray:
    sizes = dataclasses.replace(TRAINED_SIZES, dtype=dtype)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        return curves(versions(sizes)[name], sizes, TRAINED_SIZES, SEEDS, STEPS)


def test_the_kernels_train() -> None:
    shapes = jax.eval_shape(
        lambda: (ranking.init(TRAINED_SIZES), ranking.make_request(TRAINED_SIZES))
    )
    plans = ikbo.explain(ranking.co_designed, *shapes).plans
    ops = {"attention", "gated_linear", "gdpa", "linear_compression", "norm_linear"}
    assert {plan.op for plan in plans if plan.implementation == "mosaic_gpu"} == ops
    # The kernel adds a row of a residual to 64 rows at least; here it is one for 16 queries.
    others = [plan for plan in plans if plan.implementation != "mosaic_gpu"]
    assert all("multiple of 64 rows" in str(plan) for plan in others), others


# Two programs of 300 steps compile, beside other processes.
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("name", ["materialised", "co_designed", "rewrite", "hand_optimised"])
def test_every_version_learns_as_the_copies_do_in_float32(name: str) -> None:
    assert_learnt_alike(losses(name, "bfloat16"), losses("materialised", "float32"))
