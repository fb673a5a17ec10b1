"""The fixture of all interpreted kernels."""

from collections.abc import Iterator

import interpreter
import pytest


@pytest.fixture
def launches() -> Iterator[interpreter.Launches]:
    """The launches of the test's kernels, as the race detector saw them."""
    with interpreter.watched() as launches:
        yield launches
