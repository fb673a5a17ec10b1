"""`look_up` and `segment_sum` on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import pytest

import ikbo_jax as ikbo
from ikbo_jax.pallas.look_up import sums
from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.problems.look_up import LookUpConfig, SegmentSumConfig, SegmentSumProblem

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16", "float32")
#: Half a unit in the last place of a result, relative to it; for f32, of many sums.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
#: Candidates, users, width, and whether the index is sorted; "one": all candidates of one user.
SIZES = [
    (1, 1, 8, ""),
    (300, 7, 40, ""),
    (300, 7, 39, "sorted"),
    *((5000, 4999, 24, order) for order in ("", "sorted")),
    (9000, 3, 2, "sorted"),
    (9000, 400, 768, ""),
    (9000, 400, 96, "one"),
    (40, 30000, 64, ""),
    (70000, 900, 16, ""),
    (20, 3, 100_000, ""),
    (33265, 1128, 48, ""),
]
#: Lists of one user, of several, and of parts of the candidates, which XLA adds up.
LISTINGS = [
    SegmentSumConfig(16, 1, 4, 4, 1),
    SegmentSumConfig(16, 1, 4, 4, 20),
    SegmentSumConfig(8, 1, 4, 2, 64, 16),
]


def make(batch: int, users: int, width: int, order: str, dtype: str):
    rng = np.random.default_rng(batch + width)
    index = rng.integers(-1, users + 1, batch).astype(np.int32)
    if order == "one":
        index = np.where(rng.random(batch) < 0.97, users // 2, index).astype(np.int32)
    if order == "sorted":
        index.sort()
    values = jnp.asarray(rng.normal(size=(batch, width)), dtype)
    expected = np.zeros((users, width))
    magnitude = np.zeros((users, width))
    at, wide = np.clip(index, 0, users - 1), np.asarray(values, np.float64)
    np.add.at(expected, at, wide)
    np.add.at(magnitude, at, np.abs(wide))
    return values, jnp.asarray(index), expected, magnitude


def check(found: jax.Array, expected: np.ndarray, magnitude: np.ndarray) -> None:
    dtype = str(found.dtype)
    bound = ROUNDING[dtype] * np.abs(expected) + 2.0**-20 * magnitude + 2.0**-24
    np.testing.assert_array_less(np.abs(np.asarray(found, np.float64) - expected), bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gpu_sums_of_all_configurations(size: tuple, dtype: str) -> None:
    """The choice, and others of both ways, twice, with the same bits."""
    batch, users, width, order = size
    values, index, *oracle = make(*size, dtype)
    problem = SegmentSumProblem(batch, users, width, dtype, order == "sorted")
    fixed = SegmentSumConfig(8, 4, 8, 4), SegmentSumConfig(2, 2)
    listings = [x for x in LISTINGS if x.illegal_reason(problem) is None]
    for config in {problem.default_config(), *fixed, *listings}:
        kernel = functools.partial(
            segment_sum_kernel, users=users, config=config, is_sorted=problem.is_sorted
        )
        check(on_gpu.assert_repeats(jax.jit(kernel), (values, index), 1), *oracle)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_shares_of_a_long_user(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided candidates, as those of 32 MB and more, twice, with the same bits."""
    monkeypatch.setattr(sums, "STREAMED_BYTES", 0)
    values, index, *oracle = make(9000, 400, 96, "one", dtype)
    compiled = jax.jit(
        functools.partial(segment_sum_kernel, users=400, config=SegmentSumConfig(8, 4))
    )
    check(on_gpu.assert_repeats(compiled, (values, index), 1), *oracle)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 6, 8, 1000, 100_000])
