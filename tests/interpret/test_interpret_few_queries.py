"""The kernel for users with few queries, interpreted on a CPU under a race detector."""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import interpreter
import jax
import planted
import problems
import pytest
from indexed_attention import IndexedAttention
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_interpret_attention import check, launched

from ikbo_jax.pallas.few_queries import consumer, gathering, kernel, listing
from ikbo_jax.pallas.few_queries.kernel import few_queries_kernel
from ikbo_jax.pallas.hopper import rings
from ikbo_jax.problems import few_queries as problems_few_queries
from ikbo_jax.problems.few_queries import FewQueriesConfig
from ikbo_jax.problems.hopper import WGMMA_M

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]

#: Blocks of 16 keys, so that few keys are several blocks.
SMALL = FewQueriesConfig(block_kv=16, k_stages=2, v_stages=2)
WIDE = dataclasses.replace(SMALL, tile_rows=128)
SPLIT = dataclasses.replace(SMALL, splits=2, k_stages=3)
TURNS = dataclasses.replace(SMALL, turns=True)
LARGE = dataclasses.replace(SMALL, block_kv=64)
LARGE_WIDE = dataclasses.replace(WIDE, block_kv=64)
WIDE_TURNS = dataclasses.replace(WIDE, turns=True)


@dataclasses.dataclass(frozen=True)
class Case(IndexedAttention):
    """A problem and a config.

    Attributes:
      is_packed: whether candidates are put into the order of users, and results back by the kernel.
      exceeds_cache: whether keys and values count as more than L2 holds, so that a user's row slots
        are neighbours.
      bundle: how many groups of heads one listing serves; None: as the configuration says.
      searches: whether CTAs search the index; otherwise they make a table of it, however short, if
        the index should be sorted.
      is_crowded: whether shared memory has no room for a ring of own tokens.
    """

    q_len: int = 1
    config: FewQueriesConfig = SMALL
    scale: float = 0.125
    is_packed: bool = False
    lists: bool = False
    exceeds_cache: bool = False
    bundle: int | None = None
    searches: bool = False
    is_crowded: bool = False


