"""The oracle of gdpa against NumPy; the XLA path and its gradient against the oracle."""

import functools
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems_gdpa
import pytest
from problems_gdpa import ACTIVATIONS, SHAPES, Shape
from rewrite_basics import every_equation

from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference import gdpa_chunked, gdpa_chunked_vjp, jagged
from ikbo_jax.reference.gdpa import Arrays, Settings

pytestmark = pytest.mark.slow

#: What paths in f32 may differ by through the order of sums alone, relative to the largest value.
ATOL = 3e-6
#: Many steps of every kind, of tiny sizes.
SMALL_BLOCKS = gdpa_chunked.Blocking(q_rows=3, kv_rows=5, q_tiles=2, kv_tiles=3)


#: One for every way in which queries meet keys.
MODES = ("self", "self_empty_and_padded", "pffn", "indexed", "pma", "pma_indexed")


def problem(name: str) -> tuple[Shape, Settings]:
    """A head for every activation in every mode; elsewhere gelu and softmax, of negative scales."""
    shape = SHAPES[name]
    if name in MODES:
        # Heads share key heads where rows are masked.
        heads = len(ACTIVATIONS), 3 if name == "self_empty_and_padded" else len(ACTIVATIONS)
        shape = shape._replace(q_heads=heads[0], kv_heads=heads[1])
        return shape, problems_gdpa.make_settings(shape, ACTIVATIONS)
    shape, scales = shape._replace(q_heads=2, kv_heads=2), {"scale": -2.0, "output_scale": -3.0}
    return shape, problems_gdpa.make_settings(shape, ("gelu", "softmax"), **scales)


materialised = jax.jit(reference.materialised, static_argnums=1)
chunked = jax.jit(gdpa_chunked.chunked, static_argnums=(1, 2))


def oracle(arrays: Arrays, settings: Settings, d_out: jax.Array) -> tuple[jax.Array, tuple]:
    """Out and the gradients of query, key and value, by the oracle and its own VJP, in f32."""

    def run(*floats: jax.Array) -> jax.Array:
        return reference.materialised(Arrays(*floats, *arrays[3:]), settings)

    out, pull_back = jax.vjp(run, *(x.astype(jnp.float32) for x in arrays[:3]))
    return out, pull_back(d_out.astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=(1, 3))
def ours(arrays: Arrays, settings: Settings, d_out: jax.Array, blocks=None) -> tuple:
    out, _ = gdpa_chunked.chunked(arrays, settings, blocks)
    return out, gdpa_chunked_vjp.chunked_vjp(arrays, settings, d_out, blocks)


@functools.partial(jax.jit, static_argnums=1)
def ours_and_oracle(arrays: Arrays, settings: Settings, d_out: jax.Array) -> tuple[tuple, tuple]:
    """Both in one program, `ours` in small blocks."""
    found = ours.__wrapped__(arrays, settings, d_out, SMALL_BLOCKS)
    return found, oracle(arrays, settings, d_out)


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        largest = np.max(np.abs(y), initial=1.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL * largest)


# The oracle.


def test_materialised_rounds_once() -> None:
    shape = SHAPES["grouped_heads"]
    arrays = problems_gdpa.make_arrays(shape, "float16")
    settings = problems_gdpa.make_settings(shape)
    out = materialised(arrays, settings)
    assert out.dtype == jnp.float16
    exact = problems_gdpa.numpy_oracle(arrays, settings)
    # Half a unit in the last place of each value, and a little for f32 sums.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-11, atol=1e-6)


# The XLA path.


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        # Longer than the bound, as long, and shorter.
        ("self", (4, 5)),
        *((name, (None, None)) for name in (*MODES[1:], "one_row")),
    ],
)
def test_both_paths_and_their_gradients_are_numpys(name: str, limits: tuple) -> None:
    """Of every activation in every mode."""
    shape, settings = problem(name)
    settings = settings._replace(max_seqlen_q=limits[0], max_seqlen_kv=limits[1])
    arrays = problems_gdpa.make_arrays(shape, "float32")
    d_out = problems_gdpa.cotangent(arrays, settings)
    exact = jax.tree.map(np.float32, problems_gdpa.exactly(arrays, settings, d_out))
    for found in ours_and_oracle(arrays, settings, d_out):
        assert_close(found, exact)


def test_lse_is_that_of_the_scores() -> None:
    shape = SHAPES["self_empty_and_padded"]._replace(q_heads=4)
    arrays = problems_gdpa.make_arrays(shape, "float32")
    names = ["softmax", ("gelu", "softmax", "softmax", "relu"), "silu"]
    several = [problems_gdpa.make_settings(shape, name) for name in names]
    each = jax.jit(lambda x: [gdpa_chunked.chunked(x, s, SMALL_BLOCKS)[1] for s in several])(arrays)
    assert each.pop() is None
    for lse, settings in zip(each, several, strict=False):
        exact = problems_gdpa.numpy_lse(arrays, settings)
        chex.assert_shape(lse, exact.shape)
        assert lse.dtype == jnp.float32
        is_softmax = np.asarray(settings.activations) == "softmax"
        np.testing.assert_allclose(lse, np.where(is_softmax, exact, 0), rtol=1e-5, atol=1e-6)


