"""The backward kernels of GDPA on a Hopper GPU: gradients, determinism, isolation."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import problems
import problems_gdpa
import pytest
import test_gpu_gdpa
from problems_gdpa import Shape

from ikbo_jax.ops import dispatch, gdpa
from ikbo_jax.ops import gdpa_backward as op
from ikbo_jax.pallas.worklist import works
from ikbo_jax.problems import GdpaBackwardConfig, gdpa_backward
from ikbo_jax.problems.gdpa_backward import HEAD_DIMS
from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference import gdpa_chunked_vjp
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = pytest.mark.gpu

ELEMENTWISE = tuple(name for name in problems_gdpa.ACTIVATIONS if name != "softmax")
#: One activation of each of the kernels' two ways to slopes.
KINDS = ("gelu_tanh", "softmax")
SHAPES = {
    "self": Shape((300, 1, 129, 64), (300, 1, 129, 64), 2, 2, 128),
    "empty_and_padded": Shape((0, 70, 0, 1, 0), (40, 0, 0, 1, 333), 2, 2, 128, before=2, after=205),
    "one_row": Shape((1,), (1,), 1, 1, 64),
    "dense": Shape((256,) * 8, (256,) * 8, 4, 4, 128),
    "grouped_heads": Shape((60, 211), (200, 3), 6, 2, 64),
    "one_key_head": Shape((60, 211), (200, 3), 3, 1, 128),
    "pffn": Shape((1000, 250), (256, 128), 2, 2, 128),
    "indexed": Shape((30, 180, 0, 50, 2), (90, 140, 0, 60), 2, 1, 128, (3, 0, 0, 3, 2), after=3),
    "unserved_requests": Shape((40,), (300, 9, 100), 2, 2, 64, (1,)),
    "pma": Shape(32, (190, 0, 1, 1333), 2, 2, 128, after=2),
    "pma_indexed": Shape(130, (70, 120), 4, 2, 64, (1, 1, 0, 1, 1)),
}


def make_gradients(arrays: Arrays, settings: Settings, **options):
    """A compiled function of arrays and cotangent."""
    problem = gdpa._OP.problem(gdpa._Call(None, settings), arrays)
    assert gdpa_backward.illegal_reason(problem) is None
    run = functools.partial(op.kernel_vjp, settings=settings, num_sms=dispatch.num_sms(), **options)

    def both(arrays: Arrays, d_out: jax.Array) -> tuple:
        out, lse = problems_gdpa.residuals(arrays, settings)
        return run(arrays, d_out=d_out, out=out, lse=lse)

    return jax.jit(both)


def gradients(arrays: Arrays, settings: Settings, d_out: jax.Array, **options) -> tuple:
    return make_gradients(arrays, settings, **options)(arrays, d_out)


# Compiled whole: operation by operation, a GPU takes half a minute for every new shape.
@functools.partial(jax.jit, static_argnums=1)
def expected_and_plain(arrays: Arrays, settings: Settings, d_out: jax.Array) -> tuple:
    def oracle(*operands: jax.Array) -> jax.Array:
        wide = Arrays(*operands, *arrays[3:])
        return reference.materialised(wide, settings._replace(approx=None))

    wide = tuple(x.astype(jnp.float32) for x in arrays[:3])
    expected = jax.vjp(oracle, *wide)[1](d_out.astype(jnp.float32))
    plain = gdpa_chunked_vjp.chunked_vjp(arrays, settings, d_out)
    return expected, plain


def check(actual: tuple, arrays: Arrays, settings: Settings, d_out: jax.Array) -> None:
    """Holds every gradient to the error rule, against the oracle's own VJP in f32."""

    expected, plain = expected_and_plain(arrays, settings, d_out)
    if "softmax" in settings.activations:
        # The kernel has the rows' means from the rounded result. Of weights of 0 and 1, such as of
        # a single key, XLA's gradient is exact.
        dtype = arrays.query.dtype
        found = problems_gdpa.numpy_gradients(arrays, settings, d_out, dtype=dtype)
        both = [(x, jnp.asarray(y, dtype)) for x, y in zip(plain, found, strict=True)]
        errors = [
            [jnp.max(jnp.abs(x.astype(jnp.float32) - jnp.nan_to_num(want))) for x in pair]
            for pair, want in zip(both, expected, strict=True)
        ]
        plain = [pair[int(e[1] > e[0])] for pair, e in zip(both, errors, strict=True)]
    for array, want, rounded in zip(actual, expected, plain, strict=True):
        assert array.dtype == arrays.query.dtype
        # The oracle multiplies NaN of rows of no sequence by zero.
        problems.assert_within_error_rule(array, jnp.where(jnp.isnan(want), 0, want), rounded)


def make(
    shape: Shape, activation: Any, dtype: str = "bfloat16", seed: int = 0, **options: Any
) -> tuple[Arrays, Settings, jax.Array]:
    """Makes arrays, settings and the cotangent of the result."""
    arrays, settings = test_gpu_gdpa.make(shape, activation, dtype, seed, **options)
    return arrays, settings, problems_gdpa.cotangent(arrays, settings)


def check_shape(shape: Shape, activation="gelu_tanh", dtype="bfloat16", seed=0, **options) -> None:
    check_arrays(*make(shape, activation, dtype, seed)[:2], **options)


def check_arrays(arrays: Arrays, settings: Settings, **options) -> None:
    d_out = problems_gdpa.cotangent(arrays, settings)
    check(gradients(arrays, settings, d_out, **options), arrays, settings, d_out)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_every_shape(name, dtype, activation):
    check_shape(SHAPES[name], activation, dtype)


