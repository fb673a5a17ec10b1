"""`dot_product_attention`: the results of `jax.nn` on copies, and what it refuses."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import ones

import ikbo_jax as ikbo

B, U, T, S, N, K, H = 7, 3, 4, 6, 4, 2, 8
INDEX = np.array([2, 0, 0, 2, 1, 0, 2], np.int32)


def drawn(dtype: Any = jnp.float32, heads: int = K) -> list[jax.Array]:
    random = np.random.default_rng(0)
    shapes = ((B, T, N, H), (U, S, heads, H), (U, S, heads, H))
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


RANDOM = np.random.default_rng(1)
#: Every row of users keeps a key, and so does every query below.
MASK = jnp.asarray(np.array([[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1], [1] * 6], bool))
MASK = MASK[:, None, None]
BIAS = jnp.asarray(3 * RANDOM.normal(size=(U, 1, 1, S)), jnp.float32)
BIAS_OF_HEADS = jnp.asarray(3 * RANDOM.normal(size=(U, N, 1, S)), jnp.float32)
LENGTHS = jnp.asarray([4, 6, 3], jnp.int32)
QUERIES = jnp.asarray([4, 0, 2, 3, 4, 1, 4], jnp.int32)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask_of_all_users": {"mask": MASK[0, 0]},
    "mask_and_lengths": {"mask": MASK[:1], "key_value_seq_lengths": LENGTHS},
    "bias": {"bias": BIAS, "scale": -0.5},
    "bias_of_heads": {"bias": BIAS_OF_HEADS},
    "bias_mask_lengths": {
        "bias": BIAS[:1, 0, 0],
        "mask": MASK[:1],
        "key_value_seq_lengths": LENGTHS,
    },
    "window": {"local_window_size": (1, 2), "query_seq_lengths": QUERIES},
    "causal_window": {"local_window_size": 2, "is_causal": True},
    "causal_lengths_bias": {"is_causal": True, "key_value_seq_lengths": LENGTHS, "bias": BIAS},
    # What the kernels do not take is added to the scores. Every query keeps a key.
    "scores_mask_by_query": {"mask": jnp.eye(T, S, dtype=bool), "bias": BIAS},
    "scores_mask_by_head": {"mask": BIAS_OF_HEADS > -2, "query_seq_lengths": QUERIES},
    "scores_bias_by_head": {"bias": BIAS_OF_HEADS},
    "scores_bias_scale": {"bias": BIAS, "scale": 1e-40},
    "scores_mask_causal": {"mask": MASK.at[:, :, :, 0].set(True), "is_causal": True},
    "scores_mask_window": {
        "mask": jnp.ones((1, 1, T, 1), bool),
        "local_window_size": (2, 0),
        "key_value_seq_lengths": LENGTHS,
    },
    "scores_lse_causal": {"return_residual": True, "is_causal": True},
}


def on_copies(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Any:
    """The call in `jax.nn`, with every user's arrays copied to the candidates."""
    for name in ("bias", "mask", "key_value_seq_lengths"):
        if (x := options.get(name)) is not None and x.shape[0] == U:
            options[name] = x[INDEX]
    with jax.numpy_rank_promotion("allow"):
        return jax.nn.dot_product_attention(query, key[INDEX], value[INDEX], **options)


