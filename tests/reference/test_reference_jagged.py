"""Lists of tiles: every row of a sequence is in one tile, and partners find one another."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.reference import jagged

BATCH, BATCH_KV, TOTAL, SIZE, PER_STEP, LONGEST = 5, 3, 23, 4, 3, 6


@functools.partial(jax.jit, static_argnums=2)
def tiling(cu: jax.Array, kv: jax.Array, longest: int | None) -> tuple:
    start, length = jagged.bounds(cu, TOTAL, longest)
    most = jagged.most_tiles(BATCH, TOTAL, SIZE, longest)
    sequences = jagged.Sequences(start, start + 100, length, kv)
    result = jagged.tile(sequences, BATCH_KV, SIZE, PER_STEP, most)
    return start, length, result.tiles, result.first


def offsets() -> st.SearchStrategy[list[int]]:
    inside = st.lists(st.integers(0, TOTAL), min_size=BATCH + 1, max_size=BATCH + 1).map(sorted)
    anything = st.integers(-(2**31), 2**31 - 1)
    return st.one_of(inside, st.lists(anything, min_size=BATCH + 1, max_size=BATCH + 1))


@hypothesis.given(
    cu=offsets(),
    kv=st.lists(st.integers(0, BATCH_KV - 1), min_size=BATCH, max_size=BATCH),
    longest=st.sampled_from([None, LONGEST, 0]),
)
@hypothesis.settings(max_examples=100)
def test_every_row_is_in_one_tile(cu: list[int], kv: list[int], longest: int | None) -> None:
    start, length, tiles, first = jax.tree.map(
        np.asarray, tiling(jnp.asarray(cu, jnp.int32), jnp.asarray(kv, jnp.int32), longest)
    )
    # Bounds: inside the array, in order, not longer than the longest.
    assert np.all(start >= 0)
    assert np.all(start + length <= TOTAL)
    assert np.all((length >= 0) & (length <= (TOTAL if longest is None else longest)))
    assert np.all(start[:-1] + length[:-1] <= start[1:])
    expected = [(kv[b], row) for b in range(BATCH) for row in range(start[b], start[b] + length[b])]
    found = [
        (tile_kv, row)
        for source, rows, tile_kv in zip(tiles.source, tiles.rows, tiles.kv, strict=True)
        for row in range(source, source + rows)
    ]
    assert sorted(found) == sorted(expected)
    assert tiles.rows.size % PER_STEP == 0
    assert np.all(tiles.rows <= SIZE)
    np.testing.assert_array_equal(tiles.target, tiles.source + 100)
    for s in range(BATCH_KV):
        is_mine = (tiles.kv == s) & (tiles.rows > 0)
        np.testing.assert_array_equal(np.flatnonzero(is_mine), np.arange(first[s], first[s + 1]))


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
