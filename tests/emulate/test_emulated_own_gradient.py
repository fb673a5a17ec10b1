"""The PTX of the launch that adds own tokens to attention's gradient, executed on a CPU."""

from typing import Any

import emulator
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest

from ikbo_jax.pallas.attention_backward.own import add_own_tokens

#: Dtype, candidates, T, key heads, query heads of each, head width, and whether there is a d_lse.
CASES = {
    "one_row_each": ("bfloat16", 37, 1, 2, 1, 128, True),
    "grouped_f16_h96": ("float16", 5, 3, 1, 3, 96, False),
    "t8_h64": ("bfloat16", 9, 8, 2, 1, 64, True),
    "h256": ("bfloat16", 3, 2, 1, 2, 256, False),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_gradients_of_own_tokens(name: str, sm90: emulator.Emulator) -> None:
    dtype, batch, q_len, kv_heads, group, width, has_d_lse = CASES[name]
    rng = np.random.default_rng(0)
    rows, tokens = (batch, q_len, kv_heads * group, width), (batch, 1, kv_heads, width)
    shapes = rows, rows, tokens, tokens, rows
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    d_out = jnp.asarray(rng.normal(size=rows), dtype)
    lse, d_lse = (jnp.asarray(rng.normal(size=rows[:3]), jnp.float32) for _ in range(2))
    operands = *arrays, lse, d_out, d_lse if has_d_lse else None
    options: Any = {"scale": width**-0.5, "dtype": "float32" if has_d_lse else None}
    with sm90.emulated(0) as launched:
        found = add_own_tokens(*operands, **options)
    assert launched == ["ikbo_attention_backward_own_mosaic_gpu_kernel"]
    want = oracle_attention.own_gradient(*operands, **options)
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.01, atol=0.003
        )