def test_gpu_lookups_are_those_of_xla(width: int, dtype: str) -> None:
    user, index, *_ = make(37, 30, width, "", dtype)
    index = jnp.tile(index, 11) - 5
    found = jax.jit(ikbo.look_up)(user, index)
    expected = user[jnp.clip(index, 0, 36)]
    np.testing.assert_array_equal(found, expected)
    if width * user.dtype.itemsize % 4 == 0:
        for config in map(LookUpConfig, (1, 3, 8), (False, True, False)):
            found = look_up_kernel(user, index, config=config)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_each_is_the_gradient_of_the_other(dtype: str) -> None:
    """Three times, folded by `vmap`, and with trailing axes."""
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(2, 500, 3, 7)), dtype)
    user = jnp.asarray(rng.normal(size=(2, 20, 3, 7)), dtype)
    index = jnp.asarray(rng.integers(-1, 21, (2, 500)), jnp.int32)

    def summed(values: jax.Array, index: jax.Array) -> jax.Array:
        return ikbo.segment_sum(values, index, 20)

    def pulled(user: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: ikbo.look_up(x, index), user)[1](values)[0]

    found = jax.jit(jax.vmap(summed))(values, index)
    for i in range(2):
        expected = np.zeros((20, 3, 7))
        np.add.at(expected, np.clip(index[i], 0, 19), np.asarray(values[i], np.float64))
        np.testing.assert_allclose(np.asarray(found[i], np.float64), expected, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(jax.jit(jax.vmap(pulled))(user, index, values), found)

    def twice(values: jax.Array, index: jax.Array, user: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: pulled(user, index, x), values)[1](user)[0]

    looked_up = jax.jit(jax.vmap(ikbo.look_up))(user, index)
    np.testing.assert_array_equal(jax.jit(jax.vmap(twice))(values, index, user), looked_up)


def test_gpu_one_user_is_summed_by_xla_and_ones_are_counted() -> None:
    ones = jnp.ones((3000, 8), jnp.bfloat16)
    index = jnp.zeros(3000, jnp.int32)
    assert "one user" in ikbo.explain(ikbo.segment_sum, ones, index, 1).plans[0].reason
    for users in (1, 2):
        found = ikbo.segment_sum(ones, index, users)
        np.testing.assert_array_equal(np.asarray(found[0], np.float32), 3008)  # 3000, rounded once


SCRIPT = """
import functools

import jax
import test_gpu_look_up as suite
from ikbo_jax.pallas.look_up import sums
from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.problems.look_up import LookUpConfig, SegmentSumConfig

shared, listed = SegmentSumConfig(3, 2, 2), SegmentSumConfig(2, 1, 2, users=1)
in_parts = SegmentSumConfig(2, 1, 2, 2, users=4, parts=3)
sums.STREAMED_BYTES = 40_000
for size, dtype, config in (
    ((300, 37, 48, ""), "float32", shared),
    ((1900, 2, 8, "sorted"), "bfloat16", shared),
    ((1900, 2, 16, "sorted"), "bfloat16", shared),
    ((120, 50, 50, "sorted"), "float16", SegmentSumConfig(3, 1, 2, 4)),
    ((20, 300, 16, "sorted"), "bfloat16", shared),
    ((150, 9, 20, ""), "bfloat16", listed),
    ((900, 9, 20, ""), "bfloat16", in_parts),
):
    values, index, *oracle = suite.make(*size, dtype)
    options = {"users": size[1], "config": config, "is_sorted": size[3] == "sorted"}
    suite.check(jax.jit(functools.partial(segment_sum_kernel, **options))(values, index), *oracle)
    look_up_kernel(values, index, config=LookUpConfig(streams=True)).block_until_ready()
print("FINISHED")
"""
test_gpu_sanitized = on_gpu.sanitizer_test(SCRIPT)


@on_gpu.soaks
def test_gpu_soak() -> None:
    """Launches of mixed sizes in random order give the bits of their first launch."""
    cases = []
    for size, dtype in (
        ((1024, 15, 384, ""), "bfloat16"),
        ((5000, 4999, 24, "sorted"), "float32"),
        ((9000, 400, 96, "one"), "float16"),
        ((40, 3000, 64, ""), "bfloat16"),
        ((16384, 512, 48, ""), "bfloat16"),
        ((4096, 1024, 64, ""), "float16"),
    ):
        values, index, *_ = make(*size, dtype)
        options = {"num_users": size[1], "indices_are_sorted": size[3] == "sorted"}
        summed = jax.jit(lambda x, options=options: ikbo.segment_sum(*x, **options))
        cases.append((summed, (values, index), summed((values, index))))
    on_gpu.soak(cases)
