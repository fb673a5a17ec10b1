"""The oracle against NumPy; the XLA path and its gradient against the oracle."""

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
from attention_basics import ATOL, SCALE
from jax.experimental import checkify

from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_blocks
from ikbo_jax.reference import attention_grouped as grouped

pytestmark = pytest.mark.slow

SHAPES = problems.ATTENTION_SHAPES
#: Many steps of every kind, of tiny sizes.
SMALL_BLOCKS = attention_blocks.Blocking(group=2, groups=3, keys=7)

decomposed = jax.jit(grouped.decomposed, static_argnames=("scale", "blocks"))
materialised = jax.jit(reference.materialised, static_argnames="scale")


@jax.jit
def each_path(*inputs: jax.Array) -> tuple[tuple, tuple]:
    """Out and lse of the oracle, and those of the XLA path."""
    return reference.materialised(*inputs, scale=SCALE), grouped.decomposed(*inputs, scale=SCALE)


@functools.partial(jax.jit, static_argnames="blocks")
def results_and_gradients(inputs, cotangents, blocks) -> tuple[tuple, tuple]:
    results = grouped.decomposed(*inputs, scale=SCALE, blocks=blocks)
    pull = functools.partial(grouped.decomposed_vjp, scale=SCALE, blocks=blocks)
    return results, pull(*inputs, *cotangents)


def f32_inputs(name: str, seed: int = 0) -> problems.AttentionInputs:
    return problems.make_attention_inputs(SHAPES[name], "float32", seed)


