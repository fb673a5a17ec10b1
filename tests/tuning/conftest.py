"""What tests of the dispatch table and the tuner share."""

import pathlib
from collections.abc import Callable

import pytest

from ikbo_jax.tuning import table, user_cache


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of the tuning cache: not the one of whoever runs the tests."""
    directory = tmp_path / "cache"
    monkeypatch.setenv(user_cache.CACHE_DIR_VARIABLE, str(directory))
    return directory


@pytest.fixture
def cache_file(cache_dir: pathlib.Path) -> pathlib.Path:
    """The file of the tuning cache, whose folder is there."""
    cache_dir.mkdir()
    return cache_dir / "sm90.json"


@pytest.fixture
def builtin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the rows of sm90.json."""
    return lambda *rows: monkeypatch.setattr(table, "builtin_rows", lambda: rows)
