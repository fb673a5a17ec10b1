"""The kernel of `norm_linear`, compiled for sm_90a without a GPU."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.linear.norm_linear import norm_linear_kernel
from ikbo_jax.problems.norm_linear import NormLinearProblem
from ikbo_jax.reference.norm_linear import Norm

pytestmark = pytest.mark.slow

#: Rows, F, shapes of the groups, norm, dtype, whether there are factors and biases.
CASES = {
    "hstu": (100_000, 512, ((4, 128),) * 4, "layer", "bfloat16", True),
    "rms_partial_blocks_f16": (1000, 264, ((200,), (4, 128)), "rms", "float16", False),
}


@pytest.mark.parametrize("name", CASES)
def test_offline_norm_linear_is_fit(name: str, compiler: offline.Compiler) -> None:
    rows, features, shapes, kind, dtype, has_vectors = CASES[name]
    config = NormLinearProblem(
        rows, features, tuple(map(math.prod, shapes)), kind, dtype, ""
    ).default_config()
    kernel = functools.partial(
        norm_linear_kernel,
        norm=Norm(kind),
        activations=("silu", *("identity",) * (len(shapes) - 1)),
        has_projection=has_vectors,
        config=config,
        num_sms=132,
    )

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    vector = of(features) if has_vectors else None
    weights = tuple(of(features, *shape) for shape in shapes)
    biases = tuple(of(*shape) if has_vectors else None for shape in shapes)
    operands = (of(rows, features), vector, vector, weights, biases)
    (compiled,) = compiler.compile_fit(kernel, *operands)
    assert compiled.name == "ikbo_norm_linear"