@pytest.mark.parametrize("name", ["self", "indexed", "pma", "pffn"])
@pytest.mark.parametrize("activation", ELEMENTWISE)
def test_gradients_of_every_activation(activation, name):
    check_shape(SHAPES[name], activation)


@pytest.mark.parametrize("name", ["self", "indexed", "pma"])
def test_gradients_of_an_activation_for_each_head(name):
    shape = SHAPES[name]._replace(q_heads=8, kv_heads=2)
    check_shape(shape, ELEMENTWISE)


@pytest.mark.parametrize(
    ("activation", "approx"), [("gelu_tanh", "tanh"), ("silu", "tanh"), ("gelu", "polynomial")]
)
def test_gradients_of_approximations(activation, approx):
    """As near to the exact ones as the approximation's errors allow."""
    arrays, settings, d_out = make(SHAPES["self"], activation)
    exact = gradients(arrays, settings, d_out)
    actual = gradients(arrays, settings._replace(approx=approx), d_out)
    for array, want in zip(actual, exact, strict=True):
        array, want = (np.asarray(x, np.float32) for x in (array, want))
        assert np.max(np.abs(array - want)) <= 0.02 * np.max(np.abs(want))


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
def test_gradients_of_every_width(head_dim, dtype, activation):
    check_shape(SHAPES["self"]._replace(head_dim=head_dim), activation, dtype)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("block", [16, 32, 48, 64])
def test_gradients_of_every_block(block, activation):
    config = GdpaBackwardConfig(block, 3)
    check_shape(SHAPES["self"], activation, config=config)


@pytest.mark.parametrize("factor", [-1.0, 40.0, 1e3])
@pytest.mark.parametrize("dtype", problems.HALF_DTYPES)
def test_gradients_of_a_softmax_of_large_scores(factor, dtype):
    """Weights near 0 and 1, whose exponents round."""
    arrays, settings, _ = make(SHAPES["self"], "softmax", dtype)
    check_arrays(arrays, settings._replace(scale=factor * settings.scale))


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("limits", [(100, None), (None, 65), (64, 1)])
def test_gradients_of_sequences_cut_off(limits, activation):
    longest_q, longest_kv = limits
    bounds = {"max_seqlen_q": longest_q, "max_seqlen_kv": longest_kv}
    check_arrays(*make(SHAPES["self"], activation, **bounds)[:2])


@pytest.mark.parametrize("activation", KINDS)
def test_gradients_of_bad_offsets(activation):
    """What lies outside is clamped, and falling offsets are empty sequences."""
    arrays, settings, _ = make(SHAPES["self"], activation)
    offsets = jnp.asarray([-5, 300, 200, 430, 2**31 - 1], jnp.int32)
    arrays = arrays._replace(cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    check_arrays(arrays, settings)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("name", ["dense", "indexed", "pma"])
def test_gradients_repeat_bitwise(name, activation):
    arrays, settings, d_out = make(SHAPES[name], activation)
    run = make_gradients(arrays, settings)
    first = run(arrays, d_out)
    for _ in range(20):
        for array, want in zip(run(arrays, d_out), first, strict=True):
            bits = (x.view(jnp.uint16) for x in (array, want))
            assert bool(jnp.array_equal(*bits))


@pytest.mark.parametrize("activation", KINDS)
def test_gradients_of_tiles_that_xla_lists_are_the_same(activation, monkeypatch):
    """For more sequences than a launch lists, another launch orders those that share keys."""
    rng = np.random.default_rng(5)
    lengths = (tuple(rng.integers(0, most, n).tolist()) for most, n in ((4, 5000), (90, 30)))
    shape = Shape(*lengths, 2, 1, 64, tuple(rng.integers(0, 30, 5000).tolist()))
    arrays, settings, d_out = make(shape, activation)
    expected = gradients(arrays, settings, d_out)
    monkeypatch.setattr(works, "MOST_WORDS", 0)
    for array, want in zip(gradients(arrays, settings, d_out), expected, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x.view(jnp.uint16)) for x in (array, want)))


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_values_stay_in_their_sequence(bad, activation):
    shape = Shape((140, 33, 200), (33, 140, 90), 2, 2, 128)
    clean, settings, d_out = make(shape, activation)
    spoiled = clean._replace(
        query=clean.query.at[140:173].set(bad),
        key=clean.key.at[33:173].set(bad),
        value=clean.value.at[33:173].set(bad),
    )
    run = make_gradients(clean, settings)
    results = run(spoiled, d_out.at[140:173].set(bad))
    expected = run(clean, d_out)
    ranges = ((140, 173), (33, 173), (33, 173))
    for array, want, (begin, end) in zip(results, expected, ranges, strict=True):
        others = np.r_[0:begin, end : len(array)]
        assert bool(jnp.array_equal(array[others], want[others]))


@pytest.mark.parametrize("part", range(4))
@on_gpu.drawn
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=12),
    head_dim=st.sampled_from(HEAD_DIMS),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
    activation=st.sampled_from(problems_gdpa.ACTIVATIONS),
    around=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    is_indexed=st.booleans(),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(problems.HALF_DTYPES),
)
def test_gradients_of_drawn_offsets(
    part, lengths, head_dim, kv_heads, group, activation, around, is_indexed, seed, dtype
):
    q_lens, kv_lens = zip(*lengths, strict=True)
    q_lens, kv_lens = (q_lens[0] + 1, *q_lens[1:]), (kv_lens[0] + 1, *kv_lens[1:])
    index = None
    if is_indexed:
        index = tuple(np.random.default_rng(seed).integers(0, len(kv_lens), len(q_lens)).tolist())
    shape = Shape(q_lens, kv_lens, kv_heads * group, kv_heads, head_dim, index, *around)
    check_shape(shape, activation, dtype, seed)
