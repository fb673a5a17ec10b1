"""Which device counts, and which configurations are legal: choices that are made while tracing."""

import dataclasses
import types
from typing import Any

import jax
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch
from ikbo_jax.problems import AttentionConfig, AttentionProblem

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)


@pytest.fixture
def hopper_beside_cpus(monkeypatch: pytest.MonkeyPatch) -> list[jax.Device]:
    """A machine whose first device seems to be a Hopper GPU; its CPUs."""
    cpus = jax.devices("cpu")
    of_backend = {None: [HOPPER], "gpu": [HOPPER], "cpu": cpus}
    monkeypatch.setattr(jax, "devices", lambda backend=None: of_backend[backend])
    return cpus


@pytest.mark.parametrize("name", [None, "cpu"])
def test_the_configured_device_counts_and_not_the_first(
    name: str | None, hopper_beside_cpus: list[jax.Device]
) -> None:
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
def test_reuse_takes_no_more_keys_than_both_rings_hold(
    stages: tuple[int, int], most_keys: int
) -> None:
    def reason(kv_len: int, **options: Any) -> str | None:
        config = dataclasses.replace(REUSE, k_stages=stages[0], v_stages=stages[1], **options)
        return config.illegal_reason(dataclasses.replace(PROBLEM, kv_len=kv_len))

    assert reason(most_keys) is None
    for kv_len in (most_keys + 1, 100 * most_keys):
        assert f"S={kv_len} and {min(stages)} stages hold {most_keys}" in str(reason(kv_len))
        assert reason(kv_len, reuse=False) is None
