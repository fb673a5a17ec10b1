"""The kernels of `norm_linear` and `gated_linear`, compiled for sm_90a without a GPU."""

import functools
import math

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.linear.gated_linear import gated_linear_kernel
from ikbo_jax.pallas.linear.norm_linear import norm_linear_kernel
from ikbo_jax.problems.gated_linear import NO_NORM, GatedLinearProblem
from ikbo_jax.problems.norm_linear import NormLinearProblem
from ikbo_jax.reference.norm_linear import Gate, GatedLinear, Norm

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


#: Rows, columns, F, norm, heads that are normalised on their own, whether [u, a, u · norm(a)] are
#: multiplied or None without u, dtype, whether there are factors and a residual.
GATED_CASES = {
    "hstu": (100_000, 512, 512, "layer", 1, True, "bfloat16", True),
    "by_head": (100_000, 512, 512, "layer", 4, True, "bfloat16", True),
    "product_f16": (1000, 264, 72, "rms", 1, False, "float16", False),
    "ranking_residual": (65_536, 256, 256, None, 1, None, "bfloat16", True),
    "ranking_queries": (65_536, 256, 256, "rms", 1, None, "bfloat16", False),
}


@pytest.mark.parametrize("name", GATED_CASES)
def test_offline_gated_linear_is_fit(name: str, compiler: offline.Compiler) -> None:
    rows, columns, features, kind, groups, concat, dtype, has_rest = GATED_CASES[name]
    is_plain, shared_rows = concat is None, 64 if concat is None and has_rest else 0
    sizes = rows, features, (columns,), kind or NO_NORM, dtype, "", groups, concat, False
    config = GatedLinearProblem(*sizes, is_plain, False, shared_rows).default_config()

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    vector = of(groups if groups > 1 else columns) if has_rest and not is_plain else None
    weight = of((3 if concat else 1) * columns, features)
    residual = of(rows, features) if has_rest else None
    shared = of(rows // shared_rows, features) if shared_rows else None
    gate = Gate(Norm(kind), groups, bool(concat))
    kernel = functools.partial(gated_linear_kernel, gate=gate, config=config, num_sms=132)
    row = of(rows, columns)
    u = None if is_plain else row
    operands = GatedLinear(u, row, vector, vector, weight, residual, None, shared)
    (compiled,) = compiler.compile_fit(kernel, operands)
    assert compiled.name == "ikbo_gated_linear"
