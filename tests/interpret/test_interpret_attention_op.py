"""The public `attention` and its gradient down to their real kernels, interpreted on a CPU."""

from __future__ import annotations

import dataclasses
import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.ops import attention as op
from ikbo_jax.ops import dispatch
from ikbo_jax.pallas.attention_backward import kernel as backward_kernel
from ikbo_jax.pallas.flash import attention as kernel
from ikbo_jax.pallas.worklist import pack
from ikbo_jax.problems import AttentionConfig
from ikbo_jax.reference import attention as reference

pytestmark = pytest.mark.usefixtures("on_cpu")

PARAMS = dataclasses.replace(interpreter.PARAMS, inline_mgpu="_hack_model_inline_mgpu_tokamax")
CONFIG = AttentionConfig(block_kv=32, k_stages=2, v_stages=2, q_slots=2)
SCALE = 0.125
OWN = ("self_key", "self_value")
ATTEND = functools.partial(
    ikbo.attention, scale=SCALE, return_residuals=True, implementation="mosaic_gpu", config=CONFIG
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, launches):
    """Lets the op take the kernels, and the kernels the interpreter; counts the gradient's.

    No launch may have a race.
    """
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 2)
    interpreted_kernel = functools.partial(kernel.attention_kernel, interpret=PARAMS)
    monkeypatch.setattr(kernel, "attention_kernel", interpreted_kernel)
    # Emulated tests execute its PTX; it has warp shuffles, which the interpreter cannot run.
    monkeypatch.setattr(pack, "pack", pack.by_xla)
    backward, launched = backward_kernel.attention_backward_kernel, []

    def interpreted_backward(*args, **options):
        launched.append(options["config"])
        return backward(*args, **options, interpret=PARAMS)

    monkeypatch.setattr(backward_kernel, "attention_backward_kernel", interpreted_backward)
    op._attention.clear_cache()
    yield launched
    op._attention.clear_cache()
    assert len(launches)
    assert not launches.with_races


def test_unsorted_candidates() -> None:
    shape = problems.AttentionShape(3, 5, 3, 40, 2, 1, 64, "unsorted")
    inputs = problems.make_attention_inputs(shape)
    oracle_attention.assert_attention_within_error_rule(ATTEND(*inputs[:4]), inputs, scale=SCALE)


@pytest.mark.parametrize("with_own_tokens", [False, True])
def test_gradients_of_unsorted_candidates(interpreted, with_own_tokens: bool) -> None:
    shape = problems.AttentionShape(3, 5, 3, 140, 4, 2, 64, "unsorted", "ragged")
    inputs = problems.make_attention_inputs(shape)
    own = {}
    if with_own_tokens:
        rng = np.random.default_rng(2)
        size = (shape.candidates, 2, shape.kv_heads, shape.head_dim)
        own = {name: problems.random_array(rng, size, "bfloat16") for name in OWN}

    def loss_of(run):
        def loss(arrays):
            out, lse = run(*arrays)
            finite = jnp.where(lse == -jnp.inf, 0.0, lse)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(finite))

        return loss

    index, lengths = inputs[3:]

    def attend(query, key, value, *rest):
        named = dict(zip(OWN, rest, strict=False))
        return ATTEND(query, key, value, index, key_value_seq_lengths=lengths, **named)

    def oracle(query, key, value, *rest):
        named = dict(zip(OWN, rest, strict=False))
        return reference.materialised(query, key, value, index, lengths, scale=SCALE, **named)

    arrays = (*inputs[:3], *own.values())
    # One program instead of one for each operation.
    found = jax.jit(jax.grad(loss_of(attend)))(arrays)
    assert len(interpreted) == 1
    wanted = jax.jit(jax.grad(loss_of(oracle)))(tuple(x.astype(np.float32) for x in arrays))
    for x, array, want in zip(found, arrays, wanted, strict=True):
        assert (x.dtype, x.shape) == (array.dtype, array.shape)
        x, want = (np.asarray(y, np.float32) for y in (x, want))
        np.testing.assert_allclose(x, want, rtol=0, atol=0.03 * np.abs(want).max())
