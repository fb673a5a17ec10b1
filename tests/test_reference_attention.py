"""The oracle against NumPy; the XLA path, its gradient and its memory against the oracle."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped as grouped

pytestmark = pytest.mark.slow

SHAPES = problems.ATTENTION_SHAPES
SCALE = 0.25
#: What the paths may differ by through the order of f32 sums alone.
ATOL = 5e-6
#: Many steps of every kind, of tiny sizes.
SMALL_BLOCKS = grouped.Blocking(group=2, groups=3, keys=7)

STATIC = ("scale", "blocks")
decomposed = jax.jit(grouped.decomposed, static_argnames=STATIC)
decomposed_vjp = jax.jit(grouped.decomposed_vjp, static_argnames=STATIC)
materialised = jax.jit(reference.materialised, static_argnames="scale")


def f32_inputs(name: str, seed: int = 0) -> problems.AttentionInputs:
    return problems.make_attention_inputs(SHAPES[name], "float32", seed)


def cotangents(shape: problems.AttentionShape, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    rows = (shape.candidates, shape.q_len, shape.q_heads)
    return (
        problems.random_array(rng, (*rows, shape.head_dim), dtype),
        problems.random_array(rng, rows, "float32"),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_materialised_matches_numpy_f64(name: str) -> None:
    inputs = f32_inputs(name)
    out, lse = materialised(*inputs, scale=SCALE)
    exact_out, exact_lse = problems.numpy_attention_oracle(inputs, scale=SCALE)
    np.testing.assert_allclose(out, exact_out, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=ATOL)


def test_materialised_attends_to_own_tokens_too() -> None:
    inputs = f32_inputs("odd_counts")
    rng = np.random.default_rng(1)
    own = [problems.random_array(rng, (13, 2, 3, 24), "float32") for _ in range(2)]
    out, lse = materialised(*inputs, scale=SCALE, self_key=own[0], self_value=own[1])
    exact_out, exact_lse = problems.numpy_attention_oracle(
        inputs, scale=SCALE, self_key=own[0], self_value=own[1]
    )
    np.testing.assert_allclose(out, exact_out, rtol=0, atol=ATOL)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=ATOL)


def test_materialised_rounds_once() -> None:
    inputs = problems.make_attention_inputs(SHAPES["grouped_heads"], "float16")
    out, _ = materialised(*inputs, scale=SCALE)
    assert out.dtype == jnp.float16
    exact, _ = problems.numpy_attention_oracle(inputs, scale=SCALE)
    # Half a unit in the last place of each value, and a little for f32 sums.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), problems.in_turn(SHAPES))
def test_decomposed_is_within_the_error_rule(name: str, dtype: str) -> None:
    inputs = problems.make_attention_inputs(SHAPES[name], dtype)
    actual = decomposed(*inputs, scale=SCALE)
    problems.assert_attention_within_error_rule(actual, inputs, scale=SCALE)


@pytest.mark.parametrize("name", SHAPES)
def test_decomposed_in_many_steps_is_within_the_error_rule(name: str) -> None:
    inputs = problems.make_attention_inputs(SHAPES[name], "bfloat16")
    blocks = SMALL_BLOCKS._replace(keys=min(SMALL_BLOCKS.keys, SHAPES[name].kv_len))
    actual = decomposed(*inputs, scale=SCALE, blocks=blocks)
    problems.assert_attention_within_error_rule(actual, inputs, scale=SCALE)


@pytest.mark.parametrize("group", [1, 3, 50])
@pytest.mark.parametrize("groups", [1, 4, 50])
def test_blocking_changes_no_value(group: int, groups: int) -> None:
    inputs = f32_inputs("users_without_candidates")
    expected = materialised(*inputs, scale=SCALE)
    for keys in (1, 19, 20):
        blocks = grouped.Blocking(group, groups, keys)
        actual = decomposed(*inputs, scale=SCALE, blocks=blocks)
        chex.assert_trees_all_close(actual, expected, atol=ATOL)


@pytest.mark.parametrize("function", [materialised, decomposed], ids=["oracle", "xla"])
def test_indices_and_lengths_are_clamped_not_wrapped(function) -> None:
    inputs = f32_inputs("odd_counts")
    wild = np.array([-1, 4, 2**31 - 1, -(2**31), *range(9)], np.int32)
    lengths = np.array([99, 2**31 - 1, -1, -(2**31)], np.int32)
    out = function(*inputs[:3], jnp.asarray(wild), jnp.asarray(lengths), scale=SCALE)
    tame = jnp.asarray(np.clip(wild, 0, 3)), jnp.asarray(np.clip(lengths, 0, 37))
    chex.assert_trees_all_equal(out, function(*inputs[:3], *tame, scale=SCALE))


@pytest.mark.parametrize("function", [materialised, decomposed], ids=["oracle", "xla"])
def test_what_lies_past_the_length_has_no_effect(function) -> None:
    inputs = f32_inputs("odd_counts")
    lengths = jnp.asarray([37, 5, 30, 0], jnp.int32)
    past = np.arange(37)[None] >= np.asarray(lengths)[:, None]
    mask = jnp.asarray(past)[:, :, None, None]
    clean = function(*inputs[:4], lengths, scale=SCALE)
    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        key, value = (jnp.where(mask, poison, array) for array in inputs[1:3])
        out = function(inputs.query, key, value, inputs.cand_to_user, lengths, scale=SCALE)
        chex.assert_trees_all_equal(out, clean)


def test_scores_that_grow_along_s_do_not_overflow() -> None:
    """Every chunk's maximum dwarfs that of the one before, beyond the range of exp in f32."""
    inputs = f32_inputs("grouped_heads")
    growth = jnp.linspace(1.0, 400.0, 40, dtype=jnp.float32)[None, :, None, None]
    inputs = inputs._replace(key=inputs.key * growth, key_value_seq_lengths=None)
    for ordered in (inputs, inputs._replace(key=inputs.key[:, ::-1], value=inputs.value[:, ::-1])):
        actual = decomposed(*ordered, scale=SCALE, blocks=SMALL_BLOCKS)
        exact_out, exact_lse = problems.numpy_attention_oracle(ordered, scale=SCALE)
        assert np.max(exact_lse) > 200
        np.testing.assert_allclose(actual[0], exact_out, rtol=0, atol=5e-4)
        np.testing.assert_allclose(actual[1], exact_lse, rtol=1e-5)


