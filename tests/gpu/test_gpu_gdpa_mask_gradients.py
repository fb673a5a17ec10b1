"""Gradients of gdpa with masks by kernels on a Hopper GPU: numerics, determinism."""

import functools
from typing import Any

import jax
import numpy as np
import problems
import problems_gdpa
import problems_masks
import pytest
from problems_gdpa import ACTIVATIONS
from test_gpu_gdpa_backward import residuals
from test_gpu_gdpa_masks import SELF, SHAPES

from ikbo_jax.ops import dispatch, gdpa_mask
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.problems import GdpaBackwardConfig
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.reference import gdpa_chunked_vjp

pytestmark = pytest.mark.gpu


def check(shape, case, activation, dtype="bfloat16", **options) -> None:
    arrays = problems_gdpa.make_arrays(shape, dtype)
    settings = problems_gdpa.make_settings(shape, activation)
    d_out = problems_gdpa.cotangent(arrays, settings)
    masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
    kernels = functools.partial(
        op.kernel_vjp, settings=settings, num_sms=dispatch.num_sms(), **options
    )

    @jax.jit
    def run(arrays: Any, d_out: jax.Array, out: Any, lse: Any) -> Any:
        ours = kernels(arrays, d_out=d_out, out=out, lse=lse)
        return ours, gdpa_chunked_vjp.chunked_vjp(arrays, settings, d_out)

    inputs = masked, d_out, *residuals(masked, settings)
    found, plain = run(*inputs)
    again, _ = run(*inputs)
    exact = problems_gdpa.numpy_gradients(arrays, settings, d_out, case.rule)
    for array, repeated, want, rounded in zip(found, again, exact, plain, strict=True):
        problems.assert_within_error_rule(array, want, rounded)
        np.testing.assert_array_equal(array, repeated)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("name", problems_masks.cases(SELF))
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_every_mask_and_shape(shape: str, name: str, activation: str) -> None:
    check(SHAPES[shape], problems_masks.cases(SHAPES[shape])[name], activation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["groups", "two_intervals"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_every_masked_activation_and_dtype(activation, name, dtype) -> None:
    check(SELF, problems_masks.cases(SELF)[name], activation, dtype)


@pytest.mark.parametrize("activation", ["silu", "softmax", "gelu", "relu"])
@pytest.mark.parametrize("shape", ["self", "prefix"])
@pytest.mark.parametrize("name", ["causal", "groups", "two_intervals"])
def test_gradients_of_stored_gradients_of_scores(name, shape, activation, monkeypatch) -> None:
    monkeypatch.setattr(configs, "LEAST_STORED_KEYS", 0)
    for head_dim in (64, 96, 128):
        sizes = SHAPES[shape]._replace(head_dim=head_dim)
        check(sizes, problems_masks.cases(sizes)[name], activation)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("block", [16, 32, 48])
def test_gradients_of_every_block_of_keys(block: int, activation: str) -> None:
    case = problems_masks.hstu_case((60, 1, 0, 40, 64, 300, 5, 9), 3, window=50, full_tail=20)
    check(SELF, case, activation, query_config=GdpaBackwardConfig(block, 3))
