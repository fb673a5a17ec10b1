"""GDPA's softmax on a Hopper GPU: what other activations lack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_gdpa import CONFIGS, DTYPES, SHAPES, check, make, of, run, spoil

from ikbo_jax.ops import dispatch
from ikbo_jax.pallas.flash import attention
from ikbo_jax.pallas.worklist import by_xla
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.problems import GdpaConfig, ShortGdpaConfig
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference import gdpa_chunked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["empty", "many_short", "gqa", "indexed", "pma", "h64", "h96"])
def test_gdpa_short_softmax(name, dtype):
    """The gradient shows that lse is right."""
    arrays, settings = make(SHAPES[name], "softmax", dtype)
    config = ShortGdpaConfig(64, 64, 2, 1)
    check(run(arrays, settings, config=config), arrays, settings)

    def loss(query: jax.Array, config: object) -> jax.Array:
        out = run(arrays._replace(query=query), settings, config=config)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    gradients = [jax.grad(loss)(arrays.query, c).astype(jnp.float32) for c in (config, None)]
    scale = float(jnp.nanmax(jnp.abs(gradients[1])))
    np.testing.assert_allclose(*gradients, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("name", ["self", "empty", "pma_indexed"])
def test_gdpa_softmax_lse(name):
    arrays, settings = make(SHAPES[name], "softmax")
    tiles = by_xla.query_tiles(Offsets.of(arrays, settings), size=TILE_ROWS)
    _, lse = attention.jagged_attention_kernel(
        *arrays[:3],
        tiles,
        settings,
        out_rows=reference.out_shape(arrays, settings)[0],
        return_residuals=True,
        config=GdpaConfig().for_softmax,
        num_sms=dispatch.num_sms(),
    )
    cpu = jax.devices("cpu")[0]
    lse, arrays = jax.device_put((lse, arrays), cpu)
    with jax.default_device(cpu):
        wide = arrays._replace(query=arrays.query.astype(jnp.float32))
        _, expected = gdpa_chunked.chunked(wide, settings)
    expected = jnp.where(expected == 0, -jnp.inf, expected)  # rows of no sequence
    has_keys = ~np.isneginf(np.asarray(expected))
    assert has_keys.any()
    np.testing.assert_array_equal(np.isneginf(lse), ~has_keys)
    np.testing.assert_allclose(lse[has_keys], expected[has_keys], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", ["default", "one_slot"])
def test_gdpa_softmax_of_growing_scores(config, dtype):
    """Far above the first block's maximum: such tiles are computed again."""
    shape = of((200, 3, 330, 64), (400, 3, 330, 5), after=3)
    arrays, settings = make(shape, "softmax", dtype)
    arrays = arrays._replace(key=arrays.key.at[jnp.array([395, 403 + 140])].multiply(50))
    check(run(arrays, settings, config=CONFIGS[config]), arrays, settings)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gdpa_softmax_bad_values_stay_in_their_sequence(bad):
    """Not bit by bit: tiles whose blocks reach into the bad sequence are computed again."""
    shape = of((200, 3, 130, 64), (200, 3, 130, 5))
    clean, settings = make(shape, "softmax")
    spoiled = spoil(clean, bad)
    out = run(spoiled, settings)
    assert not np.any(np.isfinite(out[200:203].astype(jnp.float32)))
    without = clean._replace(value=clean.value.at[200:203].set(0))
    check(out.at[200:203].set(0), without, settings)


def test_gdpa_softmax_of_more_tiles_than_flags():
    """Several tiles share a flag; a softmax over one key is 1, and blocks reach into NaNs."""
    count = 20_000
    shape = of((1,) * count, (1,) * count, q_heads=1, kv_heads=1, head_dim=64)
    arrays, settings = make(shape, "softmax")
    arrays = arrays._replace(value=arrays.value.at[777::5000].set(jnp.nan))
    out = run(arrays, settings).astype(jnp.float32)
    expected = arrays.value.astype(jnp.float32) * jnp.float32(settings.output_scale)
    np.testing.assert_allclose(out, expected, rtol=2.0**-7)
