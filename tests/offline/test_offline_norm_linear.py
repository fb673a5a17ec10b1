"""The kernels of `norm_linear` and `gated_linear`, compiled for sm_90a without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
import test_interpret_norm_linear as interpreted

from ikbo_jax.pallas.linear.gated_linear import gated_linear_kernel
from ikbo_jax.pallas.linear.norm_linear import norm_linear_kernel
from ikbo_jax.reference.norm_linear import Gate, Norm

pytestmark = pytest.mark.slow

#: The options of the interpreted kernels without their configuration.
CASES = {
    "hstu": (100_000, 512, ((4, 128),) * 4, "layer", "bfloat16", True),
    "rms_partial_blocks_f16": (1000, 264, ((200,), (4, 128)), "rms", "float16", False),
}
GATED_CASES = {
    "hstu": (100_000, (1, 512), 512, "layer", "bfloat16", True, True),
    "by_head": (100_000, (4, 128), 512, "layer", "bfloat16", True, True),
    "product_f16": (1000, (1, 264), 72, "rms", "float16", False, False),
    "ranking_residual": (65_536, (1, 256), 256, None, "bfloat16", None, True),
    "ranking_queries": (65_536, (1, 256), 256, "rms", "bfloat16", None, False),
}


def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize("name", CASES)
def test_offline_norm_linear_is_fit(name: str, compiler: offline.Compiler) -> None:
    problem, options, arrays = interpreted.norm_linear(CASES[name], of)
    options |= {"norm": Norm(problem.norm), "config": problem.default_config(), "num_sms": 132}
    (compiled,) = compiler.compile_fit(functools.partial(norm_linear_kernel, **options), *arrays)
    assert compiled.name == "ikbo_norm_linear"


@pytest.mark.parametrize("name", GATED_CASES)
def test_offline_gated_linear_is_fit(name: str, compiler: offline.Compiler) -> None:
    problem, options, arrays = interpreted.gated_linear(GATED_CASES[name], of)
    gate: Any = Gate(Norm(GATED_CASES[name][3]), **options)
    sms = {"config": problem.default_config(), "num_sms": 132}
    kernel = functools.partial(gated_linear_kernel, gate=gate, **sms)
    (compiled,) = compiler.compile_fit(kernel, arrays)
    assert compiled.name == "ikbo_gated_linear"
