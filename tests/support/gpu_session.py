"""Hooks for tests on a GPU: a check of the device after each test, and a journal of the session.

A kernel that faults leaves its process without a usable device, and every later test in the
process would fail. After each test marked `gpu`, `_DeviceCheck` runs a small program; if the device
does not answer, the process ends. Under pytest-xdist, the test counts as failed and the remaining
tests run in a new process; without pytest-xdist, the session ends.

Before each such test, `fill_free_memory` leaves NaN and small integers in free device memory: a
result that depends on memory which nobody wrote is then wrong in every session.

`--journal FILE` makes the session write a line of JSON as each test starts and ends, for
`tools/gpu_tests.py`. Such a session runs the tests with the longest time limits first and the tests
marked `sanitizer` last. `--until` is the time, in seconds since the epoch, after which no test
starts.
"""

import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import pytest

#: What the report of a test says that did not start in time.
OUT_OF_TIME = "not started before --until"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU sessions")
    group.addoption("--journal", type=pathlib.Path, help="file for a line of JSON for each event")
    group.addoption("--until", type=float, help="time after which no test starts, in Unix seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_DeviceCheck(device_answers))
    if config.getoption("journal") is None:
        return
    config.pluginmanager.register(_Order(config))
    if not hasattr(config, "workerinput"):  # not a process of pytest-xdist's
        config.pluginmanager.register(_Journal(config.getoption("journal").open("a")))


def device_answers() -> bool:
    """Whether every device of the default backend still runs a program."""
    import jax

    try:
        for device in jax.local_devices():
            jax.block_until_ready(jax.device_put(1.0, device) + 1.0)
    except Exception as error:
        print(f"{type(error).__name__}: {error!s:.500}", file=sys.stderr)
        return False
    return True


#: Bytes of the arrays that `fill_free_memory` makes, and how many of each.
JUNK = {2**i: 8 for i in range(10, 25)} | {2**27: 1}


def fill_free_memory() -> None:
    """Fills memory that JAX holds and has not given to an array: half NaN, half small integers."""
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        return
    for device in jax.local_devices():
        words = jax.random.bits(jax.random.key(0, impl="rbg"), (max(JUNK) // 4,), "uint32")
        words = jax.device_put(jnp.where(words % 2, jnp.uint32(2**32 - 1), words % 4096), device)
        junk = [words[: size // 4].copy() for size, count in JUNK.items() for _ in range(count)]
        jax.block_until_ready(junk)


class _DeviceCheck:
    def __init__(self, answers: Callable[[], bool]) -> None:
        self.answers = answers

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("gpu") is not None:
            fill_free_memory()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if item.get_closest_marker("gpu") is None or self.answers():
            return result
        reason = f"the device does not answer after {item.nodeid}"
        if hasattr(item.config, "workerinput"):
            print(f"{reason}: this process ends", file=sys.stderr, flush=True)
            os._exit(3)
        pytest.exit(f"{reason}; later tests of this process would fail, too", returncode=3)


class _Order:
    def __init__(self, config: pytest.Config) -> None:
        until = config.getoption("until")
        self.until = float("inf") if until is None else float(until)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = in_order(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self.until:
            pytest.skip(OUT_OF_TIME)


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests with a time limit of their own first, then others, tests of the sanitizer last.

    pytest-xdist gives each process two consecutive tests at the start. So a test without a time
    limit of its own follows each test with one, as long as there are some.
    """
    late = [item for item in items if item.get_closest_marker("sanitizer")]
    early = [item for item in items if item not in late]
    long = sorted((item for item in early if _limit(item)), key=_limit, reverse=True)
    short = [item for item in early if not _limit(item)]
    pairs = itertools.zip_longest(long, short[: len(long)])
    mixed = [item for pair in pairs for item in pair if item is not None]
    return [*mixed, *short[len(long) :], *late]


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("time_limit")
    return float(marker.args[0]) if marker else 0.0


class _Journal:
    """Writes the events; the reader may stop at any time and knows what ran."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.is_collected = False

    def write(self, **event: Any) -> None:
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()

    def collected(self, ids: Sequence[str]) -> None:
        if not self.is_collected:
            self.write(collected=list(ids))
        self.is_collected = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collected(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # pytest-xdist's controller collects nothing
            self.collected([item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid, at=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(failed=report.nodeid, when=report.when, text=report.longreprtext)
        elif report.skipped and OUT_OF_TIME in report.longreprtext:
            self.write(out_of_time=report.nodeid)
        elif report.skipped:
            self.write(skipped=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(finished=nodeid, at=time.time())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(broken=report.nodeid, text=report.longreprtext)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(ended=int(exitstatus))

    def pytest_unconfigure(self) -> None:
        self.file.close()
