"""Faults of the warps that gather queries, which the interpreter does not see: none is missed."""

from typing import Any

import emulator
import numpy as np
import pytest
import sm90 as sm90_machine
import test_interpret_few_queries as few_queries
from sm90_state import ARRAY_BITS

from ikbo_jax.pallas.few_queries import gathering, kernel


def is_right(
    monkeypatch: pytest.MonkeyPatch, sm90: emulator.Emulator, finish: str, seed: int = 0
) -> bool:
    """Whether results are right if gathering warps end an item's copies by `finish`."""
    monkeypatch.setattr(few_queries, "PARAMS", False)
    monkeypatch.setattr(gathering, "_FINISH", finish)
    case = few_queries.CASES["listed_bundles"]
    inputs = case.inputs()
    with sm90.emulated(seed):
        results = few_queries.interpret(inputs, case)
    try:
        few_queries.assert_correct(results, inputs, case)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("cache_bytes", [0, kernel.CACHE_BYTES])
def test_queries_are_loaded_into_l2_before_they_are_gathered(
    cache_bytes: float, monkeypatch: pytest.MonkeyPatch, sm90: emulator.Emulator
) -> None:
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
    monkeypatch.setattr(few_queries, "PARAMS", False)
    monkeypatch.setattr(kernel, "CACHE_BYTES", cache_bytes)
    case = few_queries.Case(
        (1, 0, 5, 2, 1, -3, 0), 40, users=4, q_len=2, heads=(4, 2), lists=True, num_sms=8
    )
    inputs = case.inputs()
    with sm90.emulated(0):
        few_queries.assert_correct(few_queries.interpret(inputs, case), inputs, case)
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
def test_missing_end_of_copies_is_found(
    missing: str, seeds: int, monkeypatch: pytest.MonkeyPatch, sm90: emulator.Emulator
) -> None:
    finish = gathering._FINISH.replace(missing, "")
    assert all(is_right(monkeypatch, sm90, finish, seed) for seed in range(seeds)) != bool(missing)
