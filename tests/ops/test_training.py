"""Training works: loss curves of the network's versions agree with float32 within seed noise."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from training_runs import assert_learnt_alike, curves, versions

from ikbo_jax.models import ranking

pytestmark = pytest.mark.slow

TINY = ranking.Sizes(
    candidates=48,
    users=6,
    layers=1,
    width=16,
    user_dense=8,
    dense_tokens=2,
    user_tokens=10,
    pooled=4,
    cand_tokens=12,
    history=16,
    queries=4,
    heads=2,
    head_dim=8,
    compressed=8,
    rank=4,
    hidden=16,
    dtype="float32",
)
SEEDS, STEPS = 3, 150


@functools.cache
def losses(name: str, dtype: str) -> np.ndarray:
    sizes = dataclasses.replace(TINY, dtype=dtype)
    return curves(versions(sizes)[name], sizes, TINY, SEEDS, STEPS)


@pytest.mark.parametrize("name", ["co_designed", "rewrite"])
def test_versions_learn_as_the_copies_do_in_float32(name: str) -> None:
    assert_learnt_alike(losses(name, "bfloat16"), losses("materialised", "float32"))
