"""GDPA's forward kernel with masks on a Hopper GPU, on request: numerics, determinism."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import problems
import problems_gdpa
import problems_masks
import pytest
from problems_gdpa import ACTIVATIONS, Shape
from problems_masks import attend

from ikbo_jax.problems import GdpaConfig

pytestmark = pytest.mark.gpu

LENGTHS = (300, 1, 0, 129, 64, 700, 128, 65)
SELF = Shape(LENGTHS, LENGTHS, 2, 1, 128, before=2, after=131)
SHAPES = {
    "self": SELF,
    "h64": SELF._replace(head_dim=64),
    "h96": SELF._replace(head_dim=96),
    "prefix": Shape((5, 70, 130), (300, 70, 400), 4, 2, 128),
    "indexed": Shape((3, 80, 0, 50, 200), (90, 400, 0, 60), 2, 1, 128, (3, 0, 0, 1, 1), after=3),
    "pma": Shape(70, (190, 0, 1, 330), 2, 2, 64),
}
CONFIGS = {
    "default": None,
    "one_slot": GdpaConfig(k_stages=2, v_stages=2, q_slots=1),
    "narrow_tickets": GdpaConfig(block_kv=64, k_stages=4, v_stages=4, tickets=True),
}


def check(shape: Shape, case: problems_masks.Case, activation: Any, **options: Any) -> None:
    arrays = problems_gdpa.make_arrays(shape, options.pop("dtype", "bfloat16"))
    settings = problems_gdpa.make_settings(shape, activation)
    d_out = problems_gdpa.cotangent(arrays, settings)
    exact, _ = problems_masks.oracle(arrays, settings, d_out, case.rule)
    plain = attend(arrays, case.mask, activation=activation, implementation="xla")
    run = jax.jit(
        lambda x, mask: attend(
            x, mask, activation=activation, implementation="mosaic_gpu", **options
        )
    )
    out = run(arrays, case.mask)
    problems.assert_within_error_rule(out, exact, plain)
    np.testing.assert_array_equal(out, run(arrays, case.mask))


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("name", problems_masks.cases(SELF))
@pytest.mark.parametrize("shape", SHAPES)
def test_gdpa_every_mask_and_shape(shape: str, name: str, activation: str) -> None:
    check(SHAPES[shape], problems_masks.cases(SHAPES[shape])[name], activation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gdpa_every_masked_activation_and_dtype(activation: str, dtype: str) -> None:
    check(SELF, problems_masks.cases(SELF)["groups"], activation, dtype=dtype)


@pytest.mark.parametrize("activation", ["gelu_tanh", "softmax"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["causal", "two_intervals"])
def test_gdpa_every_kind_of_masked_config(name: str, config: str, activation: str) -> None:
    check(SELF, problems_masks.cases(SELF)[name], activation, config=CONFIGS[config])
