"""The attention kernel on a Hopper GPU: numerics, the second try, determinism, isolation."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import pytest
from attention_basics import attend, own_tokens

from ikbo_jax.problems import AttentionConfig, AttentionProblem
from ikbo_jax.problems.attention import HEAD_DIMS, MAX_BLOCK_KV
from ikbo_jax.reference import attention as reference

pytestmark = pytest.mark.gpu

Shape = problems.AttentionShape
DEFAULT = Shape(32, 2048, 64, 1024, 2, 2, 128)
CONFIGS = {
    "default": AttentionConfig(),
    "one_slot": AttentionConfig(k_stages=3, v_stages=3, q_slots=1),
    "shallow": AttentionConfig(k_stages=2, v_stages=2),
    "narrow": AttentionConfig(block_kv=64, k_stages=3, v_stages=4),
    "odd_block": AttentionConfig(block_kv=48, k_stages=3, v_stages=4),
    "early_scores": AttentionConfig(early_scores=True),
    "late_turns": AttentionConfig(late_turns=True),
    "one_user": AttentionConfig(one_user=True),
    "one_user_late": AttentionConfig(one_user=True, early_scores=True, late_turns=True),
    "balance": AttentionConfig(balance=True, early_scores=True, late_turns=True),
}
SHAPES = {
    "one_candidate": Shape(1, 1, 64, 128, 1, 1, 128),
    "one_of_each": Shape(1, 1, 1, 1, 1, 1, 64),
    "odd_counts": Shape(4, 13, 64, 300, 2, 2, 128, "sorted", "ragged"),
    "unsorted": Shape(5, 77, 64, 1000, 2, 2, 128, "unsorted", "ragged"),
    "users_without_candidates": Shape(40, 33, 64, 129, 2, 1, 128, "gaps"),
    "short_keys": Shape(8, 500, 64, 128, 2, 2, 128),
    "shorter_keys": Shape(8, 500, 64, 127, 2, 2, 128),
    "three_blocks": Shape(8, 500, 64, 384, 4, 2, 128, "unsorted"),
    "long_keys": Shape(2, 6, 64, 9000, 2, 2, 128),
    "t1": Shape(7, 300, 1, 700, 2, 2, 128, "unsorted", "ragged"),
    "t10": Shape(7, 130, 10, 300, 2, 2, 128, "unsorted"),
    "t16": Shape(7, 130, 16, 300, 2, 2, 128, "sorted", "ragged"),
    "t63": Shape(5, 40, 63, 300, 2, 2, 128, "unsorted"),
    "t65": Shape(5, 40, 65, 300, 2, 2, 128, "unsorted"),
    "t128": Shape(5, 33, 128, 515, 2, 2, 128, "unsorted", "ragged"),
    "t192": Shape(5, 9, 192, 515, 1, 1, 128, "unsorted"),
    "t256": Shape(5, 9, 256, 515, 1, 1, 128, "unsorted"),
    "gqa": Shape(5, 50, 64, 300, 8, 2, 128, "unsorted"),
    "mqa": Shape(5, 50, 32, 300, 6, 1, 128, "unsorted"),
} | {f"h{h}": Shape(5, 50, 64, 300, 2, 2, h, "unsorted", "ragged") for h in HEAD_DIMS}
run = functools.partial(attend, implementation="mosaic_gpu", return_residuals=True)
# Compiled whole: operation by operation, a GPU takes half a minute for every new shape.
materialised = jax.jit(reference.materialised, static_argnames="scale")


def check(actual, inputs, scale=None, where=..., ranges=None, **own) -> None:
    """Holds out to the error rule against the f32 oracle, and lse to f32 accuracy.

    Plain jnp in the inputs' dtype is the op's XLA path, which rounds the weights like the kernel.
    """
    scale = inputs.query.shape[-1] ** -0.5 if scale is None else scale
    wide = inputs._replace(query=inputs.query.astype(jnp.float32))
    oracle, oracle_lse = materialised(*wide, scale=scale, ranges=ranges, **own)
    plain = attend(inputs, key_value_ranges=ranges, scale=scale, implementation="xla", **own)
    out, lse = actual
    chex.assert_equal_shape([out, oracle])
    problems.assert_within_error_rule(out[where], oracle[where], plain[where])
    np.testing.assert_allclose(lse[where], oracle_lse[where], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].head_dim <= 128])
def test_attention_own_token_in_the_kernel(name, dtype):
    inputs = problems.make_attention_inputs(SHAPES[name], dtype)
    own = own_tokens(SHAPES[name], 1, dtype)
    for config in (AttentionConfig(), AttentionConfig(one_user=True, q_slots=1)):
        check(run(inputs, config=config, **own), inputs, **own)


def check_repeats(inputs: problems.AttentionInputs, times: int, **options) -> None:
    """Checks one result, and that the others are equal to it bit for bit."""
    repeated = functools.partial(run, **options)
    check(on_gpu.assert_repeats(repeated, (inputs,), times - 1), inputs)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_every_shape_and_dtype(name, dtype):
    inputs = problems.make_attention_inputs(SHAPES[name], dtype)
    check(run(inputs), inputs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("q_len", [16, 64])
def test_attention_every_kind_of_config(name, q_len):
    shape = Shape(4, 37, q_len, 300, 2, 2, 128, "unsorted", "ragged")
    inputs = problems.make_attention_inputs(shape)
    check(run(inputs, config=CONFIGS[name]), inputs)


@pytest.mark.parametrize("index", ["sorted", "unsorted"])
@pytest.mark.parametrize("name", [n for n in SHAPES if SHAPES[n].users > 1])
def test_attention_tiles_of_one_user(name, index):
    """The index may be unsorted although it is said to be sorted."""
    shape = SHAPES[name]
    block_kv = MAX_BLOCK_KV[shape.head_dim]
    config = AttentionConfig(block_kv, 2, 3, 1 if shape.head_dim == 256 else 2, one_user=True)
    assert config.illegal_reason(problem_of(shape)) is None
    inputs = problems.make_attention_inputs(shape)
    check_repeats(inputs, 3, config=config, indices_are_sorted=index == "sorted")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_candidate_configs(head_dim):
    shape = Shape(4, 37, 64, 300, 2, 2, head_dim, "unsorted", "ragged")
    inputs = problems.make_attention_inputs(shape)
    for config in problem_of(shape).configs():
        check(run(inputs, config=config), inputs)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
def test_attention_default_request(dtype):
    inputs = problems.make_attention_inputs(DEFAULT, dtype)
    sample = np.random.default_rng(0).choice(DEFAULT.candidates, 40, replace=False)
    out, lse = run(inputs)
    part = inputs._replace(query=inputs.query[sample], cand_to_user=inputs.cand_to_user[sample])
    check((out[sample], lse[sample]), part)


@pytest.mark.parametrize("part", range(8))
@on_gpu.drawn
@hypothesis.given(
    shape=on_gpu.attention_shapes([1, 16, 32, 64, 128, 256], 256, HEAD_DIMS),
    dtype=st.sampled_from(problems.HALF_DTYPES),
)
def test_attention_drawn_shapes(part, shape, dtype):
    inputs = problems.make_attention_inputs(shape, dtype)
    check(run(inputs), inputs)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.7])
def test_attention_scales(scale):
    inputs = problems.make_attention_inputs(SHAPES["odd_counts"])
    check(run(inputs, scale=scale), inputs, scale)


# Where the first maximum does not do: the tile is computed again.


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("config", ["default", "one_slot"])
def test_attention_scores_that_grow_along_the_keys(config, dtype):
    shape = Shape(6, 300, 64, 1000, 2, 2, 128, "unsorted")
    inputs = problems.make_attention_inputs(shape, dtype)
    late = (jnp.arange(shape.kv_len) >= shape.kv_len // 2)[None, :, None, None]
    key = jnp.where(late, inputs.key * 20, inputs.key)
    inputs = inputs._replace(key=key)
    check(run(inputs, config=CONFIGS[config]), inputs)


@pytest.mark.parametrize("q_len", [16, 64])
@pytest.mark.parametrize("config", ["default", "one_slot"])
def test_attention_one_hard_candidate_in_every_position(config, q_len):
    """A candidate whose queries meet one huge late key, anywhere among the tiles of a CTA."""
    shape = Shape(5, 450, q_len, 300, 2, 2, 128, "sorted", "ragged")
    clean = problems.make_attention_inputs(shape)
    key = clean.key.at[:, 299].multiply(8)
    kept = clean._replace(key=key)
    expected = run(kept, config=CONFIGS[config])
    for candidate in (0, 1, 2, 7, 64, 131, 264, 300, 447, 448, 449):
        inputs = kept._replace(query=kept.query.at[candidate].multiply(30))
        out, lse = run(inputs, config=CONFIGS[config])
        one = np.asarray([candidate])
        check(
            (out[one], lse[one]),
            inputs._replace(query=inputs.query[one], cand_to_user=inputs.cand_to_user[one]),
        )
        others = np.arange(shape.candidates) != candidate
        # Neighbours in the same tile may have been computed again, with another maximum.
        chex.assert_trees_all_close(
            out[others].astype(jnp.float32), expected[0][others].astype(jnp.float32), atol=0.02
        )


def test_attention_scores_that_are_all_minus_infinity():
    inputs = problems.make_attention_inputs(Shape(4, 20, 64, 200, 2, 2, 128, "unsorted"))
    key = inputs.key.at[1].set(-jnp.inf)  # of positive queries
    inputs = inputs._replace(query=jnp.abs(inputs.query), key=key)
    out, lse = run(inputs)
    check((out, lse), inputs)
    hit = np.asarray(inputs.cand_to_user == 1)
    assert bool(jnp.all(lse[hit] == -jnp.inf))
    assert not bool(jnp.any(out[hit]))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_attention_bad_values_stay_with_their_user(bad):
    inputs = problems.make_attention_inputs(Shape(5, 64, 64, 200, 2, 2, 128, "unsorted"))
    out, lse = run(inputs._replace(key=inputs.key.at[2, 150].set(bad)))
    hit = np.asarray(inputs.cand_to_user == 2)
    assert not np.any(np.isfinite(np.asarray(out.astype(jnp.float32))[hit]).all(axis=(1, 2, 3)))
    check((out, lse), inputs, where=~hit)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_attention_padding_has_no_effect(bad):
    inputs = problems.make_attention_inputs(Shape(6, 64, 64, 200, 2, 2, 128, "unsorted", "ragged"))
    past = jnp.arange(200)[None] >= inputs.key_value_seq_lengths[:, None]
    fill = jnp.asarray(bad, inputs.key.dtype)
    spoiled = inputs._replace(
        key=jnp.where(past[..., None, None], fill, inputs.key),
        value=jnp.where(past[..., None, None], fill, inputs.value),
    )
    check(run(spoiled), inputs)


def test_attention_index_out_of_range_reads_nothing_outside():
    inputs = problems.make_attention_inputs(Shape(4, 33, 64, 100, 2, 2, 128))
    index = inputs.cand_to_user
    wild = index.at[::3].set(4).at[1::3].set(-1).at[2::9].set(2**31 - 1)
    poison = jax.block_until_ready(jnp.full((1 << 28,), jnp.nan, jnp.float32))
    del poison
    actual = run(inputs._replace(cand_to_user=wild))
    expected = run(inputs._replace(cand_to_user=jnp.clip(wild, 0, 3)))
    assert bool(jnp.all(jnp.isfinite(actual[0])))
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda x: x.astype(jnp.float32), r) for r in (actual, expected)), atol=0.02
    )


def test_attention_order_of_candidates_does_not_matter():
    inputs = problems.make_attention_inputs(Shape(4, 64, 64, 300, 2, 2, 128, "sorted"))
    shuffled = np.random.default_rng(0).permutation(64)
    out, lse = run(inputs)
    moved = inputs._replace(
        query=inputs.query[shuffled], cand_to_user=inputs.cand_to_user[shuffled]
    )
    chex.assert_trees_all_equal(run(moved), (out[shuffled], lse[shuffled]))


def test_attention_a_hundred_repeats_are_bitwise_equal():
    on_gpu.assert_repeats(run, (problems.make_attention_inputs(DEFAULT),), 100)


def test_attention_many_candidates():
    """More tiles a CTA than it has flags, so that several share one."""
    inputs = problems.make_attention_inputs(Shape(50, 100_000, 64, 20, 1, 1, 64, "sorted"))
    inputs = inputs._replace(key=inputs.key.at[7, 10].set(jnp.nan))
    out, lse = run(inputs)
    hit = np.asarray(inputs.cand_to_user == 7)
    sample = np.concatenate([np.flatnonzero(~hit)[::997], np.flatnonzero(~hit)[-3:]])
    part = inputs._replace(query=inputs.query[sample], cand_to_user=inputs.cand_to_user[sample])
    check((out[sample], lse[sample]), part)
    assert bool(jnp.all(jnp.isnan(lse[np.flatnonzero(hit)])))


def test_attention_own_tokens():
    shape = SHAPES["odd_counts"]
    inputs, own = problems.make_attention_inputs(shape), own_tokens(shape, 3, "bfloat16")
    found = run(inputs, **own)
    plain = attend(inputs, return_residuals=True, implementation="xla", **own)
    # The two differ by where the weights are rounded.
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda x: x.astype(jnp.float32), r) for r in (found, plain)), atol=0.02
    )
    # A candidate's own tokens are part of the denominator.
    assert bool(jnp.all(found[1] > run(inputs)[1]))


@on_gpu.soaks
def test_attention_soak():
    """Alternating shapes, both orders of candidates and the second try among them."""
    names = (
        "odd_counts",
        "unsorted",
        "short_keys",
        "three_blocks",
        "t1",
        "t16",
        "t65",
        "t192",
        "h64",
        "h256",
    )
    cases = []
    for name in names:
        compiled = jax.jit(run)
        for seed in (0, 1):
            inputs = problems.make_attention_inputs(SHAPES[name], "bfloat16", seed)
            if name == "unsorted":  # this one goes through the second try as well
                inputs = inputs._replace(key=inputs.key.at[0, -1].multiply(50))
            expected = compiled(inputs)
            check(expected, inputs)
            cases.append((compiled, inputs, expected))
    on_gpu.soak(cases)


SANITIZED = """
import jax, jax.numpy as jnp, problems, ikbo_jax as ikbo
from ikbo_jax.problems import AttentionConfig
for q_len in (16, 64):
    shape = problems.AttentionShape(3, 9, q_len, 150, 2, 1, 128, "unsorted", "ragged")
    inputs = problems.make_attention_inputs(shape, "bfloat16")
    wild = inputs.cand_to_user.at[0].set(99).at[1].set(-7)
    key = inputs.key.at[0, 140].multiply(300)
    for q_slots in (1, 2):
        config = AttentionConfig(block_kv=64, q_slots=q_slots)
        out = ikbo.attention(
            inputs.query, key, inputs.value, wild, config=config, implementation="mosaic_gpu",
            key_value_seq_lengths=inputs.key_value_seq_lengths, return_residuals=True,
        )
        jax.block_until_ready(out)
print("FINISHED")
"""
test_attention_sanitizer = on_gpu.sanitizer_test(SANITIZED)


def problem_of(shape: Shape) -> AttentionProblem:
    sizes = (shape.candidates, shape.users, shape.q_len, shape.kv_len)
    return AttentionProblem(*sizes, shape.q_heads, shape.kv_heads, shape.head_dim, "bfloat16")
