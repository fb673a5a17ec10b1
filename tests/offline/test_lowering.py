"""How often kernels are lowered for CUDA, and what lowering asks of the machine."""

from __future__ import annotations

import collections

import jax
import pytest
from jax._src.pallas.mosaic_gpu import lowering

from ikbo_jax.models import ranking
from ikbo_jax.ops import dispatch
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.rewrite import rewrite

#: Small, and legal for every kernel of the network.
SIZES = ranking.Sizes(
    candidates=8, users=2, layers=3, width=128, user_dense=16, dense_tokens=4, user_tokens=60,
    pooled=64, cand_tokens=40, history=128, queries=64, compressed=32, hidden=16,
)  # fmt: skip


@pytest.fixture
def lowered_kernels(monkeypatch: pytest.MonkeyPatch) -> collections.Counter:
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


def lower(fn) -> None:
    args = jax.eval_shape(lambda: (ranking.init(SIZES), ranking.make_request(SIZES)))
    # JAX's own attention promotes in its gradient.
    with jax.numpy_dtype_promotion("standard"):
        jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))


def loss(params, request):
    return ranking.co_designed(params, request).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [ranking.co_designed, rewrite(ranking.materialised), jax.grad(loss)],
    ids=["co-designed", "rewritten", "training step"],
)
def test_layers_share_the_kernels_that_are_equal(fn, lowered_kernels):
    """Three layers call each kernel; one module is made of it, and so one kernel compiled."""
    lower(fn)
    assert {'"ikbo_linear_compression"', '"ikbo_attention"'} <= lowered_kernels.keys()
    repeated = {name: n for name, n in lowered_kernels.items() if n > 1}
    assert not repeated, f"lowered more than once: {repeated}"


def test_lowering_starts_ptxas_once_for_its_version():
    extension = mosaic.fragmented_array.mgpu_lib._mosaic_gpu_ext
    before = extension._get_ptxas_isa_version.cache_info()
    extension._get_ptxas_isa_version()
    extension._get_ptxas_isa_version()
    after = extension._get_ptxas_isa_version.cache_info()
    assert after.misses <= 1
    assert after.hits + after.misses == before.hits + before.misses + 2