def test_scores_that_grow_along_a_sequence_do_not_overflow() -> None:
    """Every tile's maximum dwarfs that of the one before, beyond the range of exp in f32."""
    shape = Shape((6,), (40,))
    arrays = problems_gdpa.make_arrays(shape, "float32")
    grown_key = np.asarray(arrays.key) * np.linspace(1, 400, 40, dtype=np.float32)[:, None, None]
    settings = problems_gdpa.make_settings(shape, "softmax")
    for key in (grown_key, grown_key[::-1]):
        grown = arrays._replace(key=key)
        out, lse = chunked(grown, settings, SMALL_BLOCKS)
        assert np.max(lse) > 200
        exact = problems_gdpa.numpy_oracle(grown, settings)
        np.testing.assert_allclose(out, exact, rtol=0, atol=5e-4)


def test_output_scale_of_zero_has_no_gradient() -> None:
    shape = SHAPES["self"]
    settings = problems_gdpa.make_settings(shape, ("silu", "softmax"))
    arrays = problems_gdpa.make_arrays(shape, "float32")
    d_out = problems_gdpa.cotangent(arrays, settings)
    result = ours(arrays, settings._replace(output_scale=0.0), d_out)
    chex.assert_trees_all_equal(result, jax.tree.map(jnp.zeros_like, result))


# Offsets of any kind.

#: More requests than candidates.
FUZZ_SHAPE = Shape((8, 4, 3, 5), (6, 4, 8, 4, 2), 2, 2, 4, (0, 1, 4, 0))
#: The two ways to leave a key out: a weight of zero, and none in the sum of a softmax.
FUZZ_SETTINGS = problems_gdpa.make_settings(FUZZ_SHAPE, ("identity", "softmax"))


def fuzzed(count: int, total: int) -> st.SearchStrategy[list[int]]:
    """Mostly offsets of which few are out of order: of others, hardly a row has a key."""
    inside = st.integers(0, total)
    anything = st.one_of(inside, st.integers(-(2**31), 2**31 - 1))
    rising = st.lists(inside, min_size=count, max_size=count, unique=True).map(sorted)
    ordered = st.lists(inside, min_size=count, max_size=count).map(sorted)
    other = st.tuples(rising, st.integers(0, count - 1), anything).map(
        lambda x: [*x[0][: x[1]], x[2], *x[0][x[1] + 1 :]]
    )
    return st.one_of(rising, ordered, other, st.lists(anything, min_size=count, max_size=count))


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_any_offsets_and_index(data: st.DataObject) -> None:
    arrays = problems_gdpa.make_arrays(FUZZ_SHAPE, "float32")
    index = st.one_of(st.lists(st.integers(0, 4), min_size=4, max_size=4), fuzzed(4, 4))
    drawn = [data.draw(s) for s in (fuzzed(5, 20), fuzzed(6, 24), index)]
    arrays = Arrays(*arrays[:3], *(np.asarray(x, np.int32) for x in drawn))
    limits = data.draw(st.sampled_from([(None, None), (6, 9)]))
    settings = FUZZ_SETTINGS._replace(max_seqlen_q=limits[0], max_seqlen_kv=limits[1])
    d_out = problems_gdpa.cotangent(arrays, settings)
    assert_close(*ours_and_oracle(arrays, settings, d_out))


@pytest.mark.parametrize(
    ("cu", "longest", "start", "length"),
    [
        ([0, 3, 3, 9], None, [0, 3, 3], [3, 0, 6]),
        ([2, 8, 4, 9], None, [2, 8, 8], [6, 0, 1]),
        ([-7, 3, 99, 4], None, [0, 3, 9], [3, 6, 0]),
        ([0, 3, 3, 9], 2, [0, 3, 3], [2, 0, 2]),
    ],
)
def test_bounds_of_bad_offsets(cu, longest, start, length) -> None:
    found = jagged.bounds(jnp.asarray(cu, jnp.int32), 9, longest)
    np.testing.assert_array_equal(found, (start, length))


