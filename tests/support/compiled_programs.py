"""Compiled programs are dropped before they take all memory mappings, or much of the memory.

XLA's CPU programs hold three mappings each, and JAX keeps the programs.  A process that ran half of
the suite came to the limit of Linux (`vm.max_map_count`, 65,530); LLVM then fails to allocate, and
the process ends with a segmentation fault in whichever test compiles next.  Where the limit is
higher, such a process grew to 4.7 GB.
"""

import contextlib
import ctypes
import gc
import os
import pathlib

import jax
import pytest

#: Tests from one count of the mappings to the next: counting 30,000 takes some 20 ms.
TESTS_BETWEEN = 20
#: Resident memory at which programs are dropped, and by how much it grows between two drops at
#: least: what else a process holds must not have it drop its programs after every test.
MOST_BYTES, LEAST_GROWTH = 1_100_000_000, 300_000_000


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


def resident_bytes() -> int:
    """Memory of this process that is resident now; 0 where the system does not tell."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def drop() -> None:
    """Drops JAX's programs and what it traced, and gives their memory back to the system."""
    jax.clear_caches()
    gc.unfreeze()  # Cycles of frozen objects hold programs, too.
    gc.collect()
    gc.freeze()
    # The allocator would keep the memory: of 1.35 GB in which 150 gradients had been compiled, 1.31
    # stayed resident, and 0.41 after this call.
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CompiledPrograms(most_mappings(), MOST_BYTES))


class CompiledPrograms:
    """Drops JAX's programs, and what it traced, between two tests.

    Attributes:
      limit: mappings above which programs are dropped.
      most_bytes: resident memory above which they are dropped.
      tests_between: tests from one count of the mappings to the next.
    """

    def __init__(self, limit: int, most_bytes: int, tests_between: int = TESTS_BETWEEN) -> None:
        self.limit = limit
        self.most_bytes = most_bytes
        self.tests_between = tests_between
        self.tests = 0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        self.tests += 1
        has_many = self.tests % self.tests_between == 0 and mappings() > self.limit
        if has_many or resident_bytes() > self.most_bytes:
            drop()
            self.most_bytes = max(self.most_bytes, resident_bytes() + LEAST_GROWTH)
