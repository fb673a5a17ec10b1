"""The PTX of the kernel that counts candidates to find the order of users, executed on a CPU."""

import dataclasses

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ikbo_jax.pallas.worklist import counted_order
from ikbo_jax.pallas.worklist.counted_order import Shape, count_order


@dataclasses.dataclass(frozen=True)
class Case:
    """Candidates, users, their distribution, [T, N, H] of queries, and the most CTAs.

    Fewer CTAs take less time here, and have more candidates each. None: of a launch as it is, three
    CTAs run: the first, one in the middle and the last one, for which nobody waits.
    """

    batch: int
    users: int
    index: str = "uniform"
    query: tuple[int, int, int] | None = None
    ctas: int | None = 9

    def make(self) -> tuple[jax.Array | None, np.ndarray]:
        rng = np.random.default_rng(0)
        batch, users = self.batch, self.users
        match self.index:
            case "uniform":
                index = rng.integers(0, users, batch)
            case "distinct":
                index = rng.permutation(users)[:batch]
            case "zipf":
                index = (rng.zipf(1.3, batch) - 1) % users
            case "gaps":
                index = rng.integers(0, users // 7, batch) * 7
            case "runs":
                index = np.repeat(rng.permutation(users), -(-batch // users))[:batch]
            case "beyond":
                index = rng.integers(-3, users + 3, batch)
                index[::50], index[1::50] = -(2**31), 2**31 - 1
        query = None
        if self.query is not None:
            query = jnp.asarray(rng.normal(size=(batch, *self.query)), jnp.bfloat16)
        return query, index.astype(np.int32)


CASES = {
    # No whole vector of the index, and one CTA.
    "three": Case(3, 2, query=(1, 1, 64)),
    "more_users_than_candidates": Case(9, 1000, query=(3, 1, 64)),
    # Warpgroups of a CTA share comparisons by four (with x64), by two, and not.
    "ranges_of_100": Case(300, 7, query=(5, 1, 96), ctas=3),
    "ranges_of_200": Case(601, 40, "beyond", (1, 2, 64), ctas=3),
    "ranges_of_380": Case(1138, 900, query=(1, 1, 64), ctas=3),
    "ranges_of_512": Case(1535, 2, "beyond", (2, 1, 64), ctas=3),
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
def test_emulated_order_is_the_stable_sort(
    name: str, sm90: emulator.Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    blocks: tuple[int, ...] | None = None
    query, index = case.make()
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
