"""GDPA's forward kernel with masks, compiled for sm_90a: no spills, no serialised WGMMAs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
from test_offline_gdpa import DEFAULT, NUM_SMS, SCALES

from ikbo_jax.pallas.flash import gdpa, gdpa_masked
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.problems import GdpaConfig, GdpaProblem

pytestmark = pytest.mark.slow

MASKED = dataclasses.replace(DEFAULT, mask="causal")


def launch(problem: GdpaProblem, config: GdpaConfig) -> tuple:
    """The kernel's host function, and the shapes that it takes."""

    def fn(query: Any, key: Any, value: Any, words: Any, counts: Any, *masks: Any) -> Any:
        return gdpa.gdpa_forward(
            *(query, key, value, lists.TileList(words, counts)),
            out_rows=problem.q_rows,
            activations=problem.activations,
            approx=problem.approx,
            scale=SCALES[0],
            output_scale=SCALES[1],
            config=config,
            num_sms=NUM_SMS,
            masks=gdpa_masked.Masks(*masks),
        )

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    dtype, tiles = jnp.dtype(problem.dtype), problem.q_rows // 128
    rows = jax.ShapeDtypeStruct((problem.q_rows, problem.q_heads, problem.head_dim), dtype)
    words = integers(tiles, lists.TILE_WORDS), integers(2)
    return fn, rows, rows, rows, *words, integers(tiles, 2, 4, 64), integers(tiles, 2, 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gelu_tanh"])
def test_offline_masked_kernel_is_fit(
    activation: str, head_dim: int, compiler: offline.Compiler
) -> None:
    dtype = "float16" if head_dim == 96 else "bfloat16"
    problem = dataclasses.replace(MASKED, activations=(activation,), head_dim=head_dim, dtype=dtype)
    config = problem.default_config()
    (compiled,) = compiler.compile_fit(*launch(problem, config))
    assert compiled.smem_bytes == config.smem_bytes(head_dim)
