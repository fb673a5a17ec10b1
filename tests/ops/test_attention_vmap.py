"""vmap of `attention`: every combination of batched arguments, in XLA and around the kernel."""

import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

SHAPE = problems.AttentionShape(3, 5, 2, 7, 4, 2, 64, "unsorted", "ragged")
SIZE = 2
SCALE = 0.1
FIELDS = problems.AttentionInputs._fields
#: The op tells apart problems with users of their own, with the same users, and all others; of
#: each kind, every pair of values that two flags beside keys and values can have.
COMBINATIONS = [
    *(
        (query, True, True, index, query == index)
        for query in (True, False)
        for index in (True, False)
    ),
    *(
        (query, False, False, index, False)
        for query, index in ((True, True), (True, False), (False, True))
    ),
    (True, True, False, True, True),
    (False, True, False, True, False),
    (True, False, True, False, False),
    (False, False, True, False, True),
    (False, False, False, False, True),
    (True, False, False, True, True),
]
#: With the kernel, of the others two: it is problems in one or in turn that it meets.
AROUND_THE_KERNEL = [*COMBINATIONS[:7], *COMBINATIONS[8:10]]


def name_of(combination: tuple[bool, ...]) -> str:
    return "+".join(name for name, b in zip(FIELDS, combination, strict=True) if b)


def id_of(value: tuple[bool, ...] | bool) -> str:
    return name_of(value) if isinstance(value, tuple) else "kernel" if value else "xla"


def attend(*arrays: Any, **options: Any) -> Any:
    options = {"scale": SCALE, "return_residuals": True, **options}
    return ikbo.attention(*arrays[:4], key_value_seq_lengths=arrays[4], **options)


def stack(each: list[Any], combination: tuple[bool, ...]) -> Any:
    """Inputs of which those in `combination` hold all problems on a leading axis."""
    each = [jax.tree.map(np.asarray, x) for x in each]
    # Clamping must come before rows of several problems are put into one array.
    each[0] = each[0]._replace(cand_to_user=np.asarray([-1, 1, 3, 2, 99], np.int32))
    both = jax.tree.map(lambda *x: np.stack(x), *each)
    pairs = zip(each[0], both, combination, strict=True)
    return type(both)(*(y if b else x for x, y, b in pairs))


def stacked(combination: tuple[bool, ...], dtype: str) -> problems.AttentionInputs:
    each = [problems.make_attention_inputs(SHAPE, dtype, seed) for seed in range(SIZE)]
    return stack(each, combination)


def problem_at(inputs: Any, combination: tuple[bool, ...], i: int) -> Any:
    return type(inputs)(*(x[i] if b else x for x, b in zip(inputs, combination, strict=True)))


def axes_of(combination: tuple[bool, ...]) -> tuple[int | None, ...]:
    return tuple(0 if b else None for b in combination)


def check_gradients(
    loss: Any, arrays: tuple, axes: tuple, each: list[Any], tolerance: float
) -> Any:
    """Compares the gradients of a vmap, and of the sum of its results, with those of each problem.

    Args:
      loss: of floating-point arrays and of integers.
      arrays: both, with the problems on a leading axis where `axes` has a 0.
      axes: of `arrays`, for `jax.vmap`.
      each: the exact gradients of every problem by the floating-point arrays.
      tolerance: absolute and relative.
    """

    def total(*arrays: Any) -> jax.Array:
        return jax.vmap(loss, axes)(*arrays).sum()

    def run(*arrays: Any) -> Any:
        return jax.vmap(jax.grad(loss), axes)(*arrays), jax.grad(total)(*arrays)

    found = jax.jit(run)(*arrays)
    mapped = jax.tree.map(lambda *x: np.stack(x), *each)
    summed = tuple(x if axis == 0 else x.sum(0) for x, axis in zip(mapped, axes[0], strict=True))
    for gradients, expected in zip(found, (mapped, summed), strict=True):
        chex.assert_trees_all_equal_dtypes(tuple(gradients), tuple(arrays[0]))
        gradients, expected = (jax.tree.map(np.float32, tuple(x)) for x in (gradients, expected))
        chex.assert_trees_all_close(gradients, expected, atol=tolerance, rtol=tolerance)


def runs_of(fake_attention) -> list[dict[str, Any]]:
    """The calls that ran: a vmap traces the problem for one as well."""
    return [call for call in fake_attention.calls if "is_sorted" in call]


@pytest.mark.parametrize(
    ("combination", "kernel"),
    [*((c, False) for c in COMBINATIONS), *((c, True) for c in AROUND_THE_KERNEL)],
    ids=id_of,
)
def test_equals_a_loop(request, combination: tuple[bool, ...], kernel: bool) -> None:
    fake = request.getfixturevalue("fake_attention") if kernel else None
    inputs = stacked(combination, "bfloat16" if kernel else "float32")
    results = jax.jit(jax.vmap(attend, axes_of(combination)))(*inputs)
    if kernel:
        assert runs_of(fake), "the kernel was not reached"
        assert all(call["is_sorted"] for call in runs_of(fake))
    for i in range(SIZE):
        problem = problem_at(inputs, combination, i)
        one = jax.tree.map(lambda x, i=i: np.asarray(x)[i], results)
        if kernel:
            oracle_attention.assert_attention_within_error_rule(one, problem, scale=SCALE)
        else:
            exact = oracle_attention.numpy_attention_oracle(problem, scale=SCALE)
            chex.assert_trees_all_close(one, jax.tree.map(np.float32, exact), atol=5e-6)


