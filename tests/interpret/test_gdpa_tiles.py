"""The lists of tiles of the generalised attention's kernels, against plain Python.

Of XLA, and of the kernel that lists tiles, interpreted; `test_emulated_tiles` runs its PTX.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikbo_jax.pallas.hopper import mosaic, per_thread
from ikbo_jax.pallas.worklist import by_xla, lists
from ikbo_jax.pallas.worklist import tiles as launch
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.segments import Shape


def plain_offsets(cu: Any, total: int) -> list[int]:
    return [int(x) for x in np.maximum.accumulate(np.clip(cu, 0, total))]


def plain_segments(offsets: list[int], longest: int | None) -> list[tuple[int, int]]:
    """(first row, length) of sequences."""
    return [
        (a, b - a if longest is None else min(b - a, longest))
        for a, b in zip(offsets[:-1], offsets[1:], strict=True)
    ]


def read(tiles: lists.TileList) -> tuple[list[list[int]], int]:
    with_work, count = (int(x) for x in tiles.counts)
    words = np.asarray(tiles.words)
    assert count <= len(words)
    return words[:count].tolist(), with_work


def check_cover(words: list[list[int]], size: int, total: int) -> None:
    """Every row that is written has exactly one tile."""
    written = np.zeros(total, int)
    for _, target, rows, *_ in words:
        assert 0 < rows <= size
        written[target : target + rows] += 1
    np.testing.assert_array_equal(written, 1)


@st.composite
def jagged(draw: Any) -> tuple[Any, ...]:
    """(cu_q, cu_kv, q_to_kv, q_rows, kv_rows, max_q, max_kv), good offsets and bad ones.

    Of few shapes, each of which compiles.
    """
    q_to_kv = draw(st.none() | st.lists(st.integers(-1, 5), min_size=6, max_size=6))
    batch = 4 if q_to_kv is None else 6
    cu_q, cu_kv = (
        draw(st.lists(st.integers(-3, 43), min_size=n + 1, max_size=n + 1)) for n in (batch, 4)
    )
    if draw(st.booleans()):
        cu_q, cu_kv = sorted(cu_q), sorted(cu_kv)
    longest = draw(st.sampled_from([None, 11]))
    return cu_q, cu_kv, q_to_kv, 40, 38, longest, longest


@functools.partial(jax.jit, static_argnums=(1, 2))
def listed(arrays: tuple[Any, ...], sizes: tuple[Any, ...], size: int) -> lists.TileList:
    return by_xla.query_tiles(Offsets(*arrays, *sizes), size=size)


def compiled(offsets: Offsets, *, size: int) -> lists.TileList:
    return listed(tuple(offsets[:3]), offsets.sizes, size)


def join(q, keys, kv_of) -> tuple[list[tuple[int, int]], list[int]]:
    """Neighbouring sequences of the same keys as one."""
    found: list[tuple[int, int]] = []
    numbers: list[int] = []
    for number, (start, length) in enumerate(q):
        if number and keys[number] == keys[number - 1] and sum(q[number - 1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
            numbers.append(kv_of[number])
    return found, numbers


def check(problem: tuple[Any, ...], query_tiles: Any, size: int, *, broadcast: bool) -> None:
    cu_q, cu_kv, q_to_kv, q_rows, kv_rows, max_q, max_kv = problem
    kv = plain_segments(plain_offsets(cu_kv, kv_rows), max_kv)
    kv_of = range(len(kv)) if q_to_kv is None else np.clip(q_to_kv, 0, len(kv) - 1).tolist()
    if broadcast:
        q = [(0, q_rows)] * len(kv_of)
        targets, total = [i * q_rows for i in range(len(kv_of))], len(kv_of) * q_rows
    else:
        q = plain_segments(plain_offsets(cu_q, q_rows), max_q)
        if q_to_kv is not None:
            q, kv_of = join(q, [kv[k] for k in kv_of], kv_of)
        targets, total = [start for start, _ in q], q_rows
    arguments = [None if x is None else jnp.asarray(x, jnp.int32) for x in problem[:3]]
    if broadcast:
        arguments[0] = None
    words, with_work = read(query_tiles(Offsets(*arguments, *problem[3:]), size=size))
    check_cover(words, size, total)
    expected = [
        [source + i, target + i, min(size, length - i), *kv[k]]
        for (source, length), target, k in zip(q, targets, kv_of, strict=True)
        for i in range(0, length, size)
        if kv[k][1]
    ]
    assert sorted(words[:with_work]) == sorted(expected)
    lengths = [w[lists.KV_LENGTH] for w in words]
    assert lengths == sorted(lengths, reverse=True)
    assert not any(lengths[with_work:])


@given(problem=jagged(), broadcast=st.booleans())
def test_tiles_are_those_of_the_sequences(problem: tuple[Any, ...], broadcast: bool) -> None:
    check(problem, compiled, 8, broadcast=broadcast)


@pytest.mark.parametrize("unit", [1, 8])
def test_sequences_of_equally_many_blocks_stay_in_order(unit: int) -> None:
    offsets = jnp.asarray([0, 3, 8, 12, 30], jnp.int32)
    tiles = by_xla.query_tiles(Offsets(offsets, offsets, None, 30, 30), size=32, unit=unit)
    words, _ = read(tiles)
    starts = [w[lists.SOURCE] for w in words]
    assert starts == ([12, 3, 8, 0] if unit == 1 else [12, 0, 3, 8])


def test_the_list_holds_the_most_tiles_that_offsets_can_make() -> None:
    """Of the rows before a sequence, in it, and after it."""
    rows, size = 7, 3
    offsets = [(0, a, b, rows) for a in range(rows + 1) for b in range(a, rows + 1)]
    most = max(sum(-(-x // size) for x in np.diff(cu)) for cu in offsets)
    assert Shape(1, rows, rows, None, None, size, 1, False, False, 1).most == most


def test_sums_of_warps_have_words_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp may still read those of one exchange while another one writes the next one's."""
    used, keep = [], per_thread._keep_totals

    def noted(totals: Any, scratch: Any, at: int, threads: per_thread.Threads) -> None:
        used.extend(range(at, at + len(totals) * threads.warps))
        assert used[-1] < scratch.shape[0]
        keep(totals, scratch, at, threads)

    monkeypatch.setattr(per_thread, "_keep_totals", noted)
    offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
    with mosaic.interpreted(False):
        run = functools.partial(launch.query_tiles, size=8)
        jax.eval_shape(lambda x: run(Offsets(x, x, None, 9, 9, 3, 3)), offsets)
    assert len(set(used)) == len(used) > 0


#: Problems of the kernel: (problem of `check`, whether queries are broadcast). Offsets fall, leave
#: the arrays, and leave rows before, between (of truncated sequences) and after the sequences.
KERNEL_CASES: dict[str, tuple[tuple[Any, ...], bool]] = {
    "plain": (([3, 5, 5, 30, 38], [0, 3, 3, 20, 38], None, 40, 38, None, None), False),
    "bounded": (([3, 5, 4, 30, 45], [-1, 3, 8, 7, 38], None, 40, 38, 11, 11), False),
    "merged": (
        ([3, 5, 5, 9, 20, 29, 38], [0, 3, 3, 20, 38], [0, 0, 2, 2, 2, 9], 40, 38, None, None),
        False,
    ),
    # A sequence that is cut ends a group; offsets fall.
    "merged_bounded": (
        ([-2, 5, 4, 9, 23, 29, 45], [-1, 3, 8, 7, 38], [-1, 0, 0, 3, 3, 3], 40, 38, 11, 11),
        False,
    ),
    "pma_index": (([0], [0, 3, 3, 20, 38], [0, 2, -1, 9, 2, 1], 9, 38, None, None), True),
}
