"""Attention by the kernel, for which a fake stands: what the op asks it for."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from attention_basics import SCALE, attend, loss_of, oracle, ours, own_tokens

import ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig, FewQueriesConfig
from ikbo_jax.tuning import table


class TestKernelPath:
    """With a fake kernel: what the op passes on, and that gradients do not need the kernel's."""

    SHAPE = problems.AttentionShape(3, 7, 2, 20, 4, 2, 64, "unsorted", "ragged")

    def test_default_takes_the_kernel_and_the_tables_config(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        results = attend(inputs, scale=SCALE, return_residuals=True)
        problems.assert_attention_within_error_rule(results, inputs, scale=SCALE)
        (call,) = fake_attention.calls
        (plan,) = ikbo.explain(attend, inputs).plans
        assert call["config"] == table.lookup(plan.problem).config
        assert isinstance(call["config"], FewQueriesConfig)
        assert (call["num_sms"], call["scale"], call["return_residuals"]) == (132, SCALE, True)

    def test_callers_config_wins(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        default = AttentionConfig()
        config = dataclasses.replace(default, block_kv=default.block_kv // 2)
        jax.eval_shape(functools.partial(attend, config=config), inputs)
        assert [call["config"] for call in fake_attention.calls] == [config]

    def test_residuals_are_asked_for_where_they_are_needed_only(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        own = own_tokens(self.SHAPE, 1, "bfloat16")
        jax.eval_shape(attend, inputs)
        jax.eval_shape(functools.partial(attend, **own), inputs)
        jax.eval_shape(jax.grad(lambda x: attend(x).sum(), allow_int=True), inputs)
        asked = [call["return_residuals"] for call in fake_attention.calls]
        assert asked == [False, True, True]

    @pytest.mark.parametrize("promise", [False, True])
    @pytest.mark.parametrize("q_len", [63, 64])
    def test_work_is_in_the_users_order(self, fake_attention, q_len: int, promise: bool) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE._replace(q_len=q_len))
        if promise:
            inputs = inputs._replace(cand_to_user=jnp.sort(inputs.cand_to_user))
        results = attend(inputs, scale=SCALE, return_residuals=True, indices_are_sorted=promise)
        problems.assert_attention_within_error_rule(results, inputs, scale=SCALE)
        (call,) = fake_attention.calls
        assert call["is_sorted"]
        assert call["has_order"] == (not promise and q_len % 64 == 0)

    @pytest.mark.parametrize("sizes", [{"users": 1}, {"candidates": 1}], ids=str)
    def test_one_of_a_kind_needs_no_sorting(self, fake_attention, sizes: dict) -> None:
        attend(problems.make_attention_inputs(self.SHAPE._replace(q_len=64, **sizes)))
        several = problems.make_attention_inputs(self.SHAPE._replace(q_len=64))
        attend(several)
        attend(several, indices_are_sorted=True)
        assert [call["has_order"] for call in fake_attention.calls] == [False, True, False]

    def test_own_tokens(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        own = own_tokens(self.SHAPE, 3, "bfloat16")
        out, lse = attend(inputs, scale=SCALE, return_residuals=True, **own)
        exact = problems.numpy_attention_oracle(inputs, scale=SCALE, **own)
        np.testing.assert_allclose(np.asarray(out, np.float64), exact[0], rtol=0, atol=0.03)
        np.testing.assert_allclose(lse, exact[1], rtol=0, atol=1e-5)
        assert len(fake_attention.calls) == 1

    def test_xla_bypasses_the_kernel(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        jax.eval_shape(functools.partial(attend, implementation="xla"), inputs)
        assert fake_attention.calls == []

    def test_gradients_of_both_orders(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)

        exact = problems.AttentionInputs(
            *(np.asarray(x, np.float32) for x in inputs[:3]), *inputs[3:]
        )

        def slope(inputs, run):
            gradients = jax.grad(loss_of(inputs, run), argnums=(0, 1, 2))

            def square(*x):
                return sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in gradients(*x))

            return jax.value_and_grad(square, argnums=(0, 1, 2))(*inputs[:3])

        kernel = functools.partial(ours, implementation="mosaic_gpu")
        run = jax.jit(lambda x, y: (slope(x, kernel), slope(y, oracle)))
        actual, expected = run(inputs, exact)
        for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=0.05 * np.abs(wanted).max())
        assert fake_attention.calls
