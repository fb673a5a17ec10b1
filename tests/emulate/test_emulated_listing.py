"""The list of a user's candidates that two consumers make of an index, by its PTX on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import listing
from ikbo_jax.pallas.few_queries.context import Context, Operands, Shape
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.problems import memory
from ikbo_jax.problems.few_queries import LISTED, LISTING_WARPS, MOST_LISTED
from ikbo_jax.problems.hopper import NUM_CONSUMERS

WORDS = LISTED + LISTING_WARPS


class Shared(NamedTuple):
    listing: Any
    listed: Any


class Given(NamedTuple):
    index: Any  # [B] int32
    wanted: Any  # [CTAs, 2] int32: a user, and the rank of the first candidate


def listings(index: np.ndarray, users: int, wanted: list[tuple[int, int]], most: int) -> np.ndarray:
    """The list, and how many candidates each warp found, [CTAs, WORDS]; -1 where none is."""
    shape = Shape(
        *(len(index), 1, 1, 1, 1, users, 64),
        *(1, 64, most, users, 1, 1, 1.0, len(wanted)),
        listed=most,
    )

    def context(shared: Any, given: Given, outputs: Any, interpret: bool) -> Context:
        operands = Operands(None, None, None, given.index, None, given.wanted)
        return Context(shape, None, shared, operands, outputs, interpret)

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

    (found,) = launch(
        Roles(context, None, consume, warpgroups=NUM_CONSUMERS),
        Given(jnp.asarray(index, jnp.int32), jnp.asarray(wanted, jnp.int32)),
        jax.ShapeDtypeStruct((len(wanted), WORDS), jnp.int32),
        Shared(memory.Words((WORDS,)), memory.Barriers(2, NUM_CONSUMERS)),
        dtype=jnp.int32,
        name="listing",
        workers=len(wanted),
    )
    return np.asarray(found)


def drawn(batch: int, users: int) -> np.ndarray:
    """Users, some of them out of range, and one with many candidates next to each other."""
    index = np.random.default_rng(batch).integers(-1, users + 2, batch)
    index[batch // 3 : batch // 2] = 1
    if batch > 2:
        index[[0, -1]] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return index


#: Candidates fewer than a part of four, than one part of each thread, and more; with and without
#: some that fill no part; with 64 elements of a thread, and 65.
BATCHES = [1, 3, 4, 7, 128, 1023, 1024, 1027, 4836, 10985, MOST_LISTED - 1, MOST_LISTED]


@pytest.mark.parametrize("batch", BATCHES)
def test_emulated_lists_have_every_candidate_of_a_user_once(
    batch: int, sm90: emulator.Emulator
) -> None:
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
