"""Runs a sample of a parametrised test's cases: the first one and every N-th after it.

- `@pytest.mark.sampled(N)` marks a test of many configurations that each compile for seconds.
  `--all-cases` runs all of them.
- `--one-in N` samples every test, for another run of a suite that has run before: CI tests the
  newest JAX this way, where a change in JAX breaks most cases of a test at once.

Cases that the command line leaves out, by `-m`, `-k` or names of tests, are not counted. So a case
that it chooses alone always runs.
"""

from __future__ import annotations

import collections

import pytest

_MARKER = "sampled(n): only the first case and every n-th after it run, without --all-cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("samples of cases")
    group.addoption("--all-cases", action="store_true", help="run all cases of sampled tests")
    group.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run the first case of every parametrised test, and every N-th case after it",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    count = config.getoption("one_in")
    if count < 1:
        raise pytest.UsageError(f"--one-in is {count}, expected at least 1")
    config.pluginmanager.register(_CaseSample(count, config.getoption("all_cases")))


class _CaseSample:
    def __init__(self, count: int, all_cases: bool) -> None:
        self.count = count
        self.all_cases = all_cases

    def count_of(self, item: pytest.Item) -> int:
        marker = item.get_closest_marker("sampled")
        return self.count if marker is None or self.all_cases else max(self.count, *marker.args)

    # Last, after markers and -k have left cases out.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        seen: collections.Counter[str] = collections.Counter()
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            test = item.nodeid.partition("[")[0]
            (left_out if seen[test] % self.count_of(item) else kept).append(item)
            seen[test] += 1
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
