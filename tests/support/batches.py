"""Cases that share a program, since compiling it is what takes the time."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some_at_once(
    argument: str, cases: Iterable[Any], count: int, name: Callable[[Any], str] = str
) -> pytest.MarkDecorator:
    """Parametrises a test by tuples of at most `count` cases, which have their first one's name.

    All tuples but the first are slow tests.
    """
    batches = itertools.batched(cases, count)
    params = [
        pytest.param(batch, id=name(batch[0]), marks=[pytest.mark.slow] if n else [])
        for n, batch in enumerate(batches)
    ]
    return pytest.mark.parametrize(argument, params)