listed = functools.partial(Case, lists=True)
beyond_cache = functools.partial(Case, exceeds_cache=True)
CASES = {
    # One block, several blocks (odd and even numbers), a partial last block.
    "one_block": Case((0, 0, 1), 5),
    "even_blocks": Case((0, 0, 1), 64),
    "odd_blocks_users_without_candidates": Case((1, 1, 3), 75, users=5, num_sms=3),
    "indices_out_of_range": Case((-5, 0, 1, 2**31 - 1), 20),
    # More rows than an item has.
    "rows_70": Case((0,) * 70 + (1,) * 3, 40),
    "rows_70_wide": Case((0,) * 70 + (1,) * 3, 40, config=WIDE),
    "rows_150_wide_lengths": Case(
        (0,) * 30 + (1,) * 5, 50, q_len=5, config=WIDE, lengths=(37, 20), num_sms=2
    ),
    # Candidates with as many queries as an item has rows, and some of two items.
    "q_len_64": Case((0,) * 3, 40, q_len=64, users=1, num_sms=2),
    "q_len_64_lengths": Case((0, 2, 2), 40, q_len=64, lengths=(33, 9, 0), num_sms=2),
    "q_len_33_gqa_split": Case((0,) * 3, 75, q_len=33, heads=(2, 1), config=SPLIT, num_sms=3),
    "one_user_wide": Case((0,) * 30, 33, q_len=5, users=1, config=WIDE, num_sms=2),
    # Heads that share a tile.
    "gqa_4": Case((0, 0, 0, 1, 1), 40, q_len=7, heads=(8, 2)),
    "gqa_3_wide": Case((0, 0, 0, 1, 1), 40, q_len=7, heads=(3, 1), config=WIDE),
    "gqa_16_h128": Case((0, 1, 1), 40, q_len=2, heads=(16, 1), head_dim=128),
    # Lengths: none, out of range, less than a block.
    "lengths": Case((0, 1, 1, 2, 3), 60, lengths=(0, 1000, -3, 17)),
    # Groups of heads that one CTA takes together.
    "bundles": Case((0, 0, 1, 2, 3, 4, 5), 20, users=8, heads=(4, 2), num_sms=1),
    "bundles_unsorted_lengths": Case(
        (4, 0, 0, 2, 3, 4, 5), 20, heads=(2, 2), lengths=(9, 0, 20, 1, 2, 3, 4, 5)
    ),
    # Turns: odd and even numbers of blocks, items with and without them.
    "turns": Case((0, 0, 1, 2, 3, 4), 75, lengths=(75, 60, 5, 0, 40), config=TURNS),
    "turns_wide": Case((0,) * 70 + (1,) * 3, 75, config=WIDE_TURNS, num_sms=2),
    # Blocks that hold the own tokens of a tile's candidates: users without keys, both consumers'
    # rows, columns of wide heads.
    "large_lengths": Case(
        (0,) * 70 + (1,) * 3 + (2,) * 2 + (3,),
        150,
        lengths=(150, 0, 30, 70),
        config=LARGE,
        num_sms=2,
    ),
    "large_wide_gqa_f16": Case(
        (0,) * 40 + (1,) * 3, 70, q_len=2, heads=(4, 2), dtype="float16", config=LARGE_WIDE
    ),
    "large_h192": Case((0,) * 66 + (1,), 70, head_dim=192, config=LARGE),
    # Parts of the keys.
    "split": Case((0, 0, 1), 75, config=SPLIT),
    "split_lengths_gqa": Case(
        (0, 1, 1, 2), 90, q_len=3, heads=(4, 2), lengths=(0, 90, 20), logit_cap=1.5, config=SPLIT
    ),
    # An index that is not sorted.
    "unsorted": Case((1, 0, 0, 2, 1, 0, 0), 40, users=3, q_len=2, num_sms=2),
    "packed": Case((1, 0, 5, 2, 1, -1, 0), 40, users=3, q_len=5, heads=(6, 2), is_packed=True),
    "packed_split": Case(
        (2, 0) * 20, 90, q_len=3, lengths=(0, 90, 20), config=SPLIT, is_packed=True
    ),
    "falling": Case(tuple(range(39, -1, -1)), 20, users=40),
    # CTAs list their candidates: several tiles of a user, users without candidates, grouped heads,
    # splits, both consumers' rows, indices out of range.
    "listed": listed((1, 0, 0, 2, 1, 0, 0), 40, users=3, q_len=2, num_sms=2),
    # The ranges end before the second block, which was loaded while candidates were listed.
    "listed_ranges_within_a_block": listed((1, 0, 0), 40, has_ranges=True),
    "listed_one_block": listed((2, 0, -3, 2, 9, 0), 9, users=4, num_sms=3),
    "listed_lengths_gqa_h96": listed(
        (3, 0, 1, 1, 3, 0), 60, q_len=3, heads=(8, 2), head_dim=96, lengths=(60, 0, 7, 33)
    ),
    "listed_more_than_a_tile": listed((1, 0, 0) * 50, 40, num_sms=2),
    "listed_wide": listed((1, 0, 0) * 45, 50, config=WIDE, lengths=(37, 20), num_sms=2),
    "listed_split": listed((1, 0, 2, 0), 75, users=4, config=SPLIT, num_sms=3),
    "listed_queries_across_tiles": listed((1, 0) * 30, 20, q_len=3, config=WIDE, heads=(2, 1)),
    # One listing serves several heads: all of them, some, grouped ones; users without candidates,
    # and ones with more than their slots have; parts of the keys, some of them without keys.
    "listed_bundles": listed((1, 0, 5, 2, 1, -3, 0), 40, users=5, q_len=2, heads=(4, 4), bundle=4),
    "listed_bundles_of_half_one_block": listed(
        (2, 0, 1, 1, 0, 2), 9, users=4, heads=(4, 4), num_sms=3, bundle=2
    ),
    "listed_bundles_more_than_a_tile": listed(
        (1, 0, 0) * 50, 40, users=3, heads=(2, 2), num_sms=2, bundle=2
    ),
    "listed_bundles_one_user_has_all": listed(
        (2,) * 290, 20, users=4, heads=(2, 2), num_sms=3, bundle=2
    ),
    "listed_bundles_split_gqa_lengths": listed(
        (3, 1, 1, 0, 3, 1),
        90,
        q_len=3,
        heads=(8, 4),
        lengths=(0, 90, 20, 60),
        config=SPLIT,
        num_sms=3,
        bundle=2,
    ),
    "listed_bundles_wide_lengths": listed(
        (1, 0, 0) * 45, 50, heads=(3, 3), config=WIDE, lengths=(37, 0), bundle=3
    ),
    # Users without candidates have items without blocks.
    "listed_users_without_candidates": listed((4, 1, 1, 4, 6), 75, users=8),
    # A user's row slots are neighbours: fewer and more of them than users, some empty, heads that a
    # CTA takes together, parts of the keys, an index that is not sorted.
    "neighbours": beyond_cache(
        (0,) * 9 + (1,) * 30 + (3,) * 12 + (4,) * 20, 20, users=6, q_len=5, num_sms=3
    ),
    "neighbours_bundles_wide": beyond_cache(
        (0,) * 40 + (2,) * 25, 20, users=4, q_len=8, heads=(4, 2), config=WIDE
    ),
    "neighbours_split_heads": beyond_cache(
        (0,) * 12 + (1,) * 3, 75, users=2, q_len=7, heads=(2, 2), config=SPLIT
    ),
    "neighbours_unsorted": beyond_cache((1, 0, 0, 2, 1, 0, 0) * 5, 40, users=3, q_len=6, num_sms=2),
    # Wide heads: each consumer has two blocks of columns; H = 192 has one that both have.
    "h192_lengths": Case((0, 1, 1, 2, 3), 60, head_dim=192, lengths=(0, 1000, -3, 17)),
    "h256_gqa": Case((0, 0, 0, 1, 1), 40, q_len=7, heads=(8, 2), head_dim=256),
    "h192_split_rows_70": Case((0,) * 70 + (1,) * 3, 90, head_dim=192, config=SPLIT, num_sms=3),
    "h256_listed_split_lengths": listed(
        (1, 0, 2, 0), 75, head_dim=256, lengths=(75, 9, 0, 4), config=SPLIT
    ),
    # Wide heads, 128 rows: each consumer has its rows and all columns; one has items of few rows.
    "h256_wide_rows_70_lengths": Case(
        (0,) * 70 + (1,) * 3 + (2,) * 9,
        75,
        head_dim=256,
        lengths=(75, 20, 0, 9),
        config=WIDE,
        num_sms=2,
    ),
    "h192_wide_gqa_one_slot": Case(
        (0,) * 12 + (1,) * 3,
        60,
        q_len=7,
        heads=(4, 2),
        head_dim=192,
        config=dataclasses.replace(WIDE_TURNS, q_slots=1),
        num_sms=2,
    ),
    # A negative scale, f16, a padded width.
    "negative_scale_f16_h96": Case(
        (0, 1, 1), 40, q_len=3, head_dim=96, scale=-0.2, dtype="float16", lengths=(3, 40)
    ),
}


