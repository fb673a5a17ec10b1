"""The kernel of attention's gradient on a Hopper GPU: gradients, determinism, isolation."""

import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import pytest

import ikbo_jax as ikbo
from ikbo_jax.ops import dispatch
from ikbo_jax.pallas.attention_backward.kernel import attention_backward_kernel
from ikbo_jax.problems import AttentionBackwardConfig as Config
from ikbo_jax.problems import AttentionBackwardProblem
from ikbo_jax.problems.attention_backward import HEAD_DIMS, MAX_BOTH_SUMS
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped
from ikbo_jax.tuning import table

pytestmark = pytest.mark.gpu

Shape = problems.AttentionShape
SHAPES = {
    "one_of_each": Shape(1, 1, 1, 1, 1, 1, 64),
    "odd_counts": Shape(4, 13, 64, 300, 2, 2, 128, "sorted", "ragged"),
    "unsorted": Shape(5, 77, 64, 1000, 2, 2, 128, "unsorted", "ragged"),
    "users_without_candidates": Shape(40, 33, 64, 129, 2, 1, 128, "gaps"),
    "short_keys": Shape(8, 100, 64, 128, 2, 2, 128),
    "shorter_keys": Shape(8, 100, 64, 127, 2, 2, 128),
    "long_keys": Shape(2, 6, 64, 5000, 2, 2, 128),
    "one_user": Shape(1, 5000, 1, 1000, 2, 2, 64),
    "as_many_users": Shape(300, 300, 1, 260, 2, 2, 64),
    # Rows of the last tile of queries: one more than whole tiles have, and one less.
    "rows_plus_one": Shape(1, 257, 1, 256, 2, 2, 128),
    "rows_minus_one": Shape(1, 255, 1, 256, 2, 2, 128),
    "t7": Shape(7, 130, 7, 300, 2, 2, 128, "unsorted", "ragged"),
    "t65": Shape(5, 40, 65, 300, 2, 2, 128, "unsorted"),
    "gqa": Shape(5, 50, 64, 300, 8, 2, 128, "unsorted"),
    "mqa": Shape(5, 50, 32, 300, 6, 1, 64, "unsorted"),
    "h96": Shape(5, 50, 64, 300, 2, 2, 96, "unsorted", "ragged"),
    "h192": Shape(5, 50, 64, 300, 2, 2, 192, "unsorted", "ragged"),
    "h256": Shape(4, 33, 21, 300, 4, 2, 256, "gaps", "ragged"),
    # Small: rows are cut into parts of a block or more, which one launch adds.
    "small_h128": Shape(6, 230, 5, 273, 1, 1, 128, "unsorted"),
    "small_h64": Shape(7, 1252, 7, 111, 1, 1, 64, "unsorted", "ragged"),
    "small_h96_gqa": Shape(3, 60, 5, 300, 6, 2, 96, "gaps", "ragged"),
    "small_many_tiles": Shape(1, 410, 1, 1362, 4, 4, 128),
    "small_narrow_blocks": Shape(1, 77, 1, 110, 8, 8, 64),
}
CONFIGS = {
    "parts": Config(),
    "three_stages": Config(48, 3),
    "two_slots": Config(32, 2, 2),
    "few_rows": Config(16, 2, 2),
    "two_launches": Config(64, 3, 1, "launch", 64, 3),
    "two_launches_two_slots": Config(64, 2, 2, "launch", 64, 3),
    "split_queries": Config(32, 3, 1, splits=3),
    "two_launches_odd_block": Config(32, 3, 1, "launch", 48, 4),
    "stored": Config(64, 3, 1, "stored", kv_stages=4),
    "stored_split_queries": Config(32, 3, 2, "stored", splits=3),
    "added_parts": Config(32, 2, 2, "parts", splits=5),
    "added_split_queries": Config(64, 3, 1, "stored", splits=2),
}
#: For heads wider than 128 columns.
WIDE_CONFIGS = {
    "stored_wide": Config(48, 2, 1, "stored", kv_stages=3),
    "stored_wide_split": Config(16, 3, 1, "stored", kv_stages=2, splits=3),
}
EVERY_CONFIG = CONFIGS | WIDE_CONFIGS


def configs_of(shape: Shape) -> dict[str, Config]:
    """The configurations here that take the shape's heads."""
    return WIDE_CONFIGS if shape.head_dim > MAX_BOTH_SUMS else CONFIGS


def problem_of(shape: Shape, dtype: Any) -> AttentionBackwardProblem:
    sizes = (shape.candidates, shape.users, shape.q_len, shape.kv_len)
    heads = (shape.q_heads, shape.kv_heads, shape.head_dim)
    return AttentionBackwardProblem(*sizes, *heads, jnp.dtype(dtype).name)


