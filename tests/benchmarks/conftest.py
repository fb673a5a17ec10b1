"""What tests of the benchmarks share."""

import pathlib

import pytest

from benchmarks import timing


@pytest.fixture(autouse=True)
def own_commit_and_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results files name a commit that no test asks Git for; the tuning cache is nobody's."""
    monkeypatch.setenv(timing.COMMIT_VARIABLE, "0123456789abcdef")
    monkeypatch.setenv("IKBO_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # some commands set it: restore it
