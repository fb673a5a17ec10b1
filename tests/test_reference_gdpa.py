"""The oracle of gdpa against NumPy; the XLA path, its gradient and memory against the oracle."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import problems
import problems_gdpa
import pytest
from jax.extend.core import jaxprs_in_params
from problems_gdpa import SHAPES, Shape

from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference import gdpa_chunked
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = pytest.mark.slow

#: What paths in f32 may differ by through the order of sums alone, relative to the largest value.
ATOL = 3e-6
#: Many steps of every kind, of tiny sizes.
SMALL_BLOCKS = gdpa_chunked.Blocking(q_rows=3, kv_rows=5, q_tiles=2, kv_tiles=3)
#: A shape of every mode.
MODES = ["self_empty_and_padded", "grouped_heads", "indexed", "pma", "pma_indexed"]


def problem(name: str) -> tuple[Shape, Settings]:
    """A head for every activation in `MODES`, gelu and softmax in other shapes."""
    shape = SHAPES[name]
    if name in MODES:
        return problems_gdpa.of_all_activations(shape)
    names = ("gelu", "softmax", "gelu")[: shape.q_heads]
    return shape, problems_gdpa.make_settings(shape, names)


# Programs run once and are tiny: compiling them is what takes the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
materialised = jit(reference.materialised, static_argnums=1)
chunked = jit(gdpa_chunked.chunked, static_argnums=(1, 2))


@functools.partial(jit, static_argnums=1)
def oracle(arrays: Arrays, settings: Settings, d_out: jax.Array) -> tuple[jax.Array, tuple]:
    """Out and the gradients of query, key and value, by the oracle and its own VJP, in f32."""

    def run(*floats: jax.Array) -> jax.Array:
        return reference.materialised(Arrays(*floats, *arrays[3:]), settings)

    out, pull_back = jax.vjp(run, *(x.astype(jnp.float32) for x in arrays[:3]))
    return out, pull_back(d_out.astype(jnp.float32))


@functools.partial(jit, static_argnums=(1, 3))
def ours(arrays: Arrays, settings: Settings, d_out: jax.Array, blocks=None) -> tuple:
    out, lse = gdpa_chunked.chunked(arrays, settings, blocks)
    return out, gdpa_chunked.chunked_vjp(arrays, settings, out, lse, d_out, blocks)


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        largest = np.max(np.abs(y), initial=1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL * largest)


# The oracle.


@pytest.mark.parametrize("name", ["self_empty_and_padded", "indexed", "pma_indexed"])
def test_materialised_has_the_gradient_of_its_value(name: str) -> None:
    """Of every activation, by finite differences."""
    shape, settings = problems_gdpa.of_all_activations(SHAPES[name])
    arrays = problems_gdpa.make_arrays(shape, "float32")
    query, key, value = (jnp.abs(jnp.nan_to_num(x)) for x in arrays[:3])
    # Scores of both signs, none of them at the kink of a relu.
    sign = jnp.where(jnp.arange(key.shape[0], dtype=jnp.int32) % 2, 1.0, -1.0)
    floats = (query, key * sign[:, None, None], value)

    @jax.jit
    def run(*floats: jax.Array) -> jax.Array:
        return reference.materialised(Arrays(*floats, *arrays[3:]), settings)

    jax.test_util.check_grads(run, floats, order=1, modes=["rev"], atol=0.02, rtol=0.02, eps=1e-3)


def test_materialised_rounds_once() -> None:
    shape = SHAPES["grouped_heads"]
    arrays = problems_gdpa.make_arrays(shape, "float16")
    settings = problems_gdpa.make_settings(shape)
    out = materialised(arrays, settings)
    assert out.dtype == jnp.float16
    exact = problems_gdpa.numpy_oracle(arrays, settings)
    # Half a unit in the last place of each value, and a little for f32 sums.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-11, atol=1e-6)


def one_pair(q: float, k: float, v: float) -> Arrays:
    """One query and one key of one sequence, the same for two heads."""
    cu = np.asarray([0, 1], np.int32)
    query, key, value = (np.full((1, 2, 1), x, np.float32) for x in (q, k, v))
    return Arrays(query, key, value, cu, cu)


PATHS = {"oracle": reference.materialised, "xla": lambda *x: gdpa_chunked.chunked(*x)[0]}


@pytest.mark.parametrize("run", PATHS.values(), ids=PATHS)
def test_each_scale_is_where_the_definition_has_it(run) -> None:
    """By hand, with an activation that tells a scale before it from one after it.

    A softmax over one key is 1, whatever its score.
    """

    def gelu(x: float) -> float:
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))

    scales = [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (-2.0, -3.0), (0.0, 1.0)]
    arrays = one_pair(1.5, 0.8, 2.0)

    @jit
    def run_all(arrays: Arrays) -> list[jax.Array]:
        return [run(arrays, Settings(("gelu", "softmax"), None, *pair)) for pair in scales]

    for (scale, output_scale), out in zip(scales, run_all(arrays), strict=True):
        expected = [output_scale * gelu(scale * 1.2) * 2.0, output_scale * 2.0]
        np.testing.assert_allclose(np.ravel(out), expected, rtol=1e-6)


# The XLA path.


@pytest.mark.parametrize("name", SHAPES)
def test_chunked_and_its_gradient_are_the_oracles(name: str) -> None:
    """And the oracle is NumPy's, so that no second program has to be compiled to say that."""
    shape, settings = problem(name)
    arrays = problems_gdpa.make_arrays(shape, "float32")
    d_out = problems_gdpa.cotangent(arrays, settings)
    expected = oracle(arrays, settings, d_out)
    exact = problems_gdpa.numpy_oracle(arrays, settings)
    assert_close(expected[0], exact.astype(np.float32))
    blocks = SMALL_BLOCKS if name in MODES else None
    assert_close(ours(arrays, settings, d_out, blocks), expected)


