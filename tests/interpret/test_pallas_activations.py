"""The kernels' activations, as they run under interpretation, against the reference's and f64.

The tables of a GPU's own instructions (exp2, reciprocal, tanh) are the GPU suites' to test.
"""

import functools
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import problems_gdpa
import pytest

from ikbo_jax.pallas.activations import cap as caps
from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.activations import values as kernel
from ikbo_jax.pallas.activations import weights as gdpa_weights
from ikbo_jax.pallas.gdpa_backward import softmax
from ikbo_jax.reference import activations as reference
from ikbo_jax.reference.gdpa import Settings

NAMES = [name for name in reference.ACTIVATIONS if name != reference.SOFTMAX]
PAIRS = [
    *((None, name) for name in NAMES),
    *((approx, name) for approx, names in reference.APPROXIMATIONS.items() for name in names),
]
GRID = np.linspace(-16, 16, 64 * 512, dtype=np.float32).reshape(64, -1)
LARGE = np.float32([-1e30, -1e15, -1e4, -60, -43, -42, -8, -7.5, 8, 9, 60, 1e4, 1e15, 1e30])
KINKS = np.float32([-3.7, -3, -0.0, 0.0, 3, 3.7])
#: All of them and what is no number at once, since every shape takes its own programs.
POINTS = np.concatenate([GRID.ravel(), np.float32([np.nan, np.inf])])
AT_GRID, AT_NAN = slice(GRID.size), slice(GRID.size, None)


