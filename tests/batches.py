"""Cases that share a program, since compiling it is what takes the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some_at_once(
    argument: str, cases: Iterable[Any], count: int, name: Callable[[Any], str] = str
) -> pytest.MarkDecorator:
    """Parametrises a test by tuples of at most `count` cases, which have their first one's name."""
    batches = list(itertools.batched(cases, count))
    return pytest.mark.parametrize(argument, batches, ids=lambda batch: name(batch[0]))