@pytest.mark.parametrize(("name", "dtype"), [("indexed", "bfloat16"), ("pma", "float16")])
def test_half_precision_is_within_the_error_rule(name: str, dtype: str) -> None:
    shape, settings = problems_gdpa.of_all_activations(SHAPES[name])
    arrays = problems_gdpa.make_arrays(shape, dtype)
    d_out = problems_gdpa.cotangent(arrays, settings)
    actual = ours(arrays, settings, d_out)
    exact = oracle(arrays, settings, d_out)

    @jit
    def plain(*floats: jax.Array) -> tuple:
        def run(*floats: jax.Array) -> jax.Array:
            return problems_gdpa.same_dtype_gdpa(Arrays(*floats, *arrays[3:]), settings)

        out, pull_back = jax.vjp(run, *floats)
        return out, pull_back(d_out)

    jax.tree.map(problems.assert_within_error_rule, actual, exact, plain(*arrays[:3]))


@pytest.mark.parametrize("activation", ["softmax", ("gelu", "softmax", "softmax", "relu")])
def test_lse_is_that_of_the_scores(activation) -> None:
    shape = SHAPES["self_empty_and_padded"]._replace(q_heads=4)
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape, activation)
    _, lse = chunked(arrays, settings, SMALL_BLOCKS)
    chex.assert_shape(lse, (arrays.query.shape[0], 4))
    assert lse.dtype == jnp.float32
    begin, end = (np.asarray(arrays.cu_seqlens_q)[i:][:5] for i in (0, 1))
    kv_begin, kv_end = (np.asarray(arrays.cu_seqlens_kv)[i:][:5] for i in (0, 1))
    expected = np.zeros(lse.shape)
    for q0, q1, k0, k1 in zip(begin, end, kv_begin, kv_end, strict=True):
        keys = np.repeat(np.asarray(arrays.key, np.float64)[k0:k1], 2, axis=1)
        scores = settings.scale * np.einsum("inh,jnh->inj", arrays.query[q0:q1], keys)
        with np.errstate(divide="ignore"):
            expected[q0:q1] = np.log(np.sum(np.exp(scores), axis=-1))
    is_softmax = np.asarray(settings.activations) == "softmax"
    expected = np.where(is_softmax, expected, 0)
    np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-6)
    assert chunked(arrays, problems_gdpa.make_settings(shape, "silu"))[1] is None


