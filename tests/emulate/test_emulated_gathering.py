"""The PTX of kernels that gather, count and sum, on a CPU, with faults that are to be found."""

import dataclasses
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sm90 as sm90_machine
import test_interpret_few_queries as few_queries
from problems_look_up import assert_sums, draw, draw_index
from sm90_state import ARRAY_BITS

from ikbo_jax.pallas.few_queries import gathering, kernel
from ikbo_jax.pallas.look_up import sums
from ikbo_jax.pallas.look_up.gather import look_up_kernel
from ikbo_jax.pallas.look_up.sums import segment_sum_kernel
from ikbo_jax.pallas.worklist import counted_order
from ikbo_jax.pallas.worklist.counted_order import Shape, count_order
from ikbo_jax.problems.look_up import LookUpConfig, SegmentSumConfig


def is_right(monkeypatch, sm90, finish, seed=0) -> bool:
    """Whether results are right if gathering warps end an item's copies by `finish`."""
    monkeypatch.setattr(gathering, "_FINISH", finish)
    try:
        with sm90.emulated(seed):
            few_queries.check(few_queries.CASES["listed_bundles"], few_queries.interpret)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("cache_bytes", [0, kernel.CACHE_BYTES])
def test_queries_are_loaded_into_l2_before_they_are_gathered(cache_bytes, monkeypatch, sm90):
    """Every line that the copies of first items read; none, if L2 holds all operands."""
    locate = sm90_machine.Machine.locate
    lines: dict[int, set[tuple[int, int]]] = {1: set(), 16: set()}

    def watched(self: sm90_machine.Machine, addresses: np.ndarray, size: int) -> Any:
        array, offset = locate(self, addresses, size)
        if size in lines:
            number = int(addresses[0]) >> ARRAY_BITS
            lines[size] |= {(number, int(x) // 128) for x in offset}
        return array, offset

    monkeypatch.setattr(sm90_machine.Machine, "locate", watched)
    monkeypatch.setattr(kernel, "CACHE_BYTES", cache_bytes)
    case = few_queries.Case(
        (1, 0, 5, 2, 1, -3, 0), 40, users=4, q_len=2, heads=(4, 2), lists=True, num_sms=8
    )
    with sm90.emulated(0):
        few_queries.check(case, few_queries.interpret)
    if cache_bytes:
        assert not lines[1]
        return
    (queries,) = {number for number, _ in lines[1]}
    copied = {line for line in lines[16] if line[0] == queries}
    assert len(copied) == 7 * 2 * 4  # of 128 bytes: candidates, queries, heads
    assert copied == lines[1]


@pytest.mark.parametrize(
    ("missing", "seeds"),
    [("", 3), ("cp.async.wait_all;", 1), ("fence.proxy.async.shared::cta;", 1)],
)
def test_missing_end_of_copies_is_found(missing, seeds, monkeypatch, sm90) -> None:
    finish = gathering._FINISH.replace(missing, "")
    assert all(is_right(monkeypatch, sm90, finish, seed) for seed in range(seeds)) != bool(missing)


@dataclasses.dataclass(frozen=True)
class Case:
    """Candidates, users, their distribution, [T, N, H] of queries, the most CTAs, and a dtype.

    Fewer CTAs take less time here, and have more candidates each. None: of a launch as it is, three
    CTAs run: the first, one in the middle and the last one, for which nobody waits.
    """

    batch: int
    users: int
    index: str = "uniform"
    query: tuple[int, int, int] | None = None
    ctas: int | None = 9
    dtype: str = "bfloat16"


CASES = {
    # No whole vector of the index, and one CTA.
    "three": Case(3, 2, query=(1, 1, 64)),
    "more_users_than_candidates": Case(9, 1000, query=(3, 1, 64)),
    # Warpgroups of a CTA share comparisons by four (with x64), by two, and not.
    "ranges_of_100": Case(300, 7, query=(5, 1, 96), ctas=3),
    "ranges_of_200": Case(601, 40, "beyond", (1, 2, 64), ctas=3),
    "ranges_of_380": Case(1138, 900, query=(1, 1, 64), ctas=3),
    "ranges_of_512": Case(1535, 2, "beyond", (2, 1, 64), ctas=3),
    # Queries of several parts, and of no whole part.
    "odd_queries_f16": Case(41, 6, "beyond", (5, 1, 96), dtype="float16"),
    "parts_of_queries": Case(19, 4, query=(7, 2, 128)),
    "one_user": Case(4097, 1, query=(1, 1, 64)),
    "distinct": Case(4097, 4097, "distinct", (1, 1, 64)),
    "users_without_candidates": Case(4097, 4096, "gaps"),
    "runs": Case(4097, 50, "runs"),
    "zipf": Case(10985, 700, "zipf", ctas=22),
    # The ranges of real launches; the last CTA has fewer candidates.
    "large_zipf": Case(10985, 4096, "zipf", (1, 2, 64), None),
    "large_uniform": Case(16384, 1000, "beyond", (2, 1, 64), None),
    "large_one_user": Case(16381, 1, query=(1, 1, 64), ctas=None),
    "most_candidates": Case(counted_order.MOST_CANDIDATES, 4096, query=(1, 1, 64), ctas=None),
    "most_users": Case(counted_order.MOST_CANDIDATES - 7, counted_order.MOST_USERS, ctas=None),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_order_is_the_stable_sort(name, sm90, monkeypatch) -> None:
    case = CASES[name]
    blocks: tuple[int, ...] | None = None
    index, query = draw_index(case.index, case.batch, case.users), None
    if case.query is not None:
        draws = np.random.default_rng(1).normal(size=(case.batch, *case.query))
        query = jnp.asarray(draws, case.dtype)
    user = np.clip(index, 0, case.users - 1)
    order = np.argsort(user, stable=True)
    is_stored = np.ones(case.batch, bool)
    if case.ctas is None:
        shape = Shape(case.batch, case.users)
        blocks = 0, shape.workers // 2, shape.workers - 1
        is_stored = np.isin(order // shape.own, blocks)
    else:
        monkeypatch.setattr(counted_order, "MOST_CTAS", case.ctas)
    has_position = query is None or case.ctas is None
    with sm90.emulated(0, blocks=blocks) as launched, jax.enable_x64(name == "ranges_of_100"):
        found = count_order(query, jnp.asarray(index), case.users, has_position=has_position)
    kind = "user_order" if query is None else "attention_pack"
    assert launched == [f"ikbo_{kind}_mosaic_gpu_kernel"]
    np.testing.assert_array_equal(found.order, np.where(is_stored, order, -1))
    np.testing.assert_array_equal(found.user, np.where(is_stored, user[order], -1))
    assert found.order.dtype == found.user.dtype == jnp.int32
    assert (found.position is not None) == has_position
    if has_position:
        position = np.asarray(found.position)[order]
        np.testing.assert_array_equal(position, np.where(is_stored, np.arange(case.batch), -1))
    if query is not None:
        copied, bits = np.asarray(found.query).view(np.uint16), np.asarray(query).view(np.uint16)
        np.testing.assert_array_equal(copied[is_stored], bits[order[is_stored]])
        assert (copied[~is_stored] == 0xFFFF).all()


@pytest.mark.parametrize("batch", [1, 4, 4097, 10985, 16384, 65533, counted_order.MOST_CANDIDATES])
def test_ranges_have_a_thread_for_each_candidate(batch: int) -> None:
    shape = Shape(batch, 1)
    assert shape.own % 4 == 0
    assert shape.own <= counted_order.MOST_OWN
    assert shape.own * (shape.workers - 1) < batch <= shape.own * shape.workers
    assert shape.workers <= counted_order.MOST_CTAS


#: Candidates, users, width, dtype, whether sorted, configuration.
SUMS = {
    "shared": (90, 17, 24, "float32", False, SegmentSumConfig(4, 2, 2)),
    # A user's end lies further away than the first search looks.
    "many_candidates_of_a_user": (1900, 2, 8, "bfloat16", True, SegmentSumConfig(2, 2, 4)),
    "shares": (1100, 2, 8, "float16", True, SegmentSumConfig(2, 2, 4)),
    "four_warpgroups": (120, 50, 50, "float16", True, SegmentSumConfig(3, 1, 2, 4)),
    "users_without_candidates": (20, 300, 16, "bfloat16", True, SegmentSumConfig(2, 4, 2)),
    "listed": (150, 9, 20, "bfloat16", False, SegmentSumConfig(2, 1, 2, users=1)),
    "listed_in_parts": (900, 9, 20, "bfloat16", False, SegmentSumConfig(2, 1, 2, 1, 4, 3)),
    # A warp sorts more candidates than it has lanes.
    "listed_by_warpgroups": (700, 3, 6, "float32", False, SegmentSumConfig(3, 1, 4, 2, 2)),
    "listed_odd_width": (140, 2, 5, "float16", False, SegmentSumConfig(4, 1, 2, users=1)),
}


@pytest.mark.parametrize("name", SUMS)
def test_emulated_sums(name: str, sm90: emulator.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    *sizes, config = SUMS[name]
    if name == "shares":
        monkeypatch.setattr(sums, "STREAMED_BYTES", 0)
    _, users, _, dtype, is_sorted = sizes
    values, index = draw(*sizes)
    with sm90.emulated(0) as launched:
        found = segment_sum_kernel(values, index, users, config=config, is_sorted=is_sorted)
    orders = ["user_order"] * (not is_sorted and not config.users)
    launches = *orders, "segment_sum", *["segment_sum_shares"] * (name == "shares")
    assert launched == [f"ikbo_{x}_mosaic_gpu_kernel" for x in launches]
    unit = max(float(jnp.finfo(dtype).eps) / 2, 1e-5)
    assert_sums(found, values, index, unit, 1e-5)


def test_emulated_index_that_is_not_sorted_as_promised(sm90: emulator.Emulator) -> None:
    """Sums are unspecified, but nothing is read or written outside of arrays."""
    rng = np.random.default_rng(0)
    index = jnp.asarray(rng.integers(-5, 12, 100), jnp.int32)
    values = jnp.asarray(rng.normal(size=(100, 8)), jnp.float32)
    with sm90.emulated(0):
        found = segment_sum_kernel(values, index, 7, config=SegmentSumConfig(2, 2), is_sorted=True)
    assert found.shape == (7, 8)


@pytest.mark.parametrize(("width", "dtype"), [(24, "bfloat16"), (6, "float16"), (1, "float32")])
def test_emulated_lookups(width: int, dtype: str, sm90: emulator.Emulator) -> None:
    rng = np.random.default_rng(0)
    user = jnp.asarray(rng.normal(size=(7, width)), dtype)
    index = jnp.asarray(rng.integers(-1, 8, 90), jnp.int32)
    with sm90.emulated(0) as launched:
        found = look_up_kernel(user, index, config=LookUpConfig(2, streams=True))
    assert launched == ["ikbo_look_up_mosaic_gpu_kernel"]
    np.testing.assert_array_equal(found, user[jnp.clip(index, 0, 6)])
    assert isinstance(found, jax.Array)
