"""Sustained timing: the time of a kernel at the device's steady-state clock.

A large GPU throttles by power within a fraction of a second, so a short burst measures times up to
a fifth too small. Every sample here is the mean over a window of launches back to back.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def time_launches(fn: Callable[..., Any], args: tuple[Any, ...], launches: int) -> float:
    """Times `launches` calls back to back, in seconds."""
    # A GPU executes a stream in order, so it suffices to wait for the last result. The CPU client
    # may run independent calls in parallel, and the quotient would not be the time of a call.
    wait_each = jax.default_backend() == "cpu"
    start = time.perf_counter()
    out = None
    for _ in range(launches):
        out = fn(*args)
        if wait_each:
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return time.perf_counter() - start


def sustained_ms(
    fn: Callable[..., Any], *args: Any, window_s: float = 0.2, windows: int = 3
) -> list[float]:
    """Times `fn(*args)`; returns one sample for each window, in milliseconds per call.

    `fn` is compiled (or jitted), and its arguments are on the device. A window takes at least
    `window_s` seconds; take the median of the samples.
    """
    jax.block_until_ready(fn(*args))
    # Doubling the number of launches until they fill half a window also warms the device up.
    launches = 1
    while (elapsed := time_launches(fn, args, launches)) < window_s / 2:
        launches *= 2
    # A few more than seem to fill it: a window that is too short is repeated.
    launches = math.ceil(launches * 1.05 * window_s / elapsed)
    samples: list[float] = []
    while len(samples) < windows:
        elapsed = time_launches(fn, args, launches)
        if elapsed < window_s:
            # The device ran faster than in the warm-up, so the window was too short: repeat it.
            launches = math.ceil(launches * 1.1 * window_s / elapsed)
            continue
        samples.append(elapsed * 1e3 / launches)
    return samples


def interleaved_ms(
    thunks: Mapping[str, Callable[[], Any]],
    *,
    window_s: float = 0.2,
    rounds: int = 3,
    on_turn: Callable[[str, int], None] = lambda name, turn: None,
) -> dict[str, list[float]]:
    """Times thunks interleaved, A B A B, so that a device that heats up slows all of them alike.

    Calls `on_turn` with the name and the round before each window. Returns for every thunk one
    sample per round, in milliseconds per call.
    """
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    for turn in range(rounds):
        for name, thunk in thunks.items():
            on_turn(name, turn)
            samples[name] += sustained_ms(thunk, window_s=window_s, windows=1)
    return samples
