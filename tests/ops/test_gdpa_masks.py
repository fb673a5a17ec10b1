"""`gdpa` with masks: values and gradients of every dtype, transformations, plans, refusals."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import problems_gdpa
import problems_masks
import pytest
from problems_gdpa import Shape, value_and_gradients
from problems_masks import attend

import ikbo_jax as ikbo
from ikbo_jax import masks
from ikbo_jax.ops import gdpa_mask
from ikbo_jax.reference.gdpa import Arrays, materialised

SELF = Shape((6, 0, 9, 3), (6, 0, 9, 3), 2, 1, before=1, after=2)
INDEXED = Shape((3, 5, 2), (6, 9), q_to_kv=(1, 0, 1))
POOLED = Shape(3, (6, 2))
ACTIVATIONS = ("silu", "softmax")
ATOL = 1e-5


def assert_exact(found: tuple, arrays: Arrays, case: problems_masks.Case, d_out: Any) -> None:
    exact = problems_gdpa.exactly(arrays, settings_of(arrays), d_out, case.rule)
    chex.assert_trees_all_close(found, jax.tree.map(np.float32, exact), atol=ATOL)


settings_of = functools.partial(problems_gdpa.settings_of, activations=ACTIVATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in problems_masks.cases(SELF)), ("groups", "float16")],
)
def test_half_precision_is_within_the_error_rule(name: str, dtype: str) -> None:
    arrays, case = problems_gdpa.make_arrays(SELF, dtype), problems_masks.cases(SELF)[name]
    settings = settings_of(arrays)
    d_out = problems_gdpa.cotangent(arrays, settings)
    ours = functools.partial(attend, mask=case.mask, activation=ACTIVATIONS)

    def theirs(arrays: Arrays) -> jax.Array:
        masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
        return materialised(masked, settings)

    found, other = jax.jit(lambda x: [value_and_gradients(f, x, d_out) for f in (ours, theirs)])(
        arrays
    )
    exact = problems_gdpa.exactly(arrays, settings, d_out, case.rule)
    jax.tree.map(problems.assert_within_error_rule, found, exact, other)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SELF, INDEXED, POOLED], ids=["self", "indexed", "pooled"])
def test_vmap_over_the_arrays_of_a_mask(shape: Shape) -> None:
    arrays = problems_gdpa.make_arrays(shape, "float32")
    batch = len(shape.q_to_kv or shape.kv_lens)
    targets = [tuple((n + i) % 3 for i in range(batch)) for n in range(3)]
    mask = masks.hstu(np.asarray(targets, np.int32), contextual=1, window=3)
    d_out = problems_gdpa.cotangent(arrays, settings_of(arrays))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def run(arrays: Arrays, mask: masks.Mask) -> tuple:
        ours = functools.partial(attend, mask=mask, activation=ACTIVATIONS)
        return value_and_gradients(ours, arrays, d_out)

    found = run(arrays, mask)
    for n, each in enumerate(targets):
        case = problems_masks.hstu_case(each, 1, window=3)
        assert_exact(jax.tree.map(lambda x, n=n: x[n], found), arrays, case, d_out)


@pytest.mark.slow
def test_vmap_over_arrays_shares_a_mask() -> None:
    each = [problems_gdpa.make_arrays(SELF, "float32", seed) for seed in range(2)]
    arrays = jax.tree.map(lambda *x: jnp.stack(x), *each)
    case = problems_masks.cases(SELF)["two_intervals"]
    d_out = problems_gdpa.cotangent(each[0], settings_of(each[0]))
    ours = functools.partial(attend, mask=case.mask, activation=ACTIVATIONS)
    run = jax.vmap(lambda x: value_and_gradients(ours, x, d_out))
    found = jax.jit(run)(arrays)
    (plan,) = ikbo.explain(jax.vmap(ours), arrays).plans
    assert plan.problem.batch >= 2 * 4
    for n, one in enumerate(each):
        assert_exact(jax.tree.map(lambda x, n=n: x[n], found), one, case, d_out)


def test_other_targets_retrace_nothing_and_other_numbers_do() -> None:
    arrays = problems_gdpa.make_arrays(SELF, "float32")
    traces = []

    @jax.jit
    def run(arrays: Arrays, mask: masks.Mask) -> jax.Array:
        traces.append(mask)
        return attend(arrays, mask, activation="silu")

    first = run(arrays, masks.hstu(np.asarray([1, 0, 2, 1], np.int32)))
    second = run(arrays, masks.hstu(np.asarray([3, 0, 1, 2], np.int32)))
    assert len(traces) == 1
    assert np.any(np.asarray(first) != np.asarray(second))
    run(arrays, masks.hstu(np.asarray([3, 0, 1, 2], np.int32), window=2))
    assert len(traces) == 2


def test_materialised_scores_are_masked_alike() -> None:
    """Sizes as they are in earnest, and blocks as the op chooses them."""
    lengths = (700, 1, 330)
    shape = Shape(lengths, lengths, 1, 1, 16)
    arrays = problems_gdpa.make_arrays(shape, "float32")
    case = problems_masks.hstu_case((40, 0, 330), 3, window=100, full_tail=20)
    settings = problems_gdpa.make_settings(shape, "silu", scale=0.3)
    found = jax.jit(functools.partial(attend, activation="silu"))(arrays, case.mask)
    masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
    exact = jax.jit(materialised, static_argnums=1)(masked, settings)
    np.testing.assert_allclose(found, exact, atol=1e-4, rtol=1e-5)


def test_a_row_that_sees_nothing_is_zero() -> None:
    arrays = problems_gdpa.make_arrays(SELF._replace(before=0, after=0), "float32")
    nothing = np.zeros((18, 1), np.int32)
    mask = masks.intervals(nothing + 2, nothing + 2)
    ours = functools.partial(attend, mask=mask, activation=ACTIVATIONS)
    d_out = jnp.ones((18, 2, 8), jnp.float32)
    for x in jax.tree.leaves(jax.jit(lambda x: value_and_gradients(ours, x, d_out))(arrays)):
        np.testing.assert_array_equal(x, 0)


def test_explain_says_why_no_kernel_runs() -> None:
    shape = SELF._replace(head_dim=64)
    arrays = problems_gdpa.make_arrays(shape)
    mask = masks.hstu(np.zeros(4, np.int32), contextual=2, window=16)
    (plan,) = ikbo.explain(functools.partial(attend, mask=mask), arrays).plans
    assert plan.sizes.endswith("mask=causal+contextual+targets+window=16 bfloat16")
    assert plan.cuda.implementation == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match="need a Hopper GPU"):
        attend(arrays, mask, implementation="mosaic_gpu")
    run = functools.partial(attend, mask=mask, activation="softmax")
    (plan,) = ikbo.explain(run, arrays).plans
    assert plan.cuda.implementation == "mosaic_gpu"
    (plan,) = ikbo.explain(functools.partial(run, activation=ACTIVATIONS), arrays).plans
    assert "softmax in all heads or in none" in plan.cuda.reason


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.causal(-1), "window must be an integer of at least 0, but is -1"),
        (lambda: masks.causal(1.5), "window must be an integer of at least 0, known while tracing"),
        (lambda: masks.hstu(full_tail=-2), "full_tail must be an integer of at least 0, but is -2"),
        (lambda: masks.hstu(target_group_size=0), "at least 1, but is 0"),
        (lambda: masks.hstu(contextual=-3), "contextual must be an integer of at least 0"),
        (lambda: masks.hstu(contextual=np.zeros(2, int)), "contextual must be an int32 array"),
        (lambda: masks.hstu(np.zeros(2, np.float32)), "num_targets must be an int32 array"),
        (lambda: masks.hstu([1, 2]), "num_targets must be an int32 array"),
        (lambda: masks.hstu(causal=1), "causal must be a bool, but is 1"),
        (
            lambda: masks.intervals(of_shape(3, 1), of_shape(3, 2)),
            "(3, 1) but end has shape (3, 2)",
        ),
        (lambda: masks.intervals(of_shape(3, 3), of_shape(3, 3)), "[total_q, 1 or 2]"),
        # Of another call.
        (lambda: masks.hstu(of_shape(3)), "num_targets of shape (3,) but the queries have batch=4"),
        (
            lambda: masks.hstu(contextual=of_shape(5)),
            "contextual of shape (5,) but the queries have batch=4",
        ),
        (
            lambda: masks.intervals(of_shape(20, 1), of_shape(20, 1)),
            "(20, 1) but the result has 21 rows",
        ),
        (lambda: np.ones((21, 21), bool), "mask must be made by ikbo_jax.masks.causal, hstu or in"),
    ],
)
def test_bad_masks_are_refused(make: Any, message: str) -> None:
    arrays = problems_gdpa.make_arrays(SELF, "float32")
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(arrays, make())


def of_shape(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
