"""`attention` on the XLA path, and the way to the kernel: values, gradients, own tokens, order."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest
from attention_basics import ATOL, SCALE, SMALL, attend, ours, own_tokens

import ikbo_jax as ikbo

SHAPES = problems.ATTENTION_SHAPES


#: Users, candidates, q_len, kv_len, key heads, query heads a key head, head_dim, dtype and scale:
#: sizes as odd as any, but few, since each takes a program.
DRAWN = [
    (4, 9, 3, 40, 2, 3, 20, "float32", 0.3),
    (6, 1, 1, 17, 1, 1, 7, "bfloat16", -0.5),
    (5, 6, 2, 5, 1, 2, 13, "float16", 0.0),
]


@hypothesis.given(data=st.data())
def test_any_index_and_lengths_are_within_the_error_rule(data: st.DataObject) -> None:
    drawn = data.draw(st.sampled_from(DRAWN), "sizes")
    users, candidates, q_len, kv_len, kv_heads, repeats, head_dim, dtype, scale = drawn
    anything = st.integers(-(2**31), 2**31 - 1)
    users_or_worse = st.one_of(st.integers(0, users - 1), anything)
    index = data.draw(st.lists(users_or_worse, min_size=candidates, max_size=candidates), "index")
    shape = problems.AttentionShape(
        users, candidates, q_len, kv_len, kv_heads * repeats, kv_heads, head_dim
    )
    inputs = problems.make_attention_inputs(shape, dtype)
    inputs = inputs._replace(cand_to_user=np.asarray(index, np.int32))
    # The first of the sizes has none.
    if drawn != DRAWN[0]:
        lengths_or_worse = st.one_of(st.integers(0, kv_len), anything)
        lengths = data.draw(st.lists(lengths_or_worse, min_size=users, max_size=users), "lengths")
        inputs = inputs._replace(key_value_seq_lengths=np.asarray(lengths, np.int32))
    # A promise that the index breaks changes nothing.
    options = {"scale": scale, "indices_are_sorted": drawn == DRAWN[2]}
    results = attend(inputs, **options, return_residuals=True)
    oracle_attention.assert_attention_within_error_rule(results, inputs, scale=scale)


def test_default_scale_is_one_over_the_root_of_the_width() -> None:
    inputs = problems.make_attention_inputs(SMALL._replace(head_dim=9), "float32")
    default, explicit = (
        str(jax.make_jaxpr(functools.partial(attend, **options))(inputs))
        for options in ({}, {"scale": 1 / 3})
    )
    assert default == explicit != str(jax.make_jaxpr(lambda x: attend(x, scale=0.3))(inputs))


def test_residuals_add_to_the_result() -> None:
    inputs = problems.make_attention_inputs(SMALL)
    out, lse = jax.jit(functools.partial(attend, return_residuals=True))(inputs)
    chex.assert_shape(out, (7, 2, 4, 8))
    chex.assert_shape(lse, (7, 2, 4))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(out, attend(inputs))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_no_keys_at_all(implementation) -> None:
    inputs = problems.make_attention_inputs(SMALL._replace(lengths="full"))
    inputs = inputs._replace(key=inputs.key[:, :0], value=inputs.value[:, :0])
    out, lse = attend(inputs, return_residuals=True, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((7, 2, 4, 8)))
    np.testing.assert_array_equal(lse, np.full((7, 2, 4), -np.inf))
    # What is left are the candidates' own tokens; one alone has all of the weight.
    own = own_tokens(SMALL, 1, "bfloat16")
    out = attend(inputs, implementation=implementation, **own)
    expected = jnp.repeat(own["self_value"], 2, axis=1)
    np.testing.assert_array_equal(out, jnp.repeat(expected, 2, axis=2))


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("odd_counts", "bfloat16", 1),
        ("grouped_heads", "float16", 3),
        ("grouped_heads", "float16", 0),
    ],
)
def test_own_tokens_are_within_the_error_rule(name: str, dtype: str, count: int) -> None:
    inputs = problems.make_attention_inputs(SHAPES[name], dtype)
    own = own_tokens(SHAPES[name], count, dtype)
    results = attend(inputs, scale=SCALE, return_residuals=True, **own)
    exact = oracle_attention.numpy_attention_oracle(inputs, scale=SCALE, **own)
    plain, _ = oracle_attention.materialised(*inputs, scale=SCALE)
    without, _ = oracle_attention.numpy_attention_oracle(inputs, scale=SCALE)
    # The user's part is rounded once before it is merged.
    bound = 2 * np.max(np.abs(np.asarray(plain, np.float64) - without))
    bound += 2 * float(jnp.finfo(dtype).eps) * np.max(np.abs(exact[0]))
    np.testing.assert_allclose(np.asarray(results[0], np.float64), exact[0], rtol=0, atol=bound)
    np.testing.assert_allclose(results[1], exact[1], rtol=1e-6, atol=ATOL)


# Gradients.


@pytest.mark.parametrize("name", ["query", "d_out", "d_lse"])
def test_candidates_without_keys_reach_no_gradient(name: str) -> None:
    """Their result is 0, whose logarithm, say, has an infinite or undefined gradient."""
    inputs = problems.make_attention_inputs(SHAPES["unsorted"], "float32")
    users = inputs.key.shape[0]
    lengths = jnp.where(jnp.arange(users) == 2, 0, inputs.key.shape[1]).astype(jnp.int32)
    is_empty = jnp.asarray(inputs.cand_to_user) == 2
    assert 0 < is_empty.sum() < is_empty.size

    def gradients(spoiled: str):
        def spoil(array, of: str):
            mask = is_empty.reshape(-1, *[1] * (array.ndim - 1)) & (of == spoiled)
            return jnp.where(mask, jnp.nan, array)

        def run(*arrays):
            return attend(
                problems.AttentionInputs(*arrays, inputs.cand_to_user, lengths),
                return_residuals=True,
            )

        query = spoil(jnp.asarray(inputs.query), "query")
        out, pull_back = jax.vjp(run, query, jnp.asarray(inputs.key), jnp.asarray(inputs.value))
        return pull_back((spoil(jnp.sin(out[0]), "d_out"), spoil(jnp.ones_like(out[1]), "d_lse")))

    for found, clean in zip(gradients(name), gradients(""), strict=True):
        np.testing.assert_array_equal(found, clean)


@pytest.mark.parametrize(
    ("name", "dtype"), problems.in_turn(["one_user", "users_without_candidates", "grouped_heads"])
)
def test_value_and_gradients_are_within_the_error_rule(name: str, dtype: str) -> None:
    shape = SHAPES[name]
    inputs = problems.make_attention_inputs(shape, dtype)
    rng = np.random.default_rng(1)
    rows = (shape.candidates, shape.q_len, shape.q_heads)
    d_out = problems.random_array(rng, (*rows, shape.head_dim), dtype)
    d_lse = problems.random_array(rng, rows, "float32")

    @jax.jit
    def both(*floats):
        each = []
        for run in (ours, lambda arrays: oracle_attention.materialised(*arrays, scale=SCALE)):
            results, pull_back = jax.vjp(
                lambda *x, run=run: run(problems.AttentionInputs(*x, *inputs[3:])), *floats
            )
            each.append((results, pull_back((d_out, d_lse))))
        return each

    (results, actual), (_, plain) = both(*inputs[:3])
    oracle_attention.assert_attention_within_error_rule(results, inputs, scale=SCALE)
    exact = oracle_attention.numpy_attention_gradients(inputs, d_out, d_lse, scale=SCALE)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, plain)
    if dtype == "float32":
        chex.assert_trees_all_close(actual, jax.tree.map(np.float32, exact), atol=1e-5)
    else:
        jax.tree.map(problems.assert_within_error_rule, actual, exact, plain)


@pytest.mark.parametrize("differentiate", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("users", [32, 2048])
def test_memory_holds_neither_copies_nor_all_scores(users: int, differentiate: bool) -> None:
    """At sizes as they are in earnest: compiled, never run."""
    batch, q_len, kv_len, heads, width = 2048, 64, 4096, 2, 128
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    query, keys = array((batch, q_len, heads, width)), array((users, kv_len, heads, width))
    index, lengths = (jax.ShapeDtypeStruct((rows,), jnp.int32) for rows in (batch, users))

    def bytes_of(run) -> int:
        def total(*arrays):
            return jnp.sum(run(*arrays), dtype=jnp.float32)

        fn = jax.grad(total, (0, 1, 2)) if differentiate else run
        compiled = jax.jit(fn).lower(query, keys, keys, index, lengths).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def op(query, key, value, index, lengths):
        options = {"key_value_seq_lengths": lengths, "implementation": "xla"}
        return ikbo.attention(query, key, value, index, **options)

    def copies(*arrays):
        return oracle_attention.materialised(*arrays, scale=SCALE)[0]

    scores_bytes = 4 * batch * q_len * heads * kv_len
    copies_bytes = 2 * 2 * batch * kv_len * heads * width
    # Sums of the gradients of the users' keys and values are f32.
    of_sums = 2 * 4 * users * kv_len * heads * width if differentiate else 0
    assert bytes_of(op) - of_sums < min(scores_bytes / 4, copies_bytes / 8)
    assert users == batch or bytes_of(copies) > copies_bytes


# Merging.


def test_merging_two_histories_is_attending_to_both() -> None:
    both = problems.make_attention_inputs(SHAPES["unsorted"], "bfloat16")
    key, value = np.asarray(both.key), np.asarray(both.value)
    parts = [
        ours(both._replace(key=key[:, part], value=value[:, part]))
        for part in (slice(0, 10), slice(10, None))
    ]
    out, lse = jax.jit(ikbo.merge_attention)(*parts[0], *parts[1])
    exact_out, exact_lse = oracle_attention.numpy_attention_oracle(both, scale=SCALE)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), exact_out, rtol=0, atol=0.02)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=ATOL)


def test_merging_is_symmetric_and_differentiable() -> None:
    inputs = problems.make_attention_inputs(SMALL, "float32")
    out, lse = ours(inputs)
    other = (jnp.sin(out), jnp.where(lse == -jnp.inf, lse, jnp.cos(lse)))

    def total(*arrays):
        merged, merged_lse = ikbo.merge_attention(*arrays)
        return jnp.sum(merged**2) + jnp.sum(jnp.where(lse == -jnp.inf, 0.0, merged_lse))

    @jax.jit
    def everything(*arrays):
        both = ikbo.merge_attention(*arrays), ikbo.merge_attention(*arrays[2:], *arrays[:2])
        gradients = jax.grad(total, argnums=(0, 1, 2, 3))(*arrays)

        def slopes(direction, steps):
            """Forward, backward and numeric, along one of the arrays."""
            seed = jax.random.normal(jax.random.key(direction), (out.size,), jnp.float32)
            tangents = [
                jnp.where(jnp.isfinite(x), step * seed[: x.size].reshape(x.shape), 0.0)
                for step, x in zip(steps, arrays, strict=True)
            ]
            forward = jax.jvp(total, arrays, tuple(tangents))[1]
            backward = sum(jnp.vdot(*pair) for pair in zip(gradients, tangents, strict=True))
            ahead, behind = (
                total(*(x + sign * 1e-2 * t for x, t in zip(arrays, tangents, strict=True)))
                for sign in (1, -1)
            )
            return forward, backward, (ahead - behind) / 2e-2

        each = jnp.arange(4, dtype=jnp.int32), jnp.eye(4, dtype=jnp.float32)
        return both, jax.vmap(slopes)(*each)

    (one, two), slopes = everything(out, lse, *other)
    chex.assert_trees_all_close(one, two, atol=ATOL)
    forward, backward, numeric = slopes
    np.testing.assert_allclose(forward, backward, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(numeric, forward, rtol=0.02, atol=0.02)
