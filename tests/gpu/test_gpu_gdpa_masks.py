"""GDPA's kernels with masks on a Hopper GPU: numerics, determinism, also of gradients."""

import functools
from typing import Any

import jax
import numpy as np
import on_gpu
import problems
import problems_gdpa
import problems_masks
import pytest
from problems_gdpa import ACTIVATIONS, Shape
from problems_masks import attend
from test_gpu_gdpa import make

from ikbo_jax.ops import dispatch, gdpa_mask
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.problems import GdpaConfig
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.reference import gdpa_chunked_vjp
from ikbo_jax.reference.gdpa import Arrays

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
    arrays, settings = make(shape, activation, options.pop("dtype", "bfloat16"))
    exact = problems_gdpa.numpy_oracle(arrays, settings, case.rule)
    plain = attend(arrays, case.mask, activation=activation, implementation="xla")
    options |= {"activation": activation, "implementation": "mosaic_gpu"}
    run = jax.jit(functools.partial(attend, **options))
    out = on_gpu.assert_repeats(run, (arrays, case.mask), 1)
    problems.assert_within_error_rule(out, exact, plain)


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


def with_gradients(arrays: Arrays, mask: Any, activation: str) -> tuple[jax.Array, Any]:
    def run(*qkv: jax.Array) -> jax.Array:
        options = {"activation": activation, "implementation": "mosaic_gpu"}
        return attend(Arrays(*qkv, *arrays[3:]), mask, **options)

    out, pull_back = jax.vjp(run, *arrays[:3])
    return out, pull_back(out)


SANITIZED = """
import jax, problems_gdpa, problems_masks, test_gpu_gdpa_masks as suite
shape = problems_gdpa.Shape((0, 70, 5, 130), (40, 90, 129, 130), 2, 1, 128, before=3, after=140)
arrays = problems_gdpa.make_arrays(shape)
for name in ("window", "targets", "two_intervals"):
    mask = problems_masks.cases(shape)[name].mask
    for activation in ("silu", "softmax"):
        jax.block_until_ready(suite.with_gradients(arrays, mask, activation))
print("FINISHED")
"""
test_masks_sanitizer = on_gpu.sanitizer_test(SANITIZED)


@on_gpu.soaks
def test_masks_soak() -> None:
    """Launches with every mask in random order give the bits of their first launch."""
    arrays, cases = problems_gdpa.make_arrays(SELF), []
    for case in problems_masks.cases(SELF).values():
        for activation in ("silu", "softmax"):
            run = jax.jit(functools.partial(with_gradients, mask=case.mask, activation=activation))
            cases.append((run, arrays, run(arrays)))
    on_gpu.soak(cases)


# Gradients.


def check_gradients(shape, case, activation, dtype="bfloat16") -> None:
    arrays, settings = make(shape, activation, dtype)
    d_out = problems_gdpa.cotangent(arrays, settings)
    masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
    kernels = functools.partial(op.kernel_vjp, settings=settings, num_sms=dispatch.num_sms())

    @jax.jit
    def run(arrays: Any, d_out: jax.Array, out: Any, lse: Any) -> Any:
        ours = kernels(arrays, d_out=d_out, out=out, lse=lse)
        return ours, gdpa_chunked_vjp.chunked_vjp(arrays, settings, d_out)

    inputs = masked, d_out, *problems_gdpa.residuals(masked, settings)
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
    check_gradients(SHAPES[shape], problems_masks.cases(SHAPES[shape])[name], activation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["groups", "two_intervals"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_every_masked_activation_and_dtype(activation, name, dtype) -> None:
    check_gradients(SELF, problems_masks.cases(SELF)[name], activation, dtype)


@pytest.mark.parametrize("activation", ["silu", "softmax", "gelu", "relu"])
@pytest.mark.parametrize("shape", ["self", "prefix"])
@pytest.mark.parametrize("name", ["causal", "groups", "two_intervals"])
def test_gradients_of_stored_gradients_of_scores(name, shape, activation, monkeypatch) -> None:
    monkeypatch.setattr(configs, "LEAST_STORED_KEYS", 0)
    for head_dim in (64, 96, 128):
        sizes = SHAPES[shape]._replace(head_dim=head_dim)
        check_gradients(sizes, problems_masks.cases(sizes)[name], activation)