def test_scores_that_grow_along_a_sequence_do_not_overflow() -> None:
    """Every tile's maximum dwarfs that of the one before, beyond the range of exp in f32."""
    shape = Shape((6,), (40,))
    arrays = problems_gdpa.make_arrays(shape, "float32")
    growth = jnp.linspace(1.0, 400.0, 40, dtype=jnp.float32)[:, None, None]
    settings = problems_gdpa.make_settings(shape, "softmax")
    for key in (arrays.key * growth, (arrays.key * growth)[::-1]):
        grown = arrays._replace(key=key)
        out, lse = chunked(grown, settings, SMALL_BLOCKS)
        assert np.max(lse) > 200
        exact = problems_gdpa.numpy_oracle(grown, settings)
        np.testing.assert_allclose(out, exact, rtol=0, atol=5e-4)


def test_output_scale_of_zero_has_no_gradient() -> None:
    shape, settings = problems_gdpa.of_all_activations(SHAPES["self"])
    arrays = problems_gdpa.make_arrays(shape, "float32")
    d_out = problems_gdpa.cotangent(arrays, settings)
    result = ours(arrays, settings._replace(output_scale=0.0), d_out)
    chex.assert_trees_all_equal(result, jax.tree.map(jnp.zeros_like, result))


# Offsets of any kind.

FUZZ_SHAPE, FUZZ_SETTINGS = problems_gdpa.of_all_activations(
    Shape((8, 4, 3, 5), (10, 6, 8), 2, 2, 4, (0, 1, 2, 0))
)


def fuzzed(count: int, total: int) -> st.SearchStrategy[list[int]]:
    inside = st.integers(0, total)
    anything = st.one_of(inside, st.integers(-(2**31), 2**31 - 1))
    ordered = st.lists(inside, min_size=count, max_size=count).map(sorted)
    return st.one_of(ordered, st.lists(anything, min_size=count, max_size=count))


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_any_offsets_and_index(data: st.DataObject) -> None:
    arrays = problems_gdpa.make_arrays(FUZZ_SHAPE, "float32")
    index = st.lists(fuzzed(1, 2).map(lambda x: x[0]), min_size=4, max_size=4)
    drawn = [data.draw(s) for s in (fuzzed(5, 20), fuzzed(4, 24), index)]
    arrays = Arrays(*arrays[:3], *(np.asarray(x, np.int32) for x in drawn))
    limits = data.draw(st.sampled_from([(None, None), (6, 9)]))
    settings = FUZZ_SETTINGS._replace(max_seqlen_q=limits[0], max_seqlen_kv=limits[1])
    d_out = problems_gdpa.cotangent(arrays, settings)
    expected = oracle(arrays, settings, d_out)
    assert_close(ours(arrays, settings, d_out, SMALL_BLOCKS), expected)


@pytest.mark.parametrize("run", PATHS.values(), ids=PATHS)
def test_offsets_and_index_are_clamped(run) -> None:
    shape = SHAPES["indexed"]._replace(after=0)
    settings = problems_gdpa.make_settings(shape, ("softmax", "gelu"))
    arrays = problems_gdpa.make_arrays(shape, "float32")
    wild = arrays._replace(
        cu_seqlens_q=jnp.asarray([-(2**31), 3, 11, 2, 16, 2**31 - 1], jnp.int32),
        cu_seqlens_kv=jnp.asarray([-1, 9, 13, 0, 99], jnp.int32),
        q_to_kv=jnp.asarray([99, -1, 0, 2**31 - 1, 2], jnp.int32),
    )
    tame = arrays._replace(
        cu_seqlens_q=jnp.asarray([0, 3, 11, 11, 16, 18], jnp.int32),
        cu_seqlens_kv=jnp.asarray([0, 9, 13, 13, 19], jnp.int32),
        q_to_kv=jnp.asarray([3, 0, 0, 3, 2], jnp.int32),
    )
    run = jit(run, static_argnums=1)
    out = run(tame, settings)
    assert np.all(np.isfinite(out))
    np.testing.assert_array_equal(run(wild, settings), out)
    np.testing.assert_allclose(out, problems_gdpa.numpy_oracle(tame, settings), atol=1e-5)