# Own users, shared users, lengths that alone differ, and values that alone differ.
KINDS = [
    (True, True, True, True, True),
    (True, False, False, True, False),
    (False, False, False, False, True),
    (False, False, True, False, False),
]


def exact_gradients(problem: problems.AttentionInputs) -> tuple[np.ndarray, ...]:
    """NumPy's, of the sum of sin(out) and of cos(lse) where there are keys."""
    out, lse = oracle_attention.numpy_attention_oracle(problem, scale=SCALE)
    d_lse = -np.sin(np.where(lse == -np.inf, 0.0, lse))
    return oracle_attention.numpy_attention_gradients(problem, np.cos(out), d_lse, scale=SCALE)


@pytest.mark.parametrize(
    ("combination", "kernel"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS)],
    ids=id_of,
)
def test_gradient_of_vmap_and_vmap_of_gradient(request, combination, kernel: bool) -> None:
    fake = request.getfixturevalue("fake_attention") if kernel else None
    inputs = stacked(combination, "bfloat16" if kernel else "float32")
    axes = axes_of(combination)

    def loss(arrays, integers):
        out, lse = attend(*arrays, *integers)
        finite = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(finite))

    each = [exact_gradients(problem_at(inputs, combination, i)) for i in range(SIZE)]
    both = (inputs[:3], inputs[3:]), (axes[:3], axes[3:])
    check_gradients(loss, *both, each, 0.03 if kernel else 1e-5)
    # All problems are one launch, whatever they share.
    if fake is not None:
        launched = {call["query"] for call in fake.backward_calls}
        assert (SIZE * SHAPE.candidates, *inputs.query.shape[-3:]) in launched


@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_nested_vmap_other_axes_own_tokens_and_jit(request, kernel: bool) -> None:
    if kernel:
        request.getfixturevalue("fake_attention")
    dtype = "bfloat16" if kernel else "float32"
    each = [
        [problems.make_attention_inputs(SHAPE, dtype, 2 * i + j) for j in range(2)]
        for i in range(3)
    ]
    rows = [jax.tree.map(lambda *x: np.stack(x), *row) for row in each]
    grid = jax.tree.map(lambda *x: np.stack(x), *rows)
    own = problems.random_array(np.random.default_rng(1), (2, 5, 1, 2, 64), dtype)

    def run(query, key, value, index, lengths, own):
        return attend(query, key, value, index, lengths, self_key=own, self_value=own)[0]

    inner = jax.vmap(run, in_axes=(2, 0, 0, 0, 0, 0), out_axes=1)
    outer = jax.jit(jax.vmap(inner, in_axes=(0, 0, 0, 0, 0, None)))
    out = outer(np.moveaxis(grid.query, 1, 3), *grid[1:], own)
    chex.assert_shape(out, (3, 5, 2, 2, 4, 64))
    for i, j in itertools.product(range(3), range(2)):
        exact, _ = oracle_attention.numpy_attention_oracle(
            each[i][j], scale=SCALE, self_key=own[j], self_value=own[j]
        )
        tolerance = 0.03 if kernel else 5e-6
        found = np.asarray(out, np.float64)[i, :, j]
        np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance)


def test_promise_of_a_sorted_index_ends_where_problems_share_their_users(fake_attention) -> None:
    combination = (True, False, False, True, False)
    inputs = stacked(combination, "bfloat16")
    inputs = inputs._replace(cand_to_user=np.sort(inputs.cand_to_user, axis=1))
    run = jax.vmap(lambda *x: attend(*x, indices_are_sorted=True), axes_of(combination))
    results = jax.jit(run)(*inputs)
    (call,) = runs_of(fake_attention)
    assert call["is_sorted"]
    for i in range(SIZE):
        one = jax.tree.map(lambda x, i=i: np.asarray(x)[i], results)
        problem = problem_at(inputs, combination, i)
        oracle_attention.assert_attention_within_error_rule(one, problem, scale=SCALE)


@pytest.mark.parametrize(
    ("combination", "users"),
    [((True, True, True, True, True), SIZE * SHAPE.users), ((True, False, False, True, False), 3)],
    ids=["own_users", "shared_users"],
)
def test_problems_become_one_launch(fake_attention, combination, users: int) -> None:
    inputs = stacked(combination, "bfloat16")
    (plan,) = ikbo.explain(jax.vmap(attend, axes_of(combination)), *inputs).plans
    assert (plan.problem.users, plan.problem.batch) == (users, SIZE * SHAPE.candidates)
    assert plan.implementation == "mosaic_gpu"


@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_no_problems(request, kernel: bool) -> None:
    if kernel:
        request.getfixturevalue("fake_attention")
    inputs = stacked((True,) * 5, "bfloat16")
    out, lse = jax.vmap(attend)(*(x[:0] for x in inputs))
    chex.assert_shape(out, (0, 5, 2, 4, 64))
    chex.assert_shape(lse, (0, 5, 2, 4))
