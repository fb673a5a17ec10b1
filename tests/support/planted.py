"""Faults that tests plant into kernels, and how the interpreter reports them.

A check that no planted fault can fail would prove nothing.
"""

import sys
from collections.abc import Callable
from typing import Any

import interpreter
import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mma
from ikbo_jax.problems.hopper import NUM_CONSUMERS

#: Parts of the interpreter's own complaints: of a barrier's phase that no thread has seen and,
#: since jax 0.12, of every race.
COMPLAINTS = ("no threads observed", "had only observed", "RACE DETECTED", "for the first time")


def is_handed_back(barrier: Any) -> bool:
    """Whether a barrier says that consumers have read a stage, not that the producer filled it."""
    arrivals: int = jax.typeof(barrier.ref).inner_aval.dtype.num_arrivals
    return arrivals == NUM_CONSUMERS


def assert_found(
    run: Callable[[], Any],
    launches: interpreter.Launches,
    expected: int = 1,
    match: str = "races in launches",
) -> None:
    """Runs a kernel and expects races, or the interpreter's own complaint.

    Args:
      run: interprets the kernel.
      launches: what the race detector saw of `run`.
      expected: the number of launches.
      match: for the message about the races.
    """
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        if any(complaint in str(error) for complaint in COMPLAINTS):
            return
        raise
    with pytest.raises(AssertionError, match=match):
        launches.assert_no_races(expected)


def early_hand_back(monkeypatch: pytest.MonkeyPatch, pending: int) -> None:
    """A stage is handed back before the WGMMA wait that says that it was read, not after it.

    Args:
      pending: which waits: those that leave so many groups of WGMMAs in flight.
    """
    wait, arrive = mma.wait, plgpu.barrier_arrive
    held: list[int] = []

    def late_wait(n: int) -> None:
        if n == pending:
            held.append(n)
        else:
            wait(n)

    def arrive_then_wait(barrier: Any) -> None:
        arrive(barrier)
        if held and is_handed_back(barrier):
            wait(held.pop())

    monkeypatch.setattr(mma, "wait", late_wait)
    monkeypatch.setattr(plgpu, "barrier_arrive", arrive_then_wait)


def missing_wait(monkeypatch: pytest.MonkeyPatch, function: str) -> list[int]:
    """Leaves out the WGMMA waits that a function of this name calls.

    Returns:
      What grows while a kernel is traced: for each wait left out, how many groups it leaves in
      flight.
    """
    wait, left_out = mma.wait, []

    def planted(n: int) -> None:
        if sys._getframe(1).f_code.co_name == function:
            left_out.append(n)
        else:
            wait(n)

    monkeypatch.setattr(mma, "wait", planted)
    return left_out
