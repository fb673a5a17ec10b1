"""Soft caps in the kernels on a Hopper GPU: results and gradients, through both ops."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import problems_gdpa
import pytest
from problems_gdpa import Shape

import ikbo_jax as ikbo

pytestmark = pytest.mark.gpu

#: None is 1: the gradient of a softmax of one key is 0, but the kernels' is a rounding of `out`.
LENGTHS = (300, 5, 0, 129, 64, 700)
#: Scores of standard deviation 2 to 3 bend, and some saturate.
LOGIT_CAP = 3.0


def check(run: Callable[..., jax.Array], floats: Any) -> None:
    """Holds results and gradients to the error rule, beside XLA in f32 and in the inputs' dtype."""

    @functools.partial(jax.jit, static_argnums=1)
    def both(floats: Any, implementation: str, d_out: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(run, implementation=implementation), *floats)
        return out, *pull(d_out.astype(out.dtype))

    d_out = problems.random_array(np.random.default_rng(1), floats[0].shape, floats[0].dtype)
    found, again, plain = (both(floats, name, d_out) for name in ("mosaic_gpu",) * 2 + ("xla",))
    exact = both([x.astype(jnp.float32) for x in floats], "xla", d_out)
    for array, repeated, want, rounded in zip(found, again, exact, plain, strict=True):
        problems.assert_within_error_rule(array, want, rounded)
        np.testing.assert_array_equal(array, repeated)


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    ("activation", "approx", "is_causal"),
    [
        ("softmax", None, False),
        ("silu", None, False),
        ("silu", "tanh", True),
        ("gelu", None, True),
        ("relu_squared", None, True),
    ],
)
def test_gdpa_caps(activation, approx, is_causal, head_dim, dtype) -> None:
    arrays = problems_gdpa.make_arrays(Shape(LENGTHS, LENGTHS, 4, 2, head_dim), dtype)
    options: dict[str, Any] = {"activation": activation, "approx": approx, "scale": 0.3}
    options["mask"] = ikbo.masks.causal() if is_causal else None

    def run(*floats: jax.Array, implementation: str) -> jax.Array:
        options.update(implementation=implementation, logit_cap=LOGIT_CAP, output_scale=0.1)
        return ikbo.gdpa(*floats, *arrays[3:5], **options)

    check(run, arrays[:3])


@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        (9, 130, 1, 700, 20, 4, 128, "unsorted", "ragged"),
        (7, 130, 16, 300, 2, 2, 64, "sorted", "ragged"),
        (5, 50, 64, 300, 8, 2, 128, "unsorted"),
        (5, 50, 64, 300, 2, 2, 96),
        (5, 50, 32, 300, 2, 2, 192, "sorted", "ragged"),
        (4, 33, 21, 300, 4, 2, 256, "gaps", "ragged"),
    ],
)
def test_attention_caps(sizes: Any, dtype: Any) -> None:
    *floats, index, lengths = problems.make_attention_inputs(problems.AttentionShape(*sizes), dtype)

    def run(*floats: jax.Array, implementation: str) -> jax.Array:
        options = {"key_value_seq_lengths": lengths, "scale": 0.3, "logit_cap": LOGIT_CAP}
        return ikbo.attention(*floats, index, implementation=implementation, **options)

    check(run, floats)


@pytest.mark.parametrize(("q_len", "q_heads"), [(1, 8), (16, 2), (64, 2)])
def test_nan_of_a_candidate_and_past_a_length_stays_there(q_len: int, q_heads: int) -> None:
    """Neighbouring columns of scores share a reciprocal unless a NaN could reach another row."""
    shape = problems.AttentionShape(5, 40, q_len, 300, q_heads, 2, 64, "sorted")
    query, key, value, index, _ = problems.make_attention_inputs(shape)
    lengths = jnp.asarray([299, 1, 131, 77, 0], jnp.int32)
    d_out = problems.random_array(np.random.default_rng(1), query.shape, query.dtype)

    @jax.jit
    def both(query: Any, key: Any, value: Any) -> Any:
        options = {"cand_to_user": index, "key_value_seq_lengths": lengths, "logit_cap": LOGIT_CAP}
        run = functools.partial(ikbo.attention, implementation="mosaic_gpu", **options)
        out, pull = jax.vjp(run, query, key, value)
        return out, pull(d_out)[0]

    hidden = jnp.arange(300)[None] >= lengths[:, None]
    spoiled = [jnp.where(hidden[..., None, None], jnp.nan, x) for x in (key, value)]
    clean, found = both(query, key, value), both(query.at[7].set(jnp.nan), *spoiled)
    others = np.arange(40) != 7
    # Not bit by bit: tiles with the NaN are computed again.
    for x, y in zip(clean, found, strict=True):
        x, y = (np.asarray(a[others], np.float32) for a in (x, y))
        np.testing.assert_allclose(y, x, rtol=0, atol=2.0**-6 * np.max(np.abs(x)))
