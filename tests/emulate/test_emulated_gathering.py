"""Faults of the warps that gather queries, which the interpreter does not see: none is missed."""

from __future__ import annotations

import sys

import emulator
import pytest
import test_interpret_few_queries as few_queries

from ikbo_jax.pallas.few_queries import gathering

pytestmark = [
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux"),
]


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


def test_gathered_queries_are_right(
    monkeypatch: pytest.MonkeyPatch, sm90: emulator.Emulator
) -> None:
    assert all(is_right(monkeypatch, sm90, gathering._FINISH, seed) for seed in range(3))


@pytest.mark.parametrize("part", ["cp.async.wait_all;", "fence.proxy.async.shared::cta;"])
def test_missing_end_of_copies_is_found(
    part: str, monkeypatch: pytest.MonkeyPatch, sm90: emulator.Emulator
) -> None:
    assert not is_right(monkeypatch, sm90, gathering._FINISH.replace(part, ""))
