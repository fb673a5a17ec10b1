"""Compiled programs are dropped before they take all memory mappings that a process may have.

XLA's CPU programs hold three mappings each, and JAX keeps the programs.  A process that ran half of
the suite came to the limit of Linux (`vm.max_map_count`, 65,530); LLVM then fails to allocate, and
the process ends with a segmentation fault in whichever test compiles next.
"""

from __future__ import annotations

import gc
import pathlib

import jax
import pytest

#: Tests from one count of the mappings to the next: counting 30,000 takes some 20 ms.
TESTS_BETWEEN = 20


def mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def most_mappings() -> int:
    """Mappings that programs may hold: half of what the system allows."""
    try:
        return int(pathlib.Path("/proc/sys/vm/max_map_count").read_text()) // 2
    except OSError:
        return 32_000


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CompiledPrograms(most_mappings()))


class CompiledPrograms:
    """Drops JAX's programs, and what it traced, between two tests."""

    def __init__(self, limit: int, tests_between: int = TESTS_BETWEEN) -> None:
        self.limit = limit
        self.tests_between = tests_between
        self.tests = 0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        self.tests += 1
        if self.tests % self.tests_between == 0 and mappings() > self.limit:
            jax.clear_caches()
            gc.unfreeze()  # Cycles of frozen objects hold programs, too.
            gc.collect()
            gc.freeze()
