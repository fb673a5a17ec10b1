"""vmap of the op: every combination of batched arguments, on the XLA path and around the kernel."""

from __future__ import annotations

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

SHAPE = problems.LinearCompressionShape(3, 5, 6, 7, 4, 8, "unsorted")
SIZE = 2
FIELDS = problems.LinearCompressionInputs._fields
COMBINATIONS = [c for c in itertools.product([True, False], repeat=5) if any(c)]


def name_of(combination: tuple[bool, ...]) -> str:
    return "+".join(name for name, b in zip(FIELDS, combination, strict=True) if b)


def stacked(combination: tuple[bool, ...], dtype: str) -> problems.LinearCompressionInputs:
    """Inputs of which those in `combination` hold `SIZE` problems on a leading axis."""
    each = [problems.make_inputs(SHAPE, dtype, seed) for seed in range(SIZE)]
    # Clamping must come before rows of several problems are put into one array.
    wild = jnp.asarray([-1, 1, 3, 2, 99], jnp.int32)
    each[0] = each[0]._replace(cand_to_user=wild)
    both = jax.tree.map(lambda *x: jnp.stack(x), *each)
    return problems.LinearCompressionInputs(
        *(y if b else x for x, y, b in zip(each[0], both, combination, strict=True))
    )


def problem_at(inputs, combination: tuple[bool, ...], i: int):
    return type(inputs)(*(x[i] if b else x for x, b in zip(inputs, combination, strict=True)))


def axes_of(combination: tuple[bool, ...]) -> tuple[int | None, ...]:
    return tuple(0 if b else None for b in combination)


def tolerance_of(dtype: str) -> float:
    return 1e-5 if dtype == "float32" else 0.04