def test_sequences_are_cut_off_at_the_longest() -> None:
    shape = SHAPES["self"]
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape)
    d_out = problems_gdpa.cotangent(arrays, settings)
    limits = {"max_seqlen_q": 9, "max_seqlen_kv": 9}
    whole = ours(arrays, settings, d_out)
    assert_close(ours(arrays, settings._replace(**limits), d_out), whole)
    limits = {"max_seqlen_q": 4, "max_seqlen_kv": 2}
    out, (d_query, d_key, d_value) = ours(arrays, settings._replace(**limits), d_out)
    row = np.concatenate([np.arange(length) for length in shape.q_lens])
    for cut, array in ((4, out), (4, d_query), (2, d_key), (2, d_value)):
        is_zero = np.all(np.asarray(array) == 0, axis=(1, 2))
        np.testing.assert_array_equal(is_zero, row >= cut)
    short = Arrays(
        *(np.where((row < cut)[:, None, None], x, np.float32(0)) for cut, x in
          zip((4, 2, 2), arrays[:3], strict=True)),
        *arrays[3:],
    )  # fmt: skip
    # gelu(0) = 0: for this activation, a key of zeros is none.
    expected = materialised(short, settings)
    np.testing.assert_allclose(out, np.where(row[:, None, None] < 4, expected, 0), atol=1e-5)


# Poison.


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ["gelu", "softmax", "identity"])
@pytest.mark.parametrize("array", ["query", "key", "value", "d_out"])
def test_poison_stays_in_its_sequence(array: str, activation: str, poison: float) -> None:
    shape = SHAPES["indexed"]
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape, activation)
    d_out = problems_gdpa.cotangent(arrays, settings)
    run = functools.partial(ours, settings=settings, blocks=SMALL_BLOCKS)
    out, clean = run(arrays, d_out=d_out)

    def with_poison(x: jax.Array) -> np.ndarray:
        """In a row of the second query sequence, or of its key-value sequence, the first."""
        bad = np.array(x)
        bad[4, 0] = poison
        return bad

    if array == "d_out":
        poisoned, gradients = run(arrays, d_out=with_poison(d_out))
    else:
        bad = with_poison(getattr(arrays, array))
        poisoned, gradients = run(arrays._replace(**{array: bad}), d_out=d_out)
    q_rows, kv_rows = np.arange(21), np.arange(22)
    # Query sequences 1 and 2 (empty) have the first key-value sequence.
    of_q, of_kv = (q_rows >= 3) & (q_rows < 11), kv_rows < 9
    found = jax.tree.leaves((poisoned, gradients))
    assert not all(np.all(np.isfinite(x)) for x in found)
    for x, y, hit in zip(
        found, jax.tree.leaves((out, clean)), (of_q, of_q, of_kv, of_kv), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x)[~hit], np.asarray(y)[~hit])


# Shape of the program.


def primitives(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from primitives(inner)


@pytest.mark.parametrize("name", ["indexed", "pma_indexed"])
def test_no_sum_is_scattered(name: str) -> None:
    """A GPU adds what is scattered to one place in any order; integers alone do not mind."""
    shape = SHAPES[name]
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape, "softmax")
    d_out = problems_gdpa.cotangent(arrays, settings)
    traced = jax.make_jaxpr(lambda *x: ours.__wrapped__(x[0], settings, x[1]))(arrays, d_out)
    found = [(e.primitive.name, e.outvars[0].aval.dtype) for e in primitives(traced.jaxpr)]
    assert ("scatter-add", jnp.int32) in found
    assert ("scatter", jnp.float32) in found
    assert ("scatter-add", jnp.float32) not in found