#: Cases whose candidates have ranges of keys, too.
RANGED = (
    *("one_block", "even_blocks", "indices_out_of_range", "rows_150_wide_lengths"),
    *("q_len_33_gqa_split", "gqa_3_wide", "lengths", "bundles", "turns_wide", "split_lengths_gqa"),
    *("packed_split", "listed_lengths_gqa_h96", "listed_wide", "listed_bundles_split_gqa_lengths"),
    *("neighbours", "h192_lengths", "h256_listed_split_lengths", "h256_wide_rows_70_lengths"),
    *("negative_scale_f16_h96", "split_lengths_gqa"),
)
CASES |= {f"{name}_ranges": dataclasses.replace(CASES[name], has_ranges=True) for name in RANGED}
#: Cases whose candidates have an own token, too.
OWN = (
    *("one_block", "rows_150_wide_lengths_ranges", "q_len_33_gqa_split", "gqa_3_wide", "lengths"),
    *("bundles", "packed_split_ranges", "split_lengths_gqa_ranges", "turns"),
    *("h192_lengths", "h256_gqa", "negative_scale_f16_h96_ranges", "turns_wide"),
    *("large_lengths", "large_wide_gqa_f16", "large_h192"),
)


def with_own(case: Case) -> Case:
    """Adds own tokens, and makes blocks so large that they hold the tokens of a tile."""
    group = problems_few_queries.head_group(*case.heads)
    q_len = max(case.q_len, 1 if case.head_dim <= 128 else 3)  # blocks of wide heads are small
    sizes = (dataclasses.replace(case.config, block_kv=size) for size in (16, 32, 64, 128))
    config = next(x for x in sizes if x.own_stages(q_len, group))
    larger = max(config, case.config, key=lambda x: x.block_kv)
    return dataclasses.replace(case, has_own=True, q_len=q_len, config=larger, logit_cap=None)


