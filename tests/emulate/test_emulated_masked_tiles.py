"""The launch that lists masked tiles, by its PTX on a CPU: its words are XLA's."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.worklist import by_xla, lists
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.masked import masked_tiles
from ikbo_jax.reference.hstu import Rule

LENGTHS = (300, 1, 0, 129, 64, 700, 128, 65)
TARGETS, CONTEXTUAL = (30, 1, 0, 200, 64, 250, -3, 7), (3, 1, 0, 20, 0, 4, 9, 7)
UNIT = 128


def integers(values: Any) -> Any:
    return jnp.asarray(values, jnp.int32)


def offsets(rule: Rule, **rest: Any) -> Offsets:
    """Sequences of keys, and as many queries."""
    cu_seqlens = integers(np.concatenate([[0], np.cumsum(LENGTHS)]))
    rows, sequences = int(cu_seqlens[-1]), (cu_seqlens, cu_seqlens, None)
    if rule.has_targets:
        rest["num_targets"] = integers(TARGETS)
    if rule.contextual is None:
        rest["contextual"] = integers(CONTEXTUAL)
    given = Offsets(*sequences, rows, rows, rule=rule)
    return given._replace(**rest)


CASES = {
    "causal": offsets(Rule()),
    "window": offsets(Rule(window=100)),
    "tail": offsets(Rule(None, True, 100, 5)),
    "groups_both_ways": offsets(Rule(4, True, 50, 0, 3, causal=False)),
    "bounded": offsets(Rule(None, True, 30, 5, 2), max_seqlen_q=280, max_seqlen_kv=290),
    "pooled": offsets(Rule(2, True, 30), cu_seqlens_q=None, q_rows=150),
    # Queries after a prefix, before the first key, and of sequences that share keys.
    "shared": offsets(
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


@pytest.mark.parametrize("name", CASES)
def test_emulated_launch_lists_xla_s_masked_tiles(name, sm90, monkeypatch) -> None:
    """In another order among a group's tiles of equally many blocks."""
    monkeypatch.setattr(lists, "EARLY_KEYS", 256)
    given, keys_per_group = CASES[name], KEYS_PER_GROUP.get(name)
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
