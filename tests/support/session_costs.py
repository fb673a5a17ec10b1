"""Prints at the end of a session what it cost: time by folder, slowest tests, largest process."""

import collections
import heapq
import pathlib
import resource
from typing import Any

import pytest

#: Tests that are listed at the end, and the seconds from which one is worth listing.
LISTED = 10
LEAST_SECONDS = 1.0

#: Where a process of pytest-xdist leaves its largest memory for the process that prints.
_MEMORY = "largest_memory_bytes"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SessionCosts())


def largest_memory_bytes() -> int:
    """The most memory that this process has held; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class SessionCosts:
    """Collects the seconds of each test and the largest memory of each process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.memory: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # setup, call and teardown, one by one

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_MEMORY] = largest_memory_bytes()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})  # none from a process that died
        if _MEMORY in output:
            self.memory[node.gateway.id] = output[_MEMORY]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if not self.seconds:
            return
        terminalreporter.section("costs")
        memory = self.memory or {"this process": largest_memory_bytes()}
        for line in described(self.seconds, memory):
            terminalreporter.write_line(line)
        if share := config.getoption("share", None):
            terminalreporter.write_line(f"share: SHARE={share}")


def described(seconds: dict[str, float], memory: dict[str, int]) -> list[str]:
    """Lines about the seconds of tests, by name, and the memory of processes, by name."""
    folders: dict[str, list[float]] = collections.defaultdict(list)
    for name, spent in seconds.items():
        folders[folder_of(name)].append(spent)
    lines = [f"{sum(seconds.values()):.0f} s in {len(seconds)} tests:"]
    for folder, times in sorted(folders.items(), key=lambda x: -sum(x[1])):
        lines.append(f"  {sum(times):7.1f} s  {folder}, {len(times)} tests")
    longest = heapq.nlargest(LISTED, seconds.items(), key=lambda x: x[1])
    slowest = [x for x in longest if x[1] >= LEAST_SECONDS]
    if slowest:
        lines.append("slowest:")
        lines += [f"  {spent:7.1f} s  {name}" for name, spent in slowest]
    largest = max(memory, key=memory.__getitem__)
    lines.append(f"largest process: {largest}, {memory[largest] / 1e9:.2f} GB")
    return lines


def folder_of(name: str) -> str:
    """The folder below tests/ that has a test, by the test's name."""
    parts = pathlib.PurePosixPath(name.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else "/".join(parts[:-1]) or "."
