"""Counts calls of functions: a count does not depend on how busy the machine is."""

import gc
import sys
from collections.abc import Callable
from typing import Any


def count(prepare: Callable[[], Callable[[], Any]]) -> int:
    """The number of calls, of Python's functions and others, in what `prepare` returns.

    It is prepared and run twice, and counted the second time: the first time fills caches.
    """
    found = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    for counted in (False, True):
        work = prepare()
        # Callbacks of what the collector finds, perhaps of an earlier test, would be counted. To
        # collect here takes a second each time, at the end of the suite.
        gc.disable()
        sys.setprofile(profile if counted else before)
        try:
            work()
        finally:
            sys.setprofile(before)
            gc.enable()
    return found
