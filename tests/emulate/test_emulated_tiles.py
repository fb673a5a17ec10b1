"""The kernel that lists tiles, by its PTX on a CPU."""

from typing import Any

import emulator
import jax.numpy as jnp
import numpy as np
import pytest
import test_gdpa_tiles as tiles

from ikbo_jax.pallas.worklist import by_xla, lists, positions
from ikbo_jax.pallas.worklist import tiles as launch
from ikbo_jax.pallas.worklist.lists import Offsets


def many(bound: int | None) -> tuple[Any, ...]:
    """More sequences than threads, in several CTAs, some of them empty or of several tiles."""
    rng = np.random.default_rng(0)
    offsets = [np.sort(rng.integers(0, 4000, 301)) for _ in range(2)]
    return (*offsets, None, 4100, 4000, bound, bound)


def batches() -> tuple[Any, ...]:
    """CTAs whose own segments begin within a turn of the loop over all, and bins without copies."""
    rng = np.random.default_rng(1)
    cu_q = np.sort(rng.integers(0, 9000, 2401))
    cu_kv = np.sort(rng.integers(0, 9000, 2400))
    return cu_q, np.append(cu_kv, 12000), None, 9000, 12000, None, None


def shared(bound: int | None) -> tuple[Any, ...]:
    """Sequences whose groups with the same keys span threads, a few of one sequence among them."""
    cu_q, cu_kv, *rest = many(bound)
    index = np.repeat([7, 0, 5, 299, 5, 6, 0], [120, 1, 60, 1, 1, 90, 27])
    return cu_q, cu_kv, index, *rest[1:]


CASES = tiles.KERNEL_CASES | {
    "many": (many(None), False),
    "many_bounded": (many(20), False),
    "many_merged": (shared(None), False),
    "many_merged_bounded": (shared(20), False),
    "many_batches": (batches(), False),
    # CTAs of twice as many segments.
    "twice_bounded": (many(20), False),
    "twice_merged_bounded": (shared(20), False),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_kernel_lists_the_tiles(name, sm90, monkeypatch) -> None:
    problem, is_broadcast = CASES[name]
    if name.startswith("twice"):
        monkeypatch.setattr(launch, "MOST_WORKERS", 1)
    size = 16 if name == "many_batches" else 8
    with sm90.emulated(0):
        tiles.check(problem, launch.query_tiles, size, broadcast=is_broadcast)
    assert sm90.launches


@pytest.mark.parametrize("draw", [many, shared])
def test_emulated_list_is_xla_s(draw: Any, sm90: emulator.Emulator) -> None:
    """In the same order, also of sequences with equally many blocks."""
    cu_q, cu_kv, index, *_ = draw(None)
    arrays = [None if x is None else jnp.asarray(x, jnp.int32) for x in (cu_q, cu_kv, index)]
    offsets = Offsets(*arrays, 4100, 4000, max_seqlen_q=20)
    expected = by_xla.query_tiles(offsets, size=16, unit=16)
    with sm90.emulated(0):
        found = launch.query_tiles(offsets, size=16, unit=16)
    (words, with_keys), (xla_words, xla_with_keys) = tiles.read(found), tiles.read(expected)
    assert with_keys == xla_with_keys
    assert words[:with_keys] == xla_words[:with_keys]
    assert sorted(words) == sorted(xla_words)


def test_bins_of_several_numbers_of_blocks(sm90, monkeypatch) -> None:
    """Every row has its tile, tiles with keys come first, and lengths fall but within a bin."""
    monkeypatch.setattr(positions, "MOST_BINS", 15)
    rng = np.random.default_rng(2)
    starts = jnp.asarray(np.sort(rng.integers(0, 3000, 301)), jnp.int32)
    offsets = Offsets(starts, starts, None, 3000, 3000)
    with sm90.emulated(0):
        found = launch.query_tiles(offsets, size=16)
    words, with_keys = tiles.read(found)
    tiles.check_cover(words, 16, 3000)
    expected = by_xla.query_tiles(offsets, size=16)
    assert sorted(words) == sorted(tiles.read(expected)[0])
    lengths = np.asarray([w[lists.KV_LENGTH] for w in words])
    assert lengths[:with_keys].all()
    assert not lengths[with_keys:].any()
    width = 1
    while -(-lengths.max() // width) > 14:
        width *= 2
    assert width > 1
    assert (np.diff(-(-lengths // width)) <= 0).all()
