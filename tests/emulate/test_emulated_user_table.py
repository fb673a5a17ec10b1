"""The table of users' candidates that two consumers make of an index, by its PTX on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.few_queries import listing, user_table
from ikbo_jax.pallas.few_queries.context import Context, Operands, Shape
from ikbo_jax.pallas.hopper import mosaic, turns
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.problems import memory
from ikbo_jax.problems.few_queries import MOST_TABLE_ROWS, MOST_TABLED, UserTable
from ikbo_jax.problems.hopper import NUM_CONSUMERS

KV_LEN, Q_LEN, ITEM_ROWS = 100, 3, 64


class Shared(NamedTuple):
    table: Any
    tabled: Any


class Given(NamedTuple):
    index: Any  # [B] int32
    lengths: Any  # [U] int32


def filled(index: np.ndarray, lengths: np.ndarray) -> tuple[UserTable, np.ndarray]:
    """The table of a CTA: where everything is, and its words."""
    batch, users = len(index), len(lengths)
    table = UserTable(users, batch * Q_LEN // ITEM_ROWS)
    shape = Shape(
        *(batch, Q_LEN, 1, 1, KV_LEN, users, 64),
        *(1, 64, ITEM_ROWS, users + table.extra, 1, 1, 1.0, 1),
        table=table,
    )

    def context(shared: Any, given: Given, outputs: Any, interpret: bool) -> Context:
        operands = Operands(None, None, None, given.index, given.lengths, None)
        return Context(shape, None, shared, operands, outputs, interpret)

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

    (words,) = launch(
        Roles(context, None, consume, warpgroups=NUM_CONSUMERS),
        Given(jnp.asarray(index, jnp.int32), jnp.asarray(lengths, jnp.int32)),
        jax.ShapeDtypeStruct((table.words,), jnp.int32),
        Shared(memory.Words((table.words,)), memory.Barriers(NUM_CONSUMERS, NUM_CONSUMERS)),
        dtype=jnp.int32,
        name="user_table",
        workers=1,
    )
    return table, np.asarray(words)


#: Candidates fewer than a part of four, than one part of each thread, and more; with and without
#: some that fill no part.
BATCHES = [1, 3, 4, 7, 513, 1023, 1024, 1027, 4836, MOST_TABLED - 1, MOST_TABLED]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("users", [2, 5, 300, MOST_TABLE_ROWS])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_table_has_every_user_and_every_slot(
    batch: int, users: int, sm90: emulator.Emulator
) -> None:
    rng = np.random.default_rng(batch + users)
    index = np.sort(rng.choice(np.unique(rng.integers(-2, users + 3, users)), batch))
    lengths = rng.integers(-5, KV_LEN + 20, users)
    with sm90.emulated(0):
        table, words = filled(index, lengths)
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


@pytest.mark.parametrize("at", [1, 3, 4, 512, 1023, 1024, 1026])
@pytest.mark.parametrize("batch", [1027, 4839])  # code for every part, and a loop
def test_one_candidate_out_of_order_is_found(batch: int, at: int, sm90: emulator.Emulator) -> None:
    index = np.full(batch, 7)
    index[:at] = 8
    with sm90.emulated(0):
        table, words = filled(index, np.full(9, KV_LEN))
    assert words[table.faults :].sum() == 1
