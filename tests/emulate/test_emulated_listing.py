"""How the kernel for few queries finds users' candidates in an index, by its PTX on a CPU.

Two consumers list a user's candidates, or make a table of all users; a warp finds a user's range.
"""

from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import listing, rows, user_table
from ikbo_jax.pallas.few_queries.context import Context, Operands, Shape
from ikbo_jax.pallas.hopper import mosaic, turns
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.problems import memory
from ikbo_jax.problems.few_queries import (
    LISTED,
    LISTING_WARPS,
    MOST_LISTED,
    MOST_TABLE_ROWS,
    MOST_TABLED,
    UserTable,
)
from ikbo_jax.problems.hopper import NUM_CONSUMERS

WORDS = LISTED + LISTING_WARPS
KV_LEN, Q_LEN, ITEM_ROWS = 100, 3, 64


def run(consume, given, out, shared, shape=None) -> np.ndarray:
    """What consumers store in an array of int32 [CTAs, ...], or [...] by one CTA.

    `given` are an index [B], and [CTAs, 2]: a user, and the rank of the first candidate of a list;
    or [U]: lengths of a table.
    """

    def context(shared: Any, given: Any, outputs: Any) -> WarpgroupContext:
        if shape is None:
            return WarpgroupContext(None, None, shared, given, outputs)
        operands = Operands(None, None, None, *given, given[1])
        return Context(shape, None, shared, operands, outputs)

    (found,) = launch(
        Roles(context, None, consume, warpgroups=1 if shape is None else NUM_CONSUMERS),
        tuple(jnp.asarray(x, jnp.int32) for x in given),
        jax.ShapeDtypeStruct(out, jnp.int32),
        shared,
        dtype=jnp.int32,
        name="search",
        workers=out[0] if len(out) > 1 else 1,
    )
    return np.asarray(found)


def listings(index: np.ndarray, users: int, wanted: list[tuple[int, int]], most: int) -> np.ndarray:
    """The list, and how many candidates each warp found, [CTAs, WORDS]; -1 where none is."""
    shape = Shape(
        *(len(index), 1, 1, 1, 1, users, 64),
        *(1, 64, most, users, 1, 1, 1.0, len(wanted)),
        listed=most,
    )

    def consume(ctx: Context) -> None:
        ctx = ctx.as_consumer()

        @pl.when(ctx.consumer == 0)
        def _() -> None:
            @pl.loop(0, LISTED)
            def _(i: Any) -> None:
                ctx.shared.listing[i] = jnp.int32(-1)

        plgpu.commit_smem()
        user, rank = (ctx.operands.targets[ctx.worker, i] for i in range(2))
        listing.find(ctx, user, rank)
        plgpu.barrier_wait(ctx.shared.listed.at[0])  # also for the other consumer's part

        @pl.when(ctx.consumer == 0)
        def _() -> None:
            @pl.loop(0, WORDS)
            def _(i: Any) -> None:
                ctx.outputs[ctx.worker, i] = ctx.shared.listing[i]

    barriers = memory.Barriers(2, NUM_CONSUMERS)
    shared = memory.shared(listing=memory.Words((WORDS,)), listed=barriers)
    return run(consume, (index, wanted), (len(wanted), WORDS), shared, shape)