@functools.cache
def activate(name: str, approx: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Value and slope at `POINTS`; that the value alone is the same is part of the test."""
    arguments = ((name,), approx, jnp.int32(0), jnp.asarray(POINTS))
    value, slope = kernel.activate_with_slope(*arguments)
    np.testing.assert_array_equal(kernel.activate(*arguments), value)
    assert value.dtype == slope.dtype == jnp.float32
    return np.asarray(value), np.asarray(slope)


@pytest.mark.parametrize("name", NAMES)
def test_value_is_exact_to_the_rounding_of_f32(name: str) -> None:
    exact = problems_gdpa.numpy_activation(name, POINTS[AT_GRID].astype(np.float64))
    np.testing.assert_allclose(activate(name, None)[0][AT_GRID], exact, rtol=6e-7, atol=3e-7)


@pytest.mark.parametrize(("approx", "name"), PAIRS)
def test_nan_stays_and_infinity_is_no_finite_value(approx: str | None, name: str) -> None:
    value, slope = (x[AT_NAN] for x in activate(name, approx))
    assert np.isnan(value[0])
    assert not np.isfinite(value[1])
    is_constant = name == "identity" or name.endswith("relu")
    assert np.isnan(slope[0]) or is_constant


# Weights of raw scores.

#: XLA's tanh on CPUs is one rounding off -1 at scores near -64: 64 * 2**-24 is 3.8e-6.
ATOL = 4e-6


def test_pairs_of_scores_become_weights_only_where_they_can() -> None:
    def is_packed(names: tuple[str, ...], scale: float = 0.3, has_f32_range: bool = True) -> bool:
        return gdpa_weights.ActivationSpec(names, "tanh_bf16", scale, 1.0, has_f32_range).is_packed

    assert is_packed(("silu", "silu"))
    assert not is_packed(("silu", "gelu_tanh"))
    assert not is_packed(("gelu",))
    assert not is_packed(("silu",), scale=-0.3)
    assert not is_packed(("silu",), has_f32_range=False)


def test_narrow_weights_are_activated_scores() -> None:
    spec = gdpa_weights.ActivationSpec(("silu",), None, 0.125, 1.0, has_f32_range=False)
    weights = gdpa_weights.compute_weights(spec, jnp.int32(0), jnp.float32([[4e5]]))
    np.testing.assert_allclose(weights, 5e4, rtol=1e-6)


# Slopes of raw scores.


@pytest.mark.parametrize(
    ("scale", "has_f32_range", "logit_cap"),
    [
        *((0.3, True, None), (4.0, True, None), (0.3, False, None), (-0.3, True, None)),
        *((2.0**-12, True, None), (0.3, True, 2.0), (0.3, False, 2.0), (0.3, True, 5e3)),
    ],
)
def test_weights_and_slopes_times_their_factors_are_activated_scores_and_gradients(
    scale: float, has_f32_range: bool, logit_cap: float | None
) -> None:
    scores = np.concatenate([GRID[:, ::32].ravel(), LARGE, KINKS[2:4] if logit_cap else KINKS])
    argument, slope, bounds = jnp.float32(scale) * scores, 1.0, (2e-6, ATOL, 3e-6, 2e-5)
    if logit_cap is not None:
        inner = np.tanh(scores.astype(np.float64) * scale / logit_cap)
        argument, slope = np.float32(logit_cap * inner), 1 - inner**2
        bounds = 2e-5, 2e-5, 1e-4, 1e-4
    rtol, atol, slope_rtol, slope_atol = bounds
    d_weights = np.linspace(-2, 2, scores.size, dtype=np.float32)
    head, arrays = jnp.int32(0), (jnp.asarray(scores), jnp.asarray(d_weights))
    for approx, name in PAIRS:
        settings = Settings((name,), approx, scale, logit_cap=logit_cap)
        dtype = jnp.dtype("bfloat16" if has_f32_range else "float16")
        spec = gdpa_weights.ActivationSpec.of(settings, dtype)
        expected = reference.elementwise(name, approx)
        value = expected.value(argument)
        # The result of products with ones.
        weights = gdpa_weights.compute_weights(spec, head, arrays[0])
        weights = gdpa_weights.round_weights(weights, jnp.float32).astype(jnp.float32)
        alone = np.asarray(gdpa_weights.scale_result(spec, head, weights))
        close = functools.partial(np.testing.assert_allclose, err_msg=f"{name} {approx}")
        if spec.is_packed and logit_cap is None:
            assert np.all(np.abs(alone - value) <= 2.0**-6 * np.abs(scale * scores)), name
        else:
            packed_atol = 2.0**-6 * np.max(np.abs(argument)) * spec.is_packed
            close(alone, value, rtol=rtol, atol=atol + packed_atol)
        # As sums over one row make them.
        weights, found_slope = gdpa_slopes.weights_and_slopes(spec, head, arrays[0])
        by_weight, by_slope = gdpa_slopes.constants(spec)
        close(np.asarray(weights) * by_weight, value, rtol=rtol, atol=atol)
        d_scores = np.asarray(gdpa_slopes.d_scores(spec, arrays[1], found_slope)) * by_slope
        wanted = d_weights * expected.slope(argument) * slope
        close(d_scores, wanted, rtol=slope_rtol, atol=slope_atol)


def test_softmax_s_weights_are_at_most_1_where_lse_is_rounded_down() -> None:
    spec = gdpa_weights.ActivationSpec(("softmax",), None, 1.0, 1.0, has_f32_range=True)
    shape = types.SimpleNamespace(activation=spec)
    ctx: Any = types.SimpleNamespace(shape=shape)
    lse, scores = jnp.float32([8, 8]), jnp.float32([[6.0, 5.0], [4.0, 3.0]])
    found, _ = softmax.weights_and_slopes(ctx, (lse, lse), scores, 0, 0)
    expected = np.minimum(np.exp(scores) / 2.0**8, 1)
    assert np.count_nonzero(expected == 1) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# Caps.


@pytest.mark.parametrize(("scale", "logit_cap"), [(0.3, 30.0), (-4.0, 0.5), (1e-3, 1e4)])
def test_capped_scores_have_the_relative_error_that_the_module_states(scale, logit_cap) -> None:
    """Also near 0, where 1 - 2 / (exp(2x) + 1) alone would have none but absolute accuracy."""
    small = np.geomspace(1e-30, 100, 64 * 64, dtype=np.float32)
    scores = np.concatenate([GRID.ravel(), LARGE, small, -small])
    back, cap = caps.scale_and_cap(scale, logit_cap, caps.Method.SMALL_EXACT)
    found = np.asarray(caps.capped(cap, jnp.asarray(scores)))
    exact = np.tanh(scores.astype(np.float64) * scale / logit_cap)
    assert back == logit_cap
    assert np.all(np.abs(found - exact) <= 2.0**-18 * np.abs(exact) + 1e-37)


@pytest.mark.parametrize("logit_cap", [1.0, 30.0, 256.0, 1e5])
def test_a_softmax_s_capped_scores_keep_its_weights_below_their_rounding(logit_cap: float) -> None:
    scale, cap = caps.scale_and_cap(0.3, logit_cap)
    assert cap is not None
    assert (cap.method is caps.Method.EXACT) == (logit_cap <= caps.MAX_EXACT_CAP)
    small = np.geomspace(1e-6, 1e5, 64 * 64, dtype=np.float32)
    scores = np.concatenate([GRID.ravel(), small, -small])
    found = np.asarray(caps.capped(cap, jnp.asarray(scores))).astype(np.float64)
    exact = np.tanh(scores.astype(np.float64) * 0.3 / logit_cap)
    # Large caps have large scores: those lose as much by their own rounding to f32.
    bound = np.maximum(2.0**-13, 2.0**-18 * np.abs(scale * exact))
    assert np.all(np.abs(np.expm1(scale * (found - exact))) <= bound)


def test_caps_take_any_number() -> None:
    scores = jnp.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3.0, 1e20])
    for scale, logit_cap in ((1.0, 30.0), (1e30, 1e-30), (1.0, 1e30)):
        _, cap = caps.scale_and_cap(scale, logit_cap)
        found = np.asarray(caps.capped(cap, scores))
        np.testing.assert_array_equal(found[:2], 0)
        assert not np.any(np.isfinite(found[2:5]))
        np.testing.assert_allclose(found[6], np.tanh(1e20 * scale / logit_cap), rtol=1e-5)
        np.testing.assert_allclose(found[5], np.tanh(3 * scale / logit_cap), rtol=1e-5)
    assert caps.scale_and_cap(0.3, None) == (0.3, None)
