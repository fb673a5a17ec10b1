"""Sustained timing: what a kernel takes once the device has settled.

A large GPU throttles by power within a fraction of a second, so a short burst reads up to a fifth
too fast. Every figure here comes from launches back to back for a whole window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def _run(fn: Callable[..., Any], args: tuple[Any, ...], launches: int) -> float:
    """Seconds for `launches` calls back to back."""
    # A GPU runs a stream in order, so only the last result is waited for. The CPU client may run
    # two independent calls at once, which would not be a time per call.
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
    """Milliseconds per call of `fn(*args)`, one figure for each window.

    Args:
      fn: a compiled (or jitted) function; what it returns is waited for.
      *args: its arguments, on the device already.
      window_s: seconds of launches back to back in one window, at least.
      windows: number of windows; take their median.

    Returns:
      `windows` figures, in milliseconds per call.
    """
    jax.block_until_ready(fn(*args))
    # Warm up and find the number of launches in one go: double it until a window is full.
    launches = 1
    while (elapsed := _run(fn, args, launches)) < window_s / 2:
        launches *= 2
    launches = math.ceil(launches * window_s / elapsed)
    samples: list[float] = []
    while len(samples) < windows:
        elapsed = _run(fn, args, launches)
        if elapsed < window_s:
            # The warm-up ran slower than this: the window was too short to count.
            launches = math.ceil(launches * 1.1 * window_s / elapsed)
            continue
        samples.append(elapsed * 1e3 / launches)
    return samples


def by_turns(
    thunks: Mapping[str, Callable[[], Any]],
    *,
    window_s: float = 0.2,
    rounds: int = 3,
    on_turn: Callable[[str, int], None] = lambda name, turn: None,
) -> dict[str, list[float]]:
    """Times thunks by turns, A B A B, so that a card that grows hot slows all of them alike.

    Args:
      thunks: what to launch; results are waited for at a window's end.
      window_s: seconds of launches back to back in one window; each is preceded by a warm-up.
      rounds: windows of every thunk.
      on_turn: is told whose turn it is, and in which round, from 0.

    Returns:
      Milliseconds per call for every thunk, one figure for each round.
    """
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    for turn in range(rounds):
        for name, thunk in thunks.items():
            on_turn(name, turn)
            samples[name] += sustained_ms(thunk, window_s=window_s, windows=1)
    return samples
