"""`explain`, the choices that it reports, the device that counts, legal configurations."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from small_kernels import prefer_kernels

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch
from ikbo_jax.ops.explain import Explanation
from ikbo_jax.problems import (
    AttentionConfig,
    AttentionProblem,
    LinearCompressionBackwardProblem,
    LinearCompressionConfig,
    WeightGradientConfig,
)
from ikbo_jax.tuning import table

SMALL = problems.LinearCompressionShape(3, 7, 16, 11, 5, 8, "unsorted")
INPUTS = problems.make_inputs(SMALL)


def test_text_holds_op_sizes_implementation_and_reason(on_cpu, monkeypatch) -> None:
    prefer_kernels(monkeypatch)
    text = str(ikbo.explain(ikbo.linear_compression, *INPUTS))
    backward = LinearCompressionBackwardProblem((3, 7), (11, 5), 16, 8, "bfloat16")
    assert re.sub(r"\n    config: .*", "", text) == (
        "1. linear_compression: B=3,7 K=11,5 M=16 N=8 bfloat16\n"
        "  implementation: xla\n"
        "  reason: the Mosaic GPU kernels need a Hopper GPU, but the default device is a cpu\n"
        "  gradient: XLA, at user and candidate batch size\n"
        "  lowered for CUDA, H100 (132 SMs):\n"
        "    implementation: mosaic_gpu\n"
        "    reason: default configuration: no measured row is near\n"
        "    gradient: mosaic_gpu, at user and candidate batch size, "
        f"{backward.default_config()}; default configuration: no measured row is near"
    )


def test_calls_that_are_the_same_stand_once() -> None:
    def deep(*arrays):
        first, second = (ikbo.linear_compression(*arrays) for _ in range(2))
        return first + second + model(*arrays)

    explanation = ikbo.explain(deep, *INPUTS)
    assert len(explanation.plans) == 4
    lines = [line for line in str(explanation).split("\n") if line[0].isdigit()]
    assert [line.split(" l")[0].split(" m")[0] for line in lines] == ["1, 2.", "3.", "4."]


def test_no_op() -> None:
    explanation = ikbo.explain(jnp.sin, jnp.ones(3))
    assert explanation.plans == ()
    assert str(explanation) == "no op of this library is called"


def model(w_cand, w_user, e_cand, e_user, index):
    first = ikbo.linear_compression(w_cand, w_user, e_cand, e_user, index, implementation="xla")
    terms = [ikbo.Term(w_user, e_user), ikbo.Term(w_cand, e_cand, index)]
    return first + ikbo.multilevel_linear_compression(terms)


OPS_OF_MODEL = ["linear_compression", "multilevel_linear_compression"]


def test_sees_through_a_cached_jit() -> None:
    compiled = jax.jit(model)
    compiled(*INPUTS)
    for _ in range(2):
        plans = ikbo.explain(compiled, *INPUTS).plans
        assert [plan.op for plan in plans] == OPS_OF_MODEL
        assert plans[0].reason == "requested by the caller"


def scanned(*inputs):
    return jax.lax.scan(lambda carry, _: (carry, model(*inputs)), 0, length=3)


def conditional(*inputs):
    return jax.lax.cond(inputs[4][0] > 0, lambda: model(*inputs), lambda: model(*inputs) * 2)


def loss(*inputs):
    return model(*inputs).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (jax.grad(loss), 1),
        (jax.jit(jax.value_and_grad(loss, argnums=(1, 3))), 1),
        (jax.checkpoint(loss), 1),
        (scanned, 1),
        (conditional, 2),
    ],
    ids=["grad", "jit_grad", "checkpoint", "scan", "cond"],
)
def test_sees_through_transformations(fn, times: int) -> None:
    assert [plan.op for plan in ikbo.explain(fn, *INPUTS).plans] == OPS_OF_MODEL * times


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_explains_what_a_transformed_function_calls(transform) -> None:
    found = []

    def explained(*inputs):
        found.extend(ikbo.explain(model, *inputs).plans)
        return loss(*inputs)

    transform(explained)(*INPUTS)
    assert [plan.op for plan in found] == OPS_OF_MODEL


def test_vmap_shows_the_problem_that_runs() -> None:
    batched = jax.tree.map(lambda x: jnp.stack([x] * 4), INPUTS)
    shared_weights = jax.vmap(ikbo.linear_compression, (None, None, 0, 0, 0))
    (plan,) = ikbo.explain(shared_weights, *INPUTS[:2], *batched[2:]).plans
    assert plan.problem.batches == (12, 28)
    (plan,) = ikbo.explain(
        jax.vmap(functools.partial(ikbo.linear_compression, implementation="xla")), *batched
    ).plans
    assert plan.problem.batches == (3, 7)
    assert plan.reason.endswith("vmap runs 4 problems at once")


def test_arguments_may_be_shapes_keywords_trees_and_anything_else() -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), INPUTS)

    @functools.partial(jax.jit, static_argnames="how")
    def run(arrays, *, index, how):
        assert isinstance(how, str)
        return {"out": ikbo.linear_compression(*arrays, index, implementation=how), "note": 1}

    (plan,) = ikbo.explain(run, shapes[:4], index=shapes.cand_to_user, how="xla").plans
    assert plan.implementation == "xla"


@pytest.mark.parametrize("make", [float, np.float64, np.float32, np.asarray, jnp.float32])
def test_numbers_that_must_be_known_stay_known(make) -> None:
    query = jax.ShapeDtypeStruct((2, 1, 1, 4), jnp.float32)
    index = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = ikbo.explain(ikbo.attention, query, query, query, index, scale=make(0.5))
    assert len(found.plans) == 1


def test_explain_refuses_what_the_call_refuses() -> None:
    arrays = (*INPUTS[:4], np.zeros(INPUTS.cand_to_user.shape, np.int64))
    for call in (ikbo.linear_compression, functools.partial(ikbo.explain, ikbo.linear_compression)):
        with pytest.raises(ValueError, match=r"cand_to_user must be an int32 array, but is int64"):
            call(*arrays)
    # Under jit, JAX makes an int32 of it.
    assert ikbo.explain(jax.jit(ikbo.linear_compression), *arrays).plans


def test_arrays_that_are_no_numbers_are_passed() -> None:
    def run(names, *arrays):
        assert names[0] == "dense"
        return ikbo.linear_compression(*arrays)

    assert len(ikbo.explain(run, np.array(["dense"]), *INPUTS).plans) == 1


def test_explaining_computes_nothing() -> None:
    huge = problems.LinearCompressionShape(10**5, 10**7, 433, 1178, 866, 256)
    arrays = [(huge.m, huge.k_cand), (huge.m, huge.k_user)]
    arrays += [(huge.candidates, huge.k_cand, huge.n), (huge.users, huge.k_user, huge.n)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in arrays]
    index = jax.ShapeDtypeStruct((huge.candidates,), jnp.int32)
    (plan,) = ikbo.explain(ikbo.linear_compression, *shapes, index).plans
    assert plan.problem.useful_flops == 2 * 433 * 256 * (10**7 * 866 + 10**5 * 1178)


def test_kernel_shows_configuration_and_row(fake_hopper, monkeypatch) -> None:
    config = LinearCompressionConfig(block_m=128, epilogue_rows=32)
    note = "sm90.json, nearest row at distance 0.25"
    tuning = WeightGradientConfig(block_m=64)
    choices = {
        "linear_compression": table.Choice(config, "sm90.json", False, note),
        "linear_compression_backward": table.Choice(tuning, "sm90.json", True, "another row"),
    }
    monkeypatch.setattr(table, "lookup", lambda problem, **_: choices[problem.op])
    explanation = ikbo.explain(ikbo.linear_compression, *INPUTS)
    assert str(explanation).split("\n")[1:] == [
        "  implementation: mosaic_gpu",
        f"  config: {config}",
        f"  reason: {note}",
        f"  gradient: mosaic_gpu, at user and candidate batch size, {tuning}; another row",
    ]
    own = LinearCompressionConfig(block_m=64, epilogue_rows=32)
    (plan,) = ikbo.explain(functools.partial(ikbo.linear_compression, config=own), *INPUTS).plans
    assert (plan.config, plan.reason) == (own, "configuration passed by the caller")


def test_table_may_prefer_xla_and_the_caller_may_not(fake_hopper, monkeypatch) -> None:
    choice = table.Choice(None, "sm90.json", True, "sm90.json says that XLA is faster")
    monkeypatch.setattr(table, "lookup", lambda problem, **_: choice)
    (plan,) = ikbo.explain(ikbo.linear_compression, *INPUTS).plans
    assert (plan.implementation, plan.config, plan.reason) == ("xla", None, choice.reason)
    insist = functools.partial(ikbo.linear_compression, implementation="mosaic_gpu")
    (plan,) = ikbo.explain(insist, *INPUTS).plans
    assert plan.implementation == "mosaic_gpu"
    assert plan.config == plan.problem.default_config()
    assert choice.reason in plan.reason


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"platform": "cpu"}, ["need a Hopper GPU", "is a cpu"]),
        ({"platform": "tpu"}, ["need a Hopper GPU", "is a tpu"]),
        (
            {"platform": "gpu", "device_kind": "NVIDIA A100", "compute_capability": "8.0"},
            ["9.0", "NVIDIA A100 has 8.0"],
        ),
        (
            {"platform": "gpu", "device_kind": "NVIDIA B200", "compute_capability": "10.0"},
            ["9.0", "NVIDIA B200 has 10.0"],
        ),
        ({"platform": "gpu", "device_kind": "some GPU"}, ["9.0", "some GPU has unknown"]),
    ],
)
def test_reason_names_the_device(monkeypatch, device: dict, words: list[str]) -> None:
    monkeypatch.setattr(dispatch, "default_device", lambda: types.SimpleNamespace(**device))
    reason = dispatch.hopper_unavailable_reason()
    assert reason is not None
    assert [word for word in words if word not in reason] == []


@pytest.mark.parametrize(
    ("activation", "head_dim", "words"),
    [
        ("gelu", 64, "mosaic_gpu, "),
        ("softmax", 64, "mosaic_gpu, "),
        ("softmax", 256, "XLA, .*head widths 64, 96, 128, but H=256"),
    ],
)
def test_plan_of_gdpa_says_what_makes_its_gradient(fake_hopper, activation, head_dim, words):
    rows = jax.ShapeDtypeStruct((300, 2, head_dim), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
    run = functools.partial(ikbo.gdpa, activation=activation, implementation="mosaic_gpu")
    (plan,) = ikbo.explain(run, rows, rows, rows, offsets, offsets).plans
    assert re.match(words, plan.backward)
    assert f"gradient: {plan.backward}" in str(plan)


def test_a_report_is_not_followed_by_no_op_found() -> None:
    text = str(Explanation((), ("rewrite: replaced 7 broadcasts",)))
    assert text.endswith(
        "no op of this library is called directly; see the report of rewrite above"
    )


@pytest.mark.parametrize("op", ["linear_compression", "attention", "gdpa", "no_keys"])
def test_calls_in_which_nothing_runs_are_listed(op: str) -> None:
    """An empty call is a call: a report without it would say that no op is called."""
    rows, index = jnp.ones((0, 2, 2, 8)), jnp.zeros(0, jnp.int32)
    offsets = jnp.zeros(2, jnp.int32)
    call = {
        "linear_compression": lambda rows: ikbo.linear_compression(
            jnp.ones((3, 2)), jnp.ones((3, 4)), rows[:, 0], jnp.ones((1, 4, 8)), index
        ),
        "attention": lambda rows: ikbo.attention(rows, rows, rows, index),
        "gdpa": lambda rows: ikbo.gdpa(rows[:, 0], rows[:, 0], rows[:, 0], offsets, offsets),
        "no_keys": lambda rows: ikbo.gdpa(
            jnp.ones((3, 2, 8)) + rows.sum(), rows[:, 0], rows[:, 0], offsets + 3, offsets
        ),
    }[op]
    both = jnp.stack([rows, rows])
    for fn, argument in (
        (call, rows),
        (jax.grad(lambda rows: call(rows).sum()), rows),
        (jax.vmap(call), both),
        (jax.jit(call), rows),
    ):
        (plan,) = ikbo.explain(fn, argument).plans
        assert plan.op == op.replace("no_keys", "gdpa")
        assert "nothing runs" in str(plan)


HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)


@pytest.fixture
def hopper_beside_cpus(monkeypatch: pytest.MonkeyPatch) -> list[jax.Device]:
    """A machine whose first device seems to be a Hopper GPU; its CPUs."""
    cpus = jax.devices("cpu")
    of_backend = {None: [HOPPER], "gpu": [HOPPER], "cpu": cpus}
    monkeypatch.setattr(jax, "devices", lambda backend=None: of_backend[backend])
    return cpus


@pytest.mark.parametrize("name", [None, "cpu"])
def test_the_configured_device_counts_and_not_the_first(name, hopper_beside_cpus) -> None:
    assert dispatch.default_device() is HOPPER
    assert dispatch.hopper_unavailable_reason() is None
    assert dispatch.num_sms() == 132
    first, second = hopper_beside_cpus[:2]
    inputs = problems.make_inputs(problems.LINEAR_COMPRESSION_SHAPES["one_candidate"])
    with jax.default_device(name or second):
        assert dispatch.default_device() == (first if name else second)
        (plan,) = ikbo.explain(ikbo.linear_compression, *inputs).plans
        assert dispatch.num_sms() == 1
    assert plan.implementation == "xla"
    assert plan.reason.endswith("the default device is a cpu")


PROBLEM = AttentionProblem(
    batch=8, users=2, q_len=64, kv_len=0, q_heads=2, kv_heads=1, head_dim=64, dtype="bfloat16"
)
REUSE = AttentionConfig(block_kv=32, k_stages=2, v_stages=3, reuse=True)


@pytest.mark.parametrize(
    ("stages", "most_keys"),
    [((2, 3), 64), ((3, 2), 64), ((3, 3), 96)],
    ids=["values_have_more", "keys_have_more", "alike"],
)
def test_reuse_takes_no_more_keys_than_both_rings_hold(stages, most_keys) -> None:
    def reason(kv_len: int, **options: Any) -> str | None:
        config = dataclasses.replace(REUSE, k_stages=stages[0], v_stages=stages[1], **options)
        return config.illegal_reason(dataclasses.replace(PROBLEM, kv_len=kv_len))

    assert reason(most_keys) is None
    for kv_len in (most_keys + 1, 100 * most_keys):
        assert f"S={kv_len} and {min(stages)} stages hold {most_keys}" in str(reason(kv_len))
        assert reason(kv_len, reuse=False) is None