# Sizes as they are in earnest: compiled, never run.
BATCH, LENGTH, HEADS, WIDTH = 1152, 512, 4, 128
ROWS = BATCH * LENGTH
SCORES_BYTES = 4 * BATCH * LENGTH * LENGTH * HEADS


@pytest.mark.parametrize(
    ("mode", "activation"), [("self", "softmax"), ("pffn", "gelu"), ("pma", "softmax")]
)
def test_memory_holds_no_more_than_a_step(mode: str, activation: str) -> None:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((BATCH + 1,), jnp.int32)
    q_rows = {"self": ROWS, "pffn": ROWS, "pma": 32}[mode]
    kv_rows = {"self": ROWS, "pffn": 256 * BATCH, "pma": ROWS}[mode]
    query, keys = array((q_rows, HEADS, WIDTH)), array((kv_rows, HEADS, WIDTH))
    is_pma = mode == "pma"
    arrays = Arrays(query, keys, keys, None if is_pma else offsets, offsets)
    settings = Settings((activation,) * HEADS, broadcast_q=is_pma)
    out = array(reference.out_shape(arrays, settings))
    lse = jax.ShapeDtypeStruct(out.shape[:2], jnp.float32)
    out, lse = (out, lse) if activation == "softmax" else (None, None)

    def bytes_of(function, *more) -> int:
        compiled = jax.jit(function, static_argnums=1).lower(arrays, settings, *more).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Scores, weights and their gradients, and the rows of a step in the inputs' dtype and f32.
    step = 4 * 4 * gdpa_chunked.MAX_SCORES + 24 * gdpa_chunked.MAX_ELEMENTS
    assert bytes_of(gdpa_chunked.chunked) < step
    d_out = array(reference.out_shape(arrays, settings))
    rowwise = 2 * 4 * d_out.shape[0] * HEADS
    # The gradients of all sequences' copies of the broadcast queries, in f32.
    rowwise += 4 * BATCH * 32 * HEADS * WIDTH if is_pma else 0
    found = bytes_of(gdpa_chunked.chunked_vjp, out, lse, d_out)
    assert found < step + rowwise + 2 * 2 * kv_rows * HEADS * WIDTH
    assert step < SCORES_BYTES / 5


@pytest.mark.parametrize(
    ("batch", "q_rows", "kv_rows", "heads", "width", "limits"),
    [
        (1152, ROWS, ROWS, 4, 128, (None, None)),
        (1152, ROWS, ROWS, 4, 128, (512, 512)),
        (100_000, 100_000, 100_000, 2, 64, (None, None)),
        (1, 1, 10**7, 64, 256, (None, None)),
        (10**6, 10, 10, 1, 1, (1, 1)),
        (3, 10**6, 3, 64, 256, (None, 0)),
    ],
)
def test_blocking_bounds_every_step(batch, q_rows, kv_rows, heads, width, limits) -> None:
    query, key = (jax.ShapeDtypeStruct((n, heads, width), jnp.bfloat16) for n in (q_rows, kv_rows))
    offsets = jax.ShapeDtypeStruct((batch + 1,), jnp.int32)
    settings = Settings(("gelu",) * heads, max_seqlen_q=limits[0], max_seqlen_kv=limits[1])
    blocks = gdpa_chunked.blocking(Arrays(query, key, key, offsets, offsets), settings)
    assert min(blocks) >= 1
    for tiles in (blocks.q_tiles, blocks.kv_tiles):
        if tiles > 1:
            scores = tiles * blocks.q_rows * blocks.kv_rows * heads
            elements = tiles * max(blocks.q_rows, blocks.kv_rows) * heads * width
            assert scores <= gdpa_chunked.MAX_SCORES
            assert elements <= gdpa_chunked.MAX_ELEMENTS
    # Tiles are no more than twice as long as the sequences are on average, or than a minimum.
    assert blocks.q_rows <= max(2 * -(-q_rows // batch), gdpa_chunked.MIN_ROWS)
    assert limits[0] is None or blocks.q_rows <= limits[0]
