"""What tests of the benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks import timing


@pytest.fixture(autouse=True)
def own_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results files name a commit that no test asks Git for."""
    monkeypatch.setenv(timing.COMMIT_VARIABLE, "0123456789abcdef")
