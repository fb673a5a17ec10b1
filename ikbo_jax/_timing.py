"""Sustained timing: what a kernel takes once the device has settled.

A large GPU throttles by power within a fraction of a second, so a short burst reads up to a fifth
too fast. Every figure here comes from launches back to back for a whole window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