def ours(*arrays: jax.Array, **options: Any) -> Any:
    return ikbo.dot_product_attention(*arrays, cand_to_user=INDEX, **options)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_on_copies(name: str) -> None:
    options = CASES[name]
    arrays = drawn(heads=N if name == "bias_of_heads" else K)
    bias = options.get("bias", jnp.zeros(()))

    def loss(attend: Any, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        rest = options | ({"bias": arrays[3]} if "bias" in options else {})
        result = attend(*arrays[:3], **rest)
        out = result[0] if options.get("return_residual") else result
        return jnp.sum(
            out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        ), result

    def computed(attend: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            of = jax.value_and_grad(loss, (1, 2, 3, 4), has_aux=True)
            (_, out), gradients = jax.jit(of, static_argnums=0)(attend, *arrays, bias)
        return out, gradients

    for found, expected in zip(
        *map(jax.tree.leaves, (computed(ours), computed(on_copies))), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bias", [3.0, -1e9, -jnp.inf])
def test_a_bias_is_as_exact_as_in_float32(dtype: Any, bias: float) -> None:
    arrays, some = drawn(dtype), jnp.asarray([0, 1, 0.37, 0, 0.113, 1], jnp.float32)
    options = {"bias": jnp.where(some > 0, bias * some, 0.0)}
    with jax.numpy_dtype_promotion("standard"):
        rounded = on_copies(*arrays, **options)
    exact = on_copies(*(x.astype(jnp.float32) for x in arrays), **options)
    out = ours(*arrays, **options)
    assert (out.dtype, out.shape) == (dtype, (B, T, N, H))
    rounded, out = (x.astype(jnp.float32) for x in (rounded, out))
    allowed = 2 * jnp.max(jnp.abs(rounded - exact))
    allowed += float(jnp.finfo(dtype).eps) * jnp.max(jnp.abs(exact))
    assert jnp.max(jnp.abs(out - exact)) <= allowed


def test_a_bias_widens_heads_to_a_width_of_the_kernels() -> None:
    shapes = (ones(B, T, 2, 64), ones(U, S, 2, 64), ones(U, S, 2, 64))
    (plan,) = ikbo.explain(lambda *x: ours(*x, bias=BIAS), *shapes).plans
    assert plan.problem.head_dim == 96


def test_residuals() -> None:
    arrays = drawn()
    for options in ({}, {"key_value_seq_lengths": LENGTHS}):
        _, lse = ours(*arrays, return_residual=True, **options)
        _, expected = on_copies(*arrays, return_residual=True, **options)
        np.testing.assert_allclose(lse, expected, rtol=1e-5)
    _, lse = ours(*arrays, return_residual=True, query_seq_lengths=QUERIES)
    is_padding = np.arange(T)[None] >= np.asarray(QUERIES)[:, None]
    np.testing.assert_array_equal(np.all(lse == -np.inf, axis=2), is_padding)


def test_padding_has_no_effect_and_queries_without_keys_are_zero() -> None:
    lengths = np.asarray([0, 6, 3], np.int32)
    query, *of_users = drawn()
    is_padding = (np.arange(S)[None] >= lengths[:, None])[..., None, None]
    padded = [jnp.where(is_padding, jnp.nan, x) for x in of_users]
    for options in ({}, {"is_causal": True}):
        out, clean = (
            ours(query, *x, key_value_seq_lengths=lengths, **options) for x in (padded, of_users)
        )
        np.testing.assert_array_equal(out, clean)
        np.testing.assert_array_equal(jnp.all(out == 0, axis=(1, 2, 3)), INDEX == 0)


#: What is wrong, and what the message says.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mask_shape": (
        {"mask": MASK[:, :, :, :4]},
        "mask has shape (3, 1, 1, 4), which does not broadcast to [U, N, T, S] = (3, 4, 4, 6)",
    ),
    "mask_of_candidates": ({"mask": MASK[INDEX]}, "mask has shape (7, 1, 1, 6), which"),
    "mask_rank": ({"mask": MASK[None]}, "mask has shape (1, 3, 1, 1, 6), which"),
    "mask_dtype": ({"mask": BIAS}, "mask must be a bool array, but is float32[3, 1, 1, 6]"),
    "mask_list": ({"mask": [True]}, "mask must be a bool array, but is a list"),
    "bias_dtype": ({"bias": MASK}, "bias must be a floating-point array, but is bool[3, 1, 1, 6]"),
    "bias_shape": ({"bias": BIAS[:, :, :, :5]}, "bias has shape (3, 1, 1, 5), which"),
    "queries": (
        {"query_seq_lengths": LENGTHS},
        "query_seq_lengths has shape (3,) but query has B=7",
    ),
    "window": (
        {"local_window_size": -1},
        "local_window_size must be an integer of at least 0, or a tuple of two, but is -1",
    ),
    "window_bool": ({"local_window_size": (True, 1)}, "but is (True, 1)"),
    "window_text": ({"local_window_size": "12"}, "but is '12'"),
    "windows": ({"local_window_size": (1, 2, 3)}, "but is (1, 2, 3)"),
    "causal": (
        {"is_causal": "no"},
        "is_causal must be a bool known while tracing, but is a str, 'no'",
    ),
    "implementation": (
        {"implementation": "cudnn"},
        "unknown implementation 'cudnn'; known: None, 'mosaic_gpu', 'xla'",
    ),
    "implementation_causal": (
        {"implementation": "cudnn", "is_causal": True},
        "unknown implementation 'cudnn'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals_name_the_argument(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        ours(*drawn(), **options)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("scores_")])
def test_explain_says_what_no_kernel_takes(name: str) -> None:
    shapes = [ones(*x.shape[:3], 64) for x in drawn()]
    (plan,) = ikbo.explain(lambda *x: ours(*x, **CASES[name]), *shapes).plans
    assert (plan.implementation, plan.cuda.implementation) == ("xla", "xla")
    assert plan.cuda.reason.endswith(": a bias runs in XLA")
    with pytest.raises(NotImplementedError, match="a bias runs in XLA"):
        jax.eval_shape(lambda *x: ours(*x, **CASES[name], implementation="mosaic_gpu"), *shapes)
