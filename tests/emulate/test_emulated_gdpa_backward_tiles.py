"""The launch that lists the tiles of gdpa's gradient, by its PTX on a CPU."""

import dataclasses

import jax
import numpy as np
import pytest
import test_gdpa_backward_tiles as tiles
from test_gdpa_backward_tiles import Case

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist import by_xla, counted_order, positions, works
from ikbo_jax.pallas.worklist import tiles as launch


def many(*, is_shared: bool) -> Case:
    """More sequences than a CTA lists, some of them empty, or longer than the bound."""
    rng = np.random.default_rng(3)
    cu_q, cu_kv = np.sort(rng.integers(0, 9000, 301)), np.sort(rng.integers(0, 9000, 301))
    index = (rng.integers(0, 300, 300) // 40 * 3).tolist() if is_shared else None
    return Case(cu_q, cu_kv, index, 9100, 9000, (90, 70), 2, has_statistics=True)


CASES = (
    tiles.CASES
    | {"many_parts": dataclasses.replace(many(is_shared=True), parts=2)}
    | {"many": many(is_shared=False), "many_shared": many(is_shared=True)}
    | {"twice_as_many_segments_of_a_cta": many(is_shared=True)}
    | {"several_blocks_of_a_bin": dataclasses.replace(many(is_shared=True), has_statistics=False)}
)


@pytest.mark.parametrize("name", CASES)
def test_emulated_launch_lists_xla_s_tiles(name, sm90, monkeypatch) -> None:
    """The tiles are XLA's; in another order, where a bin has several numbers of blocks."""
    if name == "twice_as_many_segments_of_a_cta":
        monkeypatch.setattr(launch, "MOST_WORKERS", 1)
    is_ordered = name != "several_blocks_of_a_bin"
    if not is_ordered:
        monkeypatch.setattr(positions, "MOST_BINS", 3)
    with sm90.emulated(0):
        found = tiles.listed(CASES[name])
    assert len(sm90.launches) == 1
    tiles.assert_same_work(CASES[name], found, is_ordered=is_ordered)


def test_emulated_order_of_more_sequences_than_a_launch_lists(sm90, monkeypatch) -> None:
    """XLA lists the tiles; a launch, not XLA's sort, orders the sequences that share keys."""
    monkeypatch.setattr(works, "MOST_WORDS", 0)
    monkeypatch.setattr(counted_order, "MOST_CTAS", 3)
    rng = np.random.default_rng(4)
    cu_q, cu_kv = np.sort(rng.integers(0, 1100, 602)), np.sort(rng.integers(0, 900, 31))
    index = rng.integers(-1, 31, 601)
    case = Case(cu_q, cu_kv, index, 1100, 900, (90, 70), parts=2)
    with sm90.emulated(0):
        found = tiles.listed(case)
    assert [name for name in sm90.launches if "ikbo_user_order" in name] == sm90.launches
    assert len(sm90.launches) == 1
    with mosaic.interpreted(True):
        wanted = by_xla.works(case.offsets, case.settings)
    for ours, xla in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, xla)
