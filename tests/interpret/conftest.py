"""The fixtures of all interpreted kernels."""

from collections.abc import Iterator

import interpreter
import pytest

from ikbo_jax.pallas.hopper import mosaic


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with mosaic.interpreted(interpreter.PARAMS):
        yield


@pytest.fixture
def launches() -> Iterator[interpreter.Launches]:
    """The launches of the test's kernels, as the race detector saw them."""
    with interpreter.watched() as launches:
        yield launches
