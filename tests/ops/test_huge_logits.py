"""Huge logits: any that are finite give a finite lse, and a clear maximum gives its value.

The suite's flags leave XLA's optimiser out, whose one instruction for a product and a difference is
what made these wrong: here it takes part.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.reference import attention as reference

INDEX = np.asarray([0, 1, 0], np.int32)
B, U, T, S, N, H, WINNER = 3, 2, 2, 7, 2, 8, 4
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def inputs(size: float, scale: float, dtype: str) -> tuple[np.ndarray, ...]:
    """Queries and keys whose scores are up to about `size`, that of key WINNER clearly first."""
    rng = np.random.default_rng(0)
    query = (rng.random((B, T, N, H)) + 0.5) * size**0.5
    key = rng.standard_normal((U, S, N, H)) * 0.01
    key[:, WINNER] = np.sign(scale) * (rng.random((U, N, H)) + 1)
    arrays = query, key * size**0.5, rng.standard_normal((U, S, N, H))
    return tuple(np.asarray(jnp.asarray(x.astype(np.float32)).astype(dtype)) for x in arrays)


def attended(query, key, value, scale, **own):
    options = {"scale": scale, "return_residuals": True, "implementation": "xla"}
    return ikbo.attention(query, key, value, INDEX, **options, **own)


def with_own_tokens(query, key, value, scale):
    own = {"self_key": key[INDEX][:, 3:], "self_value": value[INDEX][:, 3:]}
    return attended(query, key[:, :3], value[:, :3], scale, **own)


def materialised(query, key, value, scale):
    return reference.materialised(query, key, value, INDEX, scale=scale)


def of_gdpa(query, key, value, scale):
    rows = query.reshape(B * T, N, H), key.reshape(-1, N, H), value.reshape(-1, N, H)
    q_offsets, kv_offsets = (np.arange(n + 1, dtype=np.int32) for n in (B, U))
    out = ikbo.gdpa(
        *rows,
        q_offsets * T,
        kv_offsets * key.shape[1],
        activation="softmax",
        scale=scale,
        q_to_kv=INDEX,
        implementation="xla",
    )
    return out.reshape(query.shape), None


@pytest.mark.parametrize("fn", [attended, with_own_tokens, materialised, of_gdpa])
@pytest.mark.parametrize(("dtype", "scale"), [("float32", -0.3), ("bfloat16", 0.1)])
def test_a_clear_maximum_gives_its_value(fn, dtype: str, scale: float) -> None:
    run = jax.jit(functools.partial(fn, scale=scale), compiler_options=OPTIMISED)
    for size in (1e3, 1e9, 1e30):
        query, key, value = inputs(size, scale, dtype)
        out, lse = run(query, key, value)
        expected = np.repeat(value[INDEX][:, None, WINNER], T, axis=1)
        np.testing.assert_allclose(
            np.asarray(out, np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-5
        )
        if lse is not None:
            products = np.einsum(
                "btnh,bnh->btn", query.astype(float), key[INDEX][:, WINNER].astype(float)
            )
            np.testing.assert_allclose(lse, products * scale, rtol=1e-5)


@pytest.mark.parametrize("fn", [attended, of_gdpa])
def test_gradient_of_a_clear_maximum(fn) -> None:
    def loss(*arrays):
        return jnp.sum(fn(*arrays, scale=0.1)[0])

    run = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=OPTIMISED)
    expected = np.zeros((U, S, N, H))
    expected[:, WINNER] = T * np.bincount(INDEX)[:, None, None]
    for size in (1e6, 1e9, 1e30):
        gradients = run(*inputs(size, 0.1, "float32"))
        assert all(np.isfinite(x).all() for x in gradients), size
        np.testing.assert_allclose(
            gradients[2], expected, rtol=1e-2, atol=1e-5, err_msg=f"size {size}"
        )


def test_the_kernels_second_try_is_exact_and_its_check_finds_the_need() -> None:
    scale = 0.1 * np.log2(np.e)
    scores = jnp.asarray([[3e12, -1e12, 2.9e12], [-7e11, -9e12, -8e11]], jnp.float32)
    for sign in (1, -1):
        extreme = softmax.row_extreme(sign * scores, sign * scale)
        exponentials = softmax.exact_exponentials(sign * scores, extreme, sign * scale)
        np.testing.assert_array_equal(exponentials, [[1, 0, 0], [1, 0, 0]])
    # What one instruction that rounds once makes of the maximum itself.
    product = np.float64(np.float32(scale)) * np.asarray(scores, np.float64)[:, 0]
    lost = product - product.astype(np.float32)
    weights = np.exp2(np.clip(lost, -200, 200))
    limits = softmax.SUM_MINIMUM, softmax.SUM_LIMITS["bfloat16"]
    assert not np.any((weights >= limits[0]) & (weights < limits[1]))


@pytest.mark.parametrize("fn", [attended, of_gdpa])
@pytest.mark.parametrize("keys", [S, 2100])
def test_gradients_where_all_keys_have_a_large_part_in_common(fn, keys: int) -> None:
    """Logits near -2e5, whose lse is rounded to 1/64: rows of their gradients must sum to 0."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(B, T, N, H)) + 160
    key = rng.normal(size=(U, keys, N, H)) * 0.01 - 160
    value = rng.normal(size=(U, keys, N, H))
    arrays = [np.asarray(x, np.float32) for x in (query, key, value)]
    weight = rng.normal(size=(B, T, N, H)).astype(np.float32)

    def of(run):
        return jax.grad(lambda *arrays: jnp.sum(run(*arrays, scale=1.0)[0] * weight), (0, 1, 2))

    inputs = problems.AttentionInputs(*arrays, INDEX, None)
    no_lse = np.zeros(weight.shape[:3])
    exact = oracle_attention.numpy_attention_gradients(inputs, weight, no_lse, scale=1.0)
    errors = []
    for run in (fn, materialised):
        found = jax.jit(of(run), compiler_options=OPTIMISED)(*arrays)
        errors.append([np.sqrt(np.mean((x - y) ** 2)) for x, y in zip(found, exact, strict=True)])
    # CPUs sum the products of a few rows in another order: 3 times the error of each logit.
    assert all(ours <= 4 * theirs for ours, theirs in zip(*errors, strict=True)), errors
