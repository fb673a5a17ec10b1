"""`look_up` and `segment_sum` on the XLA path: results, gradients, vmap, devices, arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems_look_up import assert_sums
from sharded_calls import KINDS, mesh_of, on

import ikbo_jax as ikbo
from ikbo_jax.problems.look_up import (
    LookUpConfig,
    LookUpProblem,
    SegmentSumConfig,
    SegmentSumProblem,
)
from ikbo_jax.problems.problem import ranked
from ikbo_jax.reference import look_up as reference

pytestmark = pytest.mark.usefixtures("on_cpu")

USERS, BATCH = 5, 11


def draw(dtype: str = "float32", shape: tuple[int, ...] = (3, 4), seed: int = 0):
    """User rows, candidates' rows, and an unsorted index, partly out of range."""
    rng = np.random.default_rng(seed)
    user = jnp.asarray(rng.normal(size=(USERS, *shape)), dtype)
    values = jnp.asarray(rng.normal(size=(BATCH, *shape)), dtype)
    return user, values, jnp.asarray(rng.integers(-2, USERS + 2, BATCH), jnp.int32)


def pulled(user: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: ikbo.look_up(x, index), user)[1](values)[0]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_and_gradients(dtype: str, shape: tuple[int, ...]) -> None:
    user, values, index = draw(dtype, shape)
    looked_up = ikbo.look_up(user, index)
    np.testing.assert_array_equal(looked_up, user[jnp.clip(index, 0, USERS - 1)])
    sums = ikbo.segment_sum(values, index, USERS)
    assert sums.dtype == dtype
    unit = float(jnp.finfo(dtype).eps)
    assert_sums(sums, values, index, unit, unit)
    np.testing.assert_array_equal(pulled(user, index, values), sums)
    # The gradient of the gradient is the lookup; and so on.
    _, pull_back = jax.vjp(lambda x: pulled(user, index, x), values)
    np.testing.assert_array_equal(pull_back(user)[0], looked_up)
    _, pull_back = jax.vjp(
        lambda x: jax.vjp(lambda y: pulled(user, index, y), values)[1](x)[0], user
    )
    np.testing.assert_array_equal(pull_back(values)[0], sums)


def test_sums_are_exact_and_rounded_once() -> None:
    """XLA's scatter of 2,000 ones in bf16 gives 256."""
    ones, index = jnp.ones((2000, 2), jnp.bfloat16), jnp.zeros(2000, jnp.int32)
    for users in (1, 3):
        np.testing.assert_array_equal(ikbo.segment_sum(ones, index, users)[0], 2000)


def test_nan_of_a_user_stays_with_the_user() -> None:
    _, values, index = draw()
    index = jnp.clip(index, 0, USERS - 1)
    sums = ikbo.segment_sum(values.at[0].set(jnp.nan), index, USERS)
    assert {int(index[0])} == set(np.flatnonzero(np.isnan(np.asarray(sums)).any((1, 2))))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_of_results_and_gradients(axes: tuple[int | None, int | None]) -> None:
    user, values, index = (jnp.stack(x) for x in zip(draw(), draw(seed=1), strict=True))
    rows_axis, index_axis = axes
    at = index if index_axis == 0 else index[0]

    def one_by_one(fn, rows, *others):
        both = (x if axis == 0 else (x, x) for x, axis in ((rows, rows_axis), (at, index_axis)))
        return jnp.stack([fn(*problem) for problem in zip(*both, *others, strict=True)])

    for fn, rows in (
        (ikbo.look_up, user),
        (lambda rows, at: ikbo.segment_sum(rows, at, USERS), values),
    ):
        rows = rows if rows_axis == 0 else rows[0]
        np.testing.assert_array_equal(jax.vmap(fn, axes)(rows, at), one_by_one(fn, rows))
    rows = user if rows_axis == 0 else user[0]
    found = jax.vmap(pulled, (*axes, 0))(rows, at, values)
    np.testing.assert_array_equal(found, one_by_one(pulled, rows, values))


