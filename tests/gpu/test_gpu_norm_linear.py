"""`norm_linear` on a Hopper GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ikbo_jax as ikbo

pytestmark = pytest.mark.gpu

#: Rows, F, shapes of the groups, norm, whether there are factors and biases.
CASES = {
    "one_group": (130, 512, ((4, 128),), "layer", False),
    "partial_blocks": (1000, 264, ((200,), (4, 128), (72,)), "rms", True),
    "widest": (333, 640, ((4, 128), (136,)), "layer", True),
    "least": (2, 8, ((8,),), "layer", True),
    "many": (100_072, 512, ((4, 128),) * 4, "layer", True),
}


def call_of(name: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Makes a call of `norm_linear` that takes an implementation, and its arrays."""
    rows, features, shapes, norm, has_vectors = CASES[name]
    rng = np.random.default_rng(rows)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    x = draw(rows, features) + 3 * draw(rows, 1)
    weights = tuple(draw(features, *s) * float(features**-0.5) for s in shapes)
    vectors = (draw(features), draw(features)) if has_vectors else (None, None)
    biases = tuple(draw(*s) if has_vectors else None for s in shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def call(implementation: str, x: Any, weights: Any, vectors: Any, biases: Any) -> Any:
        options = {"norm": norm, "norm_scale": vectors[0], "norm_bias": vectors[1]}
        activations = ("silu", *("identity",) * (len(shapes) - 1))
        options |= {"activations": activations, "implementation": implementation}
        return ikbo.norm_linear(x, weights, biases, **options)

    return call, (x, weights, vectors, biases)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_gpu_norm_linear(name: str, dtype: str) -> None:
    """Errors are near those of XLA, which rounds in the same places; two runs have equal bits."""
    call, arrays = call_of(name, dtype)
    found, again = (call("mosaic_gpu", *arrays) for _ in range(2))
    same_dtype = call("xla", *arrays)
    with jax.default_matmul_precision("highest"):
        exact = call("xla", *jax.tree.map(lambda x: x.astype(jnp.float32), arrays))
    for x, twin, theirs, wanted in zip(found, again, same_dtype, exact, strict=True):
        np.testing.assert_array_equal(x, twin)
        errors = [float(jnp.max(jnp.abs(y.astype(jnp.float32) - wanted))) for y in (x, theirs)]
        assert errors[0] <= 1.5 * errors[1] + 1e-4
