"""The launches that list tiles of gdpa, with masks and of its gradient, by their PTX on a CPU."""

import dataclasses
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gdpa_backward_tiles as gradient_tiles
import test_gdpa_tiles as tiles
from test_gdpa_backward_tiles import Case

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist import by_xla, counted_order, lists, positions, works
from ikbo_jax.pallas.worklist import tiles as launch
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.masked import masked_tiles
from ikbo_jax.reference.hstu import Rule


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


# With masks.

LENGTHS = (300, 1, 0, 129, 64, 700, 128, 65)
TARGETS, CONTEXTUAL = (30, 1, 0, 200, 64, 250, -3, 7), (3, 1, 0, 20, 0, 4, 9, 7)
UNIT = 128


def integers(values: Any) -> Any:
    return jnp.asarray(values, jnp.int32)


def masked_offsets(rule: Rule, **rest: Any) -> Offsets:
    """Sequences of keys, and as many queries."""
    cu_seqlens = integers(np.concatenate([[0], np.cumsum(LENGTHS)]))
    rows, sequences = int(cu_seqlens[-1]), (cu_seqlens, cu_seqlens, None)
    if rule.has_targets:
        rest["num_targets"] = integers(TARGETS)
    if rule.contextual is None:
        rest["contextual"] = integers(CONTEXTUAL)
    given = Offsets(*sequences, rows, rows, rule=rule)
    return given._replace(**rest)


MASKED = {
    "causal": masked_offsets(Rule()),
    "window": masked_offsets(Rule(window=100)),
    "tail": masked_offsets(Rule(None, True, 100, 5)),
    "groups_both_ways": masked_offsets(Rule(4, True, 50, 0, 3, causal=False)),
    "bounded": masked_offsets(Rule(None, True, 30, 5, 2), max_seqlen_q=280, max_seqlen_kv=290),
    "pooled": masked_offsets(Rule(2, True, 30), cu_seqlens_q=None, q_rows=150),
    # Queries after a prefix, before the first key, and of sequences that share keys.
    "shared": masked_offsets(
        Rule(window=30),
        cu_seqlens_q=integers([3, 203, 253, 253, 400, 410]),
        q_to_kv=integers([5, 5, 0, 3, 4]),
        q_rows=420,
    ),
}
#: Cases with several groups of keys; the last group of "window" is not whole.
KEYS_PER_GROUP = {"window": 300, "shared": 500, "tail": 250}


def rank(words: Any, keys_per_group: int | None, early: int | None) -> Any:
    """Tiles without keys come last, and before them the last group's; early ones come first."""
    blocks = -(-words[:, lists.KV_LENGTH] // UNIT)
    groups = words[:, lists.KV_START] // (keys_per_group or 10**6)
    groups = np.where(words[:, lists.KV_LENGTH] > (early or 10**9), 0, groups)
    return np.where(blocks > 0, blocks - 100 * groups, -(10**6))


@pytest.mark.parametrize("name", MASKED)
def test_emulated_launch_lists_xla_s_masked_tiles(name, sm90, monkeypatch) -> None:
    """In another order among a group's tiles of equally many blocks."""
    monkeypatch.setattr(lists, "EARLY_KEYS", 256)
    given, keys_per_group = MASKED[name], KEYS_PER_GROUP.get(name)
    sizes = {"size": 128, "unit": UNIT, "keys_per_group": keys_per_group}
    early = lists.early_keys(given.rule)
    wanted = by_xla.masked_tiles(given, **sizes)
    with sm90.emulated(0):
        found = masked_tiles(given, **sizes)
    assert len(sm90.launches) == 1
    np.testing.assert_array_equal(found.counts, wanted.counts)
    with_keys, tiles = np.asarray(wanted.counts)
    ours, xla = (np.array(x.words)[:tiles] for x in (found, wanted))
    assert (np.diff(rank(ours, keys_per_group, early)) <= 0).all()
    np.testing.assert_array_equal(*(rank(x, keys_per_group, early) for x in (ours, xla)))
    assert (ours[:with_keys, lists.KV_LENGTH] > 0).all()
    for listed in ours, xla:
        # Words of the mask of a tile without keys are not read; the launch clamps numbers.
        listed[with_keys:, lists.TILE_WORDS - 2 :] = 0
        listed[:, lists.TILE_WORDS + lists.TARGETS] = 0
    np.testing.assert_array_equal(*(x[np.lexsort(x.T[::-1])] for x in (ours, xla)))


# Of the gradient.


def many_of_gradient(*, is_shared: bool) -> Case:
    """More sequences than a CTA lists, some of them empty, or longer than the bound."""
    rng = np.random.default_rng(3)
    cu_q, cu_kv = np.sort(rng.integers(0, 9000, 301)), np.sort(rng.integers(0, 9000, 301))
    index = (rng.integers(0, 300, 300) // 40 * 3).tolist() if is_shared else None
    return Case(cu_q, cu_kv, index, 9100, 9000, (90, 70), 2, has_statistics=True)


MANY_SHARED = many_of_gradient(is_shared=True)
GRADIENTS = gradient_tiles.CASES | {
    "many": many_of_gradient(is_shared=False),
    "many_shared": MANY_SHARED,
    "many_parts": dataclasses.replace(MANY_SHARED, parts=2),
    "twice_as_many_segments_of_a_cta": MANY_SHARED,
    "several_blocks_of_a_bin": dataclasses.replace(MANY_SHARED, has_statistics=False),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_emulated_launch_lists_xla_s_tiles(name, sm90, monkeypatch) -> None:
    """The tiles are XLA's; in another order, where a bin has several numbers of blocks."""
    if name == "twice_as_many_segments_of_a_cta":
        monkeypatch.setattr(launch, "MOST_WORKERS", 1)
    is_ordered = name != "several_blocks_of_a_bin"
    if not is_ordered:
        monkeypatch.setattr(positions, "MOST_BINS", 3)
    with sm90.emulated(0):
        found = gradient_tiles.listed(GRADIENTS[name])
    assert len(sm90.launches) == 1
    gradient_tiles.assert_same_work(GRADIENTS[name], found, is_ordered=is_ordered)


def test_emulated_order_of_more_sequences_than_a_launch_lists(sm90, monkeypatch) -> None:
    """XLA lists the tiles; a launch, not XLA's sort, orders the sequences that share keys."""
    monkeypatch.setattr(works, "MOST_WORDS", 0)
    monkeypatch.setattr(counted_order, "MOST_CTAS", 3)
    rng = np.random.default_rng(4)
    cu_q, cu_kv = np.sort(rng.integers(0, 1100, 602)), np.sort(rng.integers(0, 900, 31))
    index = rng.integers(-1, 31, 601)
    case = Case(cu_q, cu_kv, index, 1100, 900, (90, 70), parts=2)
    with sm90.emulated(0):
        found = gradient_tiles.listed(case)
    assert [name for name in sm90.launches if "ikbo_user_order" in name] == sm90.launches
    assert len(sm90.launches) == 1
    with mosaic.interpreted(True):
        wanted = by_xla.works(case.offsets, case.settings)
    for ours, xla in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, xla)
