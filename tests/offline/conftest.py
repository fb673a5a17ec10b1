"""The fixture of tests that lower whole programs for CUDA."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax
import pytest
from jax._src.pallas.mosaic_gpu import lowering

from ikbo_jax.ops import dispatch


@pytest.fixture
def lowered_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter]:
    """Counts, by kernel, how often Mosaic GPU makes a module; the device seems to be a Hopper."""
    counts: collections.Counter = collections.Counter()
    real = lowering.lower_jaxpr_to_module

    def counted(*args, **kwargs):
        result = real(*args, **kwargs)
        counts[str(result.module.operation.attributes["sym_name"])] += 1
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_module", counted)
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 132)
    jax.clear_caches()
    yield counts
    jax.clear_caches()
