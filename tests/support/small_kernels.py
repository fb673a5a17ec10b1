"""Lets kernels run problems that are so small that the cost model leaves them to XLA."""

import math

import pytest

from ikbo_jax.problems import packed_cost, problem
from ikbo_jax.tuning import table


def prefer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes XLA the last choice for linear compression; rankings are not kept meanwhile."""
    monkeypatch.setattr(packed_cost, "estimated_xla_us", lambda sizes: math.inf)
    uncached = problem.ranked.__wrapped__
    for module in (problem, table):
        monkeypatch.setattr(module, "ranked", uncached)
