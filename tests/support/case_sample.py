"""Chooses which of the collected tests run: samples of cases, and parts of the suite.

- `@pytest.mark.sampled(N)` marks a test of many configurations that each compile for seconds: its
  first case runs, and every N-th after it. `--all-cases` runs all of them.
- `--short` and `--share` choose a part of the suite (`suites.py`).
- `--one-in N` samples every test, for another run of a suite that has run before: CI tests the
  newest JAX this way, where a change in JAX breaks most cases of a test at once.

Cases that the command line leaves out, by `-m`, `-k` or names of tests, are not counted. So a case
that it chooses alone always runs.
"""

import collections
from collections.abc import Callable

import pytest
import suites

_MARKER = "sampled(n): only the first case and every n-th after it run, without --all-cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    suites.pytest_addoption(parser)
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
    suites.pytest_configure(config)
    config.pluginmanager.register(_CaseSample(count, config.getoption("all_cases")))


class _CaseSample:
    def __init__(self, count: int, all_cases: bool) -> None:
        self.count = count
        self.all_cases = all_cases

    def marked(self, item: pytest.Item) -> int:
        """One in how many cases of the test its marker lets run."""
        marker = item.get_closest_marker("sampled")
        return 1 if marker is None or self.all_cases else marker.args[0]

    def one_in(self, item: pytest.Item) -> int:
        """One in how many of the remaining cases `--one-in` lets run."""
        return -(-self.count // self.marked(item))

    # Last, after markers and -k have left cases out.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept, unmarked = _sampled(items, self.marked)
        # Shares name cases that a marker lets run, so they are chosen after it.
        kept, others = suites.select(config, kept)
        kept, unsampled = _sampled(kept, self.one_in)
        items[:] = kept
        config.hook.pytest_deselected(items=[*unmarked, *others, *unsampled])


def _sampled(
    items: list[pytest.Item], one_in: Callable[[pytest.Item], int]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the first case of each test with every `one_in(item)`-th after it, and the others."""
    seen: collections.Counter[str] = collections.Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if seen[test] % one_in(item) else kept).append(item)
        seen[test] += 1
    return kept, left_out
