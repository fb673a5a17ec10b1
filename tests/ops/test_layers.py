"""`LinearCompression` of NNX and of Linen: how weights are drawn, dtypes, sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from refusals import ones

import ikbo_jax as ikbo
from ikbo_jax.layers import HstuCache, functional, hstu_layer, linen, nnx

pytestmark = pytest.mark.slow

B, U, K_USER, K_CAND, M, N = 12, 3, 6, 5, 7, 8
SHAPE = problems.LinearCompressionShape(U, B, M, K_USER, K_CAND, N, "unsorted")
SIZES = (K_USER, K_CAND, M)


def inputs(dtype: str = "float32"):
    _, _, e_cand, e_user, index = problems.make_inputs(SHAPE, dtype)
    return e_user, e_cand, index


def test_a_fresh_layer_is_a_fresh_dense_layer() -> None:
    layer = nnx.LinearCompression(400, 600, 300, rngs=flax_nnx.Rngs(0))
    together = np.concatenate([layer.w_user[...], layer.w_cand[...]], axis=1)
    assert together.shape == (300, 1000)
    np.testing.assert_allclose(together.std(), 1000**-0.5, rtol=0.02)


def test_linen_draws_one_weight() -> None:
    variables = linen.LinearCompression(
        *SIZES, kernel_init=flax_linen.initializers.orthogonal()
    ).init(jax.random.key(0), *inputs())
    together = jnp.concatenate([variables["params"][n] for n in ("w_user", "w_cand")], axis=1)
    np.testing.assert_allclose(together @ together.T, jnp.eye(M), atol=1e-5)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_dtypes(dtype, param_dtype: str) -> None:
    arrays = inputs()

    def run():
        layer = nnx.LinearCompression(
            *SIZES, dtype=dtype, param_dtype=param_dtype, rngs=flax_nnx.Rngs(0)
        )
        twin = linen.LinearCompression(*SIZES, dtype=dtype, param_dtype=param_dtype)
        out, variables = twin.init_with_output(jax.random.key(0), *arrays)
        return layer(*arrays), out, layer.w_user[...], variables["params"]["w_cand"]

    with jax.numpy_dtype_promotion("standard"):
        ours, out, w_user, w_cand = jax.eval_shape(run)
    assert ours.dtype == out.dtype == (dtype or jnp.float32)
    assert w_user.dtype == w_cand.dtype == param_dtype


def test_runs_the_op_with_the_asked_for_precision() -> None:
    layer = nnx.LinearCompression(*SIZES, precision="highest", rngs=flax_nnx.Rngs(0))
    explanation = ikbo.explain(layer, *inputs())
    assert [plan.op for plan in explanation.plans] == ["linear_compression"]
    text = str(jax.make_jaxpr(lambda *args: layer(*args))(*inputs()))
    assert "HIGHEST" in text


def test_linen_takes_the_sizes_of_its_inputs() -> None:
    layer, twin = linen.LinearCompression(features=M), linen.LinearCompression(*SIZES)
    key = jax.random.key(0)
    out, variables = layer.init_with_output(key, *inputs())
    expected, sized = twin.init_with_output(key, *inputs())
    jax.tree.map(np.testing.assert_array_equal, (out, variables), (expected, sized))
    np.testing.assert_array_equal(layer.apply(sized, *inputs()), out)
    with pytest.raises(ValueError, match="features of .* of at least 1, .* but is None"):
        linen.LinearCompression().init(key, *inputs())


@pytest.mark.parametrize("sizes", [(), SIZES[:2]], ids=["inferred", "given"])
def test_linen_and_nnx_name_wrong_rows_alike(sizes: tuple[int, ...]) -> None:
    e_user, e_cand, index = inputs()
    key = jax.random.key(0)
    layer = linen.LinearCompression(*sizes, **{"features": M})
    variables = layer.init(key, e_user, e_cand, index)
    twin = nnx.LinearCompression(*SIZES, rngs=flax_nnx.Rngs(0))
    words = rf"LinearCompression expects user_rows={K_USER} .*but e_user has .*, 1, {N}\)"
    for run in (lambda *args: layer.apply(variables, *args), twin):
        with pytest.raises(ValueError, match=words):
            run(e_user[:, :1], e_cand, index)
        with pytest.raises(ValueError, match=rf"expects cand_rows={K_CAND} .*but e_cand has"):
            run(e_user, e_cand[:, :1], index)
        with pytest.raises(ValueError, match=r"e_user must have shape \[U, user_rows, N\], but"):
            run(e_user[0], e_cand, index)


def test_what_is_empty_has_a_result() -> None:
    """Lookups of nothing, attention without heads, and a cache of no sequences."""
    index = jnp.zeros(7, jnp.int32)
    for shape in ((0,), (2, 0)):
        rows = functional.look_up({"table": ones(5, 3)}, jnp.zeros(shape, jnp.int32))
        assert rows.shape == (*shape, 3)
    for options in ({}, {"is_causal": True}):
        arrays = ones(7, 2, 0, 8), ones(3, 5, 2, 8), ones(3, 5, 2, 8)
        out = ikbo.dot_product_attention(*arrays, cand_to_user=index, **options)
        assert out.shape == (7, 2, 0, 8)
    params = {"uvqk_weight": ones(6, 8), "output_weight": ones(6, 6)}
    offsets = jnp.zeros(1, jnp.int32)
    cache = HstuCache(ones(3, 1, 2), ones(3, 1, 2), offsets)
    options = {"num_heads": 1, "max_seqlen": 4, "cache": cache, "return_cache": True}
    out, seen = hstu_layer(params, ones(2, 6), offsets, **options)
    assert (out.shape, seen.key.shape) == ((2, 6), (5, 1, 2))
    np.testing.assert_array_equal(seen.cu_seqlens, [0])
