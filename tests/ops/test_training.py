"""Training works: loss curves of the network's versions agree with float32 within seed noise."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from test_ranking import TINY
from training_runs import assert_learnt_alike, curves, versions

pytestmark = pytest.mark.slow

#: Larger than the tiny sizes where too few candidates would learn nothing.
SIZES = dataclasses.replace(TINY, candidates=48, users=6, history=16)
SEEDS, STEPS = 3, 150


@functools.cache
def losses(name: str, dtype: str) -> np.ndarray:
    sizes = dataclasses.replace(SIZES, dtype=dtype)
    return curves(versions(sizes)[name], sizes, SIZES, SEEDS, STEPS)


@pytest.mark.parametrize("name", ["co_designed", "rewrite"])
def test_versions_learn_as_the_copies_do_in_float32(name: str) -> None:
    assert_learnt_alike(losses(name, "bfloat16"), losses("materialised", "float32"))
