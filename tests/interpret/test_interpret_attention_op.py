"""The public `attention` down to its real kernel, interpreted on a CPU."""

from __future__ import annotations

import dataclasses
import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.ops import attention as op
from ikbo_jax.ops import dispatch
from ikbo_jax.pallas.flash import attention as kernel
from ikbo_jax.problems import AttentionConfig

pytestmark = pytest.mark.usefixtures("on_cpu")

PARAMS = dataclasses.replace(interpreter.PARAMS, inline_mgpu="_hack_model_inline_mgpu_tokamax")
CONFIG = AttentionConfig(block_kv=32, k_stages=2, v_stages=2, q_slots=2, chunk=2)
SCALE = 0.125


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Lets the op take the kernel, and the kernel the interpreter."""
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 2)
    interpreted_kernel = functools.partial(kernel.attention_kernel, interpret=PARAMS)
    monkeypatch.setattr(kernel, "attention_kernel", interpreted_kernel)
    op._attention.clear_cache()
    yield
    op._attention.clear_cache()


def test_unsorted_candidates() -> None:
    shape = problems.AttentionShape(3, 5, 3, 40, 2, 1, 64, "unsorted")
    inputs = problems.make_attention_inputs(shape)
    results = ikbo.attention(
        *inputs[:4],
        scale=SCALE,
        return_residuals=True,
        implementation="mosaic_gpu",
        config=CONFIG,
    )
    problems.assert_attention_within_error_rule(results, inputs, scale=SCALE)


def test_unsorted_candidates_and_gradient() -> None:
    shape = problems.AttentionShape(3, 5, 64, 40, 2, 1, 64, "unsorted", "ragged")
    inputs = problems.make_attention_inputs(shape)

    def attend(query: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ikbo.attention(
            query,
            *inputs[1:4],
            scale=SCALE,
            key_value_seq_lengths=inputs.key_value_seq_lengths,
            return_residuals=True,
            implementation="mosaic_gpu",
            config=CONFIG,
        )

    results, vjp = jax.vjp(attend, inputs.query)
    problems.assert_attention_within_error_rule(results, inputs, scale=SCALE)
    out, lse = map(np.asarray, results)
    # Of the sum of the sine of out.
    d_out, d_lse = np.cos(out.astype(np.float32)).astype(out.dtype), np.zeros_like(lse)
    (actual,) = vjp((jnp.asarray(d_out), jnp.asarray(d_lse)))
    expected, _, _ = problems.numpy_attention_gradients(inputs, d_out, d_lse, scale=SCALE)
    np.testing.assert_allclose(np.asarray(actual).astype(float), expected, rtol=0, atol=0.02)
