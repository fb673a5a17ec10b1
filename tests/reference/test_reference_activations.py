"""Activations and their derivatives against f64; approximations against their documented bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import problems_gdpa
import pytest

from ikbo_jax.reference import activations

NAMES = [name for name in activations.ACTIVATIONS if name != activations.SOFTMAX]
#: Without the kinks, where a difference quotient is not a derivative.
GRID = np.concatenate(
    [np.linspace(-12, 12, 9601) + 1e-3 / 3, [-1e3, -50.0, -3.5, 3.5, 50.0, 1e3]]
).astype(np.float32)
PAIRS = [(approx, name) for approx, names in activations.APPROXIMATIONS.items() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_value_and_slope_are_those_of_the_definition(name: str) -> None:
    x = GRID.astype(np.float64)
    activation = activations.elementwise(name, None)
    exact = problems_gdpa.numpy_activation(name, x)
    np.testing.assert_allclose(activation.value(jnp.asarray(GRID)), exact, rtol=2e-6, atol=1e-6)
    slope = activation.slope(jnp.asarray(GRID))
    assert slope.dtype == jnp.float32
    np.testing.assert_allclose(slope, problems_gdpa.numpy_slope(name, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_kinks_are_those_of_jax_nn(name: str) -> None:
    """Where there are two derivatives, the one on the side of 0 or the one that jax.nn has."""
    slope = activations.elementwise(name, None).slope(jnp.zeros(1, jnp.float32))
    expected = {"identity": 1, "relu": 0, "leaky_relu": 1, "relu_squared": 0}.get(name, 0.5)
    np.testing.assert_array_equal(slope, expected)


@pytest.mark.parametrize(("approx", "name"), [*((None, name) for name in NAMES), *PAIRS])
def test_nothing_becomes_of_nothing_and_large_scores_are_finite(approx, name) -> None:
    """A score of 0 stands for a key that is not there."""
    x = jnp.asarray([0, -1e15, -1e6, 1e6, 1e15], jnp.float32)
    value, slope = (np.asarray(function(x)) for function in activations.elementwise(name, approx))
    assert value[0] == 0
    assert np.all(np.isfinite([value, slope]))


@pytest.mark.parametrize(("approx", "name"), [*((None, name) for name in NAMES), *PAIRS])
def test_derivative_of_the_value_is_the_slope(approx: str | None, name: str) -> None:
    """At kinks and for huge scores, too: second derivatives use both."""
    x = jnp.asarray([-1e30, -3.7, -3, -1, 0, 1e-30, 1, 3, 3.7, 1e18], jnp.float32)
    activation = activations.elementwise(name, approx)
    slopes = activation.slope(x)
    np.testing.assert_array_equal(jax.vmap(jax.grad(activation.value))(x), slopes)
    curvature = jax.vmap(jax.grad(activation.slope))(x)
    assert np.all(np.isfinite(curvature))
    if name in ("relu", "relu_squared"):
        assert curvature[4] == 0, "jax.nn.relu has none at 0"


#: What the documentation says: of the value, and of the derivative.
BOUNDS = {
    ("tanh_bf16", "gelu_tanh"): (lambda x: x / 2**6, lambda x: (1 + 2 * x + x**3 / 4) / 2**12),
    ("tanh_bf16", "silu"): (lambda x: x / 2**6, lambda x: (1 + x) / 2**12),
    ("tanh", "gelu_tanh"): (lambda x: x / 2**12, lambda x: (1 + 2 * x + x**3 / 4) / 2**12),
    ("tanh", "silu"): (lambda x: x / 2**12, lambda x: (1 + x) / 2**12),
    ("polynomial", "gelu"): (lambda x: 5.0e-4 + 0 * x, lambda x: 5.4e-3 + 0 * x),
}


@pytest.mark.parametrize(("approx", "name"), PAIRS)
def test_approximation_is_within_its_bounds(approx: str, name: str) -> None:
    of_value, of_slope = BOUNDS[approx, name]
    x = GRID[np.abs(GRID) <= 12].astype(np.float64)
    activation = activations.elementwise(name, approx)
    value, slope = (np.asarray(f(jnp.asarray(x, jnp.float32))) for f in activation)
    errors = np.abs(value - problems_gdpa.numpy_activation(name, x))
    assert np.all(errors <= of_value(np.abs(x)) + 1e-6)
    assert np.all(np.abs(slope - problems_gdpa.numpy_slope(name, x)) <= of_slope(np.abs(x)) + 1e-5)
    if approx == "polynomial":
        assert np.max(errors) > 4.8e-4, "the bound is not the largest error"


def test_polynomials_slope_is_that_of_the_polynomial_and_exact_outside_its_domain() -> None:
    # x · (1/2 + x · p(x²)), whose coefficients are those of every other power from x².
    powers = np.zeros(2 * len(activations.POLYNOMIAL) + 1)
    powers[1], powers[2::2] = 0.5, activations.POLYNOMIAL
    exact = np.polynomial.Polynomial(powers).deriv()
    activation = activations.elementwise("gelu", "polynomial")
    x = GRID[np.abs(GRID) < activations.POLYNOMIAL_DOMAIN]
    np.testing.assert_allclose(activation.slope(jnp.asarray(x)), exact(x), rtol=0, atol=2e-5)
    x = jnp.asarray([-1e30, -1e4, -3.71, 3.71, 1e4, 1e30], jnp.float32)
    np.testing.assert_array_equal(activation.value(x), jnp.maximum(x, 0))
    np.testing.assert_array_equal(activation.slope(x), x > 0)


def test_other_activations_stay_exact() -> None:
    assert activations.elementwise("relu", "tanh") is activations.elementwise("relu", None)
    assert activations.elementwise("gelu", "polynomial") is not activations.elementwise(
        "gelu", None
    )
