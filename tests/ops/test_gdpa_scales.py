"""`gdpa` with an output scale for every sequence, and with a cap of its scores."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import problems_gdpa
import pytest
from problems_gdpa import Shape

import ikbo_jax as ikbo
from ikbo_jax.problems import GdpaConfig
from ikbo_jax.reference.gdpa import Arrays, Settings

SHAPES = {
    "self": Shape((6, 0, 9, 3), (6, 0, 9, 3), 2, 1, before=1, after=2),
    "indexed": Shape((3, 5, 2), (6, 9), q_to_kv=(1, 0, 1)),
    "pooled": Shape(3, (6, 2)),
}
ACTIVATIONS = ("silu", "softmax")
ATOL = 1e-5


def scales_of(shape: Shape) -> np.ndarray:
    batch = len(shape.q_to_kv or shape.kv_lens)
    return np.random.default_rng(7).normal(size=batch).astype(np.float32)


def attend(arrays: Arrays, scales: Any, **options: Any) -> jax.Array:
    options = {"activation": ACTIVATIONS, **options}
    return problems_gdpa.attend(arrays, output_scale=scales, **options)


def value_and_gradients(arrays: Arrays, scales: Any, d_out: Any, **options: Any) -> tuple:
    def run(scales: Any, *floats: Any) -> jax.Array:
        return attend(Arrays(*floats, *arrays[3:]), scales, **options)

    out, pull_back = jax.vjp(run, scales, *arrays[:3])
    return out, pull_back(d_out)


def exactly(arrays: Arrays, settings: Settings, scales: np.ndarray, d_out: Any) -> tuple:
    """Out, and gradients of the scales, query, key and value, in f64."""
    plain = problems_gdpa.numpy_oracle(arrays, settings)
    factor, d_scales = np.zeros((len(plain), 1, 1)), np.zeros(len(scales))
    d_out = np.asarray(d_out).astype(np.float64)
    for number, found in enumerate(problems_gdpa.sequences(arrays, settings)):
        factor[found[2]] = scales[number]
        d_scales[number] = np.sum(plain[found[2]] * d_out[found[2]])
    gradients = problems_gdpa.numpy_gradients(arrays, settings, factor * d_out)
    return factor * plain, (d_scales, *gradients)


def problem(name: str, dtype: str = "float32", cap: float | None = None) -> tuple:
    shape = SHAPES[name]
    arrays = problems_gdpa.make_arrays(shape, dtype)
    settings = problems_gdpa.make_settings(shape, ACTIVATIONS, output_scale=1.0, logit_cap=cap)
    d_out = np.array(problems_gdpa.cotangent(arrays, settings))
    if name == "self":
        d_out[0] = d_out[-2:] = np.nan  # rows outside all sequences
    exact = exactly(arrays, settings, scales_of(shape), d_out)
    return arrays, scales_of(shape), d_out, exact


@pytest.mark.parametrize(("name", "cap"), [("self", 0.6), ("indexed", 3e38), ("pooled", 0.6)])
def test_values_and_gradients_are_numpys(name: str, cap: float | None) -> None:
    arrays, scales, d_out, exact = problem(name, cap=cap)
    run = jax.jit(functools.partial(value_and_gradients, logit_cap=cap))
    found = run(arrays, scales, d_out)
    chex.assert_trees_all_close(found, jax.tree.map(np.float32, exact), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 0.6])
def test_half_precision_is_within_the_error_rule(cap: float | None) -> None:
    arrays, scales, d_out, exact = problem("pooled", "bfloat16", cap)

    def plain(arrays: Arrays) -> jax.Array:
        """Both sequences, of three rows each, by their own scales."""
        settings = problems_gdpa.settings_of(arrays, ACTIVATIONS, logit_cap=cap)
        each = [settings._replace(output_scale=float(scale)) for scale in scales]
        first, second = (problems_gdpa.materialised(arrays, x) for x in each)
        return jnp.concatenate([first[:3], second[3:]])

    @jax.jit
    def both(arrays: Arrays, scales: Any, d_out: Any) -> tuple:
        theirs = problems_gdpa.value_and_gradients(plain, arrays, d_out)
        return value_and_gradients(arrays, scales, d_out, logit_cap=cap), theirs

    # The scales' gradients are sums of the rounded result.
    (*ours, (d_scales, *gradients)), (*theirs, others) = both(arrays, scales, d_out)
    np.testing.assert_allclose(d_scales, exact[1][0], rtol=2**-8, atol=2**-8)
    trees = (ours, gradients), (exact[:1], exact[1][1:]), (theirs, others)
    jax.tree.map(problems.assert_within_error_rule, *([list(a), list(b)] for a, b in trees))


def test_vmap_over_scales_and_no_forward_mode() -> None:
    arrays, scales, _, exact = problem("indexed")
    found = jax.jit(jax.vmap(attend, (None, 0)))(arrays, np.stack([scales, 2 * scales]))
    chex.assert_trees_all_close(found, np.float32([exact[0], 2 * exact[0]]), atol=ATOL)
    with pytest.raises(NotImplementedError, match="^gdpa has no forward-mode derivative"):
        jax.jvp(functools.partial(attend, arrays), (scales,), (scales,))


def test_explain_says_which_kernels_take_a_cap() -> None:
    for head_dim, activation in ((64, "silu"), (128, "softmax"), (128, "silu")):
        arrays = problems_gdpa.make_arrays(SHAPES["self"]._replace(head_dim=head_dim))
        run = functools.partial(attend, scales=1.0, activation=activation, logit_cap=30.0)
        (plan,) = ikbo.explain(run, arrays).plans
        assert plan.sizes.endswith("logit_cap bfloat16")
        assert isinstance(plan.cuda.config, GdpaConfig)
        spills = head_dim == 128 and activation == "silu"
        assert (plan.cuda.backward_config is None) == spills
        assert ("with a logit_cap at H=128" in plan.cuda.backward) == spills
