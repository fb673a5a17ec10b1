"""How often kernels are lowered for CUDA, and what lowering asks of the machine."""

import dataclasses

import jax
import pytest
from small_kernels import prefer_kernels

from ikbo_jax.models import ranking
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.rewrite import rewrite

#: Small, and legal for every kernel of the network.
SIZES = ranking.Sizes(
    candidates=8, users=2, layers=3, width=128, user_dense=16, dense_tokens=4, user_tokens=60,
    pooled=64, cand_tokens=40, history=128, queries=64, compressed=32, hidden=16,
)  # fmt: skip


def lower(fn, layers: int) -> str:
    sizes = dataclasses.replace(SIZES, layers=layers)
    args = jax.eval_shape(lambda: (ranking.init(sizes), ranking.make_request(sizes)))
    # JAX's own attention promotes in its gradient.
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def loss(params, request):
    return ranking.co_designed(params, request).sum()


@pytest.mark.slow
@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    "fn",
    [ranking.co_designed, rewrite(ranking.materialised), jax.grad(loss)],
    ids=["co-designed", "rewritten", "training step"],
)
def test_layers_share_the_kernels_that_are_equal(fn, lowered_kernels, monkeypatch):
    """Three layers need as many modules as one layer does, and so as many compiled kernels.

    A layer may call a kernel with several shapes: attention pools histories, too. The cost model
    leaves linear compressions as small as these to XLA. XLA has no loop: kernels are launched one
    after another, without the host in between.
    """
    prefer_kernels(monkeypatch)
    assert "stablehlo.while" not in lower(fn, 1)
    of_one = dict(lowered_kernels)
    assert {'"ikbo_linear_compression"', '"ikbo_attention"'} <= of_one.keys()
    lowered_kernels.clear()
    jax.clear_caches()
    lower(fn, 3)
    assert dict(lowered_kernels) == of_one


def test_lowering_starts_ptxas_once_for_its_version():
    extension = mosaic.fragmented_array.mgpu_lib._mosaic_gpu_ext
    before = extension._get_ptxas_isa_version.cache_info()
    extension._get_ptxas_isa_version()
    extension._get_ptxas_isa_version()
    after = extension._get_ptxas_isa_version.cache_info()
    assert after.misses <= 1
    assert after.hits + after.misses == before.hits + before.misses + 2