@pytest.mark.parametrize("batch", [1, 4, 30])
@pytest.mark.parametrize("size", [1, 4, 50])
@pytest.mark.parametrize("longest", [None, 1, 7])
def test_most_tiles_is_enough_and_reached(batch: int, size: int, longest: int | None) -> None:
    """By all ways to give 20 rows to one long sequence and short ones of one row."""
    most = jagged.most_tiles(batch, 20, size, longest)
    needs = []
    for ones in range(min(batch, 21)):
        lengths = [20 - ones, *[1] * ones] if batch > ones else [1] * batch
        lengths = [min(n, 20 if longest is None else longest) for n in lengths]
        needs.append(sum(-(-n // size) for n in lengths))
    assert max(needs) <= most
    assert longest is not None or max(needs) == most


# Poison.


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["query", "key", "value", "d_out"])
def test_poison_stays_in_its_sequence(array: str, poison: float) -> None:
    """And comes out of the heads of each activation, which share no key head."""
    shape = SHAPES["indexed"]._replace(q_heads=6, kv_heads=3)
    arrays = problems_gdpa.make_arrays(shape, "float32")
    names = ("gelu", "gelu", "softmax", "softmax", "identity", "identity")
    settings = problems_gdpa.make_settings(shape, names)
    d_out = problems_gdpa.cotangent(arrays, settings)
    run = functools.partial(ours, settings=settings, blocks=SMALL_BLOCKS)
    out, clean = run(arrays, d_out=d_out)

    def with_poison(x: jax.Array) -> np.ndarray:
        """In a row of the second query sequence, or of its key-value sequence, the first."""
        bad = np.array(x)
        bad[4] = poison
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
    of_activations = [np.asarray(x).reshape(len(x), 3, -1) for x in found]
    finite = [np.isfinite(x).all(axis=(0, 2)) for x in of_activations]
    assert not np.all(finite, axis=0).any()
    for x, y, hit in zip(
        found, jax.tree.leaves((out, clean)), (of_q, of_q, of_kv, of_kv), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x)[~hit], np.asarray(y)[~hit])


# Shape of the program.


@pytest.mark.parametrize("name", ["indexed", "pma_indexed"])
def test_no_sum_is_scattered(name: str) -> None:
    """A GPU adds what is scattered to one place in any order; integers alone do not mind."""
    shape = SHAPES[name]
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape, "softmax")
    d_out = problems_gdpa.cotangent(arrays, settings)
    traced = jax.make_jaxpr(lambda *x: ours.__wrapped__(x[0], settings, x[1]))(arrays, d_out)
    found = [(e.primitive.name, e.outvars[0].aval.dtype) for e in every_equation(traced)]
    # Tiles are counted where sequences of queries may have any sequence of keys.
    assert (("scatter-add", jnp.int32) in found) == (name == "pma_indexed")
    assert ("scatter", jnp.float32) in found
    assert ("scatter-add", jnp.float32) not in found


@hypothesis.given(
    batch=st.integers(1, 10**6),
    q_rows=st.integers(1, 10**7),
    kv_rows=st.integers(1, 10**7),
    heads=st.sampled_from([1, 4, 64]),
    width=st.sampled_from([1, 64, 256]),
    limits=st.tuples(*[st.none() | st.integers(0, 10_000)] * 2),
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


@pytest.mark.parametrize(("max_seqlen_kv", "expected"), [(None, 1), (1024, 0), (4096, 1)])
def test_short_loops_over_tiles_are_unrolled(max_seqlen_kv, expected) -> None:
    """A GPU's host waits before every turn of a loop whose length only the device knows."""
    batch, seeds, length = 8, 128, 1024
    query, key = (
        jax.ShapeDtypeStruct((rows, 2, 128), jnp.bfloat16) for rows in (seeds, batch * length)
    )
    offsets = jax.ShapeDtypeStruct((batch + 1,), jnp.int32)
    settings = Settings(("softmax",) * 2, broadcast_q=True, max_seqlen_kv=max_seqlen_kv)
    arrays = Arrays(query, key, key, None, offsets)

    def loops(function, *more) -> int:
        traced = jax.make_jaxpr(lambda x, *rest: function(x, settings, *rest))(arrays, *more)
        return sum(equation.primitive.name == "while" for equation in every_equation(traced))

    assert loops(gdpa_chunked.chunked) == expected
    out, _ = jax.eval_shape(lambda x: gdpa_chunked.chunked(x, settings), arrays)
    # That of the queries loops over the keys twice, at first for the softmax's sums. That of the
    # keys loops over the seeds, whose number is known.
    assert loops(gdpa_chunked_vjp.chunked_vjp, out) == 2 * expected


def test_candidates_of_one_user_share_tiles() -> None:
    """A tile of one candidate would copy its user's keys."""
    users, candidates, length = 10, 800, 48
    query, key = (jnp.ones((rows, 1, 4)) for rows in (candidates, users * length))
    of_q, of_kv = (jnp.arange(n + 1, dtype=jnp.int32) for n in (candidates, users))
    index = jnp.arange(candidates, dtype=jnp.int32)[::-1] % users
    settings = Settings(("silu",), max_seqlen_q=1, max_seqlen_kv=length)
    arrays = Arrays(query, key, key, of_q, length * of_kv, index)
    tilings = gdpa_chunked.make_tilings(*gdpa_chunked.by_keys(arrays, settings)[:2], None)
    assert (tilings.q.size, int((tilings.q.tiles.rows > 0).sum())) == (128, users)