@pytest.mark.parametrize("function", [materialised, decomposed], ids=["oracle", "xla"])
def test_row_of_minus_infinities_is_a_row_without_keys(function) -> None:
    inputs = f32_inputs("one_user")
    query = jnp.abs(inputs.query).at[2].set(jnp.inf)
    inputs = inputs._replace(query=query, key=-jnp.abs(inputs.key))
    out, lse = function(*inputs, scale=SCALE)
    assert np.all(np.asarray(lse[2]) == -np.inf)
    assert np.all(np.asarray(out[2]) == 0)
    assert np.all(np.isfinite(np.delete(np.asarray(lse), 2, axis=0)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["key", "value", "query"])
def test_poison_reaches_its_user_alone(array: str, poison: float) -> None:
    inputs = f32_inputs("unsorted")
    row = 2
    poisoned = inputs._replace(**{array: getattr(inputs, array).at[row, 1].set(poison)})
    run = functools.partial(decomposed, scale=SCALE, blocks=SMALL_BLOCKS)
    out, clean = run(*poisoned)[0], run(*inputs)[0]
    hit = np.asarray(inputs.cand_to_user) == row if array != "query" else np.arange(17) == row
    assert 0 < hit.sum() < 17
    assert not np.all(np.isfinite(np.asarray(out)[hit]), axis=(1, 2, 3)).any()
    np.testing.assert_array_equal(np.asarray(out)[~hit], np.asarray(clean)[~hit])

    d_out, d_lse = cotangents(SHAPES["unsorted"], "float32")
    pull = functools.partial(decomposed_vjp, scale=SCALE, blocks=SMALL_BLOCKS)
    d_query, d_key, d_value = pull(*poisoned, *run(*poisoned), d_out, d_lse)
    clean_gradients = pull(*inputs, *run(*inputs), d_out, d_lse)
    users = np.arange(5) == (row if array != "query" else np.asarray(inputs.cand_to_user)[row])
    kept = (~hit, ~users, ~users)
    for actual, expected, rows in zip(
        (d_query, d_key, d_value), clean_gradients, kept, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(actual)[rows], np.asarray(expected)[rows])


@pytest.mark.parametrize("blocks", [None, SMALL_BLOCKS], ids=["default_blocks", "small_blocks"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    problems.in_turn(["odd_counts", "users_without_candidates", "grouped_heads"]),
)
def test_gradient_is_within_the_error_rule(name: str, dtype: str, blocks) -> None:
    shape = SHAPES[name]
    inputs = problems.make_attention_inputs(shape, dtype)
    d_out, d_lse = cotangents(shape, dtype)
    results = decomposed(*inputs, scale=SCALE, blocks=blocks)
    actual = decomposed_vjp(*inputs, *results, d_out, d_lse, scale=SCALE, blocks=blocks)
    exact = problems.numpy_attention_gradients(inputs, d_out, d_lse, scale=SCALE)

    def plain(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return problems.same_dtype_attention(*arrays, *inputs[3:], scale=SCALE)

    _, pull_back = jax.vjp(plain, *inputs[:3])
    same_dtype = pull_back((d_out, d_lse))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, same_dtype)
    if dtype == "float32":
        # Sums in another order are as good as jnp's, and nothing rounds the difference away.
        chex.assert_trees_all_close(actual, jax.tree.map(np.float32, exact), atol=1e-5)
    else:
        jax.tree.map(problems.assert_within_error_rule, actual, exact, same_dtype)


def test_gradient_without_that_of_lse() -> None:
    inputs = f32_inputs("grouped_heads")
    d_out, d_lse = cotangents(SHAPES["grouped_heads"], "float32")
    results = decomposed(*inputs, scale=SCALE)
    none = decomposed_vjp(*inputs, *results, d_out, None, scale=SCALE)
    zeros = decomposed_vjp(*inputs, *results, d_out, 0 * d_lse, scale=SCALE)
    chex.assert_trees_all_equal(none, zeros)


def test_merging_two_histories_is_attending_to_both() -> None:
    both = f32_inputs("unsorted")
    first, second = (
        both._replace(key=both.key[:, part], value=both.value[:, part])
        for part in (slice(0, 6), slice(6, None))
    )
    parts = [materialised(*part, scale=SCALE) for part in (first, second)]
    out, lse = reference.merge_attention(*parts[0], *parts[1])
    chex.assert_trees_all_close((out, lse), materialised(*both, scale=SCALE), atol=ATOL)


def test_merging_with_nothing() -> None:
    inputs = f32_inputs("unsorted")
    out, lse = materialised(*inputs, scale=SCALE)
    nothing = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)
    for merged in (
        reference.merge_attention(out, lse, *nothing),
        reference.merge_attention(*nothing, out, lse),
    ):
        chex.assert_trees_all_close(merged, (out, lse), atol=ATOL)
    merged = reference.merge_attention(*nothing, *nothing)
    chex.assert_trees_all_equal(merged, (jnp.zeros_like(out), nothing[1]))
    gradient = jax.grad(lambda *x: reference.merge_attention(*x)[0].sum(), argnums=(0, 1, 2, 3))
    gradients = gradient(out, lse, *nothing)
    assert all(np.all(np.isfinite(np.asarray(g))) for g in gradients)
    chex.assert_trees_all_equal(gradients[2:], jax.tree.map(jnp.zeros_like, nothing))


def test_own_tokens_alone_are_attended_to_in_f32() -> None:
    rng = np.random.default_rng(0)
    query = problems.random_array(rng, (5, 3, 4, 8), "bfloat16")
    own = [problems.random_array(rng, (5, 6, 2, 8), "bfloat16") for _ in range(2)]
    out, lse = reference.self_attention(query, *own, scale=SCALE)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    # Each candidate as a user of its own.
    users = jnp.arange(5, dtype=jnp.int32)
    inputs = problems.AttentionInputs(query, *own, users)
    problems.assert_attention_within_error_rule(
        (out.astype(jnp.bfloat16), lse), inputs, scale=SCALE
    )


# Sizes as they are in earnest: compiled, never run.
B, U, T, S, N, K, H = 2048, 32, 64, 4096, 2, 2, 128
SCORES_BYTES = 4 * B * T * N * S


@pytest.mark.parametrize("users", [U, B], ids=["64_a_user", "users_without_candidates"])
@pytest.mark.parametrize("differentiate", [False, True], ids=["value", "gradient"])
def test_memory_holds_neither_copies_nor_all_scores(differentiate: bool, users: int) -> None:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    query, keys = array((B, T, N, H)), array((users, S, K, H))
    index, lengths = (jax.ShapeDtypeStruct((rows,), jnp.int32) for rows in (B, users))
    lse = jax.ShapeDtypeStruct((B, T, N), jnp.float32)

    def bytes_of(function, *more) -> int:
        compiled = jax.jit(functools.partial(function, scale=SCALE)).lower(
            query, keys, keys, index, lengths, *more
        )
        return compiled.compile().memory_analysis().temp_size_in_bytes

    copies_bytes = 2 * 2 * B * S * K * H
    assert bytes_of(reference.materialised) > copies_bytes
    if differentiate:
        found = bytes_of(grouped.decomposed_vjp, query, lse, query, lse)
        # Sums of the gradients of the users' keys and values are f32.
        found -= 2 * 4 * users * S * K * H
    else:
        found = bytes_of(grouped.decomposed)
    assert found < SCORES_BYTES / 4
    assert found < copies_bytes / 8


@pytest.mark.parametrize(
    "sizes",
    [
        (2048, 32, 64, 4096, 2, 2, 128),
        (100_000, 1400, 1, 300, 4, 1, 64),
        (100_000, 100_000, 1, 4096, 2, 2, 128),
        (1, 1, 256, 1, 64, 1, 256),
        (1, 9, 1, 100_000, 1, 1, 1),
    ],
)
def test_blocking_bounds_every_step(sizes: tuple[int, ...]) -> None:
    batch, users, q_len, kv_len, q_heads, kv_heads, head_dim = sizes
    group, groups, keys = grouped.blocking(*sizes)
    assert 1 <= group <= batch
    assert groups >= 1
    assert 1 <= keys <= kv_len
    if groups > 1:
        assert groups * group * q_len * q_heads * keys <= grouped.MAX_SCORES
        assert groups * keys * kv_heads * head_dim <= grouped.MAX_KEY_ELEMENTS
    needed = min(batch, users) + (batch - min(batch, users)) // group
    assert needed * group <= 2 * batch