def make(shape: Shape, dtype: Any = "bfloat16", seed: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """Inputs, and (out, lse, d_out, d_lse) of the XLA path."""
    inputs = problems.make_attention_inputs(shape, dtype, seed)
    out, lse = _forward(inputs, shape.head_dim**-0.5)
    rng = np.random.default_rng(seed + 1)
    d_out = problems.random_array(rng, out.shape, dtype)
    return inputs, (out, lse, d_out, problems.random_array(rng, lse.shape, "float32"))


@functools.partial(jax.jit, static_argnums=1)
def _forward(inputs: Any, scale: float) -> tuple[jax.Array, jax.Array]:
    return attention_grouped.decomposed(*inputs, scale=scale)


def make_gradients(shape: Shape, config: Config, **options: Any) -> Any:
    """A compiled function of inputs and tensors."""
    assert config.illegal_reason(problem_of(shape, "bfloat16")) is None
    options |= {"scale": shape.head_dim**-0.5, "indices_are_sorted": shape.index == "sorted"}
    run = functools.partial(attention_backward_kernel, num_sms=dispatch.num_sms(), **options)
    return jax.jit(lambda inputs, tensors: run(*inputs, *tensors, config=config))


# Compiled whole: operation by operation, a GPU takes half a minute for every new shape.
@functools.partial(jax.jit, static_argnums=2)
def expected_and_plain(inputs: Any, tensors: tuple[Any, ...], scale: float) -> tuple[Any, Any]:
    """The oracle's own VJP in f32, and what XLA makes of the arrays in their dtype."""
    *_, d_out, d_lse = tensors

    def oracle(*operands: jax.Array) -> Any:
        out, lse = reference.materialised(*operands, *inputs[3:], scale=scale)
        return out, jnp.where(lse == -jnp.inf, 0.0, lse)

    wide = tuple(x.astype(jnp.float32) for x in inputs[:3])
    with jax.default_matmul_precision("highest"):
        expected = jax.vjp(oracle, *wide)[1]((d_out.astype(jnp.float32), d_lse))
    return expected, attention_grouped.decomposed_vjp(*inputs, d_out, d_lse, scale=scale)


def check(actual: Any, inputs: Any, tensors: tuple[Any, ...], scale: float) -> None:
    expected, plain = expected_and_plain(inputs, tensors, scale)
    for array, want, rounded in zip(actual, expected, plain, strict=True):
        problems.assert_within_error_rule(array, want, rounded)


def check_shape(shape: Shape, config: Config, dtype: Any = "bfloat16", seed: int = 0) -> None:
    inputs, tensors = make(shape, dtype, seed)
    actual = make_gradients(shape, config)(inputs, tensors)
    assert {x.dtype for x in actual} == {jnp.dtype(dtype)}
    check(actual, inputs, tensors, shape.head_dim**-0.5)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_every_shape(name, dtype):
    shape = SHAPES[name]
    check_shape(shape, table.lookup(problem_of(shape, dtype)).config, dtype)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["odd_counts", "t7", "rows_plus_one", "gqa", "h96"])
def test_gradients_of_every_kind_of_config(name, config):
    check_shape(SHAPES[name], CONFIGS[config])


@pytest.mark.parametrize("config", WIDE_CONFIGS)
@pytest.mark.parametrize("name", ["h192", "h256"])
@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
def test_gradients_of_wide_heads(name, config, dtype):
    check_shape(SHAPES[name], WIDE_CONFIGS[config], dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("config", ["parts", "few_rows", "two_launches", "stored"])
def test_gradients_of_a_last_tile_of_few_rows(config, rows):
    """A copy of statistics that began at the array's last value ended with a CUDA error once."""
    check_shape(Shape(1, 256 + rows, 1, 128, 1, 1, 64), CONFIGS[config])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("candidates", [3, 300])
def test_gradients_of_candidate_configs(head_dim, candidates):
    shape = Shape(3, candidates, 16, 300, 2, 1, head_dim, "unsorted", "ragged")
    inputs, tensors = make(shape)
    for config in problem_of(shape, "bfloat16").configs():
        actual = make_gradients(shape, config)(inputs, tensors)
        check(actual, inputs, tensors, head_dim**-0.5)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *itertools.product(("odd_counts", "h96"), ("parts", "two_launches")),
        ("h192", "stored_wide"),
        ("h256", "stored_wide_split"),
    ],
)
def test_gradients_in_f32(name, config):
    """What devices return that have only some of a user's candidates."""
    shape = SHAPES[name]
    inputs, tensors = make(shape)
    sums = make_gradients(shape, EVERY_CONFIG[config], dtype=jnp.float32)(inputs, tensors)
    rounded = make_gradients(shape, EVERY_CONFIG[config])(inputs, tensors)
    assert [x.dtype for x in sums] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for wide, array in zip(sums, rounded, strict=True):
        assert bool(jnp.array_equal(wide.astype(jnp.bfloat16), array))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (name, config)
        for name in ("odd_counts", "long_keys", "one_user", "h192", "h256")
        for config in configs_of(SHAPES[name])
    ],
)
def test_gradients_repeat_bitwise(name, config):
    shape = SHAPES[name]
    inputs, tensors = make(shape)
    run = make_gradients(shape, EVERY_CONFIG[config])
    first, wrong = run(inputs, tensors), jnp.int32(0)
    for _ in range(50):
        wrong = on_gpu.count_if_different(wrong, run(inputs, tensors), first)
    assert int(wrong) == 0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize(
    ("config", "head_dim"),
    [("parts", 128), ("two_launches", 128), ("stored_wide", 192), ("stored_wide", 256)],
)
def test_bad_values_stay_with_their_user(config, head_dim, bad):
    shape = Shape(3, 9, 21, 300, 2, 1, head_dim, "sorted", "full")
    inputs, tensors = make(shape)
    inputs = inputs._replace(cand_to_user=jnp.asarray([0] * 3 + [1] * 4 + [2] * 2, jnp.int32))
    out, lse = _forward(inputs, shape.head_dim**-0.5)
    tensors = (out, lse, *tensors[2:])
    spoiled = inputs._replace(
        query=inputs.query.at[3:7].set(bad),
        key=inputs.key.at[1].set(bad),
        value=inputs.value.at[1].set(bad),
    )
    run = make_gradients(shape, EVERY_CONFIG[config])
    results = run(spoiled, (out, lse, tensors[2].at[3:7].set(bad), tensors[3]))
    want = run(inputs, tensors)
    for array, clean, others in zip(results, want, ([0, 1, 2, 7, 8], [0, 2], [0, 2]), strict=True):
        at = jnp.asarray(others)
        assert bool(jnp.array_equal(array[at], clean[at]))