def test_vmap_of_no_problem_and_empty_arrays() -> None:
    user, values, index = draw()
    assert jax.vmap(ikbo.look_up, (0, None))(user[None][:0], index).shape == (0, BATCH, 3, 4)
    assert ikbo.look_up(user, index[:0]).shape == (0, 3, 4)
    assert ikbo.look_up(user[:0], index[:0]).shape == (0, 3, 4)
    assert ikbo.look_up(user[:, :0], index).shape == (BATCH, 0, 4)
    none = ikbo.segment_sum(values[:0], index[:0], 3)
    np.testing.assert_array_equal(none, jnp.zeros((3, 3, 4)))
    assert ikbo.segment_sum(values[:0], index[:0], 0).shape == (0, 3, 4)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_sums_in_pairs_are_those_of_a_scatter(is_sorted: bool) -> None:
    """The form that XLA runs on a GPU."""
    _, values, index = draw()
    index = jnp.clip(index, 0, USERS - 1)
    index = jnp.sort(index) if is_sorted else index
    order = jnp.argsort(index)
    found = reference._sums_of_runs(values[order], index[order], USERS)
    assert found.shape == (USERS, 3, 4)
    assert_sums(found, values, index, 1e-5, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_devices_of_bfloat16(kind: str) -> None:
    user, values, index = (jnp.tile(x, (8,) + (1,) * (x.ndim - 1)) for x in draw("bfloat16"))
    found = pulled(*on(mesh_of("8", kind), (user, index, values), (P(), P("x"), P("x"))))
    expected = pulled(user, index, values)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, expected)), rtol=2**-7, atol=2**-7
    )


def test_export_with_a_symbolic_batch_and_for_hopper() -> None:
    user, values, index = draw("bfloat16")
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (values, index)]
    summed = jax.jit(lambda values, index: ikbo.segment_sum(values, index, USERS))
    exported = jax.export.export(summed, platforms=["cpu"])(*shapes)
    np.testing.assert_array_equal(exported.call(values, index), summed(values, index))
    found = jax.jit(lambda user, index: pulled(user, index, values))
    exported = jax.export.export(found, platforms=["cuda"])(user, index)
    assert "mosaic_gpu" in exported.mlir_module()


def test_wrong_arguments() -> None:
    user, values, index = draw()
    for call, message in (
        (lambda: ikbo.look_up(user, index.astype(jnp.float32)), "int32"),
        (lambda: ikbo.look_up(user, index[None]), r"must have shape \[B\], but has shape \(1, 11"),
        (lambda: ikbo.look_up(jnp.float32(1), index), r"\[U, \.\.\.\]"),
        (lambda: ikbo.look_up(user.astype(jnp.int32), index), "bfloat16"),
        (lambda: ikbo.look_up(user[:0], index), "user has no rows"),
        (lambda: ikbo.look_up(user, index, implementation="cuda"), "unknown implementation"),
        (lambda: ikbo.look_up(user, index, indices_are_sorted="no"), "indices_are_sorted"),
        (lambda: ikbo.segment_sum(values, index[:3], USERS), "B=11"),
        (lambda: ikbo.segment_sum(values, index, 2.5), "num_users"),
        (lambda: ikbo.segment_sum(values, index, 0), "num_users is 0"),
        (
            lambda: ikbo.segment_sum(values, index, 2**31),
            r"num_users must be below 2\*\*31, but is",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="Hopper"):
        ikbo.look_up(user, index, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="look_up has no forward-mode"):
        jax.jvp(lambda x: ikbo.look_up(x, index), (user,), (user,))


def test_explain_names_the_gradient() -> None:
    user, _, index = draw()
    (plan,) = ikbo.explain(ikbo.look_up, user, index).plans
    assert plan.backward.startswith("segment_sum by XLA")
    assert isinstance(plan.cuda.backward_config, SegmentSumConfig)


def test_every_configuration_of_the_ranking_is_legal() -> None:
    for batch, users, width in ((1, 1, 1), (1024, 15, 384), (65536, 4096, 1000), (9, 10**6, 64)):
        for dtype in ("bfloat16", "float32"):
            for kind in (LookUpProblem, SegmentSumProblem):
                problem = kind(batch, users, width, dtype)
                for config in problem.configs():
                    assert config.illegal_reason(problem) is None
    assert "float64" in str(
        SegmentSumConfig().illegal_reason(SegmentSumProblem(1, 1, 1, "float64"))
    )


def test_lookups_of_many_bytes_stream_and_of_few_are_gathers_of_XLA() -> None:
    for batch, width, config in (
        (1293, 144, LookUpConfig(1)),
        (8192, 384, LookUpConfig(2)),
        (65536, 1024, LookUpConfig(2, streams=True)),
    ):
        assert LookUpProblem(batch, 4096, width, "bfloat16").default_config() == config
    assert ranked(LookUpProblem(128, 9, 8, "bfloat16"))[0].config is None
    assert ranked(LookUpProblem(129, 9, 8, "bfloat16"))[0].config is not None


def test_long_rows_are_listed_by_user_and_many_candidates_not_at_all() -> None:
    """Each CTA that lists reads its part of the index."""
    assert SegmentSumProblem(2974, 100, 18600, "float16").default_config().users == 1
    assert SegmentSumProblem(1007, 784, 36288, "float16").default_config().users == 0
    for batch, users, width in ((9455, 198, 7904), (65536, 4096, 1024), (10**6, 9, 8)):
        problem = SegmentSumProblem(batch, users, width, "bfloat16")
        assert not any(config.users for config in problem.configs())
