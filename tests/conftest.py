"""Settings of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import jax
import problems
import pytest

from ikbo_jax.ops import dispatch

# The library must not promote dtypes or ranks silently, nor must its tests.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# shard_map needs a mesh of more than one device.
jax.config.update("jax_num_cpu_devices", 2)

# Every new shape compiles, which takes longer than hypothesis allows an example by default.
hypothesis.settings.register_profile(
    "ikbo", deadline=None, max_examples=25, derandomize=True, database=None
)
hypothesis.settings.load_profile("ikbo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Who asks for the GPU tests where they cannot run learns so, instead of seeing them skipped.
    if item.get_closest_marker("gpu") and (reason := dispatch.hopper_unavailable_reason()):
        pytest.fail(f"GPU test on a machine that cannot run it: {reason}", pytrace=False)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The CPU is the default device, also on a machine with a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


class FakeHopper(NamedTuple):
    """What the fake kernel was called with, in order."""

    calls: list[dict[str, Any]]


@pytest.fixture
def fake_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHopper]:
    """A machine that seems to have a Hopper GPU, whose kernel is a NumPy callback.

    The callback has neither a vmap rule nor a gradient, like the kernel that it stands for: whoever
    gets past the op's own rules fails.
    """
    from ikbo_jax.ops import linear_compression as op
    from ikbo_jax.pallas import linear_compression as kernel

    calls: list[dict[str, Any]] = []

    def fake_kernel(weights, embeddings, parents, *, config, num_sms):
        calls.append({"config": config, "num_sms": num_sms})
        assert [w.ndim for w in weights] == [2] * len(weights)
        assert [e.ndim for e in embeddings] == [3] * len(weights)
        assert [p.ndim for p in parents[1:]] == [1] * (len(weights) - 1)
        batch, _, n = embeddings[-1].shape
        dtype = embeddings[-1].dtype
        out = jax.ShapeDtypeStruct((batch, weights[-1].shape[0], n), dtype)
        return jax.pure_callback(
            lambda *levels: problems.numpy_oracle(*levels).astype(dtype),
            out,
            weights,
            embeddings,
            parents,
        )

    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 132)
    monkeypatch.setattr(kernel, "linear_compression_kernel", fake_kernel)
    # Programs traced with a real kernel, or with another test's, must not be used again.
    op._linear_compression.clear_cache()
    yield FakeHopper(calls)
    op._linear_compression.clear_cache()
