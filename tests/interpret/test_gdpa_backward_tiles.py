"""The lists of tiles of the gradient's kernels: a launch's, interpreted, against XLA's.

`test_emulated_tiles` runs the launch's PTX.
"""

import dataclasses
from typing import Any

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist import by_xla, works
from ikbo_jax.pallas.worklist.lists import Offsets, Works, WorkSettings

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.slow]


@dataclasses.dataclass(frozen=True)
class Case:
    """Offsets and sizes of a problem; `cu_q` is None if queries are broadcast."""

    cu_q: Any
    cu_kv: Any
    q_to_kv: Any
    q_rows: int
    kv_rows: int
    limits: tuple[int | None, int | None] = (None, None)
    group: int = 1
    has_statistics: bool = False
    blocks: tuple[int, int] = (16, 32)
    parts: int = 1

    @property
    def offsets(self) -> Offsets:
        given = self.cu_q, self.cu_kv, self.q_to_kv
        arrays = (None if x is None else jnp.asarray(x, jnp.int32) for x in given)
        return Offsets(*arrays, self.q_rows, self.kv_rows, *self.limits)

    @property
    def settings(self) -> WorkSettings:
        return WorkSettings(*self.blocks, self.group, self.has_statistics, self.parts)


# Offsets fall, leave the arrays, and leave rows before, between and after the sequences.
CASES = {
    "plain": Case([3, 5, 5, 30, 438], [0, 3, 3, 220, 238], None, 440, 238),
    "bounded": Case([3, 5, 4, 330, 445], [-1, 3, 8, 7, 238], None, 440, 238, (190, 61), 2),
    "plain_statistics": Case(
        [3, 5, 5, 30, 438], [0, 3, 3, 220, 238], None, 440, 238, has_statistics=True
    ),
    "bounded_statistics": Case(
        [3, 5, 4, 330, 445], [-1, 3, 8, 7, 238], None, 440, 238, (190, 61), has_statistics=True
    ),
    "shared": Case(
        [-2, 5, 4, 9, 223, 229, 445], [-1, 3, 8, 7, 238], [2, 0, 3, -1, 3, 9], 440, 238, group=2
    ),
    "shared_statistics": Case(
        [-2, 5, 4, 9, 223, 229, 445], [-1, 3, 8, 7, 238], [2, 0, 3, -1, 3, 9], 440, 238,
        (150, 61), has_statistics=True,
    ),
    "parts": Case(
        [-2, 5, 4, 9, 223, 229, 445], [1, 3, 8, 7, 138], [2, 0, 3, -1, 3, 9], 440, 238, (150, 61),
        has_statistics=True, parts=3,
    ),
    "pma": Case(None, [0, 3, 3, 220, 238], None, 9, 238, has_statistics=True),
    "pma_shared": Case(
        None, [0, 3, 3, 220, 238], [0, 2, -1, 9, 2, 1], 190, 238, (None, 70), has_statistics=True
    ),
}  # fmt: skip


def listed(case: Case) -> Works:
    """The work by a launch."""
    found = works.works(case.offsets, case.settings)
    return jax.block_until_ready(found)


def assert_same_work(case: Case, found: Works, *, is_ordered: bool = True) -> None:
    """Words of tiles with blocks and of ranges are XLA's; other tiles cover the same rows."""
    with mosaic.interpreted(True):  # also where the launch is emulated
        wanted = by_xla.works(case.offsets, case.settings)
    total = case.offsets.result_rows
    for work, want, rows, is_for_queries in (
        (found[0], wanted[0], total, True),
        (found[1], wanted[1], case.kv_rows * case.parts, False),
    ):
        keyed, count = (int(x) for x in work.counts)
        assert keyed == int(want.counts[0])
        assert keyed <= count <= len(work.tiles)
        words = 7 if case.has_statistics and is_for_queries else 6
        ours, xla = (np.asarray(x.tiles)[:keyed, :words] for x in (work, want))
        if not is_ordered:
            ours, xla = (x[np.lexsort(x.T)] for x in (ours, xla))
        np.testing.assert_array_equal(ours, xla)
        written = np.zeros(rows, int)
        for _, target, height, *_ in np.asarray(work.tiles)[:count].tolist():
            assert 0 < height <= 128
            written[target : target + height] += 1
        np.testing.assert_array_equal(written, 1)
        assert not np.asarray(work.tiles)[keyed:count, 5].any()
        words = 4 if case.has_statistics and not is_for_queries else 3
        ours, xla = (np.asarray(x.ranges)[:, :words] for x in (work, want))
        np.testing.assert_array_equal(ours, xla)
        if case.has_statistics and is_for_queries:  # copies of 128 rows stay inside
            assert (np.asarray(work.tiles)[:count, 6] >= 0).all()
            assert (np.asarray(work.tiles)[:count, 6] <= len(found[2]) * case.blocks[1]).all()
    if case.has_statistics:
        block = case.blocks[1]
        ours, xla = (np.asarray(x) for x in (found[2], wanted[2]))
        heights, want_heights = (np.clip(x[:, 1], 0, block) for x in (ours, xla))
        np.testing.assert_array_equal(heights, want_heights)
        np.testing.assert_array_equal(ours[heights > 0, 0], xla[heights > 0, 0])


@pytest.mark.parametrize("name", ["bounded_statistics", "pma_shared"])
def test_interpreted_launch_lists_xla_s_tiles(name: str, launches: interpreter.Launches) -> None:
    """Two of the cases: every access of a thread is a call of the interpreter."""
    found = listed(CASES[name])
    launches.assert_no_races(1)
    assert_same_work(CASES[name], found)


def test_launch_takes_no_more_sequences_than_fit(launches: interpreter.Launches) -> None:
    """Nor none at all: XLA lists the tiles then."""
    for offsets in (np.arange(30001), np.zeros(1)):
        case = Case(offsets, offsets, None, 30000, 30000, blocks=(64, 64))
        assert_same_work(case, listed(case))
    launches.assert_no_races(0)


def test_blocks_of_streamed_rows_are_counted() -> None:
    """The launch has room for 40 streamed rows in blocks of 32."""
    offsets = Offsets(None, jnp.zeros(3, jnp.int32), None, 40, 238)
    static = works._static(offsets, WorkSettings(16, 32, 1, has_statistics=False))
    assert static.keys.most_blocks == 2
