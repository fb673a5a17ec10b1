"""The PTX of the launch that adds products of rows, executed on a CPU."""

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.hopper import row_products


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((37, 3, 64), "bfloat16"), ((5, 1, 96), "float16"), ((32, 2, 256), "bfloat16")],
)
def test_emulated_sums_of_products_are_right(shape, dtype, sm90: emulator.Emulator) -> None:
    """In f32; the last CTA's rows past the end are not stored."""
    keys = jax.random.split(jax.random.key(0))
    arrays = [jax.random.normal(key, shape, dtype) for key in keys]
    with sm90.emulated() as launches:
        found = row_products.sums(*arrays)
    assert launches == ["ikbo_row_products_mosaic_gpu_kernel"]
    assert found.dtype == jnp.float32
    one, other = (np.asarray(x, np.float64) for x in arrays)
    bound = np.abs(one * other).sum(-1) * 2.0**-20
    assert (np.abs(np.asarray(found) - (one * other).sum(-1)) <= bound).all()
