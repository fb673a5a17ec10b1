"""Chooses which of the collected tests run: samples of cases, and parts of the suite.

- `@pytest.mark.sampled(N)` marks a test of many configurations that each compile for seconds: its
  first case runs, and every N-th after it. `--all-cases` runs all of them.
- `--short` runs the short suite, unless the command names tests (paths or `-k`): then it runs all
  that it names. `--share 3/10` runs the third of ten shares of what the short suite leaves out.
- `--one-in N` samples every test, for another run of a suite that has run before: CI tests the
  newest JAX this way, where a change in JAX breaks most cases of a test at once.

`tests/shares.txt` names the tests that the short suite leaves out, in numbered shares of about
the same time; `tools/choose_tests.py` makes the file from measurements. A test that the file does
not name, such as a new one, belongs to the short suite.

Cases that the command line leaves out, by `-m`, `-k` or names of tests, are not counted. So a case
that it chooses alone always runs.
"""

import collections
import pathlib
import re
from collections.abc import Callable

import pytest

_MARKER = "sampled(n): only the first case and every n-th after it run, without --all-cases"
#: Below the folder in which pytest runs. Without this file, the short suite is the whole one.
SHARES = "tests/shares.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts of the suite")
    group.addoption("--short", action="store_true", help="run the short suite, as `make test` does")
    group.addoption("--share", metavar="K/N", help="run one share of what the short suite leaves")
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
    count, short, share = map(config.getoption, ("one_in", "short", "share"))
    if count < 1:
        raise pytest.UsageError(f"--one-in is {count}, expected at least 1")
    if short and share:
        raise pytest.UsageError(f"--short and --share={share} exclude each other")
    if short and is_selective(config):
        # The workers of pytest-xdist inherit the option, but not what the command named.
        config.option.short = False
    config.pluginmanager.register(
        _CaseSample(count, config.getoption("all_cases"), part_of(config))
    )


def is_selective(config: pytest.Config) -> bool:
    """Whether the command names tests: paths, or words by `-k`."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return named or bool(config.getoption("keyword"))


def read_shares(path: pathlib.Path) -> list[list[str]]:
    """Returns the tests of each share, in order; raises UsageError for a line outside a share."""
    shares: list[list[str]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line == f"[{len(shares) + 1}]":
            shares.append([])
        elif line and not line.startswith("#"):
            if not shares:
                raise pytest.UsageError(f"{path} names {line!r} before its first share, [1]")
            shares[-1].append(line)
    return shares


def numbered_share(text: str, count: int) -> int:
    """Returns the share's index, from 0, that "3/10" names; `count` is the number of shares."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) == count:
        raise pytest.UsageError(f"--share is {text}, expected 1/{count} to {count}/{count}")
    return int(found[1]) - 1


def part_of(config: pytest.Config) -> Callable[[str], bool]:
    """Returns whether a test of this name is in the part of the suite that the options name.

    Refuses a wrong number of a share, before any test runs.
    """
    short, share = config.getoption("short"), config.getoption("share")
    shares = read_shares(config.rootpath / SHARES) if short or share else []
    if share:
        return set(shares[numbered_share(share, len(shares))]).__contains__
    left_out = {name for share in shares for name in share}
    return lambda name: name not in left_out


class _CaseSample:
    def __init__(self, count: int, all_cases: bool, is_in_part: Callable[[str], bool]) -> None:
        self.count, self.all_cases, self.is_in_part = count, all_cases, is_in_part

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
        # Shares name cases that a marker lets run, so they are chosen after it.
        marked = [x for x in _sampled(items, self.marked) if self.is_in_part(x.nodeid)]
        kept = dict.fromkeys(_sampled(marked, self.one_in))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _sampled(items: list[pytest.Item], one_in: Callable[[pytest.Item], int]) -> list[pytest.Item]:
    """Returns the first case of each test, and every `one_in(item)`-th after it."""
    seen: collections.Counter[str] = collections.Counter()
    kept: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if seen[test] % one_in(item) == 0:
            kept.append(item)
        seen[test] += 1
    return kept
