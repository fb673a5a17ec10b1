"""The PTX of the launch that adds own tokens to attention's gradient, executed on a CPU."""

from typing import Any

import emulator
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest

from ikbo_jax.pallas.attention_backward.own import add_own_tokens

#: Dtype, candidates, T, key heads, query heads of each, head width, and whether tokens' gradients
#: are f32.
CASES = {
    "one_row_each": ("bfloat16", 37, 1, 2, 1, 128, True),
    "grouped_f16_h96": ("float16", 5, 3, 1, 3, 96, False),
    "t8_h64": ("bfloat16", 9, 8, 2, 1, 64, True),
    "h256": ("bfloat16", 3, 2, 1, 2, 256, False),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_gradients_of_own_tokens(name: str, sm90: emulator.Emulator) -> None:
    dtype, batch, q_len, kv_heads, group, width, is_f32 = CASES[name]
    rng = np.random.default_rng(0)
    rows, tokens = (batch, q_len, kv_heads * group, width), (batch, 1, kv_heads, width)
    shapes = rows, rows, tokens, tokens
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    d_out = jnp.asarray(rng.normal(size=rows), dtype)
    others, delta = (jnp.asarray(rng.normal(size=rows[:3]), jnp.float32) for _ in range(2))
    options: Any = {"scale": width**-0.5, "dtype": "float32" if is_f32 else None}
    query, key = arrays[1].astype(jnp.float32), arrays[2].astype(jnp.float32)
    scores = options["scale"] * jnp.sum(query * jnp.repeat(key, group, axis=2), axis=-1)
    lse = jnp.logaddexp(scores, others)  # of the token and of other keys
    operands = *arrays, lse, d_out, delta
    with sm90.emulated(0) as launched:
        found = add_own_tokens(*operands, **options)
    assert launched == ["ikbo_attention_backward_own_mosaic_gpu_kernel"]
    want = oracle_attention.own_gradient(*operands, **options)
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.01, atol=0.003
        )


def test_emulated_weights_of_huge_logits_are_at_most_one(sm90: emulator.Emulator) -> None:
    """lse is rounded to multiples of 2 there; the weight is 1 of a token that is all of it."""
    rng, tokens = np.random.default_rng(1), (16, 1, 1, 64)
    query, key, value, d_out = (
        jnp.asarray(rng.normal(size=tokens), jnp.bfloat16) for _ in range(4)
    )
    scale, has_all = 4e6, np.arange(16) % 2 == 0
    scores = scale * np.sum(np.float64(query) * np.float64(key), axis=-1)
    lse = jnp.asarray(np.where(has_all[:, None, None], scores, scores + 2e7), jnp.float32)
    assert jnp.max(jnp.abs(lse)) > 2.0**24
    delta = jnp.sum(d_out.astype(jnp.float32) * value.astype(jnp.float32), axis=-1)
    with sm90.emulated(0):
        *_, found = add_own_tokens(
            query, query, key, value, lse, d_out, delta, scale=scale, dtype="float32"
        )
    np.testing.assert_allclose(found, np.where(has_all[:, None, None, None], d_out, 0), rtol=1e-3)