@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_equals_a_loop(combination: tuple[bool, ...]) -> None:
    inputs = stacked(combination, "float32")
    out = jax.vmap(ikbo.linear_compression, axes_of(combination))(*inputs)
    for i in range(SIZE):
        expected = ikbo.linear_compression(*problem_at(inputs, combination, i))
        np.testing.assert_allclose(out[i], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_equals_a_loop_around_the_kernel(fake_hopper, combination: tuple[bool, ...]) -> None:
    inputs = stacked(combination, "bfloat16")
    out = jax.vmap(ikbo.linear_compression, axes_of(combination))(*inputs)
    assert fake_hopper.calls, "the kernel was not reached"
    for i in range(SIZE):
        levels = problem_at(inputs, combination, i).levels
        expected = problems.numpy_oracle(*levels)
        np.testing.assert_allclose(np.asarray(out[i], np.float64), expected, rtol=0, atol=0.04)


# Folded, batched by XLA (or a loop) because embeddings are shared, and because weights differ.
KINDS = [
    (False, False, True, True, True),
    (False, False, False, False, True),
    (True, False, True, False, False),
]


@pytest.mark.parametrize("combination", KINDS, ids=name_of)
@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_gradient_of_vmap_and_vmap_of_gradient(request, combination, kernel: bool) -> None:
    if kernel:
        request.getfixturevalue("fake_hopper")
    inputs = stacked(combination, "bfloat16" if kernel else "float32")
    index_axis = axes_of(combination)[4]

    def loss(arrays, index):
        return jnp.sum(jnp.sin(ikbo.linear_compression(*arrays, index).astype(jnp.float32)))

    arrays, axes = inputs[:4], axes_of(combination)[:4]
    vmap_of_gradient = jax.vmap(jax.grad(loss), (axes, index_axis))(arrays, inputs.cand_to_user)
    loop = [
        jax.grad(loss)(problem[:4], problem.cand_to_user)
        for problem in (problem_at(inputs, combination, i) for i in range(SIZE))
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *loop)
    tolerance = 0.1 if kernel else 1e-4
    chex.assert_trees_all_close(vmap_of_gradient, expected, atol=tolerance, rtol=tolerance)

    gradient_of_vmap = jax.grad(
        lambda arrays: jax.vmap(loss, (axes, index_axis))(arrays, inputs.cand_to_user).sum()
    )(arrays)
    summed = tuple(
        x if b else x.astype(jnp.float32).sum(0).astype(x.dtype)
        for x, b in zip(expected, combination, strict=False)
    )
    chex.assert_trees_all_close(gradient_of_vmap, summed, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_nested_vmap_other_axes_and_jit(request, kernel: bool) -> None:
    if kernel:
        request.getfixturevalue("fake_hopper")
    dtype = "bfloat16" if kernel else "float32"
    each = [[problems.make_inputs(SHAPE, dtype, 2 * i + j) for j in range(2)] for i in range(3)]
    w_cand, w_user = each[0][0][:2]

    def run(e_cand, e_user, index):
        return ikbo.linear_compression(w_cand, w_user, e_cand, e_user, index)

    rest = jax.tree.map(
        lambda *x: jnp.stack(x), *[jax.tree.map(lambda *y: jnp.stack(y), *row) for row in each]
    )[2:]
    inner = jax.vmap(run, in_axes=(2, 0, 0), out_axes=1)
    outer = jax.jit(jax.vmap(inner, in_axes=(0, 0, 0)))
    out = outer(jnp.moveaxis(rest[0], 1, 3), *rest[1:])
    chex.assert_shape(out, (3, 5, 2, 6, 8))
    for i, j in itertools.product(range(3), range(2)):
        problem = each[i][j]._replace(w_cand=w_cand, w_user=w_user)
        expected = problems.numpy_oracle(*problem.levels)
        np.testing.assert_allclose(
            np.asarray(out[i, :, j], np.float64), expected, rtol=0, atol=tolerance_of(dtype)
        )


@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
@pytest.mark.parametrize("shared_levels", [0, 1, 2])
def test_multilevel(request, kernel: bool, shared_levels: int) -> None:
    """The coarsest levels are shared by the problems of a vmap; the others are each one's own."""
    if kernel:
        request.getfixturevalue("fake_hopper")
    dtype = "bfloat16" if kernel else "float32"
    each = [problems.make_levels((2, 3, 5), (4, 6, 3), 7, 8, dtype, seed) for seed in range(SIZE)]
    weights = each[0][0]

    def run(embeddings, parents):
        return ikbo.multilevel_linear_compression(
            [ikbo.Term(*level) for level in zip(weights, embeddings, (None, *parents), strict=True)]
        )

    own = [level >= shared_levels for level in range(3)]
    embeddings = tuple(
        jnp.stack([x[1][level] for x in each]) if own[level] else each[0][1][level]
        for level in range(3)
    )
    parents = tuple(
        jnp.stack([x[2][level] for x in each]) if own[level] else each[0][2][level]
        for level in (1, 2)
    )
    axes = axes_of(tuple(own))
    out = jax.vmap(run, in_axes=(axes, axes[1:]))(embeddings, parents)
    for i in range(SIZE):
        one = [x[i] if b else x for x, b in zip(embeddings, own, strict=True)]
        up = [x[i] if b else x for x, b in zip(parents, own[1:], strict=True)]
        expected = problems.numpy_oracle(weights, one, (None, *up))
        np.testing.assert_allclose(
            np.asarray(out[i], np.float64), expected, rtol=0, atol=tolerance_of(dtype)
        )


def test_problems_that_share_weights_become_one_launch(fake_hopper) -> None:
    inputs = stacked((False, False, True, True, True), "bfloat16")
    jax.vmap(ikbo.linear_compression, (None, None, 0, 0, 0))(*inputs)
    plan = ikbo.explain(jax.vmap(ikbo.linear_compression, (None, None, 0, 0, 0)), *inputs).plans[0]
    assert plan.problem.batches == (SIZE * SHAPE.users, SIZE * SHAPE.candidates)