@pytest.mark.parametrize("head_dim", [128, 192])
def test_keys_past_the_length_have_no_effect_and_no_gradient(head_dim):
    shape = Shape(3, 9, 21, 300, 2, 1, head_dim, "sorted", "ragged")
    inputs, tensors = make(shape)
    lengths = jnp.asarray([130, 0, 299], jnp.int32)
    inputs = inputs._replace(key_value_seq_lengths=lengths)
    out, lse = _forward(inputs, shape.head_dim**-0.5)
    tensors = (out, lse, *tensors[2:])
    is_past = (jnp.arange(300, dtype=jnp.int32)[None] >= lengths[:, None])[..., None, None]
    spoiled = inputs._replace(
        key=jnp.where(is_past, jnp.bfloat16(jnp.nan), inputs.key),
        value=jnp.where(is_past, jnp.bfloat16(jnp.nan), inputs.value),
    )
    for config in configs_of(shape).values():
        d_query, d_key, d_value = make_gradients(shape, config)(spoiled, tensors)
        check((d_query, d_key, d_value), inputs, tensors, shape.head_dim**-0.5)
        for array in (d_key, d_value):
            assert not bool(jnp.any(jnp.where(is_past, array, 0) != 0))


@pytest.mark.parametrize("part", range(8))
@on_gpu.drawn
@hypothesis.given(
    shape=on_gpu.attention_shapes([1, 16, 32, 64, 128], 200, HEAD_DIMS),
    config=st.integers(0, len(EVERY_CONFIG) - 1),
    dtype=st.sampled_from(problems.HALF_DTYPES),
)
def test_gradients_of_drawn_shapes(part, shape, config, dtype):
    configs = list(configs_of(shape).values())
    check_shape(shape, configs[config % len(configs)], dtype)


@pytest.mark.parametrize("name", ["unsorted", "t7", "gqa"])
def test_the_op_takes_its_gradient_from_the_kernel(name):
    shape = SHAPES[name]
    *arrays, index, lengths = problems.make_attention_inputs(shape)

    def attend(implementation, *arrays):
        options = {"key_value_seq_lengths": lengths, "return_residuals": True}
        return ikbo.attention(*arrays, index, **options, implementation=implementation)

    (plan,) = ikbo.explain(functools.partial(attend, "mosaic_gpu"), *arrays).plans
    assert plan.backward.startswith("mosaic_gpu, ")

    def loss(implementation, *arrays):
        out, lse = attend(implementation, *arrays)
        lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))

    found, want = (
        jax.jit(jax.grad(functools.partial(loss, i), (0, 1, 2)))(*arrays)
        for i in ("mosaic_gpu", "xla")
    )
    # The two forward results differ by a rounding, which sin passes on to the cotangent.
    problems.assert_near(found, want, 0.03)


@on_gpu.soaks
def test_gradients_soak():
    cases = []
    for name in ("odd_counts", "unsorted", "t7", "one_user", "h192", "h256"):
        for config in configs_of(SHAPES[name]).values():
            inputs, tensors = make(SHAPES[name])
            run = make_gradients(SHAPES[name], config)
            cases.append((lambda x, run=run: run(*x), (inputs, tensors), run(inputs, tensors)))
    on_gpu.soak(cases)


SANITIZED = """
import jax, problems, test_gpu_attention_backward as tests
for config in tests.EVERY_CONFIG.values():
    for q_len in (1, 21):
        width = 192 if config in tests.WIDE_CONFIGS.values() else 128
        shape = problems.AttentionShape(3, 9, q_len, 150, 2, 1, width, "unsorted", "ragged")
        inputs, tensors = tests.make(shape)
        wild = inputs.cand_to_user.at[0].set(99).at[1].set(-7)
        run = tests.make_gradients(shape, config)
        jax.block_until_ready(run(inputs._replace(cand_to_user=wild), tensors))
print("FINISHED")
"""
test_gradients_sanitizer = on_gpu.sanitizer_test(SANITIZED)
