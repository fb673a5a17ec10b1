"""Divides the tests: the short suite of `make test`, and shares of what it leaves out.

`tests/shares.txt` names the tests that the short suite leaves out, in numbered shares of about
the same time; `tools/choose_tests.py` makes the file from measurements. A test that the file does
not name, such as a new one, belongs to the short suite.

- `--short` runs the short suite, unless the command names tests (paths or `-k`): then it runs all
  that it names.
- `--share 3/10` runs the third of the ten shares.
"""

import pathlib
import re

import pytest

#: Below the folder in which pytest runs. Without this file, the short suite is the whole one.
SHARES = "tests/shares.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts of the suite")
    group.addoption("--short", action="store_true", help="run the short suite, as `make test` does")
    group.addoption("--share", metavar="K/N", help="run one share of what the short suite leaves")


def pytest_configure(config: pytest.Config) -> None:
    short, share = config.getoption("short"), config.getoption("share")
    if short and share:
        raise pytest.UsageError(f"--short and --share={share} exclude each other")
    if short and is_selective(config):
        # The workers of pytest-xdist inherit the option, but not what the command named.
        config.option.short = False
    if share:
        # Refuses a wrong number before any test runs.
        numbered_share(share, len(read_shares(config.rootpath / SHARES)))


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


def select(
    config: pytest.Config, items: list[pytest.Item]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the tests to run and those to leave out, by `--short` or `--share`."""
    short, share = config.getoption("short"), config.getoption("share")
    if not short and not share:
        return items, []
    shares = read_shares(config.rootpath / SHARES)
    if share:
        wanted = set(shares[numbered_share(share, len(shares))])
        return _parted(items, [item.nodeid in wanted for item in items])
    left_out = {name for share in shares for name in share}
    return _parted(items, [item.nodeid not in left_out for item in items])


def _parted(
    items: list[pytest.Item], kept: list[bool]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    pairs = list(zip(items, kept, strict=True))
    return [item for item, keep in pairs if keep], [item for item, keep in pairs if not keep]