def cotangents(shape: problems.AttentionShape, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    rows = (shape.candidates, shape.q_len, shape.q_heads)
    return (
        problems.random_array(rng, (*rows, shape.head_dim), dtype),
        problems.random_array(rng, rows, "float32"),
    )


def test_materialised_rounds_once() -> None:
    inputs = problems.make_attention_inputs(SHAPES["grouped_heads"], "float16")
    out, _ = materialised(*inputs, scale=SCALE)
    assert out.dtype == jnp.float16
    exact, _ = oracle_attention.numpy_attention_oracle(inputs, scale=SCALE)
    # Half a unit in the last place of each value, and a little for f32 sums.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-11, atol=1e-6)


#: Every branch of shapes, several in one where they do not meet in the code: one query and one key
#: in one_wide, one user in one_candidate, one key head and no order in a_user_each, more users than
#: candidates in users_without_candidates. Tiles are the kernel's: here, tile_plus_one has several
#: times as many steps.
IN_STEPS = (
    "one_candidate",
    "a_user_each",
    "odd_counts",
    "users_without_candidates",
    "one_wide",
    "tile_plus_one",
    "grouped_heads",
)


@pytest.mark.parametrize(("name", "dtype"), problems.in_turn(IN_STEPS))
def test_many_steps_are_within_the_error_rule_and_the_oracle_is_numpys(name, dtype) -> None:
    """The op's tests have the default blocks."""
    inputs = problems.make_attention_inputs(SHAPES[name], dtype)
    blocks = SMALL_BLOCKS._replace(keys=min(SMALL_BLOCKS.keys, SHAPES[name].kv_len))

    @jax.jit
    def both(*inputs: jax.Array) -> tuple[tuple, tuple]:
        exact = (*(x.astype(jnp.float32) for x in inputs[:3]), *inputs[3:])
        found = grouped.decomposed(*inputs, scale=SCALE, blocks=blocks)
        return found, reference.materialised(*exact, scale=SCALE)

    actual, oracle = both(*inputs)
    exact = oracle_attention.numpy_attention_oracle(inputs, scale=SCALE)
    oracle_attention.assert_attention_within_error_rule(actual, inputs, scale=SCALE, exact=exact)
    for found, exactly in zip(oracle, exact, strict=True):
        np.testing.assert_allclose(found, exactly, rtol=0, atol=ATOL)


def test_indices_and_lengths_are_clamped_not_wrapped() -> None:
    inputs = f32_inputs("odd_counts")
    wild = np.array([-1, 4, 2**31 - 1, -(2**31), *range(9)], np.int32)
    lengths = np.array([99, 2**31 - 1, -1, -(2**31)], np.int32)
    results = each_path(*inputs[:3], wild, lengths)
    tame = np.clip(wild, 0, 3), np.clip(lengths, 0, 37)
    chex.assert_trees_all_equal(results, each_path(*inputs[:3], *tame))


def test_what_lies_past_the_length_has_no_effect() -> None:
    inputs = f32_inputs("odd_counts")
    lengths = np.asarray([37, 5, 30, 0], np.int32)
    mask = (np.arange(37)[None] >= lengths[:, None])[:, :, None, None]
    clean = each_path(*inputs[:4], lengths)
    for poison in (np.nan, np.inf, -np.inf):
        key, value = (np.where(mask, np.float32(poison), array) for array in inputs[1:3])
        results = each_path(inputs.query, key, value, inputs.cand_to_user, lengths)
        chex.assert_trees_all_equal(results, clean)


def test_scores_that_grow_along_s_do_not_overflow() -> None:
    """Every chunk's maximum dwarfs that of the one before, beyond the range of exp in f32."""
    inputs = f32_inputs("grouped_heads")
    growth = np.linspace(1, 400, 40, dtype=np.float32)[None, :, None, None]
    key, value = np.asarray(inputs.key) * growth, np.asarray(inputs.value)
    inputs = inputs._replace(key=key, value=value, key_value_seq_lengths=None)
    for ordered in (inputs, inputs._replace(key=key[:, ::-1], value=value[:, ::-1])):
        out, lse = decomposed(*ordered, scale=SCALE, blocks=SMALL_BLOCKS)
        exact_out, exact_lse = oracle_attention.numpy_attention_oracle(ordered, scale=SCALE)
        assert np.max(exact_lse) > 200
        np.testing.assert_allclose(out, exact_out, rtol=0, atol=5e-4)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


def test_row_of_minus_infinities_is_a_row_without_keys() -> None:
    inputs = f32_inputs("odd_counts")
    query, key = np.abs(np.asarray(inputs.query)), -np.abs(np.asarray(inputs.key))
    query[2] = np.inf
    for out, lse in each_path(query, key, *inputs[2:4], np.full(4, 37, np.int32)):
        assert np.all(np.asarray(lse[2]) == -np.inf)
        assert np.all(np.asarray(out[2]) == 0)
        assert np.all(np.isfinite(np.delete(np.asarray(lse), 2, axis=0)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["key", "value", "query"])
def test_poison_reaches_its_user_alone(array: str, poison: float) -> None:
    inputs = f32_inputs("unsorted")
    row = 2
    bad = np.array(getattr(inputs, array))
    bad[row, 1] = poison
    run = functools.partial(results_and_gradients, blocks=SMALL_BLOCKS)
    d_results = cotangents(SHAPES["unsorted"], "float32")
    (out, _), gradients = run(inputs._replace(**{array: bad}), d_results)
    (clean, _), clean_gradients = run(inputs, d_results)
    hit = np.asarray(inputs.cand_to_user) == row if array != "query" else np.arange(17) == row
    assert 0 < hit.sum() < 17
    assert not np.all(np.isfinite(np.asarray(out)[hit]), axis=(1, 2, 3)).any()
    np.testing.assert_array_equal(np.asarray(out)[~hit], np.asarray(clean)[~hit])

    users = np.arange(5) == (row if array != "query" else np.asarray(inputs.cand_to_user)[row])
    kept = (~hit, ~users, ~users)
    for actual, expected, rows in zip(gradients, clean_gradients, kept, strict=True):
        np.testing.assert_array_equal(np.asarray(actual)[rows], np.asarray(expected)[rows])


@pytest.mark.parametrize("name", ["odd_counts", "users_without_candidates", "grouped_heads"])
def test_gradient_in_small_blocks_is_numpys(name: str) -> None:
    """And without the cotangent of lse. The op's tests have the default blocks and all dtypes."""
    inputs = f32_inputs(name)
    d_out, d_lse = cotangents(SHAPES[name], "float32")
    for of_lse, blocks in ((d_lse, SMALL_BLOCKS), (None, None)):
        _, actual = results_and_gradients(inputs, (d_out, of_lse), blocks)
        exact = oracle_attention.numpy_attention_gradients(
            inputs, d_out, 0 * d_lse if of_lse is None else of_lse, scale=SCALE
        )
        chex.assert_trees_all_close(actual, jax.tree.map(np.float32, exact), atol=1e-5)


def test_merging_with_nothing() -> None:
    rng = np.random.default_rng(0)
    out, lse = (problems.random_array(rng, s, "float32") for s in ((17, 2, 2, 16), (17, 2, 2)))
    nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)

    @jax.jit
    def run(*arrays: jax.Array) -> tuple[tuple, tuple, tuple, tuple]:
        merge = reference.merge_attention
        gradient = jax.grad(lambda *x: merge(*x)[0].sum(), argnums=(0, 1, 2, 3))
        one, other = arrays[:2], arrays[2:]
        return merge(*one, *other), merge(*other, *one), merge(*other, *other), gradient(*arrays)

    *each, of_nothing, gradients = run(out, lse, *nothing)
    for merged in each:
        chex.assert_trees_all_close(merged, (out, lse), atol=ATOL)
    chex.assert_trees_all_equal(of_nothing, (np.zeros_like(out), nothing[1]))
    assert all(np.all(np.isfinite(np.asarray(g))) for g in gradients)
    chex.assert_trees_all_equal(gradients[2:], jax.tree.map(np.zeros_like, nothing))


def test_own_tokens_alone_are_attended_to_in_f32() -> None:
    rng = np.random.default_rng(0)
    query = problems.random_array(rng, (5, 3, 4, 8), "bfloat16")
    own = [problems.random_array(rng, (5, 6, 2, 8), "bfloat16") for _ in range(2)]
    out, lse = jax.jit(functools.partial(reference.self_attention, scale=SCALE))(query, *own)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    # Each candidate as a user of its own.
    users = np.arange(5, dtype=np.int32)
    inputs = problems.AttentionInputs(query, *own, users)
    oracle_attention.assert_attention_within_error_rule(
        (out.astype(jnp.bfloat16), lse), inputs, scale=SCALE
    )


@hypothesis.given(
    batch=st.integers(1, 100_000),
    users=st.integers(1, 100_000),
    q_len=st.integers(1, 256),
    kv_len=st.integers(1, 100_000),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (64, 1)]),
    head_dim=st.sampled_from([1, 64, 128, 256]),
    on_cpu=st.booleans(),
)
def test_blocking_bounds_every_step(
    batch, users, q_len, kv_len, heads, head_dim, on_cpu: bool
) -> None:
    most = attention_blocks.CPU_SCORES if on_cpu else attention_blocks.MAX_SCORES
    q_heads, kv_heads = heads
    sizes = batch, users, q_len, kv_len, *heads, head_dim
    group, groups, keys = attention_blocks.blocking(*sizes, on_cpu=on_cpu)
    assert 1 <= group <= batch
    assert groups >= 1
    assert 1 <= keys <= kv_len
    if groups > 1:
        assert groups * group * q_len * q_heads * keys <= most
        assert groups * keys * kv_heads * head_dim <= attention_blocks.MAX_KEY_ELEMENTS
    needed = min(batch, users) + (batch - min(batch, users)) // group
    assert needed * group <= 2 * batch


def test_checkify_finds_no_index_outside() -> None:
    """Checks of indices are for the caller's own program: no group's empty place is a find."""
    rng = np.random.default_rng(0)
    query, key = (
        rng.normal(size=shape).astype(np.float32) for shape in ((5, 3, 2, 8), (3, 7, 2, 8))
    )
    index = jnp.asarray([0, 2, 0, 1, 0], jnp.int32)

    def both(query, key):
        out, lse = grouped.decomposed(query, key, key, index, None, scale=1.0)
        return grouped.decomposed_vjp(query, key, key, index, None, out, lse, scale=1.0)

    error, _ = checkify.checkify(both, errors=checkify.index_checks)(query, key)
    assert error.get() is None
