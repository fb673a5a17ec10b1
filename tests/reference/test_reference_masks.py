"""Masks: intervals against the rules, pair by pair; the XLA path and the oracle against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems_gdpa
import problems_masks
import pytest
import test_reference_gdpa
from problems_gdpa import ACTIVATIONS, SHAPES, Shape
from test_reference_gdpa import ATOL, ours

from ikbo_jax import masks
from ikbo_jax.ops import gdpa_mask
from ikbo_jax.reference import gdpa_chunked

#: Tiles that several rows, and only a part of the rows, see.
BLOCKS = gdpa_chunked.Blocking(q_rows=3, kv_rows=4, q_tiles=2, kv_tiles=3)
#: Self-attention; a cached prefix; more queries than keys; shared keys; broadcast queries.
MODES = {
    "self": Shape((9, 1, 14, 3), (9, 1, 14, 3), before=1, after=2),
    "prefix": Shape((4, 2, 5), (13, 2, 9)),
    "many_queries": Shape((7, 5, 3), (4, 0, 12)),
    "indexed": Shape((3, 8, 0, 5, 2), (9, 4, 0, 6), q_to_kv=(3, 0, 0, 3, 2), after=3),
    "pma": Shape(4, (13, 0, 3), after=1),
    "pma_indexed": SHAPES["pma_indexed"],
}


def interval_mask(found: np.ndarray, length: int) -> np.ndarray:
    """Intervals [queries, 4] as [queries, length] bool."""
    ends, key = found.reshape(-1, 2, 2, 1), np.arange(length)
    return np.any((key >= ends[:, :, 0]) & (key < ends[:, :, 1]), axis=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 1, 4, 2**40])
@pytest.mark.parametrize("full_tail", [0, 1, 3])
def test_intervals_are_hstus_rule(causal: bool, window: int | None, full_tail: int) -> None:
    """For any lengths, targets and contextual tokens, also more than fit, and shorter queries."""
    rng = np.random.default_rng(0)
    length = np.asarray([0, 1, 2, 6, 7, 9, 11, *rng.integers(0, 14, 25)])
    queries = np.minimum(length + 2, rng.integers(0, 16, len(length)))
    targets = rng.integers(-1, 9, len(length)).astype(np.int32)
    tokens = rng.integers(-1, 6, len(length)).astype(np.int32)
    targets[3:5] = 99
    offset = np.arange(queries.sum()) - np.repeat(np.cumsum(queries) - queries, queries)
    sequence = np.repeat(np.arange(len(length)), queries)
    position = length[sequence] - queries[sequence] + offset
    rows = masks.Rows(*(jnp.asarray(x, jnp.int32) for x in (position, length[sequence], sequence)))
    for group, contextual in (1, tokens), (2, 0), (3, 3):
        numbers: Any = {"window": window, "full_tail": full_tail, "target_group_size": group}
        mask = masks.hstu(targets, contextual=contextual, causal=causal, **numbers)
        mask = jax.tree.map(jnp.asarray, mask)
        found = np.asarray(mask.intervals(rows))
        for number, size in enumerate(length):
            expected = problems_masks.sees(
                queries[number],
                size,
                targets[number],
                tokens[number] if group == 1 else contextual,
                causal=causal,
                **numbers,
            )
            mine = found[sequence == number]
            np.testing.assert_array_equal(interval_mask(mine, size), expected)
            assert mine.size == 0 or (mine.min() >= 0 and mine.max() <= size)


oracle = jax.jit(test_reference_gdpa.oracle, static_argnums=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "logit_cap"),
    [*((mode, None) for mode in MODES), ("prefix", 0.6), ("pma", 0.6)],
    ids=[*MODES, "prefix-capped", "pma-capped"],
)
def test_both_paths_and_their_gradients_are_numpys(mode: str, logit_cap: float | None) -> None:
    """Every mask with every activation, in heads that share key heads; with and without a cap."""
    shape = MODES[mode]._replace(q_heads=len(ACTIVATIONS), kv_heads=3)
    settings = problems_gdpa.make_settings(shape, tuple(ACTIVATIONS), logit_cap=logit_cap)
    # With seed 0, a score is so near 0 that NumPy's slope is a difference across relu's kink.
    arrays = problems_gdpa.make_arrays(shape, "float32", seed=1)
    d_out = problems_gdpa.cotangent(arrays, settings)
    for case in problems_masks.cases(shape).values():
        masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
        exact = problems_gdpa.exactly(arrays, settings, d_out, case.rule)
        for found in [
            ours(masked, settings, d_out, BLOCKS),
            *([] if logit_cap else [ours(masked, settings, d_out)]),
            oracle(masked, settings, d_out),
        ]:
            assert_close(found, exact)


def assert_close(actual: Any, expected: Any) -> None:
    """Within f32 rounding; exactly zero where the oracle's rows are."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL * np.max(np.abs(y), initial=1.0))
        is_zero = np.all(y == 0, axis=(1, 2))
        assert not np.any(np.asarray(x)[is_zero])


@pytest.mark.slow
def test_lse_is_that_of_the_visible_keys() -> None:
    shape = MODES["many_queries"]
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape, "softmax")
    case = problems_masks.cases(shape)["two_intervals"]
    masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
    _, lse = jax.jit(gdpa_chunked.chunked, static_argnums=1)(masked, settings)
    exact = problems_gdpa.numpy_lse(arrays, settings, case.rule)
    assert np.isneginf(exact).any()
    np.testing.assert_allclose(lse, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_bounds_of_lengths_come_before_the_mask() -> None:
    """The last query of a cut sequence has the position of its last key that is left."""
    shape = MODES["self"]
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape, "silu", max_seqlen_q=5, max_seqlen_kv=7)
    d_out = problems_gdpa.cotangent(arrays, settings)
    case = problems_masks.hstu_case((2, 0, 9, 1), 1, window=3)
    masked = gdpa_mask.with_intervals(case.mask, arrays, settings)
    exact = problems_gdpa.exactly(arrays, settings, d_out, case.rule)
    assert_close(ours(masked, settings, d_out, BLOCKS), exact)
    assert_close(oracle(masked, settings, d_out), exact)


@pytest.mark.parametrize("window", [None, 3])
def test_tiles_that_no_row_sees_are_skipped(window: int | None) -> None:
    shape = Shape((40, 7), (40, 7))
    arrays = problems_gdpa.make_arrays(shape, "float32")
    settings = problems_gdpa.make_settings(shape)
    masked = gdpa_mask.with_intervals(masks.causal(window), arrays, settings)
    blocks = gdpa_chunked.Blocking(q_rows=4, kv_rows=8, q_tiles=1, kv_tiles=1)
    tilings = gdpa_chunked.make_tilings(masked, settings, blocks)
    first, number = gdpa_chunked.key_tiles(tilings, tilings.q.tiles)
    # Tiles of 4 queries of the first sequence: rows 4 n to 4 n + 3.
    starts = np.arange(10) * 4
    begin = np.zeros(10, int) if window is None else np.maximum(starts - window, 0) // 8
    np.testing.assert_array_equal(first[:10], begin)
    np.testing.assert_array_equal(number[:10], (starts + 3) // 8 + 1 - begin)
    first, number = gdpa_chunked.query_tiles(tilings, tilings.kv.tiles)
    starts = np.arange(5) * 8
    end = np.full(5, 10) if window is None else np.minimum((starts + 7 + window) // 4 + 1, 10)
    np.testing.assert_array_equal(first[:5], starts // 4)
    np.testing.assert_array_equal(number[:5], end - starts // 4)
