"""The oracle against NumPy, and the XLA path and its gradient against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from ikbo_jax.reference import linear_compression as reference

SHAPES = problems.LINEAR_COMPRESSION_SHAPES
MULTILEVEL = {
    "one_level": ((5,), (12,)),
    "two_levels": ((3, 7), (12, 9)),
    "four_levels": ((2, 3, 5, 11), (6, 1, 12, 9)),
    "level_coarser_than_needed": ((7, 2, 5), (4, 5, 6)),
}


materialised = jax.jit(reference.materialised)
decomposed = jax.jit(reference.decomposed)


def test_materialised_follows_parents_through_levels() -> None:
    each = {
        name: problems.make_levels(*sizes, m=10, n=6, dtype="float32")
        for name, sizes in MULTILEVEL.items()
    }
    outs = jax.jit(lambda each: {n: reference.materialised(*x) for n, x in each.items()})(each)
    for name, levels in each.items():
        expected = problems.numpy_oracle(*levels)
        np.testing.assert_allclose(outs[name], expected, rtol=0, atol=1e-5, err_msg=name)


def test_materialised_accumulates_in_f32_and_rounds_once() -> None:
    inputs = problems.make_inputs(SHAPES["tile_plus_one"], "float16")
    out = materialised(*inputs.levels)
    assert out.dtype == jnp.float16
    exact = problems.numpy_oracle(*inputs.levels)
    # Half a unit in the last place of each value, and a little for f32 sums.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-11, atol=1e-5)


def test_aligned_k_changes_no_value() -> None:
    levels = problems.make_inputs(SHAPES["tile_plus_one"], "float32").levels
    expected = problems.numpy_oracle(*levels)
    for align_k, k in ((8, 136), (64, 192)):
        aligned = jax.jit(functools.partial(reference.materialised, align_k=align_k))
        jaxpr = jax.make_jaxpr(aligned.__wrapped__)(*levels)
        (product,) = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general")
        assert {var.aval.shape for var in product.invars} & {(225, k)}
        np.testing.assert_allclose(aligned(*levels), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", [materialised, decomposed])
def test_indices_are_clamped_not_wrapped(function) -> None:
    inputs = problems.make_inputs(SHAPES["odd_counts"], "float32")
    wild = np.array([-1, 4, 2**31 - 1, -(2**31), *range(9)], np.int32)
    tame = np.clip(wild, 0, 3)
    out = function(*inputs._replace(cand_to_user=jnp.asarray(wild)).levels)
    expected = function(*inputs._replace(cand_to_user=jnp.asarray(tame)).levels)
    np.testing.assert_array_equal(out, expected)


def test_decomposed_sums_in_f32() -> None:
    # Parts that cancel: what is left of 256 + 2^-4 - 256 survives only in f32.
    weights = (jnp.full((1, 1), 256.0, jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16))
    e_cand = jnp.asarray([[[-256.0], [2.0**-4]]], jnp.bfloat16)
    levels = (weights, (jnp.ones((1, 1, 1), jnp.bfloat16), e_cand), (None, jnp.zeros(1, jnp.int32)))
    assert decomposed(*levels).item() == 2.0**-4
