"""The range of a user in an index, which a warp finds, by its PTX on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.few_queries import rows
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.problems import memory


class Shared(NamedTuple):
    unused: Any


class Given(NamedTuple):
    index: Any  # [B] int32


def ranges(index: np.ndarray, users: int) -> np.ndarray:
    """[U, 2]: (first candidate, end) of each user, by a CTA of its own."""

    def context(shared: Any, given: Given, outputs: Any, interpret: bool) -> WarpgroupContext:
        return WarpgroupContext(None, None, shared, given, outputs, interpret)

    def consume(ctx: WarpgroupContext) -> None:
        found = rows.candidates(ctx.operands.index, ctx.worker, users, interpret=False)
        for i in range(2):
            ctx.outputs[ctx.worker, i] = found[i]

    (found,) = launch(
        Roles(context, None, consume),
        Given(jnp.asarray(index, jnp.int32)),
        jax.ShapeDtypeStruct((users, 2), jnp.int32),
        Shared(memory.Words((128,))),
        dtype=jnp.int32,
        name="rows",
        workers=users,
    )
    return np.asarray(found)


def drawn(batch: int, users: int) -> np.ndarray:
    """A sorted index with users without candidates, and some out of range at either end."""
    index = np.sort(np.random.default_rng(batch).integers(0, users - 1, batch))
    index[index == 2] = 3
    index[: batch // 9], index[batch - batch // 9 :] = -(2**31), 2**31 - 1
    return index


#: Less than a lane each, one round of loads, and a search in two and three rounds.
BATCHES = [1, 31, 32, 33, 100, rows.MOST_COUNTED, rows.MOST_COUNTED + 1, 2000, 16385]


@pytest.mark.parametrize("batch", BATCHES)
def test_emulated_range_of_every_user(batch: int, sm90: emulator.Emulator) -> None:
    users = 7
    index = drawn(batch, users)
    with sm90.emulated(0):
        found = ranges(index, users)
    bounds = np.searchsorted(np.clip(index, 0, users - 1), np.arange(users + 1))
    np.testing.assert_array_equal(found, np.stack([bounds[:-1], bounds[1:]], 1))


@pytest.mark.parametrize("batch", BATCHES)
def test_emulated_ranges_of_an_unsorted_index_have_every_candidate_once(
    batch: int, sm90: emulator.Emulator
) -> None:
    users = 7
    index = np.random.default_rng(batch).permutation(drawn(batch, users))
    with sm90.emulated(0):
        found = ranges(index, users)
    assert found[0, 0] == 0
    assert found[-1, 1] == batch
    np.testing.assert_array_equal(found[1:, 0], found[:-1, 1])