def drawn(batch: int, users: int) -> np.ndarray:
    """Users, some of them out of range, and one with many candidates next to each other.

    They are more than all threads look at together in the largest index alone: each 64 of them need
    a CTA.
    """
    index = np.random.default_rng(batch).integers(-1, users + 2, batch)
    end = batch // 2 if batch == MOST_LISTED else min(batch // 2, batch // 3 + 200)
    index[batch // 3 : end] = 1
    if batch > 2:
        index[[0, -1]] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return index


#: Candidates fewer than a part of four, than one part of each thread, and more; with and without
#: some that fill no part; with 64 elements of a thread, and 65.
BATCHES = [1, 3, 4, 7, 128, 1023, 1024, 1027, 4836, 10985, MOST_LISTED - 1, MOST_LISTED]


@pytest.mark.parametrize("batch", BATCHES)
def test_emulated_lists_have_every_candidate_of_a_user_once(batch, sm90) -> None:
    users, most = (3, LISTED) if batch < 100 else (60, 64)
    index = drawn(batch, users)
    clamped = np.clip(index, 0, users - 1)
    wanted = [
        (user, rank)
        for user in sorted({0, 1, 2, users - 1})
        for rank in range(0, np.count_nonzero(clamped == user) + most, most)
    ]
    with sm90.emulated(0):
        found = listings(index, users, wanted, most)
    listed: dict[int, list[int]] = {user: [] for user, _ in wanted}
    for (user, rank), words in zip(wanted, found, strict=True):
        total = np.count_nonzero(clamped == user)
        assert words[LISTED:].sum() == total
        count = min(max(total - rank, 0), most)
        assert (words[count:LISTED] == -1).all()
        listed[user] += words[:count].tolist()
    for user, candidates in listed.items():
        np.testing.assert_array_equal(np.sort(candidates), np.flatnonzero(clamped == user))


def filled(index: np.ndarray, lengths: np.ndarray) -> tuple[UserTable, np.ndarray, np.ndarray]:
    """The table of a CTA: where everything is, its words, and (slot, has rows) of further slots."""
    batch, users = len(index), len(lengths)
    table = UserTable(users, batch * Q_LEN // ITEM_ROWS)
    shape = Shape(
        *(batch, Q_LEN, 1, 1, KV_LEN, users, 64),
        *(1, 64, ITEM_ROWS, users + table.extra, 1, 1, 1.0, 1),
        table=table,
    )

    places = table.extra if shape.packs_slots else 0

    def consume(ctx: Context) -> None:
        ctx = ctx.as_consumer()
        user_table.fill(ctx)
        mosaic.named_barrier("sync", jnp.int32(listing.BARRIER), turns.CONSUMER_THREADS)

        @pl.when(ctx.consumer == 0)
        def _() -> None:
            plgpu.barrier_wait(ctx.shared.tabled.at[0])

            @pl.loop(0, table.words)
            def _(i: Any) -> None:
                ctx.outputs[i] = ctx.shared.table[i]

            @pl.loop(0, places)
            def _(place: Any) -> None:
                slot, has_rows = user_table.packed_slot(ctx, place)
                ctx.outputs[table.words + 2 * place] = slot
                ctx.outputs[table.words + 2 * place + 1] = has_rows.astype(jnp.int32)

    barriers = memory.Barriers(NUM_CONSUMERS, NUM_CONSUMERS)
    shared = memory.shared(table=memory.Words((table.words,)), tabled=barriers)
    words = run(consume, (index, lengths), (table.words + 2 * places,), shared, shape)
    return table, words[: table.words], words[table.words :].reshape(-1, 2)


#: Likewise.
TABLED = [1, 3, 4, 7, 513, 1023, 1024, 1027, 4836, MOST_TABLED - 1, MOST_TABLED]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("users", [2, 5, 300, MOST_TABLE_ROWS])
@pytest.mark.parametrize("batch", TABLED)
def test_the_table_has_every_user_and_every_slot(batch, users, sm90) -> None:
    rng = np.random.default_rng(batch + users)
    index = np.sort(rng.choice(np.unique(rng.integers(-2, users + 3, users)), batch))
    lengths = rng.integers(-5, KV_LEN + 20, users)
    with sm90.emulated(0):
        table, words, places = filled(index, lengths)
    clamped = np.clip(index, 0, users - 1)
    counts = np.bincount(clamped, minlength=users)
    halves = words.view(np.uint16)
    begins, ends = halves[: 2 * users].reshape(-1, 2).T.astype(int)
    np.testing.assert_array_equal(ends - begins, counts)
    np.testing.assert_array_equal(begins[counts > 0], np.searchsorted(clamped, np.unique(clamped)))
    np.testing.assert_array_equal(halves[2 * table.lengths :][:users], np.clip(lengths, 0, KV_LEN))
    last = ((np.arange(table.extra) + 1) * ITEM_ROWS - 1) // Q_LEN
    np.testing.assert_array_equal(halves[2 * table.owners :][: table.extra], clamped[last])
    assert not words[table.faults :].any()
    # Further slots with rows come first, and are as many as the rows need.
    needed = np.maximum(-(-counts * Q_LEN // ITEM_ROWS) - 1, 0).sum()
    slots, has_rows = places.T
    if len(places):
        np.testing.assert_array_equal(has_rows, np.arange(len(places)) < needed)
        further = slots[:needed] - users
        owners = clamped[last[further]]
        tile = 1 + further - begins[owners] * Q_LEN // ITEM_ROWS
        assert (np.diff(further) > 0).all()
        assert (begins[owners] * Q_LEN + tile * ITEM_ROWS < ends[owners] * Q_LEN).all()


@pytest.mark.parametrize("at", [1, 3, 4, 512, 1023, 1024, 1026])
@pytest.mark.parametrize("batch", [1027, 4839])  # code for every part, and a loop
def test_one_candidate_out_of_order_is_found(batch: int, at: int, sm90: emulator.Emulator) -> None:
    index = np.full(batch, 7)
    index[:at] = 8
    with sm90.emulated(0):
        table, words, _ = filled(index, np.full(9, KV_LEN))
    assert words[table.faults :].sum() == 1


def ranges(index: np.ndarray, users: int) -> np.ndarray:
    """[U, 2]: (first candidate, end) of each user, by a CTA of its own."""

    def consume(ctx: WarpgroupContext) -> None:
        found = rows.candidates(ctx.operands[0], ctx.worker, users)
        for i in range(2):
            ctx.outputs[ctx.worker, i] = found[i]

    return run(consume, (index, [0]), (users, 2), memory.shared(unused=memory.Words((128,))))


#: Less than a lane each, one round of loads, and a search in two and three rounds.
RANGED = [1, 31, 32, 33, 100, rows.MOST_COUNTED, rows.MOST_COUNTED + 1, 2000, 16385]


@pytest.mark.parametrize("batch", RANGED)
def test_emulated_range_of_every_user(batch: int, sm90: emulator.Emulator) -> None:
    """Ranges of an unsorted index have every candidate once, too.

    There are users without candidates, and some out of range at either end.
    """
    users = 7
    index = np.sort(np.random.default_rng(batch).integers(0, users - 1, batch))
    index[index == 2] = 3
    index[: batch // 9], index[batch - batch // 9 :] = -(2**31), 2**31 - 1
    with sm90.emulated(0):
        found = ranges(index, users)
        unsorted = ranges(np.random.default_rng(batch).permutation(index), users)
    bounds = np.searchsorted(np.clip(index, 0, users - 1), np.arange(users + 1))
    np.testing.assert_array_equal(found, np.stack([bounds[:-1], bounds[1:]], 1))
    assert unsorted[0, 0] == 0
    assert unsorted[-1, 1] == batch
    np.testing.assert_array_equal(unsorted[1:, 0], unsorted[:-1, 1])
