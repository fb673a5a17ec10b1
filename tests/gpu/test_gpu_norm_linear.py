"""`norm_linear` and `gated_linear` on a Hopper GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
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
    call, arrays = call_of(name, dtype)
    check(call, arrays)
    check(gradients_of(call), arrays)


#: Rows, heads, their width, F, norm, whether norms are by head, whether [u, a, u · norm(a)] are
#: multiplied or None without u, whether there are factors and a residual, or both residuals.
GATED_CASES = {
    "least": (2, 1, 8, 8, "layer", False, True, True),
    "partial_blocks": (333, 1, 200, 136, "layer", False, True, False),
    "product": (777, 1, 264, 328, "rms", False, False, True),
    "rms_256": (600, 2, 128, 128, "rms", False, False, True),
    "without_factors": (601, 8, 64, 64, "layer", False, True, False),
    "by_head": (1000, 8, 64, 512, "layer", True, True, True),
    "many": (100_072, 4, 128, 512, "layer", False, True, True),
    "plain": (65_600, 2, 128, 256, None, False, None, True),
    "plain_rms": (40_001, 1, 192, 256, "rms", False, None, False),
    "plain_wide": (1088, 3, 128, 600, None, False, None, True),
}


def gated_call_of(name: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Makes a call of `gated_linear` that takes an implementation, and its arrays."""
    rows, heads, width, features, norm, by_head, concat, has_rest = GATED_CASES[name]
    columns, parts = heads * width, 3 if concat else 1
    rng = np.random.default_rng(rows)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    size = heads if by_head else columns
    is_plain = concat is None
    vectors = (draw(size), draw(size)) if has_rest and not is_plain else (None, None)
    a = draw(rows, heads, width) + 3 * draw(rows, 1, 1)
    weight = draw(parts * columns, features) * float((parts * columns) ** -0.5)
    residual = draw(rows, features) if has_rest else None
    shared = draw(rows // 64, features) if has_rest and is_plain else None

    @functools.partial(jax.jit, static_argnums=0)
    def call(implementation: str, *arrays: Any) -> tuple[jax.Array]:
        *arrays, scale, bias = arrays
        options = {"norm": norm, "by_head": by_head, "concat": bool(concat)}
        options |= {"norm_scale": scale, "norm_bias": bias, "implementation": implementation}
        return (ikbo.gated_linear(*arrays, **options),)

    u = None if is_plain else draw(rows, heads, width)
    return call, (u, a, weight, residual, shared, *vectors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", GATED_CASES)
def test_gpu_gated_linear(name: str, dtype: str) -> None:
    call, arrays = gated_call_of(name, dtype)
    check(call, arrays)
    check(gradients_of(call), arrays)


SANITIZED = """
import jax, test_gpu_norm_linear as suite
calls = [suite.call_of(name, "bfloat16") for name in ("least", "widest")]
calls += [suite.gated_call_of(name, "bfloat16") for name in ("by_head", "product", "plain_wide")]
for call, arrays in calls:
    jax.block_until_ready(call("mosaic_gpu", *arrays))
print("FINISHED")
"""
test_linear_sanitizer = on_gpu.sanitizer_test(SANITIZED)


def gradients_of(call: Any) -> Any:
    """Makes the function of the gradients of a call's arrays, for a cotangent of few values."""

    def gradients(implementation: str, *arrays: Any) -> list[jax.Array]:
        outs, pull_back = jax.vjp(functools.partial(call, implementation), *arrays)
        cotangents = [jnp.arange(out.size).reshape(out.shape) % 3 - 1 for out in outs]
        typed = (x.astype(out.dtype) for x, out in zip(cotangents, outs, strict=True))
        return jax.tree.leaves(pull_back(tuple(typed)))

    return gradients


def check(call: Any, arrays: tuple[Any, ...]) -> None:
    """Errors are near those of XLA, which rounds in the same places; two runs have equal bits."""
    found, again = (call("mosaic_gpu", *arrays) for _ in range(2))
    same_dtype = call("xla", *arrays)
    with jax.default_matmul_precision("highest"):
        exact = call("xla", *jax.tree.map(lambda x: x.astype(jnp.float32), arrays))
    for x, twin, theirs, wanted in zip(found, again, same_dtype, exact, strict=True):
        np.testing.assert_array_equal(x, twin)
        errors = [float(jnp.max(jnp.abs(y.astype(jnp.float32) - wanted))) for y in (x, theirs)]
        assert errors[0] <= 1.5 * errors[1] + 1e-4