CASES |= {f"{name}_own": with_own(CASES[name]) for name in OWN}
#: Cases whose own tokens are in stages of values, where items of 128 rows always have them.
CASES |= {
    f"{name}_own_crowded": dataclasses.replace(CASES[f"{name}_own"], is_crowded=True)
    for name in (*OWN[:4], *OWN[5:8], *OWN[-4:])
    if CASES[name].config.tile_rows == WGMMA_M
}
#: Cases whose keys and values are in pages of one, two or three blocks.
CASES |= {
    f"{name}_pages_{page}": dataclasses.replace(CASES[name], keys=keys, page=page)
    for name, keys, page in (
        ("even_blocks", 64, 16),
        ("odd_blocks_users_without_candidates", 96, 32),
        ("rows_150_wide_lengths_ranges_own", 64, 32),
        ("listed_lengths_gqa_h96", 48, 16),
        ("split_lengths_gqa_ranges_own", 96, 32),
        ("h256_listed_split_lengths", 96, 32),
        ("split_lengths_gqa", 96, 32),
    )
}
CASES |= {
    f"{name}_searched": dataclasses.replace(CASES[name], searches=True)
    for name in (
        "odd_blocks_users_without_candidates",
        "indices_out_of_range",
        "rows_150_wide_lengths",
        "bundles_unsorted_lengths",
        "split_lengths_gqa",
        "unsorted",
        "falling",
        "lengths_ranges",
        "neighbours_bundles_wide",
        "neighbours_unsorted",
        "h256_wide_rows_70_lengths",
    )
}


def own_among_values(
    config: FewQueriesConfig, own: Any, *sizes: int, **options: Any
) -> tuple[FewQueriesConfig, Any]:
    """Declares memory as `shared_with_own` does without room for a ring of own tokens."""
    return config, config.shared(*sizes, own=own, **options)


def interpret(inputs: problems.AttentionInputs, case: Case) -> tuple[jax.Array, jax.Array]:
    run = functools.partial(few_queries_kernel, key_value_ranges=case.ranges, lists=case.lists)
    cached = 0 if case.exceeds_cache else kernel.CACHE_BYTES
    least = problems_few_queries.MOST_TABLED if case.searches else 1
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(problems_few_queries, "LEAST_TABLED", least))
        patches.enter_context(mock.patch.object(kernel, "CACHE_BYTES", cached))
        if case.is_crowded:
            patch = mock.patch.object(FewQueriesConfig, "shared_with_own", own_among_values)
            patches.enter_context(patch)
        if case.bundle is not None:
            plan = case.config.listings(case.problem, case.num_sms)._replace(bundle=case.bundle)
            patch = mock.patch.object(FewQueriesConfig, "listings", return_value=plan)
            patches.enter_context(patch)
        return launched(run, inputs, case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_is_right_and_free_of_races(name, launches) -> None:
    check(CASES[name], interpret)
    launches.assert_no_races(1)


@pytest.mark.parametrize(("bundle", "listings"), [(1, 20), (2, 10), (4, 5)])
def test_a_bundle_is_listed_once(bundle, listings, monkeypatch, launches) -> None:
    """Users have four heads, and the last one has the candidates of three listings."""
    find, found = listing.find, []

    def counted(ctx: Any, user: Any, rank: Any, head: Any = None) -> None:
        jax.debug.callback(lambda *words: found.append(tuple(map(int, words))), user, rank)
        find(ctx, user, rank, head)

    monkeypatch.setattr(listing, "find", counted)
    case = Case((0, 1, *(2,) * 130), 20, users=3, heads=(4, 4), lists=True, bundle=bundle)
    check(case, interpret)
    launches.assert_no_races(1)
    jax.effects_barrier()
    assert len(found) == 2 * listings  # both consumers list


# The checks themselves: each of them must be able to fail.


def assert_found(case: Case, launches: interpreter.Launches) -> None:
    planted.assert_found(lambda: interpret(case.inputs(), case), launches)


def test_interpreted_sums_taken_too_early_are_found(monkeypatch, launches) -> None:
    """A consumer adds the other one's part without waiting for it."""
    merged = consumer._merged

    def without_wait(*args: Any) -> Any:
        with monkeypatch.context() as within:
            within.setattr(plgpu, "barrier_wait", lambda barrier: None)
            return merged(*args)

    monkeypatch.setattr(consumer, "_merged", without_wait)
    assert_found(Case((0, 0), 16 * 4), launches)


def test_interpreted_queries_gathered_into_slots_that_are_read_are_found(monkeypatch, launches):
    """Queries are gathered while the consumers multiply those of an item before.

    The emulator finds slots that count as filled before their queries are gathered.
    """
    gather, load = gathering.gather, gathering._load_one_by_one
    await_reuse, waiting = rings.Ring.await_reuse, []

    def late(*args: Any) -> None:
        load(*args)
        await_reuse(*waiting.pop())

    def with_late_waits(ctx: Any) -> None:
        with monkeypatch.context() as within:
            within.setattr(rings.Ring, "await_reuse", lambda *args: waiting.append(args))
            within.setattr(gathering, "_load_one_by_one", late)
            gather(ctx)

    monkeypatch.setattr(gathering, "gather", with_late_waits)
    case = Case((1, 0, 1) * 45, 32, heads=(4, 4), config=WIDE, lists=True, bundle=4)
    assert_found(case, launches)
