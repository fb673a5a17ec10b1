"""Training on the GPU: every version of the network learns as the copies do in float32."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from training_runs import assert_learnt_alike, curves, versions

import ikbo_jax as ikbo
from ikbo_jax.models import ranking

pytestmark = pytest.mark.gpu

SIZES = ranking.Sizes(
    candidates=512,
    users=8,
    layers=2,
    width=128,
    user_dense=64,
    dense_tokens=8,
    user_tokens=120,
    pooled=64,
    cand_tokens=108,
    history=256,
    queries=16,
    heads=2,
    head_dim=128,
    compressed=96,
    hidden=128,
)
SEEDS, STEPS = 3, 300


@functools.cache
def losses(name: str, dtype: str) -> np.ndarray:
    sizes = dataclasses.replace(SIZES, dtype=dtype)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        return curves(versions(sizes)[name], sizes, SIZES, SEEDS, STEPS)


def test_the_kernels_train() -> None:
    shapes = jax.eval_shape(lambda: (ranking.init(SIZES), ranking.make_request(SIZES)))
    plans = ikbo.explain(ranking.co_designed, *shapes).plans
    assert {plan.implementation for plan in plans} == {"mosaic_gpu"}


# Two programs of 300 steps compile, beside other processes.
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("name", ["materialised", "co_designed", "rewrite", "hand_optimised"])
def test_every_version_learns_as_the_copies_do_in_float32(name: str) -> None:
    assert_learnt_alike(losses(name, "bfloat16"), losses("materialised", "float32"))
