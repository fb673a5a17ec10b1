"""A time limit for every test: a test that takes longer ends its process and prints all stacks.

`time_limit` in `pyproject.toml` is the limit, `@pytest.mark.time_limit(seconds)` a test's own one.
Under pytest-xdist the test fails and the other tests go on in a new process.

The watchdog is faulthandler's: it works while a thread holds the interpreter's lock, it needs no
plugin, which a GPU machine may lack, and pytest-xdist shows the stacks.  The watchdog of
pytest-timeout is a Python thread, and pytest-xdist loses the stacks that it prints.
"""

import faulthandler
import os
from collections.abc import Iterator

import pytest

_MARKER = "time_limit(seconds): a test's own time limit; 0: none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("time_limit", "seconds that a test may take; 0: any time", default="0")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.pluginmanager.register(_TimeLimit(config))


class _TimeLimit:
    def __init__(self, config: pytest.Config) -> None:
        self.seconds = float(config.getini("time_limit"))
        self.stderr = os.dup(2)  # later, a test's output is captured

    # First, so that the limit holds for what other hooks do around a test, too.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("time_limit")
        seconds = float(marker.args[0]) if marker else self.seconds
        if seconds > 0:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_unconfigure(self) -> None:
        os.close(self.stderr)
