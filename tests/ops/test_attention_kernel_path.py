"""Attention by the kernels, for which fakes stand: what the op asks them for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest
from attention_basics import SCALE, attend, loss_of, oracle, ours, own_tokens

import ikbo_jax as ikbo
from ikbo_jax.problems import (
    AttentionBackwardConfig,
    AttentionBackwardProblem,
    AttentionConfig,
    FewQueriesConfig,
    attention_backward,
)
from ikbo_jax.problems.attention import HEAD_DIMS
from ikbo_jax.tuning import table


def in_float32(inputs: problems.AttentionInputs) -> problems.AttentionInputs:
    floats = (np.asarray(x, np.float32) for x in inputs[:3])
    return problems.AttentionInputs(*floats, *inputs[3:])


class TestKernelPath:
    """With fake kernels: what the op passes on, and that neither needs a gradient of its own."""

    SHAPE = problems.AttentionShape(3, 7, 2, 20, 4, 2, 64, "unsorted", "ragged")

    def test_default_takes_the_kernel_and_the_tables_config(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        results = attend(inputs, scale=SCALE, return_residuals=True)
        oracle_attention.assert_attention_within_error_rule(results, inputs, scale=SCALE)
        (call,) = fake_attention.calls
        (plan,) = ikbo.explain(attend, inputs).plans
        assert call["config"] == table.lookup(plan.problem).config
        assert isinstance(call["config"], FewQueriesConfig)
        assert (call["num_sms"], call["scale"], call["return_residuals"]) == (132, SCALE, True)

    def test_an_index_that_is_not_sorted_has_its_own_config(self, fake_attention) -> None:
        sizes = problems.AttentionShape(47, 5117, 1, 51, 2, 2, 64, "unsorted")
        shapes = jax.eval_shape(lambda: problems.make_attention_inputs(sizes))
        plans = [
            ikbo.explain(functools.partial(attend, indices_are_sorted=is_sorted), shapes).plans[0]
            for is_sorted in (False, True)
        ]
        calls = fake_attention.calls
        assert [call["config"] for call in calls] == [plan.config for plan in plans]
        assert [call["config"].tile_rows for call in calls] == [128, 64]
        assert [call["lists"] for call in calls] == [True, False]

    def test_residuals_are_asked_for_where_they_are_needed_only(self, fake_attention) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        own = own_tokens(self.SHAPE, 2, "bfloat16")
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
        oracle_attention.assert_attention_within_error_rule(results, inputs, scale=SCALE)
        (call,) = fake_attention.calls
        assert call["is_sorted"]
        assert call["has_order"] == (not promise and q_len % 64 == 0)

    @pytest.mark.parametrize("q_len", [2, 20])
    def test_ranges_of_keys_go_to_the_kernel(self, fake_attention, q_len: int) -> None:
        """In the caller's order, also where queries are packed; their gradient is XLA's."""
        inputs = problems.make_attention_inputs(self.SHAPE._replace(q_len=q_len))
        ranges = oracle_attention.ranges_of_keys(7, 20)
        exact, lse = oracle_attention.numpy_attention_oracle(inputs, scale=SCALE, ranges=ranges)
        found = attend(inputs, key_value_ranges=ranges, scale=SCALE, return_residuals=True)
        np.testing.assert_allclose(np.asarray(found[0], np.float32), exact, atol=0.02)
        np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=1e-5)

        def loss(query: jax.Array) -> jax.Array:
            out = attend(inputs._replace(query=query), key_value_ranges=ranges, scale=SCALE)
            return out.astype(jnp.float32).sum()

        assert np.isfinite(np.asarray(jax.grad(loss)(inputs.query), np.float32)).all()
        assert {type(call["config"]) for call in fake_attention.calls} == {FewQueriesConfig}
        assert not fake_attention.backward_calls

    def test_xla_merges_an_own_token_whose_score_is_capped(self, fake_attention) -> None:
        inputs, own = (
            problems.make_attention_inputs(self.SHAPE),
            own_tokens(self.SHAPE, 1, "bfloat16"),
        )
        jax.eval_shape(functools.partial(attend, logit_cap=3.0, **own), inputs)
        (call,) = fake_attention.calls
        assert (call["own"], call["return_residuals"]) == ([], True)
        (plan,) = ikbo.explain(functools.partial(attend, logit_cap=3.0, **own), inputs).plans
        assert plan.reason.endswith("; XLA merges own tokens")

    @pytest.mark.parametrize("sizes", [{"users": 1}, {"candidates": 1}], ids=str)
    def test_one_of_a_kind_needs_no_sorting(self, fake_attention, sizes: dict) -> None:
        attend(problems.make_attention_inputs(self.SHAPE._replace(q_len=64, **sizes)))
        several = problems.make_attention_inputs(self.SHAPE._replace(q_len=64))
        attend(several)
        attend(several, indices_are_sorted=True)
        assert [call["has_order"] for call in fake_attention.calls] == [False, True, False]


class TestGradientByTheKernel:
    """What the op passes on to the gradient's kernel, and where XLA computes the gradient."""

    SHAPE = TestKernelPath.SHAPE

    def gradients(self, inputs, **options):
        return jax.grad(loss_of(inputs, ours, **options), argnums=(0, 1, 2))(*inputs[:3])

    @pytest.mark.parametrize("has_ranges", [False, True], ids=["all", "ranges"])
    @pytest.mark.parametrize("tokens", [0, 1, 2])
    def test_gradients_are_right(self, fake_attention, tokens: int, has_ranges: bool) -> None:
        """The kernel merges one own token; XLA merges more, and has the gradients of ranges."""
        inputs = problems.make_attention_inputs(self.SHAPE)
        exact = in_float32(inputs)
        own = own_tokens(self.SHAPE, tokens, "bfloat16") if tokens else {}
        wide = {name: np.asarray(x, np.float32) for name, x in own.items()}
        ranges = jnp.asarray(oracle_attention.ranges_of_keys(7, 20)) if has_ranges else None
        runs = (
            (inputs, functools.partial(ours, key_value_ranges=ranges), own),
            (exact, functools.partial(oracle, ranges=ranges), wide),
        )
        found, wanted = (
            jax.tree.leaves(jax.grad(loss_of(x, run), argnums=(0, 1, 2, 3))(*x[:3], of_own))
            for x, run, of_own in runs
        )
        for x, array, want in zip(found, (*inputs[:3], *own.values()), wanted, strict=True):
            assert (x.dtype, x.shape) == (array.dtype, array.shape)
            x, want = (np.asarray(y, np.float32) for y in (x, want))
            np.testing.assert_allclose(x, want, rtol=0, atol=0.03 * np.abs(want).max())
        assert all(
            call["own"] == (list(own) if tokens == 1 else []) for call in fake_attention.calls
        )
        assert len(fake_attention.backward_calls) == (not has_ranges)

    @pytest.mark.parametrize("promise", [False, True])
    def test_what_the_kernel_gets(self, fake_attention, promise: bool) -> None:
        inputs = problems.make_attention_inputs(self.SHAPE)
        if promise:
            inputs = inputs._replace(cand_to_user=jnp.sort(inputs.cand_to_user))
        options = {"scale": SCALE, "indices_are_sorted": promise}
        call = functools.partial(attend, **options)
        jax.grad(lambda x: call(inputs._replace(key=x)).sum().astype(jnp.float32))(inputs.key)
        (asked,) = fake_attention.backward_calls
        (plan,) = ikbo.explain(call, inputs).plans
        problem = AttentionBackwardProblem.of(plan.problem)
        assert asked == {
            "query": inputs.query.shape,
            "scale": SCALE,
            "logit_cap": None,
            "dtype": None,
            "indices_are_sorted": promise,
            "config": table.lookup(problem).config,
            "num_sms": 132,
            "keeps_delta": False,
        }
        assert plan.backward_config == asked["config"]
        assert str(asked["config"]) in plan.backward
        assert f"gradient: mosaic_gpu, {asked['config']}; " in str(plan)

    @pytest.mark.parametrize("sizes", [{"users": 1}, {"candidates": 1}], ids=str)
    def test_one_of_a_kind_is_sorted(self, fake_attention, sizes: dict) -> None:
        self.gradients(problems.make_attention_inputs(self.SHAPE._replace(**sizes)))
        (asked,) = fake_attention.backward_calls
        assert asked["indices_are_sorted"]

    def test_callers_config_is_the_forwards(self, fake_attention) -> None:
        config = AttentionConfig(block_kv=64)
        inputs = problems.make_attention_inputs(self.SHAPE)
        self.gradients(inputs, config=config)
        assert {call["config"] for call in fake_attention.calls} == {config}
        (asked,) = fake_attention.backward_calls
        assert isinstance(asked["config"], AttentionBackwardConfig)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_every_head_width_of_the_result_has_a_gradient_kernel(self, fake_attention, head_dim):
        inputs = problems.make_attention_inputs(self.SHAPE._replace(head_dim=head_dim))
        (plan,) = ikbo.explain(ours, inputs).plans
        assert plan.backward_config is not None
        jax.eval_shape(lambda: self.gradients(inputs))
        assert fake_attention.backward_calls

    @pytest.mark.parametrize(
        ("implementation", "reason"),
        [("mosaic_gpu", ": .*head widths 64, 96, but H=128"), ("xla", "$")],
    )
    def test_xla_where_no_kernel_runs_says_why(
        self, fake_attention, monkeypatch, implementation: str, reason: str
    ) -> None:
        monkeypatch.setattr(attention_backward, "HEAD_DIMS", (64, 96))
        inputs = problems.make_attention_inputs(self.SHAPE._replace(head_dim=128))
        run = functools.partial(ours, implementation=implementation)
        (plan,) = ikbo.explain(run, inputs).plans
        assert plan.implementation == implementation
        assert plan.backward_config is None
        assert re.match("XLA, at user and candidate batch size" + reason, plan.backward)
        jax.eval_shape(lambda: self.gradients(inputs, implementation=implementation))
        assert not fake_attention.backward_calls
        assert bool(fake_attention.calls) == (implementation == "mosaic_gpu")

    def test_a_row_of_the_table_may_prefer_xla(self, fake_attention, monkeypatch) -> None:
        choice = table.Choice(None, "sm90.json", True, "XLA was faster")
        lookup = table.lookup

        def chosen(problem, **options):
            is_backward = isinstance(problem, AttentionBackwardProblem)
            return choice if is_backward else lookup(problem, **options)

        monkeypatch.setattr(table, "lookup", chosen)
        inputs = problems.make_attention_inputs(self.SHAPE)
        (plan,) = ikbo.explain(ours, inputs).plans
        assert plan.implementation == "mosaic_gpu"
        assert plan.backward == "XLA, at user and candidate batch size: XLA was faster"
        forced = functools.partial(ours, implementation="mosaic_gpu")
        (plan,) = ikbo.explain(forced, inputs).plans
        assert plan.backward.startswith("mosaic_gpu, AttentionBackwardConfig(")
